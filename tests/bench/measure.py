#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures denoised beside its peers on one GPU, in turns, and writes the raw figures as JSON.

  tests/bench/measure.py [options] TOPIC...

  models   evaluations of UNets beside torch.compile, its forward captured in one CUDA graph; then,
           as far as time allows, beside torch.compile with mode max-autotune
  latent   the same of Stable Diffusion's UNets and of decoders, without max-autotune
  train    steps of training beside torch.compile's, all of a step in one CUDA graph; denoised's
           memory and first step before anything else is on the GPU
  train-cpu  a step of training mnist-32 on a CPU in float32 beside PyTorch, with torch.compile and
           without, in both layouts
  memory   device memory of the evaluations of models. Nothing else may be on the GPU
  digits   16 guided digits: whole requests and their evaluations beside PyTorch; also on a CPU
  ops      single ops beside cuDNN, cuBLAS, cuBLASLt, SDPA and torch.compile
  train-ops  single backward ops beside cuDNN, SDPA, torch.compile and a copy
  clocks   one convolution of cuDNN, timed in several ways: after rest and after work, on zeros, …
  portable the kernels for every GPU beside those for Hopper
  fp8      evaluations of UNets in FP8 beside bf16
  fp8-ops  convolutions in FP8 beside bf16, linear layers in FP8 beside cuBLASLt
  system   start, loading of weights, two models at a time, splits, serving: denoised alone
  scheduling  batching by step and by request on a simulated device; needs no GPU

Whole text-to-image pipelines with random weights, served (pipelines.py); each takes about a minute:

  sd15 sd15-fp8 sdxl sdxl-fp8 sdxl-lcm sd-turbo sd-turbo-tiny
                images per second of a full queue; fp8: in that precision; tiny: its VAE
  sdxl-mixed    rows and pixels per second of a queue of six sizes, each with six samplers, guidance
                scales and numbers of steps, beside a uniform one; device memory before and after
  sd15-request  one request at an idle server, until its first preview and its PNG, beside PyTorch
                (peer_pipeline.py), which takes two minutes more to compile
  sd15-sd-cpp   one request at an idle server, beside stable-diffusion.cpp (peer_sd_cpp.py, --sd-cli)
  sdxl-start    from the start of the process until it serves
  emoji-cpu     one picture of models/emoji-64 on two cores, with --device=cpu
  latent-errors not served: errors in bf16 of text encoders, UNets, autoencoders and images, denoised's and
                diffusers' (peer_errors.py)

Each topic writes OUT/TOPIC.json as it goes, so that what was measured before --seconds ran out is
kept. docs/benchmarks/ holds such files; make_tables.py makes the tables of docs/benchmarks.md. Figures
of a second run go beside the first as TOPIC-2.json: --without leaves out the ops that the first has done.

A row is measured in rounds: denoised, peer, peer, denoised, denoised, peer, … A ratio is the median
over the rounds of the peer's time over denoised's. Compiling comes first, in processes side by side;
nothing else runs while one measures. SM clock, power and temperature are logged meanwhile
(nvidia-smi).

Needs Python with PyTorch for CUDA and, for models and digits, diffusers; for ops and train-ops also
nvidia-cudnn-frontend, without which cuDNN is what PyTorch takes of it. Build first:
scripts/build -DDENOISED_BUILD_TESTS=ON release denoised denoise denoised-bench backend-throughput \\
cublaslt-search splits-bench engine-throughput synthetic-model model-outputs scheduling-bench train-bench \\
training-throughput"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import pipelines
from cpu_rows import cpu_name
from make_tables import searched_whole
from turns import GpuLog, Worker, alternate

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CONFIGS = ROOT / "tests/models/configs"
MODEL_ROWS = "cifar10-32:1:16:64:256,adm-64:1:64,celebahq-256:16"
# The most important first: those where max-autotune has been faster than torch.compile as it is.
# Each takes three to seven minutes, compiling and choosing kernels.
AUTOTUNED_ROWS = "celebahq-256:16,cifar10-32:256:16,adm-64:64,cifar10-32:64,adm-64:1,cifar10-32:1"
LATENT_ROWS = "sd15-unet:2:16,sdxl-unet:2:16,sdxl-vae@64:1:8,sdxl-vae@128:1"
TRAIN_BATCHES = "cifar10-32:128,adm-64:32,mnist-32:512"
CPU_TRAIN_BATCH = 64
FP8_ROWS = MODEL_ROWS + ",sd15-unet:2:16,sdxl-unet:2:16"
MOST_COMPILERS = 3  # of max-autotune side by side: more would all end late
AUTOTUNED = "max-autotune, one graph"
DIGITS, DIGIT_STEPS = 16, 10
LOCK = pathlib.Path(tempfile.gettempdir()) / "denoised-bench.lock"
PEERLESS_OPS = ("linear_residual", "gated_linear", "cross_attention", "layer_norm")
SECONDS_AFTER_SEARCH = 60
SECONDS_OF_AN_OP, SECONDS_OF_A_TRAIN_OP = 2.5, 5  # to measure it and its peer, at most
SECONDS_TO_RESTART = 45  # a peer, and to measure an op with it
OURS, COPY = "ours", "copy"
# That a worker may take. The first run of max-autotune measures kernels for minutes.
START_SECONDS, MEASURE_SECONDS, PREPARE_SECONDS = 180, 60, 300
SECONDS_OF_A_ROW = 30  # a peer's first run, and three rounds: 19 s for SD 1.5
SECONDS_OF_ROWS = 120  # of all rows of UNets and decoders
WARM_UP = "0.2"  # seconds of requests before those that count


def shapes_of(text):
    """"cifar10-32:1:16,adm-64:1" → [("cifar10-32", 1), …]. "sdxl-vae@64" is the model on a state or
    latents of 64×64."""
    shapes = []
    for each in filter(None, text.split(",")):
        model, *rows = each.split(":")
        if not rows or not all(number.isdigit() and int(number) > 0 for number in rows):
            raise argparse.ArgumentTypeError(
                f"'{each}': name the rows of an evaluation as well, as in {model}:1:16")
        shapes += [(model, int(number)) for number in rows]
    return shapes


def model_flags(name):
    """"sdxl-vae@64" → (config file, further flags of denoised-bench and peer_model.py)"""
    model, _, edge = name.partition("@")
    return CONFIGS / model / "config.json", [f"--edge={edge}"] if edge else []


class Session:
    def __init__(self, args):
        self.args, self.out = args, args.out
        self.begin = time.monotonic()
        self.load_average = os.getloadavg()[0]  # before the topics add their own
        self.log = GpuLog()
        self.workers = []
        self.out.mkdir(parents=True, exist_ok=True)

    def left(self):
        return self.args.seconds - (time.monotonic() - self.begin)

    def say(self, text):
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def program(self, name, folder="tests/bench"):
        path = self.args.build / folder / name
        return path if path.exists() else self.args.build / name

    def start(self, name, command, **environment):
        if self.args.fake:
            command = [sys.executable, self.args.fake, name]
        worker = Worker(name, command, self.out / "workers.log", os.environ | environment)
        self.workers.append(worker)
        return worker

    def python(self, name, script, *flags, **environment):
        return self.start(name, [self.args.python, ROOT / "tests" / script, *flags], **environment)

    def stop(self, *workers):
        for worker in workers:
            worker.close()
            if worker in self.workers:
                self.workers.remove(worker)

    def context(self, ours, peer):
        """Of a topic's file. `ours` and `peer` are what workers said when they started."""
        def text_of(*command):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                return subprocess.run(command, capture_output=True, text=True, check=True,
                                      timeout=20, cwd=ROOT).stdout.strip().splitlines()[0]
            return None

        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": self.args.commit or text_of("git", "rev-parse", "--short", "HEAD"),
            "command": " ".join(["tests/bench/measure.py", *self.args.shown]),
            "device": ours.get("device"),
            "driver": text_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cores": os.cpu_count(),
            "load_average": self.load_average,
            "rounds": self.args.rounds,
            "peers": {name: value for name, value in peer.items() if value is not None},
        }

    def write(self, topic, content):
        path = self.out / f"{topic}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(content, indent=1) + "\n")
        new.replace(path)

    def close(self):
        self.stop(*list(self.workers))
        self.log.close()


def ready(worker, seconds):
    """What the worker says when it has started, {} after an error."""
    return worker.answer(seconds).get("ready", {})


def shown_ratio(result, unit):
    pairs = result["pairs"]
    if not pairs:
        return f"failed: {result.get('error')}"
    ours, peers = (statistics.median(side) for side in zip(*pairs))
    ratio = statistics.median(peer / our for our, peer in pairs)
    return f"{ours:.4g} {unit}, peer {peers:.4g}, {ratio:.3f}"


def models(session):
    compare_models(session, "models", session.args.models, session.args.max_autotune)


def latent(session):
    compare_models(session, "latent", session.args.latent, [])


def compare_models(session, topic, shapes, autotuned):
    args = session.args
    threads = max(1, (os.cpu_count() or 1) // max(1, len(shapes)))
    limits = {"TORCHINDUCTOR_COMPILE_THREADS": f"{threads}", "OMP_NUM_THREADS": f"{threads}"}

    def start_peers(some, way):
        return {shape: session.python(f"{shape[0]}-{shape[1]}-{way}", "bench/peer_model.py",
                                      f"--config={model_flags(shape[0])[0]}",
                                      *model_flags(shape[0])[1], f"--rows={shape[1]}",
                                      f"--way={way}", f"--device={args.device}",
                                      **limits) for shape in some}

    peers = start_peers(shapes, "compile")
    ours = {model: session.start(
        f"denoised-{model}", [session.program("denoised-bench"), f"--device={args.device}",
                              f"--config={model_flags(model)[0]}", *model_flags(model)[1],
                              "--turns"])
        for model in dict.fromkeys(model for model, _ in shapes)}
    our_ready = [ready(worker, START_SECONDS) for worker in ours.values()][0]
    peer_ready = {}
    for worker in peers.values():
        peer_ready = ready(worker, START_SECONDS) or peer_ready
        worker.send("compile")
    rows = {shape: {"name": f"{shape[0]}/rows:{shape[1]}", "unit": "ms", "peers": {},
                    "left_out": {}} for shape in shapes}
    content = {"context": session.context(our_ready, peer_ready), "rows": list(rows.values())}
    session.say("denoised measures its kernels")
    for (model, count), row in rows.items():
        row["ours"] = ours[model].ask("prepare", f"rows:{count}", PREPARE_SECONDS)
        row["ours"].pop("MiB_device", None)  # other programs take memory of the device meanwhile

    def run(peer, shape, label):
        """The peer's first run, then both in turns."""
        row, (model, count) = rows[shape], shape
        details = peer.ask("prepare", "", min(PREPARE_SECONDS, session.left()))
        if "error" in details:
            row["left_out"][label] = details["error"]
            session.say(f"{row['name']}, {label}: {details['error']}")
            return
        result = alternate((ours[model], f"rows:{count}"), (peer, ""), args.rounds, session.log,
                           MEASURE_SECONDS)
        row["peers"][label] = result | {"details": details}
        if result["pairs"]:
            row["left_out"].pop(label, None)
        session.say(f"{row['name']}, {label}: {shown_ratio(result, 'ms')}")

    def measure(compiled, label):
        session.say(f"compiled: {label}")
        for shape, (peer, answer) in compiled.items():
            if "error" in answer:
                rows[shape]["left_out"][label] = answer["error"]
                session.say(f"{rows[shape]['name']}, {label}: {answer['error']}")
            elif session.left() < 15:
                rows[shape]["left_out"][label] = "no time left"
            else:
                run(peer, shape, label)
            session.stop(peer)
            session.write(topic, content)

    # Nothing is measured while one compiles. Many rows are of small models, which take less.
    to_measure = min(SECONDS_OF_ROWS, SECONDS_OF_A_ROW * (len(rows) + len(autotuned)))
    end = time.monotonic() + max(30, session.left() - to_measure)
    measure({shape: (peer, peer.answer(end - time.monotonic()))
             for shape, peer in peers.items()}, "torch.compile, one graph")
    for row in rows.values():
        row["left_out"][AUTOTUNED] = "not in --max-autotune"
    wanted = [shape for shape in dict.fromkeys(autotuned) if shape in rows]
    for shape in wanted:
        rows[shape]["left_out"][AUTOTUNED] = "no time left"
    session.write(topic, content)
    limits["TORCHINDUCTOR_COMPILE_THREADS"] = f"{max(1, (os.cpu_count() or 1) // MOST_COMPILERS)}"
    measure(compiled_in_order(session, wanted, lambda shape: start_peers(
        [shape], "max-autotune")[shape]), AUTOTUNED)
    session.write(topic, content)
    session.stop(*ours.values())


def train(session):
    """Compiling a backward pass takes minutes, so all peers compile side by side, and what has not
    ended when there is just time to measure the others is left out."""
    args = session.args
    label = ("torch.compile, one graph" if args.train_mode == "default" else
             f"torch.compile ({args.train_mode}), one graph")
    rows, ours, content = {}, {}, None
    for model, batch in args.train:
        config = CONFIGS / model / "config.json"
        if not config.exists():
            config = ROOT / "models" / model / "unet/config.json"
        rows[model, batch] = {"name": f"{model}/batch:{batch}", "unit": "ms", "peers": {},
                              "left_out": {label: "no time left"}, "config": config}
    for (model, batch), row in rows.items():
        worker = ours[model, batch] = session.start(f"denoised-train-{model}", [
            session.program("train-bench"), f"--device={args.device}",
            f"--config={row['config']}", f"--batch={batch}", "--turns", *args.train_flags.split()])
        our_ready = ready(worker, START_SECONDS)
        row["ours"] = worker.ask("prepare", "", PREPARE_SECONDS)
        session.say(f"{row['name']}: {json.dumps(row['ours'])}")
    threads = max(1, (os.cpu_count() or 1) // len(rows))
    peers = {shape: session.python(
        f"train-peer-{shape[0]}", "bench/peer_train.py", f"--config={row.pop('config')}",
        f"--batch={shape[1]}", f"--mode={args.train_mode}",
        TORCHINDUCTOR_COMPILE_THREADS=f"{threads}",
        OMP_NUM_THREADS=f"{threads}") for shape, row in rows.items()}
    peer_ready = {}
    for worker in peers.values():
        peer_ready = ready(worker, START_SECONDS) or peer_ready
        worker.send("compile")
    content = {"context": session.context(our_ready, peer_ready), "rows": list(rows.values())}
    session.write("train", content)
    # Nothing is measured while one compiles.
    end = time.monotonic() + max(30, session.left() - SECONDS_OF_A_ROW * len(rows))
    compiled = {shape: worker.answer(end - time.monotonic()) for shape, worker in peers.items()}
    for shape, row in rows.items():
        details = compiled[shape]
        if "error" not in details:
            if session.left() < 20:
                continue
            details = peers[shape].ask("prepare", "", min(PREPARE_SECONDS, session.left()))
        if "error" in details:
            row["left_out"][label] = details["error"]
            session.say(f"{row['name']}: {details['error']}")
        else:
            result = alternate((ours[shape], ""), (peers[shape], ""), args.rounds, session.log,
                               MEASURE_SECONDS)
            row["peers"][label] = result | {"details": details}
            if result["pairs"]:
                row["left_out"].pop(label)
            session.say(f"{row['name']}: {shown_ratio(result, 'ms')}")
        session.write("train", content)
    session.stop(*ours.values(), *peers.values())


def train_cpu(session):
    args, threads = session.args, {"OMP_NUM_THREADS": f"{session.args.threads}"}
    flags = [f"--config={ROOT / 'models/mnist-32/unet/config.json'}", f"--batch={CPU_TRAIN_BATCH}",
             "--device=cpu"]
    ours = session.start("denoised-train-cpu", [session.program("train-bench"), *flags, "--turns"],
                         **threads)
    our_ready = ready(ours, START_SECONDS) | {"device": f"{cpu_name()}, {args.threads} threads"}
    row = {"name": f"mnist-32/batch:{CPU_TRAIN_BATCH}", "unit": "ms", "peers": {}, "left_out": {},
           "ours": ours.ask("prepare", "", PREPARE_SECONDS)}
    ways = {f"{name}, {layout.upper()}": [*way, f"--layout={layout}"]
            for name, way in (("eager", ["--eager"]), ("torch.compile", []))
            for layout in ("nhwc", "nchw")}
    for label, way in ways.items():
        peer = session.python(f"train-cpu-{label}", "bench/peer_train.py", *flags, *way, **threads)
        content = {"context": session.context(our_ready, ready(peer, START_SECONDS) | {"cudnn": None}),
                   "rows": [row]}
        details = peer.ask("compile", "", min(PREPARE_SECONDS, session.left()))
        if "error" in details:
            row["left_out"][label] = details["error"]
        else:
            result = alternate((ours, ""), (peer, ""), args.rounds, session.log, MEASURE_SECONDS)
            row["peers"][label] = result | {"details": details}
            if not result["pairs"]:
                row["left_out"][label] = result["error"]
            session.say(f"{row['name']}, {label}: {shown_ratio(result, 'ms')}")
        session.stop(peer)
        session.write("train-cpu", content)
    session.stop(ours)


def memory(session):
    """What an evaluation takes of an empty device: denoised's, one process for each row."""
    args = session.args
    rows = []
    for model, count in args.models:
        ours = session.start(f"denoised-{model}-{count}", [
            session.program("denoised-bench"), f"--device={args.device}", "--turns",
            f"--config={CONFIGS / model / 'config.json'}"])
        content = {"context": session.context(ready(ours, START_SECONDS), {}), "rows": rows}
        rows.append({"name": f"{model}/rows:{count}",
                     "ours": ours.ask("prepare", f"rows:{count}", PREPARE_SECONDS)})
        session.say(f"{rows[-1]['name']}: {rows[-1]['ours'].get('MiB_device')} MiB")
        session.stop(ours)
        session.write("memory", content)


def compiled_in_order(session, shapes, start):
    """Compiles the shapes in this order, some side by side, as long as there is time to measure
    them as well; `start` makes the worker of one. Returns shape → (worker, answer)."""
    waiting, busy, done = list(shapes), {}, {}
    # To start one and compile it takes this at least.
    seconds_of_one, seconds_to_measure = 45, 25

    def time_for(count):
        return session.left() - 10 - seconds_to_measure * count

    while busy or waiting:
        while (waiting and len(busy) < MOST_COMPILERS and
               time_for(len(done) + len(busy) + 1) > seconds_of_one):
            shape = waiting.pop(0)
            busy[shape] = start(shape)
            busy[shape].send("compile")
        if not busy:
            break
        for shape, worker in list(busy.items()):
            if worker.has_answer():
                answer = worker.answer(0)
                if "ready" not in answer:
                    done[shape] = worker, answer
                    del busy[shape]
            elif time_for(len(done) + 1) <= 0:
                done[shape] = worker, worker.answer(0)  # which ends it
                del busy[shape]
        time.sleep(0.02)
    for shape in waiting:
        session.say(f"no time for max-autotune of {shape[0]}/rows:{shape[1]}")
    return {shape: done[shape] for shape in shapes if shape in done}


class Requests:
    """Whole requests at a server as a worker: "measure" is the median of several, timed by the
    client, after some that warm up; "ms_server" is what the server says of as many others."""

    def __init__(self, session, server):
        self.session, self.server, self.seed = session, server, 0
        self.out = server.options.work

    def ask(self, verb, _name, seconds):
        self.seed += self.session.args.requests
        command = [self.server.options.denoise, "bench", "--server", self.server.address,
                   "--json", "-", "-c", "1", "-n", f"{self.session.args.requests}", "--warm-up",
                   WARM_UP, "-x", f"count={DIGITS}", "--seed", f"{self.seed}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True,
                                  timeout=seconds)
            found = json.loads(done.stdout)
            if found["failed"]:
                return {"error": f"{found['errors']}"[:300]}
            answer = {"ms": 1e3 * found["latency_seconds"]["p50"]}
        except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError) as error:
            return {"error": f"{error}: {getattr(error, 'stderr', '')}"[:300]}
        server = self.by_server(seconds)
        return answer | ({"ms_server": server} if server else {})

    def by_server(self, seconds):
        """Milliseconds that the server says, None where it did not."""
        times = []
        for _ in range(self.session.args.requests):
            self.seed += 1
            command = [self.server.options.denoise, "generate", "-n", f"{DIGITS}", "--seed",
                       f"{self.seed}", "--json", "--server", self.server.address,
                       "-o", self.out / "{index}.png"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=True,
                                      timeout=seconds)
                times.append(total_seconds(done.stdout))
            except (OSError, LookupError, subprocess.SubprocessError) as error:
                self.session.say(f"the server's time of a request: {error}"[:300])
                return None
        return 1e3 * statistics.median(times)


def total_seconds(output):
    """Of `denoise generate --json`: the time that the server tells."""
    found = []

    def walk(value):
        if isinstance(value, dict):
            if isinstance(value.get("total_seconds"), (int, float)):
                found.append(value["total_seconds"])
            for each in value.values():
                walk(each)
        elif isinstance(value, list):
            for each in value:
                walk(each)

    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            walk(json.loads(line))
    if not found:
        with contextlib.suppress(ValueError):
            walk(json.loads(output))
    return found[-1]


class Repeated:
    """A worker whose figure is for `times` of what another measures."""

    def __init__(self, worker, times):
        self.worker, self.times = worker, times

    def ask(self, verb, name, seconds):
        answer = self.worker.ask(verb, name, seconds)
        return answer if "error" in answer else {"ms": self.times * answer["ms"]}


def digits(session):
    args = session.args
    on_gpu = args.device == "cuda"
    threads = [] if on_gpu else [f"--threads={args.threads}"]
    environment = {} if on_gpu else {"OMP_NUM_THREADS": f"{args.threads}"}
    modes = {"eager": "PyTorch eager", "graph": "PyTorch eager, UNet in a graph",
             "compile": "torch.compile, all in one graph"} if on_gpu else {
                 "eager": "PyTorch eager", "compile": "torch.compile"}
    peer = session.python("digits-peer", "reference/torch_mnist_bench.py", "--turns",
                          f"--device={args.device}", f"--count={DIGITS}",
                          f"--dtype={'bfloat16' if on_gpu else 'float32'}", *threads, **environment)
    bench = session.start("denoised-digits", [
        session.program("denoised-bench"), f"--device={args.device}", "--guided", "--turns",
        f"--config={ROOT / 'models/mnist-32/unet/config.json'}"], **environment)
    our_ready, peer_ready = ready(bench, START_SECONDS), ready(peer, START_SECONDS)
    request = {"name": "request", "unit": "ms", "peers": {}, "left_out": {}}
    evaluations = {"name": "evaluations", "unit": "ms", "peers": {}, "left_out": {}}
    context = session.context(our_ready, peer_ready)
    content = {"context": context | {"threads": None if on_gpu else args.threads},
               "rows": [request, evaluations]}
    rows_name = f"rows:{2 * DIGITS}"
    evaluations["ours"] = bench.ask("prepare", rows_name, PREPARE_SECONDS)
    topic = "digits" if on_gpu else f"digits-cpu-{args.threads}"
    for mode in modes:
        details = peer.ask("compile", mode, max(30, min(300, session.left() - 60)))
        if "error" not in details:
            details = peer.ask("prepare", mode, PREPARE_SECONDS)
        if "error" in details:
            request["left_out"][modes[mode]] = details["error"]
            session.say(f"digits, {modes[mode]}: {details['error']}")
    ready_modes = {mode: label for mode, label in modes.items()
                   if label not in request["left_out"]}
    with server_for(session, environment) as server:
        requests = Requests(session, server) if server else bench
        requests.ask("warm", rows_name, MEASURE_SECONDS)
        for mode, label in ready_modes.items():
            result = alternate((requests, rows_name), (peer, mode), args.rounds, session.log,
                               MEASURE_SECONDS)
            request["peers"][label] = result
            session.say(f"16 digits, {label}: {shown_ratio(result, 'ms')}")
            session.write(topic, content)
    last = list(ready_modes)[-1:] if on_gpu else []
    for mode in last:
        result = alternate((Repeated(bench, DIGIT_STEPS), rows_name), (peer, mode), args.rounds,
                           session.log, MEASURE_SECONDS)
        evaluations["peers"][modes[mode]] = result
        session.say(f"their {DIGIT_STEPS} evaluations, {modes[mode]}: {shown_ratio(result, 'ms')}")
    session.write(topic, content)
    session.stop(peer, bench)


@contextlib.contextmanager
def server_for(session, environment):
    """A server with the digits' model; None in a rehearsal."""
    if session.args.fake:
        yield None
        return
    import serving

    with tempfile.TemporaryDirectory(prefix="denoised-digits-") as work:
        options = argparse.Namespace(
            denoised=session.program("denoised", "server"),
            denoise=session.program("denoise", "client"), work=pathlib.Path(work),
            device=session.args.device, server_flag=[], client_cores=None, server_cores=None)
        with serving.Server(options, ROOT / "models/mnist-32", environment=environment) as server:
            yield server


def libraries_of(python):
    """The environment in which a program finds the cuBLASLt that PyTorch brings, if it brings one."""
    find = ("import glob, nvidia; "
            "print([f for p in nvidia.__path__ for f in glob.glob(p + '/*/lib/libcublasLt.so*')][0])")
    done = subprocess.run([python, "-c", find], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {}
    folders = [str(pathlib.Path(done.stdout.strip()).parent), os.environ.get("LD_LIBRARY_PATH")]
    return {"LD_LIBRARY_PATH": ":".join(filter(None, folders))}


def searched_in(files):
    """Names of the ops that these runs measured after a complete search."""
    return {row["name"] for file in files for row in json.loads(file.read_text())["rows"]
            if row["peers"] and searched_whole(row)}


def ops(session):
    args = session.args
    program = [sys.executable, args.fake] if args.fake else [session.program("backend-throughput")]
    listed = subprocess.run([*program, "--list"], check=True, capture_output=True,
                            text=True).stdout.split()
    linear = session.start("cublaslt-search", [session.program("cublaslt-search"), "--turns"],
                           **libraries_of(args.python))
    # Nothing is searched for linear layers and attention. First what is compiled in seconds.
    compare_ops(session, "ops", "backend-throughput",
                [name for name in listed if name.split("/")[0] not in PEERLESS_OPS],
                first="group_norm", without_search=("linear/", "attention/"),
                seconds_of_an_op=SECONDS_OF_AN_OP,
                more_peers=lambda name, _: [("cuBLASLt", linear, name)]
                if name.startswith("linear/") else [],
                versions=lambda: {"cublaslt": ready(linear, START_SECONDS).get("cublaslt")})
    session.stop(linear)


def train_ops(session):
    """A norm's gradient has a bar beside a copy of as many bytes, which the same peer measures."""
    compare_ops(session, "train-ops", "training-throughput",
                (HERE / "train_ops.txt").read_text().split(), first="group_norm",
                seconds_of_an_op=SECONDS_OF_A_TRAIN_OP,
                more_peers=lambda name, peer: [(COPY, peer, f"copy/{name.split('/', 1)[1]}")]
                if name.startswith("group_norm") else [])


def compare_ops(session, topic, program, names, first, seconds_of_an_op, more_peers,
                without_search=(), versions=dict):
    """Ops of `program`, which is denoised's, beside the fastest of its peer's candidates, and then
    beside more_peers(name, peer), (label, worker, what it is asked for) each."""
    args = session.args
    names = [name for name in names if args.ops in name and name not in searched_in(args.without)]
    count = min(args.processes, len(names))
    # An op of a shape goes where the same convolution was searched.
    shapes = list(dict.fromkeys(name.split("/", 1)[1] for name in names))
    of_name = {name: shapes.index(name.split("/", 1)[1]) % count for name in names}
    threads = max(1, (os.cpu_count() or 1) // count)

    def start(who):
        if who == OURS:
            return session.start(program, [session.program(program), f"--device={args.device}",
                                           "--turns"])
        script = f"bench/peer_{topic.replace('-', '_')}.py"
        return session.python(f"{topic}-{who}", script, f"--lock={LOCK}",
                              f"--search-seconds={args.search_seconds}",
                              TORCHINDUCTOR_COMPILE_THREADS=f"{threads}",
                              OMP_NUM_THREADS=f"{threads}")

    def restart(who, why):
        """A peer's ops are measured all the same, without what it had found."""
        searched.update({name: {"error": why} for name in names if of_name[name] == who})
        session.say(f"{why}; {workers[who].name} is started anew")
        session.stop(workers[who])
        workers[who] = start(who)
        ready(workers[who], START_SECONDS)

    def is_broken(who):
        """Whether a kernel that failed has left the process unable to run another."""
        return who == OURS or "error" in workers[who].ask("ceilings", "", MEASURE_SECONDS)

    def prepare(who, name):
        """Twice if need be."""
        answer = workers[who].ask("prepare", name, PREPARE_SECONDS)
        if "error" in answer and session.left() > SECONDS_TO_RESTART and is_broken(who):
            restart(who, f"{name}: {answer['error']}")
            answer = workers[who].ask("prepare", name, PREPARE_SECONDS)
        return answer

    def measure(row, label, name, worker, what):
        row["peers"][label] = result = alternate((workers[OURS], name), (worker, what),
                                                 args.rounds, session.log, MEASURE_SECONDS)
        session.say(f"{name}, {label}: {shown_ratio(result, 'us')}")

    searched = {}  # what the workers say of it, by name
    peers = range(count)
    workers = {who: start(who) for who in [*peers, OURS]}
    our_ready = ready(workers[OURS], START_SECONDS)
    peer_ready = [ready(workers[i], START_SECONDS) for i in peers][0] | versions()
    rows = []
    content = {"context": session.context(our_ready, peer_ready), "rows": rows,
               "left_out": []}
    content["ceilings_before"] = workers[0].ask("ceilings", "", MEASURE_SECONDS)

    # Side by side: each worker is sent its next name when it has answered for the last.
    to_measure = seconds_of_an_op * len(names) + SECONDS_AFTER_SEARCH / 2
    end = time.monotonic() + min(args.search_phase,
                                 max(session.left() / 2, session.left() - to_measure))
    wanted = sorted((name for name in names if not name.startswith(without_search)),
                    key=lambda name: not name.startswith(first))
    waiting = [[name for name in wanted if of_name[name] == i] for i in peers]
    busy = {}
    while time.monotonic() < end:
        for i in peers:
            if i not in busy and waiting[i] and not workers[i].error:
                busy[i] = waiting[i].pop(0)
                workers[i].send("search", f"{busy[i]} {end:.3f}")
        if not busy:
            break
        for i, name in list(busy.items()):
            if workers[i].has_answer():
                searched[name] = workers[i].answer(1)
                del busy[i]
        time.sleep(0.02)
    # These begin no other plan, but may have to compile one with torch.compile.
    end = time.monotonic() + SECONDS_AFTER_SEARCH
    for i, name in busy.items():
        searched[name] = workers[i].answer(end - time.monotonic())
    for i in peers:
        if workers[i].error:
            restart(i, workers[i].error)
    ran = [name for name, answer in searched.items() if answer.get("searched")]
    session.say(f"searched {len(ran)} of {len(wanted)} ops, "
                f"{sum(searched[name]['not_tried'] == 0 for name in ran)} of them to the end")
    content["ceilings"] = workers[0].ask("ceilings", "", MEASURE_SECONDS)

    for name in names:
        if session.left() < 8:
            content["left_out"].append(name)
            continue
        i = of_name[name]
        row = {"name": name, "unit": "us", "peers": {}, "left_out": {},
               "ours": prepare(OURS, name), "survey": prepare(i, name)}
        search = searched.get(name, {"error": "no time to search"})
        if name not in wanted:
            search = {"searched": True}
        row |= {"searched": search.get("searched", False),
                "not_tried": search.get("not_tried", 0), "search": search}
        rows.append(row)
        if "error" in row["ours"]:
            row["left_out"]["denoised"] = row["ours"]["error"]
            session.say(f"{name}, denoised: {row['ours']['error']}")
        label = row["survey"].get("fastest")
        if label:
            measure(row, label, name, workers[i], name)
        else:
            row["left_out"]["all"] = row["survey"].get("error")
            session.say(f"{name}: {row['survey'].get('error')}")
        for label, worker, what in more_peers(name, workers[i]):
            row[label.lower()] = worker.ask("prepare", what, PREPARE_SECONDS)
            measure(row, label, name, worker, what)
        workers[i].ask("release", name, MEASURE_SECONDS)
        session.write(topic, content)
    content["ceilings_after"] = workers[0].ask("ceilings", "", MEASURE_SECONDS)
    session.write(topic, content)
    session.stop(*workers.values())


CLOCK_ROUNDS = 2
# Each differs from the first in one thing.
STEADY = {"copies": 2, "warm": 1}
CLOCK_VARIANTS = {
    "as the ops are timed": STEADY,
    "one buffer instead of two": STEADY | {"copies": 1},
    "ten engines tried instead of all": STEADY | {"limit": 10},
    "the fastest of all plans of cuDNN's graph API": STEADY | {"limit": "plan"},
    "launched one by one, not in a graph": STEADY | {"graph": 0},
    "NCHW instead of NHWC": STEADY | {"layout": "nchw"},
    "weights of deviation 1": STEADY | {"data": "unscaled"},
    "zeros": STEADY | {"data": "zeros"},
    "after 2 s of rest, without work before": STEADY | {"idle": 2, "warm": 0},
    "the same, one buffer, weights of deviation 1, 200 launches": {
        "copies": 1, "data": "unscaled", "idle": 2, "warm": 0, "runs": 200},
    "the same on zeros": {"copies": 1, "data": "zeros", "idle": 2, "warm": 0, "runs": 200},
    "after 2 s of work, 200 launches": {"copies": 1, "data": "unscaled", "warm": 2, "runs": 200},
}


def clocks(session):
    args = session.args
    shape = args.clocks_op
    # PyTorch keeps what its autotuner chose, so that each limit has a process of its own.
    peers = {limit: session.python(f"clocks-{limit}", "bench/peer_ops.py", "--search-seconds=40",
                                   f"--lock={LOCK}") for limit in (0, 10)}
    ours = {warm: session.start(f"clocks-ours-{warm}", [
        session.program("backend-throughput"), f"--device={args.device}", "--turns",
        f"--warm-up={warm}"]) for warm in (0, 1)}
    our_ready = [ready(worker, START_SECONDS) for worker in ours.values()][0]
    peer_ready = [ready(worker, START_SECONDS) for worker in peers.values()][0]
    rows = []
    content = {"context": session.context(our_ready, peer_ready) | {"rounds": CLOCK_ROUNDS},
               "op": shape, "rows": rows}
    for worker in ours.values():
        worker.ask("prepare", shape, PREPARE_SECONDS)
    for name, variant in CLOCK_VARIANTS.items():
        row = {"name": name, "unit": "us", "variant": variant, "rounds": []}
        rows.append(row)
        peer = peers[10 if variant.get("limit") == 10 else 0]
        asked = "/".join([shape, *(f"{key}:{value}" for key, value in variant.items())])
        for _ in range(CLOCK_ROUNDS):
            if session.left() < 5:
                break
            answer = peer.ask("variant", asked, PREPARE_SECONDS)
            timed = answer.get("timed")
            row["rounds"].append(answer | {"clocks": session.log.between(*timed) if timed else None})
        shown = ", ".join(f"{each.get('us', each.get('error'))}" for each in row["rounds"])
        session.say(f"{name}: {shown}")
        session.write("clocks", content)
    for name, warm, rest in (("denoised, as the ops are timed", 1, 0),
                             ("denoised, after 2 s of rest, without work before", 0, 2)):
        row = {"name": name, "unit": "us", "ours": True, "rounds": []}
        rows.append(row)
        for _ in range(CLOCK_ROUNDS):
            time.sleep(rest if not args.fake else 0)
            begin = time.monotonic()
            answer = ours[warm].ask("measure", shape, MEASURE_SECONDS)
            end = time.monotonic()
            row["rounds"].append(answer | {"timed": [begin, end],
                                           "clocks": session.log.between(begin, end)})
        session.say(f"{name}: {', '.join(str(each.get('us')) for each in row['rounds'])}")
    session.write("clocks", content)
    session.stop(*peers.values(), *ours.values())


def system(session):
    """denoised alone, one program after the other; what fails or takes too long is said and left."""
    args = session.args
    with tempfile.TemporaryDirectory(prefix="denoised-system-") as work:
        work = pathlib.Path(work)
        device = f"--device={args.device}"

        def run(seconds, *command):
            """Its standard output, None where it failed."""
            seconds = min(seconds, session.left() - 5)
            if seconds < 5:
                session.say(f"no time for {pathlib.Path(command[0]).name}")
                return None
            try:
                with open(session.out / "workers.log", "ab") as log:
                    return subprocess.run([str(part) for part in command], check=True, text=True,
                                          stdout=subprocess.PIPE, stderr=log,
                                          timeout=seconds).stdout
            except (OSError, subprocess.SubprocessError) as error:
                session.say(f"{error}"[:300])
                return None

        def google(name, seconds, *flags):
            """A run of denoised-bench, its benchmarks and context."""
            file = work / f"{name}.json"
            done = run(seconds, session.program("denoised-bench"), device, *flags,
                       f"--benchmark_out={file}", "--benchmark_out_format=json")
            return json.loads(file.read_text()) if done is not None and file.exists() else None

        contexts = {}

        def write(topic, rows, device_name):
            contexts.setdefault("device", device_name)
            session.write(topic, {"context": session.context({"device": device_name}, {}),
                                  "rows": rows})
            session.say(f"{topic}: {json.dumps(rows)[:400]}")

        rows = []
        for model in ("adm-64", "celebahq-256"):
            run(90, session.program("synthetic-model"), CONFIGS / model / "config.json",
                work / model)
            weights = work / model / "diffusion_pytorch_model.safetensors"
            for i in range(args.rounds):
                found = google(f"weights-{model}-{i}", 60, f"--weights={weights}", "--rows=1",
                               f"--config={CONFIGS / model / 'config.json'}")
                if found and "weights_seconds" in found["context"]:
                    rows.append({"model": model,
                                 "bytes": int(found["context"]["weights_bytes"]),
                                 "seconds": float(found["context"]["weights_seconds"])})
                    write("weights", rows, found["context"]["device"])
        config = CONFIGS / "cifar10-32/config.json"
        found = google("beside", 60, f"--config={config}", f"--beside={config}",
                       "--rows=1,16,64")
        if found:
            write("two-models", [{
                "name": f"cifar10-32+cifar10-32/rows:{each['name'].split('rows:')[1].split('/')[0]}",
                **{key: each[key] for key in ("real_time", "ms_alone", "ms_other",
                                              "ms_other_alone", "shares") if key in each}}
                for each in found["benchmarks"]], found["context"]["device"])
        run(60, session.program("synthetic-model"), config, work / "cifar10-32")
        model, rows = work / "cifar10-32", []
        for count, models, previews in ((1, 1, 0), (16, 1, 0), (64, 1, 0), (64, 1, 1), (1, 2, 0),
                                        (16, 2, 0), (64, 2, 0)):
            done = run(40, session.program("engine-throughput"), device,
                       f"--model={','.join([str(model)] * models)}", "--steps=50",
                       f"--in-flight={count}", f"--max-rows={max(2, count)}", f"--previews={previews}",
                       "--warm-up=1", "--seconds=2")
            if done:
                rows.append({"rows": count, "models": models, "previews": previews} |
                            json.loads(done))
        write("engine", rows, contexts.get("device"))
        rows = []
        for model, counts in (("cifar10-32", "1,16,64,256"), ("adm-64", "1"),
                              ("celebahq-256", "1")):
            file = work / f"splits-{model}.json"
            run(60, session.program("splits-bench"), f"--config={CONFIGS / model / 'config.json'}",
                f"--rows={counts}", f"--json={file}")
            if file.exists():
                found = json.loads(file.read_text())
                rows += [row | {"config": f"tests/models/configs/{model}/config.json"}
                         for row in found["rows"]]
                write("splits", rows, found["device"])
        for name, seconds, flags in (
                ("start", 120, ["start"]),
                ("serving", 200, ["--model", config, "--rounds", "2", "--seconds", "8",
                                  "--warm-up", "3", "saturation", "batching"])):
            run(seconds, sys.executable, HERE / "serving.py", "--build", args.build,
                "--device", args.device, "--json", session.out / f"{name}.json",
                *([f"--commit={args.commit}"] if args.commit else []), *flags)
            session.say(f"{name}: {(session.out / f'{name}.json').exists()}")


def portable(session):
    """Hopper's kernels beside those for every chip."""
    compare_flags(session, "portable", "generic", ["--generic"], session.args.models)


def fp8(session):
    """denoised in bf16 beside itself in FP8."""
    compare_flags(session, "fp8", "fp8", ["--precision=fp8"], session.args.fp8)


def fp8_ops(session):
    """Convolutions in FP8 beside those in bf16, and linear layers in FP8 beside cuBLASLt's."""
    args = session.args
    program = [session.program("backend-throughput"), f"--device={args.device}", "--turns"]
    ours = session.start("backend-fp8", [*program, "--precision=fp8"])
    bf16 = session.start("backend-bf16", program)
    cublaslt = session.start(
        "cublaslt-search", [session.program("cublaslt-search"), "--precision=fp8", "--turns"],
        **libraries_of(args.python))
    said = ready(ours, START_SECONDS), ready(cublaslt, START_SECONDS)
    ready(bf16, START_SECONDS)
    rows = []
    content = {"context": session.context(*said), "rows": rows}
    for name in (HERE / "fp8_ops.txt").read_text().split():
        if args.ops not in name or session.left() < SECONDS_OF_AN_OP:
            continue
        label, peer = ("cuBLASLt", cublaslt) if name.startswith("linear/") else ("bf16", bf16)
        row = {"name": name, "unit": "us", "ours": ours.ask("prepare", name, PREPARE_SECONDS)}
        found = peer.ask("prepare", name, PREPARE_SECONDS)
        if label == "cuBLASLt":
            row["cublaslt"] = found
        row["peers"] = {label: alternate((ours, name), (peer, name), args.rounds, session.log,
                                         MEASURE_SECONDS)}
        rows.append(row)
        session.say(f"{name}, {label}: {shown_ratio(row['peers'][label], 'us')}")
        session.write("fp8-ops", content)
    session.stop(ours, bf16, cublaslt)


def compare_flags(session, topic, other, flags, shapes):
    """denoised beside itself with `flags`, in turns."""
    args = session.args
    rows = []
    content = None
    for model in dict.fromkeys(model for model, _ in shapes):
        sides = [session.start(f"{kind}-{model}", [
            session.program("denoised-bench"), f"--device={args.device}", "--turns",
            f"--config={CONFIGS / model / 'config.json'}", *some])
            for kind, some in (("own", []), (other, flags))]
        said = [ready(side, START_SECONDS) for side in sides]
        content = content or {"context": session.context(said[0], {}), "rows": rows}
        for name, count in shapes:
            if name != model or session.left() < 10:
                continue
            for side in sides:
                side.ask("prepare", f"rows:{count}", PREPARE_SECONDS)
            result = alternate((sides[0], f"rows:{count}"), (sides[1], f"rows:{count}"),
                               args.rounds, session.log, MEASURE_SECONDS)
            rows.append({"name": f"{model}/rows:{count}", "unit": "ms",
                         "peers": {other: result}})
            session.say(f"{model} {count}, {other}: {shown_ratio(result, 'ms')}")
            session.write(topic, content)
        session.stop(*sides)


def scheduling(session):
    """scheduling-bench, on one thread. Its figures are the same on every machine, but for the host's
    time for an evaluation."""
    file = session.out / "scheduling.new"
    subprocess.run([session.program("scheduling-bench"), f"--json={file}"], check=True,
                   timeout=max(1, session.left()), env=os.environ | {"OMP_NUM_THREADS": "1"})
    figures = json.loads(file.read_text())
    file.unlink()
    host = f"simulated; host: {cpu_name()}, {len(os.sched_getaffinity(0))} cores"
    context = {"context": session.context({"device": host}, {}) | {"rounds": 1, "driver": None}}
    session.write("scheduling-mixed", context | {"rows": figures.pop("mixed")})
    session.write("scheduling", context | figures)


TOPICS = {f.__name__: f
          for f in (models, memory, latent, train, digits, ops, clocks, system, portable, fp8,
                    scheduling)}
TOPICS |= {"fp8-ops": fp8_ops, "train-ops": train_ops, "train-cpu": train_cpu} | pipelines.TOPICS


def shown(words):
    """The command without what is of one machine, and without the values of these flags."""
    own = ("--out", "--build", "--python", "--commit", "--fake", "--work", "--keep-models", "--sd-cli")
    return [word for before, word in zip(["", *words], words)
            if before not in own and word.split("=")[0] not in own]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topics", nargs="+", choices=TOPICS, metavar="TOPIC")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/bench")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release",
                        help="a build, or a folder with its programs")
    parser.add_argument("--python", default=sys.executable, help="the one with PyTorch")
    parser.add_argument("--commit", help="what was built, where there is no git")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=480, help="for all topics together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=shapes_of, default=shapes_of(MODEL_ROWS),
                        help=f"and rows; default: {MODEL_ROWS}")
    parser.add_argument("--latent", type=shapes_of, default=shapes_of(LATENT_ROWS),
                        help=f"default: {LATENT_ROWS}")
    parser.add_argument("--fp8", type=shapes_of, default=shapes_of(FP8_ROWS),
                        help=f"default: {FP8_ROWS}")
    parser.add_argument("--train", type=shapes_of, default=shapes_of(TRAIN_BATCHES),
                        help=f"and pictures of a step; default: {TRAIN_BATCHES}")
    parser.add_argument("--train-flags", default="",
                        help="further flags of train-bench, such as --train-flags=--norms=recompute")
    parser.add_argument("--train-mode", default="default",
                        help="of torch.compile for a step, such as max-autotune-no-cudagraphs, which compiles longer")
    parser.add_argument("--max-autotune", type=shapes_of, default=shapes_of(AUTOTUNED_ROWS),
                        help="of these, which also so, in this order as long as there is time; "
                        f"default: {AUTOTUNED_ROWS}")
    parser.add_argument("--ops", default="", help="those whose name contains this")
    parser.add_argument("--without", type=pathlib.Path, nargs="*", default=[], metavar="FILE",
                        help="of earlier runs of the topic: leaves out what they searched to the end")
    parser.add_argument("--processes", type=int, default=12,
                        help="that search and compile for ops and train-ops")
    parser.add_argument("--search-seconds", type=float, default=10,
                        help="for cuDNN's plans of one graph")
    parser.add_argument("--search-phase", type=float, default=150, help="seconds, for all ops")
    parser.add_argument("--clocks-op", default="conv/rows:8/size:256/in:128/out:128")
    parser.add_argument("--threads", type=int, default=2, help="of digits and train-cpu")
    parser.add_argument("--requests", type=int, default=5, help="of digits and of sd15-request, in a round")
    pipelines.add_flags(parser)
    parser.add_argument("--fake", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.shown = shown(sys.argv[1:])
    session = Session(args)
    failed = False
    try:
        for topic in args.topics:
            try:
                TOPICS[topic](session)
            except (Exception, SystemExit) as error:  # the other topics still have their time
                session.say(f"{topic} failed: {type(error).__name__}: {error}")
                failed = True
                session.stop(*list(session.workers))
    finally:
        session.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
