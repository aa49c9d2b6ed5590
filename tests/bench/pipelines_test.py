#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""measure.py's pipelines with tiny models on the CPU: whole servers, loads of a second, tables.

  pipelines_test.py --build build/dev
"""
import argparse
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import make_tables
import pipelines

BUILD = None


class PipelinesTest(unittest.TestCase):
    def test_every_topic_writes_what_the_table_reads(self):
        with tempfile.TemporaryDirectory() as out:
            done = subprocess.run(
                [sys.executable, HERE / "measure.py", *pipelines.TOPICS, "--tiny", "--device=cpu",
                 f"--build={BUILD}", f"--out={out}", f"--keep-models={out}/models", "--commit=abc",
                 "--seconds=500", "--rounds=1", "--requests=2", "--pipeline-rounds=1",
                 "--pipeline-scale=0.1"], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            files = {topic: json.loads((Path(out) / f"{topic}.json").read_text())
                     for topic in pipelines.TOPICS}
        for topic in make_tables.PIPELINE_BARS:
            self.assertGreater(files[topic]["figures"]["images_per_second"][0], 0, topic)
            self.assertGreater(files[topic]["figures"]["rounds"][0]["server"]["decode_seconds"], 0, topic)
        self.assertGreater(min(files["sdxl-mixed"]["figures"]["pairs"][0]), 0)
        request = files["sd15-request"]["figures"]
        self.assertGreater(request["first_previews"][0]["evaluations"], 0)
        self.assertTrue(request["row"]["peers"] or request["row"]["left_out"], "there may be no diffusers")
        runs = files["sdxl-start"]["figures"]["runs"]
        self.assertEqual(len(runs), 2)
        self.assertLess(runs[0]["listening_seconds"], runs[0]["serving_seconds"])
        table = make_tables.TABLES["pipelines"](files.get)
        measured = [line for line in table if line.startswith("| ") and "| – |" not in line]
        self.assertEqual(len(measured), 10, "a head and nine rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path, required=True)
    args, rest = parser.parse_known_args()
    BUILD = args.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest])
