"""Times diffusers' UNet2DModel on the GPU: one forward of a batch, by rows.

usage: peer_models.py --models=cifar10-32,adm-64 --rows=1,16,64 --out=peer_models.json
       [--compile=reduce-overhead,max-autotune | none]

A model is a folder of tests/models/configs. bf16, channels last, random weights, for speed does not
depend on them. Measured are eager in a CUDA graph and torch.compile in each mode (which makes CUDA
graphs of its own, and compiles for 1 to 4 minutes), with the peak of allocated and reserved device
memory and the seconds until the first result. Needs diffusers.
"""
import argparse
import gc
import json
import time
from pathlib import Path

import torch
from diffusers import UNet2DModel

import peer

CONFIGS = Path(__file__).parents[1] / "models" / "configs"
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def inputs_for(unet, rows):
    config = unet.config
    x = torch.randn(rows, config.in_channels, config.sample_size, config.sample_size, **BF16)
    inputs = {"sample": x.to(memory_format=torch.channels_last),
              "timestep": torch.randint(0, 1000, (rows,), device="cuda")}
    if config.num_class_embeds:
        inputs["class_labels"] = torch.randint(0, config.num_class_embeds, (rows,), device="cuda")
    return inputs


def measured(prepare):
    """Milliseconds of the function that prepare() returns, and what it took to get there."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.monotonic()
    run = prepare()
    run()
    torch.cuda.synchronize()
    first = time.monotonic() - start
    ms = peer.median_ms(run, samples=50)
    return {"ms": ms, "seconds_to_first": round(first, 1),
            "MiB_allocated": torch.cuda.max_memory_allocated() >> 20,
            "MiB_reserved": torch.cuda.max_memory_reserved() >> 20}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--compile", default="reduce-overhead")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    modes = [] if args.compile == "none" else args.compile.split(",")
    peer.prepare()
    benchmarks = []
    for model in args.models.split(","):
        unet = UNet2DModel.from_config(json.loads((CONFIGS / model / "config.json").read_text()))
        unet = unet.to(**BF16).to(memory_format=torch.channels_last).eval()
        for rows in map(int, args.rows.split(",")):
            inputs = inputs_for(unet, rows)
            details = {"eager in a graph":
                       measured(lambda: peer.captured(lambda _: unet(**inputs), 1).replay)}
            for mode in modes:
                torch._dynamo.reset()

                def compiled():
                    forward = torch.compile(unet, mode=mode, fullgraph=True, dynamic=False)
                    for _ in range(3):  # the second call records its CUDA graph
                        forward(**inputs)
                    return lambda: forward(**inputs)

                details[f"torch.compile {mode}"] = measured(compiled)
            benchmarks.append({"name": f"{model}/rows:{rows}", "unit": "ms",
                               "peers": {label: d["ms"] for label, d in details.items()},
                               "details": details})
            # Written after each, since compiling takes minutes and may be cut short.
            peer.write(args.out, benchmarks=benchmarks)
            print(benchmarks[-1]["name"], benchmarks[-1]["peers"], flush=True)
        del unet


if __name__ == "__main__":
    main()
