# SPDX-License-Identifier: Apache-2.0
"""Errors in bf16 of parts of pipelines and of whole images, denoised's and diffusers', measured when
measure.py says.

usage: peer_errors.py --program=model-outputs --work=FOLDER [--device=cuda] [--tiny]

An error is ‖output − reference‖ / ‖reference‖ of a row, a prompt or an image; images are in [−1, 1]. The
reference is diffusers in fp32, without TF32 and with attention as plain products. Models have published
shapes, and weights as in the goldens (make_latent_goldens.py): attention is peaked, outputs have unit size.
Weights and inputs are numbers of bf16, so errors are those of the arithmetic. diffusers runs in bf16,
channels last, with SDPA; denoised's model-outputs reads the same weights from FOLDER. On a CPU denoised
computes in fp32. Request: "measure NAME", a model and what of it: "sd15-unet", "sdxl-images". Of an encoder the
means are compared. Needs diffusers and transformers.
"""
import argparse
import copy
import functools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from diffusers import (AutoencoderKL, AutoencoderTiny, DDIMScheduler, StableDiffusionPipeline,
                       StableDiffusionXLPipeline, UNet2DConditionModel)
from diffusers import __version__ as diffusers_version
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

import peer
import pipelines
from peer_model import unet_inputs

sys.path.append(str(Path(__file__).resolve().parent.parent / "reference"))
from make_latent_goldens import as_dtype, generator_of, guidance_embedding, randomise, scale_layer

PROMPTS = ["a red apple on the table", "two cats", "a house by the sea at night, oil on canvas",
           "a green heart"]
IMAGES = {"sdxl": 2}  # of these prompts, the first; of other models all
STEPS, GUIDANCE = 20, 7.5
OF_ONE_STEP = ("sd-turbo",)  # without guidance
UNET_ROWS = 2
EMBEDDED_GUIDANCE = (7.5, 2.0)  # of these rows, where the UNet reads it
VAE_EDGE, TINY_VAE_EDGE = 64, 8  # of latents
TAESD = "taesd"  # Stable Diffusion 1.5 with an AutoencoderTiny
IMAGE_SIZE = 0.4  # the standard deviation of pixels
PROGRAM_SECONDS = 90  # that model-outputs may take


def rounded(values):
    """To numbers of bf16."""
    return as_dtype(as_dtype(values, torch.bfloat16), torch.float32)


def set_size(layer, size, run):
    """Scales the last layer of what is run, so that its output has this standard deviation."""
    for _ in range(2):  # the mean, which the bias moves, does not scale alike
        scale_layer(layer, size / run().std().item())


def decoded(vae, latents):
    return vae.decode(latents / vae.config.scaling_factor).sample


def encoded(vae, pixels):
    return vae.encode(pixels).latent_dist.mean


def channels_last(images):
    """As model-outputs reads them."""
    return images.permute(0, 2, 3, 1)


def errors(output, reference):
    """Of each row."""
    difference = (output.double() - reference.double()).flatten(1)
    return (difference.norm(dim=1) / reference.double().flatten(1).norm(dim=1)).tolist()


class Part:
    """A model in bf16 and the same numbers in fp32. Writes its folder as save_pretrained does."""

    def __init__(self, model, folder):
        self.bf16 = model.bfloat16()
        self.bf16.save_pretrained(folder)
        self.fp32 = copy.deepcopy(self.bf16).float()
        self.bf16.to(memory_format=torch.channels_last)

    def run(self, forward, inputs):
        """forward(model, inputs) in bf16, and the reference."""
        with sdpa_kernel(SDPBackend.MATH):
            reference = forward(self.fp32, inputs)
        return forward(self.bf16, as_dtype(inputs, torch.bfloat16)), reference


class Errors:
    def __init__(self, args):
        torch.set_grad_enabled(False)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self.args = args

    # Models are made when they are first needed.

    @functools.cache
    def folder(self, model):
        tiny = self.args.tiny
        folder = Path(shutil.copytree(
            pipelines.MODELS / pipelines.SOURCES["sd15" if model == TAESD else model][tiny], self.args.work / model))
        if model == TAESD:
            shutil.rmtree(folder / "vae")
            shutil.copytree(pipelines.TINY_VAE[tiny], folder / "vae")
            index = folder / "model_index.json"
            index.write_text(json.dumps(json.loads(index.read_text()) | {"vae": ["diffusers", "AutoencoderTiny"]}))
        return folder

    def random_model(self, model, part, make):
        with torch.device(self.args.device):
            made = make(self.folder(model) / part)
        return randomise(made.float(), generator_of(f"{model} {part}", self.args.device))

    def normal(self, name, *shape):
        return rounded(torch.randn(shape, generator=generator_of(name)).to(self.args.device))

    @functools.cache
    def text_encoder(self, model, part):
        projects = part == "text_encoder_2"
        encoder = self.random_model(model, part, lambda folder: (
            CLIPTextModelWithProjection if projects else CLIPTextModel)(
                CLIPTextConfig.from_pretrained(folder)))
        return Part(encoder, self.folder(model) / part)

    def tokenizer(self, model, part):
        return CLIPTokenizer.from_pretrained(self.folder(model) / part.replace("text_encoder", "tokenizer"))

    def text_parts(self, model):
        return sorted(folder.name for folder in self.folder(model).glob("text_encoder*"))

    @functools.cache
    def unet(self, model):
        """And inputs."""
        unet = self.random_model(model, "unet", lambda folder: UNet2DConditionModel.from_config(
            UNet2DConditionModel.load_config(folder)))
        torch.manual_seed(1)
        inputs = unet_inputs(unet, UNET_ROWS, None, {"device": self.args.device, "dtype": torch.float32})
        del inputs["return_dict"]
        inputs = rounded(inputs)
        if width := unet.config.time_cond_proj_dim:  # denoised embeds the scale itself
            inputs["timestep_cond"] = guidance_embedding(torch.tensor(EMBEDDED_GUIDANCE[:UNET_ROWS]),
                                                         width).float().to(self.args.device)
        set_size(unet.conv_out, 1, lambda: unet(**inputs).sample)
        return Part(unet, self.folder(model) / "unet"), inputs

    def latents(self, model, images=1, edges=1):
        """Of unit size. `edges`: so many times as long."""
        edge = edges * (TINY_VAE_EDGE if self.args.tiny else VAE_EDGE)
        return self.normal(f"{model} latents", images, 4, edge, edge)

    def pixels(self, model):
        edge = self.pixels_per_latent(model) * self.latents(model).shape[-1]
        return IMAGE_SIZE * self.normal(f"{model} pixels", 1, 3, edge, edge)

    @functools.cache
    def tiny_vae(self):
        vae = self.random_model(TAESD, "vae", lambda folder: AutoencoderTiny.from_config(
            AutoencoderTiny.load_config(folder)))
        set_size(vae.decoder.layers[-1], IMAGE_SIZE, lambda: decoded(vae, self.latents(TAESD)))
        return Part(vae, self.folder(TAESD) / "vae")

    @functools.cache
    def vae(self, model, size):
        """Made for latents that a sampler leaves with this size."""
        vae = self.random_model(model, "vae", lambda folder: AutoencoderKL.from_config(
            AutoencoderKL.load_config(folder)))
        scale_layer(vae.post_quant_conv, vae.config.scaling_factor / size)
        set_size(vae.decoder.conv_out, IMAGE_SIZE, lambda: decoded(vae, size * self.latents(model)))
        set_size(vae.quant_conv, 1, lambda: encoded(vae, self.pixels(model)))
        return Part(vae, self.folder(model) / "vae")

    # What is measured: denoised's output, diffusers' and the reference.

    def text(self, model, part="text_encoder"):
        ids = self.tokenizer(model, part)(PROMPTS, padding="max_length", truncation=True,
                                          return_tensors="pt").input_ids
        theirs = self.text_encoder(model, part).run(
            lambda encoder, ids: encoder(ids).last_hidden_state, ids.to(self.args.device))
        return self.ours(model, part, {"ids": ids}), *theirs

    def second_text(self, model):
        return self.text(model, "text_encoder_2")

    def prediction(self, model):
        part, inputs = self.unet(model)
        ours = {"sample": channels_last(inputs["sample"]), "timestep": inputs["timestep"].float(),
                "states": inputs["encoder_hidden_states"]}
        if "added_cond_kwargs" in inputs:
            added = inputs["added_cond_kwargs"]
            ours |= {"pooled": added["text_embeds"], "sizes": added["time_ids"]}
        if "timestep_cond" in inputs:
            ours["guidance"] = torch.tensor(EMBEDDED_GUIDANCE[:UNET_ROWS])
        theirs = part.run(lambda unet, inputs: unet(**inputs).sample, inputs)
        return self.ours(model, "unet", ours), *theirs

    def decoder(self, model, images=1, edges=1):
        latents = self.latents(model, images, edges)
        vae = self.tiny_vae() if model == TAESD else self.vae(model, 1)
        theirs = vae.run(decoded, latents)
        return self.ours(model, "vae", {"latents": channels_last(latents)}), *theirs

    def large_decoder(self, model):
        return self.decoder(model, edges=2)

    def decoder_of_two(self, model):
        return self.decoder(model, images=2)

    def encoder(self, model):
        """Of what the encoder predicts, the means are the first half of the channels."""
        pixels = rounded(self.pixels(model))
        theirs = self.vae(model, 1).run(encoded, pixels)
        moments = self.ours(model, "vae_encoder", {"pixels": channels_last(pixels)})
        return moments[:, :moments.shape[1] // 2], *theirs

    def pixels_per_latent(self, model):
        config = AutoencoderKL.load_config(self.folder(model) / "vae")
        return 2 ** (len(config["block_out_channels"]) - 1)

    def images(self, model):
        texts = {part: self.text_encoder(model, part) for part in self.text_parts(model)}
        unet, _ = self.unet(model)
        prompts = PROMPTS[:IMAGES.get(model)]
        steps, guidance = (1, 1) if model in OF_ONE_STEP else (STEPS, GUIDANCE)
        edge = unet.fp32.config.sample_size
        noise = self.normal(f"{model} noise", len(prompts), 4, edge, edge)

        def latents_of(precision, noise):
            shared = {"vae": None, "unet": getattr(unet, precision), "feature_extractor": None,
                      "scheduler": DDIMScheduler.from_pretrained(self.folder(model) / "scheduler")}
            shared |= {part: getattr(text, precision) for part, text in texts.items()}
            shared |= {part.replace("text_encoder", "tokenizer"): self.tokenizer(model, part) for part in texts}
            asked = {}
            if len(texts) > 1:
                pixels = edge * self.pixels_per_latent(model)
                asked = {"original_size": (pixels, pixels), "target_size": (pixels, pixels)}
                pipe = StableDiffusionXLPipeline(**shared)
            else:
                pipe = StableDiffusionPipeline(**shared, safety_checker=None, requires_safety_checker=False)
            pipe.set_progress_bar_config(disable=True)
            return pipe(prompts, num_inference_steps=steps, guidance_scale=guidance, latents=noise,
                        output_type="latent", **asked).images

        with sdpa_kernel(SDPBackend.MATH):
            latents = latents_of("fp32", noise)
            vae = self.vae(model, latents.std().item())
            reference = decoded(vae.fp32, latents)
        theirs = decoded(vae.bf16, latents_of("bf16", noise.bfloat16()))
        ours = self.ours(model, "images", {"noise": channels_last(noise)}, f"--steps={steps}",
                         f"--guidance={guidance}", *(f"--prompt={prompt}" for prompt in prompts))
        return tuple(images.clamp(-1, 1) for images in (ours, theirs, reference))

    def ours(self, model, part, inputs, *flags):
        """What model-outputs makes of the inputs."""
        files = {name: self.args.work / f"{name}.safetensors" for name in ("inputs", "outputs")}
        save_file({name: (value.float() if value.is_floating_point() else value.int()).cpu().contiguous()
                   for name, value in inputs.items()}, files["inputs"])
        if self.args.device == "cuda":
            torch.cuda.empty_cache()
        done = subprocess.run(
            [self.args.program, f"--model={self.folder(model)}", f"--device={self.args.device}",
             *(f"--{name}={file}" for name, file in files.items()), *flags, part],
            stderr=subprocess.PIPE, text=True, timeout=PROGRAM_SECONDS, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"model-outputs ended with {done.returncode}: {done.stderr[-400:]}")
        output = load_file(files["outputs"])["output"].to(self.args.device)
        return output.permute(0, 3, 1, 2) if output.dim() == 4 else output

    def answer(self, _verb, name):
        begin = time.monotonic()
        model, what = name.rsplit("-", 1)
        measure = {"text": self.text, "text_2": self.second_text, "unet": self.prediction,
                   "vae": self.decoder, "vae_large": self.large_decoder, "vae_two": self.decoder_of_two,
                   "vae_encode": self.encoder, "images": self.images}[what]
        ours, theirs, reference = measure(model)
        return {"denoised": errors(ours, reference), "diffusers": errors(theirs, reference),
                "size": reference.std().item(), "seconds": round(time.monotonic() - begin, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where models are written")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        torch.set_num_threads(1)  # more would only wait for each other
    measured = Errors(args)
    peer.serve(lambda: peer.context() | {"diffusers": diffusers_version,
                                         "transformers": transformers.__version__}, measured.answer)


if __name__ == "__main__":
    main()
