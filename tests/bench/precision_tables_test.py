#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""precision_tables.py: docs/models.md has its tables; a GPU's row is put in, judged and replaced."""
import json
import sys
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent.parent / "docs"
sys.path.insert(0, str(HERE))
import precision_tables

CPU = {"model": "models/mnist-32", "images": 200, "relative_error": {"bf16": 0.01, "fp8": 0.1}}
FOUND = {"model": "models/mnist-32", "device": "cuda", "images": 10_000,
         "relative_error": {"bf16": 0.01, "fp8": 0.1}}


def read(bf16, fp8, images=10_000):
    return {name: {"images": images, "misread": [{}] * misread}
            for name, misread in (("fp32", 60), ("bf16", bf16), ("fp8", fp8))}


class PrecisionTablesTest(unittest.TestCase):
    def test_the_page_has_the_tables(self):
        page = (DOCS / "models.md").read_text()
        measured = json.loads((DOCS / "benchmarks/precision.json").read_text())
        self.assertIn("\n".join(precision_tables.errors_table(measured["models"])), page)
        self.assertIn("\n".join(precision_tables.scales_table(measured["scales"])), page)
        self.assertIn("\n".join(precision_tables.layers_table(measured["scales"])), page)

    def test_a_later_run_on_the_same_device_replaces_the_row(self):
        other = CPU | {"model": "tests/models/latent/lcm"}
        rows = precision_tables.added([CPU, other], FOUND, read(60, 60), "NVIDIA H100 80GB HBM3", "a")
        rows = precision_tables.added(rows, FOUND, read(60, 90), "NVIDIA H100 80GB HBM3", "b")
        self.assertEqual([row.get("commit") for row in rows], [None, "b", None])
        self.assertIn("| mnist-32, H100 at b | 10,000 |", precision_tables.errors_table(rows)[3])

    def test_fp8_may_be_three_tenths_of_a_point_below_bf16(self):
        for misread, verdict in ((60, "+0.00 points, met"), (90, "−0.30 points, met"),
                                 (91, "−0.31 points, **miss**")):
            row, = precision_tables.added([], FOUND, read(60, misread), "NVIDIA H200", "a")
            self.assertEqual(precision_tables.verdict(row), verdict)
        few, = precision_tables.added([], FOUND | {"images": 200}, read(0, 0, 200), "NVIDIA H200", "a")
        self.assertEqual(precision_tables.verdict(few), "")


if __name__ == "__main__":
    unittest.main()
