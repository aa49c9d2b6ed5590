"""Times PyTorch drawing digits with a shipped model: the figure that denoised stands beside.

usage: torch_mnist_bench.py [--model ../../models/mnist-32] [--device cpu] [--threads 2]
       [--count 16] [--steps N] [--guidance G] [--mode eager,graph,compile] [--dtype float32]
Sampler, steps and guidance scale are the model's defaults. Prints one JSON object per mode: load
seconds (imports left out), seconds per batch (the median of the repeats), and the peak of resident
memory; on CUDA of device memory too. `graph` (CUDA only) captures one evaluation of the UNet.
"""

import argparse
import json
import resource
import statistics
import time
from pathlib import Path

import torch
from diffusers import EDMDPMSolverMultistepScheduler, UNet2DModel

from sampling import draw

MODEL = Path(__file__).parents[2] / "models" / "mnist-32"


def captured(unet, rows, dtype):
    """Returns a function like unet.forward that replays one CUDA graph for `rows` rows."""
    sample = torch.zeros(rows, 1, 32, 32, device="cuda", dtype=dtype)
    sample = sample.to(memory_format=torch.channels_last)
    timesteps = torch.zeros(rows, device="cuda", dtype=dtype)
    labels = torch.zeros(rows, device="cuda", dtype=torch.int64)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # PyTorch asks for warm-up on a side stream
        for _ in range(3):
            unet(sample, timesteps, class_labels=labels, return_dict=False)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = unet(sample, timesteps, class_labels=labels, return_dict=False)

    def replay(x, t, class_labels, return_dict):
        assert x.shape == sample.shape and not return_dict
        sample.copy_(x)
        timesteps.copy_(t)
        labels.copy_(class_labels)
        graph.replay()
        return output

    return replay


def in_dtype(unet, dtype):
    """The state x stays float32; only the UNet computes in `dtype`."""

    def call(x, t, class_labels, return_dict):
        x = x.to(dtype, memory_format=torch.channels_last)
        return unet(x, t.to(dtype), class_labels=class_labels, return_dict=return_dict)

    return call


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--mode", default="eager")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.benchmark = True
    defaults = json.loads((args.model / "model_index.json").read_text())["_denoised"]
    steps = args.steps or defaults["default_steps"]
    guidance = args.guidance or defaults["default_guidance_scale"]
    dtype = getattr(torch, args.dtype)
    on_gpu = args.device == "cuda"

    start = time.perf_counter()
    unet = UNet2DModel.from_pretrained(args.model / "unet", torch_dtype=dtype)
    unet = unet.to(args.device, memory_format=torch.channels_last).eval()
    scheduler = EDMDPMSolverMultistepScheduler.from_pretrained(args.model / "scheduler")
    load_seconds = time.perf_counter() - start

    noise = torch.randn(args.count, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    noise = noise.to(args.device, memory_format=torch.channels_last)
    labels = (torch.arange(args.count) % 10).to(args.device)
    rows = args.count * (2 if guidance > 1 else 1)

    for mode in args.mode.split(","):
        evaluate = {
            "eager": lambda: unet,
            "graph": lambda: captured(unet, rows, dtype),
            "compile": lambda: torch.compile(
                unet, mode="max-autotune" if on_gpu else "default", dynamic=False),
        }[mode]()  # fmt: skip
        if mode == "graph" and not on_gpu:
            raise SystemExit("--mode graph needs --device cuda")
        evaluate = in_dtype(evaluate, dtype)

        def run():
            start = time.perf_counter()
            draw(evaluate, scheduler, noise, labels, steps, guidance, defaults["null_class"])
            if on_gpu:
                torch.cuda.synchronize()
            return time.perf_counter() - start

        first = run()
        seconds = [run() for _ in range(args.repeats)]
        figures = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if on_gpu else f"cpu, {args.threads} threads",
            "mode": mode, "dtype": args.dtype, "digits": args.count, "steps": steps,
            "guidance_scale": guidance, "rows_per_evaluation": rows,
            "load_seconds": round(load_seconds, 3),
            "first_seconds": round(first, 4),
            "seconds": round(statistics.median(seconds), 4),
            "all_seconds": [round(s, 4) for s in seconds],
            # Linux counts ru_maxrss in KiB.
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }  # fmt: skip
        if on_gpu:
            figures["peak_device_mib"] = torch.cuda.max_memory_reserved() // 2**20
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
