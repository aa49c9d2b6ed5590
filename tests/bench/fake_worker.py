# SPDX-License-Identifier: Apache-2.0
"""Stands for every program that measure.py starts, in its test: fake_worker.py NAME | --list.

Workers whose name contains "eager" fail to compile, and the op with in:3 refuses; everything else
answers at once. denoised takes 2, peers 3, with a little more in each round. A peer of ops that has
searched and is then asked for what FAKE_BROKEN contains answers everything with an error from then on.
"""
import json
import os
import sys
import time

OPS = ["conv/rows:1/size:8/in:256/out:256", "conv/rows:64/size:32/in:3/out:128",
       "conv_bias_residual_silu/rows:1/size:8/in:256/out:256",
       "linear/rows:1/tokens:256/in:256/out:768", "attention/rows:1/heads:1/tokens:256/dim:256",
       "group_norm_silu/rows:1/size:32/channels:128"]

if sys.argv[1] == "--list":
    print("\n".join(OPS))
    sys.exit()

name, measured, has_searched, broken = sys.argv[1], 0, False, False
ours = name.startswith(("denoised", "backend", "training", "clocks-ours", "own"))
breaks_at = os.environ.get("FAKE_BROKEN")
of_ops = name.startswith(("ops", "train-ops"))
unit = "us" if of_ops or name.startswith(("backend", "training", "cublaslt", "clocks")) else "ms"
print(json.dumps({"ready": {"device": "no device"} if ours else {"torch": "0", "cudnn": 1}}),
      flush=True)
for line in sys.stdin:
    verb, _, what = line.strip().partition(" ")
    broken |= bool(breaks_at) and verb == "prepare" and has_searched and breaks_at in what
    if broken:
        answer = {"error": "broken"}
    elif verb == "measure":
        measured += 1
        answer = {unit: (2 if ours else 3) + 0.01 * measured}
        if name == "errors-peer":
            answer = {"denoised": [0.01, 0.012], "diffusers": [0.02, 0.018]}
        if ours and unit == "ms":
            answer["ms_forward"] = 1.9
    elif verb == "ceilings":
        answer = {"flop_per_s": 6e14, "bytes_per_s": 4e12}
    elif verb == "variant":
        answer = {"us": 250.0, "first_us": 240.0, "last_us": 251.0, "found": {}}
    elif "in:3/" in what and not ours:
        answer = {"error": "refused"}
    elif verb == "prepare" and of_ops:
        answer = {"fastest": "cuDNN", "candidates_us": {"cuDNN": 3.0}, "refused": {}}
    elif verb == "search":
        has_searched = True
        shape, end = what.split()
        slow = shape.startswith("conv_bias")
        answer = {"searched": not slow and float(end) > 0, "not_tried": 0 if slow else 2}
    elif verb == "compile" and what == "" and os.environ.get("FAKE_COMPILER") == "slow":
        time.sleep(3600)
    elif verb == "compile" and what == "eager":
        answer = {"error": "no eager here"}
    elif verb == "prepare":
        answer = {"flop": 1e9, "MiB_device": 7.0, "MiB_allocated": 8, "MiB_reserved": 9,
                  "first_step_seconds": 1.5 if ours else 60.0}
    else:
        answer = {"flop": 1e9}
    print(json.dumps(answer), flush=True)
