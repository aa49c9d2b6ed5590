# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python client share. Importing it ends the test with 77 if a module is missing."""

import os
import pathlib
import socket
import sys
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "client" / "python"
MODEL = ROOT / "models" / "mnist-32"
sys.path[:0] = [str(PACKAGE / "src"), str(ROOT / "tests" / "server")]

try:
    import google.protobuf  # noqa: F401
    import grpc  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}; install python3-grpcio and python3-protobuf")
    sys.exit(77)

from running import Running  # noqa: E402


def serve(*flags, **options):
    """A server with the digits; use it in a `with`."""
    return Running(os.environ["DENOISED_BINARY"], "--model", f"digits={MODEL}", *flags, **options)


def address(server):
    server.wait_for("serving", seconds=120)
    return server.wait_for("listening")["address"]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Proxy:
    """Forwards a port of loopback to a server, and can break its connections."""

    def __init__(self, target):
        host, port = target.rsplit(":", 1)
        self.target = host, int(port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.listener.getsockname()[1]
        self.lock = threading.Lock()
        self.open = []
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection(self.target)
            except OSError:
                return
            with self.lock:
                self.accepted += 1
                self.open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    @staticmethod
    def _copy(source, sink):
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def cut(self):
        with self.lock:
            for end in self.open:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
                end.close()
            self.open = []

    def close(self):
        self.listener.close()
        self.cut()
