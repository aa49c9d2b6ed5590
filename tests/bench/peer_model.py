# SPDX-License-Identifier: Apache-2.0
"""One forward of a UNet of diffusers, or of a decoder, as PyTorch runs it fastest, timed when
measure.py says.

usage: peer_model.py --config=DIR/config.json --rows=16 --way=compile [--edge=64] [--device=cuda]

The config is that of a UNet2DModel, a UNet2DConditionModel, whose rows have 77 tokens of a prompt
each, or an AutoencoderKL, which decodes. --edge is that of the state or the latents. bf16, channels
last, random weights like denoised-bench's. A way is eager; compile: torch.compile as it is;
max-autotune: torch.compile with that mode. On a GPU each forward is captured by hand in one CUDA
graph, which is then replayed back to back. Requests: "compile" (the host's part; max-autotune also times kernels on the GPU), "prepare"
(the first run, in which the others choose kernels by their speed) and "measure". Needs diffusers.
"""
import argparse
import gc
import json
import math
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel, UNet2DModel
from diffusers import __version__ as diffusers_version

import peer

PROMPT_TOKENS = 77
MODES = {"compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def unet_inputs(unet, rows, edge, like):
    device, config = like["device"], unet.config
    edge = edge or config.sample_size
    x = torch.randn(rows, config.in_channels, edge, edge, **like)
    inputs = {"sample": x.to(memory_format=torch.channels_last),
              "timestep": torch.randint(0, 1000, (rows,), device=device)}
    if isinstance(unet, UNet2DConditionModel):
        inputs["return_dict"] = False
        inputs["encoder_hidden_states"] = torch.randn(rows, PROMPT_TOKENS,
                                                      config.cross_attention_dim, **like)
        if config.addition_embed_type == "text_time":
            pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
            inputs["added_cond_kwargs"] = {
                "text_embeds": torch.randn(rows, pooled, **like),
                "time_ids": torch.full((rows, 6), 8.0 * edge, **like)}
    elif config.num_class_embeds:
        inputs["class_labels"] = torch.randint(0, config.num_class_embeds, (rows,), device=device)
    return inputs


def draw_weights(model):
    """Of the distributions of Weights::Synthetic() (engine/io/weights.cc), so that layers' outputs have
    unit size: a GPU at its power limit is slower, the more bits change."""
    for name, parameter in model.named_parameters():
        vector = parameter.dim() < 2
        fan_in = parameter.numel() // parameter.shape[0]
        spread = 0.5 if vector else math.sqrt(3 / fan_in)
        center = 1 if vector and not name.endswith("bias") else 0
        parameter.uniform_(center - spread, center + spread)


class Forward:
    def __init__(self, args):
        peer.prepare()
        self.on_gpu = args.device == "cuda"
        self.way = args.way
        like = {"device": args.device, "dtype": torch.bfloat16 if self.on_gpu else torch.float32}
        config = json.loads(Path(args.config).read_text())
        model = {"UNet2DConditionModel": UNet2DConditionModel, "AutoencoderKL": AutoencoderKL}.get(
            config.get("_class_name"), UNet2DModel)
        with torch.device(args.device):
            model = model.from_config(config)
            draw_weights(model)
            model = model.to(**like)
        self.model = model.to(memory_format=torch.channels_last).eval()
        self.call = self.model
        if isinstance(model, AutoencoderKL):
            z = torch.randn(args.rows, config["latent_channels"], args.edge, args.edge, **like)
            self.inputs = {"z": z.to(memory_format=torch.channels_last), "return_dict": False}
            self.call = self.model.decode
        else:
            self.inputs = unet_inputs(model, args.rows, args.edge, like)
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.forward = self.run = None
        self.seconds = {}

    def compile(self):
        if self.way == "eager":
            self.forward = self.call
            return
        self.forward = peer.compiled(self.call, mode=MODES[self.way], **self.inputs)

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
    parser.add_argument("--config", required=True)
    parser.add_argument("--edge", type=int)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--way", choices=["eager", *MODES], required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    forward = Forward(args)
    peer.serve(lambda: peer.context() | {"diffusers": diffusers_version}, forward.answer)


if __name__ == "__main__":
    main()
