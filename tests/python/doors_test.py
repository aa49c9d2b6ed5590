#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The same request through every door gives the same bytes: gRPC from Python and from the denoise command, HTTP, its
events, OpenAI's API, and the Open Inference Protocol."""

import base64
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import urllib.request

import support

import denoised
import grpc

SEED, STEPS = 4321, 6
WORDS = support.ROOT / "tests" / "models" / "latent" / "sd1"  # small, and reads prompts


class Doors:
    """What a model has to draw is said in the words of each door."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.http = f"127.0.0.1:{support.free_port()}"
        server = support.serve("--model", f"words={WORDS}", http_listen=cls.http)
        cls.addClassCleanup(server.__exit__)
        cls.grpc = support.address(server)
        with denoised.Client(cls.grpc) as client:
            cls.image = client.generate(model=cls.model, seed=SEED, steps=STEPS, **cls.python)[0].data

    def post(self, path, body, **headers):
        request = urllib.request.Request(f"http://{self.http}{path}", data=json.dumps(body).encode(),
                                         headers={"Content-Type": "application/json", **headers})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.read().decode()

    def test_it_is_a_picture_that_depends_on_the_seed(self):
        self.assertTrue(self.image.startswith(b"\x89PNG"))
        with denoised.Client(self.grpc) as client:
            other = client.generate(model=self.model, seed=SEED + 1, steps=STEPS, **self.python)[0].data
        self.assertNotEqual(other, self.image)

    def test_the_command(self):
        path = self.folder / "command.png"
        subprocess.run([os.environ["DENOISE_BINARY"], "generate", *self.command, "-m", self.model,
                        "--server", self.grpc, "--seed", str(SEED), "--steps", str(STEPS), "-o", str(path)], check=True,
                       stdout=subprocess.DEVNULL)
        self.assertEqual(path.read_bytes(), self.image)

    def test_http(self):
        params = {"model": self.model, "seed": SEED, "steps": STEPS, **self.json}
        reply = json.loads(self.post("/v1/generate", {"params": params}))
        self.assertEqual(base64.b64decode(reply["images"][0]["encoded"]), self.image)
        events = self.post("/v1/generate", {"params": params, "preview": {}}, Accept="text/event-stream")
        data, = (json.loads(block.split("data: ")[1]) for block in events.split("\n\n")
                 if "event: image\n" in block)
        self.assertEqual(base64.b64decode(data["image"]["image"]["encoded"]), self.image)

    def test_openai(self):
        reply = json.loads(self.post("/v1/images/generations", {
            "prompt": self.prompt, "model": self.model, "denoised": {"seed": SEED, "steps": STEPS}}))
        self.assertEqual(base64.b64decode(reply["data"][0]["b64_json"]), self.image)

    def test_open_inference(self):
        subprocess.run([os.environ["PROTOC"], f"-I{support.ROOT / 'proto'}", f"--python_out={self.folder}",
                        "inference/open_inference.proto"], check=True)
        sys.path.insert(0, str(self.folder))
        from inference import open_inference_pb2 as inference
        request = inference.ModelInferRequest(model_name=self.model, outputs=[{"name": "encoded"}])
        for name, datatype, value in (("seed", "UINT64", SEED.to_bytes(8, "little")),
                                      ("steps", "INT32", STEPS.to_bytes(4, "little")),
                                      self.input):
            request.inputs.add(name=name, datatype=datatype, shape=[1])
            request.raw_input_contents.append(value)
        with grpc.insecure_channel(self.grpc) as channel:
            reply = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer", type(request).SerializeToString,
                inference.ModelInferResponse.FromString)(request, timeout=60)
        # BYTES: each value behind its length.
        self.assertEqual(reply.raw_output_contents[0][4:], self.image)


class LabelTest(Doors, unittest.TestCase):
    model, prompt = "digits", "seven"
    python, command, json = {"labels": 7}, ["-l", "7"], {"conditions": [{"class_label": 7}]}
    input = ("label", "INT32", (7).to_bytes(4, "little"))


class PromptTest(Doors, unittest.TestCase):
    model, prompt = "words", "a cat"
    python, command, json = {"prompt": prompt}, [prompt], {"conditions": [{"text": prompt}]}
    input = ("prompt", "BYTES", len(prompt).to_bytes(4, "little") + prompt.encode())


if __name__ == "__main__":
    sys.exit(unittest.main())
