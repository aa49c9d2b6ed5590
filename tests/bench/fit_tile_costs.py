#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fits the costs of Hopper's tiles (HopperTileCost in hopper_tiles.h) to what tile-costs measured.

usage: fit_tile_costs.py [--check] FILE.json…

Prints, for the device that the files are of, each row of kTiles with its old and new costs, the latter as
they are written there, and how much slower than the fastest tile the one is that the costs choose. A tile
keeps costs that it has too few samples for; --check fails then.

A launch is expected to take launch + steps · step (· busy) + finishes · finish + folds · fold. The sum of
squared relative errors is least, without negative costs; samples that are far off count less, and so do
tiles that are far slower than the fastest for a launch, which no cost should make a choice. Costs that the
samples do not tell stay near the old ones.
"""
import argparse
import json
import statistics
import sys
from pathlib import Path

FEWEST = 8              # samples of a tile, alone or in clusters that multicast
FEWEST_BUSY = 4         # of them with `busy` steps, to fit the factor
PRIOR = 0.03            # relative error that a cost of twice the old one counts as, in one more sample
FLOORS = {"launch": 0.5, "step": 0.05, "busy_step": 0.05, "finish": 0.5, "fold": 0.1}  # for the prior
DIGITS = {"launch": 2, "step": 3, "finish": 2, "busy": 2, "fold": 3}
ROUNDS = 12             # of reweighting
FORMS = ("single", "multicast")


def expected(tile, sample):
    cost = tile["multicast" if sample["multicasts"] else "single"]
    return (cost["launch"] + sample["steps"] * cost["step"] * (cost["busy"] if sample["busy"] else 1) +
            sample["finishes"] * cost["finish"] + sample["folds"] * tile["fold"])


def solved(matrix, values):
    """x with matrix · x = values; the matrix is symmetric and positive definite."""
    n = len(values)
    rows = [list(matrix[i]) + [values[i]] for i in range(n)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda row: abs(rows[row][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for below in rows[i + 1:]:
            factor = below[i] / rows[i][i]
            for j in range(i, n + 1):
                below[j] -= factor * rows[i][j]
    x = [0.0] * n
    for i in reversed(range(n)):
        x[i] = (rows[i][n] - sum(rows[i][j] * x[j] for j in range(i + 1, n))) / rows[i][i]
    return x


def least_squares(gram, values):
    """Non-negative x for which xᵀ · gram · x / 2 − values · x is least (Lawson and Hanson)."""
    n = len(values)
    x, free = [0.0] * n, []
    for _ in range(10 * n):
        slope = [values[i] - sum(gram[i][j] * x[j] for j in range(n)) for i in range(n)]
        held = [i for i in range(n) if i not in free and slope[i] > 1e-9 * gram[i][i] ** 0.5]
        if not held:
            break
        free.append(max(held, key=lambda i: slope[i] / gram[i][i] ** 0.5))
        while free:
            best = solved([[gram[i][j] for j in free] for i in free], [values[i] for i in free])
            if all(value > 0 for value in best):
                x = [0.0] * n
                for i, value in zip(free, best):
                    x[i] = value
                break
            way = min(x[i] / (x[i] - value) for i, value in zip(free, best) if value <= 0)
            for i, value in zip(free, best):
                x[i] += way * (value - x[i])
            free = [i for i in free if x[i] > 1e-12]
    return x


def terms(tile, sample, busy_forms):
    """What the unknowns are multiplied with."""
    form = "multicast" if sample["multicasts"] else "single"
    steps = sample["steps"]
    found = {(form, "launch"): 1, (form, "finish"): sample["finishes"], ("", "fold"): sample["folds"]}
    if sample["busy"] and form in busy_forms:
        found[form, "busy_step"] = steps
    else:
        found[form, "step"] = steps * (tile[form]["busy"] if sample["busy"] else 1)
    return {unknown: value for unknown, value in found.items() if value}


def old_value(tile, unknown):
    form, name = unknown
    if name == "fold":
        return tile["fold"]
    cost = tile[form]
    return cost["step"] * cost["busy"] if name == "busy_step" else cost[name]


def fitted(tile, samples):
    """The tile with new costs, and for each of its forms whether it has samples enough; a sample has the
    `weight` that it counts with."""
    by_form = {form: [sample for sample in samples if sample["multicasts"] == (form == "multicast")]
               for form in FORMS}
    enough = {form: len(by_form[form]) >= FEWEST for form in FORMS if tile[form]}
    samples = [sample for form in enough if enough[form] for sample in by_form[form]]
    if not samples:
        return tile, enough
    busy_forms = {form for form in enough
                  if sum(sample["busy"] for sample in by_form[form]) >= FEWEST_BUSY}
    rows = [{unknown: value / sample["measured"] for unknown, value in
             terms(tile, sample, busy_forms).items()} for sample in samples]
    unknowns = sorted({unknown for row in rows for unknown in row})
    index = {unknown: i for i, unknown in enumerate(unknowns)}
    rows = [[(index[unknown], value) for unknown, value in row.items()] for row in rows]
    old = [old_value(tile, unknown) for unknown in unknowns]
    x, n = old, len(unknowns)
    for _ in range(ROUNDS):
        errors = [sum(value * x[i] for i, value in row) - 1 for row in rows]
        scale = max(1.5 * statistics.median(abs(error) for error in errors), 0.005)
        gram, values = [[0.0] * n for _ in range(n)], [0.0] * n
        for i in range(n):
            weight = (PRIOR / max(old[i], FLOORS[unknowns[i][1]])) ** 2
            gram[i][i] += weight
            values[i] += weight * old[i]
        for row, sample, error in zip(rows, samples, errors):
            weight = sample.get("weight", 1) / (1 + (error / (2 * scale)) ** 2)
            for i, value in row:
                values[i] += weight * value
                for j, other in row:
                    gram[i][j] += weight * value * other
        x = least_squares(gram, values)
    new = json.loads(json.dumps(tile))
    for (form, name), value in zip(unknowns, x):
        if name == "fold":
            new["fold"] = round(value, DIGITS["fold"])
        elif name != "busy_step":
            new[form][name] = round(value, DIGITS[name])
    for form in busy_forms & {form for form in enough if enough[form]}:
        step = new[form]["step"]
        if step > 0:
            new[form]["busy"] = round(x[index[form, "busy_step"]] / step, DIGITS["busy"])
    if new["multicast"]:  # 0 would say that the tile does not multicast
        new["multicast"]["launch"] = max(new["multicast"]["launch"], 0.01)
    return new, enough


def initialiser(tile):
    """As in kTiles."""
    def form(cost):
        if not cost:
            return "{}"
        values = [cost["launch"], cost["step"], cost["finish"]] + ([cost["busy"]] if cost["busy"] != 1 else [])
        return "{" + ", ".join(f"{value:g}" if value % 1 else f"{value:.1f}" for value in values) + "}"
    parts = [form(tile["single"]), form(tile["multicast"]), f"{tile['fold']:g}", f"{tile['alone']:g}"]
    for default in ("1", "0", "{}"):  # what the struct has at its end anyway
        if parts[-1] != default:
            break
        parts.pop()
    return "{" + ", ".join(parts) + "}"


def losses(tiles, launches):
    """For each launch, how much slower than the fastest candidate the cheapest is, as a share."""
    found = []
    for launch in launches:
        candidates = launch["candidates"]
        cheapest = min(candidates, key=lambda each: expected(tiles[each["tile"]], each))
        found.append(cheapest["measured"] / min(each["measured"] for each in candidates) - 1)
    return found


def read(files):
    """The device, kTiles and the launches of all files."""
    found = [json.loads(Path(file).read_text()) for file in files]
    for file, each in zip(files, found):
        for name in ("device", "tiles"):
            if each[name] != found[0][name]:
                raise SystemExit(f"{file}: another {name} than in {files[0]}")
        for launch in each["launches"]:
            for sample in launch["candidates"]:
                told = expected(each["tiles"][sample["tile"]], sample)
                if abs(told - sample["expected"]) > 1e-6 * sample["expected"]:
                    raise SystemExit(f"{file}: {launch['launch']} by {sample['name']} is expected to take "
                                     f"{sample['expected']} µs, here {told}: MicrosecondsOf() in "
                                     "plan_hopper.cc is no longer that of expected()")
    return found[0]["device"], found[0]["tiles"], [launch for each in found for launch in each["launches"]]


def fit(tiles, launches):
    """The tiles with new costs, the number of samples of each form, and those that have too few."""
    samples = [[] for _ in tiles]
    for launch in launches:
        fastest = min(each["measured"] for each in launch["candidates"])
        for each in launch["candidates"]:
            samples[each["tile"]].append(each | {"weight": fastest / each["measured"]})
    new, counts, few = [], [], []
    for row, (tile, own) in enumerate(zip(tiles, samples)):
        fitted_tile, enough = fitted(tile, own)
        new.append(fitted_tile)
        multicasts = sum(each["multicasts"] for each in own)
        counts.append((len(own) - multicasts, multicasts))
        few += [f"row {row}, {tile['name']}{', multicast' if form == 'multicast' else ''}"
                for form in enough if not enough[form]]
    return new, counts, few


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    device, tiles, launches = read(arguments.files)
    new, counts, few = fit(tiles, launches)
    print(f"Costs on {device}, of {len(launches)} launches. Row, samples (single + multicast), costs")
    errors = [[] for _ in tiles]
    for launch in launches:
        for each in launch["candidates"]:
            errors[each["tile"]].append([abs(expected(of[each["tile"]], each) / each["measured"] - 1)
                                         for of in (tiles, new)])
    for row, (old, tile, (single, multicast)) in enumerate(zip(tiles, new, counts)):
        told = ""
        if errors[row]:
            before, after = (100 * statistics.median(column) for column in zip(*errors[row]))
            told = f", median error {before:.1f} % before, {after:.1f} % after"
        print(f"\n{row:2}  {old['name']}: {single} + {multicast}{told}\n"
              f"    old {initialiser(old)}\n    new {initialiser(tile)}")
    chosen = [launch for launch in launches if len(launch["candidates"]) > 1]
    print(f"\nThe cheapest tile is slower than the fastest, in {len(chosen)} launches with a choice by")
    for name, of in (("old", tiles), ("new", new)):
        slower = losses(of, chosen)
        if slower:
            worst = max(range(len(chosen)), key=slower.__getitem__)
            print(f"  {name} costs: {100 * statistics.mean(slower):.2f} % on average, at worst "
                  f"{100 * slower[worst]:.1f} % ({chosen[worst]['launch']})")
    if few:
        print("\nToo few samples, so that costs were kept:\n  " + "\n  ".join(few))
    return 1 if arguments.check and few else 0


if __name__ == "__main__":
    sys.exit(main())
