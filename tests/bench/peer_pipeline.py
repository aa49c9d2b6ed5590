# SPDX-License-Identifier: Apache-2.0
"""A text-to-image request drawn by PyTorch in one CUDA graph, timed when measure.py says.

usage: peer_pipeline.py --model=DIRECTORY [--steps=20] [--guidance=7.5] [--device=cuda]

The directory is a StableDiffusionPipeline, for example one that synthetic-model wrote. Its models are
diffusers' and transformers', in bf16, channels last, compiled by torch.compile; the update of a step is
compiled with the UNet. On a GPU one CUDA graph holds the whole picture: text encoder, every step and
decoder, so that Python has only the tokenizer and the PNG to do. DDIM. A request is timed from its text
to the bytes of a PNG. ISA-L compresses it, as in denoised: Pillow takes 40 ms for the noise that random
weights draw. Requests: "compile" (which also compares a picture with that of diffusers' own pipeline),
"prepare" (whole pictures that warm up) and "measure", the median of some, and milliseconds until the
pixels are on the host. Needs diffusers, transformers and isal.
"""
import argparse
import importlib.metadata
import statistics
import struct
import time

import numpy
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from diffusers import __version__ as diffusers_version
from isal import isal_zlib

import peer

REQUESTS = 5
# Mean difference from diffusers' picture, in [0, 1]. Measured: 0.0007 in fp32 (a small model), 0.0074 in
# bf16 (SD 1.5, an H200). Planted errors, in fp32: times 20 later 0.013, alphas of two steps on 0.035,
# guidance of 5 instead of 7.5 0.042, no prompt 0.21. Guidance of 7 is not told from bf16: 0.008.
MOST_DIFFERENCE = 0.01


def png_of(pixels):
    """The file of uint8 [height, width, 3]: each row as its difference from the one above, ISA-L at level 1."""
    height, width, _ = pixels.shape
    rows = numpy.empty((height, 1 + 3 * width), numpy.uint8)
    rows[:, 0] = 2  # PNG's filter "Up"
    rows[:, 1:] = pixels.reshape(height, 3 * width)
    rows[1:, 1:] -= pixels.reshape(height, 3 * width)[:-1]

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", isal_zlib.crc32(kind + data))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) +
            chunk(b"IDAT", isal_zlib.compress(rows, 1)) + chunk(b"IEND", b""))


class Pictures:
    def __init__(self, args):
        peer.prepare()
        self.args, self.drawn, self.seconds, self.graph = args, 0, {}, None
        self.on_gpu = args.device == "cuda"
        pipe = StableDiffusionPipeline.from_pretrained(
            args.model, torch_dtype=torch.bfloat16 if self.on_gpu else torch.float32, safety_checker=None,
            requires_safety_checker=False)
        # Not clipped, as in SD 1.5's own config; DDIMScheduler clips by default.
        pipe.scheduler = scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
        if scheduler.config.prediction_type != "epsilon":
            raise ValueError(f"prediction_type '{scheduler.config.prediction_type}': only epsilon is known here")
        pipe.set_progress_bar_config(disable=True)
        self.pipe = pipe.to(args.device)
        for part in (pipe.unet, pipe.vae):
            part.to(memory_format=torch.channels_last)
        scheduler.set_timesteps(args.steps)
        stride = scheduler.config.num_train_timesteps // args.steps
        times = [int(each) for each in scheduler.timesteps]
        kept = [(scheduler.alphas_cumprod[time],
                 scheduler.alphas_cumprod[time - stride] if time >= stride else scheduler.final_alpha_cumprod)
                for time in times]
        self.steps = [tuple(torch.tensor(float(each), device=args.device) for each in (time, *alphas))
                      for time, alphas in zip(times, kept)]
        edge = pipe.unet.config.sample_size
        self.latents = torch.zeros(1, pipe.unet.config.in_channels, edge, edge, device=args.device,
                                   dtype=pipe.unet.dtype)
        self.tokens = self.tokens_of("")
        compiled = torch.compile if self.on_gpu else lambda function, **_: function
        self.encode, self.step, self.decode = (compiled(each, dynamic=False)
                                               for each in (self._encode, self._step, self._decode))

    def tokens_of(self, text):
        """Ids [2, tokens] of the empty prompt and the prompt."""
        tokenizer = self.pipe.tokenizer
        return tokenizer(["", text], padding="max_length", max_length=tokenizer.model_max_length,
                         truncation=True, return_tensors="pt").input_ids.to(self.args.device)

    def _encode(self, tokens):
        return self.pipe.text_encoder(tokens)[0]

    def _step(self, latents, states, time, alpha, alpha_after):
        """DDIM with eta 0 (https://arxiv.org/abs/2010.02502, equation 12), in fp32."""
        without, given = self.pipe.unet(torch.cat([latents, latents]), time, encoder_hidden_states=states,
                                        return_dict=False)[0].float().chunk(2)
        noise = without + self.args.guidance * (given - without)
        clean = (latents.float() - (1 - alpha).sqrt() * noise) / alpha.sqrt()
        return (alpha_after.sqrt() * clean + (1 - alpha_after).sqrt() * noise).to(latents.dtype)

    def _decode(self, latents):
        image = self.pipe.vae.decode(latents / self.pipe.vae.config.scaling_factor, return_dict=False)[0]
        return ((image.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)[0].permute(1, 2, 0).contiguous()

    def picture(self, _=None):
        states, latents = self.encode(self.tokens), self.latents
        for each in self.steps:
            latents = self.step(latents, states, *each)
        self.pixels = self.decode(latents)

    def prompt(self):
        return f"a small red apple beside number {self.drawn} of the wooden birds"

    def draw(self):
        self.drawn += 1
        self.tokens.copy_(self.tokens_of(self.prompt()))
        self.latents.normal_()
        if self.graph:
            self.graph.replay()
        else:
            self.picture()
        pixels = self.pixels.cpu().numpy()
        drawn_at = time.perf_counter()
        png_of(pixels)
        return drawn_at

    def compile(self):
        if self.on_gpu:
            self.graph = peer.captured(self.picture, 1)
        self.draw()
        theirs = self.pipe(self.prompt(), num_inference_steps=self.args.steps, guidance_scale=self.args.guidance,
                           latents=self.latents.clone(), output_type="pt").images[0]
        ours = self.pixels.permute(2, 0, 1).float() / 255
        self.difference = float((ours - theirs.float()).abs().mean())
        if not self.difference <= MOST_DIFFERENCE:
            raise ValueError(f"the picture differs from diffusers' by {self.difference:.3f} on average, more than "
                             f"{MOST_DIFFERENCE}")

    def prepare(self):
        for _ in range(3):
            self.draw()

    def measure(self):
        files, pixels = [], []
        for _ in range(REQUESTS):
            begin = time.perf_counter()
            drawn_at = self.draw()
            files.append(1e3 * (time.perf_counter() - begin))
            pixels.append(1e3 * (drawn_at - begin))
        return {"ms": statistics.median(files), "ms_pixels": statistics.median(pixels)}

    def answer(self, verb, _name):
        begin = time.monotonic()
        if verb == "measure":
            return self.measure()
        {"compile": self.compile, "prepare": self.prepare}[verb]()
        self.seconds[verb] = round(time.monotonic() - begin, 1)
        return {"seconds": dict(self.seconds), "difference_from_diffusers": self.difference}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=7.5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    pictures = Pictures(args)
    versions = {"diffusers": diffusers_version, "isal": importlib.metadata.version("isal")}
    peer.serve(lambda: peer.context() | versions, pictures.answer)


if __name__ == "__main__":
    main()
