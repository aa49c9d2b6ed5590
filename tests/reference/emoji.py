# SPDX-License-Identifier: Apache-2.0
"""Noto Emoji as training data: pictures, captions, a tokenizer for them, and variants of both.

FOLDER holds noto_rgb64_nhwc_u8.bin.xz (uint8 [3583, 64, 64, 3] on white) and captions.tsv: index,
file, name, group, subgroup, keywords separated by a bar, 1 for a skin tone. Everything is
deterministic: the same folder gives the same split, variants and captions.
"""

import json
import lzma
import random
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

EDGE = 64
HELD_OUT_PERCENT = 8  # of the names; the generator never sees their pictures
# Held out by name besides: the generator knows each word from other pictures.
HELD_OUT_NAMES = {"green heart", "purple circle", "blue book", "black cat", "red apple",
                  "smiling cat with heart-eyes"}  # fmt: skip
# Colours that a thing is never drawn in for training, so that the card can ask for them.
LEFT_OUT_COLOURS = {("green", "heart"), ("blue", "apple"), ("purple", "cat"), ("pink", "car"),
                    ("red", "banana"), ("blue", "rose"), ("green", "pig"),
                    ("orange", "fish")}  # fmt: skip
SEEN_PROMPTS = ["cat face", "pizza", "rocket", "sunflower", "octopus", "red heart",
                "grinning face", "house with garden"]  # fmt: skip
COMPOSED_PROMPTS = ["green heart", "blue apple", "purple cat", "cat with sunglasses",
                    "pizza and banana", "pink car", "dog and rocket", "red banana"]  # fmt: skip
HUES = {"red": 0, "orange": 28, "yellow": 52, "green": 125, "turquoise": 180, "blue": 218,
        "purple": 275, "pink": 330}  # fmt: skip
COLOURS = [*HUES, "grey"]
FILLERS = 600  # common words that are in no caption: noise, so that they come to mean nothing
FILLER_RANK = 4000  # they are among the first merges of CLIP

TONE = re.compile(r",? ?(medium-light|medium-dark|light|medium|dark) skin tone,?")
# A mirror image of these is wrong: sides, writing, clocks, maps.
SIDED = re.compile(
    r"left|right|arrow|clock|thirty|button|keycap|map|globe|moon|music|letter|input|sign|mark|"
    r"number|calendar|card|ticket|newspaper|chart|flag|japanese|sos|abc|atm|exclamation|question")  # fmt: skip


@dataclass
class Row:
    index: int
    name: str  # lower case; "" where the table has none
    group: str
    subgroup: str
    keywords: list
    toned: bool

    @property
    def base(self):
        """The name without skin tones: variants share it."""
        return TONE.sub("", self.name).rstrip(" :,")

    @property
    def mirrors(self):
        return self.group != "Symbols" and not SIDED.search(" ".join([self.name, *self.keywords]))

    @property
    def recolours(self):
        return not self.toned and self.group not in ("People & Body", "Flags", "")


def load(folder: Path):
    """Pictures, uint8 [n, 64, 64, 3], and their rows."""
    pixels = lzma.decompress((folder / "noto_rgb64_nhwc_u8.bin.xz").read_bytes())
    images = np.frombuffer(pixels, np.uint8).reshape(-1, EDGE, EDGE, 3)
    rows = []
    for line in (folder / "captions.tsv").read_text(encoding="utf-8").splitlines():
        index, _, name, group, subgroup, keywords, toned = line.split("\t")
        name = " ".join(name.lower().replace("“", "").replace("”", "").split())
        words = [k.lower() for k in keywords.split("|") if k and k.lower() != name]
        rows.append(Row(int(index), name, group, subgroup, words, toned == "1"))
    if len(rows) != len(images):
        raise SystemExit(f"{folder}: {len(rows)} captions for {len(images)} pictures")
    return images, rows


def held_out(row: Row):
    """A name is held out with all its skin tones."""
    return row.base in HELD_OUT_NAMES or zlib.crc32(row.base.encode()) % 100 < HELD_OUT_PERCENT


def split(rows):
    """Named rows: those to train on and those held out."""
    named = [row for row in rows if row.name]
    return [r for r in named if not held_out(r)], [r for r in named if held_out(r)]


def sample_of(rows, count):
    """`count` rows without skin tones, of different names, spread over the table."""
    rows = list({row.name: row for row in rows if not row.toned}.values())
    return sorted(random.Random(0).sample(rows, min(count, len(rows))), key=lambda row: row.index)


# --- Captions --------------------------------------------------------------------------------

TEMPLATES = ["{}", "{}", "{}", "{}", "a {}", "the {}", "an emoji of a {}", "a picture of a {}",
             "{} emoji", "{} icon", "a drawing of a {}"]  # fmt: skip

ARTICLE = re.compile(r"\b(a|the) (?=a )")  # before another one


def describe(rng, row: Row):
    """What to call a picture: its name mostly, or keywords."""
    choice = rng.random()
    words = rng.sample(row.keywords, min(len(row.keywords), rng.randint(1, 4)))
    if choice < 0.72 or not words:
        name = row.name if rng.random() < 0.9 else row.base
        parts = name.split()
        if len(parts) > 2 and rng.random() < 0.1:
            del parts[rng.randrange(len(parts))]
        return " ".join(parts)
    if choice < 0.84:
        return rng.choice([", ", " "]).join(words)
    if choice < 0.95 or not row.subgroup:
        return ", ".join([row.name, *words])
    return f"{row.subgroup.replace('-', ' ')}, {row.name}"


def caption(rng, text, fillers=()):
    text = ARTICLE.sub("", rng.choice(TEMPLATES).format(text))
    text = re.sub(r"\ba (?=[aeiou])", "an ", text)
    if fillers and rng.random() < 0.06:
        parts = text.split()
        parts.insert(rng.randint(0, len(parts)), rng.choice(fillers))
        text = " ".join(parts)
    return text


def pair_caption(rng, layout, a, b):
    forms = {
        "beside": ["{} and {}", "{} next to {}", "a {} and a {}", "{} on the left, {} on the right"],
        "above": ["{} above {}", "{} on top of {}", "{} and {}"],
        "corner": ["{} with {}", "{} with a {}", "a {} with {}"],
    }
    return rng.choice(forms[layout]).format(a, b)


# --- Pictures --------------------------------------------------------------------------------


def hsv(image):
    """uint8 [64, 64, 3] as hue in degrees, saturation, value."""
    x = image.astype(np.float32) / 255
    high, low = x.max(-1), x.min(-1)
    span = np.where(high > low, high - low, 1)
    r, g, b = x[..., 0], x[..., 1], x[..., 2]
    hue = np.where(high == r, (g - b) / span, np.where(high == g, 2 + (b - r) / span,
                                                       4 + (r - g) / span))  # fmt: skip
    return (60 * hue) % 360, np.where(high > 0, (high - low) / np.maximum(high, 1e-6), 0), high


def main_hue(image):
    """The hue that most of the coloured pixels have, or None."""
    hue, saturation, value = hsv(image)
    weight = np.where((saturation > 0.25) & (value > 0.2), saturation, 0)
    if (weight > 0).mean() < 0.08:
        return None
    histogram = np.bincount((hue // 10).astype(int).ravel() % 36, weight.ravel(), 36)
    around = histogram + np.roll(histogram, 1) + np.roll(histogram, -1) + \
        np.roll(histogram, 2) + np.roll(histogram, -2)  # fmt: skip
    best = int(around.argmax())
    return best * 10 + 5.0 if around[best] > 0.75 * histogram.sum() else None


def colour_name(hue):
    return min(HUES, key=lambda name: abs((hue - HUES[name] + 180) % 360 - 180))


def recolour(image, hue, colour):
    """The picture with its main hue turned to `colour`, or without colours."""
    h, s, v = hsv(image)
    if colour == "grey":
        grey = image.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
        return np.repeat(grey.round().astype(np.uint8)[..., None], 3, -1)
    h = (h + HUES[colour] - hue) % 360 / 60
    i, f = np.floor(h).astype(int) % 6, h - np.floor(h)
    p, q, t = v * (1 - s), v * (1 - s * f), v * (1 - s * (1 - f))
    r = np.choose(i, [v, q, p, p, t, v])
    g = np.choose(i, [t, v, v, q, p, p])
    b = np.choose(i, [p, p, t, v, v, q])
    return (np.stack([r, g, b], -1) * 255).round().astype(np.uint8)


def half(image):
    return image.reshape(32, 2, 32, 2, 3).mean((1, 3)).round().astype(np.uint8)


def small(image):
    out = np.full_like(image, 255)
    out[16:48, 16:48] = half(image)
    return out


def pair(layout, a, b):
    out = np.full_like(a, 255)
    if layout == "beside":
        out[16:48, :32], out[16:48, 32:] = half(a), half(b)
    elif layout == "above":
        out[:32, 16:48], out[32:, 16:48] = half(a), half(b)
    else:  # b in the corner, on top of a
        out[:] = a
        corner, over = out[32:, 32:], half(b)
        corner[:] = np.where((over < 250).any(-1, keepdims=True), over, corner)
    return out


@dataclass
class Variants:
    images: np.ndarray  # uint8 [n, 64, 64, 3]
    captions: list  # n lists of as many texts
    weights: np.ndarray  # how often each is drawn; sums to 1


def colour_allowed(colour, name, names_held_out):
    words = name.split()
    return f"{colour} {name}" not in names_held_out and \
        not any((colour, word) in LEFT_OUT_COLOURS for word in words)  # fmt: skip


def make_variants(images, rows, fillers, pairs=8000, captions=12, limit=None):
    """What the generator trains on, made of the rows that it may see."""
    rng = random.Random(1)
    seen, unseen = split(rows)
    if limit:
        seen = seen[:: max(1, len(seen) // limit)]
    forbidden = {row.name for row in unseen}
    # The skin tones of a name weigh as much as one picture together.
    tones = {}
    for row in seen:
        if row.toned:
            tones[row.base] = tones.get(row.base, 0) + 1
    made = []  # picture, captions, weight, kind

    def add(kind, image, weight, text):
        made.append((image, [caption(rng, text(), fillers) for _ in range(captions)], weight, kind))

    for row in seen:
        weight = 1 / tones[row.base] if row.toned else 1
        image, hue = images[row.index], None
        if row.recolours:
            hue = main_hue(image)
        has_colour = any(c in row.name.split() for c in [*COLOURS, "black", "white", "brown"])

        def text(row=row, hue=hue, has_colour=has_colour):
            said = describe(rng, row)
            if hue is not None and not has_colour and rng.random() < 0.15:
                said = f"{colour_name(hue)} {said}"
            return said

        mirrored = row.mirrors
        add("plain", image, weight / (1 + mirrored), text)
        if mirrored:
            add("plain", image[:, ::-1], weight / 2, text)
        if not row.toned:
            add("small", small(image), 1, lambda row=row: f"{rng.choice(['small', 'tiny'])} {row.name}")
        if hue is None:
            continue
        noun = " ".join(w for w in row.name.split() if w not in COLOURS)
        for colour in COLOURS:
            if noun and colour != colour_name(hue) and colour_allowed(colour, noun, forbidden):
                add("colour", recolour(image, hue, colour), 1,
                    lambda colour=colour, noun=noun: f"{colour} {noun}")  # fmt: skip
    plain = [row for row in seen if not row.toned and len(row.name) < 32]
    for _ in range(pairs):
        a, b = rng.sample(plain, 2)
        layout = rng.choice(["beside", "beside", "above", "corner"])
        add("pair", pair(layout, images[a.index], images[b.index]), 1,
            lambda a=a, b=b, layout=layout: pair_caption(rng, layout, a.name, b.name))  # fmt: skip
    share = {"plain": 0.68, "colour": 0.14, "small": 0.04, "pair": 0.14}
    sums = {kind: sum(m[2] for m in made if m[3] == kind) for kind in share}
    weights = np.array([share[kind] * weight / sums[kind] for _, _, weight, kind in made])
    return Variants(np.stack([m[0] for m in made]), [m[1] for m in made], weights / weights.sum())


# --- Tokenizer -------------------------------------------------------------------------------


def words_of(texts):
    """The pieces that CLIP splits a text into before it merges."""
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d|[^\W\d_]+|\d|[^\s\w]+|_+"
    return {word for text in texts for word in re.findall(pattern, text.lower())}


def byte_names():
    """CLIP's (GPT-2's) character for each byte."""
    names = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in names}
    table.update({b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in table)})
    return table


def write_tokenizer(folder: Path, clip: Path, rows):
    """A genuine CLIPTokenizer directory whose merges are those of CLIP that the captions need, and
    those of common words. Returns the fillers: common words that no caption has.

    Kept merges keep their order, so a word whose merges are all kept has CLIP's own tokens: at every
    step the merge that CLIP would do is there, and none that goes before it is new.
    """
    vocabulary = json.loads((clip / "vocab.json").read_text(encoding="utf-8"))
    merges = [tuple(line.split(" "))
              for line in (clip / "merges.txt").read_text(encoding="utf-8").split("\n")[1:]
              if line.count(" ") == 1]  # fmt: skip
    rank = {merge: i for i, merge in enumerate(merges)}
    rng = random.Random(2)
    texts = [" ".join([r.name, r.subgroup.replace("-", " "), *r.keywords]) for r in rows]
    texts += [t.format("") for t in TEMPLATES] + ["small tiny", *COLOURS]
    texts += [pair_caption(rng, k, "", "") for k in ("beside", "above", "corner") for _ in range(50)]
    words = words_of(texts)
    common = ["".join(m)[:-4] for m in merges[:FILLER_RANK] if m[1].endswith("</w>")]
    names, needed, pieces = byte_names(), set(), set()

    def split_word(word):
        parts = [names[b] for b in word.encode()]
        parts[-1] += "</w>"
        while len(parts) > 1:
            best = min(range(len(parts) - 1),
                       key=lambda i: rank.get((parts[i], parts[i + 1]), len(rank)))  # fmt: skip
            merge = (parts[best], parts[best + 1])
            if merge not in rank:
                break
            needed.add(merge)
            parts[best : best + 2] = ["".join(merge)]
        pieces.update(parts)

    for word in words:
        split_word(word)
    # No filler is a piece of a word that means something.
    fillers = [w for w in common if w.isascii() and w.isalpha() and len(w) > 2
               and w + "</w>" not in pieces][:FILLERS]  # fmt: skip
    for word in fillers:
        split_word(word)
    kept = sorted(needed, key=rank.get)
    tokens = sorted(vocabulary, key=vocabulary.get)[:512] + ["".join(m) for m in kept]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    table = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(table, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "merges.txt").write_text(
        "\n".join(["#version: 0.2", *(" ".join(m) for m in kept)]) + "\n", encoding="utf-8")  # fmt: skip
    special = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>",
               "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}  # fmt: skip
    config = {"add_prefix_space": False, "do_lower_case": True, "errors": "replace",
              "model_max_length": 77, "tokenizer_class": "CLIPTokenizer", **special}  # fmt: skip
    for file, value in (("special_tokens_map.json", special), ("tokenizer_config.json", config)):
        (folder / file).write_text(json.dumps(value, indent=2) + "\n")
    return fillers
