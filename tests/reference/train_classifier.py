# SPDX-License-Identifier: Apache-2.0
"""Trains the digit classifier that judges generated digits (about 30 s on a GPU).

usage: train_classifier.py --data FOLDER [--output digit_classifier.safetensors]
FOLDER holds the four idx .gz files of MNIST. Prints the test accuracy after each epoch.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import mnist
from classify import WEIGHTS, DigitClassifier, read_digits


def jitter(images: torch.Tensor) -> torch.Tensor:
    """A small random affine map per image: +-10 degrees, +-10 % size, +-2 pixels."""
    n, device = len(images), images.device

    def uniform(limit):
        return (torch.rand(n, device=device) * 2 - 1) * limit

    angle, scale = uniform(math.radians(10)), 1 + uniform(0.1)
    cos, sin = scale * torch.cos(angle), scale * torch.sin(angle)
    pixel = 2 / images.shape[-1]
    theta = torch.stack([cos, -sin, uniform(2 * pixel), sin, cos, uniform(2 * pixel)], 1)
    grid = F.affine_grid(theta.view(n, 2, 3), images.shape, align_corners=False)
    # Border pixels are black (-1); padding with the border keeps what is mapped in black too.
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--limit", type=int, default=60000, help="train on the first N images only")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = (x[: args.limit].to(device) for x in mnist.load(args.data, "train"))
    test_images, test_labels = (x.to(device) for x in mnist.load(args.data, "test"))

    model = DigitClassifier().to(device)
    steps = args.epochs * (len(images) // args.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)

    start = time.time()
    for epoch in range(args.epochs):
        model.train()
        order = torch.randperm(len(images), device=device)
        for index in order.split(args.batch)[: len(images) // args.batch]:
            logits = model(jitter(images[index]))
            loss = F.cross_entropy(logits, labels[index], label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        accuracy = (read_digits(model, test_images) == test_labels).float().mean().item()
        print(json.dumps({"epoch": epoch + 1, "loss": round(loss.item(), 4),
                          "test_accuracy": round(accuracy, 4),
                          "seconds": round(time.time() - start, 1)}), flush=True)  # fmt: skip
    save_file({k: v.cpu().contiguous() for k, v in model.state_dict().items()}, args.output)


if __name__ == "__main__":
    main()
