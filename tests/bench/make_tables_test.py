#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""make_tables.py: the page is what the figures make of it, and a difference or a miss is seen."""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent.parent / "docs"

sys.path.insert(0, str(HERE))
import make_tables
import serving


def run(*flags):
    return subprocess.run([sys.executable, HERE / "make_tables.py", *flags], capture_output=True,
                          text=True, check=False)


class PageTest(unittest.TestCase):
    def test_the_page_is_what_the_figures_make_of_it(self):
        done = run("--check")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_every_file_of_figures_says_where_it_comes_from(self):
        for path in (DOCS / "benchmarks").glob("*.json"):
            figures = json.loads(path.read_text())
            if "context" in figures:  # the others are older than this format
                self.assertRegex(figures["context"]["date"], r"^\d{4}-\d\d-\d\d", path.name)
                self.assertTrue(figures["context"]["device"], path.name)


class DifferenceTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.page, self.data = self.folder / "page.md", self.folder / "data"
        shutil.copy(DOCS / "benchmarks.md", self.page)
        shutil.copytree(DOCS / "benchmarks", self.data)
        for path in self.data.glob("*-[2-9].json"):
            if not path.name.startswith(("digits-cpu", "models")):  # these have rows of their own
                path.unlink()  # further runs, which would hide a change in the first
        self.remake()

    def check(self):
        return run("--check", f"--page={self.page}", f"--data={self.data}")

    def remake(self):
        done = run(f"--page={self.page}", f"--data={self.data}")
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.page.read_text()

    def change(self, name, change):
        path = self.data / f"{name}.json"
        figures = json.loads(path.read_text())
        change(figures)
        path.write_text(json.dumps(figures))

    def test_a_cell_changed_by_hand_is_seen(self):
        text = self.page.read_text()
        row = re.search(r"^\| cifar10-32 \| 1 \|.*$", text, re.MULTILINE)[0]
        self.page.write_text(text.replace(row, re.sub(r"[\d.]+×", "9.99×", row, count=1), 1))
        done = self.check()
        self.assertEqual(done.returncode, 1)
        self.assertIn(row, done.stderr)

    def test_a_page_that_is_slow_misses_its_bar(self):
        def slow(figures):
            for each in figures["loads"]:
                each["interactive"] = 500

        def row():
            return re.search(r"^\| Time to Interactive \|.*$", self.remake(), re.MULTILINE)[0]

        self.change("page", slow)
        self.assertIn(make_tables.MISS, row())

    def test_a_figure_changed_in_the_json_is_seen(self):
        def slower(figures):
            for peer in figures["rows"][0]["peers"].values():
                peer["pairs"] = [[2 * ours, theirs] for ours, theirs in peer["pairs"]]

        self.change("models", slower)
        self.assertEqual(self.check().returncode, 1)
        self.remake()
        self.assertEqual(self.check().returncode, 0)

    def test_a_table_that_was_removed_is_seen(self):
        self.page.write_text(self.page.read_text().replace("<!-- table: linears -->", ""))
        done = self.check()
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("linears", done.stderr)

    def test_the_unrounded_ratio_decides_and_a_miss_is_marked(self):
        def almost(figures):
            # 2.4996× is written 2.50×, its bar
            row = next(row for row in figures["rows"] if row["name"] == "cifar10-32/rows:1")
            row["peers"] = {"torch.compile, one graph": {"pairs": [[1.0, 2.4996]] * 3}}
            figures["context"].pop("source", None)

        self.change("models", almost)
        row = re.search(r"^\| cifar10-32 \| 1 \|.*$", self.remake(), re.MULTILINE)[0]
        self.assertIn("2.50×", row)
        self.assertIn("**miss**", row)
        self.assertRegex(self.page.read_text(), r"\d \*\*miss\*\*")

    def test_a_row_without_figures_is_said_and_not_met(self):
        self.change("models", lambda figures: figures["rows"].pop(0))
        self.change("ops", lambda figures: figures["rows"].pop(-1))
        text = self.remake()
        row = re.search(r"^\|[^|]*\| 16 \| – ms.*$", text, re.MULTILINE)[0]
        self.assertIn("**not measured**", row)
        self.assertRegex(text, r"\d of 7 rows reach their bar \(.*1 \*\*not measured\*\*")
        self.assertIn("| [16, 256, 128] | –", text)

    def test_a_later_run_replaces_the_rows_that_it_measured(self):
        first = json.loads((self.data / "ops.json").read_text())
        names = [row["name"] for row in first["rows"] if row["name"].startswith("linear/")][:3]
        rows = [{"name": name, "unit": "us", "searched": searched, "ours": {},
                 "peers": {"cuBLAS": {"pairs": pairs}, "cuBLASLt": {"pairs": pairs}}}
                for name, searched, pairs in zip(names, (True, False, True),
                                                 ([[1.0, 7.0]], [[1.0, 7.0]], []))]
        second = {"context": first["context"] | {"date": "2099-01-01", "commit": "later"},
                  "rows": rows}
        (self.data / "ops-2.json").write_text(json.dumps(second))
        text = self.remake()
        linears = text.split("<!-- table: linears -->")[1].split("<!-- end -->")[0]
        self.assertEqual(linears.count("7.00×"), 1, "neither what was not searched nor what failed")
        self.assertIn("commit later", linears)
        self.assertIn(f"commit {first['context']['commit']}", linears)
        attentions = text.split("<!-- table: attentions -->")[1].split("<!-- end -->")[0]
        self.assertNotIn("commit later", attentions)
        self.assertEqual(self.check().returncode, 0)

    def test_noise_rounds_searches_and_old_figures(self):
        row = {"peers": {"cuDNN": {"pairs": [[1, 0.98], [1, 1.03]]}}, "us": 1, "searched": True}
        each = make_tables.Compared(row, 1.0, {"rounds": 3})
        self.assertEqual(each.verdict, make_tables.NOISE)
        self.assertIn("(0.98–1.03), 2 of 3 rounds", each.cell())
        self.assertEqual(make_tables.Compared(row | {"searched": False}, 0.9, {}).verdict,
                         make_tables.NOT_SEARCHED)
        self.assertEqual(make_tables.Compared(row, 0.9, {"source": "x"}).verdict, make_tables.OLD)
        # One sample proves nothing that is timed, and all that is counted.
        self.assertEqual(make_tables.verdict([9.0], 1), make_tables.NOISE)
        self.assertEqual(make_tables.verdict([9.0], 1, exact=True), make_tables.MET)
        self.assertEqual(make_tables.verdict([0.9], 1), make_tables.MISS)
        # The median decides, even where some rounds reach the bar.
        self.assertEqual(make_tables.verdict([0.9, 0.95, 1.1], 1), make_tables.MISS)
        self.assertEqual(make_tables.verdict([0.9, 0.95, 1.1], 1, searched=False), make_tables.MISS)
        self.assertEqual(make_tables.verdict([1.1] * 4 + [0.9] * 8, 1), make_tables.MISS)
        # Four in five rounds must reach the bar, however many there are.
        for over, under, found in ((9, 1, make_tables.MET), (8, 2, make_tables.MET), (7, 3, make_tables.NOISE),
                                   (5, 5, make_tables.NOISE), (4, 1, make_tables.MET), (3, 1, make_tables.NOISE),
                                   (3, 0, make_tables.MET), (2, 1, make_tables.NOISE), (79, 21, make_tables.NOISE)):
            self.assertEqual(make_tables.verdict([1.02] * over + [0.9999] * under, 1), found, (over, under))
        self.assertEqual(make_tables.at_most([3.0] * 8 + [3.1] * 2, 3), make_tables.MET)
        self.assertEqual(make_tables.at_most([2.9] * 7 + [3.1] * 3, 3), make_tables.NOISE)

    def test_a_peer_that_was_not_searched_to_the_end_can_only_make_a_row_miss(self):
        row = {"name": "linear/rows:1/tokens:1/in:8/out:8", "unit": "us",
               "peers": {"cuBLASLt": {"pairs": [[1.0, 1.2]] * 3}}}
        heuristics = row | {"cublaslt": {"algorithms_us": [1.2] * 8}}
        self.assertEqual(make_tables.Compared(heuristics, 1.0, {}).verdict, make_tables.NOT_SEARCHED)
        self.assertEqual(make_tables.Compared(heuristics, 1.3, {}).verdict, make_tables.MISS)
        whole = row | {"cublaslt": {"algorithms_us": [1.2] * 16}}
        self.assertEqual(make_tables.Compared(whole, 1.0, {}).verdict, make_tables.MET)
        left = row | {"searched": True, "not_tried": 3}
        self.assertEqual(make_tables.Compared(left, 1.0, {}).verdict, make_tables.NOT_SEARCHED)
        self.assertIn("²", make_tables.Compared(row | {"not_tried": 2}, 0.9, {}).cell())

    def test_figures_of_the_old_method_get_no_verdict_in_any_table(self):
        def count(change):
            for path in self.data.glob("*.json"):
                if "context" in json.loads(path.read_text()):
                    self.change(path.stem, change)
            text = "".join(make_tables.made((DOCS / name).read_text(), self.data)
                           for name in ("benchmarks.md", "http.md"))
            cells = re.findall(r"(?<=\| )[^|\n]*(?= \|)", text)
            return {each: sum(cell.endswith(each) for cell in cells)
                    for each in (make_tables.MET, make_tables.MISS, make_tables.NOISE,
                                 make_tables.OLD)}

        def renew(figures):
            for reason in ("source", "stale"):
                figures["context"].pop(reason, None)

        new = count(renew)
        self.assertEqual(new[make_tables.OLD], 0)
        self.assertGreater(new[make_tables.MET], 50)
        old = count(lambda figures: figures["context"].update(source="an older page"))
        self.assertEqual({each for each in old if old[each]}, {make_tables.OLD})

    def test_without_a_search_nothing_is_called_cudnn_but_a_convolution_alone(self):
        def unsearched(figures):
            for row in figures["rows"]:
                if row["name"].startswith("conv"):
                    row["searched"] = False
                    row["peers"] = {"cuDNN, PyTorch's choice": {"pairs": [[1.0, 77.0]]}}

        self.change("ops", unsearched)
        text = self.remake()
        fused, other = (re.findall(r"77\.0 \| ([^|]*) \| 77\.00×", text.split(
            f"<!-- table: {name} -->")[1].split("<!-- end -->")[0])
            for name in ("convolutions", "other-convolutions"))
        self.assertEqual(set(fused + other), {"PyTorch, eager"})
        self.assertGreater(min(len(fused), len(other)), 10)

    def test_the_summary_leaves_out_what_was_not_searched(self):
        def add(figures):
            rows = [row for row in figures["rows"] if row["name"].startswith("conv/")]
            for row in rows:
                row["searched"] = False
                row["peers"] = {"cuDNN": {"pairs": [[1.0, 77.0]]}}
            rows[0] |= {"searched": True, "peers": {"cuDNN": {"pairs": [[1.0, 1.5]]}}}

        self.change("ops", add)
        self.assertRegex(self.remake(), r"\| 3×3 convolutions, 1 of \d+ shapes \| cuDNN \| "
                                        r"1\.50× to 1\.50×, median 1\.50× \|")


def served(mix, *rates):
    """Rounds of a full queue, images per second."""
    rows = 10 * make_tables.rows_of_image(mix)
    return {"mix": mix, "rounds": [{"server": {"rows": rows * rate, "time": 10,
                                               "evaluations": rows * rate / 16}} for rate in rates]}


class PipelinesTest(unittest.TestCase):
    def table(self, load=0.0, **files):
        context = {"date": "2026-11-25", "device": "a GPU", "load_average": load, "cores": 16}
        files = {name.replace("_", "-"): {"context": context, "figures": figures}
                 for name, figures in files.items()}
        files["latent"] = {"context": context, "rows": [
            {"name": name, "peers": {"torch.compile": {"pairs": [[1.0, ms]]}}}
            for name, ms in (("sd15-unet/rows:16", 8.0), ("sdxl-vae@64/rows:8", 40.0))]}
        return "\n".join(make_tables.TABLES["pipelines"](files.get))

    def test_each_row_has_its_verdict(self):
        row = {"name": "text to PNG", "peers": {"diffusers": {"pairs": [[100, 170], [100, 180]]}}}
        text = self.table(
            sd15=served("steps=20,guidance=7.5,sampler=ddim", 15.1, 15.3),
            sdxl=served("steps=20,guidance=5", 1.9, 1.94), sdxl_lcm=served("steps=4", 12.9, 13.1),
            sdxl_mixed={"mixed": ["x"] * 36, "pairs": [[86.0, 100.0], [45.0, 50.0]],
                        "pixel_pairs": [[86e6, 101e6], [44e6, 50e6]]},
            sd15_request={"row": row, "ms_alone": [100], "first_previews": [{"evaluations": 2.5}] * 2},
            sdxl_start={"runs": [{"serving_seconds": 9.0}, {"serving_seconds": 2.0}, {"serving_seconds": 2.0}]},
            emoji_cpu={"seconds": [1.5, 1.7]})
        for cells in ("| 40.0: torch.compile's parts (0.38×) | 15.2 (15.1–15.3) | 2 | 16.0 | ≥ 15 | 17 | **miss** |",
                      "| 1.92 (1.90–1.94) | 2 | 16.0 | ≥ 1.95 | 2.2 | **miss** |",
                      "| ≥ 13 | 16 | within noise |",
                      "a queue of 36 kinds of requests",
                      "| 88.0 % (86.0 % to 90.0 %): 65.5 of 75.0; megapixels/s 86.6 % (85.1 % to 88.0 %): 65.0 of 75.5 "
                      "| 2 | –; uniform – | ≥ 85 % | 95 % | met |",
                      "| 2.50 (2.50–2.50) | 2 |  | ≤ 3 |  | met |",
                      "| 175 ms: diffusers | 100 ms: 1.75× (1.70–1.80) | 2 |  | ≥ 1.6× | 1.8× | met |",
                      "| 2.00 (2.00–2.00) s | 2 |  | ≤ 6 s | 3 s | met |",
                      "the first start on a machine, which measures its kernels |  | 9.0 s | 1 |  | ≤ 6 s | 3 s | **miss** |",
                      "| 1.60 (1.50–1.70) s | 2 |  | ≤ 3 s |  | met |"):
            self.assertIn(cells, text)
        self.assertEqual(text.count("| – | – | – | ≥"), 4, "SD-Turbo and FP8 were not measured")
        self.assertIn("5 of 13 rows reach their bar", text)

    def test_a_mixed_queue_needs_its_pixels_as_well(self):
        figures = {"pairs": [[86.0, 100.0]] * 2, "pixel_pairs": [[84.0, 100.0]] * 2}
        self.assertIn("| ≥ 85 % | 95 % | **miss** |", self.table(sdxl_mixed=figures))

    def test_rows_of_an_image(self):
        for mix, rows in (("steps=20,guidance=7.5", 40), ("steps=4", 4), ("steps=1,guidance=1", 1)):
            self.assertEqual(make_tables.rows_of_image(mix), rows)

    def test_stable_diffusion_cpp_has_a_row_once_it_was_measured(self):
        self.assertNotIn("stable-diffusion.cpp", self.table())
        row = {"peers": {"stable-diffusion.cpp --fa": {"pairs": [[100, 500], [100, 520]]}}}
        text = self.table(sd15_sd_cpp={"row": row})
        self.assertIn("| 510 ms: stable-diffusion.cpp --fa | 100 ms: 5.10× (5.00–5.20) | 2 |  | ≥ 4× | 8× | met |",
                      text)
        self.assertIn("1 of 13 rows reach their bar", text)
        row["peers"] = {}
        self.assertIn("| stable-diffusion.cpp | – | – |  | ≥ 4× | 8× | **not measured** |",
                      self.table(sd15_sd_cpp={"row": row}))

    def test_a_loaded_host_gives_no_verdict(self):
        row = {"peers": {"stable-diffusion.cpp": {"pairs": [[100, 500], [100, 520]]}}}
        self.assertIn("| no verdict: loaded host |", self.table(load=3.0, sd15_sd_cpp={"row": row}))
        row["peers"]["stable-diffusion.cpp"]["pairs"] = [[100, 300]] * 2
        self.assertIn("3.00× (3.00–3.00) | 2 |  | ≥ 4× | 8× | **miss** |",
                      self.table(load=3.0, sd15_sd_cpp={"row": row}))

    def test_a_peer_on_another_gpu_is_named_and_not_compared(self):
        for rate, found in ((150, "met"), (110, "**miss**")):
            self.assertIn(f"RTX 4090 | {rate} ({rate}–{rate}) | 2 | 16.0 | ≥ 130 | 170 | {found} |",
                          self.table(sd_turbo=served("steps=1,guidance=1", rate, rate)))

    def test_without_a_peer_the_time_is_shown_and_not_judged(self):
        text = self.table(sd15_request={"row": {"peers": {}}, "ms_alone": [90, 110], "first_previews": []})
        self.assertIn("| 100 ms, no peer | 2 |  | ≥ 1.6× | 1.8× | **not measured** |", text)


class GradientsTest(unittest.TestCase):
    def table(self, name, *rows):
        context = {"date": "2026-11-25", "device": "a GPU"}
        return make_tables.TABLES[name](
            {"train-ops": {"context": context, "rows": list(rows)}}.get)

    def row(self, name, **peers):
        return {"name": name, "unit": "us", "searched": True, "ours": {"flop": 4e8, "bytes": 6 << 20},
                "peers": {label: {"pairs": pairs} for label, pairs in peers.items()}}

    def test_both_gradients_of_a_convolution_stand_in_one_row(self):
        shape = "rows:128/size:32/in:128/out:128/kernel:3/stride:2"
        table = self.table("convolution-gradients", self.row(f"dgrad/{shape}", cuDNN=[[2.0, 3.0]] * 2),
                           self.row(f"wgrad/{shape}", cuDNN=[[2.0, 1.0]] * 2))
        self.assertIn("| [128, 32, 128, 128], 3×3, stride 2 | 2.00 (200) | 3.00 | cuDNN | 1.50× (1.50–1.50) | met "
                      "| 2.00 (200) | 1.00 | cuDNN | 0.50× (0.50–0.50) | **miss** |", table)
        self.assertIn("1 of 16 rows reach their bar (14 **not measured**, 1 **miss**).", table)

    def test_the_copy_judges_a_norm_and_is_no_peer(self):
        names = make_tables.EXPECTED_OPS["train-ops"]
        first, second = [name for name in names if name.startswith("group_norm")][:2]
        table = self.table(
            "group-norm-gradients",
            self.row(first, copy=[[2.0, 1.6], [2.0, 1.52]], compiled=[[2.0, 3.0], [2.0, 3.0]]),
            self.row(second, copy=[[2.0, 1.4], [2.0, 1.4]]))
        self.assertIn("| [128, 32, 128], 32 groups | 6 | 2.00 | 78.0 % (76.0 % to 80.0 %) | met | 3.00 "
                      "| compiled | 1.50× (1.50–1.50) |", table)
        self.assertIn("| [128, 16, 256], 32 groups | 6 | 2.00 | 70.0 % (70.0 % to 70.0 %) | **miss** "
                      "| – | – | – |", table)
        self.assertIn("1 of 5 rows reach their bar (1 **miss**, 3 **not measured**).", table)

    def test_without_figures_nothing_is_met(self):
        for name in ("convolution-gradients", "group-norm-gradients", "attention-gradients"):
            table = make_tables.TABLES[name](lambda _: None)
            self.assertRegex("\n".join(table),
                             r"0 of \d+ rows reach their bar \(\d+ \*\*not measured\*\*\)")


class LatentErrorsTest(unittest.TestCase):
    def test_each_row_has_its_verdict(self):
        rows = [{"name": name, "denoised": ours, "diffusers": theirs} for name, ours, theirs in (
            ("sd15-text", [0.01, 0.012], [0.02, 0.016]), ("sd15-unet", [0.01, 0.012], [0.011, 0.011]),
            ("sdxl-vae", [0.03], [0.02]))] + [{"name": "sdxl-unet", "error": "ended"}]
        file = {"context": {"date": "2026-11-25", "device": "a GPU"}, "rows": rows}
        text = "\n".join(make_tables.TABLES["latent-errors"]({"latent-errors": file}.get))
        for cells in ("| 1.00 % to 1.20 % | 1.60 % to 2.00 % | 0.625 (0.500–0.750) | ≤ 1 | met |",
                      "| 1.00 (0.909–1.09) | ≤ 1 | within noise |", "| 3.00 % | 2.00 % | 1.50 | ≤ 1 | **miss** |"):
            self.assertIn(cells, text)
        self.assertEqual(text.count("| – | – | – | ≤ 1 | **not measured** |"), 14, "one failed, the others are absent")
        self.assertIn("1 of 17 rows reach their bar", text)


class ServingTest(unittest.TestCase):
    def events(self, left, error):
        rounds = [{"completed": 500, "errors": 0, "previews": 1, "events": 2, "cpu_seconds": 1.0}]
        found = {"streams": 500, "slow": 125, "rounds": rounds, "resident_kib_halves": [1024, 1024],
                 "heap_bytes_per_event": left, "error": error}
        file = {"context": {"date": "2026-11-25", "device": "a CPU"}, "figures": {"event_streams": found}}
        return "\n".join(make_tables.TABLES["event-streams"]({"http": file}.get))

    def test_the_upper_end_of_the_fit_decides(self):
        self.assertIn("| +17.0 ± 1.0 bytes of 2 events | met |", self.events(17.0, 1.0))
        self.assertIn("| +17.0 ± 2.0 bytes of 2 events | **miss** |", self.events(17.0, 2.0))

    def test_a_storm_that_compared_nothing_is_no_proof(self):
        figures = {"cancelled": 20_000, "survived": 9, "left_inside": 0, "compared": 0, "differ": 0}
        rows = make_tables.storm_rows({"context": {}, "figures": {"storm": figures}}, "GPU")
        self.assertEqual(rows[1][-1], make_tables.MISS)

    def test_the_page_and_the_program_have_the_same_bars(self):
        self.assertEqual(serving.HEAP_BYTES_AN_IMAGE, make_tables.HEAP_BAR)
        self.assertEqual(serving.START_SECONDS, make_tables.START_BARS)


class OriginTest(unittest.TestCase):
    def test_a_busy_host_is_named(self):
        def line(**context):
            return make_tables.origin({"date": "2026-11-25", "device": "a GPU"} | context)[0]

        self.assertEqual(line(load_average=1.55, cores=16), "*2026-11-25, a GPU, one round.*")
        self.assertEqual(line(load_average=28.06, cores=64, rounds=3),
                         "*2026-11-25, a GPU, 3 rounds, load average 28.1 of 64 cores.*")
        self.assertIn("load average 7 to 21", line(load_average="7 to 21", cores=2))
        self.assertIn("load average 1.6.*", line(load_average=1.55))


class AgeTest(unittest.TestCase):
    """Beside a commit stands what changed since, of a small history."""

    def setUp(self):
        self.root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        self.git("init", "-q")
        self.write("engine", "server", "docs")
        self.commit = self.committed()
        patch = mock.patch.object(make_tables, "ROOT", self.root)
        patch.start()
        self.addCleanup(patch.stop)
        self.addCleanup(self.forget)
        self.forget()

    def forget(self):
        make_tables.has_history.cache_clear()
        make_tables.changed_since.cache_clear()

    def git(self, *arguments):
        return subprocess.run(["git", "-C", self.root, "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
                              capture_output=True, text=True, check=True).stdout.strip()

    def write(self, *folders, text="1"):
        for folder in folders:
            (self.root / folder).mkdir(exist_ok=True)
            (self.root / folder / "file").write_text(text)

    def committed(self):
        self.git("add", "-A")
        self.git("commit", "-qm", "bench: files")
        return self.git("rev-parse", "--short=12", "HEAD")

    def line(self, name, commit=None):
        self.forget()
        line = f"*2026-11-25, a GPU, commit {commit or self.commit}, 3 rounds.*"
        return make_tables.aged([line, "| commit 1234567 |"], name)

    def test_a_change_in_a_folder_of_the_table_is_said(self):
        self.assertIn(f"commit {self.commit}, 3", self.line("models")[0])
        self.write("server", "docs", text="2")  # not yet committed
        self.assertNotIn("since", self.line("models")[0])
        self.assertIn("(server/ changed since)", self.line("pipelines")[0])
        self.write("engine", text="2")
        later = self.committed()
        self.assertIn("(engine/ changed since)", self.line("models")[0])
        self.assertIn("(engine/ and server/ changed since)", self.line("pipelines")[0])
        self.assertIn(f"{self.commit} and {later} (engine/ changed since)",
                      self.line("cpu", f"{self.commit} and {later}")[0])
        self.assertIn(f"commit {later}, 3", self.line("models", later)[0])

    def test_other_lines_and_unknown_commits(self):
        self.assertEqual(self.line("models")[1], "| commit 1234567 |")
        self.assertIn("commit 1234567 (not in this history), 3", self.line("models", "1234567")[0])

    def test_without_the_history_nothing_is_said_and_the_check_leaves_ages_out(self):
        aged = self.line("pipelines")
        shutil.rmtree(self.root / ".git")
        with mock.patch.dict(os.environ, {"GIT_CEILING_DIRECTORIES": str(self.root.parent)}):
            plain = self.line("pipelines")
        self.assertNotIn("since", plain[0])
        self.assertEqual(make_tables.AGES.sub("", "\n".join(aged)), "\n".join(plain))
        self.assertEqual(make_tables.AGES.sub("", "commit 1234567 (not in this history), 3"), "commit 1234567, 3")

    def test_the_summary_names_the_runs_behind_all_its_rows(self):
        text = (DOCS / "benchmarks.md").read_text().split("<!-- table: headline -->")[1].split("<!-- end -->")[0]
        for topic in ("digits", "models", "latent", "ops", "sd15", "sdxl-mixed", "sd15-request"):
            figures = json.loads((DOCS / f"benchmarks/{topic}.json").read_text())
            self.assertIn(figures["context"]["commit"], text, topic)


class TrainTest(unittest.TestCase):
    def test_earlier_first_steps_count(self):
        row = {"name": "adm-64/batch:32", "ours": {"MiB_device": 700, "first_step_seconds": 9.0, "flop": 1e12,
                                                   "earlier_first_steps": [{"seconds": 12.0}]},
               "peers": {"torch": {"pairs": [[1.0, 2.0]] * 3, "details": {
                   "MiB_reserved": 1000, "MiB_allocated": 800, "first_step_seconds": 99.0}}}}

        def table():
            return "\n".join(make_tables.TABLES["train"](
                {"train": {"context": {"date": "2026-11-25", "device": "a GPU"}, "rows": [row]}}.get))

        self.assertIn("| 70 %, met | 88 % | 9.00 s (earlier 12.0), 99.0 s | ≤ 10 s, **miss** |", table())
        row["ours"]["earlier_first_steps"] = []
        self.assertIn("| 9.00 s, 99.0 s | ≤ 10 s, within noise |", table())


class PortableTest(unittest.TestCase):
    def test_half_of_hoppers_speed_is_too_little(self):
        row = {"name": "m/rows:1", "peers": {"generic": {"pairs": [[0.60, 1.0]] * 3}}}
        files = {"portable": {"context": {"date": "2026-11-25", "device": "a GPU"}, "rows": [row]}}
        self.assertIn("| m | 1 | 0.600 ms | 1.00 ms | 60.0 % | met |",
                      "\n".join(make_tables.TABLES["portable"](files.get)))
        row["peers"]["generic"]["pairs"] = [[0.54, 1.0]] * 3
        self.assertIn("| 54.0 % | **miss** |", "\n".join(make_tables.TABLES["portable"](files.get)))


class Fp8Test(unittest.TestCase):
    def test_milliseconds_in_fp8_decide(self):
        row = {"name": "adm-64/rows:64", "peers": {"fp8": {"pairs": [[24.0, 16.0]] * 3}}}
        context = {"date": "2026-11-25", "device": "a GPU"}
        files = {"fp8": {"context": context, "rows": [row]}}

        def table():
            return "\n".join(make_tables.TABLES["fp8"](files.get))

        self.assertIn("| adm-64 | 64 | 24.0 ms | 16.0 ms | 1.50× (1.50–1.50) | ≤ 16.5 ms | met |", table())
        for name, bar in (("cifar10-32 | 256", 4.4), ("celebahq-256 | 16", 10.8)):
            self.assertIn(f"| {name} | – | – | – | ≤ {bar} ms | **not measured** |", table())
        self.assertIn("1 of 3 rows reach their bar", table())
        row["peers"]["fp8"]["pairs"] = [[24.0, 16.4], [24.0, 16.4], [24.0, 16.6]]
        self.assertIn("| 1.46× (1.45–1.46) | ≤ 16.5 ms | within noise |", table())
        row["peers"]["fp8"]["pairs"] = [[24.0, 16.6]] * 3
        self.assertIn("| 1.45× (1.45–1.45) | ≤ 16.5 ms | **miss** |", table())
        context["stale"] = "a reason"
        self.assertIn("| ≤ 16.5 ms | **miss** (old) |", table())
        row["name"] = "adm-64/rows:1"
        self.assertIn("| 1.45× (1.45–1.45) |  |  |", table())


class RatioTest(unittest.TestCase):
    def test_the_median_of_the_rounds_and_the_fastest_peer(self):
        row = {"name": "x", "peers": {
            "slow": {"pairs": [[1.0, 9.0]]},
            "fast": {"pairs": [[1.0, 2.0], [1.0, 8.0], [2.0, 6.0]]},
            "failed": {"pairs": []}}}
        self.assertEqual(make_tables.best_of(row), ("fast", 6.0, 3.0))
        self.assertIsNone(make_tables.best_of({"peers": {"failed": {"pairs": []}}}))

    def test_numbers_keep_their_digits(self):
        self.assertEqual([make_tables.number(value) for value in (0.35671, 6.0, 26.04, 1820, 0)],
                         ["0.357", "6.00", "26.0", "1820", "0"])


if __name__ == "__main__":
    unittest.main()
