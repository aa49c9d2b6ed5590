#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""denoise against a denoised process: jobs, models, the server's limits, and a drain under load.

  serving_test.py --server build/dev/tests/server/denoised_with_fake_engine \
      --client build/dev/client/denoise
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../server"))
from running import Running

SERVER = CLIENT = None


class ServingTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.root = directory.name
        self.model = os.path.join(self.root, "digits")
        os.mkdir(self.model)
        with open(os.path.join(self.model, "config.json"), "w") as file:
            file.write("{}")

    def serve(self, *flags):
        server = Running(SERVER, "--model", f"digits={self.model}", *flags)
        self.addCleanup(server.__exit__)
        server.wait_for("serving")
        return server

    def denoise(self, server, *arguments):
        address = server.wait_for("listening")["address"]
        return subprocess.run([CLIENT, "--server", address, *arguments], cwd=self.root,
                              capture_output=True, text=True, timeout=60)

    def ok(self, server, *arguments):
        result = self.denoise(server, *arguments)
        self.assertEqual(result.returncode, 0, (arguments, result.stdout, result.stderr))
        return result.stdout

    def digest(self, name):
        with open(os.path.join(self.root, name), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()

    def test_a_detached_job_is_watched_later(self):
        server = self.serve()
        drawing = ["--seed", "7", "-l", "3", "-n", "3"]
        identity = self.ok(server, "generate", *drawing, "--detach", "--priority", "batch").strip()
        self.assertRegex(identity, r"^[0-9a-f]{32}$")
        self.ok(server, "jobs", "watch", identity, "-o", "job-{index}.png")
        self.ok(server, "generate", *drawing, "-o", "now-{index}.png")
        for index in range(3):
            self.assertEqual(self.digest(f"job-{index}.png"), self.digest(f"now-{index}.png"))
        job = json.loads(self.ok(server, "jobs", "get", identity, "--json"))
        self.assertEqual(job["state"], "succeeded")
        self.assertEqual(job["images_done"], 3)
        self.assertIn("succeeded", self.ok(server, "jobs", "get", identity))
        again = self.ok(server, "generate", "-n", "2", "--detach").strip()
        self.ok(server, "jobs", "watch", again, "-o", "again-{index}.png")
        listed = json.loads(self.ok(server, "jobs", "list", "--all", "--json"))
        self.assertEqual([job["request_id"] for job in listed], [again, identity])
        self.assertEqual(listed[0]["client"], "anonymous")
        heading, row = self.ok(server, "jobs", "list", "--limit", "1").splitlines()
        self.assertEqual(heading.split()[:3], ["ID", "CLIENT", "STATE"])
        self.assertEqual(row.split()[:5], [again, "anonymous", "succeeded", "digits@1", "2/2"])
        unknown = self.denoise(server, "jobs", "watch", "nobody")
        self.assertEqual(unknown.returncode, 1)
        self.assertIn("nobody", unknown.stderr)

    def test_the_files_of_a_call_are_its_own(self):
        server = self.serve()
        self.ok(server, "generate", "-l", "1,2", "-s", "1,1", "-o", "q-{seed}.png")
        self.assertNotEqual(self.digest("q-1-0.png"), self.digest("q-1-1.png"))
        one = self.denoise(server, "generate", "-o", "a.webp", "--animate", "a.webp")
        self.assertEqual(one.returncode, 2)
        self.assertIn("--animate and --out are both a.webp", one.stderr)
        self.assertFalse(os.path.exists(os.path.join(self.root, "a.webp")))

    def test_an_init_image_says_how_large_the_images_are(self):
        server = self.serve()
        self.ok(server, "generate", "--size", "24x40", "-o", "start.png")
        start = ["generate", "--init-image", "start.png", "--json"]

        def size(*arguments):
            last = json.loads(self.ok(server, *start, *arguments).splitlines()[-1])
            return last["params"]["width"], last["params"]["height"]

        self.assertEqual(size(), (24, 40))
        self.assertEqual(size("--size", "32"), (32, 32))
        self.assertEqual(size("--mask", "start.png"), (32, 32))

    def test_a_grid_that_is_too_large_is_named(self):
        refused = self.denoise(self.serve(), "generate", "-g", "1000x1000")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("note: --grid 1000x1000 asks for 1000000 images\n", refused.stderr)

    def test_a_mask_that_was_refused_is_not_missing(self):
        server = self.serve()
        self.ok(server, "generate", "-o", "start.png")
        with open(os.path.join(self.root, "mask.png"), "wb") as file:
            file.write(b"no picture")
        refused = self.denoise(server, "generate", "--init-image", "start.png", "--mask", "mask.png")
        self.assertEqual(refused.stderr.splitlines()[0],
                         "error: --mask: the image is neither PNG, JPEG nor WebP; convert it to one of them")
        self.assertNotIn("missing", refused.stderr)

    def test_a_job_is_cancelled(self):
        server = self.serve()
        identity = self.ok(server, "generate", "--steps", "1000", "-n", "200", "--detach").strip()
        self.ok(server, "jobs", "cancel", identity)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            job = json.loads(self.ok(server, "jobs", "get", identity, "--json"))
            if job["state"] == "cancelled":
                break
        self.assertEqual(job["state"], "cancelled")
        self.assertIn("error", job)

    def test_the_same_request_id_is_drawn_once(self):
        server = self.serve()
        same = ["generate", "--request-id", "mine", "--seed", "1"]
        self.ok(server, *same, "-o", "a.png")
        self.ok(server, *same, "-o", "b.png")
        self.assertEqual(self.digest("a.png"), self.digest("b.png"))
        other = self.denoise(server, *same, "--steps", "3")
        self.assertEqual(other.returncode, 1)
        self.assertIn("--steps", other.stderr)

    def test_timings(self):
        server = self.serve()
        lines = self.ok(server, "generate", "--json", "--timings").splitlines()
        milestones = [entry["milestone"] for entry in json.loads(lines[-1])["timeline"]]
        self.assertEqual(milestones[0], "queued")
        self.assertIn("evaluation", milestones)
        self.assertEqual(milestones[-1], "sent")

    def test_models_are_loaded_named_and_unloaded(self):
        server = self.serve()
        self.ok(server, "models", "load", "faces", self.model)
        self.ok(server, "models", "load", "faces", "--keep-current", "--version", "canary")
        self.ok(server, "models", "alias", "best", "faces@canary")
        models = {(m["name"], m["version"]): m for m in json.loads(self.ok(server, "models", "--json"))}
        self.assertEqual(set(models), {("digits", "1"), ("faces", "1"), ("faces", "canary")})
        self.assertTrue(models["faces", "1"]["current"])
        self.assertEqual(models["faces", "canary"]["aliases"], ["best"])
        self.ok(server, "generate", "-m", "best", "-o", "best.png")
        self.assertRegex(self.ok(server, "models"), r"faces +canary +available +best")
        self.ok(server, "models", "alias", "faces", "faces@canary")
        self.ok(server, "models", "unload", "faces@1")
        self.ok(server, "models", "alias", "best", "--delete")
        self.ok(server, "models", "unload", "faces")
        self.assertEqual(self.denoise(server, "generate", "-m", "faces").returncode, 1)
        bad = self.denoise(server, "models", "load", "a/b", "/nowhere")
        self.assertEqual(bad.returncode, 2)
        self.assertIn("/nowhere", bad.stderr)

    def test_a_changed_directory_is_loaded(self):
        server = self.serve("--reload-models-seconds", "0.1")
        with open(os.path.join(self.model, "weights"), "w") as file:
            file.write("new")
        end, versions = time.monotonic() + 60, []
        while versions != ["2"] and time.monotonic() < end:
            versions = [m["version"] for m in json.loads(self.ok(server, "models", "--json"))]
        self.assertEqual(versions, ["2"])

    def test_a_directory_that_changes_more_often_than_the_period_is_loaded(self):
        server = self.serve("--reload-models-seconds", "5")
        stop = threading.Event()

        def write():
            number = 0
            while not stop.wait(3):
                number += 1
                with open(os.path.join(self.model, "weights"), "w") as file:
                    file.write(str(number))

        writer = threading.Thread(target=write)
        writer.start()
        try:
            end, versions = time.monotonic() + 60, ["1"]
            while versions == ["1"] and time.monotonic() < end:
                versions = [m["version"] for m in json.loads(self.ok(server, "models", "--json"))]
                time.sleep(0.2)
        finally:
            stop.set()
            writer.join()
        self.assertNotEqual(versions, ["1"], "each look saw another snapshot")

    def test_server_info(self):
        server = self.serve("--grace-seconds", "7")
        info = json.loads(self.ok(server, "server", "info", "--json"))
        self.assertEqual(info["state"], "serving")
        self.assertEqual(info["limits"]["drain_grace_seconds"], 7)
        self.assertIn("model_admin", info["features"])
        self.assertRegex(self.ok(server, "server", "info"), r"max_queued_images +\d+")

    def test_sigterm_under_load_loses_no_accepted_request(self):
        server = self.serve("--lame-duck-seconds", "0.3", "--grace-seconds", "30")
        lost, done, stop = [], [], threading.Event()

        def draw(number):
            while not stop.is_set():
                result = self.denoise(server, "generate", "--steps", str(1 + number * 7), "--json",
                                      "-n", "4", "-o", f"load-{number}-{{index}}.png")
                (done if result.returncode == 0 else lost).append(result)
                if result.returncode != 0:
                    return

        threads = [threading.Thread(target=draw, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 60
        while len(done) < 6 and time.monotonic() < end:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        self.assertEqual(server.process.wait(90), 0)
        stop.set()
        for thread in threads:
            thread.join()
        self.assertGreater(len(done), 5)
        for result in lost:
            # Refused, or too late to connect: nothing that had been accepted.
            self.assertEqual(result.returncode, 3, (result.stdout, result.stderr))
            self.assertNotRegex(result.stdout, r'"type":"image"')
            self.assertRegex(result.stderr, "shutting down|no server could be reached")

    def test_a_second_signal_ends_it_at_once(self):
        server = self.serve("--grace-seconds", "600")
        self.ok(server, "generate", "--steps", "1000", "-n", "256", "--detach")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        self.assertIsNone(server.process.poll(), "it should be waiting for the job")
        server.process.send_signal(signal.SIGTERM)
        self.assertEqual(server.process.wait(60), -signal.SIGTERM)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--client", required=True)
    options, rest = parser.parse_known_args()
    SERVER, CLIENT = map(os.path.abspath, (options.server, options.client))
    unittest.main(argv=[sys.argv[0]] + rest)
