#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What docs/training.md promises: the server serves each snapshot of a run that goes on.

usage: serve_test.py DENOISE_TRAIN DENOISED DENOISE [unittest arguments]"""

import hashlib
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "server"))
from run_test import NETWORK, png
from running import Running

TRAIN = SERVER = CLIENT = None


class ServeTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / "network.json").write_text(json.dumps(NETWORK))
        for label, of in enumerate(("across", "down")):
            (self.root / "pictures" / of).mkdir(parents=True)
            for i in range(4):
                value = lambda x, y: 255 * (((x if label else y) + i) // 2 % 2)
                (self.root / "pictures" / of / f"{i}.png").write_bytes(png(value))

    def arguments(self, output, **flags):
        settings = {"data": "pictures", "network": "network.json", "batch": 16, "chunks": 2,
                    "class-dropout": 0.1, "learning-rate": 2e-3, "output": output, **flags}  # fmt: skip
        return [TRAIN] + [f"--{k}={v}" for k, v in settings.items()]

    def steps_per_second(self):
        start = time.monotonic()
        said = subprocess.run(self.arguments("first", steps=60, **{"log-steps": 50}), cwd=self.root,
                              capture_output=True, text=True, timeout=120)  # fmt: skip
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertLess(time.monotonic() - start, 60)
        return float(re.search(r"step 50/60.* ([\d.]+) images/s", said.stderr)[1]) / 16

    def generate(self, address, *flags):
        done = subprocess.run(
            [CLIENT, "--server", address, "generate", "--labels", "across", "--seed", "5", "--out",
             "drawn.png", "--json", *flags],
            cwd=self.root, capture_output=True, text=True, timeout=60)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        picture = (self.root / "drawn.png").read_bytes()
        return re.search(r'"model_version": ?"([^"]+)"', done.stdout)[1], picture

    def previews(self, address):
        """The pictures that the command shows in a terminal, one after the other. Some previews are
        skipped where the client is slower than the server, so there are many."""
        ours, theirs = pty.openpty()
        client = subprocess.Popen(
            [CLIENT, "--server", address, "generate", "--labels", "across", "--steps", "400",
             "--previews", "--out", "shown.png"],
            cwd=self.root, stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"})  # fmt: skip
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 1 << 16):
                shown += block
        except OSError:  # the other end was closed
            pass
        finally:
            os.close(ours)
            client.kill()
        self.assertEqual(client.wait(), 0, shown)
        # Every frame is drawn over the one before.
        frames = re.split(r"\x1b\[\d+F", shown.decode(errors="replace"))
        return {"".join(line for line in frame.splitlines() if "▀" in line) for frame in frames} - {""}

    def test_snapshots_are_served_while_the_run_goes_on(self):
        # A server reads a model when it has not changed for a second.
        every = max(1, math.ceil(4 * self.steps_per_second()))
        trainer = subprocess.Popen(
            self.arguments("run", steps=10**6, **{"checkpoint-steps": every, "log-steps": every}),
            cwd=self.root, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
        said = []
        reader = threading.Thread(target=lambda: said.extend(trainer.stderr))
        reader.start()
        try:
            self.wait(lambda: any(line.startswith("saved step") for line in said), said)
            with Running(SERVER, "--model", f"pets={self.root}/run/model", "--reload-models-seconds",
                         "1") as server:  # fmt: skip
                address = server.wait_for("listening")["address"]
                server.wait_for("serving")
                pictures = {}

                def two_versions():
                    version, picture = self.generate(address)
                    self.assertEqual(pictures.setdefault(version, picture), picture)
                    return len(pictures) >= 2

                self.wait(two_versions, server.lines)
                frames = self.previews(address)
                # The trainer was there all the time, and goes on.
                self.assertIsNone(trainer.poll(), said)
                saved = sum(line.startswith("saved step") for line in said)
                self.wait(lambda: sum(line.startswith("saved step") for line in said) > saved, said)
            trainer.send_signal(signal.SIGTERM)
            self.assertEqual(trainer.wait(timeout=60), 0, said)
        finally:
            trainer.kill()
            trainer.wait()
            reader.join()
            trainer.stderr.close()
        digests = [hashlib.sha256(picture).hexdigest() for picture in pictures.values()]
        self.assertEqual(len(set(digests)), len(digests), pictures.keys())
        # The first is black; then there are previews, and the picture.
        self.assertGreater(len(frames), 2)

    def wait(self, condition, told):
        limit = time.monotonic() + 120
        while not condition():
            self.assertLess(time.monotonic(), limit, told)
            time.sleep(0.2)


if __name__ == "__main__":
    TRAIN, SERVER, CLIENT = (str(Path(each).resolve()) for each in sys.argv[1:4])
    del sys.argv[1:4]
    unittest.main(verbosity=1)
