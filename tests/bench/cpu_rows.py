#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The CPU backend beside an older build of it, in turns, on an idle and on a busy machine.

  tests/bench/cpu_rows.py --before OLD/engine-throughput --out cpu.json [--after NEW/engine-throughput]

  idle   16 images in flight on two cores
  busy   the same, while two endless loops run on these cores
  one-2  one image at a time on two threads, and one-16 on 16 threads where there are so many cores
  bf16   idle with --cpu-dtype=bf16, where the CPU has AVX512-BF16 or AMX

Each round runs every case for --seconds, so that ratios between cases are of neighbours in time; before
and after alternate, and so does which is first. The figure is milliseconds for one image of ten steps
without guidance, so that an image is one row. Nothing else should run on the machine. make_tables.py
makes the table of docs/benchmarks.md. `before` is f8cdc7f, in which every op of a row ended in a
barrier."""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CASES = {  # images in flight, threads, busy loops, flags
    "idle": (16, 2, 0, []),
    "busy": (16, 2, 2, []),
    "one-2": (1, 2, 0, []),
    "one-16": (1, 16, 0, []),
    "bf16": (16, 2, 0, ["--cpu-dtype=bf16"]),
}


@contextlib.contextmanager
def loops(count, cores):
    """Processes that compute for ever on these cores."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"],
                                  preexec_fn=lambda: os.sched_setaffinity(0, cores))
                 for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(program, model, case, seconds, cores):
    """Milliseconds for an image; None if the program refuses or finished no image in this time."""
    in_flight, threads, busy, flags = CASES[case]
    used = set(sorted(cores)[:threads])
    with loops(busy, used):
        done = subprocess.run(
            [program, f"--model={model}", "--device=cpu", f"--in-flight={in_flight}",
             f"--max-rows={max(2, in_flight)}", "--warm-up=1", f"--seconds={seconds}", *flags],
            stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": f"{threads}"},
            preexec_fn=lambda: os.sched_setaffinity(0, used))
    rate = json.loads(done.stdout)["images_per_second"] if done.returncode == 0 else 0
    return 1e3 / rate if rate > 0 else None


@contextlib.contextmanager
def without_guidance(model):
    """The model in a folder of its own, with no guidance by default."""
    with tempfile.TemporaryDirectory(prefix="denoised-cpu-") as work:
        folder = pathlib.Path(work) / model.name
        folder.mkdir()
        for path in model.iterdir():
            (folder / path.name).symlink_to(path.resolve())
        index = json.loads((model / "model_index.json").read_text())
        index["_denoised"] |= {"default_steps": 10, "default_guidance_scale": 1}
        (folder / "model_index.json").unlink()
        (folder / "model_index.json").write_text(json.dumps(index))
        yield folder


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return os.uname().machine


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=pathlib.Path, required=True)
    parser.add_argument("--after", type=pathlib.Path,
                        default=ROOT / "build/release/tests/bench/engine-throughput")
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models/mnist-32")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4, help="of a case, in a round")
    parser.add_argument("--before-commit", default="f8cdc7f")
    parser.add_argument("--commit", help="of --after; default: git's HEAD")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    cores = os.sched_getaffinity(0)
    commit = args.commit or subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True,
        check=True).stdout.strip()
    rows = []
    content = {"context": {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit, "device": f"{cpu_name()}, {len(cores)} cores",
        "command": "tests/bench/cpu_rows.py", "rounds": args.rounds,
        "load_average": os.getloadavg()[0]}, "before": args.before_commit, "rows": rows}
    with without_guidance(args.model) as model:
        cases = [case for case in args.cases if CASES[case][1] <= len(cores)]
        for case in sorted(set(args.cases) - set(cases)):
            print(f"{case}: left out, there are {len(cores)} cores", flush=True)
        rows += [{"name": case, "before": [], "after": []} for case in cases]
        for i in range(args.rounds):
            for row in rows:
                sides = [("before", args.before), ("after", args.after)]
                for side, program in sides if i % 2 == 0 else reversed(sides):
                    if row["name"] == "bf16" and side == "before":
                        continue  # the old build has only fp32
                    took = measure(program, model, row["name"], args.seconds, cores)
                    if took is not None:
                        row[side].append(took)
        for row in list(rows):
            if not row["after"]:
                print(f"{row['name']}: refused, or no image within --seconds", flush=True)
                rows.remove(row)
                continue
            print(f"{row['name']}: " + ", ".join(
                f"{side} {statistics.median(row[side]):.4g} ms" for side in ("before", "after")
                if row[side]), flush=True)
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
