#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the example notebook against the server with mnist-32 on the CPU, and another model before it."""

import os
import sys
import tempfile

import support

try:
    import ipykernel  # noqa: F401
    import jupyter_client
    import nbclient
    import nbformat
except ImportError as error:
    print(f"skipped: {error}; install python3-nbclient and python3-ipykernel")
    sys.exit(77)

NOTEBOOK = support.PACKAGE / "examples" / "digits.ipynb"
WORDS = support.ROOT / "tests" / "models" / "latent" / "sd1"  # small, and reads prompts


def outputs_of(book, text):
    """The outputs of the one cell whose source has `text`."""
    cells = [cell for cell in book.cells if text in cell.source and cell.cell_type == "code"]
    assert len(cells) == 1, text
    return cells[0].outputs


def main():
    book = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "check it in without outputs"
    with support.Running(os.environ["DENOISED_BINARY"], "--model", f"words={WORDS}",
                         "--model", f"digits={support.MODEL}") as server, tempfile.TemporaryDirectory() as folder:
        # The kernel inherits these.
        os.environ["DENOISE_SERVER"] = support.address(server)
        os.environ["PYTHONPATH"] = str(support.PACKAGE / "src")
        os.environ["IPYTHONDIR"] = os.environ["JUPYTER_RUNTIME_DIR"] = folder
        # Sockets in a folder: another process can take a free port before the kernel does. The limits
        # of time only guard against hangs.
        kernel = jupyter_client.AsyncKernelManager(
            kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")
        client = nbclient.NotebookClient(book, km=kernel, timeout=600, startup_timeout=600,
                                         resources={"metadata": {"path": folder}})
        client.execute(cleanup_kc=True)  # which ends the kernel
        with open(f"{folder}/seven.png", "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    html = outputs_of(book, "labels=range(10)")[0]["data"]["text/html"]
    assert html.count("data:image/png;base64,") == 10, html[:200]
    assert "image/png" in outputs_of(book, "seven.save")[0]["data"]
    shown = outputs_of(book, "notebook.watch(")
    assert len(shown) == 1, shown  # updates replace it
    html = shown[0]["data"]["text/html"]
    assert "3 images in" in html and html.count("data:image/png") == 3, html[:200]
    assert "params.steps" in outputs_of(book, "except denoised")[0]["text"]
    print("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
