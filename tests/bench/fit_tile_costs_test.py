#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fit_tile_costs.py: finds the costs that times were made of, and keeps those that no times tell."""
import copy
import json
import random
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import fit_tile_costs


def cost(launch, step, finish, busy=1.0):
    return {"launch": launch, "step": step, "finish": finish, "busy": busy}


TRUE = [
    {"name": "128x128", "single": cost(1.4, 0.364, 0.9, 1.12), "multicast": cost(1.8, 0.386, 0.8, 1.07),
     "fold": 0.28, "alone": 1.0},
    {"name": "few pixels 64x64", "single": cost(0.6, 0.3, 2.3), "multicast": None, "fold": 0.23,
     "alone": 0.89},
    {"name": "192x192", "single": cost(1.0, 0.82, 1.5, 1.04), "multicast": None, "fold": 0.0, "alone": 1.0},
]


def old_tiles():
    tiles = copy.deepcopy(TRUE)
    for tile in tiles[:2]:
        for form in fit_tile_costs.FORMS:
            if tile[form]:
                tile[form] = cost(2.5, 0.5, 0.5)
        tile["fold"] = 0.4
    return tiles


def samples(random_, tile, count):
    """Of a launch in each form of the tile, with times that are a percent off, and a few far more."""
    row = TRUE[tile]
    found = []
    for _ in range(count):
        waves = random_.randint(1, 12)
        folds = waves * random_.choice((0, 2, 4)) if row["fold"] else 0
        for multicasts in (False, True) if row["multicast"] else (False,):
            sample = {"tile": tile, "name": row["name"], "multicasts": multicasts, "busy": waves > 4,
                      "steps": waves * random_.randint(1, 120), "finishes": waves, "folds": folds}
            sample["expected"] = fit_tile_costs.expected(old_tiles()[tile], sample)
            sample["measured"] = (fit_tile_costs.expected(row, sample) * random_.gauss(1, 0.01) *
                                  (random_.choice((0.7, 1.6)) if random_.random() < 0.06 else 1))
            found.append(sample)
    return found


def made_launches(few=5):
    random_ = random.Random(3)
    launches = []
    for tile, count in ((0, 300), (1, 300), (2, few)):
        launches += [{"launch": str(i), "candidates": samples(random_, tile, 1)} for i in range(count)]
    return launches


class FitTileCostsTest(unittest.TestCase):
    def test_the_costs_are_found(self):
        new, counts, _ = fit_tile_costs.fit(old_tiles(), made_launches())
        self.assertEqual(counts[:2], [(300, 300), (300, 0)])
        for tile, true in zip(new[:2], TRUE):
            for form in fit_tile_costs.FORMS:
                if true[form] is None:
                    self.assertIsNone(tile[form])
                    continue
                for name, tolerance in (("launch", 0.15), ("step", 0.006), ("finish", 0.15), ("busy", 0.02)):
                    self.assertAlmostEqual(tile[form][name], true[form][name], delta=tolerance,
                                           msg=f"{true['name']}, {form}, {name}")
            self.assertAlmostEqual(tile["fold"], true["fold"], delta=0.04)
            self.assertEqual(tile["alone"], true["alone"])

    def test_a_tile_with_few_samples_keeps_its_costs(self):
        old = old_tiles()
        old[2]["single"] = cost(9, 9, 9, 9)
        for few, kept in ((7, True), (8, False)):
            new, _, lacking = fit_tile_costs.fit(old, made_launches(few))
            self.assertEqual(new[2] == old[2], kept, few)
            self.assertEqual(lacking, ["row 2, 192x192"] if kept else [])

    def test_no_cost_is_negative(self):
        # Times that fall with the finishes: the sum is least where that cost is zero.
        tile = {"name": "a", "single": cost(1, 1, 1), "multicast": None, "fold": 0.0, "alone": 1.0}
        falling = [{"multicasts": False, "busy": False, "steps": 10 + i, "finishes": i + 1, "folds": 0,
                    "measured": 20 + i - 0.3 * (i + 1)} for i in range(12)]
        new, _ = fit_tile_costs.fitted(tile, falling)
        self.assertGreaterEqual(min(new["single"].values()), 0)
        self.assertLess(new["single"]["finish"], 0.3)

    def test_the_choice_is_judged(self):
        tiles = old_tiles()
        either = [{"launch": "a", "candidates": [
            {"tile": 0, "multicasts": False, "busy": False, "steps": 10, "finishes": 1, "folds": 0,
             "measured": 12.0},
            {"tile": 2, "multicasts": False, "busy": False, "steps": 10, "finishes": 1, "folds": 0,
             "measured": 10.0}]}]
        self.assertAlmostEqual(fit_tile_costs.losses(tiles, either)[0], 0.2)
        tiles[0]["single"]["launch"] = 90
        self.assertEqual(fit_tile_costs.losses(tiles, either), [0])

    def test_costs_are_written_as_in_the_table(self):
        self.assertEqual([fit_tile_costs.initialiser(tile) for tile in TRUE],
                         ["{{1.4, 0.364, 0.9, 1.12}, {1.8, 0.386, 0.8, 1.07}, 0.28}",
                          "{{0.6, 0.3, 2.3}, {}, 0.23, 0.89}", "{{1.0, 0.82, 1.5, 1.04}}"])

    def test_check_fails_for_lack_of_samples(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "costs.json"

            def run(launches, *flags):
                file.write_text(json.dumps({"device": "NVIDIA H200", "tiles": old_tiles(),
                                            "launches": launches}))
                return subprocess.run([sys.executable, HERE / "fit_tile_costs.py", *flags, file],
                                      capture_output=True, text=True)
            done = run(made_launches(20), "--check")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn("Costs on NVIDIA H200", done.stdout)
            done = run(made_launches(5), "--check")
            self.assertEqual(done.returncode, 1)
            self.assertIn("row 2, 192x192", done.stdout)
            self.assertEqual(run(made_launches(5)).returncode, 0)
            launches = made_launches(5)
            launches[0]["candidates"][0]["expected"] *= 1.01
            done = run(launches)
            self.assertEqual(done.returncode, 1)
            self.assertIn("MicrosecondsOf()", done.stderr)


if __name__ == "__main__":
    unittest.main()
