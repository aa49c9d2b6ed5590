# SPDX-License-Identifier: Apache-2.0
"""Reads MNIST from its four idx .gz files.

Source of the format: the comment block of http://yann.lecun.com/exdb/mnist (big-endian header of
magic, count[, rows, columns], then uint8 values).
"""

import gzip
import struct
from pathlib import Path

import numpy as np
import torch

CLASSES = 10
EDGE = 32  # 28 plus a border of 2 pixels, so that the UNet can halve it twice and end at 8x8


def _read_idx(path: Path) -> np.ndarray:
    with gzip.open(path, "rb") as file:
        data = file.read()
    zeros, dtype, dims = struct.unpack(">HBB", data[:4])
    if zeros != 0 or dtype != 8:
        raise SystemExit(f"{path}: magic {data[:4].hex()}; expected an idx file of uint8, 000008xx")
    shape = struct.unpack(f">{dims}I", data[4 : 4 + 4 * dims])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)


def load(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (images, labels) of `split` ("train": 60000, "test": 10000).

    images: float32 [n, 1, 32, 32] in [-1, 1], digit white (1) on black (-1). labels: int64 [n].
    """
    prefix = {"train": "train", "test": "t10k"}[split]
    images = torch.from_numpy(_read_idx(Path(folder) / f"{prefix}-images-idx3-ubyte.gz").copy())
    labels = torch.from_numpy(_read_idx(Path(folder) / f"{prefix}-labels-idx1-ubyte.gz").copy())
    border = (EDGE - images.shape[-1]) // 2
    images = torch.nn.functional.pad(images[:, None].float(), (border,) * 4)
    return images / 127.5 - 1, labels.long()
