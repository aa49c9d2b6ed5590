#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python code of the wire contract, which is checked in so that installing needs no protoc.

    stubs.py --protoc protoc --contract build/dev/proto/client_contract            compares
    stubs.py --protoc protoc --contract build/dev/proto/client_contract --write    writes

`cmake --build build/dev --target denoised_python_stubs` does the latter. The contract is the one of the
C++ client: google.rpc and grpc.health.v1 under names of our own, so that a program may also import
googleapis-common-protos, grpcio-health-checking or Triton's client. Code of another protoc may need a
newer protobuf at run time, so the version is fixed: it is that of Debian 12 and Ubuntu 24.04, and of
grpcio-tools 1.51.1.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

VERSION = "3.21.12"
PACKAGE = pathlib.Path(__file__).resolve().parent / "src"
FOLDERS = ("v1", "rpc", "health")
SPDX = "# SPDX-License-Identifier: Apache-2.0\n"


def generate(protoc, contract):
    """{path below src: content}"""
    files = {f"denoised/{folder}/__init__.py": SPDX for folder in FOLDERS}
    protos = sorted(str(path.relative_to(contract)) for path in contract.glob("denoised/*/*.proto"))
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([protoc, f"--proto_path={contract}", f"--python_out={out}",
                        f"--pyi_out={out}", *protos], check=True)
        for path in pathlib.Path(out).rglob("*_pb2.py*"):
            files[str(path.relative_to(out))] = SPDX + path.read_text()
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protoc", required=True)
    parser.add_argument("--contract", required=True, type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    flags = parser.parse_args()
    version = subprocess.run([flags.protoc, "--version"], check=True, capture_output=True,
                             text=True).stdout.split()[-1]
    if version != VERSION:
        print(f"skipped: protoc is {version}; the code is made by {VERSION}")
        return 77
    files = generate(flags.protoc, flags.contract)
    stale = [name for name, text in sorted(files.items())
             if not (PACKAGE / name).exists() or (PACKAGE / name).read_text() != text]
    stale += [str(path.relative_to(PACKAGE)) for folder in FOLDERS
              for path in sorted((PACKAGE / "denoised" / folder).glob("*.py*"))
              if str(path.relative_to(PACKAGE)) not in files]
    if flags.write:
        for name in stale:
            path = PACKAGE / name
            if name in files:
                path.parent.mkdir(exist_ok=True)
                path.write_text(files[name])
            else:
                path.unlink()
        print(f"{len(stale)} files changed")
        return 0
    for name in stale:
        print(f"FAILED: {name} is not what the contract says; run "
              "cmake --build build/dev --target denoised_python_stubs")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
