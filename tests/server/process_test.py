#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The denoised process: flags, exit codes, logs, signals.

  process_test.py --binary build/dev/tests/server/denoised_with_fake_engine
"""

import argparse
import asyncio
import concurrent.futures
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

from running import Running

BINARY = None


def run(*flags):
    return subprocess.run([BINARY, *flags], capture_output=True, text=True, timeout=120)


BODY = b'{"params": {"steps": 20}, "preview": {}}'
STREAM = (b"POST /v1/generate?stream=true HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
          b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY)) + BODY


class ProcessTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.model = os.path.join(directory.name, "digits")
        self.broken = os.path.join(directory.name, "broken")
        for path in (self.model, self.broken):
            os.mkdir(path)
            with open(os.path.join(path, "config.json"), "w") as file:
                file.write("{}")

    def test_version_and_help(self):
        version = run("--version")
        self.assertEqual(version.returncode, 0)
        self.assertRegex(version.stdout, r"^denoised \d+\.\d+\.\d+\n$")
        help_text = run("--help")
        self.assertEqual(help_text.returncode, 0)
        self.assertIn("--model", help_text.stdout)

    def test_a_full_stdout_is_an_error(self):
        silent = ["--listen", "127.0.0.1:0", "--http-listen", "", "--metrics-listen", ""]
        for flags in (["--version"], ["--help"], ["--print-config"],
                      ["--check", "--model", f"digits={self.model}", *silent]):
            with open("/dev/full", "w") as full:
                result = subprocess.run([BINARY, *flags], stdout=full, stderr=subprocess.PIPE, text=True,
                                        timeout=120)
            self.assertEqual(result.returncode, 1, flags)
            self.assertIn("denoised: stdout cannot be written", result.stderr)

    def test_bad_flags(self):
        for flags in (["--nonsense"], [], ["--model", "x"], ["--listen", "x", "--model", "a=/"]):
            result = run(*flags)
            self.assertEqual(result.returncode, 2, flags)
            self.assertIn("denoised: ", result.stderr)
            self.assertEqual(result.stdout, "")

    def test_check(self):
        model, free = f"digits={self.model}", ["--listen", "127.0.0.1:0", "--http-listen", "",
                                              "--metrics-listen", ""]
        good = run("--check", "--model", model, *free)
        self.assertEqual(good.returncode, 0, good.stderr)
        self.assertRegex(good.stdout, "^ok +listen 127.0.0.1:0\n"
                                      "ok +device fake:0  .*\nok +device fake:1  .*\n"
                                      "ok +model digits@1  .*UNet2DModel, 1.0 M parameters, fp32.*\n$")
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = f"127.0.0.1:{other.getsockname()[1]}"
            bad = run("--check", "--model", f"bad={self.broken}", "--model", model,
                      "--listen", taken, "--http-listen", taken, "--metrics-listen", taken,
                      "--tls-cert", "absent.crt",
                      "--tls-key", "absent.key", "--tls-client-ca", "absent.ca",
                      "--clients", "absent.json")
        self.assertEqual(bad.returncode, 2)
        starts = ["failed  certificate absent.crt: ", "failed  client authority absent.ca: ",
                  "failed  clients absent.json: ", f"failed  listen {taken}: ",
                  f"failed  http {taken}: ", f"failed  metrics {taken}: ", "ok      device fake:0  ",
                  "ok      device fake:1  ", "failed  model bad@1: ", "ok      model digits@1  "]
        self.assertEqual([line[:len(start)] for line, start in
                          zip(bad.stdout.splitlines(), starts, strict=True)], starts)

    def test_check_exits_as_a_start(self):
        ports = ["--http-listen", "", "--metrics-listen", ""]
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = f"127.0.0.1:{other.getsockname()[1]}"
            free = ["--listen", "127.0.0.1:0"]
            for code, flags in ((2, ["--max-rows", "1", *free]),
                                (2, ["--devices", "0,0", *free]),
                                (2, ["--grace-seconds", "soon", *free]),
                                (2, ["--tls-cert", "absent.crt", "--tls-key", "absent.key", *free]),
                                (2, ["--clients", "absent.json", "--allow-plaintext-tokens", *free]),
                                (2, ["--state-dir", os.path.join(self.model, "config.json"), *free]),
                                (1, ["--listen", taken])):
                flags = ["--model", f"digits={self.model}", *ports, *flags]
                self.assertEqual([run(*flags).returncode, run("--check", *flags).returncode], [code, code], flags)
        flags = ["--model", f"bad={self.broken}", *ports, *free]
        self.assertEqual([run(*flags).returncode, run("--check", *flags).returncode], [1, 1])

    def test_print_config(self):
        printed = run("--print-config", "--model", f"digits={self.model}", "--max-rows", "3",
                      "--listen", "127.0.0.1:0", "--http-listen", "", "--metrics-listen", "",
                      "--log-format", "json")
        self.assertEqual(printed.returncode, 0, printed.stderr)
        self.assertEqual(json.loads(printed.stdout)["max-rows"], 3)
        path = os.path.join(os.path.dirname(self.model), "server.json")
        with open(path, "w") as file:
            file.write(printed.stdout)
        self.assertEqual(run("--print-config", "--config", path).stdout, printed.stdout)
        self.assertEqual(run("--check", "--config", path).returncode, 0)

    def start_with_hangup(self, action):
        """What the processes of this test inherit: SIG_IGN is what nohup does."""
        self.addCleanup(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, action))

    def test_signals_end_it_cleanly(self):
        self.start_with_hangup(signal.SIG_DFL)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            with Running(BINARY, "--model", f"digits={self.model}") as server:
                listening = server.wait_for("listening")
                self.assertRegex(listening["address"], r"^127\.0\.0\.1:[1-9]\d*$")
                self.assertEqual(listening["device"], "fake:0,fake:1")
                server.wait_for("serving")
                server.process.send_signal(number)
                server.wait_for("stopped")
                self.assertEqual(server.process.wait(60), 0)

    def test_a_second_hangup_does_not_cut_the_drain_off(self):
        # A terminal that closes sends two. The lame duck keeps the drain going meanwhile.
        self.start_with_hangup(signal.SIG_DFL)
        with Running(BINARY, "--model", f"digits={self.model}", "--lame-duck-seconds", "1") as server:
            server.wait_for("serving")
            server.process.send_signal(signal.SIGHUP)
            server.wait_for("draining")
            server.process.send_signal(signal.SIGHUP)
            server.wait_for("stopped")
            self.assertEqual(server.process.wait(60), 0)

    def test_nohup_outlives_the_terminal(self):
        self.start_with_hangup(signal.SIG_IGN)
        with Running(BINARY, "--model", f"digits={self.model}") as server:
            server.wait_for("serving")
            server.process.send_signal(signal.SIGHUP)
            with self.assertRaises(subprocess.TimeoutExpired):
                server.process.wait(1.5)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("stopped")
            self.assertEqual(server.process.wait(60), 0)

    def test_uploads_hold_no_more_than_the_bound(self):
        try:
            import grpc
        except ImportError:
            self.skipTest("there is no python3-grpcio")
        # GenerateRequest{params{init_image{encoded}}}, 40 MB of it, that is no picture.
        def field(tag, content):
            length, size = len(content), b""
            while length > 127:
                size, length = size + bytes([length & 127 | 128]), length >> 7
            return tag + size + bytes([length]) + content
        upload = field(b"\x0a", field(b"\xaa\x01", field(b"\x0a", bytes(40 << 20))))
        with Running(BINARY, "--model", f"digits={self.model}", "--max-buffered-bytes",
                     str(64 << 20)) as server:
            address = server.wait_for("listening")["address"]
            server.wait_for("serving")

            def call(message):
                options = [("grpc.use_local_subchannel_pool", 1),
                           ("grpc.max_send_message_length", -1)]
                with grpc.insecure_channel(address, options=options) as channel:
                    try:
                        channel.unary_unary("/denoised.v1.ImageGeneration/Generate")(
                            message, timeout=60)
                        return "OK"
                    except grpc.RpcError as error:
                        return error.code().name
            with concurrent.futures.ThreadPoolExecutor(12) as pool:
                codes = set(pool.map(call, [upload] * 12))
            # UNAVAILABLE: gRPC gave up a whole connection.
            self.assertLessEqual(codes, {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAVAILABLE"})
            self.assertIn("RESOURCE_EXHAUSTED", codes)
            with open(f"/proc/{server.process.pid}/status") as file:
                peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
            # The bound, one message that is being parsed, and the program.
            self.assertLess(peak << 10, 320 << 20)
            end = time.monotonic() + 60
            while call(b"") != "OK":
                self.assertLess(time.monotonic(), end, "it did not recover")

    def test_a_request_is_one_line_of_the_log(self):
        try:
            import grpc
        except ImportError:
            self.skipTest("there is no python3-grpcio")
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        with Running(BINARY, "--model", f"digits={self.model}") as server:
            address = server.wait_for("listening")["address"]
            server.wait_for("serving")
            with grpc.insecure_channel(address) as channel:
                channel.unary_unary("/denoised.v1.ImageGeneration/Generate")(
                    b"", timeout=20, metadata=[("traceparent", f"00-{trace}-00f067aa0ba902b7-01")])
            line = server.wait_for("request")
            self.assertEqual((line["method"], line["code"], line["client"], line["trace_id"],
                              line["parent_span_id"], line["model"], line["count"]),
                             ("Generate", "OK", "anonymous", trace, "00f067aa0ba902b7", "digits", 1))
            self.assertRegex(line["span_id"], "^[0-9a-f]{16}$")
            self.assertRegex(line["peer"], "^ipv4:127")
            self.assertLessEqual(line["queued_seconds"], line["seconds"])
            self.assertTrue(line["request_id"])

    def test_every_line_of_the_log_is_json(self):
        with Running(BINARY, "--model", f"digits={self.model}", "--log-level", "debug") as server:
            address = server.wait_for("listening")["address"]
            server.wait_for("serving")
            host, port = address.split(":")
            for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(100)):
                with socket.create_connection((host, int(port))) as connection:
                    connection.sendall(garbage)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("stopped")  # every line before it was read as JSON

    def test_five_hundred_event_streams_take_no_memory_that_stays(self):
        async def stream(port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(STREAM)
            text = await reader.read()
            writer.close()
            return re.findall(rb"^event: (.*?)\r?$", text, re.MULTILINE)

        async def round_of(port):
            return await asyncio.gather(*(stream(port) for _ in range(500)))

        with Running(BINARY, "--model", f"digits={self.model}",
                     http_listen="127.0.0.1:0") as server:
            port = int(server.wait_for("listening")["http"].rsplit(":", 1)[1])
            server.wait_for("serving")
            resident = []
            for _ in range(4):
                for events in asyncio.run(round_of(port)):
                    self.assertEqual((events[0], events[-1]), (b"queued", b"completed"))
                    self.assertEqual([events.count(name) for name in (b"image", b"completed")], [1, 1])
                    self.assertLessEqual(set(events), {b"queued", b"started", b"progress", b"preview", b"image",
                                                       b"completed"})
                    # How many come along is a matter of time: 2,700 of 10,000 were seen on a quiet machine, and
                    # none on a busy one, as a reader that is late gets the image alone.
                    self.assertLess(events.count(b"preview"), 20, "evaluations")
                with open(f"/proc/{server.process.pid}/statm") as statm:
                    resident.append(int(statm.read().split()[1]) * resource.getpagesize() >> 10)
        # Sanitizers keep freed memory aside.
        if not self.sanitized():
            self.assertLess(resident[-1] - resident[0], 8 << 10, f"KiB after each round: {resident}")

    def test_events_leave_nothing_in_the_heap(self):
        """By the server's own count of its heap, when it is idle: 20 bytes of an event that stayed would
        show."""
        async def stream(port, slow):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2048)
            writer.write(STREAM)
            text = b""
            while piece := await reader.read(512 if slow else 1 << 16):
                text += piece
                await asyncio.sleep(0.001 if slow else 0)
            writer.close()
            return text.count(b"event: completed"), text.count(b"\nevent: ")

        async def round_of(port):
            return await asyncio.gather(*(stream(port, i % 4 == 0) for i in range(50)))

        with Running(BINARY, "--model", f"digits={self.model}", http_listen="127.0.0.1:0",
                     metrics_listen="127.0.0.1:0") as server:
            listening = server.wait_for("listening")
            port = int(listening["http"].rsplit(":", 1)[1])
            server.wait_for("serving")

            def metric(name):
                with urllib.request.urlopen(listening["metrics"]) as page:
                    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page.read().decode(), re.MULTILINE)
                return sum(map(float, found))

            heap, events = [], []
            for _ in range(32):
                completed, sent = map(sum, zip(*asyncio.run(round_of(port))))
                self.assertEqual(completed, 50)
                while metric("denoised_http_connections") > 0:
                    time.sleep(0.01)
                heap.append(metric("denoised_heap_bytes"))
                events.append(sent)
            # Caches of threads fill first: on a busy machine, where few events come, 11 to 34 bytes an event were
            # seen in the second half of 24 rounds, and on a quiet one 3. Of 32 rounds the last ones are looked at, and
            # of each eight the least: on a busy machine one may have 90 KB more than the next.
            last = 8
            grown = min(heap[-last:]) - min(heap[-2 * last:-last])
            self.assertLess(grown, 20 * sum(events[-last:]), f"bytes after each round: {heap}")

    @staticmethod
    def sanitized():
        with open(BINARY, "rb") as program:
            return b"__asan_init" in program.read()

    def test_no_model_is_an_error(self):
        with Running(BINARY, "--model", f"digits={self.broken}") as server:
            self.assertIn("broken", server.wait_for("no model could be loaded")["error"])
            self.assertEqual(server.process.wait(60), 1)

    def test_wrong_settings_are_told_from_what_may_pass(self):
        result = run("--model", f"digits={self.model}", "--listen", "127.0.0.1:0",
                     "--http-listen", "", "--metrics-listen", "", "--tls-cert", "absent.crt", "--tls-key", "absent.key")
        self.assertEqual(result.returncode, 2)
        self.assertIn("absent.crt", result.stderr)

    def test_a_signal_does_not_wait_for_a_model(self):
        slow = os.path.join(os.path.dirname(self.model), "slow")
        os.mkdir(slow)
        with open(os.path.join(slow, "config.json"), "w") as file:
            file.write("{}")
        with Running(BINARY, "--model", f"digits={self.model}", "--model", f"b={slow}") as server:
            server.wait_for("model ready")
            server.process.send_signal(signal.SIGTERM)
            self.assertEqual(server.process.wait(60), 0)  # the model would take an hour
            self.assertNotIn('"serving"', "".join(server.lines))

    def test_a_signal_does_not_wait_for_a_model_that_an_admin_loads(self):
        slow = os.path.join(os.path.dirname(self.model), "slow")
        os.mkdir(slow)
        with open(os.path.join(slow, "config.json"), "w") as file:
            file.write("{}")
        with Running(BINARY, "--model", f"digits={self.model}", "--model-roots", os.path.dirname(self.model),
                     "--lame-duck-seconds", "0", "--grace-seconds", "1", http_listen="127.0.0.1:0") as server:
            base = server.wait_for("listening")["http"]
            server.wait_for("serving")

            def load():
                request = urllib.request.Request(
                    f"{base}/v1/models", json.dumps({"name": "b", "directory": slow}).encode(),
                    {"Content-Type": "application/json"})
                try:
                    return urllib.request.urlopen(request, timeout=60).status
                except urllib.error.HTTPError as error:
                    return error.code

            def states():
                with urllib.request.urlopen(f"{base}/v1/models", timeout=60) as reply:
                    return [model["state"] for model in json.load(reply)["models"]]

            with concurrent.futures.ThreadPoolExecutor() as pool:
                loading = pool.submit(load)
                while "MODEL_STATE_LOADING" not in states():
                    time.sleep(0.02)
                server.process.send_signal(signal.SIGTERM)
                self.assertEqual(server.process.wait(60), 0)  # the model would take an hour
                self.assertEqual(loading.result(), 503)

    def test_it_ends_with_its_last_device(self):
        with Running(BINARY, "--model", f"digits={self.model}", "--model-roots", os.path.dirname(self.model),
                     http_listen="127.0.0.1:0") as server:
            base = server.wait_for("listening")["http"]
            server.wait_for("serving")

            def lose(device):
                path = os.path.join(os.path.dirname(self.model), f"loses-device-{device}")
                os.mkdir(path)
                with open(os.path.join(path, "config.json"), "w") as file:
                    file.write("{}")
                body = json.dumps({"name": f"model{device}", "directory": path}).encode()
                request = urllib.request.Request(f"{base}/v1/models", body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=60) as reply:
                    self.assertEqual(reply.status, 200)

            lose(0)
            lost = server.wait_for("a device is lost")
            self.assertEqual((lost["device"], lost["devices_left"]), ("fake:0", 1))
            with urllib.request.urlopen(f"{base}/v1/models", timeout=60) as reply:
                self.assertEqual(len(json.load(reply)["models"]), 2, "it serves on")
            self.assertIsNone(server.process.poll())
            lose(1)
            self.assertIn("fell off the bus", server.wait_for("no device is left")["error"])
            server.wait_for("stopped")
            self.assertEqual(server.process.wait(60), 1)

    def test_the_service_manager_is_told_its_state(self):
        path = os.path.join(os.path.dirname(self.model), "notify")
        for name, address in ((path, path), (f"@denoised-{os.getpid()}",
                                             f"\0denoised-{os.getpid()}")):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                manager.bind(address)
                manager.settimeout(60)
                with Running(BINARY, "--model", f"digits={self.model}",
                             environment={"NOTIFY_SOCKET": name}) as server:
                    self.assertEqual(manager.recv(1024), b"STATUS=loading models")
                    self.assertEqual(manager.recv(1024), b"READY=1\nSTATUS=serving")
                    server.wait_for("serving")
                    server.process.send_signal(signal.SIGTERM)
                    self.assertEqual(manager.recv(1024), b"STOPPING=1\nSTATUS=draining")
                    self.assertEqual(server.process.wait(60), 0)

    def test_a_service_manager_that_is_gone_does_no_harm(self):
        with Running(BINARY, "--model", f"digits={self.model}",
                     environment={"NOTIFY_SOCKET": "/nonexistent/notify"}) as server:
            server.wait_for("serving")
            server.process.send_signal(signal.SIGTERM)
            self.assertEqual(server.process.wait(60), 0)

    def test_a_server_without_a_model_is_never_ready(self):
        path = os.path.join(os.path.dirname(self.model), "notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(path)
            manager.settimeout(60)
            with Running(BINARY, "--model", f"digits={self.broken}",
                         environment={"NOTIFY_SOCKET": path}) as server:
                self.assertEqual(server.process.wait(60), 1)
            self.assertEqual([manager.recv(1024), manager.recv(1024)],
                             [b"STATUS=loading models", b"STOPPING=1\nSTATUS=draining"])

    def test_port_in_use_is_an_error(self):
        with Running(BINARY, "--model", f"digits={self.model}") as server:
            address = server.wait_for("listening")["address"]
            second = run("--model", f"digits={self.model}", "--listen", address,
                         "--http-listen", "", "--metrics-listen", "")
            self.assertEqual(second.returncode, 1)
            self.assertIn(address, second.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    options, rest = parser.parse_known_args()
    BINARY = options.binary
    unittest.main(argv=[sys.argv[0]] + rest, verbosity=2)
