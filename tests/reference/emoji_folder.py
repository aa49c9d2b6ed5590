#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what models/emoji-64 is trained on as a folder that denoise-train reads.

usage: emoji_folder.py --data FOLDER --output PICTURES [--pairs N] [--limit N]
FOLDER holds Noto Emoji (emoji.py). PICTURES gets a PNG of each variant (plain, mirrored, small,
recoloured with the colour's name in the captions, pairs) and metadata.jsonl with its captions and
weight. Held-out names are in no variant. Needs NumPy and Pillow.
"""

import argparse
import json
from pathlib import Path

from PIL import Image

import emoji

CLIP = Path(__file__).parent.parent / "text" / "clip"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="also write the captions' CLIPTokenizer here")
    parser.add_argument("--pairs", type=int, default=8000, help="pictures of two things")
    parser.add_argument("--limit", type=int, help="at most about this many names, to try it")
    args = parser.parse_args()
    images, rows = emoji.load(args.data)
    args.output.mkdir(parents=True, exist_ok=True)
    fillers = emoji.write_tokenizer(args.tokenizer or args.output / "tokenizer", CLIP, rows)
    made = emoji.make_variants(images, rows, fillers, args.pairs, limit=args.limit)
    with (args.output / "metadata.jsonl").open("w", encoding="utf-8") as metadata:
        for i, (image, texts, weight) in enumerate(zip(made.images, made.captions, made.weights)):
            name = f"{i:06}.png"
            Image.fromarray(image).save(args.output / name)
            line = {"file_name": name, "text": texts, "weight": float(weight)}
            metadata.write(json.dumps(line, ensure_ascii=False) + "\n")
    print(f"{len(made.images)} pictures in {args.output}")


if __name__ == "__main__":
    main()
