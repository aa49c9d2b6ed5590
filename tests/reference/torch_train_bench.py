# SPDX-License-Identifier: Apache-2.0
"""PyTorch's time for a training step on the CPU: the work that denoise-train does in a step.

usage: torch_train_bench.py [--network models/mnist-32/unet/config.json] [--batch 64] [--steps 8] [--compile]
EDM loss, backward, clip, AdamW and one average of the weights, in float32. Prints one JSON line: seconds
of a step (least and median), and seconds of processor time, which other programs on the machine disturb
less.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import UNet2DModel

ROOT = Path(__file__).parent.parent.parent


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--network", type=Path, default=ROOT / "models/mnist-32/unet/config.json")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--channels-last", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    unet = UNet2DModel.from_config(json.loads(args.network.read_text())).train()
    if args.channels_last:
        unet = unet.to(memory_format=torch.channels_last)
    weights = list(unet.parameters())
    averages = [w.detach().clone() for w in weights]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    forward = torch.compile(unet) if args.compile else unet
    config = unet.config
    images = torch.rand(1024, config.in_channels, config.sample_size, config.sample_size) * 2 - 1
    labels = torch.randint(0, config.num_class_embeds or 1, (1024,))

    def step():
        index = torch.randint(len(images), (args.batch,))
        y, kw = images[index], {}
        if args.channels_last:
            y = y.to(memory_format=torch.channels_last)
        if config.num_class_embeds:
            kw["class_labels"] = labels[index]
        sigma = (torch.randn(args.batch, 1, 1, 1) * 1.2 - 1.2).exp()
        variance = sigma**2 + 0.25
        noisy = y + sigma * torch.randn_like(y)
        target = (y - 0.25 / variance * noisy) * variance.sqrt() / (sigma * 0.5)
        output = forward(noisy / variance.sqrt(), sigma.log().flatten() / 4, return_dict=False, **kw)
        loss = F.mse_loss(output[0], target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizer.step()
        torch._foreach_lerp_(averages, weights, 1e-3)

    for _ in range(2):
        step()
    wall, processor = [], []
    for _ in range(args.steps):
        start, used = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    print(json.dumps({
        "batch": args.batch, "threads": torch.get_num_threads(), "compile": args.compile,
        "least": round(min(wall), 3), "median": round(statistics.median(wall), 3),
        "processor_least": round(min(processor), 3),
        "processor_median": round(statistics.median(processor), 3),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
