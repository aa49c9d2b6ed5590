#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""denoise-train of a StableDiffusionPipeline: both stages, what they write, and what they refuse.

usage: text_to_image_test.py DENOISE_TRAIN [unittest arguments]"""

import binascii
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "server"))
from free_port import free_port

PROGRAM = None
REPOSITORY = Path(__file__).parents[2]
PIPELINE = Path(__file__).parents[1] / "models/latent/sd2"


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", binascii.crc32(kind + data))


def png(pixel, edge=16):
    rows = b"".join(b"\0" + b"".join(bytes(pixel(x, y)) for x in range(edge)) for y in range(edge))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", edge, edge, 8, 2, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))  # fmt: skip


def tensors(path):
    """Name → (dtype, shape) of a safetensors file."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {k: (v["dtype"], v["shape"]) for k, v in header.items() if k != "__metadata__"}


def rename_tensors(path, renamed):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = {renamed(name): value for name, value in json.loads(data[8 : 8 + size]).items()}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


class TextToImageTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = Path(self.folder.name)
        self.data = self.root / "pictures"
        self.data.mkdir()
        lines = []
        for i in range(8):
            value = lambda x, y: (255 * (x // 4 % 2), 30 * i, 255 * (y // 4 % 2) if i % 2 else 0)
            (self.data / f"{i}.png").write_bytes(png(value))
            texts = ["stripes", f"a picture of {i}"] if i % 2 else "lines"
            lines.append({"file_name": f"{i}.png", "text": texts})
        self.metadata = self.data / "metadata.jsonl"
        self.metadata.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def arguments(self, output, **flags):
        settings = {
            "data": self.data, "pipeline": PIPELINE, "batch": 8, "steps": 6, "caption-dropout": 0.1,
            "learning-rate": 1e-3, "checkpoint-steps": 3, "log-steps": 1, "cap-snr": 5,
            "output": self.root / output, "device": os.environ.get("DENOISE_TRAIN_DEVICE"), **flags,
        }  # fmt: skip
        if settings.get("stage") == "vae":
            settings.pop("caption-dropout")
            settings.pop("cap-snr")
        return [PROGRAM] + [f"--{k}={v}" for k, v in settings.items() if v is not None]

    def train(self, output, rc=0, env=None, **flags):
        done = subprocess.run(self.arguments(output, **flags), capture_output=True, text=True,
                              timeout=600, env={**os.environ, **(env or {})})  # fmt: skip
        self.assertEqual(done.returncode, rc, done.stderr)
        return done.stderr + done.stdout

    def state(self, output, step=6):
        folder = self.root / output / "checkpoints" / f"step-{step:09}"
        self.assertTrue((folder / "DONE").exists())
        return (folder / "state.safetensors").read_bytes()

    def test_both_stages_write_pipelines(self):
        pipeline = self.root / "pipeline"
        shutil.copytree(PIPELINE, pipeline)
        # diffusers writes such a limit, which is not JSON.
        file = pipeline / "scheduler/scheduler_config.json"
        file.write_text(file.read_text().replace("{", '{\n  "lambda_min_clipped": -Infinity,', 1))
        said = self.train("vae", stage="vae", flip="true", canvas=20, pipeline=pipeline)
        self.assertIn("step 6/6", said)
        model = self.root / "vae/model"
        config = json.loads((model / "vae/config.json").read_text())
        self.assertEqual(config["scaling_factor"], 1.0)
        self.assertEqual(tensors(model / "vae/diffusion_pytorch_model.safetensors").keys(),
                         tensors(PIPELINE / "vae/diffusion_pytorch_model.safetensors").keys())  # fmt: skip
        # The parts that this stage does not train are copied.
        for part in ("unet", "text_encoder", "tokenizer", "scheduler"):
            for each in (pipeline / part).iterdir():
                self.assertEqual((model / part / each.name).read_bytes(), each.read_bytes())

        said = self.train("run", pipeline=model, prompt="lines", **{
            "sample-steps": 6, "sample-count": 2, "flip": "true"})  # fmt: skip
        self.assertIn("drew", said)  # by the engine, from what was written
        self.assertIn("12 captions", said)
        self.assertTrue((self.root / "run/samples/step-000000006.png").exists())
        trained = self.root / "run/model"
        self.assertEqual((trained / "vae/diffusion_pytorch_model.safetensors").read_bytes(),
                         (model / "vae/diffusion_pytorch_model.safetensors").read_bytes())  # fmt: skip
        self.assertEqual((trained / "scheduler/scheduler_config.json").read_text(), file.read_text())
        for part, name in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
            shapes = lambda folder: {
                k.removeprefix("text_model."): v[1]
                for k, v in tensors(folder / part / f"{name}.safetensors").items()}  # fmt: skip
            self.assertEqual(shapes(trained), shapes(PIPELINE))
        # Such a directory is one to train on.
        said = self.train("more", pipeline=trained, steps=3, **{"init-from": trained})
        self.assertIn(f"unet, text_encoder: weights of {trained}\n", said)
        self.assertNotIn("trained with", said)

    def test_says_where_weights_come_from(self):
        random = "random weights (--init-from starts from a pipeline's)\n"
        said = self.train("a", steps=1)
        self.assertIn(f"unet, text_encoder: {random}", said)
        self.assertNotIn("weights", self.train("a", steps=2, resume="latest"))
        said = self.train("b", steps=1, **{"freeze-text": "true"})
        self.assertIn(f"\nunet: {random}text_encoder: weights of {PIPELINE}, not trained\n", said)
        self.assertIn(f"\nvae: {random}", self.train("c", steps=1, stage="vae"))
        said = self.train("d", steps=1, stage="vae", **{"init-from": PIPELINE})
        self.assertIn(f"\nvae: weights of {PIPELINE}\n", said)
        other = self.root / "other"
        shutil.copytree(PIPELINE, other)
        for part, field, value in [("scheduler", "prediction_type", "epsilon"), ("scheduler", "beta_end", 0.02),
                                   ("scheduler", "rescale_betas_zero_snr", True),
                                   ("unet", "norm_eps", 1e-3)]:  # fmt: skip
            file = other / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
            before = json.loads(file.read_text())
            file.write_text(json.dumps({**before, field: value}))
            flags = {"steps": 1, "init-from": other}
            if part == "unet":
                said = self.train("e", rc=2, **flags)
                self.assertIn(f"{field} was {value} and is {before[field]}", said)
                (other / "tokenizer").rename(self.root / "tokenizer")  # the parts themselves decide
                self.assertIn(f"{field} was {value} and is {before[field]}", self.train("e", rc=2, **flags))
                (self.root / "tokenizer").rename(other / "tokenizer")
            elif field == "rescale_betas_zero_snr":
                said = self.train("g", **flags)
                self.assertIn(f"its scheduler_config.json is not used: {file}: field '{field}' is true", said)
                self.assertIn("; the noise is that of the pipeline\n", said)
            elif field == "prediction_type":
                self.assertIn("trained for the objective epsilon, and this run is for v", self.train("e", **flags))
            else:
                said = self.train("f", **flags)
                self.assertIn(f"trained with other noise: {field} was {value} and is {before[field]}", said)
            file.write_text(json.dumps(before))

    def test_a_start_needs_only_the_parts_that_are_loaded(self):
        start = self.root / "start"
        flags = {"steps": 1, "init-from": start}
        self.assertIn(f"there is no {start}/unet/config.json", self.train("none", rc=2, **flags))
        shutil.copytree(PIPELINE, start)
        (start / "model_index.json").unlink()
        shutil.rmtree(start / "tokenizer")
        # Of the pooled state, which is not trained; published configs have 2.
        file = start / "text_encoder/config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": 2, "projection_dim": 768}))
        self.assertIn(f"unet, text_encoder: weights of {start}\n", self.train("no index", **flags))
        shutil.rmtree(start / "text_encoder")
        self.assertIn(f"there is no {file}", self.train("no text", rc=2, **flags))
        shutil.rmtree(start / "unet")
        self.assertIn(f"vae: weights of {start}\n", self.train("vae", stage="vae", **flags))

    def test_a_resume_does_not_need_the_start(self):
        for stage in ("vae", "diffusion"):
            start = self.root / f"start of {stage}"
            shutil.copytree(PIPELINE, start)
            flags = {"stage": stage, "init-from": start}
            self.train(f"whole {stage}", **flags)
            self.train(stage, steps=3, **flags)
            for part in ("vae", "unet", "text_encoder"):
                (start / part / "config.json").write_text("{")
            self.assertIn("resumed at step 3", self.train(stage, steps=4, resume="latest", **flags))
            shutil.rmtree(start)
            self.assertIn("resumed at step 4", self.train(stage, resume="latest", **flags))
            self.assertEqual(self.state(stage), self.state(f"whole {stage}"))
            for resume in (None, "latest"):  # without a checkpoint
                said = self.train("none", rc=2, resume=resume, **flags)
                self.assertIn(str(start), said)
                self.assertNotIn("read in", said)

    def test_a_start_of_another_function_is_refused(self):
        start = self.root / "start"
        shutil.copytree(PIPELINE, start)
        for stage, part, field, value in [("diffusion", "text_encoder", "hidden_act", "quick_gelu"),
                                          ("diffusion", "text_encoder", "layer_norm_eps", 1e-3),
                                          ("vae", "vae", "norm_num_groups", 2),
                                          ("vae", "vae", "act_fn", "relu")]:  # fmt: skip
            file = start / part / "config.json"
            before = file.read_text()
            was = json.loads(before)[field]
            self.assertNotEqual(was, value)
            file.write_text(json.dumps({**json.loads(before), field: value}))
            said = self.train("refused", rc=2, stage=stage, **{"init-from": start})
            self.assertIn(f"{field} was {json.dumps(value)} and is {json.dumps(was)}. Use the same, or", said)
            self.assertIn(f"with {PIPELINE / part / 'config.json'} its weights", said)
            other = "vae" if stage == "diffusion" else "diffusion"
            self.train(f"{field} of the other stage", stage=other, steps=1, **{"init-from": start})
            file.write_text(before)
        # How latents are scaled is no function of the weights.
        file = start / "vae/config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "scaling_factor": 0.5,
                                    "latents_mean": [0, 0, 0, 1.0], "latents_std": [1, 1, 1, 2.0]}))  # fmt: skip
        self.train("scaled", stage="vae", steps=1, **{"init-from": start})

    def test_attention_names_of_2022(self):
        old = PIPELINE.parent / "sd1"
        weights = "vae/diffusion_pytorch_model.safetensors"
        self.assertIn("encoder.mid_block.attentions.0.query.weight", tensors(old / weights))
        new = self.root / "new"
        shutil.copytree(old, new)
        names = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
        for before, now in names.items():
            rename_tensors(new / weights, lambda name: name.replace(before, now))
        for stage in ("vae", "diffusion"):
            flags = {"stage": stage, "steps": 1, "cap-snr": None}
            self.train(f"old {stage}", pipeline=old, **flags, **{"init-from": old})
            self.train(f"new {stage}", pipeline=new, **flags, **{"init-from": new})
            # Stage diffusion learned latents of either file.
            self.assertEqual(self.state(f"old {stage}", 1), self.state(f"new {stage}", 1))
        self.assertEqual((self.root / "old vae/model" / weights).read_bytes(),
                         (self.root / "new vae/model" / weights).read_bytes())  # fmt: skip

    def test_what_is_not_trained_is_copied(self):
        pipeline = self.root / "pipeline"
        shutil.copytree(PIPELINE, pipeline)
        index = json.loads((pipeline / "model_index.json").read_text())
        index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
        index["feature_extractor"] = ["transformers", "CLIPImageProcessor"]
        index["vae_tiny"] = ["diffusers", "AutoencoderTiny"]
        index["image_encoder"] = ["transformers", "CLIPVisionModelWithProjection"]  # has no folder
        (pipeline / "model_index.json").write_text(json.dumps(index))
        for file, text in [("safety_checker/config.json", "{}"), ("safety_checker/model.safetensors", "x"),
                           ("feature_extractor/preprocessor_config.json", "{}"),
                           ("vae_tiny/config.json", '{"_class_name": "AutoencoderTiny"}')]:  # fmt: skip
            (pipeline / file).parent.mkdir(exist_ok=True)
            (pipeline / file).write_text(text)
        for stage, trained in (("vae", ["vae"]), ("diffusion", ["unet", "text_encoder"])):
            model = self.root / stage / "model"
            said = self.train(stage, stage=stage, pipeline=pipeline, steps=1)
            written = json.loads((model / "model_index.json").read_text())
            # Stage vae makes other latents than those that vae_tiny decodes.
            left_out = {"vae_tiny"} if stage == "vae" else set()
            self.assertEqual("vae_tiny is left out of the model" in said, stage == "vae", said)
            expected = {key: value for key, value in index.items() if key not in left_out}
            self.assertEqual(written, {**expected, "image_encoder": [None, None]})
            self.assertEqual({each.name for each in model.iterdir()},
                             {each.name for each in pipeline.iterdir()} - left_out - {
                                 "goldens.json", "goldens.safetensors"})  # fmt: skip
            for part in pipeline.iterdir():
                copied = part.is_dir() and part.name not in (*trained, *left_out)
                for each in part.iterdir() if copied else []:
                    self.assertEqual((model / part.name / each.name).read_bytes(), each.read_bytes())
        for each in (pipeline / "tokenizer").iterdir():
            each.rename(pipeline / each.name)
        (pipeline / "tokenizer").rmdir()
        said = self.train("refused", rc=2, pipeline=pipeline)
        self.assertIn(f"its tokenizer lies beside model_index.json; move the files to {pipeline}/tokenizer",
                      said)

    def test_a_prompt_may_be_empty(self):
        config = self.root / "run.json"
        config.write_text(json.dumps({"prompt": ["lines", ""], "sample-steps": 3}))
        said = self.train("a", steps=3, config=config, **{"sample-count": 2})
        self.assertIn("drew", said)  # CLI11 took --sample-steps=3 as the second prompt

    def test_bits_depend_on_the_settings_alone(self):
        self.train("whole")
        self.train("threads", accumulation=4, env={"OMP_NUM_THREADS": "1"})
        self.assertEqual(self.state("whole"), self.state("threads"))
        self.train("resumed", steps=3)
        self.assertIn("resumed at step 3", self.train("resumed", resume="latest"))
        self.assertEqual(self.state("whole"), self.state("resumed"))
        arguments = self.arguments("alone", steps=3, prompt="lines", data="pictures",
                                   pipeline=os.path.relpath(PIPELINE, self.root))  # fmt: skip
        subprocess.run([Path(PROGRAM).resolve(), *arguments[1:]], cwd=self.root, check=True, capture_output=True)
        subprocess.run([PROGRAM, f"--output={self.root}/alone", "--resume=latest", "--steps=6"], check=True,
                       capture_output=True)  # fmt: skip
        self.assertEqual(self.state("whole"), self.state("alone"))
        port = free_port()
        ranks = [
            subprocess.Popen(
                self.arguments("ranks"), stderr=subprocess.PIPE, text=True,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port),
                     "OMP_NUM_THREADS": "1"})
            for rank in range(2)
        ]  # fmt: skip
        for process in ranks:
            _, errors = process.communicate(timeout=600)
            self.assertEqual(process.returncode, 0, errors)
        self.assertEqual(self.state("whole"), self.state("ranks"))
        self.train("other", seed=1)
        self.assertNotEqual(self.state("whole"), self.state("other"))
        pipeline = self.root / "pipeline"
        shutil.copytree(PIPELINE, pipeline)
        for file, field, value in [("scheduler/scheduler_config.json", "beta_end", 0.02),
                                   ("unet/config.json", "norm_eps", 1e-3)]:  # fmt: skip
            config = json.loads((pipeline / file).read_text())
            (pipeline / file).write_text(json.dumps({**config, field: value}))
        said = self.train("whole", rc=2, resume="latest", pipeline=pipeline,
                          **{"caption-dropout": 0.2, "freeze-text": "true"})  # fmt: skip
        self.assertIn("run: --caption-dropout was 0.1 and is 0.2; --freeze-text was false and is true; "
                      "beta-end of --pipeline's scheduler was 0.012 and is 0.02; "
                      "norm_eps of --pipeline's unet was 1e-05 and is 0.001. Give the same", said)  # fmt: skip

    def test_kill_and_resume(self):
        flags = {"checkpoint-steps": 1}
        self.train("whole", **flags)
        process = subprocess.Popen(self.arguments("killed", **flags), stderr=subprocess.PIPE, text=True)
        with process, process.stderr:
            for line in process.stderr:
                if line == "saved step 3\n":
                    process.kill()
        self.assertEqual(process.returncode, -signal.SIGKILL)
        said = self.train("killed", resume="latest", **flags)
        self.assertRegex(said, "resumed at step [345]\n")
        self.assertEqual(self.state("whole"), self.state("killed"))
        for part, name in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
            weights = f"model/{part}/{name}.safetensors"
            self.assertEqual((self.root / "whole" / weights).read_bytes(),
                             (self.root / "killed" / weights).read_bytes())  # fmt: skip

    def test_the_autoencoder_goes_on_with_the_same_bits(self):
        self.train("whole", stage="vae")
        self.train("resumed", stage="vae", steps=3)
        self.train("resumed", stage="vae", resume="latest")
        self.assertEqual(self.state("whole"), self.state("resumed"))
        weights = "model/vae/diffusion_pytorch_model.safetensors"
        self.assertEqual((self.root / "whole" / weights).read_bytes(),
                         (self.root / "resumed" / weights).read_bytes())  # fmt: skip

    def test_an_autoencoder_that_cannot_be_scaled_is_refused_at_once(self):
        for field in ("use_quant_conv", "use_post_quant_conv"):
            pipeline = self.root / field
            shutil.copytree(PIPELINE, pipeline)
            config = pipeline / "vae/config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), field: False}))
            for flags in ({}, {"dry-run": "true"}):
                said = self.train("a", rc=2, stage="vae", pipeline=pipeline, **flags)
                self.assertIn(f"{config}: {field} is false; stage vae needs true", said)
                self.assertNotIn("read in", said)

    def test_a_model_that_cannot_be_written_costs_no_checkpoint(self):
        self.train("first", stage="vae", steps=1)
        broken = self.root / "first/model"
        file = broken / "vae/diffusion_pytorch_model.safetensors"
        data = bytearray(file.read_bytes())
        size = struct.unpack("<Q", data[:8])[0]
        for name, value in (("encoder.conv_out.weight", 1e10), ("quant_conv.weight", 3e38)):
            begin, end = json.loads(data[8 : 8 + size])[name]["data_offsets"]
            data[8 + size + begin : 8 + size + end] = struct.pack("<f", value) * ((end - begin) // 4)
        file.write_bytes(data)
        # No step changes the weights, since no gradient is finite.
        said = self.train("a", rc=1, stage="vae", **{"init-from": broken})
        self.assertIn("step 3 has a checkpoint, but no model: latent channel 0 has a mean of", said)
        self.assertIn("saved step 3", said)
        self.assertTrue(self.state("a"))

    def test_a_frozen_text_encoder_is_kept(self):
        self.train("a", steps=3, **{"freeze-text": "true"})
        written = tensors(self.root / "a/model/text_encoder/model.safetensors")
        self.assertEqual(len(written), len(tensors(PIPELINE / "text_encoder/model.safetensors")))

    def test_captions_of_text_files(self):
        self.metadata.write_text("\t\n" + self.metadata.read_text())  # such lines are empty
        self.train("metadata", steps=3)
        whole = self.metadata.read_text()
        lines = [json.loads(line) for line in whole.splitlines() if line.strip()]
        del lines[3]["text"]
        self.metadata.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.assertIn("3.png: has no caption", self.train("missing", rc=2))
        said = self.train("fewer", steps=3, **{"skip-bad-files": "true"})
        self.assertIn("10 captions", said)
        self.metadata.write_text(whole)
        for line in self.metadata.read_text().splitlines()[1:]:
            entry = json.loads(line)
            texts = entry["text"] if isinstance(entry["text"], list) else [entry["text"]]
            (self.data / entry["file_name"]).with_suffix(".txt").write_text("\n".join(texts) + "\n")
        self.metadata.unlink()
        self.train("files", steps=3)
        self.assertEqual(self.state("metadata", 3), self.state("files", 3))
        captions = (self.data / "5.txt").read_text()
        (self.data / "5.txt").write_text(captions + "a " * 1000 + "\n")
        self.assertIn("warning: 1 of the captions is longer; their ends are left out", self.train("long", steps=1))
        (self.data / "5.txt").write_text(captions)
        (self.data / "3.txt").unlink()
        self.assertIn("3.png: has no caption", self.train("missing", rc=2))
        (self.data / "5.txt").write_bytes(b"\xff\n")
        said = self.train("missing", rc=2)
        self.assertIn("2 of 8 pictures cannot be used", said)
        self.assertIn("5.png: its caption cannot be read", said)
        said = self.train("skipped", steps=3, **{"skip-bad-files": "true"})
        self.assertIn("3.png: has no caption", said)
        self.assertIn("2 skipped", said)
        self.assertIn("8 captions", said)
        (self.data / "5.txt").write_text("x" * (1 << 20) + "x\n")
        said = self.train("skipped", steps=3, resume="latest", **{"skip-bad-files": "true"})
        self.assertIn("5.png: its caption has 1048577 bytes; use at most 1048576", said)
        self.assertIn("8 captions", said)
        (self.data / "5.txt").write_text("stripes\na picture of 5\n")
        # Another caption is another run.
        (self.data / "3.txt").write_text("something else\n")
        said = self.train("files", rc=2, resume="latest", steps=6)
        self.assertIn("the checksum of --data was", said)

    def test_weights_choose_pictures(self):
        def write(lines):
            self.metadata.write_text("".join(json.dumps(line) + "\n" for line in lines))

        lines = [json.loads(line) for line in self.metadata.read_text().splitlines()]
        for line in lines:
            line["weight"] = float(line["file_name"] == "3.png")
        write(lines)
        self.train("weighted", steps=3)
        # What weighs nothing may be anything.
        for i, line in enumerate(lines):
            if not line["weight"]:
                (self.data / line["file_name"]).write_bytes(png(lambda x, y: (x, y, 9 * i)))
                line["text"] = [f"another {i}"] * len(line["text"]) if i % 2 else f"another {i}"
        write(lines)
        self.train("others", steps=3)
        self.assertEqual(self.state("weighted", 3), self.state("others", 3))
        for line in lines:
            line["weight"] = 0
        write(lines)
        said = self.train("none", rc=2)
        self.assertIn("the weights of the pictures sum up to 0; use weights", said)
        self.assertNotIn("read in", said)  # before the pictures are read
        for line in lines:
            line["weight"] = 1.0
        write(lines)
        self.train("all", steps=3)
        self.assertNotEqual(self.state("weighted", 3), self.state("all", 3))
        # A picture's latents do not depend on its place among those that are encoded with it.
        for line in lines:
            (self.data / line["file_name"]).write_bytes((self.data / "3.png").read_bytes())
            line["text"] = lines[3]["text"]
        write(lines)
        self.train("copies", steps=3)
        self.assertEqual(self.state("weighted", 3), self.state("copies", 3))

    def test_the_settings_of_emoji_64_are_those_of_a_run(self):
        for file in ("train-vae.json", "train.json"):
            settings = json.loads((REPOSITORY / "models/emoji-64" / file).read_text())
            flags = {**settings, "pipeline": PIPELINE, "steps": 2, "batch": 8,
                     "sample-steps": None, "prompt": None, "warmup-steps": 2}  # fmt: skip
            self.train(file, **flags, **{"checkpoint-steps": 2})
            weights = self.root / file / "model" / ("vae" if "vae" in file else "unet")
            written = tensors(weights / "diffusion_pytorch_model.safetensors")
            self.assertEqual({dtype for dtype, _ in written.values()}, {"F16"})
            # All of them, on the pipeline itself.
            flags = {**{flag: None for flag in (*settings, "caption-dropout", "cap-snr")},
                     "config": REPOSITORY / "models/emoji-64" / file, "dry-run": "true",
                     "pipeline": REPOSITORY / "models/emoji-64", "batch": 1, "chunks": 1}  # fmt: skip
            self.assertIn("hours", self.train("dry", **flags))
        # diffusers loads the other parts in float32, whatever their files have.
        for model in (self.root / "train.json/model", REPOSITORY / "models/emoji-64"):
            text = json.loads((model / "text_encoder/config.json").read_text())
            self.assertEqual(text.get("dtype"), "float32", model)
        defaults = json.loads((self.root / "train.json/model/model_index.json").read_text())
        shipped = json.loads((REPOSITORY / "models/emoji-64/model_index.json").read_text())
        self.assertEqual(defaults["_denoised"], shipped["_denoised"])

    def test_dry_run(self):
        said = {}
        for stage in ("vae", "diffusion"):
            said[stage] = self.train("dry", stage=stage, pipeline=REPOSITORY / "models/emoji-64", chunks=1, batch=1,
                                     device="cpu", env={"OMP_NUM_THREADS": "1"}, **{"dry-run": "true"})  # fmt: skip
            self.assertIn("hours", said[stage])
        self.assertFalse((self.root / "dry").exists())
        # A save copies weights, moments and an average. Stage vae then encodes pictures as stage diffusion does at its
        # beginning.
        encoding = int(re.search(r"\nencoding +(\d+) MiB, before the first step\n", said["diffusion"])[1])
        self.assertGreater(encoding, 50)
        for stage, extra in (("vae", encoding), ("diffusion", 0)):
            parameters = int(re.search(r"\nparameters +(\d+)\n", said[stage])[1])
            saving = int(re.search(r", saving (\d+)\n", said[stage])[1])
            self.assertAlmostEqual(saving, 4 * 4 * parameters / 2**20 + extra, delta=2)

    def test_parts_that_do_not_belong_together_are_refused_before_pictures_are_read(self):
        pipeline = self.root / "pipeline"
        shutil.copytree(PIPELINE, pipeline)
        for file, fields, message in [
            ("unet/config.json", {"in_channels": 5, "out_channels": 5},
             f"field 'in_channels' is 5, but {pipeline}/vae/config.json has latent_channels 4; set it to 4, or take both"),
            ("vae/config.json", {"in_channels": 2, "out_channels": 2},
             "field 'in_channels' is 2, but pictures have 1 or 3 channels; use one of them"),
            ("tokenizer/tokenizer_config.json", {"model_max_length": 70},
             "model_max_length is 70, but the text encoder reads 77 tokens; take both from one model"),
            ("text_encoder/config.json", {"vocab_size": 600},
             "there are 640 tokens, but the text encoder's vocab_size is 600; take both from one model"),
        ]:  # fmt: skip
            before = (pipeline / file).read_text()
            (pipeline / file).write_text(json.dumps({**json.loads(before), **fields}))
            for stage in ("vae", "diffusion"):
                for dry in ("false", "true"):
                    with self.subTest(file=file, stage=stage, dry=dry):
                        said = self.train("refused", rc=2, pipeline=pipeline, stage=stage, **{"dry-run": dry})
                        self.assertIn(message, said)
                        self.assertIn(f"denoise-train: {pipeline}/", said)
                        self.assertNotIn("read in", said)
            (pipeline / file).write_text(before)

    def test_weights_that_do_not_fit_are_refused_before_pictures_are_read(self):
        other = self.root / "other"
        shutil.copytree(PIPELINE, other)
        start, pipeline = {"init-from": other}, {"pipeline": other}
        for file, flags in [
            ("unet/diffusion_pytorch_model", start), ("text_encoder/model", start),
            ("vae/diffusion_pytorch_model", {**start, "stage": "vae"}), ("vae/diffusion_pytorch_model", pipeline),
            ("text_encoder/model", {**pipeline, "freeze-text": "true"}),
        ]:  # fmt: skip
            weights = other / f"{file}.safetensors"
            before = weights.read_bytes()
            name = next(name for name in tensors(weights) if name.endswith(".bias"))
            rename_tensors(weights, lambda each, name=name: "renamed" if each == name else each)
            for dry in ("false", "true"):
                with self.subTest(file=file, flags=flags, dry=dry):
                    said = self.train("refused", rc=2, **flags, **{"dry-run": dry})
                    flag = "--init-from" if "init-from" in flags else "--pipeline"
                    self.assertIn(f"{flag}: {weights.parent}: no tensor '{name}'", said)
                    self.assertIn("; take weights and config from one model\n", said)
                    self.assertNotIn("read in", said)
            weights.write_bytes(before)

    def test_refuses_by_name(self):
        pipeline = self.root / "pipeline"
        shutil.copytree(PIPELINE, pipeline)
        for flags, message in [
            ({"pipeline": self.root / "none"}, "none"),
            ({"stage": "unet"}, "--stage"),
            ({"objective": "v"}, "--objective cannot be given with --pipeline"),
            ({"network": "x.json"}, "either --network or --pipeline"),
            ({"canvas": 32}, "--canvas"),
            ({"stage": "vae", "sample-steps": 3}, "--sample-steps"),
            ({"dropout": 0.1}, "dropout"),
            ({"cap-snr": -1}, "--cap-snr is -1"),
            ({"sigma-data": 0.7}, "--sigma-data needs the objective edm, but this run has the objective"),
            ({"stage": "vae", "min-snr": 5}, "but this run has stage vae; leave it out"),
            ({"stage": "vae", "freeze-text": "true"}, "--freeze-text needs stage diffusion"),
            ({"kl-weight": 1}, "--kl-weight needs stage vae"),
            ({"stage": "vae", "kl-weight": -1}, "--kl-weight is -1; use a finite number of at least 0"),
            ({"stage": "vae", "edge-weight": "nan"}, "--edge-weight: nan is not a finite number"),
            ({"stage": "vae", "prompt": "lines"},
             "--prompt needs stage diffusion, but this run has stage vae; leave it out"),
            ({"stage": "diffusion", "prefetch-threads": 3},
             "--prefetch-threads needs stage vae or a --network, but this run has stage diffusion"),
            ({"null-class": 1}, "--null-class needs a --network with classes and --class-dropout"),
            ({"null-class": 1, "caption-dropout": 0.1}, "but this run has a --pipeline"),
            ({"prompt": os.fsdecode(b"a \xff")}, '--prompt "a \ufffd": text is not UTF-8 at byte 2; encode it as UTF-8'),
        ]:
            with self.subTest(flags=flags):
                self.assertIn(message, self.train("refused", rc=2, **flags))
        for part, field, value in [("unet", "dropout", 0.1), ("scheduler", "rescale_betas_zero_snr", True),
                                   ("scheduler", "num_train_timesteps", "500"),
                                   ("scheduler", "num_train_timesteps", 0),
                                   ("scheduler", "beta_start", 0.5),
                                   ("scheduler", "beta_schedule", "sigmoid"),
                                   ("unet", "cross_attention_dim", 24)]:  # fmt: skip
            file = pipeline / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
            before = file.read_text()
            file.write_text(json.dumps({**json.loads(before), field: value}))
            said = self.train("refused", rc=2, pipeline=pipeline)
            self.assertIn(field, said)
            self.assertNotIn("read in", said)  # before the pictures are read
            if part == "scheduler":  # which has the field, not a flag
                self.assertIn(str(file), said)
            file.write_text(before)
        # diffusers' pipeline would not undo them.
        file = pipeline / "vae/config.json"
        before = json.loads(file.read_text())
        for field, value in [("shift_factor", 0.1), ("latents_mean", [0, 0, 0, 1.0])]:
            file.write_text(json.dumps({**before, field: value, "latents_std": [1, 1, 1, 2.0]}
                                       if field == "latents_mean" else {**before, field: value}))
            said = self.train("refused", rc=2, pipeline=pipeline)
            self.assertIn(f"{file}: field '{field}' is {json.dumps(value, separators=(',', ':'))}, which diffusers'", said)
            self.assertIn("use null, or run stage vae first", said)
            self.train(f"vae {field}", stage="vae", steps=1, pipeline=pipeline)
            self.train(f"run {field}", steps=1, pipeline=self.root / f"vae {field}/model")
        file.write_text(json.dumps(before))
        # What no DDPM trains, or the server could not draw with.
        index, scheduler = pipeline / "model_index.json", pipeline / "scheduler/scheduler_config.json"
        whole, betas = json.loads(index.read_text()), json.loads(scheduler.read_text())
        for name, fields, message in [
            ("UnCLIPScheduler", {}, "field '_class_name' is \"UnCLIPScheduler\": not supported"),
            ("ScoreSdeVeScheduler", {}, "text to image is trained with DDPM's noise"),
            ("FlowMatchEulerDiscreteScheduler", {}, "text to image is trained with DDPM's noise"),
            ("CMStochasticIterativeScheduler", {}, "does not say how to train"),
            ("LCMScheduler", {}, "does not say how to train"),
            ("TCDScheduler", {}, "does not say how to train"),
            ("DDPMScheduler", {"variance_type": "learned_range"}, "field 'variance_type' is \"learned_range\""),
            ("DDIMScheduler", {"beta_schedule": "sigmoid"}, "field 'beta_schedule' is \"sigmoid\": use linear"),
            ("DDIMScheduler", {"thresholding": True}, "field 'thresholding' is true"),
        ]:  # fmt: skip
            with self.subTest(scheduler=name, fields=fields):
                index.write_text(json.dumps({**whole, "scheduler": ["diffusers", name]}))
                scheduler.write_text(json.dumps({**betas, "_class_name": name, **fields}))
                for stage in ("vae", "diffusion"):
                    said = self.train("refused", rc=2, pipeline=pipeline, stage=stage)
                    self.assertIn(f"{scheduler}: ", said)
                    self.assertIn(message, said)
                    self.assertNotIn("read in", said)
        index.write_text(json.dumps(whole))
        # The server corrects old configs: latents' timesteps begin at 1.
        scheduler.write_text(json.dumps({**betas, "steps_offset": 0, "num_train_timesteps": 50}))
        said = self.train("refused", rc=2, pipeline=pipeline, **{"default-steps": 50})
        self.assertIn(f"{scheduler}: the server could not draw with it: --default-steps is 50", said)
        self.assertIn("set it to 49, or leave it out", said)
        index.write_text(json.dumps({**whole, "_denoised": {"default_steps": 50}}))
        said = self.train("refused", rc=2, pipeline=pipeline)
        self.assertIn(f"{index}, _denoised: field 'default_steps' is 50", said)
        self.assertNotIn(str(scheduler), said)  # one file is to be corrected
        self.train("a flag", pipeline=pipeline, steps=1, **{"default-steps": 49})
        index.write_text(json.dumps(whole))
        # Without a default, it takes as many steps as it can.
        scheduler.write_text(json.dumps({**betas, "num_train_timesteps": 40}))
        said = self.train("few timesteps", pipeline=pipeline, steps=1, **{"sample-steps": 1, "sample-count": 1})
        self.assertIn("drew", said)
        # Other samplers could follow these, but not the model's own.
        scheduler.write_text(json.dumps({**betas, "beta_start": 0.9, "beta_end": 0.99}))
        said = self.train("refused", rc=2, pipeline=pipeline)
        self.assertIn(f"{scheduler}: the server could not draw with it: ", said)
        self.assertEqual(said.count(str(scheduler)), 1, said)
        scheduler.write_text(json.dumps(betas))
        self.metadata.write_text('{"file_name": "0.png"}\n')
        self.assertIn('0.png: has no caption. Give it "text" in metadata.jsonl, or a .txt of its name if '
                      "there is no metadata.jsonl", self.train("broken", rc=2))  # fmt: skip
        self.metadata.write_text('{"file_name": "0.png", "text": 3}\n')
        self.assertIn("metadata.jsonl, line 1", self.train("broken", rc=2))
        self.metadata.write_text('{"file_name": "0.png", "text": "a", "text": "b"}\n')
        self.assertIn('metadata.jsonl, line 1: has "text" twice', self.train("broken", rc=2))


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main(verbosity=1)
