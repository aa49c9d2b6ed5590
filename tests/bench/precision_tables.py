#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the tables of docs/models.md, Precision, from docs/benchmarks/precision.json.

usage: precision_tables.py [docs/benchmarks/precision.json]
The file holds what precision-errors prints for each model, with `read_as_label` where
tests/reference/classify.py read the images that --save wrote.
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def percent(value):
    return f"{100 * value:.2g} %"


def main():
    path = sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs/benchmarks/precision.json"
    measured = json.loads(pathlib.Path(path).read_text())
    print("| Model | Images | bf16 | fp8 | Read as asked: fp32, bf16, fp8 |\n|---|---|---|---|---|")
    for model in measured["models"]:
        name = pathlib.Path(model["model"]).name
        errors = model["relative_error"]
        read = model.get("read_as_label", {})
        print(f"| {name} | {model['images']} | {percent(errors.get('bf16', 0))} | "
              f"{percent(errors['fp8'])} | {', '.join(f'{100 * r:.1f} %' for r in read.values())} |")
    if "scales" in measured:
        scales = dict(measured["scales"]["scales"])
        scales["1"] = measured["scales"]["relative_error"]["fp8"]
        factors = sorted(scales, key=float)
        print("\n| Scales times | " + " | ".join(factors) + " |\n|" + "---|" * (len(factors) + 1))
        print("| error of mnist-32 | " + " | ".join(percent(scales[f]) for f in factors) + " |")


if __name__ == "__main__":
    main()
