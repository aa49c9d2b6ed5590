#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What serving costs and bears: the server on loopback, beside the bare engine.

  tests/bench/serving.py [options] BENCHMARK...

  saturation  images per second of the server, as a share of the bare engine's, taken in turns.
              The client, which stands for other machines, has the last --client-cores to itself;
              server and bare engine have the others
  batching    batching of steps beside batching of requests, on the same trace: requests of 4 to 50
              steps at 80 % of what the server can do
  overhead    CPU time of server and client for a unary request of the smallest model, beyond the
              time that the engine alone takes
  http        CPU time of the server for a unary request over HTTP, in our JSON, OpenAI's and as a
              form, beyond that of the same request over gRPC, in turns; without and with an upload
  event-streams
              500 streams of events with previews over HTTP at once, a quarter of the readers slow:
              no error, and no memory that stays
  streams     1,000 streams at any time, without an error
  storm       10,000 requests cancelled at random moments: nothing stays behind, and the survivors'
              images are those of an idle server
  start       from the start of the process until it serves, graphs captured and warmed, for two
              models with random weights
  soak        20 minutes at saturation: how many bytes more than after the first quarter an idle server
              has allocated at the end, an image. The trend of resident memory is printed, not judged

Prints a line for each figure and exits with 1 when one misses its target. Nothing else should run
on the machine; the load average at the start is printed. --json writes the raw figures, as they lie in
docs/benchmarks; make_tables.py makes the tables of docs/benchmarks.md.

docs/http.md has the tables of http and event-streams.

Build first: scripts/build -DDENOISED_BUILD_TESTS=ON release denoised denoise engine-throughput \\
synthetic-model"""

import argparse
import asyncio
import base64
import contextlib
import datetime
import http.client
import itertools
import json
import os
import pathlib
import random
import re
import shlex
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "server"))
from free_port import free_port

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SMALLEST = ROOT / "tests/models/goldens/run_edm_euler"  # 8 x 8 pixels, 18,521 weights
CONFIGS = ROOT / "tests/models/configs"
START_SECONDS = {"cifar10-32": 3, "adm-64": 6}  # what start allows a GPU
HEAP_BYTES_AN_IMAGE = 2  # what soak allows


def on(cores):
    """For preexec_fn: a process that runs on these cores alone, or on all where there are none."""
    return (lambda: os.sched_setaffinity(0, cores)) if cores else None


class Server:
    """denoised with one model, ready to serve; stopped with SIGTERM at the end. `apart`: it and
    the client have cores of their own."""

    def __init__(self, options, model, *flags, environment=None, apart=False):
        self.address = f"127.0.0.1:{free_port()}"
        self.http = f"127.0.0.1:{free_port()}"
        self.metrics = f"127.0.0.1:{free_port()}"
        self.options = options
        self.client_cores = options.client_cores if apart else None
        self.log = open(options.work / "denoised.log", "ab")
        command = [options.denoised, "--model", f"model={model}", "--listen", self.address]
        command += ["--http-listen", self.http, "--metrics-listen", self.metrics, "--device", options.device]
        command += ["--max-queued-images", "100000", *flags, *options.server_flag]
        self.started = datetime.datetime.now(datetime.timezone.utc)
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log,
                                        env=os.environ | (environment or {}),
                                        preexec_fn=on(options.server_cores if apart else None))
        health = subprocess.Popen(
            [options.denoise, "health", "--wait", "120", "--server", self.address],
            stdout=self.log, stderr=self.log)
        while health.poll() is None and self.process.poll() is None:
            time.sleep(0.02)
        if health.poll() != 0:  # or the server has ended, and nobody need wait for it
            health.kill()
            health.wait()
            self.process.kill()
            self.process.wait()
            sys.exit(f"the server is not ready; see {self.log.name}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=120)
        self.log.close()

    def bench(self, *flags, environment=None, trusted=True):
        """What `denoise bench` with these flags found; `trusted`: it must end well."""
        result = subprocess.run(
            [self.options.denoise, "bench", "--server", self.address, "--json", "-", *flags],
            stdout=subprocess.PIPE, env=os.environ | (environment or {}), check=trusted, text=True,
            preexec_fn=on(self.client_cores))
        return json.loads(result.stdout)

    def seconds_to(self, event):
        """From before the start of the process to the latest line of its log with this event."""
        lines = pathlib.Path(self.log.name).read_text().splitlines()
        line = [line for line in lines if re.match(rf"\S+ info +{event}\b", line)][-1]
        time_of_day = datetime.datetime.fromisoformat(line.split()[0].replace("Z", "+00:00"))
        return (time_of_day - self.started).total_seconds()

    def cpu_seconds(self):
        """Of all its threads. /proc counts in ticks of 10 ms, this clock of the process in ns."""
        return time.clock_gettime(~self.process.pid << 3 | 2)

    def resident_kib(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"^VmRSS:\s*(\d+)", status, re.MULTILINE)[1])

    def metric(self, name):
        """Sum over its labels; `name` is a regular expression."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics") as page:
            text = page.read().decode()
        found = re.findall(rf"^(?:{name})(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        if not found:
            sys.exit(f"the server has no metric {name}")
        return sum(float(value) for value in found)

    def wait_for_none(self):
        """Images that are inside when none is or when five seconds have passed: the last cancels
        may be on their way."""
        for _ in range(50):
            inside = self.metric("denoised_(?:active|queued)_images")
            if inside == 0:
                break
            time.sleep(0.1)
        return inside


def engine(options, model, *flags, environment=None, cores=None):
    result = subprocess.run(
        [options.engine_throughput, f"--model={model}", f"--device={options.device}", *flags],
        stdout=subprocess.PIPE, env=os.environ | (environment or {}), check=True, text=True,
        preexec_fn=on(cores))
    return json.loads(result.stdout)


FIGURES = {}  # raw, by benchmark: for --json


def report(name, value, target, met):
    print(f"{name:<28}{value:<72} {'met' if met else 'MISSED'} ({target})", flush=True)
    return met


def saturation(options):
    in_flight = 2 * options.batch
    rows = f"{options.batch}"
    engines, servers = [], []
    for _ in range(options.rounds):
        engines.append(engine(
            options, options.model, f"--steps={options.steps}", f"--in-flight={in_flight}",
            f"--max-rows={rows}", f"--seconds={options.seconds}", f"--warm-up={options.warm_up}",
            cores=options.server_cores)["images_per_second"])
        with Server(options, options.model, "--max-rows", rows, apart=True) as server:
            before = server.cpu_seconds()
            found = server.bench("-c", f"{in_flight}", "-d", f"{options.seconds}", "--warm-up",
                                 f"{options.warm_up}", "-x", f"steps={options.steps}",
                                 "--connections", "4")
            spent = server.cpu_seconds() - before
        assert found["failed"] == 0, found["errors"]
        servers.append(found["images_per_second"])
        print(f"  engine {engines[-1]:.2f}, server {servers[-1]:.2f} images/s; CPU time an image: "
              f"server {1e3 * spent / found['images']:.2f} ms, client "
              f"{1e3 * found['client_cpu_seconds'] / found['images']:.2f} ms", flush=True)
    bare, served = statistics.median(engines), statistics.median(servers)
    FIGURES["saturation"] = {"engine_images_per_second": engines,
                             "server_images_per_second": servers}
    return report("saturation", f"{served:.2f} of {bare:.2f} images/s: {served / bare:.1%}",
                  ">= 97 %", served / bare >= 0.97)


def batching(options):
    # A fifth has previews, as in scheduling-bench: with previews of all, encoding them is the limit.
    steps = "steps=4..50,priority=interactive"
    mix = ("-x", f"{steps},previews=1", "-x", f"{steps},weight=4", "--connections", "4")
    rows = ("--max-rows", f"{options.batch}")
    warm_up = ("--warm-up", f"{options.warm_up}", "-d", f"{options.seconds}")
    with Server(options, options.model, *rows, apart=True) as server:
        peak = server.bench("-c", f"{2 * options.batch}", *warm_up, *mix)["images_per_second"]
    found = {}
    for mode in ("step", "request"):
        with Server(options, options.model, *rows, f"--batching={mode}", apart=True) as server:
            found[mode] = server.bench("-r", f"{0.8 * peak}", *warm_up, *mix)
            for bulky in ("image_hashes", "image_differences"):
                found[mode].pop(bulky, None)
            evaluation = (server.metric("denoised_evaluation_seconds_sum") /
                          server.metric("denoised_evaluation_seconds_count"))
            preview = (found[mode]["first_preview_seconds"]["mean"] -
                       found[mode]["queued_seconds"]["mean"]) / evaluation
        print(f"  by {mode}: p50 {found[mode]['latency_seconds']['p50']:.3f} s, p99 "
              f"{found[mode]['latency_seconds']['p99']:.3f} s, "
              f"{found[mode]['images_per_second']:.2f} images/s; first preview {preview:.1f} "
              "evaluations after the queue, on average", flush=True)
        if mode == "step":
            first = preview
    FIGURES["batching"] = found | {"peak_images_per_second": peak,
                                   "first_preview_evaluations": first}
    p99 = [found[mode]["latency_seconds"]["p99"] for mode in ("step", "request")]
    rate = [found[mode]["images_per_second"] for mode in ("step", "request")]
    good = p99[0] <= 0.5 * p99[1] and rate[0] >= rate[1] and first < 3
    return report("step batching", f"p99 {p99[0] / p99[1]:.2f} x, throughput "
                  f"{rate[0] / rate[1]:.2f} x, first preview {first:.1f} evaluations",
                  "<= 0.5, >= 1, < 3", good)


def overhead(options):
    # Threads that wait for each other by spinning would count as work.
    alone = {"OMP_NUM_THREADS": "1"}
    bare = engine(options, SMALLEST, "--steps=1", "--in-flight=1", "--seconds=5",
                  environment=alone)["cpu_seconds_per_image"]
    requests = 5000
    with Server(options, SMALLEST, environment=alone) as server:
        flags = ("--unary", "-c", "1", "-x", "steps=1", "--warm-up", "0")
        server.bench(*flags, "-n", "500")
        before = server.cpu_seconds()
        found = server.bench(*flags, "-n", f"{requests}")
        spent = (server.cpu_seconds() - before) / requests
    client = found["client_cpu_seconds"] / requests
    extra = spent + client - bare
    FIGURES["overhead"] = {"server_cpu_seconds": spent, "client_cpu_seconds": client,
                           "engine_cpu_seconds": bare}
    return report("CPU time a unary request",
                  f"{1e3 * extra:.3f} ms = server {1e3 * spent:.3f} + client {1e3 * client:.3f} - "
                  f"engine {1e3 * bare:.3f}", "<= 0.5 ms", extra <= 0.5e-3)


def padded_png(size):
    """An 8 x 8 picture of `size` bytes, most of them in a chunk that decoders skip: how long an upload
    takes to decode is none of this benchmark's business."""
    def chunk(kind, data):
        return (struct.pack(">I", len(data)) + kind + data +
                struct.pack(">I", zlib.crc32(kind + data)))

    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">2I5B", 8, 8, 8, 0, 0, 0, 0))
    rest = chunk(b"IDAT", zlib.compress(bytes(8 * 9))) + chunk(b"IEND", b"")
    padding = random.Random(1).randbytes(size - len(head) - len(rest) - 12)
    return head + chunk(b"prVt", padding) + rest


def http_requests(size):
    """By door: a path, a body and its type; the message itself for gRPC."""
    image = padded_png(size) if size else b""
    text = base64.b64encode(image).decode()
    params = {"steps": 1} | ({"init_image": {"encoded": text, "strength": 1}} if size else {})
    message = json.dumps({"params": params})
    sys.path.insert(0, str(ROOT / "client/python/src"))
    from denoised.v1 import image_generation_pb2  # the stubs of the Python client
    from google.protobuf import json_format
    wire = json_format.Parse(message, image_generation_pb2.GenerateRequest()).SerializeToString()
    fields = {"prompt": "", "denoised": {"steps": 1} | ({"strength": 1} if size else {})}
    if not size:
        return {"gRPC": wire, "JSON": ("/v1/generate", message, "application/json"),
                "OpenAI, JSON": ("/v1/images/generations", json.dumps(fields), "application/json")}
    form = b"".join(b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % part for part in
                    ((b"prompt", b""), (b"denoised", json.dumps(fields["denoised"]).encode())))
    form += (b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n'
             b"Content-Type: image/png\r\n\r\n" + image + b"\r\n--b--\r\n")
    images = {"images": [{"image_url": "data:image/png;base64," + text}]}
    return {"gRPC": wire, "JSON": ("/v1/generate", message, "application/json"),
            "OpenAI, JSON": ("/v1/images/edits", json.dumps(fields | images), "application/json"),
            "OpenAI, form": ("/v1/images/edits", form, "multipart/form-data; boundary=b")}


def over_http(options):
    try:
        import grpc
    except ImportError:
        sys.exit("http needs python3-grpcio and python3-protobuf")
    rows = []
    with Server(options, SMALLEST, environment={"OMP_NUM_THREADS": "1"}) as server, \
            grpc.insecure_channel(server.address) as channel:
        connection = http.client.HTTPConnection(server.http, timeout=60)
        generate = channel.unary_unary("/denoised.v1.ImageGeneration/Generate")

        def ask(request, count):
            """CPU seconds of the server for a request."""
            before = server.cpu_seconds()
            for _ in range(count):
                if isinstance(request, bytes):
                    generate(request)
                    continue
                path, body, kind = request
                connection.request("POST", path, body, {"Content-Type": kind})
                reply = connection.getresponse()
                text = reply.read()
                if reply.status != 200:
                    sys.exit(f"{path}: {reply.status} {text[:200]}")
            return (server.cpu_seconds() - before) / count

        for size in (0, 10_000, 100_000, 1_000_000):
            requests = http_requests(size)
            count = options.requests // (4 if size >= 1_000_000 else 1)
            found = {door: [] for door in requests}
            for request in requests.values():
                ask(request, max(20, count // 10))
            for turn in range(options.rounds):
                # In turns, each time from another door on, so that none has the better moments.
                doors = list(requests)
                for door in doors[turn % len(doors):] + doors[:turn % len(doors)]:
                    found[door].append(ask(requests[door], count))
            rows.append({"upload_bytes": size, "requests": count, "cpu_seconds": found})
        connection.close()
    good = True
    for row in rows:
        spent = row["cpu_seconds"]
        for door in list(spent)[1:]:
            extra = statistics.median(a - b for a, b in zip(spent[door], spent["gRPC"]))
            good &= report(f"{row['upload_bytes']} bytes, {door}",
                           f"{1e3 * extra:+.3f} ms beyond gRPC's "
                           f"{1e3 * statistics.median(spent['gRPC']):.3f}", "<= 0.3 ms", extra <= 0.3e-3)
    FIGURES["http"] = {"rounds": options.rounds, "rows": rows}
    return good


def event_streams(options):
    body = b'{"params": {"steps": 20}, "preview": {}}'
    request = (b"POST /v1/generate?stream=true HTTP/1.1\r\nHost: localhost\r\n"
               b"Content-Type: application/json\r\nConnection: close\r\n"
               b"Content-Length: %d\r\n\r\n" % len(body)) + body

    async def stream(port, slow):
        """Slow readers take 1 KiB every 20 ms, into small buffers."""
        found = socket.socket()
        found.setblocking(False)
        if slow:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(found, ("127.0.0.1", port))
        await loop.sock_sendall(found, request)
        text = b""
        while piece := await loop.sock_recv(found, 1024 if slow else 1 << 16):
            text += piece
            if slow:
                await asyncio.sleep(0.02)
        found.close()
        return (text.count(b"event: completed"), text.count(b"event: error"),
                text.count(b"event: preview"), text.count(b"\nevent: "))

    async def streams_at_once(port):
        return await asyncio.gather(*(stream(port, i % 4 == 0) for i in range(500)))

    rounds = []
    with Server(options, options.model, "--max-streams-per-client", "1000") as server:
        port = int(server.http.rsplit(":", 1)[1])
        for _ in range(options.stream_rounds):
            before = server.cpu_seconds()
            completed, errors, previews, events = map(
                sum, zip(*asyncio.run(streams_at_once(port))))
            server.wait_for_none()
            rounds.append({"completed": completed, "errors": errors, "previews": previews,
                           "events": events, "resident_kib": server.resident_kib(),
                           "heap_bytes": server.metric("denoised_heap_bytes"),
                           "cpu_seconds": server.cpu_seconds() - before})
            print(f"  {rounds[-1]}", flush=True)
    # The first quarter warms up. Heap bytes left by an event, fitted over the rest.
    steady = rounds[len(rounds) // 4:]
    sent = list(itertools.accumulate(each["events"] for each in steady))
    rise, error = slope([(60 * x, each["heap_bytes"]) for x, each in zip(sent, steady)])
    half = len(steady) // 2
    first, second = (statistics.fmean(each["resident_kib"] for each in some)
                     for some in (steady[:half], steady[-half:]))
    good = all((each["completed"], each["errors"]) == (500, 0) for each in rounds)
    FIGURES["event_streams"] = {"streams": 500, "slow": 125, "model": options.model.name,
                                "rounds": rounds, "heap_bytes_per_event": rise, "error": error,
                                "resident_kib_halves": [first, second]}
    return report("500 event streams",
                  f"{sum(each['completed'] for each in rounds)} completed, heap {rise:+.1f} +- "
                  f"{error:.1f} bytes an event, resident {first / 1024:.1f} and {second / 1024:.1f} MiB",
                  "no error, <= 20 bytes an event", good and rise + 2 * error <= 20)


def streams(options):
    with Server(options, SMALLEST) as server:
        found = server.bench("-c", "1000", "-n", "5000", "-x", "steps=10,previews=2",
                             "--connections", "10", "--warm-up", "2", trusted=False)
    FIGURES["streams"] = found
    return report("1,000 streams", f"{found['succeeded']} succeeded, {found['failed']} failed, p99 "
                  f"{found['latency_seconds']['p99']:.2f} s", "no error", found["failed"] == 0)


def storm(options):
    trace, first = options.work / "storm.jsonl", options.work / "storm.json"
    with Server(options, SMALLEST) as server:
        places = ("-c", "200", "--warm-up", "0", "--connections", "10")
        usual = server.bench(*places, "-n", "600", "-x", "steps=4..50")["latency_seconds"]["p50"]
        found = server.bench(*places, "-n", "16000", "-x",
                             f"name=cancelled,weight=11,steps=4..50,cancel=0..{usual / 2:.4f}",
                             "-x", "name=survivor,steps=4..50", "--save-trace", trace,
                             trusted=False)
        first.write_text(json.dumps(found))
        inside = server.wait_for_none()
    survivors = [json.loads(line) for line in trace.read_text().splitlines()]
    survivors = [line for line in survivors if line["name"] == "survivor"]
    idle = options.work / "idle.jsonl"
    idle.write_text("".join(json.dumps(line | {"at_seconds": 0.02 * i}) + "\n"
                            for i, line in enumerate(survivors[:400])))
    with Server(options, SMALLEST) as server:
        compared = server.bench("--trace", idle, "--compare", first, trusted=False)
    kept = found["kinds"]["survivor"]
    differ = len(compared["image_differences"])
    FIGURES["storm"] = {"cancelled": found["cancelled"], "failed": found["failed"],
                        "left_inside": inside, "survived": kept["succeeded"],
                        "compared": compared["images_compared"], "differ": differ}
    good = (found["cancelled"] >= 10_000 and found["failed"] == 0 and inside == 0 and
            compared["failed"] == 0 and 0 < compared["images_compared"] == len(survivors[:400]) and
            differ == 0)
    return report("cancel storm",
                  f"{found['cancelled']} cancelled, {kept['succeeded']} survived, "
                  f"{inside:.0f} left inside, {differ} of {compared['images_compared']} differ",
                  ">= 10,000; 0; 0", good)


def start(options):
    good = True
    FIGURES["start"] = []
    for config, limit in START_SECONDS.items():
        model = options.work / config
        subprocess.run([options.synthetic_model, CONFIGS / config / "config.json", model],
                       check=True)
        weights = (model / "diffusion_pytorch_model.safetensors").stat().st_size
        for rows in ("0", "2"):  # all row buckets, and the fewest
            flags = ("--max-rows", rows, "--autotune-cache", options.work / f"{config}-{rows}")
            runs = []
            for _ in range(options.rounds):
                with Server(options, model, *flags) as server:
                    runs.append([server.seconds_to(event)
                                 for event in ("listening", "model ready", "serving")])
            FIGURES["start"].append({
                "model": config, "max_rows": int(rows), "weights_bytes": weights,
                "runs": [dict(zip(("listening_seconds", "model_ready_seconds", "serving_seconds"),
                                  run)) for run in runs]})
            for name, some in (("first start, kernels measured", runs[:1]), ("later", runs[1:])):
                if some:
                    listening, ready, serving = map(statistics.median, zip(*some))
                    print(f"  {config}, --max-rows {rows}, {name}: device open after "
                          f"{listening:.2f} s, model of {weights >> 20} MiB after {ready:.2f}, "
                          f"serving after {serving:.2f}", flush=True)
            if rows == "0":
                first = runs[0][-1]
                good &= report(f"start, {config}", f"{first:.2f} s", f"<= {limit} s",
                               first <= limit)
    return good


def slope(samples):
    """KiB per minute and its standard error, by least squares over (seconds, KiB)."""
    xs, ys = [x / 60 for x, _ in samples], [y for _, y in samples]
    x_mean, y_mean = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    rise = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys)) / spread
    residue = sum((y - y_mean - rise * (x - x_mean)) ** 2 for x, y in zip(xs, ys))
    return rise, (residue / (len(xs) - 2) / spread) ** 0.5


def soak(options):
    samples, idle, images, failed = [], [], 0, 0
    begin = time.monotonic()

    def sample(server):
        samples.append({"seconds": round(time.monotonic() - begin, 1), "images": images,
                        "resident_kib": server.resident_kib(),
                        "heap_kib": round(server.metric("denoised_heap_bytes") / 1024)})
        return samples[-1]

    with Server(options, options.soak_model) as server:
        # The first quarter warms up. What is left shows when the server is idle, after each.
        for _ in range(4):
            seconds = 15 * options.minutes
            bench = subprocess.Popen(
                [options.denoise, "bench", "--server", server.address, "--json",
                 options.work / "soak.json", "-c", "64", "-d", f"{seconds}", "--connections", "4",
                 "-x", "steps=4..50,previews=4", "-x", "steps=10,weight=0.2,cancel=0..1",
                 "-x", "steps=10,count=4,weight=0.2"], stdout=subprocess.DEVNULL)
            while bench.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    bench.wait(timeout=min(5, seconds / 15))
                if bench.poll() is None:
                    sample(server)
            found = json.loads((options.work / "soak.json").read_text())
            images += found["images"]
            failed += found["failed"]
            server.wait_for_none()
            idle.append(sample(server) | {"images": images})
    steady = [each for each in samples if each["seconds"] > idle[0]["seconds"]]
    rise, error = slope([(each["seconds"], each["resident_kib"]) for each in steady])
    left = 1024 * (idle[-1]["heap_kib"] - idle[0]["heap_kib"]) / (images - idle[0]["images"])
    FIGURES["soak"] = {"minutes": options.minutes, "images": images, "failed": failed,
                       "kib_per_minute": rise, "error": error, "idle": idle, "samples": samples}
    for what in ("resident_kib", "heap_kib"):
        print(f"  {what} of the idle server after each quarter: "
              f"{', '.join(str(each[what]) for each in idle)}", flush=True)
    return report(f"soak, {options.minutes:g} minutes",
                  f"{images} images, {failed} failed; {left:+.2f} bytes an image, "
                  f"{steady[0]['resident_kib'] / 1024:.1f} MiB, {rise:+.1f} +- {error:.1f} KiB/min",
                  f"no error, <= {HEAP_BYTES_AN_IMAGE} bytes an image", failed == 0 and left <= HEAP_BYTES_AN_IMAGE)


def write_figures(options):
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True,
                         text=True, check=False)
    device = f"CPU, {os.cpu_count()} cores"
    if options.device != "cpu":
        with contextlib.suppress(OSError):
            name = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
                                  capture_output=True, text=True, check=False).stdout
            device = name.splitlines()[0] if name else device
    context = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
               "commit": options.commit or git.stdout.strip() or None,
               "command": shlex.join(["tests/bench/serving.py", *sys.argv[1:]]),
               "rounds": options.rounds,
               "device": device, "cores": os.cpu_count(),
               "load_average": options.load_average, "peers": {}}
    options.json.write_text(json.dumps({"context": context, "figures": FIGURES}, indent=1) + "\n")


BENCHMARKS = {f.__name__: f for f in (saturation, batching, overhead, streams, storm, start, soak)}
BENCHMARKS["http"] = over_http
BENCHMARKS["event-streams"] = event_streams


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="+", choices=BENCHMARKS, metavar="BENCHMARK")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--denoised", help="another server than the build's")
    parser.add_argument("--server-flag", action="append", default=[], help="a flag for the server")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models/mnist-32",
                        help="of the first two: a directory, or a config.json (random weights)")
    parser.add_argument("--steps", type=int, default=18, help="of saturation")
    parser.add_argument("--batch", type=int, default=64, help="of the first two: rows")
    parser.add_argument("--seconds", type=float, default=20, help="of the first two, a round")
    parser.add_argument("--warm-up", type=float, default=5, help="of the first two, seconds")
    parser.add_argument("--rounds", type=int, default=3, help="of saturation, start and http")
    parser.add_argument("--requests", type=int, default=400, help="of http, of a round and a door")
    parser.add_argument("--stream-rounds", type=int, default=12, help="of event-streams")
    parser.add_argument("--client-cores", type=int, metavar="N",
                        help="of the first two: cores for the client alone; default: an eighth, at "
                        "least one. 0: it shares those of the server")
    parser.add_argument("--minutes", type=float, default=20, help="of soak")
    parser.add_argument("--soak-model", type=pathlib.Path, default=SMALLEST)
    parser.add_argument("--json", type=pathlib.Path, help="a file for the raw figures")
    parser.add_argument("--commit", help="what was built, where there is no git")
    options = parser.parse_args()

    def program(path):  # in a build, or in a folder of programs, as pack.sh makes one
        path = options.build / path
        return path if path.exists() else options.build / path.name

    options.denoised = options.denoised or program("server/denoised")
    options.denoise = program("client/denoise")
    options.synthetic_model = program("tests/bench/synthetic-model")
    options.engine_throughput = program("tests/bench/engine-throughput")
    for program in (options.denoised, options.denoise, options.synthetic_model,
                    options.engine_throughput):
        if not os.access(program, os.X_OK):
            parser.error(f"there is no {program}; build first, as --help says, or let --build name "
                         "another build")
    cores = sorted(os.sched_getaffinity(0))
    clients = options.client_cores
    clients = max(1, len(cores) // 8) if clients is None else min(clients, len(cores) - 1)
    options.server_cores = cores[:len(cores) - clients]
    options.client_cores = cores[len(cores) - clients:]
    options.load_average = os.getloadavg()[0]  # before the benchmarks add their own
    print(f"{len(cores)} cores, load average {options.load_average:.1f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="denoised-serving-") as work:
        options.work = pathlib.Path(work)
        if options.model.is_file():
            directory = options.work / "model"
            subprocess.run([options.synthetic_model, options.model, directory], check=True)
            options.model = directory
        met = []
        for name in options.benchmarks:
            met.append(BENCHMARKS[name](options))
            if options.json:  # after each, in case a later one fails
                write_figures(options)
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
