#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""denoise-train as a process: the same bits when repeated, killed, resumed, or on several ranks; and
what it says when pictures, labels, disks and numbers are bad.

usage: run_test.py DENOISE_TRAIN [unittest arguments]"""

import binascii
import fcntl
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "server"))
from free_port import free_port

PROGRAM = None
DEVICE = os.environ.get("DENOISE_TRAIN_DEVICE")  # scripts/test-gpu sets it
REPOSITORY = Path(__file__).parents[2]
NETWORK = {
    "_class_name": "UNet2DModel", "sample_size": 8, "in_channels": 1, "out_channels": 1,
    "block_out_channels": [8, 16], "layers_per_block": 1, "norm_num_groups": 4,
    "attention_head_dim": 8, "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"], "num_class_embeds": 3, "dropout": 0.1,
}  # fmt: skip


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", binascii.crc32(kind + data))


def png(pixel, edge=8):
    rows = b"".join(b"\0" + bytes(pixel(x, y) for x in range(edge)) for y in range(edge))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", edge, edge, 8, 0, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))  # fmt: skip


def chunks(data, kind):
    """(offset, bytes of content) of the chunks of a PNG of this kind."""
    at = 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at:at + 4])
        if data[at + 4:at + 8] == kind:
            yield at, size
        at += 12 + size


class RunTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = Path(self.folder.name)
        (self.root / "network.json").write_text(json.dumps(NETWORK))
        self.data = self.root / "pictures"
        for label, of in enumerate(("across", "down")):
            (self.data / of).mkdir(parents=True)
            for i in range(6):
                value = lambda x, y: 255 * (((x if label else y) + i) // 2 % 2)
                (self.data / of / f"{i}.png").write_bytes(png(value))

    def arguments(self, output, **flags):
        settings = {
            "data": self.data, "network": self.root / "network.json", "batch": 16, "steps": 12,
            "learning-rate": 2e-3, "class-dropout": 0.1, "checkpoint-steps": 4, "log-steps": 1,
            "output": self.root / output, "device": DEVICE, **flags,
        }  # fmt: skip
        return [PROGRAM] + [f"--{k}={v}" for k, v in settings.items() if v is not None]

    def train(self, output, rc=0, env=None, limit=None, user=None, **flags):
        def prepare():
            if limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        done = subprocess.run(
            self.arguments(output, **flags), capture_output=True, text=True, timeout=120,
            env={**os.environ, **(env or {})}, preexec_fn=prepare, user=user,
        )  # fmt: skip
        self.assertEqual(done.returncode, rc, done.stderr)
        return done.stderr + done.stdout

    def train_ranks(self, rc, port=None, env=None, limit=None, **flags):
        """Two ranks; values that are tuples have one for each, also rc. What each says."""
        port = port or free_port()

        def of(rank, value):
            return value[rank] if isinstance(value, tuple) else value

        def prepare(rank):
            if of(rank, limit):
                resource.setrlimit(resource.RLIMIT_FSIZE, (of(rank, limit), of(rank, limit)))

        processes = [
            subprocess.Popen(
                self.arguments(**{key: of(rank, value) for key, value in flags.items()}),
                stderr=subprocess.PIPE, text=True, preexec_fn=lambda rank=rank: prepare(rank),
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port),
                     "OMP_NUM_THREADS": "1", **(env or {})})
            for rank in range(2)
        ]  # fmt: skip
        try:
            said = [process.communicate(timeout=120)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, process in enumerate(processes):
            self.assertEqual(process.returncode, of(rank, rc), said)
        return said

    def state(self, output, step=12):
        folder = self.root / output / "checkpoints" / f"step-{step:09}"
        self.assertTrue((folder / "DONE").exists())
        return (folder / "state.safetensors").read_bytes()

    def test_repeats_its_bits_with_any_accumulation_and_threads(self):
        self.train("a")
        self.train("b", accumulation=4)
        self.train("c", env={"OMP_NUM_THREADS": "1"})
        self.assertEqual(self.state("a"), self.state("b"))
        self.assertEqual(self.state("a"), self.state("c"))
        weights = "model/unet/diffusion_pytorch_model.safetensors"
        self.assertEqual((self.root / "a" / weights).read_bytes(),
                         (self.root / "b" / weights).read_bytes())  # fmt: skip
        index = json.loads((self.root / "a/model/model_index.json").read_text())
        self.assertEqual(index["id2label"], {"0": "across", "1": "down"})
        self.assertEqual(index["_denoised"]["null_class"], 2)
        self.train("d", seed=1)
        self.assertNotEqual(self.state("a"), self.state("d"))

    def test_grids_are_drawn_from_fixed_seeds(self):
        grids = []
        for output, seed in (("a", 0), ("b", 0), ("c", 1)):
            self.train(output, steps=8, **{"checkpoint-steps": 8, "sample-steps": 4, "seed": seed})
            grids.append([(self.root / output / f"samples/step-{step:09}.png").read_bytes() for step in (4, 8)])
        self.assertEqual(grids[0], grids[1])
        self.assertNotEqual(grids[0][0], grids[0][1])  # the network learned
        self.assertNotEqual(grids[0][1], grids[2][1])
        grid = grids[0][1]
        pixels = zlib.decompress(b"".join(grid[at + 8:at + 8 + size] for at, size in chunks(grid, b"IDAT")))
        self.assertGreater(len(set(pixels)), 16)  # no flat picture

    def test_the_progress_line_and_the_log(self):
        said = self.train("a", steps=3)
        lines = [line for line in said.splitlines() if " images/s " in line]
        self.assertEqual(len(lines), 3, said)
        number = r"\d[\d.]*(?:e[+-]\d+)?"
        for step, line in enumerate(lines, 1):
            self.assertRegex(line, rf"step {step}/3  {16 * step} images  loss {number}  gradient norm {number}  "
                             rf"learning rate {number}  {number} images/s  .*FLOP/s.*  \S+ left$")
        log = [json.loads(line) for line in (self.root / "a/log.jsonl").read_text().splitlines()]
        self.assertEqual([entry["images"] for entry in log], [16, 32, 48])
        for entry in log:
            self.assertEqual(set(entry), {"step", "images", "loss", "gradient_norm", "rate", "images_per_second",
                                          "skipped"})
            self.assertEqual((entry["rate"], entry["skipped"]), (2e-3, 0))
            self.assertGreater(min(entry["loss"], entry["gradient_norm"], entry["images_per_second"]), 0)

    def test_the_tutorial(self):
        """The first block of docs/training.md, with smaller numbers."""
        block = (REPOSITORY / "docs/training.md").read_text().split("```")[1].strip()
        lines = block.replace("\\\n", " ").splitlines()
        commands = [line for line in lines if line.startswith("train")]
        self.assertEqual(len(commands), 3, block)
        (self.root / "network.json").write_text(json.dumps(NETWORK | {"in_channels": 3, "out_channels": 3}))
        fewer = f" --steps 2 --batch 16 --warmup-steps 1 --sample-steps 1 --device {DEVICE or 'cpu'}"
        script = [commands[0].replace("build/release/trainer/denoise-train", str(Path(PROGRAM).resolve())),
                  *(command.split("#")[0] + fewer for command in commands[1:])]
        done = subprocess.run(["bash", "-ec", "\n".join(script)], cwd=self.root, capture_output=True, text=True,
                              timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("MiB", done.stdout + done.stderr)  # of --dry-run
        index = json.loads((self.root / "run/model/model_index.json").read_text())
        self.assertEqual(index["id2label"], {"0": "across", "1": "down"})
        self.assertTrue((self.root / "run/samples/step-000000002.png").exists())

    def kill(self, processes, victim, ready):
        """Kills one of these (SIGKILL) when ready(lines of the first) is true. What the first said."""
        said = []
        reader = threading.Thread(target=lambda: said.extend(processes[0].stderr))
        reader.start()
        try:
            limit = time.monotonic() + 60
            while not ready(said):
                self.assertIsNone(processes[victim].poll(), said)
                self.assertLess(time.monotonic(), limit, said)
                time.sleep(0.001)  # the run needs the core
            processes[victim].kill()
            for process in processes:
                process.wait(timeout=60)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            reader.join()
            processes[0].stderr.close()
        # It was in the middle of the run.
        self.assertEqual(processes[victim].returncode, -signal.SIGKILL, said)
        return "".join(said)

    def assert_log_has_each_step_once(self, output, last):
        steps = [json.loads(line)["step"]
                 for line in (self.root / output / "log.jsonl").read_text().splitlines()]  # fmt: skip
        self.assertEqual(steps, list(range(1, last + 1)))

    def test_kill_at_any_moment_and_resume(self):
        flags = {"checkpoint-steps": 1, "keep": 2, "steps": 30}
        self.train("whole", **flags)
        seed = int(os.environ.get("KILL_SEED", random.randrange(1 << 32)))
        print(f"KILL_SEED={seed}", file=sys.stderr)
        chance = random.Random(seed)
        for moment in ("saved", "saving") * 3:
            step = chance.randint(2, 12)  # the run may be many steps ahead when it is killed
            output = f"{moment}{step}-{chance.randrange(1 << 32)}"
            checkpoints = self.root / output / "checkpoints"

            def saved(said, step=step):
                return f"saved step {step}\n" in said

            def saving(said, checkpoints=checkpoints, step=step):
                return checkpoints.exists() and any(
                    each.endswith(".partial") and each >= f"step-{step:09}"
                    for each in os.listdir(checkpoints))  # fmt: skip

            with self.subTest(moment=moment, step=step, seed=seed):
                process = subprocess.Popen(
                    self.arguments(output, **flags), stderr=subprocess.PIPE, text=True)  # fmt: skip
                self.kill([process], 0, {"saved": saved, "saving": saving}[moment])
                said = self.train(output, resume="latest", **flags)
                self.assertIn("resumed at step", said)
                resumed = int(re.search(r"resumed at step (\d+)", said)[1])
                self.assertGreaterEqual(resumed, step - (moment == "saving"))
                self.assertLess(resumed, 30)
                self.assertEqual(self.state("whole", 30), self.state(output, 30))
                self.assert_log_has_each_step_once(output, 30)

    def test_kill_one_of_two_ranks_and_resume_both(self):
        flags = {"checkpoint-steps": 1, "keep": 2, "steps": 30}
        self.train("whole", **flags)
        for victim in range(2):
            output = f"victim{victim}"
            port = free_port()
            processes = [
                subprocess.Popen(
                    self.arguments(output, **flags), text=True,
                    stderr=subprocess.DEVNULL if rank else subprocess.PIPE,
                    env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port),
                         "OMP_NUM_THREADS": "1"})
                for rank in range(2)
            ]  # fmt: skip
            said = self.kill(processes, victim, lambda said: "saved step 9\n" in said)
            if victim == 1:
                self.assertRegex(said, "rank 1 (is lost|has ended)")
            # The other did not go on alone.
            self.assertEqual(processes[1 - victim].returncode, 1, said)
            said, _ = self.train_ranks(0, output=output, resume="latest", **flags)
            self.assertIn("resumed at step", said)
            resumed = int(re.search(r"resumed at step (\d+)", said)[1])
            self.assertTrue(9 <= resumed < 30, said)
            self.assertEqual(self.state("whole", 30), self.state(output, 30))
            self.assert_log_has_each_step_once(output, 30)

    def test_a_kill_between_the_last_checkpoint_and_the_model(self):
        self.train("a", steps=4)
        weights = self.root / "a/model/unet/diffusion_pytorch_model.safetensors"
        before = weights.read_bytes()
        weights.unlink()
        self.train("a", steps=4, resume="latest")
        self.assertEqual(weights.read_bytes(), before)

    def start_with_hangup(self, action):
        """What the processes of this test inherit: SIG_IGN is what nohup does."""
        self.addCleanup(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, action))

    def test_a_signal_finishes_the_step_and_saves(self):
        # A terminal that closes sends SIGHUP twice.
        self.start_with_hangup(signal.SIG_DFL)
        for output, signals in (("a", [signal.SIGTERM]), ("b", [signal.SIGHUP, signal.SIGHUP])):
            process = subprocess.Popen(
                self.arguments(output, steps=100000, **{"checkpoint-steps": 100000}),
                stderr=subprocess.PIPE, text=True)  # fmt: skip
            for line in process.stderr:
                if line.startswith("step 3/"):
                    break
            for number in signals:
                process.send_signal(number)
                time.sleep(0.001)  # so that the second does not merge with the first
            rest = process.stderr.read()
            process.stderr.close()
            self.assertEqual(process.wait(timeout=60), 0, rest)
            self.assertIn("stopped by a signal", rest)
            saved = list((self.root / output / "checkpoints").glob("*/DONE"))
            self.assertEqual(len(saved), 1)

    def test_a_signal_ends_a_grid(self):
        # On a CPU, for the grid to take longer than the signal.
        flags = {"steps": 100000, "sample-steps": 1, "sample-count": 256, "default-steps": 1000, "device": "cpu"}
        for ranks in (1, 2):  # the last gets the signal, and the first draws
            with self.subTest(ranks=ranks):
                port = free_port()
                processes = [self.start(f"{ranks}", rank if ranks > 1 else None, port, **flags)
                             for rank in range(ranks)]  # fmt: skip
                for line in processes[0].stderr:
                    if line == "saved step 1\n":
                        break
                processes[-1].send_signal(signal.SIGTERM)
                rest = processes[0].stderr.read()
                for process in processes:
                    self.assertEqual(process.wait(timeout=60), 0, rest)
                self.assertIn("stopped by a signal after step 2", rest)
                self.assertEqual(rest.count("no samples: stopped by a signal"), 2, rest)  # of both steps
                self.assertNotIn("drew", rest)

    def test_a_signal_ends_a_dry_run(self):
        read, write = os.pipe()
        size = fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        os.write(write, bytes(size))  # full: what is printed before the steps waits for a reader
        process = subprocess.Popen(
            self.arguments("a", **{"dry-run": "true", "stop-exit-code": 3}), stdout=write, stderr=subprocess.PIPE,
            text=True)  # fmt: skip
        os.close(write)
        self.assertIn("12 pictures of 8", process.stderr.readline())
        process.send_signal(signal.SIGTERM)
        with open(read, "rb") as file:
            said = file.read()
        self.assertIn(b"work ", said)
        self.assertNotIn(b"time ", said)
        self.assertIn("stopped by a signal before all steps were measured", process.communicate()[1])
        self.assertEqual(process.returncode, 3)

    def test_a_reader_that_ends_first_costs_no_checkpoint(self):
        """Ctrl-C ends the "tee" of a pipeline, too."""
        process = subprocess.Popen(
            self.arguments("a", steps=100000, **{"checkpoint-steps": 100000}), stderr=subprocess.PIPE, text=True)
        for line in process.stderr:
            if line.startswith("step 3/"):
                break
        process.stderr.close()
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=60), 0)
        self.assertEqual(len(list((self.root / "a/checkpoints").glob("*/DONE"))), 1)

    def test_a_dry_run_that_nobody_reads_ends(self):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(self.arguments("a", **{"dry-run": "true"}), stdout=write, stderr=subprocess.DEVNULL,
                              timeout=120)  # fmt: skip
        os.close(write)
        self.assertEqual(done.returncode, -signal.SIGPIPE)

    def test_nohup_outlives_the_terminal(self):
        self.start_with_hangup(signal.SIG_IGN)
        process = self.start("a", steps=100000)
        for line in process.stderr:
            if line.startswith("step 3/"):
                break
        process.send_signal(signal.SIGHUP)
        for line in process.stderr:
            if line.startswith("step "):
                break
        with self.assertRaises(subprocess.TimeoutExpired):
            process.wait(timeout=1)

    def start(self, output, rank=None, port=None, env=None, **flags):
        """A process, and if `rank` is given, one of two."""
        ranks = {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        process = subprocess.Popen(
            self.arguments(output, **flags), stderr=subprocess.PIPE, text=True,
            env={**os.environ, **ranks, "OMP_NUM_THREADS": "1", **(env or {})})  # fmt: skip
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def terminate(self, process):
        """SIGTERM, once the process has its handler."""
        def caught():
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)[1], 16)

        while not caught() >> (signal.SIGTERM - 1) & 1:
            self.assertIsNone(process.poll())
            time.sleep(0.01)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)

    def late_picture(self, folder):
        """A picture that cannot be read, and keeps the reader waiting until this opens it."""
        shutil.copytree(self.data, folder)
        lines = [{"file_name": f"{of}/{i}.png", "label": of} for of in ("across", "down") for i in range(6)]
        lines.append({"file_name": "down/late.png", "label": "down"})
        for data in (self.data, folder):
            (data / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.mkfifo(folder / "down/late.png")

        def open_it(process):
            limit = time.monotonic() + 60
            while process.poll() is None:
                self.assertLess(time.monotonic(), limit)
                try:
                    os.close(os.open(folder / "down/late.png", os.O_WRONLY | os.O_NONBLOCK))
                except OSError:  # nobody reads yet, or any more
                    time.sleep(0.01)

        return open_it

    def wait_until_connected(self, port):
        """Until ranks have connected, before they read: one to the other's `port`."""
        limit = time.monotonic() + 60
        while not re.search(rf":{port:04X} \w+:\w+ 01 ", Path("/proc/net/tcp").read_text()):
            self.assertLess(time.monotonic(), limit)
            time.sleep(0.01)

    def test_sigterm_while_ranks_gather(self):
        nowhere = {"MASTER_ADDR": "no-such-host.invalid"}
        for rank, env in ((0, None), (1, None), (1, nowhere)):
            with self.subTest(rank=rank, env=env):
                process = self.start("a", rank, free_port(), env, **{"stop-exit-code": 75 * rank})
                self.terminate(process)
                self.assertEqual(process.wait(timeout=30), 75 * rank)
                self.assertIn("stopped by a signal before all 2 ranks were there", process.stderr.read())

    def test_sigterm_while_pictures_are_read(self):
        other = self.root / "other"
        open_it = self.late_picture(other)
        flags = {"skip-bad-files": "true", "stop-exit-code": 3}
        process = self.start("a", data=other, **flags)
        self.terminate(process)
        open_it(process)
        self.assertEqual(process.wait(timeout=30), 3)
        self.assertIn("stopped by a signal before a step; nothing was changed", process.stderr.read())
        self.assertEqual(list((self.root / "a/checkpoints").iterdir()), [])
        # The second time the process ends at once.
        process = self.start("b", data=other, **flags)
        self.terminate(process)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(timeout=30), 128 + signal.SIGTERM)
        # The other rank learns it at once, although the first one still reads.
        port = free_port()
        reading, ready = (self.start("a", rank, port, data=data, **flags)
                          for rank, data in ((0, other), (1, self.data)))  # fmt: skip
        self.wait_until_connected(port)
        time.sleep(1)
        reading.send_signal(signal.SIGTERM)
        self.assertEqual(ready.wait(timeout=30), 3)
        self.assertIsNone(reading.poll())
        open_it(reading)
        self.assertEqual(reading.wait(timeout=30), 3)

    def test_a_rank_may_read_for_longer_than_ranks_wait(self):
        other = self.root / "other"
        open_it = self.late_picture(other)
        flags = {"skip-bad-files": "true", "rank-seconds": 6, "steps": 4}
        port = free_port()
        for late in (0, 1):
            ranks = [self.start(f"late{late}", rank, port, data=other if rank == late else self.data, **flags)
                     for rank in range(2)]  # fmt: skip
            self.wait_until_connected(port)
            time.sleep(8)
            open_it(ranks[late])
            for process in ranks:
                self.assertEqual(process.wait(timeout=60), 0, process.stderr.read())
        # One that never comes is not waited for.
        process = self.start("alone", 0, port, **flags)
        self.assertEqual(process.wait(timeout=60), 1)
        self.assertIn("not all 2 ranks were there within 6 s (missing: 1)", process.stderr.read())

    def test_a_signal_to_one_rank_ends_all_with_its_code_and_they_go_on(self):
        steps = 300
        flags = {"steps": steps, "checkpoint-steps": 1000, "stop-exit-code": 75}
        self.train("whole", **flags)
        port = free_port()
        ranks = [self.start("a", rank, port, **flags) for rank in range(2)]
        while "step 3/" not in (line := ranks[0].stderr.readline()):
            self.assertTrue(line)
        ranks[1].send_signal(signal.SIGTERM)
        for process in ranks:
            self.assertIn("stopped by a signal after step", process.stderr.read())
            self.assertEqual(process.wait(timeout=60), 75)
        done = [each.parent.name for each in (self.root / "a/checkpoints").glob("*/DONE")]
        self.assertEqual(len(done), 1)
        self.assertLess(int(done[0].removeprefix("step-")), steps)
        self.train_ranks(0, output="a", resume="latest", **flags)
        self.assertEqual(self.state("whole", steps), self.state("a", steps))

    def test_ranks_have_the_bits_of_one(self):
        self.train("one")
        port = free_port()
        for ranks in (2, 4):
            processes = [
                subprocess.Popen(
                    self.arguments(f"{ranks}"), stderr=subprocess.PIPE, text=True,
                    env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks),
                         "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"})
                for rank in range(ranks)
            ]  # fmt: skip
            said = ""
            for process in processes:
                _, errors = process.communicate(timeout=120)
                self.assertEqual(process.returncode, 0, errors)
                said += errors
            self.assertIn(f"{ranks} ranks over TCP: rank", said)
            self.assertEqual(self.state("one"), self.state(f"{ranks}"))

    def test_ranks_that_train_different_things_are_refused(self):
        other = self.root / "other"
        shutil.copytree(self.data, other)
        (other / "down/0.png").write_bytes(png(lambda x, y: 9))
        self.train("saved", steps=4)
        self.train("other-weights", steps=4, seed=1)
        for flags, message in [
            ({"learning-rate": (2e-3, 1e-3)}, "--learning-rate is 0.002 and 0.001"),
            ({"augment": (None, 0.1)}, "--augment is not set and 0.1"),
            ({"steps": (4, 5)}, "--steps is 4 and 5"),
            ({"checkpoint-steps": (4, 2)}, "--checkpoint-steps is 4 and 2"),
            ({"data": (self.data, other)}, "the checksum of --data is "),
            ({"output": ("saved", "elsewhere"), "resume": "latest"}, "step is 4 and 0"),
            ({"init-from": (self.root / "saved/model", self.root / "other-weights/model")},
             "the checksum of the weights is "),
        ]:
            with self.subTest(flags=flags):
                for said in self.train_ranks(2, **{"output": "a", "steps": 8, **flags}):
                    self.assertIn(f"ranks 0 and 1 do not train the same: {message}", said)
                    self.assertIn("Give all ranks the same settings, --data and --init-from", said)
        # A rank whose file system is late may see the newest checkpoint when it starts again.
        self.train("older", steps=4, **{"checkpoint-steps": 2})
        shutil.rmtree(self.root / "older/checkpoints/step-000000004")
        for said in self.train_ranks(1, output=("saved", "older"), steps=8, resume="latest"):
            self.assertIn("rank 0 resumes at step 4 and rank 1 at step 2: all ranks read the first's", said)
        self.train_ranks(0, output="saved", steps=8, resume="latest")

    def test_ranks_wait_for_the_last_checkpoint(self):
        first, second = self.train_ranks((1, 1), limit=(4096, None), output="a", steps=4)
        self.assertIn("Free some space", first)
        self.assertIn("rank 0 has ended", second)

    def test_torchrun_listens_on_its_port(self):
        while True:
            port = free_port()
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port + 1))
                except OSError:
                    continue
            break
        env = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        with socket.create_server(("127.0.0.1", port)):
            self.train_ranks(0, port=port, env=env, output="a", steps=4)
        self.assertIn("use at most 65534", self.train(
            "b", rc=2, env={**env, "RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "65535"}))  # fmt: skip
        self.train_ranks(0, env={"TORCHELASTIC_USE_AGENT_STORE": "False"}, output="c", steps=4)

    def test_nccl_needs_a_gpu_for_each_rank(self):
        port = free_port()
        processes = [
            subprocess.Popen(
                self.arguments("a", device="cpu", exchange="nccl"), stderr=subprocess.PIPE, text=True,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)})
            for rank in range(2)
        ]  # fmt: skip
        for process in processes:
            _, errors = process.communicate(timeout=120)
            self.assertEqual(process.returncode, 1, errors)
            self.assertIn('exchange is "nccl", but rank 0 has no GPU', errors)
        self.train("b", exchange="nccl", steps=1)  # one rank needs none

    def test_a_checkpoint_that_is_cut_off_is_passed_over(self):
        self.train("a")
        newest = self.root / "a/checkpoints/step-000000012/state.safetensors"
        newest.write_bytes(newest.read_bytes()[:-1000])
        said = self.train("a", resume="latest", steps=16)
        self.assertIn("checkpoint skipped", said)
        self.assertIn("it was cut off", said)
        self.assertIn("resumed at step 8", said)
        self.train("whole", steps=16)
        self.assertEqual(self.state("a", 16), self.state("whole", 16))
        flipped = self.root / "a/checkpoints/step-000000016/state.safetensors"
        data = bytearray(flipped.read_bytes())
        data[-5] ^= 1
        flipped.write_bytes(data)
        said = self.train("a", rc=2, resume=flipped.parent, steps=20)
        self.assertIn("checksum is not the one in DONE; it is damaged. Resume from another checkpoint", said)
        for state in (self.root / "a/checkpoints").glob("*/state.safetensors"):
            state.write_bytes(state.read_bytes()[:-1000])
        said = self.train("a", rc=2, resume="latest", steps=20)
        self.assertIn("is whole; to start with step 1, choose another --output", said)

    def test_a_checkpoint_of_another_machine_is_resumed_with_a_warning(self):
        self.train("a", steps=4)
        self.assertNotIn("warning", self.train("a", steps=8, resume="latest"))
        folder = self.root / "a/checkpoints/step-000000008"
        run = json.loads((folder / "run.json").read_text())
        here = run["machine"]
        self.assertRegex(here, r"^denoise-train \d+\.\d+\.\d+ on (CPU, oneDNN \d+\.\d+\.\d+, |.+, compute )")

        there = "denoise-train 0.1.0 on CPU, oneDNN 1.0.0, AVX2"
        self.edit_run(folder, machine=there)
        said = self.train("a", resume="latest")
        self.assertEqual(said.count("warning"), 1, said)
        self.assertIn("warning: from here on not the bits of an uninterrupted run: they were "
                      f"{there}'s, and this is {here}\n", said)  # fmt: skip
        # The next checkpoint is of this machine.
        self.assertNotIn("warning", self.train("a", resume="latest", steps=16))
        # Older ones do not say.
        shutil.rmtree(self.root / "a/checkpoints/step-000000016")
        shutil.rmtree(self.root / "a/checkpoints/step-000000012")
        self.edit_run(folder, machine=None)
        self.assertNotIn("warning", self.train("a", resume="latest"))

    def test_a_checkpoint_without_settings_is_refused(self):
        self.train("a", steps=4)
        folder = self.root / "a/checkpoints/step-000000004"
        self.edit_run(folder, configuration=[])
        self.assertIn("run.json has no settings; resume from another checkpoint",
                      self.train("a", rc=2, resume="latest"))  # fmt: skip

    def test_a_full_disk_leaves_the_last_checkpoint(self):
        said = self.train("a", steps=4)
        size = len(self.state("a", 4))
        said = self.train("a", rc=1, limit=size // 2, resume="latest")
        self.assertIn("Free some space", said)
        self.assertEqual(
            [p.name for p in (self.root / "a/checkpoints").iterdir()], ["step-000000004"])  # fmt: skip
        self.train("a", resume="latest")
        self.train("whole")
        self.assertEqual(self.state("a"), self.state("whole"))

    def test_a_full_file_system_leaves_the_last_checkpoint(self):
        """Not a limit of one file: what was written before, and what else is there, counts, too."""
        if subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode != 0:
            self.skipTest("unshare -Urm is refused here, so there is no small file system")
        whole = self.train("whole", canvas=320)
        self.assertNotIn("on disk", whole)
        kib = int(subprocess.run(["du", "-sk", self.root / "whole"], capture_output=True, text=True,
                                 check=True).stdout.split()[0])  # fmt: skip
        script = """set -u
            mount -t tmpfs -o size=$1 tmpfs "$2" || exit 77
            disk=$2 copy=$3; shift 3
            "$@"; echo "ended with $?" >&2
            mount -o remount,size=256m "$disk"
            "$@" --resume=latest && cp "$disk/run/checkpoints/step-000000012/state.safetensors" "$copy" """
        disk = self.root / "disk"
        disk.mkdir()

        def fill(size, **flags):
            copy = self.root / "copy"
            done = subprocess.run(
                ["unshare", "-Urm", "bash", "-c", script, "bash", size, disk, copy,
                 *self.arguments("disk/run", canvas=320, **flags)],
                capture_output=True, text=True, timeout=300)  # fmt: skip
            if done.returncode == 77:
                self.skipTest(f"a small file system cannot be mounted here: {done.stderr}")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(copy.read_bytes(), self.state("whole"))
            copy.unlink()
            return done.stderr.split("ended with 1\n")

        most = []
        for percent in (1, 20, 35, 50, 60, 70, 80, 90):
            with self.subTest(percent=percent):
                full, after = fill(f"{kib * percent // 100}k")
                self.assertRegex(full, r"No space left on device\. Free some space|cannot be created: No space")
                saved = max((int(step) for step in re.findall("saved step ([0-9]+)", full)), default=0)
                resumed = re.search("resumed at step ([0-9]+)", after)
                # A checkpoint is there before its model is, after which the run says that it saved.
                self.assertGreaterEqual(int(resumed[1]) if resumed else 0, saved, full)
                most.append(saved)
        self.assertGreater(len(set(most)), 1)  # the sizes are those of different moments
        with self.subTest("pictures on disk"):
            full, _ = fill("600k", **{"data-memory": 1})
            self.assertRegex(full, r"\d MiB; they are kept in a file in .*, because at most 1 MiB stay in memory")

    def test_two_runs_are_not_mixed_in_one_output(self):
        self.train("a", steps=8)
        self.train("b", steps=4, seed=1)
        other = self.root / "b/checkpoints/step-000000004"
        for _ in range(2):
            said = self.train("a", rc=2, seed=1, resume=other)
            self.assertIn(f"--resume {other}: --output {self.root}/a has checkpoints of its own; pass --resume latest, "
                          "or choose another --output", said)  # fmt: skip
            self.assertIn("has checkpoints of its own", self.train_ranks(2, output="a", seed=1, resume=other)[1])
            for done in (self.root / "a/checkpoints").glob("*/DONE"):
                done.unlink()  # damaged ones may be mended
        # It does not count what a save left that was killed.
        (self.root / "c/checkpoints/step-000000008.partial").mkdir(parents=True)
        self.train("c", steps=8, seed=1, resume=other)
        self.train("c", seed=1, resume=self.root / "c/checkpoints/step-000000008/")
        self.train("whole", seed=1)
        self.assertEqual(self.state("c"), self.state("whole"))

    def test_events_of_steps_that_are_made_again_are_dropped(self):
        """By TensorBoard, at the SessionLog of status START that begins a file."""
        self.train("a", steps=8)
        shutil.rmtree(self.root / "a/checkpoints/step-000000008")
        self.train("a", steps=8, resume="latest")
        starts = []
        for file in (self.root / "a/events").iterdir():
            data = file.read_bytes()
            second = 16 + struct.unpack("<Q", data[:8])[0]
            size = struct.unpack("<Q", data[second : second + 8])[0]
            event = data[second + 12 : second + 12 + size]
            self.assertEqual(event[11:], b"\x3a\x02\x08\x01")
            starts.append(event[9:11])
        self.assertEqual(sorted(starts), [b"\x10\x01", b"\x10\x05"])  # the first step of each

    def test_a_log_that_cannot_be_written_is_said_once(self):
        (self.root / "a/log.jsonl").mkdir(parents=True)
        said = self.train("a")
        self.assertEqual(said.count("log.jsonl: cannot be written from step"), 1)
        self.assertIn(
            f"{self.root}/a/log.jsonl: cannot be written from step 1 on: Is a directory", said)
        self.assertTrue((self.root / "a/model/model_index.json").exists())

    def test_lines_that_are_none_are_dropped_from_a_log(self):
        self.train("a", steps=4)
        log = self.root / "a/log.jsonl"
        lines = log.read_text()
        log.write_text(lines + '{"step":"x"}\n{"loss":1}\n{"step":1e300}\n{"step":[1]}\n[3]\n3\n{"step":')
        self.train("a", steps=8, resume="latest")
        self.assertTrue(log.read_text().startswith(lines))
        self.assert_log_has_each_step_once("a", 8)

    def test_a_log_that_cannot_be_read_is_left(self):
        self.train("a", steps=4)
        log = self.root / "a/log.jsonl"
        log.rename(self.root / "lines")
        log.symlink_to("log.jsonl")  # root reads files of any permissions, but no circle
        said = self.train("a", steps=8, resume="latest")
        self.assertIn(f"{log}: cannot be read: Too many levels of symbolic links; check the path and its permissions. It keeps its lines", said)
        self.assertTrue(log.is_symlink())
        log.unlink()
        log.symlink_to("there")  # a file that the next line creates
        self.assertNotIn("cannot be read", self.train("a", steps=12, resume="latest"))
        self.assertEqual(len((self.root / "a/there").read_text().splitlines()), 4)

    def test_a_full_disk_loses_log_and_events_and_says_so_once(self):
        said = self.train("a", rc=1, limit=4096, steps=60, **{"checkpoint-steps": 100})
        for file in ("log.jsonl", "events/events.out.tfevents"):
            found = re.findall(
                rf"{file}\S*: cannot be written from step \d+ on: File too large. The run goes on", said)
            self.assertEqual(len(found), 1, said)
        self.assertIn("step 60/60", said)  # after which the checkpoint does not fit
        self.assertIn("Free some space", said)

    def test_events_that_cannot_be_created_are_said_once(self):
        (self.root / "a").mkdir()
        (self.root / "a/events").write_text("a file")
        said = self.train("a", **{"sample-steps": 12, "sample-count": 4})
        self.assertEqual(said.count("The run goes on"), 1, said)
        self.assertIn("cannot be created: Not a directory. The run goes on", said)
        self.assertTrue((self.root / "a/model/model_index.json").exists())
        self.assertTrue((self.root / "a/samples/step-000000012.png").exists())

    def test_ranks_of_a_host_share_its_memory(self):
        # 12 pictures of 1 MiB, of which each of so many ranks would have half a share in memory.
        flags = {"steps": 1, "canvas": 1024}
        for variable in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
            said = self.train(variable, env={variable: "65536"}, **flags)
            self.assertIn("12 MiB on disk", said)
        self.assertNotIn("on disk", self.train("alone", **flags))
        said = self.train("x", rc=2, env={"LOCAL_WORLD_SIZE": "0"})
        self.assertIn("the environment's LOCAL_WORLD_SIZE is \"0\"; use 1 to 65536", said)

    @unittest.skipIf(shutil.which("nvidia-smi"), "there may be a GPU")
    def test_a_gpu_that_is_not_there_is_a_setting(self):
        self.assertIn("--device: ", self.train("a", rc=2, device="cuda"))

    def test_paths_that_cannot_be_looked_at(self):
        long = "x" * 300
        for flags, message in [
            ({"resume": long}, f"{long}: there is no such checkpoint"),
            ({"init-from": long}, long),
            ({"init-from": long, "dry-run": "true"}, long),
            ({"init-from": long, "network": None}, long),
            ({"output": long}, "File name too long"),
        ]:
            with self.subTest(flags=flags):
                self.assertIn(message, self.train(**{"output": "a", "rc": 2, **flags}))
        said = self.train("a", rc=2, env={"WORLD_SIZE": "2", "RANK": "0"},
                          **{"init-from": long, "dry-run": "true"})  # fmt: skip
        self.assertIn(long, said)
        self.train("good")
        for begin in (None, self.root / "good/model"):
            said = self.train("a", env={"WORLD_SIZE": "2", "RANK": "0"},
                              **{"init-from": begin, "dry-run": "true"})  # fmt: skip
            self.assertRegex(said, r"measured\) without the exchange of gradients: at least \d+\.\d\d hours\n")
        said = self.train("a", rc=2, env={"TMPDIR": str(self.root / "none")}, **{"dry-run": "true"})
        self.assertIn("set TMPDIR", said)

    def test_what_settings_alone_decide_is_refused_before_pictures_are_read(self):
        cases = [
            ({"norm_num_groups": 3}, {}, "which 3 groups do not divide"),
            ({"out_channels": 3}, {}, "out_channels is 3 and in_channels 1"),
            ({"in_channels": 2, "out_channels": 2}, {},
             "other.json: field 'in_channels' is 2, but pictures have 1 or 3 channels; use one of them"),
            ({"num_class_embeds": None}, {}, "--class-dropout is 0.1, but the network has no classes; leave it out, or set"),
            ({"num_class_embeds": None, "class_embed_type": "identity"}, {}, "which have no null class"),
            ({}, {"objective": "score"}, 'set time_embedding_type to "fourier"'),
            ({"time_embedding_type": "learned", "num_train_timesteps": 1000}, {},
             "a table of whole timesteps"),
        ]  # fmt: skip
        for fields, flags, message in cases:
            with self.subTest(fields=fields, flags=flags):
                (self.root / "other.json").write_text(json.dumps({**NETWORK, **fields}))
                for dry in ("false", "true"):
                    said = self.train("a", rc=2, network=self.root / "other.json", **{"dry-run": dry, **flags})
                    self.assertIn(message, said)
                    self.assertNotIn("read in", said)

    def test_a_resume_does_not_need_the_weights_of_the_start(self):
        self.train("start", steps=1)
        start = {"init-from": self.root / "start/model"}
        self.train("whole", **start)
        self.train("a", steps=4, **start)
        (self.root / "start/model/unet/diffusion_pytorch_model.safetensors").unlink()
        self.train("a", resume="latest", **start)
        self.assertEqual(self.state("a"), self.state("whole"))
        for flags in ({"resume": "latest"}, {"dry-run": "true"}):
            said = self.train("none", rc=2, **start, **flags)
            self.assertIn(f"{self.root}/start/model/unet: no weights", said)
            self.assertNotIn("read in", said)  # before the pictures are read

    def test_a_resume_does_not_need_the_start(self):
        self.train("start", steps=1, objective="v", timesteps=500, **{"beta-end": 0.0123456789012345})
        flags = {"network": None, "init-from": self.root / "start/model"}
        self.train("whole", **flags)
        self.train("a", steps=4, **flags)
        saved = self.flags("a", 4)
        self.assertEqual([saved[flag] for flag in ("objective", "timesteps", "beta-end")],
                         ["v", "500", "0.0123456789012345"])  # fmt: skip
        self.assertNotIn("beta-start", saved)
        self.resume("a", "--steps=8")
        shutil.rmtree(self.root / "start")
        self.resume("a", "--steps=12")
        self.assertEqual(self.state("a"), self.state("whole"))
        scheduler = "model/scheduler/scheduler_config.json"
        self.assertEqual((self.root / "a" / scheduler).read_text(), (self.root / "whole" / scheduler).read_text())

    def test_a_resume_does_not_need_the_start_for_the_noise_of_its_sampler(self):
        """EDM's, which no flag sets."""
        self.train("start", steps=1)
        start, model = {"init-from": self.root / "start/model"}, "model/scheduler/scheduler_config.json"
        file = self.root / "start" / model

        def begins_with(sigma_max):
            file.write_text(json.dumps({**json.loads(file.read_text()), "sigma_min": 0.01, "sigma_max": sigma_max}))

        begins_with(20)
        self.train("whole", **start)
        self.train("a", steps=4, **start)
        shutil.copytree(self.root / "a", self.root / "older")
        begins_with(30)  # another model by now
        self.resume("a", "--steps=8")
        shutil.rmtree(self.root / "start")
        self.resume("a", "--steps=12")
        self.assertEqual(self.state("a"), self.state("whole"))
        scheduler = json.loads((self.root / "a" / model).read_text())
        self.assertEqual((scheduler["sigma_min"], scheduler["sigma_max"]), (0.01, 20))
        self.assertEqual(scheduler, json.loads((self.root / "whole" / model).read_text()))
        # Checkpoints of earlier versions do not say it, and the start does not either: a later resume may find it.
        self.edit_run(self.root / "older/checkpoints/step-000000004", sampler=None)
        lost = (f"does not say with which noise EDM's sampler begins and ends, and --init-from cannot say it either: "
                f"{self.root}/start/model: there is no such directory. The model has the defaults, sigma_min 0.002 and sigma_max 80")
        for step in (6, 8):
            self.assertIn(lost, self.resume("older", f"--steps={step}"))
            self.assertEqual(json.loads((self.root / "older" / model).read_text())["sigma_max"], 80)
        shutil.copytree(self.root / "whole/model", self.root / "start/model")
        self.assertNotIn("earlier version", self.resume("older", "--steps=10"))
        shutil.rmtree(self.root / "start")
        self.assertNotIn("earlier version", self.resume("older", "--steps=12"))
        self.assertEqual(json.loads((self.root / "older" / model).read_text()), scheduler)
        self.assertEqual(self.state("older"), self.state("whole"))

    def test_a_resume_does_not_read_the_start(self):
        """Whichever way its settings are given, and whatever is there by now."""
        start, config = self.root / "start/model", self.root / "run.json"
        self.train("start", steps=1, objective="v", timesteps=500, **{"beta-end": 0.015})
        config.write_text(json.dumps({"init-from": str(start)}))
        given = {"network": None, "init-from": start}
        self.train("whole", **given)
        self.train("a", steps=4, **given)
        scheduler = start / "scheduler/scheduler_config.json"

        def changed():
            scheduler.write_text(json.dumps({"_class_name": "EDMEulerScheduler", "sigma_data": 0.7}))
            (start / "unet/config.json").write_text(json.dumps({**NETWORK, "norm_eps": 1e-3}))

        def broken():
            for file in (scheduler, start / "unet/config.json", start / "model_index.json"):
                file.write_text("{")

        for change in (changed, broken, lambda: shutil.rmtree(start)):
            change()
            for how, flags in (("flags", given), ("config", {"network": None, "config": config}), ("older", given)):
                with self.subTest(change=change, how=how):
                    shutil.rmtree(self.root / "b", ignore_errors=True)
                    shutil.copytree(self.root / "a", self.root / "b")
                    if how == "older":
                        self.edit_run(self.root / "b/checkpoints/step-000000004", flags=None)
                    said = self.train("b", resume="latest", **flags)
                    self.assertIn("resumed at step 4", said)
                    self.assertEqual(self.state("b"), self.state("whole"))
                    model = "model/scheduler/scheduler_config.json"
                    self.assertEqual((self.root / "b" / model).read_text(), (self.root / "whole" / model).read_text())
        # Another objective is another run, as it is without a start.
        said = self.train("b", rc=2, resume="latest", **given, objective="epsilon")
        self.assertIn('--objective was "v" and is "epsilon"', said)
        # Without a checkpoint there must be a start.
        self.assertIn(str(start), self.train("none", rc=2, resume="latest", **given))

    def test_a_start_says_how_it_was_trained(self):
        betas = {"beta-schedule": "scaled_linear", "beta-start": 0.00085, "beta-end": 0.012}
        self.train("v", objective="v", timesteps=500, **betas)
        start, again = self.root / "v/model", {"steps": 2, "network": None, "init-from": self.root / "v/model"}
        scheduler = json.loads((start / "scheduler/scheduler_config.json").read_text())

        def trained(output, **flags):
            said = self.train(output, **again, **flags)
            return said, json.loads((self.root / output / "model/scheduler/scheduler_config.json").read_text())

        said, written = trained("same")
        self.assertEqual(written, scheduler)
        self.assertIn(f"--init-from {start}: objective v and noise as in its scheduler_config.json", said)
        self.train("by hand", **again, objective="v", timesteps=500, **betas)
        self.assertEqual(self.state("same", 2), self.state("by hand", 2))
        said, written = trained("epsilon", objective="epsilon", **{"beta-end": 0.02})
        self.assertEqual(written, {**scheduler, "prediction_type": "epsilon", "beta_end": 0.02})
        self.assertIn("trained for the objective v, and this run is for epsilon", said)
        said, _ = trained("other betas", **{"beta-schedule": "linear"})
        self.assertIn('trained with other noise: beta_schedule was "scaled_linear" and is "linear"', said)
        said, written = trained("edm", objective="edm", **{"sigma-data": 0.6})
        self.assertEqual(written["_class_name"], "EDMDPMSolverMultistepScheduler")
        self.assertIn("trained for the objective v, and this run is for edm", said)
        again["init-from"] = self.root / "edm/model"
        self.assertEqual(trained("edm again")[1]["sigma_data"], 0.6)
        # The folder of the network alone has no scheduler.
        again["init-from"] = start / "unet"
        self.assertIn("no scheduler_config.json says how it was trained; the objective is edm", trained("unet")[0])
        # One that does not say how to train.
        file = start / "scheduler/scheduler_config.json"
        file.write_text('{"_class_name": "CMStochasticIterativeScheduler"}')
        index = json.loads((start / "model_index.json").read_text())
        index["scheduler"] = ["diffusers", "CMStochasticIterativeScheduler"]
        (start / "model_index.json").write_text(json.dumps(index))
        again["init-from"] = start
        said = self.train("refused", rc=2, **again)
        self.assertIn(f"--init-from: {file}: field '_class_name' is \"CMStochasticIterativeScheduler\"", said)
        self.assertIn("or choose an --objective, with the noise of the flags", said)
        not_used = f"--init-from {start}: its scheduler_config.json is not used: {file}: field"
        said, _ = trained("chosen", objective="epsilon")
        self.assertIn(f"{not_used} '_class_name' is \"CMStochasticIterativeScheduler\"", said)
        # With numbers that no flag gave.
        for name, fields, message in [
            ("EDMEulerScheduler", {"sigma_data": 0}, "field 'sigma_data' is 0"),
            ("EDMEulerScheduler", {"sigma_min": -1}, "field 'sigma_min' is -1"),
            ("ScoreSdeVeScheduler", {"sigma_max": 20000}, "field 'sigma_max' is 20000"),
            ("DDIMScheduler", {"beta_start": 0.9, "beta_end": 0.99}, "the server could not draw with"),
        ]:  # fmt: skip
            with self.subTest(scheduler=name, fields=fields):
                file.write_text(json.dumps({"_class_name": name, **fields}))
                index["scheduler"] = ["diffusers", name]
                (start / "model_index.json").write_text(json.dumps(index))
                self.assertIn(f"--init-from: {file}: {message}", self.train("refused", rc=2, **again))
        # One whose betas the objectives do not have.
        file.write_text(json.dumps({**scheduler, "rescale_betas_zero_snr": True}))
        index["scheduler"] = ["diffusers", scheduler["_class_name"]]
        (start / "model_index.json").write_text(json.dumps(index))
        said, written = trained("other noise", objective="v")
        self.assertIn(f"{not_used} 'rescale_betas_zero_snr' is true", said)
        self.assertIn("; the noise is that of the flags\n", said)
        self.assertNotIn("no scheduler_config.json says", said)
        self.assertEqual([written["beta_schedule"], written["num_train_timesteps"]], ["linear", 1000])

    def test_a_start_of_another_function_is_refused(self):
        self.train("a")
        start = self.root / "a/model"
        for field, value, was in [("norm_eps", 1e-3, None), ("attention_head_dim", 4, 8), ("act_fn", "relu", None),
                                  ("flip_sin_to_cos", False, None)]:  # fmt: skip
            (self.root / "other.json").write_text(json.dumps({**NETWORK, field: value}))
            said = self.train("b", rc=2, network=self.root / "other.json", **{"init-from": start})
            was = "not set" if was is None else was
            self.assertIn(f"{field} was {was} and is {json.dumps(value)}. Use the same, or leave", said)
        for flags, message in [({"network": "none.json"}, "--network: none.json: no such file"),
                               ({"network": None, "init-from": start.parent}, "--init-from needs the folder of a model")]:
            self.assertIn(message, self.train("b", rc=2, **flags))
        # Also if only some of a model's parts are there.
        (start / "model_index.json").rename(self.root / "index.json")
        said = self.train("b", rc=2, network=self.root / "other.json", **{"init-from": start})
        self.assertIn("flip_sin_to_cos was not set and is false", said)
        said = self.train("parts", steps=1, **{"init-from": start})
        self.assertIn(f"--init-from {start}: objective edm and noise as in its scheduler_config.json", said)
        (self.root / "index.json").rename(start / "model_index.json")
        scheduler = start / "scheduler/scheduler_config.json"
        scheduler.rename(self.root / "scheduler.json")
        said = self.train("b", rc=2, **{"init-from": start})
        self.assertIn(f"--init-from: {scheduler}: no such file, but", said)
        (self.root / "scheduler.json").rename(scheduler)
        # Without another function.
        (self.root / "other.json").write_text(json.dumps({
            **NETWORK, "norm_eps": 1e-5, "act_fn": "silu", "dropout": 0.2, "sample_size": 16}))  # fmt: skip
        self.train("b", network=self.root / "other.json", **{"init-from": start})

    def test_a_start_that_is_not_finite_is_refused(self):
        self.train("a", steps=1)
        weights = self.root / "a/model/unet/diffusion_pytorch_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4] + struct.pack("<f", float("nan")))
        said = self.train("b", rc=2, **{"init-from": self.root / "a/model"})
        self.assertRegex(said, rf"{weights.parent}: tensor '\S+' has numbers that are not finite, .*use other weights")
        self.assertNotIn("read in", said)  # before the pictures are read

    def test_a_start_with_other_tensors_is_refused_before_pictures_are_read(self):
        self.train("a", steps=1)
        file = self.root / "a/model/unet/diffusion_pytorch_model.safetensors"
        before = file.read_bytes()
        for old, new, message, ends in [
            (b'"conv_in.weight"', b'"conv_in.heavy!"', "no tensor 'conv_in.weight', which the config asks for with shape",
             "; take weights and config from one model\n"),
            (b'"shape":[8,1,3,3]', b'"shape":[1,8,3,3]', "tensor 'conv_in.weight' has shape [1, 8, 3, 3], but the config",
             "; config and weights do not belong together\n"),
            (b'"dtype":"F32"', b'"dtype":"I32"', "tensor 'class_embedding.weight' is I32", "; expected F32, F16 or BF16\n"),
        ]:  # fmt: skip
            header = before.replace(old, new, 1)
            self.assertEqual((len(header), header != before), (len(before), True), before[:200])
            file.write_bytes(header)
            for flags in ({}, {"dry-run": "true"}, {"resume": "latest"}):
                with self.subTest(message=message, flags=flags):
                    said = self.train("b", rc=2, **{"init-from": self.root / "a/model", **flags})
                    self.assertIn(f"--init-from: {file.parent}: {message}", said)
                    self.assertIn(ends, said)
                    self.assertNotIn("read in", said)

    def test_a_run_that_diverges_ends_with_a_message(self):
        said = self.train("a", rc=2, **{
            "learning-rate": 1000, "max-skipped": 3, "steps": 200, "clip": 0,
            "checkpoint-steps": 50})  # fmt: skip
        self.assertIn("not finite in 3 steps in a row", said)
        self.assertIn("Lower --learning-rate", said)
        self.assertNotIn("--init-from", said)  # there is no checkpoint
        self.assertIn("  1 step skipped\n", said)
        self.assertIn("  2 steps skipped\n", said)
        self.assertNotIn("-nan", said)
        entries = (self.root / "a/log.jsonl").read_text().splitlines()
        self.assertEqual(json.loads(entries[-1])["skipped"], 3)

    def test_a_run_that_learned_nothing_fails_though_it_is_short(self):
        said = self.train("a", rc=2, **{
            "learning-rate": 1000, "weight-decay": 1000, "clip": 0, "steps": 30})  # fmt: skip
        self.assertRegex(said, r"not finite (in \d+ of 30 steps|at step 30)")
        self.assertIn("Lower --learning-rate", said)

    def test_a_failed_run_does_not_succeed_when_it_is_repeated(self):
        (self.root / "variance.json").write_text(json.dumps({**NETWORK, "out_channels": 2}))
        flags = {"network": self.root / "variance.json", "objective": "epsilon", "variance-weight": 1e30, "steps": 4}
        for resume in (None, "latest"):
            said = self.train("a", rc=2, resume=resume, **flags)
            self.assertIn("the gradient was not finite in 4 of 4 steps", said)

    def test_bad_pictures(self):
        bad = self.data / "down/bad.png"
        bad.write_bytes(png(lambda x, y: 0)[:40])
        said = self.train("a", rc=2)
        self.assertIn("bad.png", said)
        self.assertIn("--skip-bad-files", said)
        said = self.train("a", **{"skip-bad-files": "true"})
        self.assertIn("skipped " + str(bad), said)
        self.assertIn("1 skipped", said)
        # A terminal would obey what is in a name.
        bad.rename(self.data / "down/\x1b[2J\n.png")
        said = self.train("b", rc=2)
        self.assertIn("down/\\x1b[2J\n.png: ", said)
        self.assertNotIn("\x1b", said)
        said = self.train("named", **{"skip-bad-files": "true"})
        self.assertNotIn("\x1b", said)
        (self.data / "down/\x1b[2J\n.png").unlink()
        shutil.copy(REPOSITORY / "tests/fuzz/corpus/image/cmyk_jpeg", self.data / "down/cmyk.jpg")
        self.assertIn("cmyk.jpg: the JPEG is CMYK; convert it to RGB or grey. Correct or remove it, or pass "
                      "--skip-bad-files", self.train("b", rc=2))  # fmt: skip
        (self.data / "down/cmyk.jpg").unlink()
        (self.data / "stray.png").write_bytes(png(lambda x, y: 9))
        said = self.train("b", rc=2)
        self.assertIn("stray.png: it has no label", said)
        (self.data / "stray.png").unlink()
        (self.data / "down/gone.png").symlink_to("nowhere.png")
        self.assertIn("down/gone.png: cannot be read", self.train("b", rc=2))
        (self.data / "down/gone.png").unlink()
        (self.data / "down/circle").symlink_to("..")
        self.assertRegex(self.train("b", rc=2), f"{self.data}/down/circle\\S*: cannot be read: .*symbolic links")
        (self.data / "down/circle").unlink()
        (self.data / "down/loop").symlink_to("loop")
        self.assertIn(f"{self.data}/down/loop: cannot be read: Too many levels", self.train("b", rc=2))
        (self.data / "down/loop").unlink()
        (self.data / "down/closed").mkdir(mode=0)
        if os.geteuid() != 0:
            self.assertIn(f"{self.data}/down/closed: cannot be read: Permission denied", self.train("b", rc=2))

    def test_folders_may_be_links(self):
        self.train("folders")
        for of in ("across", "down"):
            (self.data / of).rename(self.root / ("elsewhere-" + of))
            (self.data / of).symlink_to(self.root / ("elsewhere-" + of))
        self.train("links")
        self.assertEqual(self.state("links"), self.state("folders"))

    def test_labels_of_metadata(self):
        lines = [{"file_name": f"{of}/{i}.png", "label": of} for of in ("down", "across")
                 for i in range(6)]  # fmt: skip
        metadata = self.data / "metadata.jsonl"
        metadata.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.train("named")
        self.train("folders")
        self.assertEqual(self.state("named"), self.state("folders"))
        dotted = [{**line, "file_name": "./" + line["file_name"]} for line in lines]
        metadata.write_text("".join(json.dumps(line) + "\n" for line in dotted))
        self.assertIn("12 pictures", self.train("dotted"))
        self.assertEqual(self.state("dotted"), self.state("folders"))
        metadata.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
        self.assertIn("5.png: it has no label", self.train("missing", rc=2))
        lost = {"file_name": "down/lost.png", "label": "down"}
        metadata.write_text("".join(json.dumps(line) + "\n" for line in [*lines, lost]))
        self.assertIn(f"{self.data}/down/lost.png: cannot be read", self.train("lost", rc=2))
        metadata.write_text('{"file_name": 3}\n')
        self.assertIn("metadata.jsonl, line 1", self.train("broken", rc=2))
        metadata.write_text('\n{"file_name": "across/0.png", "label": 0, "label": 1}\n')
        self.assertIn('metadata.jsonl, line 2: has "label" twice; give it once', self.train("broken", rc=2))

    def test_what_a_model_says_of_itself(self):
        self.train("a", steps=4, **{"default-steps": 7, "default-guidance-scale": 1.5,
                                    "model-dtype": "fp16", "config": self.names("one", "two")})
        model = self.root / "a/model"
        index = json.loads((model / "model_index.json").read_text())
        self.assertEqual(index["id2label"], {"0": "one", "1": "two"})
        self.assertEqual(index["_denoised"],
                         {"null_class": 2, "default_steps": 7, "default_guidance_scale": 1.5})
        self.assertIn(b'"dtype":"F16"',
                      (model / "unet/diffusion_pytorch_model.safetensors").read_bytes())
        self.assertIn("there are 1 names, but a picture has label 1",
                      self.train("b", rc=2, config=self.names("one")))
        self.assertIn('--class-name: classes 0 and 1 are both named "crane", so requests with that name would '
                      "always get class 0; give each class a name of its own",
                      self.train("b", rc=2, config=self.names("crane", "crane")))
        self.assertIn("a text may not have a zero character", self.train("b", rc=2, config=self.names("a\0b", "c")))
        self.assertIn("--model-dtype", self.train("b", rc=2, **{"model-dtype": "fp8"}))

    def test_classes_that_do_not_fit_are_refused_before_pictures_are_read(self):
        def refused(message, **flags):
            for dry in ("false", "true"):
                with self.subTest(message=message, dry=dry):
                    said = self.train("refused", rc=2, **flags, **{"dry-run": dry})
                    self.assertIn(message, said)
                    self.assertNotIn("read in", said)

        def label(**labels):
            lines = [{"file_name": f"{of}/{i}.png", "label": label} for of, label in labels.items() for i in range(6)]
            (self.data / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

        refused("there are 1 names, but a picture has label 1; name every class", config=self.names("one"))
        refused("set it to 2, or name every class", **{"class-dropout": None})
        label(across=0, down=3)
        refused("a picture has label 3, but the network's num_class_embeds is 3; set it to more than 4, with the null "
                "class, or correct")
        label(across=0, down=2)
        refused("--null-class is 2, which is the class of a picture too")
        # Unless it is left out.
        label(across=0, down=1)
        with (self.data / "metadata.jsonl").open("a") as lines:
            lines.write('{"file_name": "gone.png", "label": 7}\n')
        refused("a picture has label 7")
        self.assertIn("1 skipped", self.train("a", steps=1, **{"skip-bad-files": "true"}))
        (self.root / "vectors.json").write_text(json.dumps(
            {**NETWORK, "num_class_embeds": None, "class_embed_type": "identity", "time_embedding_dim": 4}))  # fmt: skip
        label(across=[0, 1], down=[1, 2])
        vectors = {"network": self.root / "vectors.json", "class-dropout": None}
        refused("vectors of 2 numbers, but the network reads 4", **vectors)
        # Pictures whose labels are missing, or differ from others in size, are named instead.
        label(across=[0, 1], down=[1, 2, 3, 4])
        refused("down/0.png: its label has 4 numbers, and those of others 2", **vectors)
        (self.data / "metadata.jsonl").unlink()
        for of in ("across", "down"):
            for file in (self.data / of).iterdir():
                file.rename(self.data / f"{of}{file.name}")
        refused("across0.png: it has no label: it is in no folder of a class")
        # Arrays, too.
        images, labels = self.root / "images", self.root / "labels"
        images.write_bytes(struct.pack(">IIII", 0x803, 10, 8, 8) + bytes(640))
        labels.write_bytes(struct.pack(">II", 0x801, 10) + bytes(range(10)))
        refused("a picture has label 9", data=images, labels=labels)

    def test_refuses_names_that_the_server_would_refuse(self):
        plain = self.root / "plain.json"
        plain.write_text(json.dumps({**NETWORK, "num_class_embeds": None}))
        self.train("plain", steps=1, network=plain, **{"class-dropout": None})
        self.assertNotIn("id2label", (self.root / "plain/model/model_index.json").read_text())
        self.assertIn("the network has no classes",
                      self.train("a", rc=2, network=plain, config=self.names("one", "two"),
                                 **{"class-dropout": None}))  # fmt: skip
        self.assertIn("num_class_embeds is 3; set it to 2, or",
                      self.train("a", rc=2, **{"class-dropout": None}))
        (self.data / "new").mkdir()
        (self.data / "new/0.png").write_bytes(png(lambda x, y: 0))
        self.assertIn("set it to 4, with the null class", self.train("a", rc=2))
        (self.data / "new").rename(self.data / os.fsdecode(b"\xff"))
        self.assertIn(f'--data {self.data}: the name of class "\ufffd" cannot be used', self.train("a", rc=2, **{"class-dropout": None}))
        self.assertIn("there are 100 timesteps",
                      self.train("a", rc=2, objective="v", timesteps=100, **{"default-steps": 101}))

    def test_weights_that_draw_nothing_are_refused_before_pictures_are_read(self):
        def weigh(*weights):
            lines = [{"file_name": f"{of}/{i}.png", "label": of, "weight": weights[i % len(weights)]}
                     for of in ("across", "down") for i in range(6)]  # fmt: skip
            (self.data / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

        for weights, total in (((0,), "0"), ((1e-310,), "1.19"), ((1e308, 1), "inf")):
            weigh(*weights)
            for flags in ({}, {"dry-run": "true"}):
                with self.subTest(weights=weights, flags=flags):
                    said = self.train("refused", rc=2, **flags)
                    self.assertIn(f"the weights of the pictures sum up to {total}", said)
                    self.assertNotIn("read in", said)
        # Unless pictures may be left out.
        flags = {"skip-bad-files": "true", "steps": 1}
        self.assertRegex(self.train("refused", rc=2, **flags), r"read in[^#]*pictures sum up to inf")
        for of in ("across", "down"):
            for i in (0, 2, 4):
                (self.data / of / f"{i}.png").write_text("")
        self.assertIn("6 skipped", self.train("skipped", **flags))

    @unittest.skipIf(DEVICE in (None, "cpu"), "a CPU computes passes of any size")
    def test_passes_that_are_too_large_are_refused_before_pictures_are_read(self):
        for flags in ({}, {"dry-run": "true"}):
            said = self.train("refused", rc=2, batch=1 << 17, **flags)
            self.assertIn("a pass has 131072 samples, but on a GPU at most 65535", said)
            self.assertNotIn("read in", said)

    def test_messages_about_the_null_class_lead_to_a_run(self):
        """To whoever does what they say first, in two steps at most."""
        names = ("no", "a", "b")
        for embeds, null, classes in itertools.product(
                (1, 2, 3, 4), (None, 0, 1, 2), ("folders", "numbers", "names", "names of numbers")):  # fmt: skip
            if "numbers" in classes:  # from 1
                lines = [{"file_name": f"{of}/{i}.png", "label": 1 + (of == "down")}
                         for of in ("across", "down") for i in range(6)]  # fmt: skip
                (self.data / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            else:
                (self.data / "metadata.jsonl").unlink(missing_ok=True)
            flags = {"null-class": null, "config": self.names(*names) if "names" in classes else None}
            said = []
            with self.subTest(embeds=embeds, null=null, classes=classes):
                for _ in range(3):
                    (self.root / "network.json").write_text(json.dumps({**NETWORK, "num_class_embeds": embeds}))
                    done = subprocess.run(self.arguments("x", **flags, **{"dry-run": "true"}), capture_output=True,
                                          text=True, timeout=120)  # fmt: skip
                    said.append(done.stderr)
                    if done.returncode == 0:
                        break
                    before = (embeds, flags["null-class"])
                    if more := re.search(r"set it to more than (\d+)", done.stderr):
                        embeds = int(more[1]) + 1
                    elif to := re.search(r"set (?:it|num_class_embeds) to (\d+)", done.stderr):
                        embeds = int(to[1])
                    if re.search("leave (it|--null-class) out", done.stderr):
                        flags["null-class"] = None
                    self.assertNotEqual(before, (embeds, flags["null-class"]), said)
                self.assertEqual(done.returncode, 0, said)
        for embeds, null, message in [
            (3, 0, '--null-class is 0, which is the class "across"; leave --null-class out, so that it is 2, the last'),
            (4, 2, "num_class_embeds is 4; set it to 3, with the null class\n"),
            (1, None, "num_class_embeds is 1; set it to 3, with the null class\n"),  # more names do not help
            (2, 2, "use 0 to 1, the last of num_class_embeds, and the class of no picture, or leave it out\n"),
        ]:
            (self.data / "metadata.jsonl").unlink(missing_ok=True)
            (self.root / "network.json").write_text(json.dumps({**NETWORK, "num_class_embeds": embeds}))
            self.assertIn(message, self.train("x", rc=2, **{"null-class": null}))

    def test_names_that_no_request_could_give_are_refused(self):
        blank = "cannot be used: it is blank, so no request could give it; "
        for name in ("", " "):
            for dry in ("false", "true"):
                said = self.train("refused", rc=2, config=self.names("one", name), **{"dry-run": dry})
                self.assertIn(f'--class-name: the name of class "{name}" {blank}give another name\n', said)
            done = subprocess.run([*self.arguments("refused"), "--class-name=one", f"--class-name={name}"],
                                  capture_output=True, text=True)  # fmt: skip
            self.assertEqual((done.returncode, blank in done.stderr), (2, True), done.stderr)
        (self.data / "down").rename(self.data / " ")
        said = self.train("refused", rc=2)
        remedy = f'--data {self.data}: the name of class " " {blank}rename it, or name all classes with --class-name\n'
        self.assertIn(remedy, said)
        self.assertNotIn("read in", said)
        lines = [{"file_name": f"{of}/{i}.png", "label": of} for of in ("across", " ") for i in range(6)]
        (self.data / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.assertIn(remedy, self.train("refused", rc=2))
        # The remedy helps.
        self.train("names", steps=1, config=self.names("one", "two"))
        # Where there are no classes, a folder may have any name.
        (self.data / "metadata.jsonl").unlink()
        (self.root / "plain.json").write_text(json.dumps({**NETWORK, "num_class_embeds": None}))
        self.train("plain", steps=1, network=self.root / "plain.json", **{"class-dropout": None})

    def test_names_that_the_command_cannot_give_are_told(self):
        begin = "warning: denoise --labels separates names at commas, and takes a number for that of a class, so it cannot name "
        end = "; give the number of the class there, or another name with --class-name\n"

        def names(*labels):
            for folder, label in zip(sorted(self.data.iterdir()), labels):
                folder.rename(self.data / label)

        names("a", "tench, Tinca")
        for flags in ({"dry-run": "true"}, {"steps": 4}, {"resume": "latest", "steps": 8}):
            self.assertIn(f'{begin}"tench, Tinca" (class 1){end}', self.train("a", **flags))
        self.assertIn('"tench, Tinca" (class 1)', self.resume("a", "--steps=12"))
        self.assertEqual(json.loads((self.root / "a/model/model_index.json").read_text())["id2label"],
                         {"0": "a", "1": "tench, Tinca"})  # fmt: skip
        # Both remedies for folders that are numbered from 1.
        names("1", "2")
        self.assertIn(f'{begin}"1" (class 0), "2" (class 1){end}', self.train("numbers", steps=1))
        self.assertNotIn(begin, self.train("numbers", steps=2, resume="latest", config=self.names("one", "two")))
        names("0", "1")
        self.assertNotIn(begin, self.train("from 0", steps=1))
        # In one line, also if there are many; those of a checkpoint's flags, too.
        (self.root / "wide.json").write_text(json.dumps({**NETWORK, "num_class_embeds": 6}))
        many = {"network": self.root / "wide.json", "config": self.names("a", "b,b", "c,c", "d,d", "e,e")}
        told = f'{begin}"b,b" (class 1), "c,c" (class 2), "d,d" (class 3), and 1 more{end}'
        self.assertIn(told, self.train("many", steps=1, **many))
        self.assertIn(told, self.resume("many", "--steps=2"))

    def test_one_run_writes_to_a_folder(self):
        first = subprocess.Popen(self.arguments("a", steps=100000), stderr=subprocess.PIPE, text=True)
        try:
            while "step 1/" not in first.stderr.readline():
                self.assertIsNone(first.poll())
            self.assertIn("another denoise-train", self.train("a", rc=1, resume="latest"))
        finally:
            first.kill()
            first.communicate()
        self.train("a", steps=1, resume="latest", **{"checkpoint-steps": 1})

    def stop_at(self, output, line, **flags):
        """A run that SIGSTOP holds some time after it said `line`."""
        process = self.start(output, steps=10**6, **flags)
        while line not in (said := process.stderr.readline()):
            self.assertTrue(said)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        return process

    def read_until(self, process, *parts):
        """What it says until it has said all these parts, each once or more."""
        said = ""
        while not all(part in said for part in parts):
            line = process.stderr.readline()
            self.assertTrue(line, said)
            said += line
        return said

    def test_a_run_whose_folder_is_moved_goes_on_in_it(self):
        flags = {"log-steps": 20, "checkpoint-steps": 20, "sample-steps": 40, "sample-count": 1, "keep": 10**6}
        for place, there in (("replaced", "another folder is"), ("moved", "nothing is")):
            with self.subTest(place=place):
                output, moved = self.root / place, self.root / f"{place} elsewhere"
                process = self.stop_at(place, "drew ", **flags)
                output.rename(moved)
                if place == "replaced":
                    self.train(place, steps=1, **{"sample-steps": 1})
                before = {path: path.is_file() and path.read_bytes() for path in output.rglob("*")}
                last = max((moved / "checkpoints").glob("step-*")).name
                process.send_signal(signal.SIGCONT)
                said = self.read_until(process, "the folder of this run was moved", "drew ", "saved step")
                said += self.read_until(process, "drew ", "saved step")
                process.send_signal(signal.SIGTERM)
                said += process.stderr.read()
                self.assertEqual(process.wait(timeout=60), 0, said)
                self.assertEqual(said.count(f"--output {output}: the folder of this run was moved, and {there} there now. "
                                            "The run goes on"), 1, said)  # fmt: skip
                self.assertIn(f"drew {output}/samples/step-", said)
                self.assertNotIn("/proc", said)
                # All that is written is in the folder of the run, and nothing in the other.
                after = {path: path.is_file() and path.read_bytes() for path in output.rglob("*")}
                self.assertEqual(after, before)
                step = int(re.search(r"stopped by a signal after step (\d+)", said)[1])
                self.assertGreater(f"step-{step:09}", last)
                self.assertTrue((moved / f"checkpoints/step-{step:09}/DONE").exists())
                self.assertGreater(max((moved / "samples").iterdir()).stem, last)
                logged = (moved / "log.jsonl").read_text().splitlines()
                self.assertEqual(json.loads(logged[-1])["step"], step)
                said = self.train(moved, resume="latest", steps=step + 1, **flags)
                self.assertIn(f"resumed at step {step}\n", said)

    def test_a_run_whose_folder_is_removed_ends(self):
        for place, flags, ready in [
            ("log", {"log-steps": 1, "checkpoint-steps": 10**6}, "step 3/"),
            ("save", {"log-steps": 10**6, "checkpoint-steps": 20}, "saved step 20\n"),
        ]:  # fmt: skip
            with self.subTest(place=place):
                process = self.stop_at(place, ready, **flags)
                shutil.rmtree(self.root / place)
                process.send_signal(signal.SIGCONT)
                said = process.stderr.read()
                self.assertEqual(process.wait(timeout=60), 2, said)
                self.assertRegex(said, f"denoise-train: --output {self.root}/{place}: the folder of this run was removed, "
                                 r"with all that it had saved, so the run ends at step \d+\n$")  # fmt: skip
                self.assertFalse((self.root / place).exists())

    def test_a_path_that_cannot_be_looked_at_does_not_end_a_run(self):
        parent = self.root / "parent"
        process = self.stop_at(parent / "a", "step 3/", **{"log-steps": 1, "checkpoint-steps": 20})
        parent.rename(self.root / "away")
        parent.symlink_to(parent)  # ELOOP
        process.send_signal(signal.SIGCONT)
        self.read_until(process, "saved step", "step ")
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        self.assertEqual(process.wait(timeout=60), 0, said)
        self.assertNotIn("was moved", said)

    def test_an_output_among_the_pictures_is_refused(self):
        link = self.root / "link"
        link.symlink_to(self.data)
        for output in (self.data / "run", self.data, link / "down/run", self.data / "../pictures/run"):
            for dry in ("false", "true"):
                self.assertIn(f"--output {output} lies in --data {self.data}, where its grids would count as pictures; "
                              "use a folder outside of it", self.train(output, rc=2, **{"dry-run": dry}))  # fmt: skip
        self.assertEqual(len(list(self.data.iterdir())), 2)
        hidden = self.data / "down/.runs/a"
        self.train(hidden, steps=1, **{"sample-steps": 1, "sample-count": 1})
        self.assertTrue((hidden / "samples/step-000000001.png").exists())
        said = self.train(hidden, steps=2, resume="latest")
        self.assertIn("12 pictures", said)
        self.assertIn("resumed at step 1", said)
        self.train("pictures-of-a-run", steps=1)

    def user(self):
        """For train(), a user who may read the files of this test, but not write anywhere."""
        if os.geteuid() != 0:
            return None
        self.root.chmod(0o755)
        try:
            subprocess.run([PROGRAM, "--version"], user=65534, check=True, capture_output=True)
        except PermissionError:
            self.skipTest("root may write anywhere, and nobody else may run the program")
        return 65534

    def test_a_folder_without_permission(self):
        (self.root / "a").mkdir(mode=0o555)
        said = self.train("a", rc=2, user=self.user())
        self.assertIn(f"--output {self.root}/a: cannot be written: {self.root}/a: Permission denied", said)

    def test_a_dry_run_refuses_what_a_run_refuses(self):
        """With the same message, and without a trace."""
        self.train("a", steps=1)
        self.train("b", steps=1, seed=1)
        shutil.copytree(self.root / "a/model", self.root / "alone/model")
        (self.root / "file").write_text("")
        (self.root / "full").mkdir()
        (self.root / "full/checkpoints").write_text("")
        (self.root / "nowhere").symlink_to("none")
        other = self.root / "b/checkpoints/step-000000001"
        shutil.copy(self.data / "across/0.png", self.root / "0.png")
        before = sorted(self.root.rglob("*"))
        cases = [
            ({"output": "a"}, "has checkpoints of an earlier run; pass --resume latest"),
            ({"output": "a", "resume": "latest", "batch": 32}, "--batch was 16 and is 32"),
            ({"output": "c", "resume": other, "beta2": 0.9}, "--beta2 was 0.999 and is 0.9"),
            ({"output": "a", "resume": other, "seed": 1}, "has checkpoints of its own"),
            ({"output": "a/checkpoints/step-000000001"}, f"lies in {self.root}/a/checkpoints, where the run in"),
            ({"output": "a/model/unet"}, f"lies in {self.root}/a/model, where the run in {self.root}/a"),
            ({"output": "alone"}, "has a model of an earlier run in model, and no checkpoint of it; move it away"),
            ({"output": "alone", "resume": "latest"}, "has a model of an earlier run in model, and no checkpoint"),
            ({"output": "file"}, f"--output {self.root}/file: cannot be written: {self.root}/file: Not a dir"),
            ({"output": "file/x/y"}, f"cannot be written: {self.root}/file: Not a directory; choose another folder"),
            ({"output": "full"}, f"cannot be written: {self.root}/full/checkpoints: Not a directory"),
            ({"output": "nowhere"}, f"cannot be written: {self.root}/nowhere: No such file or directory"),
        ]  # fmt: skip
        for dry in ("true", "false"):
            for flags, message in cases:
                with self.subTest(flags=flags, dry=dry):
                    said = self.train(rc=2, **{"steps": 2, "dry-run": dry, **flags})
                    self.assertIn(message, said)
                    self.assertNotIn("read in", said)  # before the pictures are read
                    measure = dry == "true" and ("has checkpoints" in message or "has a model" in message)
                    self.assertEqual(said.endswith(", or leave --output out to measure only\n"), measure)
            if dry == "true":
                self.assertEqual(sorted(self.root.rglob("*")), before)
        # Other pictures are another run.
        (self.data / "across/0.png").write_bytes(png(lambda x, y: 9))
        for dry in ("true", "false"):
            self.assertIn("the checksum of --data was", self.train("a", rc=2, steps=2, resume="latest", **{"dry-run": dry}))
        shutil.copy(self.root / "0.png", self.data / "across/0.png")
        # What a run may do. A resume needs no weights of a start, and "latest" needs an --output.
        start = {"init-from": self.root / "b/model"}
        self.train("d", steps=1, **start)
        (self.root / "b/model/unet/diffusion_pytorch_model.safetensors").unlink()
        before = sorted(self.root.rglob("*"))
        for flags in ({"output": "d", "resume": "latest", **start}, {"output": "x/y/z"},
                      {"output": "none", "resume": "latest"}):  # fmt: skip
            self.assertIn("measured", self.train(**flags, **{"dry-run": "true"}))
        arguments = [each for each in self.arguments("a") if not each.startswith("--output")]
        for resume in ("latest", other):
            subprocess.run([*arguments, "--dry-run", f"--resume={resume}", "--seed=1"], check=True, capture_output=True)
        self.assertEqual(sorted(self.root.rglob("*")), before)

    def test_a_dry_run_needs_permission_to_write(self):
        user = self.user()
        (self.root / "a/checkpoints").mkdir(parents=True)
        (self.root / "a").chmod(0o777)
        (self.root / "a/checkpoints").chmod(0o555)
        (self.root / "b").mkdir(mode=0o555)
        for output, closed in (("a", "a/checkpoints"), ("b/c", "b")):
            for dry in ("true", "false"):
                self.assertIn(f"{self.root}/{closed}: Permission denied; choose another folder",
                              self.train(output, rc=2, user=user, **{"dry-run": dry}))  # fmt: skip

    def names(self, *names):
        config = self.root / "names.json"
        config.write_text(json.dumps({"class-name": names}))
        return config

    def averages(self, *averages):
        config = self.root / "averages.json"
        config.write_text(json.dumps({"average": averages}))
        return config

    def test_the_settings_of_mnist_32_are_those_of_a_run(self):
        images, labels = self.root / "images", self.root / "labels"
        images.write_bytes(struct.pack(">IIII", 0x803, 10, 28, 28) + bytes(i % 251 for i in range(7840)))
        labels.write_bytes(struct.pack(">II", 0x801, 10) + bytes(range(10)))
        settings = REPOSITORY / "models/mnist-32/train.json"
        flags = {key: None for key in ("steps", "class-dropout", "learning-rate", "checkpoint-steps")}
        flags |= {"config": settings, "data": images, "labels": labels, "batch": 8,
                  "network": REPOSITORY / "models/mnist-32/unet/config.json"}  # fmt: skip
        self.assertIn("7500 of 8 pictures", self.train("dry", **flags, **{"dry-run": "true"}))
        # A tiny network, and otherwise these settings.
        tiny = {**NETWORK, "sample_size": 32, "num_class_embeds": 11}
        (self.root / "tiny.json").write_text(json.dumps(tiny))
        self.train("a", **{**flags, "network": self.root / "tiny.json", "steps": 2, "warmup-steps": 2})
        index = json.loads((self.root / "a/model/model_index.json").read_text())
        shipped = json.loads((REPOSITORY / "models/mnist-32/model_index.json").read_text())
        self.assertEqual(index, shipped)

    def test_class_vectors(self):
        network = {**NETWORK, "num_class_embeds": None, "class_embed_type": "identity",
                   "time_embedding_dim": 4}  # fmt: skip
        (self.root / "vectors.json").write_text(json.dumps(network))
        flags = {"network": self.root / "vectors.json", "class-dropout": None, "sample-steps": 12,
                 "sample-count": 4}  # fmt: skip
        self.assertIn("has no metadata.jsonl", self.train("none", rc=2, **flags))
        lines = [{"file_name": f"{of}/{i}.png", "label": [of == "down", i / 6, 0, -1.5]}
                 for of in ("down", "across") for i in range(6)]  # fmt: skip
        for line in lines:
            line["label"][0] = float(line["label"][0])
        (self.data / "metadata.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        said = self.train("a", **flags)
        self.assertIn("drew", said)
        said = self.train("b", rc=2, **{**flags, "class-dropout": 0.1})
        self.assertIn("no null class", said)
        lines[0]["label"][1] = 9
        (self.data / "metadata.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        said = self.train("a", rc=2, resume="latest", **{**flags, "steps": 16})
        self.assertIn("the checksum of --data was", said)

    def test_a_fourier_embedding_takes_the_logarithm_of_a_class(self):
        network = {**NETWORK, "num_class_embeds": None, "class_embed_type": "timestep",
                   "time_embedding_type": "fourier"}  # fmt: skip
        (self.root / "values.json").write_text(json.dumps(network))
        flags = {"network": self.root / "values.json", "class-dropout": None, "objective": "score",
                 "sample-steps": 4, "sample-count": 4}  # fmt: skip
        for first in (0, 1.5):
            lines = [{"file_name": f"{of}/{i}.png", "label": [i + first]}
                     for of in ("down", "across") for i in range(6)]  # fmt: skip
            (self.data / "metadata.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
            if first == 0:
                self.assertIn("has the class vector 0", self.train("a", rc=2, **flags))
        self.assertIn("drew", self.train("a", **flags))

    def test_other_pictures_without_labels_are_another_run(self):
        network = {**NETWORK, "num_class_embeds": None}
        (self.root / "plain.json").write_text(json.dumps(network))
        flat = self.data / "down"
        flags = {"data": flat, "network": self.root / "plain.json", "class-dropout": None, "steps": 4}
        self.train("a", **flags)
        (flat / "0.png").write_bytes(png(lambda x, y: 9))
        said = self.train("a", rc=2, resume="latest", **{**flags, "steps": 8})
        self.assertIn("the checksum of --data was", said)

    def test_a_grid_of_one_picture(self):
        said = self.train("a", **{"sample-steps": 12, "sample-count": 1})
        self.assertIn("drew", said)
        header = (self.root / "a/samples/step-000000012.png").read_bytes()[:24]
        self.assertEqual(struct.unpack(">II", header[16:]), (8, 8))

    def test_without_classes_the_model_is_a_pipeline_of_diffusers(self):
        plain = {**NETWORK, "num_class_embeds": None}
        colour = {**plain, "in_channels": 3, "out_channels": 3}
        score = {"objective": "score", "sigma-max": 5}
        fourier = {"time_embedding_type": "fourier"}
        for pipeline, network, flags in [
            ("DDIMPipeline", plain, {"objective": "v"}),
            ("DDPMPipeline", {**plain, "out_channels": 2}, {"objective": "epsilon"}),
            ("ScoreSdeVePipeline", {**colour, **fourier}, score),
            ("DiffusionPipeline", {**plain, **fourier}, score),  # that one draws three channels
            ("DiffusionPipeline", {**colour, **fourier, "sample_size": [8, 16]}, score),
            ("DiffusionPipeline", plain, {"objective": "edm"}),
            ("DiffusionPipeline", plain, {"objective": "flow"}),
            ("DiffusionPipeline", {**NETWORK, "num_class_embeds": 2}, {"objective": "v"}),
        ]:  # fmt: skip
            with self.subTest(pipeline=pipeline, flags=flags):
                output = self.root / "plain"
                shutil.rmtree(output, ignore_errors=True)
                (self.root / "plain.json").write_text(json.dumps(network))
                said = self.train(output, steps=1, network=self.root / "plain.json", **flags, **{
                    "class-dropout": None, "sample-steps": 1, "sample-count": 1, "default-steps": 5})  # fmt: skip
                self.assertIn("drew", said)  # the engine takes either
                index = json.loads((output / "model/model_index.json").read_text())
                self.assertEqual(index["_class_name"], pipeline)

    def test_a_learned_variance_is_drawn_from(self):
        (self.root / "variance.json").write_text(json.dumps({**NETWORK, "out_channels": 2}))
        flags = {"network": self.root / "variance.json", "objective": "epsilon", "timesteps": 60,
                 "sample-steps": 12, "sample-count": 4}  # fmt: skip
        said = self.train("a", **flags)
        self.assertIn("drew", said)
        scheduler = json.loads((self.root / "a/model/scheduler/scheduler_config.json").read_text())
        self.assertEqual(scheduler["_class_name"], "DDPMScheduler")
        self.assertEqual(scheduler["variance_type"], "learned_range")
        self.assertIn("objective epsilon, v or x0", self.train("b", rc=2, **{
            **flags, "objective": "edm", "timesteps": None}))  # fmt: skip

    def test_every_objective_is_drawn_from(self):
        for objective, scheduler, prediction in [
            ("epsilon", "DDIMScheduler", "epsilon"), ("v", "DDIMScheduler", "v_prediction"),
            ("x0", "DDIMScheduler", "sample"), ("flow", "FlowMatchEulerDiscreteScheduler", None),
            ("edm", "EDMDPMSolverMultistepScheduler", "epsilon"),
        ]:  # fmt: skip
            with self.subTest(objective=objective):
                said = self.train(objective, objective=objective, steps=3,
                                  **{"sample-steps": 3, "sample-count": 4, "default-steps": 5})  # fmt: skip
                self.assertIn("drew", said)
                output = self.root / objective
                self.assertGreater((output / "samples/step-000000003.png").stat().st_size, 60)
                config = json.loads((output / "model/scheduler/scheduler_config.json").read_text())
                self.assertEqual(config["_class_name"], scheduler)
                self.assertEqual(config.get("prediction_type"), prediction)

    def test_blocks_of_ncsnpp_are_trained_and_drawn_from(self):
        network = {**NETWORK, "in_channels": 3, "out_channels": 3, "norm_num_groups": None,
                   "down_block_types": ["SkipDownBlock2D"] * 2, "up_block_types": ["SkipUpBlock2D"] * 2}
        flags = {"network": self.root / "network.json", "sample-steps": 12, "sample-count": 4}

        def write(**fields):
            (self.root / "network.json").write_text(json.dumps({**network, **fields}))

        write()
        self.assertIn("drew", self.train("a", **flags))
        self.train("b", accumulation=2, **flags)
        self.assertEqual(self.state("a"), self.state("b"))
        write(block_out_channels=[8, 18], norm_num_groups=2, attention_head_dim=2)
        self.assertIn("has 18 channels, which 4 groups do not divide", self.train("c", rc=2, **flags))
        write(time_embedding_type="fourier")
        self.assertIn("use --objective score", self.train("c", rc=2, **flags))
        score = {**flags, "objective": "score", "sigma-max": 5, "default-steps": 10}
        self.assertIn("drew", self.train("score", **score))
        self.assertIn("--sigma-min is 6", self.train("c", rc=2, **score, **{"sigma-min": 6}))
        write()
        self.assertIn('to "fourier"', self.train("c", rc=2, **score))
        self.assertIn("--sigma-max", self.train("c", rc=2, **flags, **{"sigma-max": 5}))
        write(dropout="0.1")
        self.assertIn("field 'dropout' is \"0.1\"", self.train("c", rc=2, **flags))

    def test_pictures_on_disk_and_augmented_ones_have_the_same_bits(self):
        flags = {"canvas": 320}  # 12 pictures of 100 KiB
        self.train("resident", **flags)
        self.assertNotIn("on disk", self.train("room", **flags, **{"data-memory": 2}))
        disk, room = {**flags, "data-memory": 1}, {**flags, "data-memory": 0}
        said = self.train("disk", **disk)
        self.assertIn("on disk", said)
        self.assertEqual(self.state("resident"), self.state("disk"))
        self.assertEqual([p.name for p in (self.root / "disk").glob("pictures-*")], [])
        # Each rank has a file of its own, and a resumed run may have more memory or less.
        self.assertIn("on disk", self.train_ranks(0, output="ranks", **disk)[0])
        self.assertEqual(self.state("resident"), self.state("ranks"))
        for output, first, then in (("a disk", disk, room), ("more room", room, disk), ("disks", disk, disk)):
            self.train(output, **first, steps=8)
            said = self.train(output, resume="latest", **then)
            self.assertIn("resumed at step 8", said)
            self.assertEqual("on disk" in said, then is disk)
            self.assertEqual(self.state("resident"), self.state(output))
        # Ranks need not have the same memory.
        said = self.train_ranks(0, output="unequal", **{**flags, "data-memory": (1, 2)})
        self.assertIn("on disk", said[0])
        self.assertEqual(self.state("resident"), self.state("unequal"))
        self.train("a", augment=0.5)
        self.train("b", augment=0.5, **{"prefetch-threads": 4})
        self.assertEqual(self.state("a"), self.state("b"))
        weights = (self.root / "a/model/unet/diffusion_pytorch_model.safetensors").read_bytes()
        self.assertNotIn(b"map_augment", weights)
        said = self.train("a", rc=2, resume="latest", augment=0.25)
        self.assertIn("--augment was 0.5 and is 0.25", said)
        for checkpoint in (self.root / "a/checkpoints").iterdir():
            self.edit_run(checkpoint, flags=None)  # of an older version
        said = self.train("a", rc=2, resume="latest")
        self.assertIn("--augment was 0.5 and is not set", said)

    def test_threads_that_cannot_be_started(self):
        if re.search(b"__[at]san_init", Path(PROGRAM).read_bytes()):
            self.skipTest("sanitizers take more memory than this allows")
        done = subprocess.run(
            ["bash", "-c", 'ulimit -s 8192 && ulimit -v 4000000 && exec "$@"', "bash",
             *self.arguments("a", device="cpu", **{"prefetch-threads": 1024})],
            capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "2"})  # fmt: skip
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("no further thread can be started; lower --prefetch-threads or OMP_NUM_THREADS", done.stderr)

    def edit_run(self, folder, **fields):
        """Changes fields of a checkpoint's run.json; None removes one."""
        run = {**json.loads((folder / "run.json").read_text()), **fields}
        text = json.dumps({key: value for key, value in run.items() if value is not None}).encode()
        (folder / "run.json").write_bytes(text)
        done = json.loads((folder / "DONE").read_text())
        done["run.json"] = {"bytes": len(text), "crc32": zlib.crc32(text)}
        (folder / "DONE").write_text(json.dumps(done))

    def flags(self, output, step):
        return json.loads((self.root / output / f"checkpoints/step-{step:09}/run.json").read_text())["flags"]

    def resume(self, output, *arguments, rc=0, resume="latest"):
        """By these arguments alone, in another folder than that of the start."""
        elsewhere = self.root / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        done = subprocess.run(
            [Path(PROGRAM).resolve(), *([f"--output={self.root / output}"] if output else []), f"--resume={resume}", *arguments],
            cwd=elsewhere, capture_output=True, text=True, timeout=120)  # fmt: skip
        self.assertEqual(done.returncode, rc, done.stderr)
        return done.stderr

    def test_a_resume_takes_settings_from_its_checkpoint(self):
        config = self.root / "run.json"
        config.write_text(json.dumps({"average": ["decay:0.9", "power:0.1"], "class-name": ["x\ny", "[zw]"],
                                      "network": NETWORK, "flip": True}))  # fmt: skip
        flags = {"network": None, "objective": "v", "cap-snr": 5, "checkpoint-steps": 4, "default-steps": 7}
        self.train("whole", config=config, **flags)
        # With paths that are relative to the folder of the start.
        arguments = self.arguments("a", config="run.json", **{**flags, "steps": 4, "data": "pictures"})
        subprocess.run([Path(PROGRAM).resolve(), *arguments[1:]], cwd=self.root, check=True, capture_output=True)
        config.unlink()
        run = self.root / "a/checkpoints/step-000000004/run.json"
        said = self.resume("a", "--steps=12", "--flip")
        line = next(line for line in said.splitlines() if line.startswith("settings of "))
        self.assertTrue(line.startswith(f"settings of {run}: --average=decay:0.9 --average=power:0.1 --batch=16 "), line)
        for setting in (" --cap-snr=5 ", " --class-name=x y ", f" --data={self.data} ", " --network"):
            self.assertIn(setting, line)
        for setting in ("--steps", "--flip", "--output", "--resume", "--config"):
            self.assertNotIn(f"{setting}", line)
        self.assertEqual(self.state("a"), self.state("whole"))
        for file in ("model/model_index.json", "models/power_0.1/unet/diffusion_pytorch_model.safetensors"):
            self.assertEqual((self.root / "a" / file).read_bytes(), (self.root / "whole" / file).read_bytes())
        # What a resume was given is kept for the next.
        self.assertIn("12 steps were already done", self.resume("a"))
        said = self.resume("a", rc=2, *["--batch=32", "--average=decay:0.9"])
        self.assertIn('another run: --average was ["decay:0.9","power:0.1"] and is ["decay:0.9"]; --batch was 16 and is 32.',
                      said)  # fmt: skip
        said = self.resume("a", "--objective=x0", rc=2)
        self.assertIn("--cap-snr needs the objective v, but this run has the objective x0; leave it out "
                      f"(what no flag gives is of {self.root}/a/checkpoints/step-000000012/run.json: --average", said)
        # Into another folder, and no more than one file of settings.
        self.resume("b", resume=run.parent)
        self.assertIn("resumed at step 4", self.resume("c", "--steps=12", resume=run.parent))
        self.assertEqual(self.state("c"), self.state("whole"))
        config.write_text(json.dumps({"objective": "v", "average": ["decay:0.9", "power:0.1"], "flip": True}))
        said = self.train("a", rc=2, config=config, resume="latest", objective="v")
        self.assertIn("--cap-snr was 5.0 and is not set", said)
        # With ranks.
        self.train("ranks", config=config, objective="v", steps=4, **{"cap-snr": 5})
        flags = {"data": None, "network": None, "batch": None, "learning-rate": None, "class-dropout": None,
                 "checkpoint-steps": None, "log-steps": None, "device": None}  # fmt: skip
        self.train_ranks(0, output="ranks", resume="latest", **flags)
        self.assertEqual(self.state("ranks"), self.state("whole"))

    def test_settings_of_another_version_are_passed_over(self):
        self.train("a", steps=4)
        run = self.root / "a/checkpoints/step-000000004"
        self.edit_run(run, flags={**self.flags("a", 4), "steps": "12", "new": "1", "ema-new": ["x", "y"]})
        said = self.resume("a")
        self.assertIn("warning: settings of another version are passed over: --ema-new --new\n", said)
        self.assertIn("resumed at step 4", said)
        self.assertNotIn("another version", self.resume("a"))

    def test_paths_in_a_checkpoint_are_absolute(self):
        self.train("start", steps=1)
        images, labels = self.root / "images", self.root / "labels"
        images.write_bytes(struct.pack(">IIII", 0x803, 10, 8, 8) + bytes(640))
        labels.write_bytes(struct.pack(">II", 0x801, 10) + bytes(i % 2 for i in range(10)))
        self.train("whole", data=images, labels=labels, **{"init-from": self.root / "start/model"})
        job = self.root / "job/x"
        job.mkdir(parents=True)
        (self.root / "linked").mkdir()
        (job / "link").symlink_to(self.root / "linked")
        arguments = self.arguments("a", steps=4, data="../../images", labels="link/../labels",
                                   **{"init-from": "../../start/model", "autotune-cache": "cache"})  # fmt: skip
        subprocess.run([Path(PROGRAM).resolve(), *arguments[1:]], cwd=job, check=True, capture_output=True)
        flags = self.flags("a", 4)
        for flag, path in {"data": images, "labels": job / "link/../labels", "init-from": self.root / "start/model",
                           "autotune-cache": job / "cache"}.items():  # fmt: skip
            self.assertEqual(flags[flag], str(path))
        self.resume("a", "--steps=8")
        # What no link leads to does not need the folder of the start.
        shutil.rmtree(self.root / "job")
        self.resume("a", f"--labels={labels}", "--steps=12")
        self.assertEqual(self.state("a"), self.state("whole"))

    def test_a_resume_without_settings(self):
        missing = "--data is missing, and no checkpoint says it: give a folder of pictures, or a file"
        self.assertIn(missing, self.resume("none", rc=2))
        self.train("a", steps=4)
        # There may be paths that JSON cannot hold.
        folder = self.root / os.fsdecode(b"\xff")
        shutil.copytree(self.data, folder)
        said = self.train("b", steps=4, data=folder)
        self.assertIn("warning: --data is not UTF-8, which checkpoints cannot keep: give it again with --resume", said)
        self.assertIn(missing, self.resume("b", rc=2))
        self.resume("b", f"--data={folder}", "--steps=8")
        arguments = self.arguments("c", steps=4, data="../pictures")
        subprocess.run([Path(PROGRAM).resolve(), *arguments[1:]], cwd=folder, check=True, capture_output=True)
        self.assertEqual(self.flags("c", 4)["data"], str(self.data))
        subprocess.run([Path(PROGRAM).resolve(), *self.arguments("d", steps=4, data=".")[1:]], cwd=folder, check=True,
                       capture_output=True)  # fmt: skip
        self.assertNotIn("data", self.flags("d", 4))
        # Older checkpoints have no flags.
        self.edit_run(self.root / "a/checkpoints/step-000000004", flags=None)
        self.assertIn(missing, self.resume("a", rc=2))
        self.train("a", resume="latest")
        self.assertIn("12 steps were already done", self.resume("a"))
        # Where no checkpoint is asked, it is not said that none says it.
        folder, config = self.root / "a/checkpoints/step-000000012", self.root / "run.json"
        config.write_text("{}")
        alone = "--data is missing: give a folder of pictures, or a file"
        self.assertIn(alone, self.resume("a", f"--config={config}", rc=2))
        self.assertIn("--output is missing", self.resume(None, rc=2))
        self.assertIn(alone, self.resume(None, "--dry-run", rc=2))
        self.assertIn("--output is missing", self.resume(None, rc=2, resume=folder))
        self.assertIn(f"settings of {folder}/run.json: ", self.resume(None, "--dry-run", resume=folder))
        self.assertIn(f"denoise-train: {folder}0: there is no such checkpoint", self.resume("b", rc=2, resume=f"{folder}0"))
        (folder / "run.json").write_bytes((folder / "run.json").read_bytes().replace(b'"16"', b'"32"'))
        self.assertIn(f"denoise-train: {folder}/run.json: its checksum is not the one in DONE; it is damaged. Resume from",
                      self.resume("b", rc=2, resume=folder))  # fmt: skip
        self.assertIn(f"checkpoint skipped: {folder}/run.json: its checksum", self.resume("a"))
        # What the start left is no setting of a run that has no checkpoint.
        shutil.rmtree(self.root / "a/checkpoints")
        self.assertIn(missing, self.resume("a", rc=2))

    def test_a_setting_that_is_dropped_is_noticed(self):
        self.train("a", objective="v", steps=4, **{"cap-snr": 5})
        self.edit_run(self.root / "a/checkpoints/step-000000004", flags=None)  # of an older version
        said = self.train("a", rc=2, objective="v", resume="latest")
        self.assertIn("--cap-snr was 5.0 and is not set", said)
        self.train("a", objective="v", resume="latest", **{"cap-snr": 5})

    def test_a_refused_resume_names_the_flags(self):
        """As they are typed, in whatever form run.json has them."""
        (self.root / "other.json").write_text(json.dumps({**NETWORK, "norm_eps": 1e-3}))
        self.train("a", steps=1)
        for flags, differences in [
            ({"batch": 32, "beta2": 0.99}, "--batch was 16 and is 32; --beta2 was 0.999 and is 0.99"),
            ({"adam-eps": 1e-6}, "--adam-eps was 1e-08 and is 1e-06"),
            ({"sigma-data": 0.6, "log-sigma-mean": -1},
             "--log-sigma-mean was -1.2 and is -1.0; --sigma-data was 0.5 and is 0.6"),
            ({"schedule": "cosine", "average": "power:0.1"},
             '--average was ["warmup:0.999"] and is ["power:0.1"]; --schedule was "constant" and is "cosine"; '
             "--steps was not set and is 12"),
            ({"network": self.root / "other.json"}, "norm_eps of --network was not set and is 0.001"),
        ]:
            with self.subTest(flags=flags):
                said = self.train("a", rc=2, resume="latest", **flags)
                self.assertIn(f"the checkpoint is of another run: {differences}. Give the same settings", said)
                self.assertNotIn("read in", said)  # before the pictures are read
        self.train("flow", steps=1, objective="flow")
        said = self.train("flow", rc=2, resume="latest", objective="flow", timesteps=500, **{"flow-uniform": "true"})
        self.assertIn("run: --flow-uniform was false and is true; --timesteps was 1000 and is 500. Give", said)
        (self.root / "fourier.json").write_text(json.dumps({**NETWORK, "time_embedding_type": "fourier"}))
        score = {"network": self.root / "fourier.json", "objective": "score"}
        self.train("score", steps=1, **score, **{"sigma-max": 5})
        said = self.train("score", rc=2, resume="latest", **score, **{"sigma-max": 6})
        self.assertIn("run: --sigma-max was 5.0 and is 6.0. Give", said)

    def test_older_runs_are_told_the_flags_of_new_defaults(self):
        self.train("v", objective="v", steps=1)
        start = {"init-from": self.root / "v/model"}
        self.train("old", steps=2, average="decay:0.999", objective="edm", **start)
        self.edit_run(self.root / "old/checkpoints/step-000000002", flags=None)
        said = self.train("old", rc=2, resume="latest", **start)
        # The objective is the checkpoint's, not the start's.
        self.assertIn('another run: --average was ["decay:0.999"] and is ["warmup:0.999"]. Give the same', said)
        said = self.train("old", rc=2, resume="latest", average="decay:0.999", objective="x0", **start)
        self.assertIn('another run: --objective was "edm" and is "x0". Give', said)
        self.train("old", resume="latest", average="decay:0.999", **start)

    def test_metrics(self):
        process = subprocess.Popen(
            self.arguments("a", steps=100000, **{"checkpoint-steps": 3, "metrics-listen": "127.0.0.1:0"}),
            stderr=subprocess.PIPE, text=True)  # fmt: skip
        port = None
        for line in process.stderr:
            if line.startswith("metrics on port "):
                port = int(line.split()[-1])
            if line.startswith("step 5/"):
                break
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as reply:
            text = reply.read().decode()
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        process.stderr.close()
        self.assertEqual(process.wait(timeout=60), 0)
        values = {}
        for line in text.splitlines():
            if line.startswith("denoised_train_"):
                values[line.split("{")[0].split()[0]] = float(line.split()[-1])
        self.assertGreaterEqual(values["denoised_train_step"], 5)
        self.assertEqual(values["denoised_train_target_step"], 100000)
        self.assertEqual(values["denoised_train_images_total"] % 16, 0)
        self.assertEqual(values["denoised_train_skipped_steps_total"], 0)
        self.assertGreater(values["denoised_train_loss"], 0)
        self.assertGreater(values["denoised_train_gradient_norm"], 0)
        self.assertGreater(values["denoised_train_images_per_second"], 0)
        self.assertAlmostEqual(values["denoised_train_learning_rate"], 2e-3)
        self.assertGreaterEqual(values["denoised_train_checkpoint_step"], 3)
        self.assertLess(abs(time.time() - values["denoised_train_checkpoint_time_seconds"]), 100)
        # The page lists what there is.
        families = set(re.findall(r"^# TYPE (denoised_train_\w+)", text, re.MULTILINE))
        page = (Path(__file__).parent.parent.parent / "docs/training.md").read_text()
        self.assertEqual(families, set(re.findall(r"^\| `(denoised_train_\w+)`", page, re.MULTILINE)))
        for wrong in ("foo", "nowhere:x", ":9091", "127.0.0.1:65536"):
            said = self.train("b", rc=2, **{"metrics-listen": wrong})
            self.assertIn(f'--metrics-listen: "{wrong}" is not host:port', said)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            # There the run may listen whose next part is measured.
            self.assertIn(f"warning: --metrics-listen {address}: cannot listen there",
                          self.train("b", **{"metrics-listen": address, "dry-run": "true"}))  # fmt: skip
            said = self.train("b", rc=1, **{"metrics-listen": address})
        self.assertIn(f"--metrics-listen {address}: cannot listen there", said)
        self.assertNotIn("read in", said)  # before the pictures are read
        self.assertNotIn("IPv6", said)
        said = self.train("b", rc=1, **{"metrics-listen": "[2001:db8::1]:0"})  # an address of documentation
        self.assertIn("and a free port. As Debian builds it, civetweb has no IPv6", said)

    def test_a_value_that_looks_like_an_empty_flag_is_a_value(self):
        done = subprocess.run([PROGRAM, "--data", "--labels=", "--network", "n.json", "--output", "o"],
                              capture_output=True, text=True)  # fmt: skip
        self.assertEqual(done.returncode, 2)
        self.assertNotIn("not expected", done.stderr)

    def test_help_names_the_program(self):
        with open("/dev/full", "w") as full:
            lost = subprocess.run([PROGRAM, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual((lost.returncode, lost.stderr), (1, "denoise-train: stdout cannot be written\n"))
        done = subprocess.run([PROGRAM, "--help"], capture_output=True, text=True, check=True)
        self.assertIn("Usage: denoise-train [OPTIONS]", done.stdout)

    def test_help_says_the_ranges_that_are_checked(self):
        text = subprocess.run([PROGRAM, "--help"], capture_output=True, text=True, check=True).stdout
        numbers = re.findall(r"^ *--([a-z0-9-]+)\S* (?:FLOAT:)?FLOAT(.*)$", text, re.MULTILINE)
        self.assertGreater(len(numbers), 18)
        checked = 0
        for flag, rest in numbers:
            self.assertRegex(rest, r"^:[\[(]\S+ - \S+[\])]", flag)
            if found := re.match(r":\[(\S+) - (\S+)\]", rest):
                low, high = map(re.escape, found.groups())
                for beyond in (float(found[1]) - 1, float(found[2]) + 1):
                    self.assertRegex(self.train("x", rc=2, **{flag: beyond}), rf"{low}(\.0+)? (to|-) {high}")
                checked += 1
        self.assertGreater(checked, 11)

    def test_ranks_of_other_launchers(self):
        self.train("one", steps=4)
        here = {"MASTER_ADDR": "127.0.0.1"}
        for name, env, ranks in [
            ("kubeflow", {"PET_NNODES": 2, "PET_NPROC_PER_NODE": 1, "PET_MASTER_ADDR": "127.0.0.1"}, "PET_NODE_RANK"),
            ("open-mpi", {"OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_SIZE": 2}, "OMPI_COMM_WORLD_RANK"),
            ("mpich", {"PMI_SIZE": 2, "MPI_LOCALNRANKS": 2}, "PMI_RANK"),
            ("job", {"WORLD_SIZE": 2, **here}, "JOB_COMPLETION_INDEX"),
            # What is not complete is taken from the next.
            ("mixed", {"WORLD_SIZE": 2, "OMPI_COMM_WORLD_SIZE": 2, **here}, "OMPI_COMM_WORLD_RANK"),
        ]:
            with self.subTest(name=name):
                port = {"PET_MASTER_PORT" if name == "kubeflow" else "MASTER_PORT": free_port()}
                env = {key: str(value) for key, value in {**env, **port}.items()}
                started = [self.start(name, steps=4, env={**env, ranks: str(rank)}) for rank in range(2)]
                said = [process.stderr.read() for process in started]
                self.assertEqual([process.wait(timeout=60) for process in started], [0, 0], said)
                self.assertIn("2 ranks over TCP", said[0])
                self.assertEqual(self.state("one", 4), self.state(name, 4))

    def test_variables_of_launchers_that_contradict_each_other(self):
        torchrun, kubeflow = {"WORLD_SIZE": "2", "RANK": "0"}, {"PET_NNODES": "2", "PET_NODE_RANK": "0"}
        mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
        mpich, job = {"PMI_SIZE": "2", "PMI_RANK": "1"}, {"JOB_COMPLETION_INDEX": "1"}
        for env, message in [
            # Half of them.
            ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but no variable says which rank this is; set RANK"),
            ({"PET_NNODES": "2"}, "PET_NNODES is 2, but no variable says which rank"),
            ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2, but no variable says which rank"),
            ({"PMI_SIZE": "2"}, "PMI_SIZE is 2, but no variable says which rank"),
            ({"RANK": "1"}, "RANK is 1, but no variable says how many ranks there are; set WORLD_SIZE, or unset RANK"),
            ({"PET_NODE_RANK": "0"}, "PET_NODE_RANK is 0, but no variable says how many"),
            ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK is 0, but no variable says how many"),
            ({"PMI_RANK": "0", **job}, "PMI_RANK is 0, but no variable says how many"),
            # Numbers that no rank has.
            ({**torchrun, "RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2; ranks count from 0"),
            ({**torchrun, "RANK": "2", "WORLD_SIZE": "1"}, "RANK is 2, but WORLD_SIZE is 1"),
            ({**torchrun, "RANK": "-1"}, 'RANK is "-1"; use 0 to 65536'),
            ({**torchrun, "WORLD_SIZE": "two"}, 'WORLD_SIZE is "two"; use 1 to 65536'),
            ({**mpich, "PMI_RANK": "2"}, "PMI_RANK is 2, but PMI_SIZE is 2"),
            ({"WORLD_SIZE": "2", "JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX is 2, but WORLD_SIZE is 2"),
            ({**torchrun, "WORLD_SIZE": "3"}, "there are 3 ranks; use a power of two"),
            ({**torchrun, "MASTER_PORT": "0"}, 'MASTER_PORT is "0"; use 1 to 65535'),
            ({**torchrun, "LOCAL_RANK": "x"}, 'LOCAL_RANK is "x"'),
            # One says something else than the other.
            ({**mpi, "WORLD_SIZE": "4"}, "WORLD_SIZE is 4, but OMPI_COMM_WORLD_SIZE is 2: one of them is of another"),
            ({**mpi, "WORLD_SIZE": "1"}, "WORLD_SIZE is 1, but OMPI_COMM_WORLD_SIZE is 2"),
            ({**mpi, "RANK": "0"}, "RANK is 0, but OMPI_COMM_WORLD_RANK is 1"),
            ({**mpi, "RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE is 1, but OMPI_COMM_WORLD_SIZE is 2"),
            ({**mpi, **torchrun}, "RANK is 0, but OMPI_COMM_WORLD_RANK is 1"),
            ({**mpi, **mpich, "PMI_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE is 2, but PMI_SIZE is 4"),
            ({**mpich, "PET_NNODES": "4"}, "PET_NNODES is 4, but PMI_SIZE is 2"),
            ({**kubeflow, "RANK": "1"}, "RANK is 1, but PET_NODE_RANK is 0"),
            ({**kubeflow, "PET_NPROC_PER_NODE": "4"}, "PET_NPROC_PER_NODE is 4"),
            # Others are elsewhere, but where is rank 0?
            ({**mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "OMPI_COMM_WORLD_LOCAL_SIZE is 1, so not all 2 ranks are on "
             "this host, but MASTER_ADDR is not set; set it to the host of rank 0"),
            ({**mpich, "MPI_LOCALNRANKS": "1"}, "MPI_LOCALNRANKS is 1, so not all 2 ranks are on this host"),
            ({"WORLD_SIZE": "2", **job}, "JOB_COMPLETION_INDEX is 1, so not all 2 ranks are on this host"),
        ]:
            with self.subTest(env=env):
                self.assertIn(message, self.train("x", rc=2, env=env))
        # torchrun may be started by another launcher, and an index alone need not be a rank.
        for name, env in [("torchrun", {**mpi, **kubeflow, **mpich, "WORLD_SIZE": "1", "RANK": "0",
                                        "TORCHELASTIC_USE_AGENT_STORE": "True"}),
                          ("job", {**job, "WORLD_SIZE": "1"}), ("index", job),
                          ("one", {"WORLD_SIZE": "1"}), ("empty", {"WORLD_SIZE": "", "RANK": ""})]:  # fmt: skip
            with self.subTest(env=env):
                self.assertIn(" 1 rank\n", self.train(name, steps=1, env=env))

    def test_settings_of_a_file_and_flags_that_win(self):
        config = self.root / "run.json"
        config.write_text(json.dumps({
            "steps": 3, "network": NETWORK, "average": ["decay:0.9", "power:0.1"], "flip": True,
            "log-steps": 1}))  # fmt: skip
        said = self.train("a", steps=None, network=None, config=config)
        self.assertIn("step 3/3", said)
        self.assertTrue((self.root / "a/models/power_0.1/model_index.json").exists())
        said = self.train("b", config=config, steps=2, **{"dry-run": "true"})
        self.assertIn("steps        2 of 16", said)
        self.assertFalse((self.root / "b").exists())

        def activations(**flags):  # MiB
            said = self.train("b", config=config, steps=2, batch=512, **flags, **{"dry-run": "true"})
            return int(re.search(r"activations (\d+)", said)[1])

        kept = activations()  # a small network
        self.assertEqual(activations(norms="keep"), kept)
        self.assertLess(activations(norms="recompute"), kept)
        config.write_text('{"metrics-listen": "", "steps": 3}')
        for metrics in ({}, {"metrics-listen": ""}):
            said = self.train(f"empty{len(metrics)}", steps=None, config=config, **metrics)
            self.assertIn("step 3/3", said)
            self.assertNotIn("metrics on port", said)
        for field, message in [
            ("stepps", "the fields are the names of the flags, without --. See denoise-train --help"),
            ("learning_rate", "write 'learning-rate'"),
            ("sample_steps", "write 'sample-steps'"),
        ]:
            config.write_text(json.dumps({field: 3}))
            said = self.train("c", rc=2, config=config)
            self.assertIn(f"{config}: unknown field '{field}'; {message}", said)
        config.write_text('{"steps": 3.0, "warmup-steps": 1e0}')
        self.assertIn("saved step 3", self.train("floats", steps=None, config=config))
        config.write_text('{"steps": 3, "batch": 16, "steps": 4}')
        said = self.train("c", rc=2, steps=None, config=config)
        self.assertIn(f'{config}: has "steps" twice; give it once', said)
        for field, value, message in [
            ("steps", [3, 4], "field 'steps' is [3,4]; use a string, a number, true or false"),
            ("network", [], "field 'network' is []; use a string, a number, true or false, or an object"),
            ("labels", "a\0b", "field 'labels' is \"a\\u0000b\"; a text may not have a zero character"),
            ("steps", [3], "field 'steps' is [3]; use"),
            ("flip", [True, False], "field 'flip' is [true,false]; use"),
            ("network", [NETWORK], "field 'network' is [{"),
            ("average", ["decay:0.9", ["power:0.1"]], "field 'average' is [\"power:0.1\"]; use"),
            ("average", [], "field 'average' is an empty list; give a value, or leave the field out"),
            ("class-name", [], "field 'class-name' is an empty list"),
        ]:
            config.write_text(json.dumps({field: value}))
            said = self.train("c", rc=2, config=config, steps=None, network=None)
            self.assertIn(f"{config}: {message}", said)
        config.write_text('{"class-dropout": 0.1, "caption-dropout": 0.2}')
        said = self.train("c", rc=2, config=config, **{"class-dropout": None})
        self.assertIn(f"{config}: fields 'caption-dropout' and 'class-dropout' are the same setting; give one", said)
        for flag in ("config", "help", "version"):
            config.write_text(json.dumps({flag: "other.json"}))
            said = self.train("c", rc=2, config=config)
            self.assertIn(f"field '{flag}' is a flag of the command line alone", said)

    def test_a_dry_run_says_what_it_does_not_count(self):
        for flags, message in [
            ({}, "the time of checkpoints"),
            ({"sample-steps": 5, "sample-count": 4},  # after steps 5, 10 and 12
             "memory and time of 3 sample grids of 4 pictures, the time of checkpoints"),
            ({"sample-steps": 2**63 - 1, "sample-count": 1},
             "memory and time of 1 sample grid of 1 picture, the time of checkpoints"),
        ]:
            said = self.train("dry", **flags, **{"dry-run": "true"})
            self.assertIn(f"\nnot included {message}\n", said)

    def test_a_dry_run_tells_the_memory_of_a_run(self):
        """Of the process, at its largest: while it saves. What a tiny network takes is the program's own."""
        if DEVICE not in (None, "cpu") or re.search(b"__[at]san_init", Path(PROGRAM).read_bytes()):
            self.skipTest("the memory is that of a GPU, or sanitizers take some")
        wide = {**NETWORK, "block_out_channels": [64, 192], "layers_per_block": 2, "norm_num_groups": 16}
        (self.root / "wide.json").write_text(json.dumps(wide))

        def peak(output, **flags):  # MiB
            process = subprocess.Popen(self.arguments(output, device="cpu", steps=2, **{"checkpoint-steps": 1, **flags}),
                                       stderr=subprocess.DEVNULL)  # fmt: skip
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self.assertEqual(process.returncode, 0)
            return usage.ru_maxrss / 1024

        flags = {"network": self.root / "wide.json"}
        said = self.train("dry", device="cpu", **flags, **{"dry-run": "true"})
        told, *parts = map(int, re.search(r"memory +(\d+) MiB: weights (\d+), activations (\d+), pictures (\d+), "
                                          r"saving (\d+)\n", said).groups())  # fmt: skip
        self.assertAlmostEqual(told, sum(parts), delta=2)
        took = peak("a", **flags) - peak("tiny")
        # 3 % less measured; a quarter is the copy that a save makes.
        self.assertAlmostEqual(told / took, 1, delta=0.15, msg=f"{told} told, {took} MiB taken")

    def test_refuses_by_name(self):
        circle = self.root / "circle"
        circle.symlink_to("circle")
        for flags, message in [
            ({"data": self.root / "none"}, f"--data {self.root}/none: cannot be read: No such file or directory; check the path"),
            ({"data": self.root / "network.json", "labels": self.root / "none"}, f"--labels {self.root}/none: cannot be read"),
            ({"data": circle}, f"--data {circle}: cannot be read: Too many levels of symbolic links"),
            ({"objective": "ddpm"}, "--objective"),
            ({"chunks": 5}, "--chunks is 5"),
            ({"sigma-data": -1}, "--sigma-data is -1"),
            ({"beta-start": 0.5, "objective": "v"}, "--beta-start is 0.5 and --beta-end 0.02"),
            ({"beta-schedule": "cosine", "objective": "v"}, '--beta-schedule is "cosine"'),
            ({"device": "gpu"}, '--device is "gpu"'),
            ({"exchange": "mpi"}, '--exchange is "mpi"'),
            ({"warmup-steps": 13}, "--warmup-steps is 13, but --steps is 12, so the rate would never "
             "reach --learning-rate; use at most 12"),
            ({"dtype": "bf16"}, "the CPU trains in fp32"),
            ({"average": "ema:0.9"}, "--average"),
            ({"average": "decay:0.9ab"}, '--average: "decay:0.9ab" needs a number after a colon, such as '
             'decay:0.999; "0.9ab" is none'),
            ({"average": "power:"}, '--average: "power:" needs a number after a colon, such as power:0.05'),
            ({"average": "warmup"}, '--average: "warmup" needs a number after a colon, such as warmup:0.999'),
            ({"average": "decay:1.5"}, "1.5"),
            ({"config": self.averages("decay:0.9", "power:0.1", "decay:0.90")},
             "--average: decay:0.90 is given twice, and both would be written to one folder; give it once"),
            ({"resume": self.root / "none"},
             "none: there is no such checkpoint; pass --resume latest, or a folder such as"),
            ({"null-class": 7}, "--null-class is 7; use 0 to 2"),
            ({"null-class": -2}, "--null-class is -2; use 0 to 2"),
            ({"timesteps": 0, "objective": "flow"}, "--timesteps is 0; use 1 to 100000"),
            ({"timesteps": -5, "objective": "flow", "data": self.root / "none"}, "--timesteps is -5"),
            ({"timesteps": 0, "objective": "v"}, "--timesteps is 0"),
            ({"null-class": 3, "data": self.root / "none"}, "--null-class is 3"),  # before it reads
            ({"learning-rate": -1}, "learning-rate is -1"),
            ({"dropout": -1}, "dropout is -1"),
            ({"data-memory": -1}, "--data-memory: -1 is not a whole number from 0 to 1099511627776"),
            ({"data-memory": 1 << 44}, "--data-memory: 17592186044416 is not a whole number from 0 to 1099511627776"),
            ({"augment": 0.1, "flip": "true"}, "--flip cannot be given with --augment"),
            ({"dropout": "nan"}, "--dropout: nan is not a finite number"),
            ({"learning-rate": "1e-400"}, "--learning-rate: 1e-400 is too near to 0; use 0, or another number"),
            ({"default-guidance-scale": "nan"}, "--default-guidance-scale: nan is not a finite number"),
            ({"log-sigma-mean": "nan"}, "--log-sigma-mean: nan is not a finite number"),
            ({"min-snr": "-inf", "objective": "v"}, "--min-snr: -inf is not a finite number"),
            ({"learning-rate": ""}, "--learning-rate: the value is empty; use a number"),
            ({"adam-eps": ""}, "--adam-eps: the value is empty"),
            ({"warmup-steps": ""}, "--warmup-steps: the value is empty"),
            ({"sigma-data": "1e300"}, "--sigma-data is 1e+300; use 0.001 to 1000"),
            ({"log-sigma-mean": "1e300"}, "--log-sigma-mean is 1e+300; use -10 to 10"),
            ({"log-sigma-deviation": "1e300"}, "--log-sigma-deviation is 1e+300; use 0.001 to 10"),
            ({"seed": -1}, "--seed: -1 is not a whole number from 0 to 18446744073709551615; use one (see denoise-train --help)"),
            ({"seed": "18446744073709551616"}, "--seed: 18446744073709551616 is not a whole number"),
            ({"adam-eps": 0}, "--adam-eps is 0; use 1e-16 to 1"),
            ({"steps": "many"}, "--steps: many is not a whole number; use one"),
            ({"steps": "9" * 20}, f"--steps: {'9' * 20} is too large; use a smaller whole number"),
            ({"learning-rate": "high"}, "--learning-rate: high is not a number; use one"),
            ({"stepps": 3}, "--stepps is no option; did you mean --steps?"),
            ({"flip": "maybe"}, "--flip: maybe is neither true nor false; use one of them"),
            ({"steps": "010"}, "--steps: 010 begins with a zero, which could mean octal; write 10"),
            ({"batch": "0x10"}, "--batch: 0x10 is not decimal; write 16"),
            ({"objective": "epsilon", "beta-start": "1e-45", "beta-end": "1e-40"},
             "the server could not draw with this noise schedule"),
            ({"objective": "epsilon", "beta-start": 0.5, "beta-end": 0.9},
             "change --beta-start, --beta-end, --beta-schedule, --timesteps or --default-steps"),
            ({"prompt": "a cat"}, "--prompt needs stage diffusion, but this run has no --pipeline"),
            ({"stage": "vae"}, "--stage needs a --pipeline, but this run has no --pipeline"),
            ({"data": self.root / "network.json"}, "neither a folder, .zip"),
        ]:
            with self.subTest(flags=flags):
                self.assertIn(message, self.train("refused", rc=2, **flags))
        needs_ddpm = "needs the objective epsilon, v or x0, but this run has the objective"
        for flags, message in [
            ({"min-snr": 5}, f"--min-snr {needs_ddpm} edm; leave it out"),
            ({"min-snr": 5, "objective": "flow"}, f"--min-snr {needs_ddpm} flow"),
            ({"beta-end": 0.01}, f"--beta-end {needs_ddpm} edm"),
            ({"beta-schedule": "scaled_linear"}, f"--beta-schedule {needs_ddpm} edm"),
            ({"timesteps": 60}, "--timesteps needs the objective epsilon, v, x0 or flow"),
            ({"flow-uniform": "true"}, "--flow-uniform needs the objective flow"),
            ({"sigma-data": 0.7, "objective": "v"}, "--sigma-data needs the objective edm"),
            ({"cap-snr": 5, "objective": "x0"}, "--cap-snr needs the objective v"),
            ({"variance-weight": 1, "objective": "v"}, "--variance-weight needs"),
            ({"null-class": 1, "class-dropout": None},
             "--null-class needs a --network with classes and --class-dropout, but this run has "
             "--class-dropout 0; leave it out"),
            ({"default-guidance-scale": 2, "class-dropout": None},
             "--default-guidance-scale needs a --pipeline, or a --network with classes and --class-dropout, but this "
             "run has --class-dropout 0; leave it out"),
            ({"reference-steps": 10},
             "--reference-steps needs --schedule inverse-sqrt, but this run has --schedule constant"),
            ({"reference-steps": 10, "schedule": "cosine"}, "but this run has --schedule cosine"),
        ]:
            with self.subTest(flags=flags):
                self.assertIn(message, self.train("refused", rc=2, **flags))
        done = subprocess.run(self.arguments("a") + ["--steps=1e3"], capture_output=True, text=True)
        self.assertIn("--steps: 1e3 is not a whole number", done.stderr)
        # Defaults change nothing.
        self.train("defaults", steps=1, **{"min-snr": "0.0", "beta-end": "2e-2", "timesteps": 1000})
        self.train("a", steps=4)
        self.assertIn("--resume latest", self.train("a", rc=2, steps=4))
        said = self.train("a", rc=2, resume="latest", batch=32)
        self.assertIn("--batch was 16 and is 32", said)
        self.assertIn("is not the folder of a checkpoint", self.train("a", rc=2, resume=self.root / "a"))
        said = self.train("a", resume="latest", steps=3)
        self.assertIn("4 steps were already done, and --steps is 3: only the model is written", said)
        self.assertNotIn("steps 5 to 3", said)


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main(verbosity=2)
