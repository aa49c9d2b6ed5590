# SPDX-License-Identifier: Apache-2.0
"""One forward of diffusers' UNet2DModel as PyTorch runs it fastest, timed when measure.py says.

usage: peer_model.py --model=cifar10-32 --rows=16 --way=compile [--device=cuda]

A model is a folder of tests/models/configs. bf16, channels last, random weights, for speed does not
depend on them. A way is eager; compile: torch.compile as it is; max-autotune: torch.compile with
that mode. On a GPU each forward is captured by hand in one CUDA graph, which is then replayed back to
back. Requests: "compile" (the host's part; max-autotune also times kernels on the GPU), "prepare"
(the first run, in which the others choose kernels by their speed) and "measure". Needs diffusers.
"""
import argparse
import gc
import json
import time
from pathlib import Path

import torch
from diffusers import UNet2DModel
from diffusers import __version__ as diffusers_version

import peer

CONFIGS = Path(__file__).resolve().parents[1] / "models" / "configs"
MODES = {"compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}


class Forward:
    def __init__(self, args):
        peer.prepare()
        self.on_gpu = args.device == "cuda"
        self.way = args.way
        like = {"device": args.device, "dtype": torch.bfloat16 if self.on_gpu else torch.float32}
        config = json.loads((CONFIGS / args.model / "config.json").read_text())
        unet = UNet2DModel.from_config(config).to(**like).to(memory_format=torch.channels_last)
        self.unet = unet.eval()
        x = torch.randn(args.rows, unet.config.in_channels, unet.config.sample_size,
                        unet.config.sample_size, **like)
        self.inputs = {"sample": x.to(memory_format=torch.channels_last),
                       "timestep": torch.randint(0, 1000, (args.rows,), device=args.device)}
        if unet.config.num_class_embeds:
            self.inputs["class_labels"] = torch.randint(0, unet.config.num_class_embeds,
                                                        (args.rows,), device=args.device)
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.forward = self.run = None
        self.seconds = {}

    def compile(self):
        if self.way == "eager":
            self.forward = self.unet
            return
        self.forward = peer.compiled(self.unet, mode=MODES[self.way], **self.inputs)

    def prepare(self):
        if not self.on_gpu:
            self.run = lambda: self.forward(**self.inputs)
            self.run()
            return
        graph = peer.captured(lambda _: self.forward(**self.inputs), 1, warm_ups=3)
        self.run = graph.replay
        self.run()
        torch.cuda.synchronize()

    def answer(self, verb, _name):
        begin = time.monotonic()
        if verb == "measure":
            return {"ms": peer.model_ms(self.run)}
        {"compile": self.compile, "prepare": self.prepare}[verb]()
        self.seconds[verb] = round(time.monotonic() - begin, 1)
        details = {"seconds": dict(self.seconds)}
        if self.on_gpu and verb == "prepare":
            details |= {"MiB_allocated": torch.cuda.max_memory_allocated() >> 20,
                        "MiB_reserved": torch.cuda.max_memory_reserved() >> 20}
        return details


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--way", choices=["eager", *MODES], required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    forward = Forward(args)
    peer.serve(lambda: peer.context() | {"diffusers": diffusers_version}, forward.answer)


if __name__ == "__main__":
    main()
