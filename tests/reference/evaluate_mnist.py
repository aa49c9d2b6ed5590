# SPDX-License-Identifier: Apache-2.0
"""Scores models/mnist-32 over samplers, step counts and guidance scales.

usage: evaluate_mnist.py --model models/mnist-32 --data FOLDER [--images 1000]
       [--settings dpm:18:1.0,euler:18:1.0] [--grid grid.png] [--out figures.json]
Per setting, with as many digits of each class: the fraction read as its label, and the Frechet
distance between the classifier's features of the images and of the MNIST test set (as FID,
arXiv 1706.08500, but with a network that knows digits). Rows of the grid are digits 0 to 9.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import EDMDPMSolverMultistepScheduler, EDMEulerScheduler, UNet2DModel
from PIL import Image

import mnist
from classify import WEIGHTS, load_classifier, read_digits
from sampling import draw

SCHEDULERS = {"dpm": EDMDPMSolverMultistepScheduler, "euler": EDMEulerScheduler}


@torch.no_grad()
def feature_moments(classifier, images):
    features = torch.cat([classifier.features(part) for part in images.split(500)]).double()
    return features.mean(0), features.T.cov()


def frechet_distance(a, b) -> float:
    """|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)); the last trace from the eigenvalues of
    C_a C_b, which are real and >= 0 up to rounding."""
    (mean_a, cov_a), (mean_b, cov_b) = a, b
    roots = torch.linalg.eigvals((cov_a @ cov_b).cpu()).real.clamp(min=0).sqrt().sum()
    return ((mean_a - mean_b).square().sum().cpu() + (cov_a.trace() + cov_b.trace()).cpu()
            - 2 * roots).item()  # fmt: skip


def to_uint8(images):
    """As an image file holds them: [-1, 1] to 0..255, rounded."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--settings", help="sampler:steps:guidance, comma-separated; "
                        "without it the model's own defaults")  # fmt: skip
    parser.add_argument("--grid", type=Path, help="PNG of 10 x 20 digits of the first setting")
    parser.add_argument("--save", type=Path, help=".npy of the images of the first setting, uint8")
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    args = parser.parse_args()
    if args.images % 10:
        raise SystemExit(f"--images {args.images}: give a multiple of 10, as many of each digit")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    defaults = json.loads((args.model / "model_index.json").read_text())["_denoised"]
    unet = UNet2DModel.from_pretrained(args.model / "unet", torch_dtype=torch.float32)
    unet = unet.to(device, memory_format=torch.channels_last).eval()
    classifier = load_classifier(args.weights).to(device)
    test_images, test_labels = (x.to(device) for x in mnist.load(args.data, "test"))
    real = feature_moments(classifier, test_images)
    accuracy = (read_digits(classifier, test_images) == test_labels).float().mean().item()
    figures = {"classifier_test_accuracy": round(accuracy, 4), "images": args.images,
               "unet_dtype": args.dtype, "settings": []}  # fmt: skip

    default = f"dpm:{defaults['default_steps']}:{defaults['default_guidance_scale']}"
    settings = args.settings or default
    labels = torch.arange(args.images) % 10
    noise = torch.randn(args.images, 1, 32, 32, generator=torch.Generator().manual_seed(args.seed))
    for number, setting in enumerate(settings.split(",")):
        name, steps, guidance = setting.split(":")
        scheduler = SCHEDULERS[name].from_pretrained(args.model / "scheduler")
        start = time.time()
        with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            images = torch.cat([
                draw(unet, scheduler, x.to(device), y.to(device), int(steps), float(guidance),
                     defaults["null_class"])
                for x, y in zip(noise.split(args.batch), labels.split(args.batch))
            ])  # fmt: skip
        seconds = time.time() - start
        pixels = to_uint8(images)
        seen = pixels.float() / 127.5 - 1
        right = (read_digits(classifier, seen).cpu() == labels).float()
        distance = frechet_distance(feature_moments(classifier, seen), real)
        figure = {"sampler": name, "steps": int(steps), "guidance_scale": float(guidance),
                  "read_as_label": round(right.mean().item(), 4),
                  "worst_class": round(right.view(-1, 10).mean(0).min().item(), 4),
                  "frechet_distance": round(distance, 3),
                  "seconds": round(seconds, 1)}  # fmt: skip
        figures["settings"].append(figure)
        print(json.dumps(figure), flush=True)
        if number == 0 and args.grid:
            cells = pixels[:200].view(20, 10, 32, 32).permute(1, 2, 0, 3).reshape(320, 640)
            Image.fromarray(cells.cpu().numpy()).resize((1280, 640), 0).save(args.grid)
        if number == 0 and args.save:
            np.save(args.save, pixels[:, 0].cpu().numpy())
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
