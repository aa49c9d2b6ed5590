#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""measure.py's pipelines with tiny models on the CPU: whole servers, loads of a second, tables.

  pipelines_test.py --build build/dev
"""
import argparse
import importlib.util
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
import turns

BUILD = None
NEEDED = ("torch", "diffusers", "transformers")


class PipelinesTest(unittest.TestCase):
    def files(self, scale):
        with tempfile.TemporaryDirectory() as out:
            done = subprocess.run(
                [sys.executable, HERE / "measure.py", *pipelines.TOPICS, "--tiny", "--device=cpu",
                 f"--sd-cli={HERE / 'fake_sd_cli.py'}", f"--build={BUILD}", f"--out={out}",
                 f"--keep-models={out}/models", "--commit=abc", "--seconds=500", "--rounds=1", "--requests=2", "--pipeline-rounds=1",
                 f"--pipeline-scale={scale}"], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            return {topic: json.loads((Path(out) / f"{topic}.json").read_text())
                    for topic in pipelines.TOPICS}

    def test_every_topic_writes_what_the_table_reads(self):
        # A machine that is too busy to end a picture in a second is given more.
        for scale in (0.1, 0.5):
            files = self.files(scale)
            if all(files[topic]["figures"]["images_per_second"][0] > 0 for topic in make_tables.PIPELINE_BARS):
                break
        for topic in make_tables.PIPELINE_BARS:
            self.assertGreater(files[topic]["figures"]["images_per_second"][0], 0, topic)
            self.assertGreater(files[topic]["figures"]["rounds"][0]["server"]["decode_seconds"], 0, topic)
        mixed = files["sdxl-mixed"]["figures"]
        self.assertGreater(min(mixed["pairs"][0]), 0)
        self.assertEqual(len(set(mixed["mixed"])), 36)
        (pair,), (pixels,) = mixed["pairs"], mixed["pixel_pairs"]
        self.assertAlmostEqual(pixels[0] / pair[0], 640 / 3)
        self.assertAlmostEqual(pixels[1] / pair[1], 256)
        self.assertEqual(list(mixed["memory"]), ["before", "warm", "after"])
        for memory in mixed["memory"].values():
            self.assertGreater(memory["MiB_model"], 0)
        request = files["sd15-request"]["figures"]
        self.assertGreater(request["first_previews"][0]["evaluations"], 0)
        self.assertTrue(request["row"]["peers"] or request["row"]["left_out"], "there may be no diffusers")
        beside = files["sd15-sd-cpp"]
        ((_, peer),) = beside["figures"]["row"]["peers"]["stable-diffusion.cpp --diffusion-fa"]["pairs"]
        self.assertAlmostEqual(peer, 515)
        self.assertEqual(beside["context"]["peers"], {"stable-diffusion.cpp": "abc1234"})
        runs = files["sdxl-start"]["figures"]["runs"]
        self.assertEqual(len(runs), 2)
        self.assertLess(runs[0]["listening_seconds"], runs[0]["serving_seconds"])
        self.assertEqual([row["name"] for row in files["latent-errors"]["rows"]], list(pipelines.ERRORS))
        table = make_tables.TABLES["pipelines"](files.get)
        measured = [line for line in table if line.startswith("| ") and "| – |" not in line]
        self.assertEqual(len(measured), 15, "a head and fourteen rows")


@unittest.skipUnless(all(map(importlib.util.find_spec, NEEDED)), f"needs {', '.join(NEEDED)}")
class ErrorsTest(unittest.TestCase):
    """On the CPU denoised computes in fp32, as the reference does."""

    def test_fp32_is_the_references_and_planted_errors_are_seen(self):
        with tempfile.TemporaryDirectory() as work:
            worker = turns.Worker("errors", [
                sys.executable, HERE / "peer_errors.py", "--tiny", "--device=cpu", f"--work={work}",
                f"--program={BUILD / 'tests/bench/model-outputs'}"], Path(work) / "log")
            self.addCleanup(worker.close)
            self.assertIn("ready", worker.answer(100))
            for name in pipelines.ERRORS:
                found = worker.ask("measure", name, 200)
                self.assertNotIn("error", found)
                self.assertLess(max(found["denoised"]), 1e-5, name)
                self.assertGreater(min(found["diffusers"]), 1e-3, "bf16")
                self.assertTrue(0.3 < found["size"] < 1.5, f"{name}: {found['size']}")
            # denoised reads the configs at each request; diffusers' models are in memory.
            for name, model, part, field, value in (
                    ("sd15-text", "sd15", "text_encoder", "layer_norm_eps", 1e-4),
                    ("sd15-unet", "sd15", "unet", "norm_eps", 1e-4),
                    ("sd21-text", "sd21", "text_encoder", "hidden_act", "quick_gelu"),
                    ("sd21-images", "sd21", "unet", "norm_eps", 1e-4),
                    ("sdxl-text_2", "sdxl", "text_encoder_2", "layer_norm_eps", 1e-4),
                    ("sdxl-unet", "sdxl", "unet", "attention_head_dim", [4, 6]),
                    ("sdxl-vae", "sdxl", "vae", "norm_num_groups", 2),
                    ("sdxl-vae_large", "sdxl", "vae", "norm_num_groups", 2),
                    ("sdxl-vae_two", "sdxl", "vae", "norm_num_groups", 2),
                    ("sdxl-vae_encode", "sdxl", "vae", "norm_num_groups", 2),
                    ("sdxl-lcm-unet", "sdxl-lcm", "unet", "norm_eps", 1e-4),
                    ("sd-turbo-images", "sd-turbo", "vae", "norm_num_groups", 2),
                    ("taesd-vae", "taesd", "vae", "act_fn", "silu"),
                    ("sdxl-images", "sdxl", "unet", "norm_eps", 1e-4),
                    ("sd15-images", "sd15", "unet", "norm_eps", 1e-4)):
                file = next((Path(work) / model / part).glob("*config.json"))
                config = json.loads(file.read_text())
                self.assertNotEqual(config[field], value)
                file.write_text(json.dumps(config | {field: value}))
                found = worker.ask("measure", name, 200)
                file.write_text(json.dumps(config))
                self.assertGreater(min(found["denoised"]), 1e-3, f"{name}: {field}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path, required=True)
    args, rest = parser.parse_known_args()
    BUILD = args.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
