# SPDX-License-Identifier: Apache-2.0
"""A text-to-image request as diffusers draws it fastest, timed when measure.py says.

usage: peer_pipeline.py --model=DIRECTORY [--steps=20] [--guidance=7.5] [--device=cuda]

The directory is a StableDiffusionPipeline, for example one that synthetic-model wrote. bf16, channels
last; text encoder, UNet and decoder by torch.compile, the latter two each captured by hand in a CUDA
graph, so that the host has as little to do as diffusers lets it. DDIM. A request is timed from its text
to the bytes of a PNG, which Pillow makes at its fastest level. Requests: "compile" (everything but the
capture), "prepare" (whole pictures that warm up) and "measure", the median of some. Needs diffusers and
transformers.
"""
import argparse
import io
import statistics
import time

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from diffusers import __version__ as diffusers_version

import peer

REQUESTS = 5


class Graphed:
    """A function by torch.compile, captured at its first call: the tensors of later calls are copied to
    where those of the first were. The result lies where the last one did."""

    def __init__(self, function):
        self.function = torch.compile(function, dynamic=False)
        self.graph = self.result = None

    def __call__(self, *args, **kwargs):
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        if self.graph is None:
            self.places = [each.clone() for each in given]
            places = iter(self.places)
            args, kwargs = ([next(places) if isinstance(each, torch.Tensor) else each for each in args],
                            {name: next(places) if isinstance(each, torch.Tensor) else each
                             for name, each in kwargs.items()})

            def run(_):
                self.result = self.function(*args, **kwargs)

            self.graph = peer.captured(run, 1, warm_ups=3)
        for place, tensor in zip(self.places, given):
            place.copy_(tensor)
        self.graph.replay()
        return self.result


class Pictures:
    def __init__(self, args):
        peer.prepare()
        self.args, self.drawn, self.seconds = args, 0, {}
        on_gpu = args.device == "cuda"
        pipe = StableDiffusionPipeline.from_pretrained(
            args.model, torch_dtype=torch.bfloat16 if on_gpu else torch.float32, safety_checker=None,
            requires_safety_checker=False)
        pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
        pipe.set_progress_bar_config(disable=True)
        self.pipe = pipe.to(args.device)
        for part in (pipe.unet, pipe.vae):
            part.to(memory_format=torch.channels_last)

    def draw(self):
        self.drawn += 1
        image = self.pipe(f"a small red apple beside number {self.drawn} of the wooden birds",
                          num_inference_steps=self.args.steps,
                          guidance_scale=self.args.guidance).images[0]
        png = io.BytesIO()
        image.save(png, "PNG", compress_level=1)
        return png.getvalue()

    def compile(self):
        pipe = self.pipe
        if self.args.device == "cuda":
            pipe.text_encoder.forward = torch.compile(pipe.text_encoder.forward, dynamic=False)
            pipe.unet.forward = Graphed(pipe.unet.forward)
            pipe.vae.decode = Graphed(pipe.vae.decode)
        self.draw()

    def prepare(self):
        for _ in range(3):
            self.draw()

    def measure(self):
        times = []
        for _ in range(REQUESTS):
            begin = time.perf_counter()
            self.draw()
            times.append(1e3 * (time.perf_counter() - begin))
        return {"ms": statistics.median(times)}

    def answer(self, verb, _name):
        begin = time.monotonic()
        if verb == "measure":
            return self.measure()
        {"compile": self.compile, "prepare": self.prepare}[verb]()
        self.seconds[verb] = round(time.monotonic() - begin, 1)
        return {"seconds": dict(self.seconds)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=7.5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    pictures = Pictures(args)
    peer.serve(lambda: peer.context() | {"diffusers": diffusers_version}, pictures.answer)


if __name__ == "__main__":
    main()
