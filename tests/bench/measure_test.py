#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""measure.py without a GPU: fake_worker.py stands for all that it starts."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import make_tables
import turns


class MeasureTest(unittest.TestCase):
    def setUp(self):
        self.out = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.out)

    def measure(self, *flags):
        done = subprocess.run(
            [sys.executable, HERE / "measure.py", *flags, "--fake=" + str(HERE / "fake_worker.py"),
             f"--out={self.out}", "--commit=abc", "--requests=1"],
            capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def read(self, topic):
        return json.loads((self.out / f"{topic}.json").read_text())

    def test_models_are_measured_in_turns(self):
        self.measure("models", "--models=cifar10-32:1:16,adm-64:1", "--max-autotune=adm-64:1",
                     "--rounds=3", "--seconds=1000")
        rows = self.read("models")["rows"]
        self.assertEqual([row["name"] for row in rows],
                         ["cifar10-32/rows:1", "cifar10-32/rows:16", "adm-64/rows:1"])
        self.assertEqual(list(rows[2]["peers"]),
                         ["torch.compile, one graph", "max-autotune, one graph"])
        # The fakes count: denoised's worker measures the rows of a model one after the other.
        self.assertEqual(rows[0]["peers"]["torch.compile, one graph"]["pairs"],
                         [[2.01, 3.01], [2.02, 3.02], [2.03, 3.03]])
        self.assertEqual(rows[1]["peers"]["torch.compile, one graph"]["pairs"][0], [2.04, 3.01])
        self.assertEqual(self.read("models")["context"]["commit"], "abc")

    def test_the_other_topics_write_what_the_tables_read(self):
        self.measure("digits", "ops", "clocks", "portable", "--models=cifar10-32:1", "--rounds=1",
                     "--seconds=1000")
        digits = self.read("digits")["rows"]
        self.assertIn("PyTorch eager", digits[0]["left_out"])
        self.assertEqual(len(digits[1]["peers"]), 1)
        ops = self.read("ops")
        self.assertEqual(len(ops["rows"]), 6)
        self.assertEqual(ops["rows"][1]["left_out"], {"all": "refused"})
        self.assertIn("cuBLASLt", ops["rows"][3]["peers"])

        def data(name):
            path = self.out / f"{name}.json"
            return json.loads(path.read_text()) if path.exists() else None

        for name in ("digits", "convolutions", "linears", "clocks", "portable", "ceilings"):
            self.assertTrue(make_tables.TABLES[name](data), name)

    def test_what_there_was_no_time_for_is_named(self):
        self.measure("models", "ops", "--models=cifar10-32:1", "--rounds=1", "--seconds=2")
        self.assertEqual(self.read("models")["rows"][0]["left_out"],
                         {"torch.compile, one graph": "no time left"})
        self.assertEqual(len(self.read("ops")["left_out"]), 6)


class WorkerTest(unittest.TestCase):
    def setUp(self):
        self.log = tempfile.NamedTemporaryFile()
        self.addCleanup(self.log.close)

    def start(self, code):
        worker = turns.Worker("a worker", [sys.executable, "-c", code], self.log.name)
        self.addCleanup(worker.close)
        return worker

    def test_one_that_does_not_answer_is_ended(self):
        worker = self.start("import time; time.sleep(60)")
        begin = time.monotonic()
        self.assertIn("no answer", worker.answer(0.2)["error"])
        self.assertIn("no answer", worker.ask("measure", "x", 60)["error"])
        self.assertLess(time.monotonic() - begin, 10)

    def test_one_that_ends_or_writes_no_json(self):
        self.assertIn("ended", self.start("pass").answer(30)["error"])
        self.assertIn("no JSON", self.start("print('hello')").answer(30)["error"])

    def test_a_program_that_is_not_there(self):
        worker = turns.Worker("a worker", ["/nowhere/denoised-bench"], self.log.name)
        self.assertIn("/nowhere/denoised-bench", worker.answer(1)["error"])
        worker.send("measure")
        worker.close()


class GpuLogTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def log(self, code):
        if code:
            program = self.folder / "nvidia-smi"
            program.write_text(f"#!{sys.executable}\nimport sys, time\n{code}\n")
            program.chmod(0o755)
        with mock.patch.dict(os.environ, {"PATH": f"{self.folder}"}):
            log = turns.GpuLog()
        self.addCleanup(log.close)
        return log

    def test_medians_since_a_moment(self):
        log = self.log("for watts in [100, 500, 600, 'N/A', 500]:\n"
                       "  print(f'1980, {watts}, 60')\n"
                       "if '-lms' in sys.argv: time.sleep(60)")
        end = time.monotonic() + 30
        while len(log.samples) < 4 and time.monotonic() < end:
            time.sleep(0.01)
        self.assertEqual(log.since(0), {"sm_mhz": 1980, "watts": 500, "celsius": 60})
        self.assertIsNone(log.since(time.monotonic()))

    def test_without_a_gpu_nothing_is_logged(self):
        self.assertIsNone(self.log("").since(0))
        self.assertIsNone(self.log("sys.exit(9)").since(0))


if __name__ == "__main__":
    unittest.main()
