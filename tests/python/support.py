# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python client share. Importing it ends the test with 77 if a module is missing."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "client" / "python"
MODEL = ROOT / "models" / "mnist-32"
# Newer releases of grpcio abort in a process that forks.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
sys.path[:0] = [str(PACKAGE / "src"), str(ROOT / "tests" / "server")]

try:
    import google.protobuf  # noqa: F401
    import grpc  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}; install python3-grpcio and python3-protobuf")
    sys.exit(77)

from free_port import free_port  # noqa: E402,F401
from proxy import Proxy  # noqa: E402,F401
from running import Running  # noqa: E402


def serve(*flags, **options):
    """A server with the digits; use it in a `with`."""
    return Running(os.environ["DENOISED_BINARY"], "--model", f"digits={MODEL}", *flags, **options)


def address(server):
    server.wait_for("serving", seconds=120)
    return server.wait_for("listening")["address"]
