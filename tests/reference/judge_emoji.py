# SPDX-License-Identifier: Apache-2.0
"""Judges models/emoji-64: is a picture the one that was asked for?

usage:
    judge_emoji.py train    --data FOLDER --model models/emoji-64 --judge FILE
    judge_emoji.py evaluate --data FOLDER --model models/emoji-64 --judge FILE [--out figures.json]
    judge_emoji.py captions --data FOLDER --out captions.txt
    judge_emoji.py evaluate ... --drawn bf16=FILE.npy fp8=FILE.npy
FOLDER holds Noto Emoji (emoji.py); --model has at least the tokenizer.

train: a dual encoder of pictures and captions, trained by contrast on all pictures, the held-out ones
too. It takes a minute of GPU.
evaluate: retrieval among 100 captions, of real and of drawn pictures; writes grid.png, seen.png and
held_out.png into --model. Seconds of GPU for each setting, minutes of CPU.
captions: the captions of these pictures, a line each, for precision-errors --prompts.
--drawn: judges pictures that precision-errors saved, image i of caption i, in turn, instead of
drawing any.
"""

import argparse
import json
import math
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPTokenizer

import emoji
from trainer import Trainer

DEFAULT_STEPS, DEFAULT_GUIDANCE = 16, 2.0
TOKENS = 77
RETRIEVAL = 100  # captions to choose among
BATCH = 512


class Judge(nn.Module):
    """Unit vectors of pictures and of captions; the pair that belongs together is closest."""

    def __init__(self, vocabulary, width=256):
        super().__init__()
        channels = (3, 64, 128, 192, 256)
        self.picture = nn.Sequential(
            *(layer for a, b in zip(channels, channels[1:])
              for layer in (nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU(),
                            nn.Conv2d(b, b, 3, stride=2, padding=1), nn.GroupNorm(8, b), nn.SiLU())),
            nn.Flatten(), nn.Linear(256 * 16, width),
        )  # fmt: skip
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(TOKENS, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True,
                                           norm_first=True)  # fmt: skip
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.caption = nn.Linear(width, width)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.end = vocabulary - 1  # ends a caption and pads it

    def see(self, pictures):
        """Pictures in [-1, 1], [n, 3, 64, 64]."""
        return F.normalize(self.picture(pictures).float(), dim=-1)

    def read(self, ids):
        kept = ids != self.end
        x = self.layers(self.tokens(ids) + self.places, src_key_padding_mask=~kept)
        mean = (x * kept[..., None]).sum(1) / kept.sum(1, keepdim=True)
        return F.normalize(self.caption(mean).float(), dim=-1)


def to_unit(images):
    """uint8 [n, 64, 64, 3] to [-1, 1] in [n, 3, 64, 64]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def tokenize(tokenizer, texts):
    ids = tokenizer(texts, padding="max_length", truncation=True, max_length=TOKENS)["input_ids"]
    return torch.tensor(ids, dtype=torch.int16)


class Draw:
    """Indices by given weights; only tensor operations, for a graph."""

    def __init__(self, weights, device):
        cumulative = np.cumsum(weights, dtype=np.float64)
        self.cumulative = torch.tensor(cumulative / cumulative[-1], dtype=torch.float32).to(device)

    def __call__(self, n):
        place = torch.rand(n, device=self.cumulative.device)
        return torch.searchsorted(self.cumulative, place).clamp_max(len(self.cumulative) - 1)


def autocast(device):
    # cache_enabled: a cast of the weights kept from one step would go stale in the next. CPUs are
    # slower in bfloat16 than in float32.
    return torch.autocast(device.type, torch.bfloat16, device.type == "cuda", cache_enabled=False)


def per_name(rows):
    """The weight of each row when the skin tones of a name weigh as much as one picture."""
    tones = {}
    for row in rows:
        tones[row.base] = tones.get(row.base, 0) + row.toned
    return np.array([1 / tones[row.base] if row.toned else 1.0 for row in rows])


def train_judge(args, device):
    images, rows = emoji.load(args.data)
    tokenizer = CLIPTokenizer.from_pretrained(args.model / "tokenizer")
    rng = emoji.random.Random(3)
    rows = [row for row in rows if row.name]
    texts = [emoji.caption(rng, emoji.describe(rng, row)) for row in rows for _ in range(8)]
    tokens = tokenize(tokenizer, texts).view(len(rows), 8, TOKENS).to(device)
    draw = Draw(per_name(rows), device)
    pixels = torch.from_numpy(images[[row.index for row in rows]]).to(device)
    judge = Judge(len(tokenizer)).to(device)

    def loss():
        n = BATCH
        index = draw(n)
        x = to_unit(pixels[index])
        # What drawn pictures differ in from real ones: place, colour, blur, noise.
        moved = F.grid_sample(x, affine_grids(n, device), padding_mode="border", align_corners=False)
        blur = F.avg_pool2d(moved, 3, 1, 1, count_include_pad=False)
        x = torch.lerp(moved, blur, torch.rand(n, 1, 1, 1, device=device))
        x = x * (1 + 0.1 * torch.randn(n, 3, 1, 1, device=device))
        x = x + 0.1 * torch.rand(n, 1, 1, 1, device=device) * torch.randn_like(x)
        ids = tokens[index, torch.randint(8, (n,), device=device)].long()
        with autocast(device):
            seen, read = judge.see(x), judge.read(ids)
        scores = seen @ read.T * judge.log_scale.exp().clamp_max(50)
        # The same row twice in a batch is no wrong answer.
        same = (index[:, None] == index[None]).fill_diagonal_(False)
        scores = scores.masked_fill(same, -1e4)
        target = torch.arange(n, device=device)
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2

    trainer = Trainer(loss, judge.parameters(), ema_decay=0.99)
    trainer.train("judge", args.minutes, learning_rate=5e-4, decay=0.4)
    trainer.load_averages()
    args.judge.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.half().contiguous() for k, v in judge.state_dict().items()}, args.judge)


def affine_grids(n, device):
    """Moves by up to 6 pixels, scales by up to 12 %, mirrors nothing."""
    scale = 1 + 0.12 * (2 * torch.rand(n, device=device) - 1)
    shift = 0.18 * (2 * torch.rand(n, 2, device=device) - 1)
    zero = torch.zeros_like(scale)
    theta = torch.stack([torch.stack([scale, zero, shift[:, 0]], 1),
                         torch.stack([zero, scale, shift[:, 1]], 1)], 1)  # fmt: skip
    return F.affine_grid(theta, (n, 3, emoji.EDGE, emoji.EDGE), align_corners=False)


@torch.no_grad()
def encode(vae, x, batch=256):
    moments = [vae.encode(part).latent_dist for part in x.split(batch)]
    return torch.cat([m.mean for m in moments]), torch.cat([m.logvar for m in moments])


def open_pipeline(folder, device):
    return StableDiffusionPipeline.from_pretrained(
        folder, torch_dtype=torch.float32, safety_checker=None, feature_extractor=None
    ).to(device)  # fmt: skip


def draw_prompts(pipeline, prompts, steps, guidance, batch=100):
    """uint8 [n, 64, 64, 3]; prompt i from the noise of seed i."""
    pipeline.set_progress_bar_config(disable=True)
    drawn = []
    for first in range(0, len(prompts), batch):
        texts = prompts[first : first + batch]
        noise = [torch.Generator().manual_seed(first + i) for i in range(len(texts))]
        drawn.append(pipeline(texts, num_inference_steps=steps, guidance_scale=guidance,
                              height=emoji.EDGE, width=emoji.EDGE, generator=noise,
                              output_type="np").images)  # fmt: skip
    return (np.concatenate(drawn) * 255).round().astype(np.uint8)


@torch.no_grad()
def retrieval(judge, tokenizer, images, captions, device):
    """The fraction of pictures whose own caption is the closest of `captions`."""
    seen = judge.see(to_unit(torch.from_numpy(images).to(device)))
    read = judge.read(tokenize(tokenizer, captions).long().to(device))
    return ((seen @ read.T).argmax(1).cpu() == torch.arange(len(images))).float().mean().item()


@torch.no_grad()
def through(vae, images, device):
    """The pictures as they come back from the VAE: the best that any latent can do."""
    mean, _ = encode(vae, to_unit(torch.from_numpy(images).to(device)))
    y = torch.cat([vae.decode(part).sample for part in mean.split(256)]).clamp(-1, 1)
    return ((y + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def grid(images, columns):
    rows = [np.concatenate(list(images[i : i + columns]), 1) for i in range(0, len(images), columns)]
    return Image.fromarray(np.concatenate(rows, 0))


def retrieval_sets(rows):
    """The pictures whose captions are chosen among, by whether the generator has seen them."""
    seen, unseen = emoji.split(rows)
    return {"seen": emoji.sample_of(seen, RETRIEVAL), "held out": emoji.sample_of(unseen, RETRIEVAL)}


def write_captions(args, device):
    sets = retrieval_sets(emoji.load(args.data)[1])
    args.out.write_text("".join(f"{row.name}\n" for chosen in sets.values() for row in chosen))


def judge_drawn(args, judge, tokenizer, sets, device):
    """The figures of --drawn, over all seeds together."""
    figures = {}
    for name, _, file in (each.partition("=") for each in args.drawn):
        of_all = np.load(file)
        seeds = of_all.reshape(-1, sum(map(len, sets.values())), *of_all.shape[1:])
        figures[name], first = {"pictures of a caption": len(seeds)}, 0
        for part, chosen in sets.items():
            names = [row.name for row in chosen]
            scores = [retrieval(judge, tokenizer, seed[first : first + len(names)], names, device)
                      for seed in seeds]  # fmt: skip
            figures[name][part] = sum(scores) / len(scores)
            first += len(names)
    return figures


def evaluate(args, device):
    images, rows = emoji.load(args.data)
    tokenizer = CLIPTokenizer.from_pretrained(args.model / "tokenizer")
    judge = Judge(len(tokenizer))
    judge.load_state_dict({k: v.float() for k, v in load_file(args.judge).items()})
    judge = judge.to(device).eval()
    sets = retrieval_sets(rows)
    if args.drawn:
        text = json.dumps(judge_drawn(args, judge, tokenizer, sets, device), indent=2)
        if args.out:
            args.out.write_text(text + "\n")
        return print(text)
    pipeline = open_pipeline(args.model, device)
    figures = {"captions": RETRIEVAL, "real": {}, "decoded": {}, "drawn": []}
    for name, chosen in sets.items():
        real = images[[row.index for row in chosen]]
        names = [row.name for row in chosen]
        figures["real"][name] = retrieval(judge, tokenizer, real, names, device)
        decoded = through(pipeline.vae, real, device)
        figures["decoded"][name] = retrieval(judge, tokenizer, decoded, names, device)
    for steps in args.steps:
        for guidance in args.guidance:
            line = {"steps": steps, "guidance": guidance}
            for name, chosen in sets.items():
                names = [row.name for row in chosen]
                drawn = draw_prompts(pipeline, names, steps, guidance)
                line[name] = retrieval(judge, tokenizer, drawn, names, device)
                if (steps, guidance) == (DEFAULT_STEPS, DEFAULT_GUIDANCE):
                    grid(drawn, 10).save(args.model / f"{name.replace(' ', '_')}.png")
            print(json.dumps(line), flush=True)
            figures["drawn"].append(line)
    prompts = emoji.SEEN_PROMPTS + emoji.COMPOSED_PROMPTS
    drawn = draw_prompts(pipeline, [p for p in prompts for _ in range(2)],
                         DEFAULT_STEPS, DEFAULT_GUIDANCE)  # fmt: skip
    grid(drawn, 8).save(args.model / "grid.png")
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps({"real": figures["real"], "decoded": figures["decoded"]}))


def numbers(kind):
    return lambda text: [kind(part) for part in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=["train", "evaluate", "captions"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("models/emoji-64"), help="the pipeline directory")
    parser.add_argument("--judge", type=Path, default=Path("out/emoji_judge.safetensors"))
    parser.add_argument("--minutes", type=float, default=0.8, help="of training steps")
    parser.add_argument("--steps", type=numbers(int), default=[DEFAULT_STEPS])
    parser.add_argument("--guidance", type=numbers(float), default=[DEFAULT_GUIDANCE, 3.0])
    parser.add_argument("--drawn", nargs="+", default=[], metavar="NAME=FILE.npy")
    parser.add_argument("--out", type=Path, help="a file for the figures or captions")
    args = parser.parse_args()
    if args.stage == "captions" and not args.out:
        parser.error("captions needs --out")
    warnings.filterwarnings("ignore", category=FutureWarning)

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.time()
    stages = {"train": train_judge, "evaluate": evaluate, "captions": write_captions}
    stages[args.stage](args, device)
    print(json.dumps({"stage": args.stage, "whole_seconds": round(time.time() - start, 1)}))


if __name__ == "__main__":
    main()
