# SPDX-License-Identifier: Apache-2.0
"""Trains models/mnist-32: a class-conditional, EDM-preconditioned UNet2DModel on MNIST.

usage: train_mnist.py --data FOLDER --output models/mnist-32 [--steps N] [--max-minutes M]
FOLDER holds the four idx .gz files of MNIST. Needs a GPU to be quick; runs on a CPU too.

Training follows Karras et al., "Elucidating the Design Space of Diffusion-Based Generative
Models" (arXiv 2206.00364), Table 1 and Appendix F: preconditioning, loss weighting and noise
distribution; label dropout for classifier-free guidance (arXiv 2207.12598). The weights saved are
an exponential moving average, in float16, in the directory layout of diffusers.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import EDMDPMSolverMultistepScheduler, UNet2DModel

import mnist
from trainer import Trainer

SIGMA_DATA = 0.5
P_MEAN, P_STD = -1.2, 1.2  # ln(sigma) of the training noise is normal
NULL_CLASS = 10  # the eleventh embedding: "no label"
LABEL_DROPOUT = 0.12
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
DEFAULT_STEPS = 10
DEFAULT_GUIDANCE_SCALE = 1.25


def make_unet() -> UNet2DModel:
    """3.9 M parameters, 1.1 GFLOP per 32x32 evaluation; attention at 8x8 only."""
    return UNet2DModel(
        sample_size=mnist.EDGE,
        in_channels=1,
        out_channels=1,
        block_out_channels=(32, 64, 128),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        attention_head_dim=64,
        norm_num_groups=8,
        num_class_embeds=mnist.CLASSES + 1,
    )


def edm_loss(unet, images, labels):
    """The EDM loss of one batch; scalar.

    With D = c_skip x + c_out F and the weight 1 / c_out^2, the weighted denoising error is the
    plain squared error of F against (y - c_skip x) / c_out (Equation 8).
    """
    n, device = len(images), images.device
    sigma = (torch.randn(n, 1, 1, 1, device=device) * P_STD + P_MEAN).exp()
    variance = sigma**2 + SIGMA_DATA**2
    noisy = images + sigma * torch.randn_like(images)
    target = (images - SIGMA_DATA**2 / variance * noisy) * variance.sqrt() / (sigma * SIGMA_DATA)
    dropped = torch.rand(n, device=device) < LABEL_DROPOUT
    labels = labels.masked_fill(dropped, NULL_CLASS)
    # cache_enabled: a cast of the weights kept from one step would go stale in the next.
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        output = unet(noisy / variance.sqrt(), sigma.log().flatten() / 4, class_labels=labels,
                      return_dict=False)[0]  # fmt: skip
    return F.mse_loss(output.float(), target)


def save(unet, folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    unet.half().to(memory_format=torch.contiguous_format).save_pretrained(folder / "unet")
    EDMDPMSolverMultistepScheduler(
        sigma_min=0.002, sigma_max=80.0, sigma_data=SIGMA_DATA, rho=7.0
    ).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "DiffusionPipeline",
        "unet": ["diffusers", "UNet2DModel"],
        "scheduler": ["diffusers", "EDMDPMSolverMultistepScheduler"],
        "id2label": {str(i): name for i, name in enumerate(NAMES)},
        "_denoised": {
            "null_class": NULL_CLASS,
            "default_steps": DEFAULT_STEPS,
            "default_guidance_scale": DEFAULT_GUIDANCE_SCALE,
        },
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--max-minutes", type=float, default=math.inf)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=float, default=0.02, help="fraction of the run")
    parser.add_argument("--ema-decay", type=float, default=0.999)
    parser.add_argument("--compile", action="store_true", help="fuse the UNet with torch.compile")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = (x.to(device) for x in mnist.load(args.data, "train"))
    unet = make_unet().to(device, memory_format=torch.channels_last).train()
    print(json.dumps({"parameters": sum(w.numel() for w in unet.parameters())}), flush=True)
    forward = torch.compile(unet) if args.compile else unet

    def loss():
        index = torch.randint(len(images), (args.batch,), device=device)
        return edm_loss(forward, images[index], labels[index])

    trainer = Trainer(loss, unet.parameters(), args.ema_decay)

    start, step, progress = time.time(), 0, 0.0
    every = max(1, min(200, args.steps // 10))
    while progress < 1:
        for _ in range(every):
            # The run ends at --steps or --max-minutes, and the cosine with it.
            progress = max(step / args.steps, (time.time() - start) / (60 * args.max_minutes))
            cosine = 0.5 * (1 + math.cos(math.pi * min(1, progress)))
            trainer.learning_rate.fill_(
                args.learning_rate * min(1, progress / args.warmup) * cosine)  # fmt: skip
            trainer.step()
            step += 1
        mean = trainer.mean_loss(every)
        seconds = time.time() - start
        print(json.dumps({"step": step, "images": step * args.batch, "loss": round(mean, 5),
                          "seconds": round(seconds, 1)}), flush=True)  # fmt: skip
        if not math.isfinite(mean):
            raise SystemExit(f"the loss is {mean} at step {step}; lower --learning-rate")
    trainer.load_averages()
    save(unet, args.output)


if __name__ == "__main__":
    main()
