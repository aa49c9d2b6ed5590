#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""measure.py without a GPU: fake_worker.py stands for all that it starts."""
import contextlib
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import make_tables
import measure
import peer_sd_cpp
import pipelines
import stopwatch
import turns


class MeasureTest(unittest.TestCase):
    def setUp(self):
        self.out = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.out)

    def measure(self, *flags):
        done = subprocess.run(
            [sys.executable, HERE / "measure.py", *flags, "--fake=" + str(HERE / "fake_worker.py"),
             f"--out={self.out}", "--commit=abc", "--requests=1"],
            capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def read(self, topic):
        return json.loads((self.out / f"{topic}.json").read_text())

    def test_models_are_measured_in_turns(self):
        self.measure("models", "--models=cifar10-32:1:16,adm-64:1", "--max-autotune=adm-64:1",
                     "--rounds=3", "--seconds=1000")
        rows = self.read("models")["rows"]
        self.assertEqual([row["name"] for row in rows],
                         ["cifar10-32/rows:1", "cifar10-32/rows:16", "adm-64/rows:1"])
        self.assertEqual(list(rows[2]["peers"]),
                         ["torch.compile, one graph", "max-autotune, one graph"])
        # The fakes count: denoised's worker measures the rows of a model one after the other.
        self.assertEqual(rows[0]["peers"]["torch.compile, one graph"]["pairs"],
                         [[2.01, 3.01], [2.02, 3.02], [2.03, 3.03]])
        self.assertEqual(rows[0]["ours"]["flop"], 1e9)
        self.assertEqual(rows[1]["peers"]["torch.compile, one graph"]["pairs"][0], [2.04, 3.01])
        self.assertEqual(self.read("models")["context"]["commit"], "abc")

    def test_max_autotune_is_measured_in_order_as_far_as_time_goes(self):
        self.measure("models", "--models=cifar10-32:1:16,adm-64:1", "--max-autotune=adm-64:1",
                     "--rounds=1", "--seconds=1000")
        left_out = [row["left_out"] for row in self.read("models")["rows"]]
        self.assertEqual(left_out, [{measure.AUTOTUNED: "not in --max-autotune"}] * 2 + [{}])

        # Time for two of three: each needs 25 seconds to be measured, 45 to compile, 10 at the end.
        session = mock.Mock(left=lambda: 25 * 2 + 10 + 45.5)
        done = measure.compiled_in_order(session, [("a", 1), ("b", 1), ("c", 1)], self.fake)
        self.assertEqual(list(done), [("a", 1), ("b", 1)])
        self.assertTrue(all("error" not in answer for _, answer in done.values()))

    def test_a_compiler_that_takes_too_long_is_ended(self):
        # Enough to start one while it is looked whether there is time for two; then none.
        left = itertools.chain([81, 81], itertools.repeat(0))
        session = mock.Mock(left=lambda: next(left))
        with mock.patch.dict(os.environ, {"FAKE_COMPILER": "slow"}):
            done = measure.compiled_in_order(session, [("a", 1), ("b", 1)], self.fake)
        self.assertEqual(list(done), [("a", 1)])
        self.assertIn("no answer", done[("a", 1)][1]["error"])

    def fake(self, shape):
        worker = turns.Worker(f"{shape}", [sys.executable, HERE / "fake_worker.py", "peer"],
                              self.out / "workers.log")
        self.addCleanup(worker.close)
        return worker

    def test_ops_say_whether_they_were_searched(self):
        self.measure("ops", "--rounds=1", "--seconds=1000")
        rows = self.read("ops")["rows"]
        found = {row["name"].split("/")[0]: (row["searched"], row["not_tried"])
                 for row in reversed(rows)}
        self.assertFalse(rows[1]["searched"])  # the search raised
        self.assertEqual(found["conv_bias_residual_silu"], (False, 0))
        self.assertEqual(found["conv"], (True, 2))
        self.assertEqual(found["linear"], (True, 0))  # there is nothing to search
        self.measure("ops", "--rounds=1", "--seconds=1000", "--search-phase=0")
        row = self.read("ops")["rows"][0]
        self.assertEqual((row["searched"], row["search"]["error"]), (False, "no time to search"))

    def test_the_cpu_backend_beside_an_older_one(self):
        for name, rate in (("old", 10), ("new", 20)):
            program = self.out / name
            program.write_text(f"""#!/bin/sh
case "$*" in
  *bf16*) [ {name} = new ] && echo '{{"images_per_second": 40}}' && exit 0; exit 1 ;;
  *in-flight=1\\ *) echo '{{"images_per_second": {rate / 4}}}' ;;
  *) echo '{{"images_per_second": {rate}}}' ;;
esac
""")
            program.chmod(0o755)
        cases = ["idle", "busy", "one-2", "bf16"]
        done = subprocess.run(
            [sys.executable, HERE / "cpu_rows.py", "--before", self.out / "old", "--after",
             self.out / "new", "--out", self.out / "cpu.json", "--commit", "abc", "--rounds", "2",
             "--cases", *cases], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([(row["name"], row["before"], row["after"])
                          for row in self.read("cpu")["rows"]],
                         [("idle", [100.0] * 2, [50.0] * 2), ("busy", [100.0] * 2, [50.0] * 2),
                          ("one-2", [400.0] * 2, [200.0] * 2), ("bf16", [], [25.0] * 2)])
        table = make_tables.TABLES["cpu"](lambda name: self.read(name))
        self.assertIn("| 16 images in flight, two idle cores | 100 ms | 50.0 ms | 2.00× (2.00–2.00) "
                      "| ≥ 1.2× | met |", table)
        self.assertIn("4 of 5 rows reach their bar (1 **not measured**).", table)

    def test_the_simulation_gets_a_context(self):
        figures = json.loads((make_tables.ROOT / "docs/benchmarks/scheduling.json").read_text())
        figures.pop("context")
        figures["mixed"] = [{"in_flight": 32, "rows_per_second": 9.5, "padding": 0.01,
                             "uniform_rows_per_second": 10}]
        (self.out / "figures").write_text(json.dumps(figures))
        program = self.out / "scheduling-bench"
        program.write_text('#!/bin/sh\ncp "$(dirname "$0")/figures" "${1#--json=}"\n')
        program.chmod(0o755)
        done = subprocess.run(
            [sys.executable, HERE / "measure.py", "scheduling", f"--build={self.out}",
             f"--out={self.out}", "--commit=abc"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        for name in ("scheduling", "scheduling-mixed", "scheduling-host"):
            table = make_tables.TABLES[name](lambda name: self.read(name))
            self.assertRegex(table[0], r"simulated; host: .*, commit abc, one round")

    def test_a_second_run_leaves_out_what_was_searched_to_the_end(self):
        self.measure("ops", "--rounds=1", "--seconds=1000")
        first = self.read("ops")["rows"]
        (self.out / "ops.json").rename(self.out / "first.json")
        self.measure("ops", "--rounds=1", "--seconds=1000", f"--without={self.out / 'first.json'}")
        self.assertEqual([row["name"] for row in self.read("ops")["rows"]],
                         [row["name"] for row in first if not row["searched"] or row["not_tried"]])
        self.assertLess(len(self.read("ops")["rows"]), len(first))

    def test_the_other_topics_write_what_the_tables_read(self):
        self.measure("digits", "ops", "clocks", "portable", "fp8", "fp8-ops", "models",
                     "memory",
                     "--models=cifar10-32:1", "--fp8=cifar10-32:1", "--rounds=1", "--seconds=1000")
        digits = self.read("digits")["rows"]
        self.assertIn("PyTorch eager", digits[0]["left_out"])
        self.assertEqual(len(digits[1]["peers"]), 1)
        ops = self.read("ops")
        self.assertEqual(len(ops["rows"]), 6)
        self.assertEqual(ops["rows"][1]["left_out"], {"all": "refused"})
        self.assertIn("cuBLASLt", ops["rows"][3]["peers"])

        def data(name):
            path = self.out / f"{name}.json"
            return json.loads(path.read_text()) if path.exists() else None

        for name in ("digits", "convolutions", "linears", "clocks", "portable", "ceilings", "memory"):
            self.assertTrue(make_tables.TABLES[name](data), name)
        self.assertIn("| cifar10-32 | 1 | 2.01 ms | 3.01 ms | 0.67× |  |  |", make_tables.TABLES["fp8"](data))
        fp8_ops = self.read("fp8-ops")["rows"]
        self.assertEqual([row["name"] for row in fp8_ops], make_tables.EXPECTED_OPS["fp8-ops"])
        self.assertEqual({tuple(row["peers"]) for row in fp8_ops}, {("bf16",), ("cuBLASLt",)})
        self.assertIn("cublaslt", fp8_ops[-1])
        self.assertTrue(make_tables.TABLES["fp8-ops"](data))
        self.assertIn("| cifar10-32, 1 | 7 MiB | 8 MiB | 9 MiB |", make_tables.TABLES["memory"](data))

    def test_training_is_measured_beside_its_peer(self):
        self.measure("train", "--train=cifar10-32:128,mnist-32:512", "--rounds=3", "--seconds=1000")
        rows = self.read("train")["rows"]
        self.assertEqual([row["name"] for row in rows],
                         ["cifar10-32/batch:128", "mnist-32/batch:512"])
        self.assertEqual(rows[1]["peers"]["torch.compile, one graph"]["pairs"],
                         [[2.01, 3.01], [2.02, 3.02], [2.03, 3.03]])
        self.assertEqual((rows[0]["left_out"], rows[0]["ours"]["MiB_device"]), ({}, 7.0))
        table = make_tables.TABLES["train"](self.read)
        self.assertIn("| cifar10-32 | 128 | 2.02 ms | 0.495 | 3.02 ms | 1.50× (1.49–1.50) | 1.5× "
                      "| **miss** | 7.00 MiB; 9.00, 8.00 MiB | 78 %, met | 88 % | 1.50 s, 60.0 s |  |", table)
        row = next(line for line in table if line.startswith("| adm-64"))
        self.assertEqual(row.count("**not measured**"), 3)
        self.measure("train", "--train=cifar10-32:128", "--rounds=1", "--seconds=2")
        self.assertEqual(self.read("train")["rows"][0]["left_out"],
                         {"torch.compile, one graph": "no time left"})

    def test_training_on_a_cpu_is_measured_beside_four_ways_of_its_peer(self):
        self.measure("train-cpu", "--device=cpu", "--rounds=3", "--seconds=1000")
        row = self.read("train-cpu")["rows"][0]
        self.assertEqual(list(row["peers"]), ["eager, NHWC", "eager, NCHW", "torch.compile, NHWC",
                                              "torch.compile, NCHW"])
        # The fastest decides.
        table = make_tables.TABLES["train-cpu"](self.read)
        self.assertIn("| eager, NHWC | 3.02 ms | 2.02 ms | 1.50× (1.49–1.50) |  |  |", table)
        self.assertIn("| torch.compile, NCHW | 3.02 ms | 2.11 ms | 1.43× (1.43–1.43) | 1.0× | met |", table)
        # Without its fastest peer the table says so; a peer without a round has no line.
        content = self.read("train-cpu")
        row["peers"].pop("eager, NHWC")
        row["peers"]["eager, NCHW"]["pairs"] = []
        row["left_out"]["eager, NHWC"] = "no memory"
        table = make_tables.TABLES["train-cpu"](lambda _: content | {"rows": [row]})
        self.assertIn("Left out: eager, NHWC: no memory.", table)
        self.assertFalse(any(line.startswith("| eager") for line in table))

    def test_backward_ops_are_measured_beside_their_peers_and_a_copy(self):
        self.measure("train-ops", "--rounds=2", "--seconds=1000")
        content = self.read("train-ops")
        self.assertEqual([row["name"] for row in content["rows"]],
                         make_tables.EXPECTED_OPS["train-ops"])
        for row in content["rows"]:
            norm = row["name"].startswith("group_norm")
            self.assertEqual(list(row["peers"]), ["cuDNN", "copy"] if norm else ["cuDNN"])
            self.assertTrue(all(len(peer["pairs"]) == 2 for peer in row["peers"].values()))
        self.assertIn("ceilings_after", content)
        # The fake peer leaves plans untried, which is no verdict, except where it is the copy that judges.
        for name, expected in (("convolution-gradients", "0 of 16 rows reach their bar (16 no verdict)."),
                               ("group-norm-gradients", "All 5 rows reach their bar."),
                               ("attention-gradients", "0 of 4 rows reach their bar (4 no verdict).")):
            self.assertIn(expected, make_tables.TABLES[name](self.read), name)

    def test_a_peer_that_breaks_is_started_anew(self):
        broken = "attention_backward/rows:32/heads:6/tokens:1024/dim:64"
        with mock.patch.dict(os.environ, {"FAKE_BROKEN": broken}):
            said = self.measure("train-ops", "--rounds=1", "--seconds=1000", "--ops=attention",
                                "--processes=2")
        self.assertIn(f"{broken}: broken; train-ops-1 is started anew", said)
        rows = self.read("train-ops")["rows"]
        self.assertEqual([len(row["peers"]["cuDNN"]["pairs"]) for row in rows], [1] * 4)
        # Of this process the plans are lost, also those of the op that comes later.
        self.assertEqual([row["searched"] for row in rows], [True, False, True, False])

    def test_errors_are_measured_beside_diffusers(self):
        self.measure("latent-errors", "--device=cpu")
        file = self.read("latent-errors")
        self.assertEqual([row["name"] for row in file["rows"]], list(make_tables.ERROR_ROWS))
        self.assertEqual(file["rows"][0]["denoised"], [0.01, 0.012])

    def test_what_there_was_no_time_for_is_named(self):
        self.measure("models", "ops", "train-ops", "--models=cifar10-32:1", "--rounds=1",
                     "--seconds=2")
        self.assertEqual(self.read("models")["rows"][0]["left_out"],
                         {"torch.compile, one graph": "no time left",
                          measure.AUTOTUNED: "no time left"})
        self.assertEqual(len(self.read("ops")["left_out"]), 6)
        self.assertEqual(self.read("train-ops")["left_out"],
                         make_tables.EXPECTED_OPS["train-ops"])


class AlternateTest(unittest.TestCase):
    def test_who_is_first_alternates(self):
        asked = []

        def side(name):
            def ask(_verb, _name, _seconds):
                asked.append(name)
                return {"ms": {"ours": 2.0, "peer": 3.0}[name]}
            return mock.Mock(ask=ask)

        log = mock.Mock(since=lambda begin: None)
        result = turns.alternate((side("ours"), ""), (side("peer"), ""), 4, log, 1)
        self.assertEqual(asked, ["ours", "peer", "peer", "ours"] * 2)
        self.assertEqual(result["pairs"], [[2.0, 3.0]] * 4)

    def test_a_round_that_fails_is_left_out(self):
        ours = mock.Mock(ask=lambda *_: {"ms": 2.0})
        peer = mock.Mock(ask=mock.Mock(side_effect=[{"ms": 3.0}, {"error": "ended"}]))
        result = turns.alternate((ours, ""), (peer, ""), 3, mock.Mock(since=lambda _: None), 1)
        self.assertEqual((result["pairs"], result["error"]), ([[2.0, 3.0]], "ended"))


class StopwatchTest(unittest.TestCase):
    def test_what_a_process_waits_for_the_lock_does_not_count(self):
        now = 100.0

        @contextlib.contextmanager
        def slow_lock():
            nonlocal now
            now += 8
            yield

        with mock.patch.object(stopwatch.time, "monotonic", lambda: now):
            watch = stopwatch.Stopwatch()
            now += 1
            with watch.but_not_before(slow_lock()):
                now += 2
            self.assertEqual((watch.waited, watch.seconds()), (8, 3))


class PlansTest(unittest.TestCase):
    """cudnn_plans.py's search with fake libraries: plan i takes 3 − i µs, and `alone` launched
    alone."""

    def search(self, seconds, end, waits=0.0, alone_us=(9.0, 9.0, 9.0)):
        fakes = {name: mock.MagicMock() for name in ("cudnn", "torch", "peer")}
        fakes["peer"].LEAST_LAUNCHES = 1
        fakes["torch"].empty.return_value.numel.return_value = 1
        fakes["peer"].median_ms.side_effect = [3e-3, 2e-3, 1e-3]
        fakes["peer"].times_ms.side_effect = [[1.0, 1e-3 * us] for us in alone_us]
        tensors = {"x": mock.Mock(shape=(1, 1, 8, 8)), "weight": mock.Mock(shape=(1, 1, 3, 3))}
        with mock.patch.dict(sys.modules, fakes):
            import cudnn_plans
            convolution = cudnn_plans.Convolution(None, tensors, (1, 1, 8, 8))
            graph = convolution.graph
            graph.get_execution_plan_count.return_value = 3
            graph.get_plan_name_at_index.side_effect = "plan {}".format
            graph.get_workspace_size_plan_at_index.return_value = 0

            @contextlib.contextmanager
            def alone():
                time.sleep(waits)
                yield

            return convolution.search({}, seconds, alone, end) | {"us": convolution.found}

    def test_waiting_for_the_gpu_does_not_use_up_the_time(self):
        found = self.search(seconds=0.2, end=float("inf"), waits=0.3)
        self.assertEqual((found["worked"], found["not_tried"], found["fastest"]), (3, 0, "plan 2"))

    def test_a_plan_that_is_slow_alone_is_not_timed_further(self):
        found = self.search(seconds=60, end=float("inf"), alone_us=(9.0, 999.0, 9.0))
        self.assertEqual({name: round(us, 6) for name, us in found["us"].items()},
                         {"plan 0": 3, "plan 1": 999, "plan 2": 2})
        self.assertEqual((found["worked"], found["fastest"]), (3, "plan 2"))

    def test_plans_that_were_not_tried_are_counted(self):
        found = self.search(seconds=60, end=0)
        self.assertEqual((found["worked"], found["not_tried"]), (0, 3))
        self.assertIn("none was tried", found["error"])


class LabelsTest(unittest.TestCase):
    """Convolutions of peer_ops.py and peer_train_ops.py with fake libraries."""

    def libraries(self):
        torch = mock.MagicMock()
        fakes = {"torch": torch, "torch.nn": torch.nn, "torch.nn.functional": torch.nn.functional,
                 "torch.nn.attention": torch.nn.attention, "torch.utils": torch.utils,
                 "torch.utils.deterministic": torch.utils.deterministic, "peer": mock.MagicMock(),
                 "cudnn": mock.MagicMock(), "cudnn_plans": mock.MagicMock()}
        fakes["peer"].copies_for.return_value = 1
        return mock.patch.dict(sys.modules, fakes)

    def test_of_gradients_only_those_of_a_1x1_convolution_are_matrix_products(self):
        shape = {"rows": 1, "size": 8, "in": 32, "out": 32}
        with self.libraries():
            import peer_train_ops
            for op in ("dgrad", "wgrad"):
                for k, stride in ((1, 1), (3, 1), (3, 2)):
                    gradient = peer_train_ops.ConvolutionGradients(None, op, **shape, kernel=k,
                                                                   stride=stride)
                    self.assertEqual("cuBLAS" in gradient.candidates()[0], k == 1)

    def test_only_a_convolution_alone_is_called_cudnn_without_a_search(self):
        labels = {}
        with self.libraries():
            import peer_ops
            for op in ("conv", "conv_bias_residual_silu", "conv_shortcut", "conv_down", "conv_up"):
                shape = {"rows": 1, "size": 8, "in": 32, "out": 32}
                shape |= {"shortcut": 64} if op == "conv_shortcut" else {}
                labels[op], _ = peer_ops.Convolutions(None, op, **shape).candidates()
        self.assertEqual(list(labels.pop("conv")), ["cuDNN, PyTorch's choice"])
        for op, found in labels.items():
            self.assertEqual(list(found), ["PyTorch, eager"], op)


class RequestsTest(unittest.TestCase):
    """`denoise` is a program that answers as it does."""

    def requests(self, code):
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        program = folder / "denoise"
        program.write_text(f"#!{sys.executable}\nimport json, sys\n{code}\n")
        program.chmod(0o755)
        session = mock.Mock(args=mock.Mock(requests=3))
        server = mock.Mock(options=mock.Mock(denoise=program, work=folder), address="x:1")
        return measure.Requests(session, server).ask("measure", "", 60)

    def test_the_client_times_and_the_server_says_its_own(self):
        answer = self.requests(
            "if sys.argv[1] == 'bench':\n"
            "  assert '-n' in sys.argv and 'count=16' in sys.argv\n"
            "  print(json.dumps({'failed': 0, 'errors': [], 'latency_seconds': {'p50': 0.012}}))\n"
            "else: print(json.dumps({'timing': {'total_seconds': 0.010}}))")
        self.assertEqual({key: round(value, 6) for key, value in answer.items()},
                         {"ms": 12.0, "ms_server": 10.0})

    def test_without_the_servers_time_the_clients_is_kept(self):
        answer = self.requests(
            "if sys.argv[1] != 'bench': sys.exit(1)\n"
            "print(json.dumps({'failed': 0, 'errors': [], 'latency_seconds': {'p50': 0.012}}))")
        self.assertEqual(list(answer), ["ms"])

    def test_an_error_is_told(self):
        self.assertIn("error", self.requests("sys.exit(1)"))
        self.assertIn("bad", self.requests(
            "print(json.dumps({'failed': 3, 'errors': ['bad'], 'latency_seconds': None}))")["error"])


class PipelinesTest(unittest.TestCase):
    def test_counters_are_sums_over_devices(self):
        page = """# TYPE denoised_evaluation_rows histogram
denoised_evaluation_rows_bucket{device="0",le="1"} 7
denoised_evaluation_rows_sum{device="0"} 40
denoised_evaluation_rows_sum{device="1"} 2
denoised_evaluation_seconds_count{device="0"} 5
denoised_evaluation_seconds_sum{device="0"} 1.5e-1
denoised_stage_seconds_sum{device="0",stage="decode"} 0.5
denoised_stage_seconds_sum{device="1",stage="decode"} 0.25
denoised_stage_seconds_count{device="0",stage="decode"} 9
denoised_images_total 3
"""
        self.assertEqual(pipelines.counters_in(page), {
            "rows": 42, "evaluations": 5, "evaluation_seconds": 0.15, "decode_seconds": 0.75})

    def test_a_peer_that_draws_something_else_is_not_measured(self):
        class Peer:
            def __init__(self, *answers):
                self.answers, self.asked = list(answers), []

            def ask(self, verb, _name, _seconds):
                self.asked.append(verb)
                return self.answers.pop(0)

        wrong = Peer({"error": "ValueError: the picture differs"}, {"seconds": {}})
        self.assertEqual(pipelines.prepared(wrong, 1), {"error": "ValueError: the picture differs"})
        self.assertEqual(wrong.asked, ["compile"])
        self.assertEqual(pipelines.prepared(Peer({}, {"seconds": {"prepare": 1}}), 1), {"seconds": {"prepare": 1}})

    def test_the_mixed_queue_asks_for_everything_at_every_size(self):
        for sizes in (pipelines.SDXL_SIZES, pipelines.TINY_SIZES):
            queue = [dict(part.split("=") for part in kind.split(",")) for kind in pipelines.mixed_queue(sizes)]
            self.assertEqual(len(queue), 36)
            for size in sizes:
                at_size = [kind for kind in queue if kind["size"] == size]
                self.assertEqual(len({kind["sampler"] for kind in at_size}), 6)
                self.assertEqual([kind["guidance"] == "1" for kind in at_size].count(True), 1)
        self.assertEqual(pipelines.mean_pixels(["size=8x4,steps=1", "size=2x4,steps=1"]), 20)
        share = pipelines.mean_pixels(pipelines.mixed_queue(pipelines.SDXL_SIZES)) / 1024 ** 2
        self.assertAlmostEqual(share, 0.98, places=2)  # as docs/benchmarks.md says
        for size in pipelines.SDXL_SIZES:
            width, height = map(int, size.split("x"))
            self.assertAlmostEqual(width * height, 1024 * 1024, delta=0.04 * 1024 * 1024)

    def test_device_memory_needs_no_nvidia_smi(self):
        server = mock.Mock(**{"metric.return_value": 3 << 20})
        done = subprocess.CompletedProcess([], 0, "1234\n", "")
        with mock.patch.object(pipelines.subprocess, "run", return_value=done):
            self.assertEqual(pipelines.device_memory(server), {"MiB_device": 1234, "MiB_model": 3})
        with mock.patch.object(pipelines.subprocess, "run", side_effect=OSError):
            self.assertEqual(pipelines.device_memory(server), {"MiB_device": None, "MiB_model": 3})

    def test_the_configs_are_there(self):
        for places in pipelines.SOURCES.values():
            for place in places:
                self.assertTrue((pipelines.MODELS / place / "model_index.json").exists(), place)
        for place in pipelines.TINY_VAE:
            self.assertTrue((place / "config.json").exists(), place)


class StableDiffusionCppTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.model = self.folder / "model"
        for part in "unet/diffusion_pytorch_model", "vae/diffusion_pytorch_model", "text_encoder/model":
            file = self.model / f"{part}.safetensors"
            file.parent.mkdir(parents=True)
            header = {"__metadata__": {}, "embeddings.token_embedding.weight":
                      {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
            text = json.dumps(header).encode()
            file.write_bytes(struct.pack("<Q", len(text)) + text + b"data")

    def peer(self, program=HERE / "fake_sd_cli.py", pictures=3):
        work = Path(tempfile.mkdtemp(dir=self.folder))
        return peer_sd_cpp.StableDiffusionCpp(program, self.model, pictures, work, self.folder / "log")

    def test_the_text_encoder_is_renamed_and_its_numbers_stay(self):
        content = (self.peer().model / "text_encoder/model.safetensors").read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        self.assertEqual(json.loads(content[8:8 + size]), {"text_model.embeddings.token_embedding.weight":
                                                           {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}})
        self.assertEqual((size % 8, content[8 + size:]), (0, b"data"))

    def test_the_fastest_way_is_measured_without_the_first_picture(self):
        peer = self.peer()
        details = peer.ask("prepare", "", 60)
        self.assertEqual(details["fastest"], "--diffusion-fa")
        self.assertEqual(list(details["ways"]), list(peer_sd_cpp.WAYS))
        self.assertAlmostEqual(details["ways"]["--diffusion-fa"]["ms"], 510)
        self.assertIn("exit status 1", details["ways"]["--fa --vae-conv-direct"]["error"])
        found = peer.ask("measure", "", 60)
        for key, ms in ("ms", 520), ("ms_sampling", 420), ("ms_decoding", 100):
            self.assertAlmostEqual(found[key], ms)
        self.assertEqual(peer.version(), "abc1234")
        self.assertIn("decode_first_stage", (self.folder / "log").read_text())

    def test_what_fails_is_told(self):
        self.assertIn("timed out", self.peer().ask("measure", "", 0)["error"])
        self.assertIn("No such file", self.peer(program=self.folder / "none").ask("prepare", "", 60)["error"])
        peer = self.peer()
        (peer.model / "unet").unlink()
        for verb in ("prepare", "measure"):
            self.assertIn("exit status 1, 0 pictures", peer.ask(verb, "", 60)["error"])
        self.assertIn("FileNotFoundError", (self.folder / "log").read_text())


class WorkerTest(unittest.TestCase):
    def setUp(self):
        self.log = tempfile.NamedTemporaryFile()
        self.addCleanup(self.log.close)

    def start(self, code):
        worker = turns.Worker("a worker", [sys.executable, "-c", code], self.log.name)
        self.addCleanup(worker.close)
        return worker

    def test_one_that_does_not_answer_is_ended(self):
        worker = self.start("import time; time.sleep(60)")
        begin = time.monotonic()
        self.assertIn("no answer", worker.answer(0.2)["error"])
        self.assertIn("no answer", worker.ask("measure", "x", 60)["error"])
        self.assertLess(time.monotonic() - begin, 10)

    def test_one_that_ends_or_writes_no_json(self):
        self.assertIn("ended", self.start("pass").answer(30)["error"])
        self.assertIn("no JSON", self.start("print('hello')").answer(30)["error"])

    def test_a_program_that_is_not_there(self):
        worker = turns.Worker("a worker", ["/nowhere/denoised-bench"], self.log.name)
        self.assertIn("/nowhere/denoised-bench", worker.answer(1)["error"])
        worker.send("measure")
        worker.close()


class GpuLogTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def log(self, code):
        if code:
            program = self.folder / "nvidia-smi"
            program.write_text(f"#!{sys.executable}\nimport sys, time\n{code}\n")
            program.chmod(0o755)
        with mock.patch.dict(os.environ, {"PATH": f"{self.folder}"}):
            log = turns.GpuLog()
        self.addCleanup(log.close)
        return log

    def test_medians_since_a_moment(self):
        log = self.log("for watts in [100, 500, 600, 'N/A', 500]:\n"
                       "  print(f'1980, {watts}, 60')\n"
                       "if '-lms' in sys.argv: time.sleep(60)")
        end = time.monotonic() + 30
        while len(log.samples) < 4 and time.monotonic() < end:
            time.sleep(0.01)
        self.assertEqual(log.since(0), {"sm_mhz": 1980, "watts": 500, "celsius": 60})
        self.assertIsNone(log.since(time.monotonic()))

    def test_without_a_gpu_nothing_is_logged(self):
        self.assertIsNone(self.log("").since(0))
        self.assertIsNone(self.log("sys.exit(9)").since(0))


if __name__ == "__main__":
    unittest.main()
