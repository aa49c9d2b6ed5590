#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""denoise against a denoised process with both shipped models: without --model, a request is drawn by the
one that reads it.

  shipped_models_test.py --server build/dev/server/denoised --client build/dev/client/denoise
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import unittest
import urllib.error
import urllib.request

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
sys.path.insert(0, os.path.join(ROOT, "tests/server"))
from running import Running

SERVER = CLIENT = None


class ShippedModelsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Running(SERVER, "--device", "cpu", "--models", os.path.join(ROOT, "models"),
                             http_listen="127.0.0.1:0")  # fmt: skip
        cls.addClassCleanup(cls.server.__exit__)
        cls.server.wait_for("serving")

    def generate(self, *arguments):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        address = self.server.wait_for("listening")["address"]
        self.picture = os.path.join(directory.name, "drawn.png")
        return subprocess.run(
            [CLIENT, "--server", address, "generate", *arguments, "--steps", "2", "--out", self.picture,
             "--json"], capture_output=True, text=True, timeout=120)  # fmt: skip

    def assert_draws(self, model, size, *arguments):
        said = self.generate(*arguments)
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertEqual(json.loads(said.stdout.splitlines()[-1])["params"]["model"], model)
        with open(self.picture, "rb") as file:
            header = file.read(24)
        self.assertEqual(header[:8], b"\x89PNG\r\n\x1a\n")
        self.assertEqual([int.from_bytes(header[i : i + 4], "big") for i in (16, 20)], [size, size])

    def test_a_prompt_is_for_emoji(self):
        self.assert_draws("emoji-64", 64, "a red apple")

    def test_a_label_is_for_digits(self):
        self.assert_draws("mnist-32", 32, "--labels", "7")

    def test_openai_api_needs_a_prompt_for_a_model_that_reads_one(self):
        def draw(**fields):
            body = json.dumps({"model": "emoji-64", "denoised": {"steps": 1}, **fields}).encode()
            url = self.server.wait_for("listening")["http"] + "/v1/images/generations"
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=120) as reply:
                    return reply.status, ""
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)["error"]["message"]

        missing = (400, 'prompt: is missing; give a text, "" for an empty one')
        self.assertEqual(draw(), missing)
        self.assertEqual(draw(prompt=None), missing)
        self.assertEqual(draw(prompt=""), (200, ""))

    def test_neither_needs_a_name(self):
        said = self.generate()
        self.assertEqual(said.returncode, 2, said.stdout)
        self.assertIn("use one of: emoji-64, mnist-32", said.stderr)
        self.assertFalse(os.path.exists(self.picture))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--client", required=True)
    options, rest = parser.parse_known_args()
    SERVER, CLIENT = map(os.path.abspath, (options.server, options.client))
    unittest.main(argv=[sys.argv[0]] + rest)
