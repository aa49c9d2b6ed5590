#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the tables of docs/models.md, Precision, from docs/benchmarks/precision.json.

usage: precision_tables.py [--data=docs/benchmarks/precision.json]
                           [--add=FILE --device="NVIDIA H200" --commit=COMMIT]
--add first puts into the data what precision-errors printed on a GPU, in place of the model's row of the
same device. Beside FILE may lie read-fp32.json, read-bf16.json and read-fp8.json: what
tests/reference/classify.py printed for the images that --save wrote. Rows without a device are of a CPU.
"""
import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PRECISIONS = ("fp32", "bf16", "fp8")
READ_BAR, ENOUGH_IMAGES = 0.003, 10_000  # fp8 below bf16; fewer images do not show such a difference


def percent(value):
    return f"{100 * value:.2g} %"


def row_key(row):
    return row["model"], row.get("device", "")


def added(rows, found, read, device, commit):
    """The rows with what precision-errors `found` and what was `read` of its images, by precision."""
    row = found | {"device": device, "commit": commit}
    if read:
        for name, each in read.items():
            if each["images"] != found["images"]:
                raise SystemExit(f"read-{name}.json is of {each['images']} images, not of {found['images']}")
        row["read_as_label"] = {name: round(1 - len(each["misread"]) / each["images"], 6)
                                for name, each in read.items()}
    others = [each for each in rows if row_key(each) != row_key(row)]
    place = max((i + 1 for i, each in enumerate(others) if each["model"] == row["model"]),
                default=len(others))
    return others[:place] + [row] + others[place:]


def verdict(row):
    """Whether fp8's digits are read as asked as often as bf16's, nearly."""
    read = row.get("read_as_label", {})
    if row["images"] < ENOUGH_IMAGES or not read:
        return ""
    points = round(read["fp8"] - read["bf16"], 6)
    return f"{100 * points:+.2f} points, ".replace("-", "−") + ("met" if points >= -READ_BAR else "**miss**")


def errors_table(rows):
    lines = ["| Model | Images | bf16 | fp8 | Read as asked: fp32, bf16, fp8 | "
             f"fp8 beside bf16, bar −{100 * READ_BAR:.1f} points |", "|---|---|---|---|---|---|"]
    for row in rows:
        name = Path(row["model"]).name
        if "device" in row:
            name += f", {row['device'].removeprefix('NVIDIA ').split()[0]} at {row['commit']}"
        errors, read = row["relative_error"], row.get("read_as_label", {})
        lines.append(f"| {name} | {row['images']:,} | {percent(errors.get('bf16', 0))} | "
                     f"{percent(errors['fp8'])} | "
                     f"{', '.join(f'{100 * each:.4g} %' for each in read.values())} | {verdict(row)} |")
    return lines


def scales_table(measured):
    scales = measured["scales"] | {"1": measured["relative_error"]["fp8"]}
    factors = sorted(scales, key=float)
    return ["| Scales times | " + " | ".join(factors) + " |", "|" + "---|" * (len(factors) + 1),
            "| error of mnist-32 | " + " | ".join(percent(scales[each]) for each in factors) + " |"]


def layers_table(measured, worst=5):
    """The layers that alone in e4m3 make the largest errors, and what all others make at most."""
    layers = sorted(measured["layers"].items(), key=lambda layer: -layer[1])
    rest = f"each of the other {len(layers) - worst}, at most"
    rows = layers[:worst] + [(rest, layers[worst][1]),
                             (f"all {len(layers)}", measured["relative_error"]["fp8"])]
    return ["| In e4m3 | error of mnist-32 |", "|---|---|"] + [
        f"| {f'`{name}`' if '.' in name else name} | {percent(error)} |" for name, error in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT / "docs/benchmarks/precision.json")
    parser.add_argument("--add", type=Path, metavar="FILE")
    parser.add_argument("--device", help="of --add: the GPU, as nvidia-smi names it")
    parser.add_argument("--commit", help="of --add: what was measured")
    args = parser.parse_args()
    measured = json.loads(args.data.read_text())
    if args.add:
        if not args.device or not args.commit:
            parser.error("--add needs --device and --commit")
        files = {name: args.add.parent / f"read-{name}.json" for name in PRECISIONS}
        read = {name: json.loads(file.read_text()) for name, file in files.items()
                } if any(file.exists() for file in files.values()) else {}
        measured["models"] = added(measured["models"], json.loads(args.add.read_text()), read,
                                   args.device, args.commit)
        args.data.write_text(json.dumps(measured, indent=1) + "\n")
    print("\n".join(errors_table(measured["models"])))
    if "scales" in measured:
        print("\n" + "\n".join(scales_table(measured["scales"])))
        if "layers" in measured["scales"]:
            print("\n" + "\n".join(layers_table(measured["scales"])))


if __name__ == "__main__":
    main()
