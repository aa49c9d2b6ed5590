"""Times diffusers' UNet2DModel on the GPU: one forward of a batch, by rows.

usage: peer_models.py --models=cifar10-32:1:16:64,adm-64:1 --out=peer_models.json
       [--ways=eager,reduce-overhead,max-autotune] [--processes=16] [--limit=600]

A model is a folder of tests/models/configs, and the numbers after it are rows. bf16, channels last,
random weights, for speed does not depend on them. A way is eager, in a CUDA graph, or a mode of
torch.compile, which makes CUDA graphs of its own; measured with it are the peak of allocated and
reserved device memory and the seconds until the first result. Needs diffusers.

Compiling takes a minute or more, so up to --processes do it side by side; the first run, in which
kernels are chosen by their speed, and all that is timed come once all have compiled, one process
after the other. max-autotune times kernels while it compiles: it has a GPU for itself, and the host
all of its GPUs. Everything else is on the first. What has not compiled --limit seconds after its
start is left out.
"""
import argparse
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path


def visible_gpus():
    """As CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return named.split(",")
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"nvidia-smi does not tell the GPUs: {error}; let CUDA_VISIBLE_DEVICES name them")


def measure(gpu, compile_threads, *args):
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = f"{compile_threads}"
    import peer_forward  # here, since the processes import PyTorch side by side

    peer_forward.measure(*args)


def measured(works, limit, gpu, compilers):
    """What measure() sends of each (model, rows, way), None where a process failed; in order.

    `compilers`: how many at a time share the processors, here and beside.
    """
    spawn = multiprocessing.get_context("spawn")
    compile_threads = max(1, os.cpu_count() // max(1, compilers))
    deadline = time.monotonic() + limit
    children = []
    for work in works:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=measure, args=(gpu, compile_threads, *work, theirs))
        process.start()
        theirs.close()  # so that a child that fails is heard of
        children.append((process, ours))

    def received(pipe):
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            return None

    ready = []
    for process, pipe in children:
        in_time = pipe.poll(max(0, deadline - time.monotonic()))
        ready.append(in_time and received(pipe) is not None)
        if not ready[-1]:
            process.kill()
    for (process, pipe), is_ready in zip(children, ready):
        if is_ready:
            pipe.send("go")
        yield received(pipe) if is_ready else None
        process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", required=True)
    parser.add_argument("--ways", default="eager,reduce-overhead")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--limit", type=float, default=600)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shapes = [(model, int(rows)) for model, *all_rows in
              (each.split(":") for each in args.models.split(",")) for rows in all_rows]
    works = [(*shape, way) for shape in shapes for way in args.ways.split(",")]
    alone = [work for work in works if work[2].startswith("max-autotune")]
    together = [work for work in works if work not in alone]
    batches = [together[i:i + args.processes] for i in range(0, len(together), args.processes)]

    gpus = visible_gpus()

    def results():
        """Each work with its details, None where it failed."""
        for batch in batches:
            compilers = sum(way != "eager" for _, _, way in batch)
            yield from zip(batch, measured(batch, args.limit, gpus[0], compilers))

        free = queue.SimpleQueue()
        for gpu in gpus:
            free.put(gpu)

        def on_any_gpu(work):
            gpu = free.get()
            [details] = measured([work], args.limit, gpu, min(len(gpus), len(alone)))
            free.put(gpu)
            return details

        with ThreadPoolExecutor(len(gpus)) as pool:
            futures = {pool.submit(on_any_gpu, work): work for work in alone}
            for future in as_completed(futures):
                yield futures[future], future.result()

    benchmarks = {shape: {"name": f"{shape[0]}/rows:{shape[1]}", "unit": "ms", "peers": {},
                          "details": {}} for shape in shapes}
    failed = False
    for (model, rows, way), details in results():
        benchmark = benchmarks[model, rows]
        label = "eager in a graph" if way == "eager" else f"torch.compile {way}"
        if details is None:
            print(f"{benchmark['name']} {label}: failed", flush=True)
            failed = True
            continue
        benchmark["peers"][label] = details["ms"]
        benchmark["details"][label] = details
        # Written after each, since compiling takes minutes and may be cut short.
        args.out.write_text(json.dumps({
            "context": details.pop("context"),
            "benchmarks": [b for b in benchmarks.values() if b["peers"]],
        }, indent=1) + "\n")
        print(f"{benchmark['name']} {label}: {details}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
