#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of docs/benchmarks.md from the raw figures in docs/benchmarks/*.json.

usage: make_tables.py [--check] [--page=docs/benchmarks.md] [--data=docs/benchmarks]

A table stands between <!-- table: NAME --> and <!-- end -->. --check changes nothing and fails, with
the difference, if the page is not what the figures make of it. Whether a row reaches its bar is
decided by unrounded ratios of the peer's time over denoised's, for the peer that is the fastest: the
median over the rounds, and four in five rounds. Device, commit, date and versions come from the figures too.

Beside its commit stands which folders of what was measured have changed since, by git, when the page
was written. --check leaves that out: each commit may change them.

Several runs may share a table: models.json, models-2.json, models-3.json. Each row is then taken from
the newest of the runs that say most of it: that measured most peers, and searched for the fastest.
"""
import argparse
import difflib
import functools
import json
import math
import re
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

MODEL_BARS = {"cifar10-32/rows:1": 2.5, "cifar10-32/rows:16": 2.0, "cifar10-32/rows:64": 1.8,
              "cifar10-32/rows:256": 1.7, "adm-64/rows:1": 2.0, "adm-64/rows:64": 1.5,
              "celebahq-256/rows:16": 1.75}
LATENT_BARS = {"sd15-unet/rows:2": 1.6, "sd15-unet/rows:16": 1.3, "sdxl-unet/rows:2": 1.3,
               "sdxl-unet/rows:16": 1.2, "sdxl-vae@64/rows:1": 1.5, "sdxl-vae@64/rows:8": 1.5,
               "sdxl-vae@128/rows:1": 1.5}
TRAIN_BARS = {"cifar10-32/batch:128": 1.5, "adm-64/batch:32": 1.4, "mnist-32/batch:512": 1.6}
TRAIN_MEMORY_BAR = 0.8  # of PyTorch's
FIRST_STEP_BARS = {"adm-64/batch:32": 10}  # seconds
CPU_TRAIN_BAR = 1.0
CONV_BAR, FUSED_BAR, LINEAR_BAR, ATTENTION_BAR = 1.0, 1.3, 0.95, 1.0
NORM_BAR, LAST_LEVEL_CACHE = 0.85, 60 << 20  # of a copy, for images larger than the H200's L2
OP_BARS = {"conv": CONV_BAR, "conv_bias_residual_silu": FUSED_BAR, "linear": LINEAR_BAR,
           "attention": ATTENTION_BAR}
PORTABLE_BAR = 0.55
FP8_BARS = {"cifar10-32/rows:256": 4.4, "adm-64/rows:64": 16.5, "celebahq-256/rows:16": 10.8}  # ms
FP8_CONV_BAR = 1100  # TFLOP/s
CPU_BUSY_BAR, CPU_BF16_BAR = 2.4, 1.4
START_BARS = {"cifar10-32": 3, "adm-64": 6}  # seconds, the first start
WEIGHTS_BAR = 5  # GB/s
LOOP_BARS = {"cifar10-32/rows:1": 0.10, "cifar10-32/rows:64": 0.03}
EXPECTED_OPS = {topic: (Path(__file__).parent / name).read_text().split()
                for topic, name in (("ops", "ops.txt"), ("train-ops", "train_ops.txt"),
                                    ("fp8-ops", "fp8_ops.txt"))}
GRADIENT_BAR, NORM_GRADIENT_BAR = 1.0, 0.75  # of cuDNN and SDPA; of a copy of as many bytes
DIGITS_BAR = 1.0
HEAP_BAR = 2  # bytes an image: less than one smallest allocation in 16 images
HTTP_BAR = 0.3e-3  # seconds
EVENT_BAR = 20  # bytes of heap
# Of whole pipelines: what, reach and aim in images per second.
PIPELINE_BARS = {
    "sd15": ("SD 1.5, 512², 20 guided steps, full queue", 15, 17),
    "sd15-fp8": ("the same with --precision fp8", 20, 25),
    "sdxl": ("SDXL, 1024², 20 guided steps, full queue", 1.95, 2.2),
    "sdxl-fp8": ("the same with --precision fp8", 2.7, 3),
    "sdxl-lcm": ("SDXL LCM, 1024², 4 steps, full queue", 13, 16),
    "sd-turbo": ("SD-Turbo, 512², 1 step, full queue", 130, 170),
    "sd-turbo-tiny": ("the same with an AutoencoderTiny", 300, 400)}
# torch.compile's parts of an image: how often the UNet and the decoder, and their rows in latent.json.
PIPELINE_PARTS = {"sd15": ((40, "sd15-unet/rows:16"), (1, "sdxl-vae@64/rows:8")),
                  "sdxl": ((40, "sdxl-unet/rows:16"), (1, "sdxl-vae@128/rows:1")),
                  "sdxl-lcm": ((4, "sdxl-unet/rows:16"), (1, "sdxl-vae@128/rows:1"))}
PIPELINE_PARTS["sd15-fp8"] = PIPELINE_PARTS["sd15"]
# Images per second, whose, and whether on such a GPU. docs/benchmarks.md names the sources.
PUBLISHED = {"sdxl": (2.37, "published, MLPerf, FP8", True),
             "sdxl-fp8": (2.37, "published, MLPerf, FP8", True),
             "sdxl-lcm": (10.79, "published, MLPerf's open division", True),
             "sd-turbo": (106, "published, StreamDiffusion, RTX 4090", False),
             "sd-turbo-tiny": (106, "published, StreamDiffusion, RTX 4090", False)}
# Of latent-errors: what, by row.
ERROR_ROWS = {
    "sd15-text": "SD 1.5, text encoder, four prompts", "sd15-unet": "SD 1.5, UNet, two rows of 64×64",
    "sd15-images": "SD 1.5, four images of 512×512, 20 guided steps",
    "sd21-text": "SD 2.1, text encoder, four prompts", "sd21-unet": "SD 2.1, UNet, two rows of 96×96",
    "sd21-images": "SD 2.1, four images of 768×768, 20 guided steps",
    "sdxl-text": "SDXL, first text encoder, four prompts",
    "sdxl-text_2": "SDXL, second text encoder, four prompts",
    "sdxl-unet": "SDXL, UNet, two rows of 128×128", "sdxl-vae": "SDXL, decoder, latents of 64×64",
    "sdxl-vae_large": "SDXL, decoder, latents of 128×128",
    "sdxl-vae_two": "SDXL, decoder, two images, latents of 64×64",
    "sdxl-vae_encode": "SDXL, encoder, an image of 512×512",
    "sdxl-images": "SDXL, two images of 1024×1024, 20 guided steps",
    "sdxl-lcm-unet": "SDXL LCM, UNet, two rows of 128×128",
    "sd-turbo-images": "SD-Turbo, four images of 512×512, one step",
    "taesd-vae": "AutoencoderTiny (taesd), decoder, latents of 64×64"}
ERROR_BAR = 1.0  # of diffusers' error
MIXED_BAR, MIXED_AIM = 0.85, 0.95  # of a uniform queue's rows, and pixels, per second
FIRST_PREVIEW_BAR = 3  # evaluations
REQUEST_BAR, REQUEST_AIM = 1.6, 1.8
SD_CPP_BAR, SD_CPP_AIM = 4, 8
SDXL_START_BAR, SDXL_START_AIM = 6, 3  # seconds
EMOJI_BAR = 3  # seconds
SATURATION_BAR, P99_BAR, PREVIEW_BAR, OVERHEAD_BAR = 0.97, 0.5, 3, 0.5e-3
INTERACTIVE_BAR, PAGE_BAR = 200, 150_000  # ms; bytes


# ---- Figures

UNMEASURED = {"context": {}, "rows": []}  # in place of a file


def combined(files):
    """Several runs of a topic as one. Each row keeps the context of its run."""
    files = sorted(files, key=lambda file: file["context"]["date"])
    rows = {}
    for file in files:
        for row in file["rows"]:
            row = row | {"context": file["context"], "ceilings": file.get("ceilings")}
            before = rows.get(row["name"])
            if before and rank(before) > rank(row):
                continue
            rows[row["name"]] = row
    return files[-1] | {"rows": list(rows.values()), "runs": files}


def rank(row):
    """How much a row says: how many peers were measured, and how far the fastest was searched for."""
    return (sum(bool(peer["pairs"]) for peer in row["peers"].values()), row.get("searched", True),
            searched_whole(row))


def searched_whole(row):
    """Whether the peer's fastest kernel was searched for to the end."""
    tried = row.get("cublaslt", {}).get("algorithms_us")
    return (row.get("searched", True) and not row.get("not_tried") and
            (tried is None or len(tried) >= LEAST_ALGORITHMS))


def contexts_of(file, *kinds):
    """Of the runs that rows come from, those of these ops where any are named."""
    used = [row.get("context", file["context"]) for row in file["rows"]
            if not kinds or arguments(row["name"])[0] in kinds]
    return [run["context"] for run in file.get("runs", [file]) if run["context"] in used]


def ours_of(row):
    """Median of all rounds, in the row's unit."""
    pairs = [pair for peer in row["peers"].values() for pair in peer["pairs"]]
    return statistics.median(pair[0] for pair in pairs) if pairs else row.get("us")


def ratios_of(peer):
    return [theirs / ours for ours, theirs in peer["pairs"]]


def ratio_of(peer):
    return statistics.median(ratios_of(peer))


def best_of(row):
    """(label, the peer's median, ratio) of the fastest peer; None without one."""
    found = [(ratio_of(peer), label) for label, peer in row["peers"].items() if peer["pairs"]]
    if not found:
        return None
    ratio, label = min(found)
    return label, statistics.median(pair[1] for pair in row["peers"][label]["pairs"]), ratio


def arguments(name):
    """"conv/rows:64/size:32" → "conv", {"rows": 64, "size": 32}"""
    op, *rest = name.split("/")
    return op, {key: int(value) for key, value in (each.split(":") for each in rest)}


def rows_by_name(file, expected):
    """The rows of a file, and None for those that are expected and not there."""
    found = {row["name"]: row for row in file["rows"]}
    return {name: found.get(name) for name in dict.fromkeys([*expected, *found])}


def ops_of(file, *kinds, topic="ops"):
    """Those of the topic's list in tests/bench and of the file, of these kinds."""
    return {name: row for name, row in rows_by_name(file, EXPECTED_OPS[topic]).items()
            if arguments(name)[0] in kinds}


# ---- Verdicts

MET, MISS, NOISE, NOT_MEASURED = "met", "**miss**", "within noise", "**not measured**"
OLD, NOT_SEARCHED, LOADED = "old", "no verdict", "no verdict: loaded host"
LEAST_ALGORITHMS = 16  # that a search of cuBLASLt tries; its heuristics alone return eight
LEAST_SHARE = 0.8  # of the rounds that must reach the bar


def is_old(context, row=None):
    """Whether the figures, or the peers of a row, are not those of the method. `stale`: another reason why they cannot
    meet a bar, said above the table. That the code has changed since is none: see age()."""
    labels = [label for label, peer in (row or {"peers": {}})["peers"].items() if peer["pairs"]]
    return "source" in context or "stale" in context or any(label.startswith("torch.compile ") for label in labels)


def verdict(values, bar, old=False, searched=True, exact=False):
    """`values`: of all rounds, the higher the better; `bar` None: there is none. `exact`: they are counted or
    computed, so that one is enough."""
    if not values:
        return NOT_MEASURED
    if bar is None:
        return ""
    if old:
        return OLD if statistics.median(values) >= bar else f"{MISS} ({OLD})"
    if statistics.median(values) < bar:
        return MISS
    if not searched:  # the peer's fastest kernel is as fast as this one or faster
        return NOT_SEARCHED
    if exact:
        return MET
    share = sum(value >= bar for value in values) / len(values)
    return MET if len(values) > 1 and share >= LEAST_SHARE else NOISE


def holds(condition, old=False):
    """Of something counted."""
    return verdict([float(condition)], 1, old, exact=True)


def at_most(values, bar, old=False, exact=False):
    return verdict([-value for value in values], -bar, old, exact=exact)


def worst_of(verdicts):
    order = [NOT_MEASURED, f"{MISS} ({OLD})", MISS, NOT_SEARCHED, NOISE, OLD, MET]
    return next((each for each in order if each in verdicts), "")


def summary(verdicts):
    judged = [each for each in verdicts if each]
    met = judged.count(MET)
    if met == len(judged):
        return f"All {met} rows reach their bar" if met > 1 else "The row reaches its bar"
    rest = ", ".join(f"{judged.count(each)} {each}" for each in dict.fromkeys(judged)
                     if each != MET)
    return f"{met} of {len(judged)} rows reach their bar ({rest})"


def count_misses(verdicts):
    return ["", summary(verdicts) + "."]


def shown_label(row, label):
    """Runs of 2026-11-24 called every convolution by PyTorch cuDNN's; all but "conv" are eager."""
    if label == "cuDNN, PyTorch's choice" and arguments(row["name"])[0] != "conv":
        return "PyTorch, eager"
    return label


class Compared:
    """A row beside its fastest peer, and the cells of a table that say so."""

    def __init__(self, row, bar, context):
        context = (row or {}).get("context", context)
        best = best_of(row) if row else None
        self.measured = bool(best)
        label, self.theirs, self.ratio = best or ("–", None, None)
        self.label = shown_label(row, label) if best else label
        self.ours = ours_of(row) if row else None
        self.searched = not row or row.get("searched", True)
        self.whole = not row or searched_whole(row)
        self.ratios = ratios_of(row["peers"][label]) if best else []
        self.planned = context.get("rounds", 1)
        self.verdict = verdict(self.ratios, bar, is_old(context, row) if row else False,
                               self.whole)

    def cell(self):
        if not self.measured:
            return "–"
        text = spread(self.ratios)
        if len(self.ratios) < self.planned:
            text += f", {len(self.ratios)} of {self.planned} rounds"
        return text + ("" if self.whole else " ²" if self.searched else " ¹")


def footnotes(compared):
    lines = []
    if any(each.measured and not each.searched for each in compared):
        lines.append("¹ The search for the peer's fastest kernel did not run: no verdict.")
    if any(each.measured and each.searched and not each.whole for each in compared):
        lines.append("² The search had no time for all of the peer's kernels: no verdict, unless it is a miss.")
    return ["", *lines] if lines else []


# ---- How they are written

RATIO = "Peer's time ÷ denoised's"


def spread(ratios):
    """The median and, of several rounds, the least and the most."""
    text = times(statistics.median(ratios))
    return text + (f" ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else "")


def number(value, digits=3):
    """So many significant digits, without an exponent."""
    if value is None:
        return "–"
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, places)}f}"


def with_flops(row, us):
    if us is None or "flop" not in row.get("ours", {}):
        return number(us)
    return f"{number(us)} ({number(row['ours']['flop'] / us * 1e-6)})"


def times(ratio):
    return f"{ratio:.2f}×"


def percent(share, digits=0):
    return f"{100 * share:.{digits}f} %".replace("-", "−")


def percents(shares):
    """As spread()."""
    text = percent(statistics.median(shares), 1)
    return text + (f" ({percent(min(shares), 1)} to {percent(max(shares), 1)})"
                   if len(shares) > 1 else "")


def seconds(value):
    return f"{number(value)} s" if value >= 1 else f"{number(1e3 * value)} ms"


def table(heads, rows):
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def version_of_cudnn(number_):
    return f"{number_ // 10000}.{number_ // 100 % 100}.{number_ % 100}"


def count_of(count, what):
    return f"one {what}" if count == 1 else f"{count} {what}s"


def once(context):
    return context | {"rounds": 1}


def uncounted(context):
    """Of a table that has the rounds of each row."""
    return context | {"rounds": 0}


def is_busy(context):
    """Whether more than a tenth of the host's cores had other work, by its load average."""
    load = context.get("load_average")
    return isinstance(load, float) and load > context.get("cores", 1) / 10


def load_of(context):
    load = context.get("load_average")
    if isinstance(load, str):
        return f"load average {load}"
    if not is_busy(context):
        return None
    return f"load average {load:.1f}" + (f" of {count_of(context['cores'], 'core')}" if "cores" in context else "")


def origin(*contexts):
    """The line above a table: what was measured where, when and beside what."""
    lines = []
    for context in contexts:
        peers = dict(context.get("peers") or {})
        if "torch" in peers:
            peers["torch"] = str(peers["torch"]).split("+")[0]
        if isinstance(peers.get("cudnn"), int):
            peers["cudnn"] = version_of_cudnn(peers["cudnn"])
        names = {"torch": "PyTorch", "cudnn": "cuDNN", "cublaslt": "cuBLASLt",
                 "cudnn_frontend": "cuDNN frontend"}
        topic = f"{context['topic']}: " if "topic" in context else ""
        parts = [topic + context["date"][:10], context.get("device"),
                 f"commit {context['commit']}" if context.get("commit") else None,
                 f"driver {context['driver']}" if context.get("driver") else None,
                 *(f"{names.get(name, name)} {value}" for name, value in peers.items()
                   if name != "gpu"),
                 None if context.get("rounds") == 0 else count_of(context.get("rounds", 1), "round"),
                 load_of(context),
                 context.get("source"), context.get("stale")]
        lines.append("*" + ", ".join(part for part in parts if part) + ".*")
    return [*dict.fromkeys(lines), ""]


def clocks_of(rows):
    """A line on the GPU's state, of all rows with a log."""
    logged = [clocks for row in rows for peer in row["peers"].values()
              for clocks in peer.get("clocks", {}).values()]
    if not logged:
        return []
    low, high = (f(each["sm_mhz"] for each in logged) for f in (min, max))
    watts, celsius = (max(each[name] for each in logged) for name in ("watts", "celsius"))
    return ["", f"SM clock {low:.0f} to {high:.0f} MHz, at most {watts:.0f} W and {celsius:.0f} °C "
                "(medians of a measurement)."]


# ---- Tables, by name. `data` is the name of a file without its extension → its content, or None.

def digits(data):
    rows, contexts = [], []
    for name in ("digits", "digits-cpu-2", "digits-cpu-16"):
        file = data(name)
        if not file:
            continue
        contexts.append(file["context"])
        device = file["context"]["device"].split(",")[0]
        threads = file["context"].get("threads")
        where = f"{device}, {threads} threads" if threads else device
        what = {"request": "request", "evaluations": "its ten evaluations alone"}
        for row in file["rows"]:
            for label, peer in row["peers"].items():
                if peer["pairs"]:
                    theirs = statistics.median(pair[1] for pair in peer["pairs"])
                    rows.append([where, what[row["name"]],
                                 seconds(1e-3 * statistics.median(p[0] for p in peer["pairs"])),
                                 seconds(1e-3 * theirs), label, spread(ratios_of(peer))])
    return origin(*contexts) + table(
        ["Device", "16 digits", "denoised", "PyTorch", "as", RATIO], rows)


def compared_models(data, topic="models"):
    """(row, Compared) by name, of all that have a bar."""
    file, bars = data(topic), {"models": MODEL_BARS, "latent": LATENT_BARS}[topic]
    return {name: (row, Compared(row, bars.get(name), file["context"]))
            for name, row in rows_by_name(file, bars).items()}


def models(data):
    return table_of_models(data, "models", MODEL_BARS)


def latent(data):
    return table_of_models(data, "latent", LATENT_BARS)


def table_of_models(data, topic, bars):
    file = data(topic)
    rows, last, found = [], None, compared_models(data, topic)
    for name, (row, each) in found.items():
        model, count = name.split("/rows:")
        ways = row["peers"] if row else {}
        others = [f"{other} {number(statistics.median(p[1] for p in peer['pairs']))}"
                  for other, peer in ways.items() if other != each.label and peer["pairs"]]
        if each.measured and not any("max-autotune" in way and ways[way]["pairs"] for way in ways):
            others.append("max-autotune not measured")
        speed = row["ours"]["flop"] / each.ours * 1e-9 if each.measured else None
        bar = bars.get(name)
        rows.append(["" if model == last else model, count, f"{number(each.ours)} ms",
                     number(speed), f"{number(each.theirs)} ms",
                     each.label + (f" ({'; '.join(others)})" if others else ""), each.cell(),
                     f"{bar}×" if bar else "", each.verdict])
        last = model
    return (origin(*contexts_of(file)) +
            table(["Model", "Rows", "denoised", "TFLOP/s", "PyTorch", "as (other ways, ms)", RATIO,
                   "Bar", ""], rows) +
            count_misses([each.verdict for _, each in found.values()]) + clocks_of(file["rows"]))


def train(data):
    """Time, memory and first step, each with its own verdict. A first step is a single sample, so earlier ones on
    such a GPU stay in the file."""
    file = data("train") or UNMEASURED
    rows, verdicts = [], []
    for name, row in rows_by_name(file, TRAIN_BARS).items():
        each = Compared(row, TRAIN_BARS.get(name), file["context"])
        ours = (row or {}).get("ours", {})
        theirs = row["peers"][each.label].get("details", {}) if each.measured else {}
        mib, reserved, allocated = ours.get("MiB_device"), theirs.get("MiB_reserved"), theirs.get("MiB_allocated")
        share = mib / reserved if mib and reserved else None
        first, bar = ours.get("first_step_seconds"), FIRST_STEP_BARS.get(name)
        earlier = [each["seconds"] for each in ours.get("earlier_first_steps", [])]
        firsts = [first, *earlier] if first else []
        also = f" (earlier {', '.join(map(number, earlier))})" if earlier else ""
        old = is_old((row or {}).get("context", file["context"]))
        all_three = [each.verdict,
                     at_most([share], TRAIN_MEMORY_BAR, old, exact=True) if share else NOT_MEASURED]
        if bar:
            all_three.append(at_most(firsts, bar, old))
        verdicts += all_three
        speed = ours["flop"] / each.ours * 1e-9 if each.measured and "flop" in ours else None
        rows.append([
            *name.split("/batch:"), f"{number(each.ours)} ms", number(speed),
            f"{number(each.theirs)} ms", each.cell(), f"{TRAIN_BARS.get(name, '–')}×",
            each.verdict, f"{number(mib)} MiB; {number(reserved)}, {number(allocated)} MiB",
            f"{percent(share)}, {all_three[1]}" if share else all_three[1],
            percent(mib / allocated) if mib and allocated else "–",
            f"{number(first)} s{also}, {number(theirs.get('first_step_seconds'))} s",
            f"≤ {bar} s, {all_three[2]}" if bar else ""])
    lines = origin(*contexts_of(file)) if file["rows"] else []
    found = [summary(verdicts).replace("rows reach their bar", "bars are reached") + "."]
    return lines + table(
        ["Model", "Pictures a step", "denoise-train", "TFLOP/s", "PyTorch", RATIO, "Bar", "",
         "Memory: denoise-train; PyTorch reserved, allocated", f"of reserved, bar {percent(TRAIN_MEMORY_BAR)}",
         "of allocated",
         "First step after: denoise-train, PyTorch", "Bar"], rows) + ["", *found] + clocks_of(
             file["rows"])


def train_cpu(data):
    """A line for each way of PyTorch; the fastest decides."""
    file = data("train-cpu") or UNMEASURED
    row = rows_by_name(file, ["mnist-32/batch:64"])["mnist-32/batch:64"]
    best = Compared(row, CPU_TRAIN_BAR, file["context"])
    rows = []
    for label, peer in (row["peers"] if row else {}).items():
        if not peer["pairs"]:
            continue
        ours, theirs = (statistics.median(side) for side in zip(*peer["pairs"]))
        fastest = label == best.label
        rows.append([label, f"{number(theirs)} ms", f"{number(ours)} ms",
                     best.cell() if fastest else spread(ratios_of(peer)),
                     f"{CPU_TRAIN_BAR}×" if fastest else "", best.verdict if fastest else ""])
    left_out = [f"Left out: {label}: {why}." for label, why in (row or {}).get("left_out", {}).items()]
    return (origin(*contexts_of(file)) +
            table(["PyTorch", "its step", "denoise-train's", RATIO, "Bar", ""], rows) +
            count_misses([best.verdict]) + left_out)


def gpu_of(context):
    """H100, of "NVIDIA H100 80GB HBM3, 132 SMs, 79.2 GiB"."""
    return re.sub(r"^NVIDIA ([^\s,]+).*", r"\1", context["device"])


def memory(data):
    """denoised's from a run in which it was alone on the device, as it is what the device lost.
    PyTorch's from the run of its speed, or from the same file when that is older; of its ways the one
    that takes least."""
    file, beside = data("memory"), {row["name"]: row for row in data("models")["rows"]}
    own = any("peers" in row for row in file["rows"])
    rows = []
    for row in file["rows"]:
        peers = row if own else beside.get(row["name"])
        ways = [peer["details"] for peer in peers["peers"].values()
                if "MiB_reserved" in peer.get("details", {})] if peers else []
        if "MiB_device" in row["ours"] and ways:
            details = min(ways, key=lambda way: way["MiB_reserved"])
            rows.append([row["name"].replace("/rows:", ", "), f"{row['ours']['MiB_device']:.0f} MiB",
                         f"{details['MiB_allocated']} MiB", f"{details['MiB_reserved']} MiB"])
    contexts = [file["context"]] + ([] if own else contexts_of(data("models")))
    return origin(*map(once, contexts)) + table(
        ["Model, rows", f"denoised ({gpu_of(contexts[0])})",
         *(f"PyTorch, {what} ({gpu_of(contexts[-1])})" for what in ("allocated", "reserved"))], rows)


def loop(data):
    rows, verdicts = [], []
    for row in filter(None, rows_by_name(data("models"), MODEL_BARS).values()):
        pairs = [(ms, ours) for peer in row["peers"].values()
                 for ms, (ours, _) in zip(peer.get("extra", {}).get("ours", {}).get("ms_forward", []),
                                          peer["pairs"])]
        if not pairs:
            continue
        forward, whole = statistics.median(ms for ms, _ in pairs), ours_of(row)
        more, bar = whole / forward - 1, LOOP_BARS.get(row["name"])
        old = is_old(row.get("context", data("models")["context"]))
        verdicts.append(at_most([ours / ms - 1 for ms, ours in pairs], bar, old) if bar else "")
        rows.append([*row["name"].split("/rows:"), f"{number(forward, 4)} ms",
                     f"{number(whole, 4)} ms", percent(more, 1), f"≤ {percent(bar)}" if bar else "",
                     verdicts[-1]])
    return origin(*contexts_of(data("models"))) + table(["Model", "Rows", "Model alone", "Evaluation", "More", "Bar", ""], rows)


def compared_ops(data, bar, *kinds, topic="ops"):
    """(row, Compared) by name, of all ops of these kinds."""
    file = data(topic)
    return {name: (row, Compared(row, bar, file["context"]))
            for name, row in ops_of(file, *kinds, topic=topic).items()}


def convolutions(data):
    file = data("ops")
    rows, all_of, verdicts = [], [], []
    fused = compared_ops(data, FUSED_BAR, "conv_bias_residual_silu")
    for name, (row, bare) in compared_ops(data, CONV_BAR, "conv").items():
        shape = arguments(name)[1]
        cells = [f"[{shape['rows']}, {shape['size']}, {shape['in']}, {shape['out']}]",
                 with_flops(row or {}, bare.ours), number(bare.theirs), bare.cell()]
        both = [bare]
        beside = fused.get(name.replace("conv/", "conv_bias_residual_silu/"))
        if beside:
            both.append(beside[1])
            cells += [number(both[1].ours), number(both[1].theirs), both[1].label, both[1].cell()]
        else:
            cells += [""] * 4
        verdicts.append(worst_of([each.verdict for each in both]))
        all_of += both
        rows.append([*cells, verdicts[-1]])
    return (origin(*contexts_of(file, "conv", "conv_bias_residual_silu")) + table(
        ["[images, edge, channels, outputs]", "denoised", "cuDNN", RATIO, "fused: denoised",
         "peer", "as", RATIO, ""], rows) + footnotes(all_of) + count_misses(verdicts) +
            clocks_of(file["rows"]))


def other_convolutions(data):
    kinds = {"conv_shortcut": "with a 1×1 shortcut from {shortcut} channels",
             "conv_down": "stride 2", "conv_up": "doubled before (nine taps counted)"}
    rows, found = [], compared_ops(data, CONV_BAR, *kinds)
    for name, (_, each) in found.items():
        op, shape = arguments(name)
        rows.append([f"[{shape['rows']}, {shape['size']}, {shape['in']}, {shape['out']}], " +
                     kinds[op].format(**shape), number(each.ours), number(each.theirs), each.label,
                     each.cell(), each.verdict])
    all_of = [each for _, each in found.values()]
    return (origin(*contexts_of(data("ops"), *kinds)) +
            table(["Convolution", "denoised", "peer", "as", RATIO, ""], rows) + footnotes(all_of) +
            count_misses([each.verdict for each in all_of]))


def linears(data):
    rows, found = [], compared_ops(data, LINEAR_BAR, "linear")
    plain = sum(each.label == "cuBLAS" for _, each in found.values())
    for name, (row, each) in found.items():
        shape = arguments(name)[1]
        tried = (row or {}).get("cublaslt", {}).get("algorithms_us")
        rows.append([f"{shape['rows'] * shape['tokens']} × {shape['in']} → {shape['out']}",
                     with_flops(row or {}, each.ours), number(each.theirs),
                     each.label + (f", best of {len(tried)}" if tried and
                                   each.label == "cuBLASLt" else ""), each.cell(), each.verdict])
    return (origin(*contexts_of(data("ops"), "linear")) +
            table(["Rows × inputs → outputs", "denoised", "peer", "as", RATIO, ""], rows) +
            footnotes([each for _, each in found.values()]) +
            count_misses([each.verdict for _, each in found.values()]) +
            ["", f"For {plain} of {len(found)} layers plain cuBLAS beats the best of 96 cuBLASLt algorithms; then it "
                 "counts."])


def attentions(data):
    rows, found = [], compared_ops(data, ATTENTION_BAR, "attention")
    for name, (row, each) in found.items():
        shape = arguments(name)[1]
        rows.append([f"[{shape['rows']}, {shape['heads']}, {shape['tokens']}, {shape['dim']}]",
                     with_flops(row or {}, each.ours), number(each.theirs), each.label,
                     each.cell(), each.verdict])
    return (origin(*contexts_of(data("ops"), "attention")) +
            table(["[images, heads, tokens, dim]", "denoised", "PyTorch", "as", RATIO, ""], rows) +
            count_misses([each.verdict for _, each in found.values()]))


def group_norms(data):
    file = data("ops")
    rows, verdicts = [], []
    for name, row in ops_of(file, "group_norm_silu").items():
        copy = ((row or {}).get("ceilings") or file["ceilings"])["bytes_per_s"]
        shape = arguments(name)[1]
        best = best_of(row) if row else None
        if not best:
            verdicts.append(NOT_MEASURED)
            rows.append([f"[{shape['rows']}, {shape['size']}, {shape['channels']}]",
                         *["–"] * 6, NOT_MEASURED])
            continue
        us, size = ours_of(row), row["ours"]["bytes"]
        share = size / us * 1e6 / copy
        judged = size / 2 > LAST_LEVEL_CACHE
        verdicts.append(verdict([size / pair[0] * 1e6 / copy for peer in row["peers"].values()
                                 for pair in peer["pairs"]], NORM_BAR if judged else None,
                                is_old(row.get("context", file["context"]), row)))
        least = row.get("survey", {}).get("candidates_us", {}).get("pass")
        rows.append([f"[{shape['rows']}, {shape['size']}, {shape['channels']}]",
                     f"{size / 2 / (1 << 20):.0f}", number(us), percent(share, 1),
                     percent(least / us) if least else "–", f"{number(best[1])} {best[0]}",
                     spread(ratios_of(row["peers"][best[0]])), verdicts[-1]])
    return (origin(*contexts_of(file, "group_norm_silu")) +
            table(["[images, edge, channels]", "MiB", "denoised", "Of the copy", "Of a pass",
                   "PyTorch", RATIO, ""], rows) + count_misses(verdicts))


def train_ops_of(data):
    return lambda topic: data(topic) or UNMEASURED


def convolution_gradients(data):
    """Of a convolution's input (dgrad) and of its weights (wgrad), by shape."""
    data = train_ops_of(data)
    kinds = ("dgrad", "wgrad")
    rows, found = [], compared_ops(data, GRADIENT_BAR, *kinds, topic="train-ops")
    for shape in dict.fromkeys(name.split("/", 1)[1] for name in found):
        each = arguments(f"/{shape}")[1]
        edge = each["kernel"]
        cells = [f"[{each['rows']}, {each['size']}, {each['in']}, {each['out']}], {edge}×{edge}" +
                 (f", stride {each['stride']}" if each["stride"] > 1 else "")]
        for kind in kinds:
            row, beside = found.get(f"{kind}/{shape}", (None, None))
            cells += [with_flops(row or {}, beside.ours), number(beside.theirs), beside.label,
                      beside.cell(), beside.verdict] if beside else [""] * 5
        rows.append(cells)
    all_of = [each for _, each in found.values()]
    eager = sum(each.label == "PyTorch, eager" for each in all_of)
    file = data("train-ops")
    return (origin(*contexts_of(file, *kinds)) + table(
        ["[images, edge, channels, outputs]", "dgrad: denoised", "peer", "as", RATIO, "",
         "wgrad: denoised", "peer", "as", RATIO, ""], rows) + footnotes(all_of) +
            count_misses([each.verdict for each in all_of]) +
            ["", f"PyTorch's own choice of cuDNN's plans is faster than the searched one for {eager} of "
                 f"{len(all_of)} gradients; then it counts."] + clocks_of(file["rows"]))


def group_norm_gradients(data):
    """Beside a copy of as many bytes, which has the bar, and beside the fastest of PyTorch."""
    file, kind = data("train-ops") or UNMEASURED, "group_norm_silu_backward"
    rows, verdicts, all_of = [], [], []
    for name, row in ops_of(file, kind, topic="train-ops").items():
        peers = dict(row["peers"]) if row else {}
        shares = ratios_of(peers.pop("copy", {"pairs": []}))
        each = Compared(row and row | {"peers": peers}, None, file["context"])
        all_of.append(each)
        old = bool(row) and is_old(row.get("context", file["context"]), row)
        verdicts.append(verdict(shares, NORM_GRADIENT_BAR, old))
        shape = arguments(name)[1]
        ours = ours_of(row) if row else None
        bytes_ = row["ours"].get("bytes") if row else None
        rows.append([f"[{shape['rows']}, {shape['size']}, {shape['channels']}], {shape['groups']} groups",
                     f"{bytes_ >> 20}" if bytes_ else "–", number(ours),
                     percents(shares) if shares else "–", verdicts[-1], number(each.theirs),
                     each.label, each.cell()])
    return (origin(*contexts_of(file, kind)) + table(
        ["[images, edge, channels]", "MiB", "denoised", "Of the copy", "", "PyTorch", "as", RATIO],
        rows) + footnotes(all_of) + count_misses(verdicts))


def attention_gradients(data):
    data, kind = train_ops_of(data), "attention_backward"
    rows, found = [], compared_ops(data, GRADIENT_BAR, kind, topic="train-ops")
    for name, (row, each) in found.items():
        shape = arguments(name)[1]
        rows.append([f"[{shape['rows']}, {shape['heads']}, {shape['tokens']}, {shape['dim']}]",
                     with_flops(row or {}, each.ours), number(each.theirs), each.label,
                     each.cell(), each.verdict])
    return (origin(*contexts_of(data("train-ops"), kind)) +
            table(["[images, heads, tokens, dim]", "denoised", "peer", "as", RATIO, ""], rows) +
            footnotes([each for _, each in found.values()]) +
            count_misses([each.verdict for _, each in found.values()]))


def ceilings(data):
    file = data("ops")
    runs = file.get("runs", [file])
    found = [(f"run {i}, {name}" if len(runs) > 1 else name, run[key])
             for i, run in enumerate(runs, 1)
             for key, name in (("ceilings_before", "before"), ("ceilings", "during"),
                               ("ceilings_after", "after"))
             if key in run and "error" not in run[key]]
    return origin(*(once(run["context"]) for run in runs)) + table(["Measured", "GEMM of 8192³", "Copy of 1 GiB"], [
        [name, f"{number(each['flop_per_s'] * 1e-12)} TFLOP/s",
         f"{number(each['bytes_per_s'] * 1e-12)} TB/s"] for name, each in found])


def clocks(data):
    file = data("clocks")
    if not file:
        return ["Not measured yet."]
    rows = []
    for row in file["rows"]:
        done = [each for each in row["rounds"] if "us" in each]
        if not done:
            rows.append([row["name"], "refused", "", ""])
            continue
        logged = [each["clocks"] for each in done if each.get("clocks") and each.get("timed")]
        rows.append([row["name"], number(statistics.median(each["us"] for each in done)),
                     f"{statistics.median(c['sm_mhz'] for c in logged):.0f} MHz" if logged else "–",
                     f"{statistics.median(c['watts'] for c in logged):.0f} W" if logged else "–"])
    return origin(file["context"] | {"rounds": max(len(row["rounds"]) for row in file["rows"])}) + table(
        ["cuDNN, unless denoised is named", "µs", "SM clock", "Power"], rows)


def cpu(data, name="cpu"):
    """The CPU backend beside an older one; see cpu_rows.py."""
    file = data(name)
    found = {row["name"]: row for row in file["rows"]}
    idle, old = found["idle"]["after"], is_old(file["context"])

    def ratios(over, under):
        return [a / b for a, b in zip(over, under) if a and b]

    rows, verdicts = [], []
    for name, what, bar in (("idle", "16 images in flight, two idle cores", 1.2),
                            ("busy", "the same, beside two busy loops on these cores", None),
                            ("one-2", "one image, two threads", 1.0),
                            ("one-16", "one image, 16 threads", 1.0)):
        row = found.get(name)
        before, after = (row["before"], row["after"]) if row else ([], [])
        all_ratios = ratios(before, after)
        verdicts.append(verdict(all_ratios, bar, old) if bar else "")
        rows.append([what, *(f"{number(statistics.median(side))} ms" if side else "–"
                             for side in (before, after)),
                     spread(all_ratios) if all_ratios else "–",
                     f"≥ {bar}×" if bar else "", verdicts[-1]])
    slower = ratios(found["busy"]["after"], idle) if "busy" in found else []
    verdicts.append(verdict([-each for each in slower], -CPU_BUSY_BAR, old))
    rows.append([f"busy over idle; before {spread(ratios(found['busy']['before'], found['idle']['before']))}"
                 if slower else "busy over idle", "", "", spread(slower) if slower else "–",
                 f"≤ {CPU_BUSY_BAR}×", verdicts[-1]])
    faster = ratios(idle, found["bf16"]["after"]) if "bf16" in found else []
    verdicts.append(verdict(faster, CPU_BF16_BAR, old) if faster else "")
    rows.append(["`--cpu-dtype bf16`: fp32 over bf16, idle", "", "",
                 spread(faster) if faster else "this CPU has no bf16",
                 f"≥ {CPU_BF16_BAR}×", verdicts[-1]])
    return origin(file["context"]) + table(
        ["Milliseconds an image", f"Before ({file['before']})", "Now", "Ratio", "Bar", ""],
        rows) + count_misses(verdicts)


def portable(data):
    """Beside Hopper's kernels in the same run."""
    file = data("portable")
    rows, verdicts = [], []
    for row in file["rows"]:
        ratio = ratio_of(row["peers"]["generic"])
        old = is_old(row.get("context", file["context"]))
        generic = statistics.median(pair[1] for pair in row["peers"]["generic"]["pairs"])
        verdicts.append(
            verdict([1 / each for each in ratios_of(row["peers"]["generic"])], PORTABLE_BAR, old))
        rows.append([*row["name"].split("/rows:"), f"{number(ours_of(row))} ms",
                     f"{number(generic)} ms", percent(1 / ratio, 1), verdicts[-1]])
    return (origin(*contexts_of(file)) +
            table(["Model", "Rows", "For Hopper", "For every GPU", "Speed kept", ""], rows) +
            count_misses(verdicts))


def fp8(data):
    """denoised in bf16 beside itself in FP8, in the same run."""
    file = data("fp8") or UNMEASURED
    rows, verdicts = [], []
    for name, row in rows_by_name(file, FP8_BARS).items():
        pairs = row["peers"]["fp8"]["pairs"] if row else []
        bar, in_fp8 = FP8_BARS.get(name), [pair[1] for pair in pairs]
        verdicts.append(at_most(in_fp8, bar, pairs and is_old(row.get("context", file["context"]))) if bar else "")
        rows.append([*name.split("/rows:"), f"{number(ours_of(row))} ms" if pairs else "–",
                     f"{number(statistics.median(in_fp8))} ms" if pairs else "–",
                     spread([ours / fp8 for ours, fp8 in pairs]) if pairs else "–",
                     f"≤ {bar} ms" if bar else "", verdicts[-1]])
    lines = origin(*contexts_of(file)) if file["rows"] else []
    return lines + table(["Model", "Rows", "bf16", "fp8", "bf16 ÷ fp8", "Bar", ""], rows) + count_misses(
        verdicts) + clocks_of(file["rows"])


def fp8_ops(data):
    """Convolutions have a bar of TFLOP/s, linear layers one beside cuBLASLt in e4m3."""
    file = data("fp8-ops") or UNMEASURED
    rows, verdicts = [], []
    for name, row in ops_of(file, "conv", "linear", topic="fp8-ops").items():
        op, shape = arguments(name)
        if op == "conv":
            layer = f"3×3 [{shape['rows']}, {shape['size']}, {shape['in']}, {shape['out']}]"
        else:
            layer = f"{shape['rows'] * shape['tokens']} × {shape['in']} → {shape['out']}"
        beside = Compared(row, LINEAR_BAR, file["context"])
        verdicts.append(beside.verdict)
        if op == "conv" and beside.measured:
            rates = [row["ours"]["flop"] / us * 1e-6 for us, _ in row["peers"]["bf16"]["pairs"]]
            verdicts[-1] = verdict(rates, FP8_CONV_BAR, is_old(row.get("context", file["context"])))
        rows.append([layer, with_flops(row or {}, beside.ours), number(beside.theirs), beside.label, beside.cell(),
                     f"≥ {FP8_CONV_BAR:,} TFLOP/s" if op == "conv" else f"≥ {LINEAR_BAR}×", verdicts[-1]])
    lines = origin(*contexts_of(file)) if file["rows"] else []
    return lines + table(["Layer", "fp8", "peer", "as", "Peer's time ÷ fp8's", "Bar", ""], rows) + count_misses(
        verdicts) + (clocks_of(file["rows"]) if file["rows"] else [])


def start(data):
    file = data("start")
    rows = []
    for each in file["figures"]["start"]:
        if each["max_rows"] != 0:
            continue
        first, *later = [run["serving_seconds"] for run in each["runs"]]
        bar = START_BARS[each["model"]]
        rows.append([f"{each['model']}, {each['weights_bytes'] >> 20} MiB of weights",
                     f"{first:.2f} s", f"≤ {bar} s", at_most([first], bar, is_old(file["context"])),
                     f"{statistics.median(later):.2f} s, median of {len(later)}" if later else "–"])
    return origin(uncounted(file["context"])) + table(
        ["Model", "First start", "Bar", "", "Later starts"], rows)


def weights(data):
    file = data("weights")
    rows, rounds = [], 0
    for model in dict.fromkeys(row["model"] for row in file["rows"]):
        some = [row for row in file["rows"] if row["model"] == model]
        rates = [row.get("gb_per_s") or 1e-9 * row["bytes"] / row["seconds"] for row in some]
        rounds = max(rounds, len(rates))
        rows.append([model, f"{1e-6 * some[0]['bytes']:.0f} MB",
                     ", ".join(f"{rate:.1f}" for rate in rates),
                     f"≥ {WEIGHTS_BAR}", verdict(rates, WEIGHTS_BAR, is_old(file["context"]))])
    return origin(file["context"] | {"rounds": rounds}) + table(["Model", "Weights", "GB/s", "Bar", ""], rows)


def two_models(data):
    file = data("two-models")
    rows = [[row["name"].split("rows:")[1].split("/")[0], f"{number(row['ms_alone'])} ms",
             f"{number(row['real_time'])} ms", times(row["shares"])] for row in file["rows"]]
    return origin(once(file["context"])) + table(
        ["Rows of each", "Evaluation alone", "Of each, both at a time", "Gain over taking turns"],
        rows)


def engine(data):
    file = data("engine")
    rows = []
    for one in file["rows"]:
        if one["models"] != 1:
            continue
        two = next((row for row in file["rows"] if row["models"] == 2 and
                    row["rows"] == one["rows"] and row["previews"] == one["previews"]), None)
        rows.append([f"{one['rows']}{', previews of every evaluation' if one['previews'] else ''}",
                     f"{number(one['device_ms_per_evaluation'])} ms",
                     f"{number(one['ms_per_evaluation'])} ms",
                     f"{number(two['ms_per_evaluation'])} ms" if two else "",
                     times(one["ms_per_evaluation"] / two["ms_per_evaluation"]) if two else ""])
    return origin(once(file["context"])) + table(
        ["Rows", "One model: device", "One model: wall clock", "Two models: wall clock", "Gain"],
        rows)


def splits(data):
    file = data("splits")
    evaluations = {row["name"]: ours_of(row) for row in data("models")["rows"]}
    rows = []
    for row in file["rows"]:
        model = Path(row["config"]).parent.name
        evaluation = evaluations.get(f"{model}/rows:{row['rows']}")
        lost = row["ms_by_shape"] - row["ms_any"]
        rows.append([model, row["rows"], f"{number(row['ms_by_shape'], 4)} ms",
                     f"{number(row['ms_any'], 4)} ms", percent(lost / row["ms_any"], 1),
                     percent(lost / evaluation, 1) if evaluation else "–"])
    beside = data("models")["context"]
    return origin(once(file["context"])) + table(
        ["Model", "Rows", *(f"{what} ({gpu_of(file['context'])})" for what in ("By shape", "Any")), "Cost",
         f"Of an evaluation ({gpu_of(beside)}, {beside['commit']})"], rows)


def saturation_rows(file, where):
    figures = file["figures"]["saturation"]
    shares = [ours / bare for bare, ours in zip(figures["engine_images_per_second"],
                                                figures["server_images_per_second"])]
    bare = statistics.median(figures["engine_images_per_second"])
    served = statistics.median(figures["server_images_per_second"])
    return [[f"Images/s at saturation, {where}", f"≥ {percent(SATURATION_BAR)} of the engine's",
             f"{percent(statistics.median(shares), 1)} ({percent(min(shares), 1)} to "
             f"{percent(max(shares), 1)}): {number(served, 4)} of {number(bare, 4)}", len(shares),
             verdict(shares, SATURATION_BAR, is_old(file["context"]))]]


def storm_rows(file, where):
    figures, old = file["figures"]["storm"], is_old(file["context"])
    return [[f"{figures['cancelled']:,} requests cancelled at random moments, {where}",
             "nothing left behind", f"{figures['left_inside']:.0f} images left", 1,
             holds(figures["left_inside"] == 0 and figures["cancelled"] >= 10_000, old)],
            [f"{figures['compared']} of the {figures['survived']:,} survivors, drawn again by an idle "
             "server", "equal bytes", f"{figures['differ']} differ", 1,
             holds(figures["differ"] == 0 and figures["compared"] > 0, old)]]


def p99_ratio(comparison):
    """Of scheduling.json: step batching's over request batching's."""
    return comparison["step"]["p99_seconds"] / comparison["request"]["p99_seconds"]


def serving(data):
    gpu, cpu, storm, long = (data(name) for name in ("serving", "serving-cpu", "serving-storm",
                                                     "serving-soak"))
    rows = saturation_rows(gpu, "GPU")
    batching, old = gpu["figures"]["batching"], is_old(gpu["context"])
    step, request = batching["step"], batching["request"]
    p99 = [mode["latency_seconds"]["p99"] for mode in (step, request)]
    p50 = [mode["latency_seconds"]["p50"] for mode in (step, request)]
    rate = [mode["images_per_second"] for mode in (step, request)]
    carried = rate[1] >= 0.95 * rate[0]  # otherwise the p99 of request batching is as long as the run
    rows += [["Batching by step over batching by request, at 80 % of what step batching can do: p99", f"≤ {P99_BAR}",
              f"{p99[0] / p99[1]:.2f}: {seconds(p99[0])} of {seconds(p99[1])} (p50 "
              f"{seconds(p50[0])} and {seconds(p50[1])})", 1,
              verdict([-p99[0] / p99[1]], -P99_BAR, old, searched=carried)],
             ["the same: images/s", "≥ 1", f"{rate[0] / rate[1]:.2f}: {number(rate[0])} and "
              f"{number(rate[1])}", 1, verdict([rate[0] / rate[1]], 1, old)],
             ["the same: first preview after the queue", f"≤ {PREVIEW_BAR} evaluations",
              f"{batching['first_preview_evaluations']:.1f}", 1,
              at_most([batching["first_preview_evaluations"]], PREVIEW_BAR, old)]]
    rows += [["p99 of the two on a simulated device, at 80 % of what request batching can do", f"≤ {P99_BAR}",
              f"{p99_ratio(each):.2f}: {seconds(each['step']['p99_seconds'])} of "
              f"{seconds(each['request']['p99_seconds'])}", 1,
              at_most([p99_ratio(each)], P99_BAR, is_old(data("scheduling")["context"]), exact=True)]
             for each in data("scheduling")["comparisons"] if each["capacity_of"] == "request"]
    rows += storm_rows(storm, "GPU")
    figures, old = cpu["figures"], is_old(cpu["context"])
    rows += saturation_rows(cpu, "CPU backend")
    spent = figures["overhead"]
    extra = spent.get("extra_seconds", spent["server_cpu_seconds"] + spent["client_cpu_seconds"] -
                      spent["engine_cpu_seconds"])
    rows += [["CPU time of a unary request of one step: server + client − engine alone",
              f"≤ {seconds(OVERHEAD_BAR)}", f"{seconds(extra)} = "
              f"{1e3 * spent['server_cpu_seconds']:.2f} + {1e3 * spent['client_cpu_seconds']:.2f} − "
              f"{1e3 * spent['engine_cpu_seconds']:.2f}", 1, at_most([extra], OVERHEAD_BAR, old)],
             ["1,000 streams at any time, with previews", "no error",
              f"{figures['streams']['succeeded']:,} requests, {figures['streams']['failed']} failed", 1,
              holds(figures["streams"]["failed"] == 0, old)]]
    rows += storm_rows(cpu, "CPU backend")
    soak = long["figures"]["soak"]
    first, last = soak["idle"][0], soak["idle"][-1]
    left = 1024 * (last["heap_kib"] - first["heap_kib"]) / (last["images"] - first["images"])
    rows += [[f"Soak: {soak['minutes']} minutes with 64 requests in flight",
              f"no error, ≤ {HEAP_BAR} bytes of heap left by an image",
              f"{soak['images']:,} images, {soak['failed']} failed; {left:+.2f} bytes "
              "left by an image", 1,
              holds(soak["failed"] == 0 and left <= HEAP_BAR, is_old(long["context"]))]]
    return origin(*(uncounted(file["context"]) for file in (gpu, storm, cpu, long))) + table(
        ["Benchmark", "Bar", "Measured", "Rounds", ""], rows)


def of_rounds(values, digits=3):
    """The median and, of several rounds, the least and the most."""
    text = number(statistics.median(values), digits)
    return text + (f" ({number(min(values), digits)}–{number(max(values), digits)})"
                   if len(values) > 1 else "")


def parts_of(data, parts):
    """Milliseconds of an image by PyTorch's parts alone; None where one was not measured. `parts`: how many rows
    of an evaluation it takes, and the evaluation's name in latent.json."""
    found = {row["name"]: best_of(row) for row in (data("latent") or UNMEASURED)["rows"]}
    if not all(found.get(name) for _, name in parts):
        return None
    return sum(count * found[name][1] / arguments(name)[1]["rows"] for count, name in parts)


def rows_of_image(mix):
    """That an image of `denoise bench --mix` takes: one for each step, two with guidance."""
    said = dict(each.split("=") for each in mix.split(","))
    return int(said["steps"]) * (2 if float(said.get("guidance", 1)) > 1 else 1)


def pipeline_rows(data):
    """(contexts, rows); the last column is the verdict."""
    rows, contexts = [], []

    def figures_of(topic):
        file = data(topic)
        if not file:
            return {}
        contexts.append(uncounted(file["context"]) | {"topic": topic})
        return file["figures"]

    def row(what, beside, measured, bar, aim, values, reach, mean_rows="", also=(), unjudged=None):
        """`values`: the higher, the better. `also`: further values that must reach the bar. `unjudged`: what
        stands in place of a verdict that is no miss."""
        old = bool(values) and is_old(contexts[-1])
        found = worst_of([verdict(each, reach, old) for each in (values, *also)])
        rows.append([what, beside, measured if values else "–", len(values) or "–", mean_rows, bar, aim,
                     unjudged if unjudged and found in (MET, NOISE) else found])

    def mean_rows(rounds):
        """Of an evaluation, over all rounds."""
        servers = [each["server"] for each in rounds]
        evaluations = sum(each["evaluations"] for each in servers)
        return f"{sum(each['rows'] for each in servers) / evaluations:.1f}" if evaluations else "–"

    def request(what, beside, found, bar, aim):
        """`found`: figures with a row of ours and its peers'. On a loaded host the time of a peer that waits for
        its host is no measure."""
        best = best_of(found["row"]) if found else None
        pairs = found["row"]["peers"][best[0]]["pairs"] if best else []
        ratios = [theirs / ours for ours, theirs in pairs]
        beside = f"{seconds(1e-3 * best[1])}: {best[0]}" if best else beside
        measured = f"{seconds(1e-3 * ours_of(found['row']))}: {spread(ratios)}" if best else ""
        row(what, beside, measured, f"≥ {bar}×", f"{aim}×", ratios, bar,
            unjudged=LOADED if best and is_busy(contexts[-1]) else None)

    for topic, (what, reach, aim) in PIPELINE_BARS.items():
        found = figures_of(topic)
        # Images end several at a time, so counting those of a few seconds would be less exact.
        rates = [each["server"]["rows"] / each["server"]["time"] / rows_of_image(found["mix"])
                 for each in found.get("rounds", [])]
        peers = [PUBLISHED[topic]] if topic in PUBLISHED else []
        parts = parts_of(data, PIPELINE_PARTS[topic]) if topic in PIPELINE_PARTS else None
        if parts:
            peers.insert(0, (1e3 / parts, "torch.compile's parts", True))
        beside = "; ".join(f"{number(rate)}: {whose}" + (
            f" ({times(statistics.median(rates) / rate)})" if rates and same else "") for rate, whose, same in peers)
        row(f"{what}: images/s", beside, of_rounds(rates) if rates else "", f"≥ {reach}", aim, rates, reach,
            mean_rows(found.get("rounds", [])),
            also=[[rate * parts * 1e-3 * reach for rate in rates]] if parts and rates else [])
    found = figures_of("sdxl-mixed")
    shares, pixels = ([mixed / uniform for mixed, uniform in found.get(pairs, [])]
                      for pairs in ("pairs", "pixel_pairs"))
    rates = [f"{number(statistics.median(side))}" for side in zip(*found.get("pairs", []))]
    megapixels = [f"{number(1e-6 * statistics.median(side))}" for side in zip(*found.get("pixel_pairs", []))]
    measured = f"{percents(shares)}: {' of '.join(rates)}" if shares else ""
    if pixels:
        measured += f"; megapixels/s {percents(pixels)}: {' of '.join(megapixels)}"
    queues = {queue: mean_rows([each for each in found.get("rounds", []) if each["queue"] == queue])
              for queue in ("mixed", "uniform")}
    kinds = f"{len(found['mixed'])} kinds" if "mixed" in found else "many kinds"
    row(f"SDXL, a queue of {kinds} of requests ÷ a uniform one: rows/s", "", measured, f"≥ {percent(MIXED_BAR)}",
        percent(MIXED_AIM), shares, MIXED_BAR, f"{queues['mixed']}; uniform {queues['uniform']}",
        also=[pixels] if pixels else [])
    found = figures_of("sd15-request")
    previews = [each["evaluations"] for each in found.get("first_previews", [])]
    row("SD 1.5, one request at an idle server: text to first preview, in evaluations", "",
        of_rounds(previews) if previews else "", f"≤ {FIRST_PREVIEW_BAR}", "",
        [-each for each in previews], -FIRST_PREVIEW_BAR)
    request("the same: text to PNG at the client, 20 guided steps", "diffusers' models, torch.compile", found,
            REQUEST_BAR, REQUEST_AIM)
    if found and not best_of(found["row"]):
        alone = found["ms_alone"]
        rows[-1][2:4] = f"{seconds(1e-3 * statistics.median(alone))}, no peer", len(alone)
    found = figures_of("sd15-sd-cpp")
    if found:
        request("the same, beside sampling and decoding alone", "stable-diffusion.cpp", found, SD_CPP_BAR,
                SD_CPP_AIM)
    first, *later = [run["serving_seconds"] for run in figures_of("sdxl-start").get("runs", [])] or [None]
    row("SDXL, from the start of the process to SERVING, weights in the page cache, kernels known", "",
        f"{of_rounds(later)} s" if later else "", f"≤ {SDXL_START_BAR} s", f"{SDXL_START_AIM} s",
        [-each for each in later], -SDXL_START_BAR)
    if first is not None:
        row("the same, the first start on a machine, which measures its kernels", "", f"{first:.1f} s",
            f"≤ {SDXL_START_BAR} s", f"{SDXL_START_AIM} s", [-first], -SDXL_START_BAR)
    found = figures_of("emoji-cpu").get("seconds", [])
    row("emoji-64, 64², 16 guided steps, one request at an idle server on two cores of a CPU: text to PNG", "",
        f"{of_rounds(found)} s" if found else "", f"≤ {EMOJI_BAR} s", "", [-each for each in found], -EMOJI_BAR)
    return contexts, rows


def pipelines(data):
    contexts, rows = pipeline_rows(data)
    return origin(*contexts) + table(
        ["What", "Beside", "denoised", "Rounds", "Rows of an evaluation", "Reach", "Aim", ""],
        rows) + count_misses([row[-1] for row in rows])


def latent_errors(data):
    """Of each row, prompt or image."""
    file = data("latent-errors") or {"context": {}, "rows": []}
    rows, old = [], is_old(file["context"])
    for name, row in rows_by_name(file, ERROR_ROWS).items():
        ours, theirs = ((row or {}).get(side, []) for side in ("denoised", "diffusers"))
        shares = [our / their for our, their in zip(ours, theirs)]
        rows.append([ERROR_ROWS.get(name, name), *(
            "–" if not found else percent(found[0], 2) if len(found) == 1 else
            f"{percent(min(found), 2)} to {percent(max(found), 2)}" for found in (ours, theirs)),
            of_rounds(shares) if shares else "–", f"≤ {ERROR_BAR:g}",
            at_most(shares, ERROR_BAR, old, exact=len(shares) == 1)])
    return (origin(file["context"] | {"rounds": 1}) if file["rows"] else []) + table(
        ["What", "denoised's error", "diffusers'", "of it", "Bar", ""], rows) + count_misses(
            [row[-1] for row in rows])


def http(data):
    file = data("http")
    if not file or "http" not in file["figures"]:
        return [NOT_MEASURED]
    rows = []
    for row in file["figures"]["http"]["rows"]:
        size, spent = row["upload_bytes"], row["cpu_seconds"]
        what = f"a picture of {size / 1e3:,.0f} KB" if size else "no upload"
        rows.append([what, "gRPC", f"{1e3 * statistics.median(spent['gRPC']):.2f} ms", "", ""])
        for door in list(spent)[1:]:
            extra = [a - b for a, b in zip(spent[door], spent["gRPC"])]
            rows.append(["", door, f"{1e3 * statistics.median(spent[door]):.2f} ms",
                         f"{1e3 * statistics.median(extra):+.2f} ms ({1e3 * min(extra):+.2f} to "
                         f"{1e3 * max(extra):+.2f})", verdict([-each for each in extra], -HTTP_BAR,
                                                              is_old(file["context"]))])
    return origin(file["context"] | {"rounds": file["figures"]["http"]["rounds"]}) + table(
        ["Request", "Protocol", "CPU time of the server", f"beyond gRPC, bar {1e3 * HTTP_BAR:.1f} ms", ""],
        rows)


def event_streams(data):
    file = data("http")
    if not file or "event_streams" not in file["figures"]:
        return [NOT_MEASURED]
    found = file["figures"]["event_streams"]
    rounds = found["rounds"]
    first, second = found["resident_kib_halves"]
    completed = sum(each["completed"] for each in rounds)
    errors = sum(each["errors"] for each in rounds)
    left, error = found["heap_bytes_per_event"], found["error"]
    old = is_old(file["context"])
    rows = [[f"{len(rounds)} rounds of {found['streams']} streams at once, {found['slow']} of them with "
             f"slow readers, {sum(each['previews'] for each in rounds):,} previews", "no error",
             f"{completed:,} completed, {errors} errors",
             holds(errors == 0 and completed == found["streams"] * len(rounds), old)],
            ["heap that an event leaves, fitted after the first quarter", f"≤ {EVENT_BAR} bytes",
             f"{left:+.1f} ± {error:.1f} bytes of {sum(each['events'] for each in rounds):,} events",
             holds(left + 2 * error <= EVENT_BAR, old)],
            ["resident memory, mean of the earlier and the later half after it", "",
             f"{first / 1024:.1f} MiB and {second / 1024:.1f} MiB", ""],
            ["CPU time of a round", "",
             seconds(statistics.median(each["cpu_seconds"] for each in rounds)), ""]]
    return origin(file["context"] | {"rounds": len(rounds)}) + table(
        ["Benchmark", "Bar", "Measured", ""], rows)


def scheduling(data):
    file = data("scheduling")
    rows = []
    for each in file["comparisons"]:
        step, request = each["step"], each["request"]
        head = f"80 % of what {each['capacity_of']} batching can do"
        for name, mode in (("step", step), ("request", request)):
            rows.append([head, name, seconds(mode["p50_seconds"]), seconds(mode["p99_seconds"]),
                         number(mode["images_per_second"]),
                         f"{mode['first_preview_p50_evaluations']:.1f} / "
                         f"{mode['first_preview_p99_evaluations']:.1f} evaluations"])
            head = ""
        rows.append(["", "step ÷ request",
                     *(f"{step[key] / request[key]:.2f}" for key in
                       ("p50_seconds", "p99_seconds", "images_per_second")), ""])
    return origin(file["context"]) + table(
        ["Arrivals", "Batching", "p50", "p99", "Images/s", "First preview, p50 / p99"], rows)


def scheduling_mixed(data):
    file = data("scheduling-mixed")
    return origin(file["context"]) + table(
        ["Requests in flight", "Rows a second", "Of a uniform queue's", "Padding"],
        [[f"{each['in_flight']}", number(each["rows_per_second"]),
          percent(each["rows_per_second"] / each["uniform_rows_per_second"], 1),
          percent(each["padding"], 1)] for each in file["rows"]])


def scheduling_host(data):
    file = data("scheduling")
    return origin(file["context"]) + table(["Requests waiting", *(f"{each['waiting']:,}" for each in file["host"])],
                 [["Host time of an evaluation, median",
                   *(f"{each['host_us']:.0f} µs" for each in file["host"])]])


def page(data):
    file = data("page")
    old = is_old(file["context"])

    def row(what, values, bar=None, unit=" ms"):
        return [what, *(f"{f(values):.0f}{unit}" for f in (min, statistics.median, max)), "" if bar is None else f"≤ {bar}{unit}",
                verdict([-value for value in values], None if bar is None else -bar, old)]

    rows = [row(what, [each[name] for each in file["loads"]], bar) for name, what, bar in (
        ("first_paint", "First Contentful Paint", None), ("dom_content_loaded", "DOMContentLoaded", None),
        ("usable", "Models listed and the form enabled", None), ("interactive", "Time to Interactive", INTERACTIVE_BAR))]
    for count in dict.fromkeys(each["count"] for each in file["previews"]):
        some = [each for each in file["previews"] if each["count"] == count]
        pictures = "1 picture" if count == 1 else f"{count} pictures"
        rows.append(row(f"First preview on the screen, {pictures}: evaluations", [each["evaluations"] for each in some],
                        PREVIEW_BAR, unit=""))
        rows.append(row(f"First preview on the screen, {pictures}: after the click",
                        [each["milliseconds"] for each in some]))
    rows.append(["Size of the page", "", f"about {number(file['page_bytes'] / 1e3, 2)} KB", "",
                 f"≤ {PAGE_BAR / 1e3:.0f} KB",
                 holds(file["page_bytes"] <= PAGE_BAR, old)])
    return origin(file["context"]) + table(["", "Least", "Median", "Most", "Bar", ""], rows)


def headline(data):
    rows = []
    file = data("digits")
    ratio, label, rounds = min((ratio_of(peer), label, ratios_of(peer)) for row in file["rows"]
                               if row["name"] == "request"
                               for label, peer in row["peers"].items() if peer["pairs"])
    rows.append(["16 guided digits, a whole request, GPU", f"{label}, sampling alone",
                 times(ratio), verdict(rounds, DIGITS_BAR, is_old(file["context"]))])
    for row in file["rows"]:
        if row["name"] == "evaluations":
            label, _, ratio = best_of(row)
            rows.append(["their ten evaluations", label, times(ratio), ""])
    ratios = [best_of(row)[2] for row in data("models")["rows"] if best_of(row)]
    rows.append([f"One evaluation of a UNet, {len(ratios)} combinations of model and rows",
                 "the faster of PyTorch's ways below", f"{times(min(ratios))} to {times(max(ratios))}",
                 summary([each.verdict for _, each in compared_models(data).values()])])
    found = [(best_of(row), each.verdict) for row, each in compared_models(data, "latent").values()]
    ratios = [best[2] for best, _ in found if best]
    rows.append([f"One evaluation or decode of Stable Diffusion, {len(ratios)} combinations of model and rows",
                 "torch.compile, one graph", f"{times(min(ratios))} to {times(max(ratios))}" if ratios else "–",
                 summary([each for _, each in found])])
    contexts, served = pipeline_rows(data)
    rows.append(["Text to image, whole pipelines that are served", "see the table", "–",
                 summary([row[-1] for row in served])])
    for op, what, peer in (("conv", "3×3 convolutions", "cuDNN"),
                           ("conv_bias_residual_silu", "3×3 convolutions with bias, residual and SiLU",
                            "cuDNN and what follows"),
                           ("linear", "linear layers", "cuBLAS and cuBLASLt"),
                           ("attention", "attention", "the best of SDPA")):
        found = [each for _, each in compared_ops(data, OP_BARS[op], op).values()]
        ratios = [each.ratio for each in found if each.measured and each.whole]
        shapes = f"{len(found)}" if len(ratios) == len(found) else f"{len(ratios)} of {len(found)}"
        rows.append([f"{what}, {shapes} shapes", peer,
                     f"{times(min(ratios))} to {times(max(ratios))}, median "
                     f"{times(statistics.median(ratios))}" if ratios else "–",
                     summary([each.verdict for each in found])])
    return origin(*(context for name in ("digits", "models", "latent", "ops")
                    for context in contexts_of(data(name))), *contexts) + table(
        ["What", "Beside", RATIO, "Bars"], rows)


def speed(data):
    """README's sentences about speed: the least and the most of the UNets, and what is slower or misses."""
    networks = {"adm-64": "an ADM 64×64 UNet", "cifar10-32": "the CIFAR-10 UNet", "celebahq-256": "a 256×256 UNet"}
    rows = sorted((row for row in data("models")["rows"] if best_of(row)), key=lambda row: best_of(row)[2])

    def sentence(row):
        model, count = row["name"].split("/rows:")
        what = f"one row of {networks[model]} takes" if count == "1" else f"{count} rows of {networks[model]} take"
        label, peer, _ = best_of(row)
        return f"{what} {number(ours_of(row))} ms ({label.split(',')[0]}: {number(peer)} ms)"

    least, most = sentence(rows[0]), sentence(rows[-1])
    device = gpu_of(data("models")["context"])
    lines = [f"On one {device} in bf16, evaluations of UNets are {times(best_of(rows[0])[2])} to "
             f"{times(best_of(rows[-1])[2])} as fast as in PyTorch: {least}; {most}."]
    request = next(row for row in data("digits")["rows"] if row["name"] == "request")
    found = [each for name, (_, each) in compared_models(data, "latent").items() if "-unet/" in name]
    ratios = [each.ratio for each in found]

    def misses(of):
        count = [each.verdict for each in of].count(MISS)
        return f"{count} of {len(of)} rows {'misses its' if count == 1 else 'miss their'} bar"

    lines.append(f"{misses([each for _, each in compared_models(data).values()])}.")
    single = data("sd15-request")["figures"]["row"]

    def judged(row, bar):
        found = Compared(row, bar, {}).verdict
        return {MISS: ", a miss", NOISE: ", within noise of its bar"}.get(found, "")

    lines.append(f"A request for 16 digits is {times(best_of(request)[2])} as fast as "
                 f"PyTorch's sampling alone{judged(request, DIGITS_BAR)}. Stable Diffusion's UNets are {times(min(ratios))} to "
                 f"{times(max(ratios))} as fast; {misses(found)}. A request to SD 1.5, "
                 f"from text to PNG, is {times(best_of(single)[2])} as fast as diffusers' models in one CUDA graph"
                 f"{judged(single, REQUEST_BAR)}.")
    pairs = {row["name"]: row["peers"]["fp8"]["pairs"] for row in data("fp8")["rows"]}
    bf16, eight = (statistics.median(times) for times in zip(*pairs["sdxl-unet/rows:16"]))
    late = sum(statistics.median(pair[1] for pair in pairs[name]) > bar for name, bar in FP8_BARS.items())
    slower = sum(statistics.median(in_bf16 / in_fp8 for in_bf16, in_fp8 in each) < 1 for each in pairs.values())
    lines.append(f"In FP8, 16 rows of SDXL's UNet take {number(eight)} ms instead of {number(bf16)}; {slower} of "
                 f"{len(pairs)} evaluations take longer than in bf16. {len(FP8_BARS) - late} of {len(FP8_BARS)} pixel "
                 "UNets reach their bar for FP8.")
    return textwrap.wrap(" ".join(lines), 120, break_on_hyphens=False)


def train_curves(data, topic="train-curves"):
    """denoise-train beside PyTorch, by their distance from PyTorch in float64; see train_curves.py."""
    file = data(topic)
    losses, steps = file["losses"], file["steps"]
    few, last = steps // 20, steps // 8

    def distance(name, end):
        if len(losses[name]) < end:  # a shorter run
            return None
        squares = [(a / b - 1) ** 2 for a, b in zip(losses[name][:end], losses["float64"][:end])]
        return math.sqrt(statistics.fmean(squares))

    def loss(name):
        if len(losses[name]) < steps:
            return "–"
        return f"{statistics.fmean(losses[name][-last:]):.7f}"

    ours = [name for name in losses if name.startswith("denoise-train")]
    others = [name for name in losses if name not in ours and name != "float64"]
    rows = [["PyTorch, float64", "", "", loss("float64")]]
    rows += [[name if name in ours else f"PyTorch, {name}",
              *("–" if (found := distance(name, end)) is None else f"{found:.2e}"
                for end in (few, steps)), loss(name)]
             for name in (*ours, *others)]

    def between(names, end):
        found = [each for name in names if (each := distance(name, end)) is not None]
        least, most = f"{min(found):.1e}", f"{max(found):.1e}"
        runs = f"{len(found)} run" + "s" * (len(found) > 1)
        return f"{least} to {most} ({runs})" if least != most else f"{least} ({runs})"

    return table(["Run", f"Distance, first {few} steps", f"Distance, all {steps} steps",
                  f"Loss, last {last} steps"], rows) + [""] + [
        f"Over {what} steps, `denoise-train` lies {between(ours, end)} from float64, PyTorch's "
        f"float32 {between(others, end)}."
        for what, end in ((f"the first {few}", few), ("all", steps))]


def train_run(data, name="train-emoji-32"):
    """A run's own log: the loss as the mean of the logged steps of a tenth of the run."""
    file = data(name)
    steps, losses, norms, rates = zip(*file["log"])

    def of_tenth(values, i):
        return statistics.fmean(value for step, value in zip(steps, values)
                                if i * steps[-1] < 10 * step <= (i + 1) * steps[-1])

    return origin(file["context"]) + table(
        ["Steps up to", "Pictures seen", "Loss", "Gradient norm", "Pictures a second"],
        [[f"{steps[-1] * (i + 1) // 10:,}", f"{steps[-1] * (i + 1) // 10 * file['batch'] / 1e6:.2f} million",
          f"{of_tenth(losses, i):.4f}", f"{of_tenth(norms, i):.3f}", f"{of_tenth(rates, i):,.0f}"]
         for i in range(10)])


TABLES = {"speed": speed, "headline": headline, "digits": digits, "models": models, "latent": latent, "train": train, "train-cpu": train_cpu, "memory": memory, "loop": loop,
          "convolutions": convolutions, "other-convolutions": other_convolutions,
          "linears": linears, "attentions": attentions, "group-norms": group_norms,
          "convolution-gradients": convolution_gradients,
          "group-norm-gradients": group_norm_gradients, "attention-gradients": attention_gradients,
          "ceilings": ceilings, "clocks": clocks, "cpu": cpu,
          "cpu-xeon": lambda data: cpu(data, "cpu-xeon"), "portable": portable, "fp8": fp8, "fp8-ops": fp8_ops, "start": start,
          "weights": weights, "two-models": two_models, "engine": engine, "splits": splits,
          "serving": serving, "pipelines": pipelines, "latent-errors": latent_errors, "http": http, "event-streams": event_streams, "page": page,
          "scheduling": scheduling, "scheduling-mixed": scheduling_mixed,
          "scheduling-host": scheduling_host,
          "train-curves": train_curves, "train-run": train_run,
          "train-run-shared": lambda data: train_run(data, "train-emoji-32-shared"),
          "train-curves-mnist-32": lambda data: train_curves(data, "train-curves-mnist-32")}

ELSEWHERE = {"speed", "http", "event-streams", "train-cpu", "train-curves", "train-curves-mnist-32", "train-run", "train-run-shared"}  # not on docs/benchmarks.md


# The folders that decide what a table measures; of all others engine/ alone. A verdict is of the commit that was
# measured. Nobody can say for each change whether it matters, so a changed comment counts, too.
SERVED = ("headline", "digits", "start", "serving", "pipelines", "http", "event-streams", "page")
TRAINED = ("train", "train-cpu", "train-run", "train-run-shared")
COMMITS = re.compile(r"^(\*\S.*?\bcommit )([0-9a-f]{7,40}(?: and [0-9a-f]{7,40})*)", re.MULTILINE)
AGES = re.compile(r"(?<=[0-9a-f]) \((?:[a-z/, ]+ changed since|not in this history)\)")


def folders_of(name):
    return ("engine", "server") if name in SERVED else ("engine", "trainer") if name in TRAINED else ("engine",)


def git(*arguments):
    try:
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return subprocess.CompletedProcess(arguments, 127, "", "")


@functools.cache
def has_history():
    return git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"


@functools.cache
def changed_since(commit, folder):
    """Whether the folder's files are others than at the commit; None where git does not know the commit."""
    return {0: False, 1: True}.get(git("diff", "--quiet", commit, "--", folder).returncode)


def age(commits, folders):
    """ (engine/ changed since)"""
    found = {folder: [changed_since(commit, folder) for commit in commits] for folder in folders}
    if any(None in each for each in found.values()):
        return " (not in this history)"
    changed = [f"{folder}/" for folder in folders if any(found[folder])]
    return f" ({' and '.join(changed)} changed since)" if changed else ""


def aged(lines, name):
    """The lines of a table, with the age of each commit in the line of its origin."""
    if not has_history():
        return lines
    return [COMMITS.sub(lambda match: match[1] + match[2] + age(match[2].split(" and "), folders_of(name)), line)
            for line in lines]


def made(page, folder):
    """The page with its tables made anew."""
    read = {}

    def data(name):
        if name not in read:
            paths = [folder / f"{name}.json", *(folder / f"{name}-{i}.json" for i in range(2, 10))]
            files = [json.loads(path.read_text()) for path in paths if path.exists()]
            read[name] = combined(files) if len(files) > 1 else files[0] if files else None
        return read[name]

    def fill(match):
        name = match[2]
        if name not in TABLES:
            sys.exit(f"there is no table '{name}'; known: {', '.join(TABLES)}")
        return match[1] + "\n".join(["", *aged(TABLES[name](data), name), "", ""]) + match[3]

    return MARKED.sub(fill, page)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", type=Path, help="default: docs/benchmarks.md, docs/http.md, docs/training.md and README.md")
    parser.add_argument("--data", type=Path, default=ROOT / "docs/benchmarks")
    args = parser.parse_args()
    pages = [args.page] if args.page else [ROOT / "docs/benchmarks.md",
                                                    ROOT / "docs/http.md", ROOT / "docs/training.md",
                                                    ROOT / "README.md"]
    texts = {path: path.read_text() for path in pages}
    if args.page is None or args.page.name != "README.md":
        missing = [name for name in TABLES if not (args.page and name in ELSEWHERE) and
                   not any(f"<!-- table: {name} -->" in text for text in texts.values())]
        if missing:
            sys.exit(f"{', '.join(map(str, pages))}: no table {', '.join(missing)}")
    status = 0
    if not has_history():
        print("without the history of git, ages of commits are left out", file=sys.stderr)
    for path, text in texts.items():
        new = made(text, args.data)
        if args.check:
            text, new = AGES.sub("", text), AGES.sub("", new)
        if text == new:
            continue
        if not args.check:
            path.write_text(new)
            continue
        sys.stderr.writelines(difflib.unified_diff(text.splitlines(True), new.splitlines(True),
                                                   str(path), "what the figures make of it", n=1))
        print(f"{path} differs from the figures in {args.data}: run tests/bench/make_tables.py",
              file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
