#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the shipped Envoy configurations with a real Envoy in front of a real server: what clients
need passes, what strangers must not reach does not, the floods that gRPC 1.51 does not stop end at
Envoy, and clients that keep connections survive a rollout. Needs openssl, python3-grpcio,
python3-yaml, a built server and client, and Envoy 1.40: --envoy or DENOISED_ENVOY names it, else it
is looked for in build/tools/envoy, where scripts/bootstrap --tests installs it, and in PATH. Without
it or the Python packages the test is skipped.

    deploy/test/envoy.py [--envoy PATH] [--build build/release]
"""

import argparse
import base64
import contextlib
import http.client
import json
import os
import pathlib
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time

try:
    import grpc
    import yaml
except ImportError as error:
    print(f"skipped: python3-grpcio and python3-yaml are needed: {error}")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/server"))
from free_port import free_port

PLAIN = ROOT / "deploy" / "envoy" / "envoy.yaml"
TLS = ROOT / "deploy" / "k8s" / "components" / "tls"
BASE = ROOT / "deploy" / "k8s" / "base" / "deployment.yaml"
POD = yaml.safe_load(BASE.read_text(encoding="utf-8"))["spec"]["template"]["spec"]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, GOAWAY, CONTINUATION = 1, 3, 4, 7, 9
END_STREAM, END_HEADERS = 1, 4


def check(holds, what):
    print(f"{'ok' if holds else 'FAILED'}: {what}")
    if not holds:
        sys.exit(1)


def wait_until(condition, what):
    for _ in range(60):
        if condition():
            return
        time.sleep(1)
    check(False, what)


def listens(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
    except OSError:
        return False


def frame(kind, flags, stream, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name, value):
    """A header field without indexing, HPACK (RFC 7541, 6.2.2); both shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


REQUEST = b"".join(
    literal(name, value)
    for name, value in [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/denoised.v1.ImageGeneration/Generate"),
        (b":authority", b"denoised"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    ]
)


class Connection:
    """A client that sends what it likes and notices when the other side has had enough."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0))

    def closed(self):
        """Reads what has come. Whether the other side closed or said GOAWAY with an error."""
        self.socket.setblocking(False)
        try:
            while data := self.socket.recv(1 << 16):
                at = 0
                while at + 9 <= len(data):
                    length = int.from_bytes(data[at : at + 3], "big")
                    if data[at + 3] == GOAWAY and any(data[at + 13 : at + 17]):
                        return True
                    at += 9 + length
            return True
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.socket.setblocking(True)
            self.socket.settimeout(20)

    def flood(self, pieces):
        """Sends pieces until the other side ends the connection. The number sent, and whether it
        did."""
        sent = 0
        for sent, piece in enumerate(pieces, 1):
            try:
                self.socket.sendall(piece)
            except OSError:
                return sent, True
            if sent % 16 == 0 and self.closed():
                return sent, True
        # On a busy machine the other side is behind.
        for _ in range(20):
            time.sleep(0.5)
            if self.closed():
                return sent, True
        return sent, False


def continuation_flood(mebibytes):
    field = literal(b"x-flood", b"x" * 100)
    block = field * (16384 // len(field))
    yield frame(HEADERS, 0, 1, REQUEST)
    for _ in range(mebibytes * 64):
        yield frame(CONTINUATION, 0, 1, block)


def rapid_resets(count):
    for stream in range(1, 2 * count, 2):
        yield frame(HEADERS, END_HEADERS, stream, REQUEST) + frame(
            RST_STREAM, 0, stream, (8).to_bytes(4, "big")
        )


def memory(process):
    """Resident bytes."""
    with open(f"/proc/{process.pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def settled_memory(process):
    """The same when it no longer changes: what a connection left behind is read after it was closed."""
    known = memory(process)
    for _ in range(20):
        time.sleep(1)
        before, known = known, memory(process)
        if abs(known - before) < 1 << 20:
            break
    return known


@contextlib.contextmanager
def running(*command):
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen([str(part) for part in command], stdout=log, stderr=log) as process:
            try:
                yield process
            except BaseException:
                log.seek(0)
                print(log.read()[-3000:], file=sys.stderr)
                raise
            finally:
                process.terminate()


class Setup:
    def __init__(self, flags, directory):
        self.envoy = flags.envoy
        self.server = pathlib.Path(flags.build) / "server" / "denoised"
        self.client = pathlib.Path(flags.build) / "client" / "denoise"
        self.directory = pathlib.Path(directory)
        self.outside, self.inside = free_port(), free_port()
        self.http_outside, self.http_inside = free_port(), free_port()
        self.admin = free_port()

    def config(self, source):
        """The configuration with free ports and paths of this test."""
        text = source.read_text(encoding="utf-8")
        for shipped, ours in [
            ("port_value: 50051", f"port_value: {self.outside}"),
            ("port_value: 50052", f"port_value: {self.inside}"),
            ("port_value: 8080", f"port_value: {self.http_outside}"),
            ("port_value: 8081", f"port_value: {self.http_inside}"),
            ("port_value: 9901", f"port_value: {self.admin}"),
            ("/etc/envoy/", f"{self.directory}/"),
            ("/etc/denoised", f"{self.directory}/secrets"),
        ]:
            text = text.replace(shipped, ours)
        path = self.directory / source.name
        path.write_text(text, encoding="utf-8")
        return path

    @contextlib.contextmanager
    def started(self, config, *server_flags):
        server = [self.server, "--model", f"digits={ROOT / 'models' / 'mnist-32'}", "--device", "cpu"]
        server += ["--metrics-listen", "", "--http-listen", f"127.0.0.1:{self.http_inside}", "--listen"]
        arguments = POD["initContainers"][0]["args"]
        envoy = [self.envoy, *(config if argument == "/etc/envoy/envoy.yaml" else argument for argument in arguments)]
        with running(*server, f"127.0.0.1:{self.inside}", *server_flags) as process:
            with running(*envoy):
                wait_until(lambda: listens(self.outside) and listens(self.http_outside), "Envoy listens")
                yield process

    def denoise(self, *arguments, port=None):
        return subprocess.run(
            [self.client, *arguments, "--server", f"127.0.0.1:{port or self.outside}"],
            capture_output=True,
            text=True,
            check=False,
        )

    def draw(self, name, *arguments, port=None):
        path = self.directory / name
        result = self.denoise("generate", "--labels", "7", "--seed", "1", "--out", path, *arguments, port=port)
        return path.read_bytes() if result.returncode == 0 else result.stderr


def code_of(port, method):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=20)
            return "OK"
        except grpc.RpcError as error:
            return error.code().name


class Http:
    """One connection to the HTTP port."""

    def __init__(self, port, context=None):
        if context:
            self.connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=120, context=context)
        else:
            self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def call(self, method, path, body=None, **headers):
        """The reply, of which nothing is read yet."""
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None and not isinstance(body, bytes):
            body, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        self.connection.request(method, path, body, headers)
        return self.connection.getresponse()

    def get(self, *arguments, **headers):
        """Status and body."""
        reply = self.call(*arguments, **headers)
        return reply.status, reply.read()


def generate(**params):
    """A GenerateRequest, or a StreamGenerateRequest without previews."""
    return {"params": {"model": "digits", "conditions": [{"class_label": 7}], "seed": 1, **params}}


GENERATE = generate()


def events(reply):
    """Name and data of each event, and when it came."""
    name = None
    for line in reply:
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            yield name, json.loads(line[6:]), time.monotonic()


def form(**fields):
    """A multipart form and its Content-Type; bytes are files."""
    text = b""
    for name, value in fields.items():
        file = b'; filename="image.png"\r\nContent-Type: image/png' if isinstance(value, bytes) else b""
        value = value if isinstance(value, bytes) else value.encode()
        text += b'--b\r\nContent-Disposition: form-data; name="' + name.encode() + b'"' + file
        text += b"\r\n\r\n" + value + b"\r\n"
    return text + b"--b--\r\n", "multipart/form-data; boundary=b"


def http_calls(setup, direct):
    """What clients do. `direct` is the picture of gRPC without Envoy."""
    client = Http(setup.http_outside)
    status, body = client.get("POST", "/v1/generate", GENERATE)
    picture = base64.b64decode(json.loads(body)["images"][0]["encoded"]) if status == 200 else body
    check(picture == direct, f"HTTP: the same picture {'' if picture == direct else picture[:300]}")

    for path in ("/", "/app.js", "/style.css", "/icon.svg", "/openapi.json", "/healthz", "/readyz", "/v1/server",
                 "/v1/models", "/v1/models/digits"):
        status, through = client.get("GET", path)
        inside = Http(setup.http_inside).get("GET", path)
        check((status, path == "/v1/server" or through) == (200, path == "/v1/server" or inside[1]),
              f"HTTP: GET {path} {status}")

    asked = {"model": "digits", "prompt": "7", "denoised": {"seed": 1}}
    status, body = client.get("POST", "/v1/images/generations", asked)
    check(base64.b64decode(json.loads(body)["data"][0]["b64_json"]) == direct, "HTTP: OpenAI's generations")
    status, body = client.get("POST", "/v1/images/generations", {**asked, "response_format": "url"})
    link = json.loads(body)["data"][0]["url"]
    start = f"http://127.0.0.1:{setup.http_outside}"
    check(link.startswith(start), f"HTTP: links lead through Envoy, {link[:40]}…")
    check(client.get("GET", link[len(start):]) == (200, direct), "HTTP: a link has the picture")
    edit, kind = form(image=direct, model="digits", prompt="3", **{"denoised[strength]": "0.5"})
    status, body = client.get("POST", "/v1/images/edits", edit, Content_Type=kind)
    check(status == 200, f"HTTP: a picture is uploaded and edited {body[:300] if status != 200 else ''}")
    page = {"Origin": f"http://127.0.0.1:{setup.http_outside}"}
    check(client.get("POST", "/v1/generate", GENERATE, **page)[0] == 200, "HTTP: the server's own page may call")
    check(client.get("GET", "/v1/models", Origin="http://attacker.example")[0] == 403, "HTTP: another page may not")
    check(client.get("GET", "/v1/models", Host="attacker.example")[0] == 403, "HTTP: nor one with another Host")
    named = client.get("GET", "/v1/models", Host="denoised:8080")[0]
    check(named == 200, f"HTTP: the Service's name may be called {named}")


def http_stream(setup):
    reply = Http(setup.http_outside).call(
        "POST", "/v1/generate", {**generate(steps=60), "preview": {"every_evaluations": 5}}, Accept="text/event-stream"
    )
    check(reply.status == 200, f"HTTP: a stream {reply.status} {reply.read(300) if reply.status != 200 else ''}")
    came = list(events(reply))
    start, first, last = came[0][2], next(at for name, _, at in came if name in ("progress", "preview")), came[-1][2]
    names = [name for name, _, _ in came]
    check(names[-1] == "completed" and "image" in names and "preview" in names, f"HTTP: it has {sorted(set(names))}")
    # Were they held back, all would come at once.
    check(first - start < (last - start) / 2 and last - start > 0.1,
          f"HTTP: {len(came)} events come one by one: {first - start:.3f} s to the first of progress, {last - start:.3f} s to the end")


def http_strangers(setup):
    inside, outside = Http(setup.http_inside), Http(setup.http_outside)
    load = {"model": {"name": "other", "directory": "/nowhere"}}
    for method, path, body in [
        ("POST", "/v1/models", load),
        ("DELETE", "/v1/models/none", None),
        ("PUT", "/v1/aliases/other", {"target": "none"}),
        ("DELETE", "/v1/aliases/none", None),
        ("GET", "/metrics", None),
    ]:
        status, text = inside.get(method, path, body)
        check(status not in (403, 405) and b"there is no /" not in text, f"on loopback the server has {method} {path}: {status}")
        status, text = outside.get(method, path, body)
        refused = status == 404 and b"the proxy does not forward" in text
        check(refused and json.loads(text)["error"]["status"] == "NOT_FOUND", f"Envoy does not forward it {status}")
    for path in ("/v1/jobs/../models", "/v1/images/files/%2e%2e/%2e%2e/models", "/v1//models", "/v1/%6dodels",
                 "/v1/models?stream=true", "/v1/images/files/..%2f..%2fmodels", "/v1/models/digits%2fother", "/v1/models/"):
        status = Http(setup.http_outside).get("POST", path, load)[0]
        check(status in (400, 404), f"nor POST {path}: {status}")
    # A path that Envoy answers itself, so the bound is Envoy's too.
    status = Http(setup.http_outside).get("GET", "/other", X_Large="x" * 20000)[0]
    check(status == 431, f"Envoy refuses headers of 20 KB: {status}")


def http_slow_reader(setup, server):
    """A client that asks for much and reads nothing holds up nobody, and its job ends when it goes."""
    before = memory(server)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", setup.http_outside))
    body = json.dumps({**generate(count=8, steps=500, request_id="slow"), "preview": {"format": "IMAGE_FORMAT_RAW_FLOAT32"}}).encode()
    slow.sendall(b"POST /v1/generate?stream=true HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                 + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    head = slow.recv(64)
    check(head.startswith(b"HTTP/1.1 200"), f"HTTP: a reader that stops after {head[:15]}")
    status = Http(setup.http_outside).get("POST", "/v1/generate", GENERATE)[0]
    grown = (memory(server) - before) >> 20
    check(status == 200 and grown < 64, f"HTTP: it holds up nobody else; the server grew by {grown} MiB")
    slow.close()
    state = ""

    def cancelled():
        nonlocal state
        reply = Http(setup.http_inside).get("GET", "/v1/jobs/slow")[1]
        state = json.loads(reply).get("job", {}).get("state", reply)
        return state == "JOB_STATE_CANCELLED"

    wait_until(cancelled, "HTTP: its job is cancelled when it goes")
    print(f"ok: HTTP: its job ends when it goes: {state}")


def http_drain(setup, server):
    """A stream that runs when the server drains is finished."""
    stream = events(Http(setup.http_outside).call(
        "POST", "/v1/generate?stream=true",
        {**generate(steps=60), "preview": {"every_evaluations": 10}}))
    names = [next(stream)[0]]
    while names[-1] in ("queued", "started"):
        names.append(next(stream)[0])
    server.terminate()
    time.sleep(0.2)
    try:
        status = Http(setup.http_outside).get("POST", "/v1/generate", GENERATE)[0]
    except OSError as error:
        status = error
    running = server.poll() is None
    names += [name for name, _, _ in stream]
    check(names[-1] == "completed", f"HTTP: a drain finishes a stream that runs: {names[-1]}")
    check(status == 503, f"HTTP: during it a new request gets {status}, the server ran: {running}")
    wait_until(lambda: server.poll() is not None, "the server ends")
    check(server.returncode == 0, "HTTP: then the server ends with 0")
    status = Http(setup.http_outside).get("GET", "/readyz")[0]
    check(status == 503, f"HTTP: without a server Envoy answers {status}")


def plain(setup):
    origins = ["--http-origins", "http://denoised:8080"]
    with setup.started(setup.config(PLAIN), *origins) as server:
        health = setup.denoise("health", "--wait", "120")
        check(health.returncode == 0, f"health through Envoy {health.stderr[-500:]}")
        direct = setup.draw("direct.png", port=setup.inside)
        check(setup.draw("envoy.png") == direct, "the same picture as without Envoy")

        inside = {
            method: code_of(setup.inside, method)
            for method in (
                "/denoised.v1.ModelAdmin/UnloadModel",
                "/denoised.v1.ModelAdmin/LoadModel",
                "/inference.GRPCInferenceService/RepositoryModelUnload",
                "/inference.GRPCInferenceService/RepositoryModelLoad",
            )
        }
        for method, code in inside.items():
            check(code != "UNIMPLEMENTED", f"on loopback the server has {method}: {code}")
            check(code_of(setup.outside, method) == "UNIMPLEMENTED", "Envoy does not forward it")
        infer = code_of(setup.outside, "/inference.GRPCInferenceService/ModelInfer")
        check(infer == "OK", f"Envoy forwards ModelInfer: {infer}")
        reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        check(code_of(setup.outside, reflection) == "UNIMPLEMENTED", "nor reflection")

        mebibytes = 32
        doors = [(setup.inside, "server"), (setup.outside, "Envoy"), (setup.http_outside, "Envoy's HTTP port")]
        for port, name in doors:
            before = settled_memory(server)
            sent, closed = Connection(port).flood(continuation_flood(mebibytes))
            grown = (settled_memory(server) - before) >> 20
            print(f"CONTINUATION flood to {name}: {sent} frames of 16 KiB, closed: {closed}, "
                  f"the server grew by {grown} MiB")
            if port != setup.inside:
                check(closed and grown < 8, "Envoy stops a CONTINUATION flood")

        resets = 20000
        for port, name in doors:
            sent, closed = Connection(port).flood(rapid_resets(resets))
            print(f"rapid resets to {name}: {sent} streams, closed: {closed}")
            if port != setup.inside:
                check(closed, "Envoy stops rapid resets")
        # The server itself was sent 20,000 calls, which count as this host's until it has ended them.
        wait_until(lambda: setup.draw("after.png") == direct, "it still serves")

        http_calls(setup, direct)
        http_stream(setup)
        http_strangers(setup)
        http_slow_reader(setup, server)
        admin(setup)
        http_drain(setup, server)


class Service:
    """Hands each new connection to one pod, where it stays, as a Service of Kubernetes does."""

    def __init__(self, pod):
        self.pod = pod
        self.taken = []  # the pod of each connection
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, pod = self.listener.accept()[0], self.pod
            self.taken.append(pod)
            try:
                server = socket.create_connection(("127.0.0.1", pod))
            except OSError:
                client.close()
                continue
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self.pass_on, args=(source, target), daemon=True).start()

    @staticmethod
    def pass_on(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class KeptHttp:
    """A client that keeps its connection until it is told to close it, and does not try again."""

    def __init__(self, service):
        self.client = Http(service.port)

    def draw(self):
        try:
            status, body = self.client.get("POST", "/v1/generate", GENERATE)
        except OSError as error:
            self.client.connection.close()
            return repr(error)
        return "OK" if status == 200 else f"{status} {body[:200]}"


class KeptGrpc:
    """The same of gRPC. Clients of one process would share connections."""

    def __init__(self, service):
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{service.port}", options)
        self.generate = self.channel.unary_unary("/denoised.v1.ImageGeneration/Generate")

    def draw(self):
        try:
            self.generate(b"", timeout=300)
            return "OK"
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details()}"


def rollout(flags):
    """A pod leaves while a job of it runs for long: clients that are busy lose no request."""
    lame_duck = ["--lame-duck-seconds", "5", "--grace-seconds", "120"]
    with contextlib.ExitStack() as stack:
        old, new = (Setup(flags, stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        server, _ = (stack.enter_context(setup.started(setup.config(PLAIN), *lame_duck)) for setup in (old, new))
        for setup in (old, new):
            check(setup.denoise("health", "--wait", "120").returncode == 0, "rollout: a pod serves")
        long = Http(old.http_outside).call(
            "POST", "/v1/generate?stream=true", generate(steps=1000, count=64, request_id="long"))
        check(long.status == 200, "rollout: a job runs for long on the old pod")
        services = {KeptHttp: Service(old.http_outside), KeptGrpc: Service(old.outside)}
        idle = {kind.__name__: kind(service) for kind, service in services.items()}
        for name, client in idle.items():
            check(client.draw() == "OK", f"rollout: {name} has a connection to the old pod, and then is idle")
        results, done = {kind.__name__: [] for kind in services}, threading.Event()

        def keep_drawing(kind, service):
            client = kind(service)
            while not done.is_set():
                results[kind.__name__].append(client.draw())
                time.sleep(0.05)

        threads = [threading.Thread(target=keep_drawing, args=item) for item in services.items()]
        for thread in threads:
            thread.start()
        wait_until(lambda: all(results.values()), "rollout: clients draw")

        # The kubelet: the hook, then SIGTERM. Meanwhile the endpoint goes, which takes a while.
        hook = POD["initContainers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        hook = [part.replace("127.0.0.1/9901", f"127.0.0.1/{old.admin}") for part in hook]
        status = subprocess.run(hook, check=False, timeout=20).returncode
        check(status == 0, f"rollout: the preStop hook ends with {status}")
        server.terminate()
        time.sleep(1)
        services[KeptHttp].pod, services[KeptGrpc].pod = new.http_outside, new.outside
        refused = Http(old.http_outside)
        wait_until(lambda: refused.get("POST", "/v1/generate", GENERATE)[0] == 503, "rollout: the old pod refuses")
        before = {name: len(outcomes) for name, outcomes in results.items()}
        wait_until(lambda: all(len(results[name]) > count + 2 for name, count in before.items()), "rollout: clients draw on")
        done.set()
        for thread in threads:
            thread.join()
        for kind, service in services.items():
            outcomes = results[kind.__name__]
            lost = [outcome for outcome in outcomes if outcome != "OK"]
            check(not lost, f"rollout: {kind.__name__} lost {len(lost)} of {len(outcomes)} requests {lost[:1]}")
            check(service.taken[-1] == service.pod, f"rollout: it made {len(service.taken) - 1} connections, the last to the new pod")
        for name, client in idle.items():
            first, second = client.draw(), client.draw()
            refusal = "503" in first or "UNAVAILABLE" in first
            check(refusal, f"rollout: {name}, which was idle all the time, is refused once: {first[:40]}")
            check(second == "OK", f"rollout: its next request reaches the new pod: {second[:200]}")

        # Calls about the jobs that a pod has still reach it.
        status = Http(old.http_outside).get("GET", "/v1/jobs/long")[0]
        check(status == 200 and server.poll() is None, f"rollout: the job can be looked up {status}")
        status = Http(old.http_outside).get("POST", "/v1/jobs/long/cancel", {})[0]
        check(status == 200, f"rollout: and cancelled {status}")
        last = [name for name, _, _ in events(long)][-1]
        check(last == "error", f"rollout: its stream ends with {last}")
        wait_until(lambda: server.poll() is not None, "rollout: the old server ends")
        check(server.returncode == 0, "rollout: then the old server ends with 0")


def admin(setup):
    """Envoy's own port takes nothing but what the hook asks."""
    for path in ("/quitquitquit", "/drain_listeners", "/drain_listeners?graceful", "/config_dump", "/healthcheck/fail"):
        status = Http(setup.admin).get("POST", path)[0]
        check(status == 403, f"Envoy refuses POST {path} {status}")


def certificate(directory, name):
    """tls.crt, tls.key and ca.crt as Kubernetes mounts a secret: links to ..data, a link that is
    replaced at once."""
    new = directory / f"..{name}"
    new.mkdir()
    openssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    subprocess.run(
        [*openssl, "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:denoised", "-keyout",
         new / "tls.key", "-out", new / "tls.crt"],
        check=True, capture_output=True,
    )
    shutil.copy(new / "tls.crt", new / "ca.crt")
    (directory / "..new").symlink_to(new.name)
    (directory / "..new").replace(directory / "..data")
    for file in new.iterdir():
        if not (directory / file.name).is_symlink():
            (directory / file.name).symlink_to(f"..data/{file.name}")


def tls(setup):
    secrets = setup.directory / "secrets"
    secrets.mkdir()
    certificate(secrets, "first")
    made = subprocess.run([setup.server, "--make-token", "tester"], capture_output=True, text=True, check=True)
    words = made.stdout.split()
    (secrets / "token").write_text(next(word for word in words if word.startswith("denoised_")))
    entry = made.stdout[made.stdout.index('"tester"') :].strip()
    (secrets / "clients.json").write_text("{" + entry + "}")
    setup.config(TLS / "certificate.yaml")
    setup.config(TLS / "authority.yaml")
    flags = ["--tls-cert", secrets / "tls.crt", "--tls-key", secrets / "tls.key", "--clients",
             secrets / "clients.json", "--credentials-refresh-seconds", "1"]
    client = ["--tls-ca", secrets / "ca.crt", "--tls-server-name", "denoised"]
    token = ["--token-file", secrets / "token"]
    with setup.started(setup.config(TLS / "envoy.yaml"), *flags):
        health = setup.denoise("health", "--wait", "120", *client)
        check(health.returncode == 0, f"TLS: health through Envoy {health.stderr[-500:]}")
        check(isinstance(setup.draw("tls.png", *client, *token), bytes), "TLS: a token passes through")
        refused = setup.draw("none.png", *client)
        check("no bearer token" in refused, "TLS: without a token the server refuses")
        check(isinstance(setup.draw("plain.png"), str), "TLS: plaintext is refused")
        trusting = ssl.create_default_context(cafile=secrets / "ca.crt")
        trusting.check_hostname = False  # the test calls an address
        bearer = {"Authorization": "Bearer " + (secrets / "token").read_text()}
        status = Http(setup.http_outside, trusting).get("POST", "/v1/generate", GENERATE, **bearer)[0]
        check(status == 200, f"TLS: HTTP with a token {status}")
        status = Http(setup.http_outside, trusting).get("POST", "/v1/generate", GENERATE)[0]
        check(status == 401, f"TLS: HTTP without a token {status}")
        asked = {"model": "digits", "prompt": "7", "response_format": "url"}
        reply = Http(setup.http_outside, trusting).get("POST", "/v1/images/generations", asked, **bearer)
        link = json.loads(reply[1])["data"][0]["url"]
        check(link.startswith("https://"), f"TLS: HTTP's links {link[:30]}…")
        try:
            status = Http(setup.http_outside).get("GET", "/healthz")[0]
        except OSError as error:
            status = error
        check(status != 200, f"TLS: plain HTTP is refused: {status}")
        trusting.set_alpn_protocols(["h2", "http/1.1"])
        with socket.create_connection(("127.0.0.1", setup.http_outside)) as raw:
            with trusting.wrap_socket(raw) as socket_:
                check(socket_.selected_alpn_protocol() == "h2", "TLS: browsers get HTTP/2")

        def subject():
            return ssl.get_server_certificate(("127.0.0.1", setup.outside))

        old = subject()
        certificate(secrets, "second")
        wait_until(lambda: subject() != old, "TLS: Envoy takes a new certificate")
        answer = None
        for _ in range(20):
            answer = setup.draw("new.png", *client, *token)
            if isinstance(answer, bytes):
                break
            time.sleep(1)
        check(isinstance(answer, bytes), f"TLS: it serves with it {answer[-300:] if isinstance(answer, str) else ''}")
        print("ok: TLS: a new certificate is taken without a restart")


def find_envoy():
    installed = sorted((ROOT / "build" / "tools" / "envoy").glob("lib/python3*/site-packages/envoy/_bin/envoy"))
    return os.environ.get("DENOISED_ENVOY") or (installed[0] if installed else shutil.which("envoy"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--envoy", default=find_envoy())
    parser.add_argument("--build", default=ROOT / "build" / "release")
    flags = parser.parse_args()
    if not flags.envoy:
        print("skipped: there is no Envoy; scripts/bootstrap --tests installs it from PyPI")
        sys.exit(77)
    version = subprocess.run([flags.envoy, "--version"], capture_output=True, text=True, check=True)
    print(version.stdout.strip())
    for test in (plain, tls):
        with tempfile.TemporaryDirectory() as directory:
            test(Setup(flags, directory))
    rollout(flags)
    print("All passed.")


if __name__ == "__main__":
    main()
