"""Times diffusers' UNet2DModel on the GPU: one forward of a batch, by rows.

usage: peer_models.py --models=cifar10-32:1:16:64,adm-64:1 --out=peer_models.json
       [--compile=reduce-overhead,max-autotune | none] [--processes=16]

A model is a folder of tests/models/configs, and the numbers after it are rows. bf16, channels last,
random weights, for speed does not depend on them. Measured are eager in a CUDA graph and
torch.compile in each mode (which makes CUDA graphs of its own), with the peak of allocated and
reserved device memory and the seconds until the first result. Needs diffusers.

Compiling takes a minute or more, so up to --processes do it side by side; the first run, in which
kernels are chosen by their speed, and all that is timed come once all have compiled, one process
after the other. max-autotune times kernels while it compiles: it is alone.
"""
import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
from diffusers import UNet2DModel

import peer

CONFIGS = Path(__file__).parents[1] / "models" / "configs"
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
EAGER = "eager in a graph"


def inputs_for(unet, rows):
    config = unet.config
    x = torch.randn(rows, config.in_channels, config.sample_size, config.sample_size, **BF16)
    inputs = {"sample": x.to(memory_format=torch.channels_last),
              "timestep": torch.randint(0, 1000, (rows,), device="cuda")}
    if config.num_class_embeds:
        inputs["class_labels"] = torch.randint(0, config.num_class_embeds, (rows,), device="cuda")
    return inputs


class Turn:
    """A process's turn with the GPU, which the parent gives."""

    def __init__(self, parent):
        self.parent = parent
        self.waited = 0

    def wait(self):
        begin = time.monotonic()
        self.parent.send("ready")
        self.parent.recv()
        self.waited += time.monotonic() - begin


def eager(unet, inputs, turn):
    turn.wait()
    return peer.captured(lambda _: unet(**inputs), 1).replay


def compiled(unet, inputs, turn, mode):
    """torch.compile(mode=mode), with a wait between the compiler and the first run."""

    def backend(graph, example_inputs):
        forward = torch._inductor.compile(graph, example_inputs,
                                          options=torch._inductor.list_mode_options(mode))
        turn.wait()
        return forward

    forward = torch.compile(unet, backend=backend, fullgraph=True, dynamic=False)
    for _ in range(3):  # the second call records its CUDA graph
        forward(**inputs)
    return lambda: forward(**inputs)


def measure(model, rows, way, parent):
    """In a process of its own: milliseconds of a forward, and what it took to get there."""
    peer.prepare()
    unet = UNet2DModel.from_config(json.loads((CONFIGS / model / "config.json").read_text()))
    unet = unet.to(**BF16).to(memory_format=torch.channels_last).eval()
    inputs = inputs_for(unet, rows)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    turn = Turn(parent)
    start = time.monotonic()
    run = eager(unet, inputs, turn) if way == EAGER else compiled(
        unet, inputs, turn, way.removeprefix("torch.compile "))
    run()
    torch.cuda.synchronize()
    first = time.monotonic() - start - turn.waited
    ms = peer.median_ms(run, samples=50)
    parent.send({"ms": ms, "seconds_to_first": round(first, 1),
                 "MiB_allocated": torch.cuda.max_memory_allocated() >> 20,
                 "MiB_reserved": torch.cuda.max_memory_reserved() >> 20})


def measured(works):
    """What measure() sends of each (model, rows, way), None where a process failed; in order."""
    spawn = multiprocessing.get_context("spawn")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", f"{os.cpu_count() // len(works) or 1}")
    children = []
    for work in works:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=measure, args=(*work, theirs))
        process.start()
        theirs.close()  # so that a child that fails is heard of
        children.append((process, ours))

    def received(pipe):
        try:
            return pipe.recv()
        except EOFError:
            return None

    ready = [received(pipe) for _, pipe in children]
    for (process, pipe), is_ready in zip(children, ready):
        if is_ready:
            pipe.send("go")
        yield received(pipe) if is_ready else None
        process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", required=True)
    parser.add_argument("--compile", default="reduce-overhead")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    modes = [] if args.compile == "none" else args.compile.split(",")
    shapes = [(model, int(rows)) for model, *all_rows in
              (each.split(":") for each in args.models.split(",")) for rows in all_rows]
    works = [(*shape, way) for shape in shapes
             for way in [EAGER] + [f"torch.compile {mode}" for mode in modes]]
    alone = [work for work in works if "max-autotune" in work[2]]
    together = [work for work in works if work not in alone]
    batches = [together[i:i + args.processes] for i in range(0, len(together), args.processes)]

    benchmarks = {shape: {"name": f"{shape[0]}/rows:{shape[1]}", "unit": "ms", "peers": {},
                          "details": {}} for shape in shapes}
    failed = False
    for batch in batches + [[work] for work in alone]:
        for (*shape, way), details in zip(batch, measured(batch)):
            benchmark = benchmarks[tuple(shape)]
            if details is None:
                print(f"{benchmark['name']} {way}: failed", flush=True)
                failed = True
                continue
            benchmark["peers"][way] = details["ms"]
            benchmark["details"][way] = details
            # Written after each, since compiling takes minutes and may be cut short.
            peer.write(args.out, benchmarks=[b for b in benchmarks.values() if b["peers"]])
            print(f"{benchmark['name']} {way}: {details}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
