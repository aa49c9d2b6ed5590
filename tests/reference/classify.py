# SPDX-License-Identifier: Apache-2.0
"""Reads generated digits with a small CNN and prints the fraction that shows its label.

usage: classify.py --images digits.npy --labels labels.npy
       classify.py --images folder_of_png --labels labels.txt
       classify.py --images '3_*.png' --label 3
PNGs are taken in the sorted order of their names. Prints one JSON object.
"""

import argparse
import glob
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

WEIGHTS = Path(__file__).with_name("digit_classifier.safetensors")


class DigitClassifier(nn.Module):
    """float32 [n, 1, 32, 32] in [-1, 1] -> logits [n, 10]; `features` are the 128 values before."""

    def __init__(self):
        super().__init__()

        def block(inputs, outputs):
            conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]

        self.trunk = nn.Sequential(
            *block(1, 32), *block(32, 32), nn.MaxPool2d(2),
            *block(32, 64), *block(64, 64), nn.MaxPool2d(2),
            *block(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(128, 10)

    def features(self, images):
        return self.trunk(images)

    def forward(self, images):
        return self.head(self.trunk(images))


def load_classifier(weights: Path = WEIGHTS) -> DigitClassifier:
    model = DigitClassifier()
    model.load_state_dict(load_file(weights))
    return model.eval()


@torch.no_grad()
def read_digits(classifier, images: torch.Tensor, batch: int = 500) -> torch.Tensor:
    """Returns the digit read in each of `images`, int64 [n]."""
    return torch.cat([classifier(part).argmax(1) for part in images.split(batch)])


def load_images(source: str) -> torch.Tensor:
    """Returns float32 [n, 1, 32, 32] in [-1, 1].

    `source` is an .npy (uint8 0..255 or float -1..1; [n, 32, 32], [n, 1, 32, 32] or
    [n, 32, 32, 1]), a folder of PNGs, or a glob of PNGs.
    """
    if source.endswith(".npy"):
        array = np.load(source)
    else:
        names = sorted(glob.glob(f"{source}/*.png" if Path(source).is_dir() else source))
        if not names:
            raise SystemExit(f"--images {source}: no PNG there; name an .npy, a folder or a glob")
        array = np.stack([np.asarray(Image.open(name).convert("L")) for name in names])
    if array.size % (32 * 32) or 32 not in array.shape:
        raise SystemExit(f"--images {source}: shape {array.shape}; expected 32x32 with one channel")
    images = torch.from_numpy(array.astype(np.float32)).reshape(-1, 1, 32, 32)
    return images / 127.5 - 1 if array.dtype == np.uint8 else images.clamp(-1, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", required=True, help=".npy, folder of PNGs, or a glob of PNGs")
    parser.add_argument("--labels", help=".npy or whitespace-separated text, one digit per image")
    parser.add_argument("--label", type=int, help="the one digit that every image should show")
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    args = parser.parse_args()
    if (args.labels is None) == (args.label is None):
        raise SystemExit("give either --labels or --label")

    images = load_images(args.images)
    if args.label is not None:
        labels = torch.full((len(images),), args.label)
    elif args.labels.endswith(".npy"):
        labels = torch.from_numpy(np.load(args.labels).astype(np.int64))
    else:
        labels = torch.tensor([int(word) for word in Path(args.labels).read_text().split()])
    if len(labels) != len(images):
        raise SystemExit(f"{len(images)} images but {len(labels)} labels; give one label per image")

    read = read_digits(load_classifier(args.weights), images)
    right = read == labels
    per_class = {str(c): right[labels == c].float().mean().item() for c in labels.unique().tolist()}
    print(json.dumps({
        "images": len(images),
        "read_as_label": right.float().mean().item(),
        "per_class": per_class,
        "misread": [
            {"index": i, "label": labels[i].item(), "read": read[i].item()}
            for i in (~right).nonzero().flatten().tolist()
        ],
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
