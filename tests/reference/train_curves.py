#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loss curves of denoise-train beside PyTorch's on a CPU, with the same pictures, order, noise levels, noise
and initial weights. PyTorch runs once in float64, which is the reference, and several times in float32, in
ways that differ in rounding alone, and so does denoise-train, with several numbers of chunks. It must not lie
further from float64 than PyTorch does.

    train_curves.py run --train build/release/trainer/denoise-train --data MNIST curves.json
    train_curves.py figure curves.json curves.svg

`run` adds the runs that the file does not have in whole yet; --again names those to repeat. The table is
tests/bench/make_tables.py's.
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
# PyTorch's runs: keyword arguments of train_torch().
WAYS = {
    "float64": {"double": True},
    "oneDNN": {},
    "channels last": {"channels_last": True},
    "batch reversed": {"backwards": True},
    "native kernels": {"mkldnn": False},
    "two threads": {"threads": 2},
    "pieces of 1": {"piece": 1},
    "pieces of 2": {"piece": 2},
    "pieces of 4": {"piece": 4},
    "fused AdamW": {"fused": True},
    "Inductor": {"compiled": True},
}
# denoise-train's runs: --chunks, of which the order of sums depends.
OURS = {"denoise-train": 8, "denoise-train, 4 chunks": 4, "denoise-train, 2 chunks": 2,
        "denoise-train, 1 chunk": 1}  # fmt: skip


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
    """NormalOfBits(): Box-Muller in float32, whose functions round correctly in nearly all cases. NumPy's
    of float32 do not."""

    def rounded(function, x):
        return function(x.astype(np.float64)).astype(np.float32)

    pair = (words >> np.uint64(8)).astype(np.float32).reshape(*words.shape[:-1], 2, 2)
    radius = np.sqrt(np.float32(-2) * rounded(np.log, (pair[..., 0] + 1) * np.float32(2**-24)))
    angle = pair[..., 1] * (np.float32(2 * np.pi) * np.float32(2**-24))
    normal = [radius * rounded(np.cos, angle), radius * rounded(np.sin, angle)]
    return np.stack(normal, -1).reshape(words.shape)


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


def digits(folder, size):
    """MNIST's first digits, 28×28 with a border → size×size by means of neighbours, and their classes."""
    images = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes())
    images = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28)[:PICTURES]
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    images = images.reshape(PICTURES, size, 32 // size, size, 32 // size).mean((2, 4))
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


def double_time(half):
    """diffusers' Timesteps in float64; it computes in float32 in any model."""
    import torch

    class Time(torch.nn.Module):
        def forward(self, t):
            rates = torch.exp(-np.log(10000.0) * torch.arange(half, dtype=torch.float64) / half)
            angle = t[:, None] * rates
            return torch.cat([torch.cos(angle), torch.sin(angle)], -1)

    return Time()


def train_torch(init, images, labels, steps, double=False, channels_last=False, backwards=False,
                mkldnn=True, threads=1, piece=BATCH, fused=False, compiled=False):  # fmt: skip
    import torch
    from diffusers import UNet2DModel

    torch.set_num_threads(threads)
    model = UNet2DModel.from_pretrained(init / "unet").train()
    if double:
        model = model.double()
        model.time_proj = double_time(model.config.block_out_channels[0] // 2)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=fused)
    forward = torch.compile(model) if compiled else model
    losses = []
    with torch.backends.mkldnn.flags(enabled=mkldnn):
        for batch in batches(images, labels, steps):
            parts = [
                torch.from_numpy(np.ascontiguousarray(part[::-1] if backwards else part))
                for part in batch
            ]
            if double:
                parts[:3] = [part.double() for part in parts[:3]]
            optimizer.zero_grad()
            losses.append(0.0)
            for x, target, condition, label in zip(
                *(part.split(piece) for part in parts), strict=True
            ):
                output = forward(x.permute(0, 3, 1, 2), condition, class_labels=label).sample
                loss = ((output - target.permute(0, 3, 1, 2)) ** 2).mean() * (piece / BATCH)
                loss.backward()
                losses[-1] += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return losses


def train_ours(program, init, root, steps, chunks):
    subprocess.run(
        [program, f"--data={root}/images.npy", f"--labels={root}/labels.npy", f"--init-from={init}",
         f"--output={root}/run-{chunks}", f"--chunks={chunks}", f"--batch={BATCH}", f"--steps={steps}", f"--learning-rate={RATE}",
         f"--seed={SEED}", "--log-steps=1", f"--checkpoint-steps={steps}"],
        check=True, stderr=subprocess.DEVNULL)  # fmt: skip
    return [json.loads(line)["loss"] for line in (root / f"run-{chunks}/log.jsonl").read_text().splitlines()]


def run_torch(args):
    images, labels = np.load(args.folder / "images.npy"), np.load(args.folder / "labels.npy")
    losses = train_torch(args.folder / "init", images, labels, args.steps, **WAYS[args.way])
    (args.folder / "losses.json").write_text(json.dumps(losses))


def run(args):
    import diffusers
    import torch

    network = json.loads(args.network.read_text()) if args.network else NETWORK
    record = {"steps": args.steps, "batch": BATCH, "rate": RATE, "pictures": PICTURES, "network": network,
              "torch": torch.__version__, "diffusers": diffusers.__version__}  # fmt: skip
    losses = {}
    if args.curves.exists():
        losses = json.loads(args.curves.read_text())
        before = losses.pop("losses")
        if losses != record:
            sys.exit(f"{args.curves} has runs with other settings or versions")
        losses = {name: curve for name, curve in before.items() if name not in args.again}
    images, labels = digits(args.data, network["sample_size"])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        np.save(root / "images.npy", images)
        np.save(root / "labels.npy", labels)
        torch.manual_seed(1)
        model = diffusers.UNet2DModel.from_config(network)
        model.save_pretrained(root / "init/unet")
        for name in (*OURS, *WAYS):
            if len(losses.get(name, [])) == args.steps:
                continue
            if name in OURS:
                curve = train_ours(args.train, root / "init", root, args.steps, OURS[name])
            else:  # in a process of its own
                subprocess.run([sys.executable, __file__, "torch", name, root, str(args.steps)], check=True)
                curve = json.loads((root / "losses.json").read_text())
            losses[name] = [float(f"{loss:.9g}") for loss in curve]
            args.curves.write_text(json.dumps(record | {"losses": losses}) + "\n")
            print(f"{name}: {distance(losses, name):.2e} from float64" if "float64" in losses else name)


def differences(losses, name):
    """Of each step's loss from float64's, relative."""
    return np.array(losses[name]) / np.array(losses["float64"]) - 1


def distance(losses, name):
    return float(np.sqrt(np.mean(differences(losses, name) ** 2)))


def figure(args):
    """Two panels: the losses, and their distances from float64, over windows of steps."""
    record = json.loads(args.curves.read_text())
    losses, steps = record["losses"], record["steps"]
    window = max(1, steps // 40)
    width, height, left, right = 760, 250, 64, 744
    losses = {name: curve for name, curve in losses.items() if len(curve) == steps}
    names = [name for name in losses if name in WAYS and name != "float64"]
    ours = [name for name in losses if name in OURS]

    def windows(values):
        return np.reshape(values[: len(values) // window * window], (-1, window))

    def panel(top, title, curves, low, high):
        """`curves`: (style, values), on a logarithmic axis from low to high."""
        y = lambda value: top + height - height * np.log(value / low) / np.log(high / low)
        x = lambda step: left + (right - left) * step / steps
        lines = [f'<text x="{left}" y="{top - 8}">{title}</text>']
        for power in range(-9, 2):
            for factor in (1, 2, 5):
                tick = factor * 10.0**power
                if not low <= tick <= high or (high / low > 100 and factor != 1):
                    continue
                lines.append(f'<path class="grid" d="M{left} {y(tick):.1f}H{right}"/>')
                lines.append(f'<text class="y" x="{left - 6}" y="{y(tick) + 4:.1f}">{tick:g}</text>')
        for style, values in curves:
            points = " ".join(f"{x((i + 0.5) * window):.1f},{y(max(v, low)):.1f}" for i, v in enumerate(values))
            lines.append(f'<polyline class="{style}" points="{points}"/>')
        for i in range(5):
            lines.append(f'<text class="x" x="{x(i * steps / 4):.1f}" y="{top + height + 18}">'
                         f"{i * steps // 4}</text>")  # fmt: skip
        return lines

    styles = [("torch", name) for name in names] + [("ours", name) for name in ours]  # ours on top
    means = [(style, windows(losses[name]).mean(1)) for style, name in styles]
    apart = [(style, np.sqrt((windows(differences(losses, name)) ** 2).mean(1))) for style, name in styles]

    def bounds(curves):
        values = np.concatenate([values for _, values in curves])
        return values[values > 0].min() / 1.2, values.max() * 1.2

    top = 50
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 680">',
        "<style>text{font:13px sans-serif;fill:#222}.y{text-anchor:end}.x{text-anchor:middle}"
        "polyline{fill:none;stroke-width:1.2}.torch{stroke:#888}.ours{stroke:#d33;stroke-width:2}"
        ".grid{stroke:#ddd}</style>",
        f'<rect width="{width}" height="680" fill="#fff"/>',
        '<path class="ours" d="M64 16h24"/><text x="94" y="20">denoise-train, '
        f"{len(ours)} numbers of chunks</text>",
        f'<path class="torch" d="M334 16h24"/><text x="364" y="20">PyTorch in float32, '
        f"{len(names)} runs that differ in rounding</text>",
        *panel(top, f"Loss, means of {window} steps", means, *bounds(means)),
        *panel(top + 330, f"Relative distance of the loss from PyTorch in float64, RMS of {window} steps",
               apart, *bounds(apart)),
        f'<text class="x" x="{(left + right) / 2}" y="668">step</text>',
        "</svg>",
    ]  # fmt: skip
    args.svg.write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run")
    command.add_argument("--train", required=True, help="denoise-train")
    command.add_argument("--data", type=Path, required=True, help="folder with MNIST's files")
    command.add_argument("--network", type=Path, help="config.json. Default: a tiny one")
    command.add_argument("--steps", type=int, default=2000)
    command.add_argument("--again", action="append", default=[], choices=(*OURS, *WAYS))
    command.add_argument("curves", type=Path)
    command.set_defaults(call=run)
    command = commands.add_parser("figure")
    command.add_argument("curves", type=Path)
    command.add_argument("svg", type=Path)
    command.set_defaults(call=figure)
    command = commands.add_parser("torch")  # what `run` starts
    command.add_argument("way", choices=WAYS)
    command.add_argument("folder", type=Path)
    command.add_argument("steps", type=int)
    command.set_defaults(call=run_torch)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
