#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints whether docs/gpu-tests.json, which scripts/test-gpu writes, is a record of these sources.

Their hash covers the engine, except its CPU backends, and the tests that need a GPU, with their data: the
files of SOURCES without those of OTHERS. The last line counts the record as one part: skipped when there
is none or it is of other sources, failed when it has failures."""

import argparse
import hashlib
import json
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = pathlib.Path("docs/gpu-tests.json")

SOURCES = ["cmake/cuda.cmake", "engine/**/*", "tests/*.h", "tests/*.cc", "tests/backend/**/*",
           "tests/batching/*.h", "tests/engine/**/*", "tests/models/**/*", "tests/trainer/*_test.py",
           "tests/training/**/*"]
OTHERS = {"cpu", "__pycache__"}  # folders

# A case that needs a GPU has one of these in its name, and is in one of these programs. One compares
# plans with what a GPU took, and needs none.
GPU_CASES = "*Cuda*:*cuda*:*Hopper*:*Gpu*-Trainer.ThePlanIsNearWhatAGpuTook"
GPU_PROGRAMS = ["backend_test", "models_test", "engine_test", "training_op_test",
                "training_latent_op_test",
                "training_model_test", "training_latent_model_test", "training_trainer_test",
                "training_text_to_image_test"]
# Cases of tests/trainer/*.py that also run denoise-train on a GPU: its bits, and what ends a run.
TRAINER_CASES = {
    "run_test": ["RunTest.test_repeats_its_bits_with_any_accumulation_and_threads",
                 "RunTest.test_kill_at_any_moment_and_resume",
                 "RunTest.test_kill_one_of_two_ranks_and_resume_both",
                 "RunTest.test_ranks_have_the_bits_of_one",
                 "RunTest.test_a_signal_finishes_the_step_and_saves",
                 "RunTest.test_a_checkpoint_that_is_cut_off_is_passed_over",
                 "RunTest.test_a_run_that_diverges_ends_with_a_message",
                 "RunTest.test_pictures_on_disk_and_augmented_ones_have_the_same_bits"],
    "text_to_image_test": ["TextToImageTest.test_bits_depend_on_the_settings_alone",
                           "TextToImageTest.test_kill_and_resume",
                           "TextToImageTest.test_the_autoencoder_goes_on_with_the_same_bits"],
}
NEEDS_GPU = "needs a GPU"  # what such a case says when it is skipped: tests/needs_gpu.h


def hash_of_sources(root=ROOT):
    files = {file for pattern in SOURCES for file in root.glob(pattern)
             if file.is_file() and not OTHERS & set(file.relative_to(root).parts)}
    digest = hashlib.sha256()
    for file in sorted(files):
        contents = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(root).as_posix()} {contents}\n".encode())
    return digest.hexdigest()


def changed_since(commit, root=ROOT):
    """The files behind the hash that differ from `commit`; empty where git does not know it."""
    try:
        done = subprocess.run(["git", "diff", "--name-only", commit, "--",
                               *(f":(glob){pattern}" for pattern in SOURCES)],
                              cwd=root, capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return []
    return [file for file in done.stdout.splitlines()
            if not OTHERS & set(pathlib.PurePath(file).parts)]


def describe(record, sources, changed=()):
    """The line that scripts/test prints; `record` is None when there is no file."""
    run_it = "run scripts/test-gpu on a machine with a GPU"
    if record is None:
        return f"GPU tests: there is no {RECORD}: {run_it}"
    of = (f"{record['device']} at {record['commit']}: {record['passed']} passed, "
          f"{len(record['failed'])} failed, {len(record['skipped'])} skipped" +
          (f", {len(record['again'])} of them in a second run" if record.get("again") else ""))
    if record["sources"] != sources:
        since = f"; changed since: {', '.join(changed)}" if changed else ""
        return f"GPU tests: {RECORD} is of other CUDA sources ({of}{since}): {run_it}"
    return f"GPU tests: {RECORD} is of these CUDA sources ({of})"


def count(record, sources):
    if record is None or record["sources"] != sources:
        return "0 passed, 0 failed, 1 skipped"
    return "0 passed, 1 failed, 0 skipped" if record["failed"] else "1 passed, 0 failed, 0 skipped"


def read(path):
    return json.loads(path.read_text()) if path.exists() else None


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__,
                                        formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--hash", action="store_true", help="print the hash of the sources alone")
    if arguments.parse_args().hash:
        print(hash_of_sources())
    else:
        found, current = read(ROOT / RECORD), hash_of_sources()
        stale = found is not None and found["sources"] != current
        print(describe(found, current, changed_since(found["commit"]) if stale else ()))
        print(count(found, current))
