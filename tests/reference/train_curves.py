#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loss curves of denoise-train beside PyTorch's, both in float32 on a CPU, with the same pictures, order,
noise levels, noise and initial weights. PyTorch runs several times, in ways that differ in rounding
alone; denoise-train must not lie further from them than they do from each other.

    train_curves.py run --train build/release/trainer/denoise-train --data MNIST --output curves.json
    train_curves.py table curves.json
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

NETWORK = {
    "_class_name": "UNet2DModel", "sample_size": 8, "in_channels": 1, "out_channels": 1,
    "block_out_channels": [8, 16], "layers_per_block": 1, "norm_num_groups": 4,
    "attention_head_dim": 8, "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"], "num_class_embeds": 10,
}  # fmt: skip
PICTURES, BATCH, RATE, SEED = 2048, 8, 1e-3, 5
# Purpose of engine/training/random.h.
NOISE, LEVEL, ORDER = 1, 2, 6
WAYS = ("plain", "channels_last", "reversed")


def philox(block, sample, step, purpose):
    """PhiloxWords() of engine/core/philox.h over arrays: [..., 4] words."""
    mask = np.uint64(0xFFFFFFFF)
    c = [np.asarray(x, np.uint64) for x in np.broadcast_arrays(block, sample, step, purpose)]
    k0, k1 = SEED & 0xFFFFFFFF, SEED >> 32
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), p1 & mask,
             (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), p0 & mask]  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, -1)


def normals(words):
    """NormalOfBits(): Box-Muller in float32."""
    pair = (words >> np.uint64(8)).astype(np.float32).reshape(*words.shape[:-1], 2, 2)
    radius = np.sqrt(np.float32(-2) * np.log((pair[..., 0] + np.float32(1)) * np.float32(2**-24)))
    angle = pair[..., 1] * np.float32(2 * np.pi * 2**-24)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).reshape(words.shape)


def order(epoch):
    """Permute() of engine/training/random.h, of all indices."""
    bits = 1
    while 1 << (2 * bits) < PICTURES:
        bits += 1
    mask, shift = np.uint64((1 << bits) - 1), np.uint64(bits)
    value = np.arange(PICTURES, dtype=np.uint64)
    waiting = np.ones(PICTURES, bool)
    while waiting.any():
        left, right = value[waiting] >> shift, value[waiting] & mask
        for turn in range(6):
            left, right = right, left ^ (philox(right, turn, epoch, ORDER)[..., 0] & mask)
        value[waiting] = left << shift | right
        waiting = value >= PICTURES
    return value.astype(np.int64)


def digits(folder):
    """MNIST's first digits, 28×28 → 8×8 by means of neighbours, and their classes."""
    images = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes())
    images = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28)[:PICTURES]
    images = np.pad(images, ((0, 0), (2, 2), (2, 2))).reshape(PICTURES, 8, 4, 8, 4).mean((2, 4))
    return images.round().astype(np.uint8), np.frombuffer(labels, np.uint8, offset=8)[:PICTURES]


def batches(images, labels, steps):
    """What each step sees: x, target, condition and class, as MakeSamples() and Objective make them."""
    images = images.astype(np.float32)[..., None] / np.float32(127.5) - np.float32(1)
    sample, epoch, of_epoch = np.arange(BATCH), -1, None
    for step in range(steps):
        index = step * BATCH + sample
        if index[0] // PICTURES != epoch:  # the batch divides the pictures
            epoch = int(index[0] // PICTURES)
            of_epoch = order(epoch)
        picture = of_epoch[index % PICTURES]
        sigma = np.exp(-1.2 + 1.2 * normals(philox(0, sample, step, LEVEL))[:, 0].astype(np.float64))
        root = np.hypot(sigma, 0.5)
        skip, out = 0.25 / root**2, sigma * 0.5 / root
        column = lambda v: v.astype(np.float32)[:, None, None, None]
        y = images[picture]
        count = y[0].size
        noise = normals(philox(np.arange(count // 4)[None], sample[:, None], step, NOISE))
        noise = noise.reshape(y.shape)
        x = column(1 / root) * y + column(sigma / root) * noise
        target = column((1 - skip) / out) * y + column(-skip * sigma / out) * noise
        yield x, target, (np.log(sigma) / 4).astype(np.float32), labels[picture].astype(np.int64)


def train_torch(way, init, images, labels, steps):
    import torch
    from diffusers import UNet2DModel

    torch.set_num_threads(1)
    model = UNet2DModel.from_pretrained(init / "unet").train()
    if way == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    losses = []
    for batch in batches(images, labels, steps):
        x, target, condition, label = (
            torch.from_numpy(np.ascontiguousarray(part[::-1] if way == "reversed" else part))
            for part in batch
        )
        output = model(x.permute(0, 3, 1, 2), condition, class_labels=label).sample
        loss = ((output - target.permute(0, 3, 1, 2)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_ours(program, init, root, steps):
    subprocess.run(
        [program, f"--data={root}/images.npy", f"--labels={root}/labels.npy", f"--init-from={init}",
         f"--output={root}/run", f"--batch={BATCH}", f"--steps={steps}", f"--learning-rate={RATE}",
         f"--seed={SEED}", "--log-steps=1", f"--checkpoint-steps={steps}"],
        check=True, stderr=subprocess.DEVNULL)  # fmt: skip
    return [json.loads(line)["loss"] for line in (root / "run/log.jsonl").read_text().splitlines()]


def run_torch(args):
    images, labels = np.load(args.folder / "images.npy"), np.load(args.folder / "labels.npy")
    losses = train_torch(args.way, args.folder / "init", images, labels, args.steps)
    (args.folder / f"{args.way}.json").write_text(json.dumps(losses))
    return 0


def run(args):
    import diffusers
    import torch

    images, labels = digits(args.data)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        np.save(root / "images.npy", images)
        np.save(root / "labels.npy", labels)
        torch.manual_seed(1)
        model = diffusers.UNet2DModel.from_config(NETWORK)
        model.save_pretrained(root / "init/unet")
        curves = {"denoise-train": train_ours(args.train, root / "init", root, args.steps)}
        # Side by side, each in a process of its own.
        workers = {
            way: subprocess.Popen([sys.executable, __file__, "torch", way, root, str(args.steps)])
            for way in WAYS
        }
        for way, worker in workers.items():
            if worker.wait() != 0:
                sys.exit(f"{way} failed")
            curves[way] = json.loads((root / f"{way}.json").read_text())
    curves = {name: [float(f"{loss:.6g}") for loss in losses] for name, losses in curves.items()}
    record = {
        "steps": args.steps, "batch": BATCH, "rate": RATE, "pictures": PICTURES, "network": NETWORK,
        "torch": torch.__version__, "diffusers": diffusers.__version__, "losses": curves,
    }  # fmt: skip
    args.output.write_text(json.dumps(record) + "\n")
    return 0


def compare(losses, window):
    """Means over windows, and how far each curve lies from the mean of the other PyTorch curves."""
    means = {k: np.reshape(v, (-1, window)).mean(1) for k, v in losses.items()}
    distance = {}
    for name in losses:
        others = [means[way] for way in WAYS if way != name]
        distance[name] = np.abs(means[name] - np.mean(others, 0)) / np.mean(others, 0)
    return means, distance


def table(args):
    record = json.loads(args.curves.read_text())
    losses = record["losses"]
    steps = record["steps"]
    means, _ = compare(losses, steps // 8)
    names = ["denoise-train", *WAYS]
    print("| steps | " + " | ".join(name.replace("_", " ") for name in names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for i in range(8):
        row = " | ".join(f"{means[name][i]:.4f}" for name in names)
        print(f"| {i * steps // 8 + 1} to {(i + 1) * steps // 8} | {row} |")
    _, distance = compare(losses, 50)
    rms = {name: float(np.sqrt(np.mean(distance[name] ** 2))) for name in names}
    print("| distance | " + " | ".join(f"{rms[name]:.1e}" for name in names) + " |")
    first = np.abs(np.array(losses["denoise-train"][:10]) / np.array(losses["plain"][:10]) - 1).max()
    print(f"\nFirst ten steps, largest difference from plain: {first:.1e}")
    inside = rms["denoise-train"] <= max(rms[way] for way in WAYS)
    print(f"denoise-train is {'within' if inside else 'OUTSIDE'} the spread of PyTorch's runs")
    return 0 if inside else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    command.add_argument("--train", required=True, help="denoise-train")
    command.add_argument("--data", type=Path, required=True, help="folder with MNIST's files")
    command.add_argument("--steps", type=int, default=2000)
    command.add_argument("--output", type=Path, required=True)
    command = commands.add_parser("table")
    command.add_argument("curves", type=Path)
    command = commands.add_parser("torch")  # what `run` starts
    command.add_argument("way", choices=WAYS)
    command.add_argument("folder", type=Path)
    command.add_argument("steps", type=int)
    args = parser.parse_args()
    return {"run": run, "table": table, "torch": run_torch}[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
