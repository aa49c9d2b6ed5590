# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch drawing digits with a shipped model: the figure that denoised stands beside.

usage: torch_mnist_bench.py [--model ../../models/mnist-32] [--device cpu] [--threads 2]
       [--count 16] [--steps N] [--guidance G] [--mode eager,graph,compile] [--dtype float32]
       [--turns]
Sampler, steps and guidance scale are the model's defaults. Prints one JSON object per mode: load
seconds (imports left out), seconds per batch (the median of the repeats), seconds of CPU time per
batch over all threads (tells a busy machine from a slow program), and the peak of resident memory;
on CUDA of device memory too. `graph` (CUDA only) captures one evaluation of the UNet; `compile` is
torch.compile, on CUDA all evaluations and sampler steps of a batch captured in one CUDA graph.

--turns instead measures when tests/bench/measure.py says so: "compile", "prepare" and "measure", each
with a mode. Milliseconds of a batch; of a graph those of the device, replayed back to back.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path

import torch
from diffusers import EDMDPMSolverMultistepScheduler, UNet2DModel
from diffusers import __version__ as diffusers_version

from sampling import draw

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
import peer

MODEL = Path(__file__).resolve().parents[2] / "models" / "mnist-32"


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
        if t.device != x.device:  # a copy from the host could not be captured, a fill can
            t = torch.full((len(x),), float(t[0]), device=x.device, dtype=dtype)
        return unet(x, t.to(dtype), class_labels=class_labels, return_dict=return_dict)

    return call


class Batches:
    """Draws the same batch over and over, in one of the modes."""

    def __init__(self, args):
        torch.set_grad_enabled(False)
        torch.set_num_threads(args.threads)
        torch.backends.cudnn.benchmark = True
        defaults = json.loads((args.model / "model_index.json").read_text())["_denoised"]
        self.null_class = defaults["null_class"]
        self.steps = args.steps or defaults["default_steps"]
        self.guidance = args.guidance or defaults["default_guidance_scale"]
        self.dtype = getattr(torch, args.dtype)
        self.on_gpu = args.device == "cuda"
        start = time.perf_counter()
        unet = UNet2DModel.from_pretrained(args.model / "unet", torch_dtype=self.dtype)
        self.unet = unet.to(args.device, memory_format=torch.channels_last).eval()
        self.scheduler = EDMDPMSolverMultistepScheduler.from_pretrained(args.model / "scheduler")
        self.load_seconds = time.perf_counter() - start
        noise = torch.randn(args.count, 1, 32, 32, generator=torch.Generator().manual_seed(0))
        self.noise = noise.to(args.device, memory_format=torch.channels_last)
        self.labels = (torch.arange(args.count) % 10).to(args.device)
        self.rows = args.count * (2 if self.guidance > 1 else 1)
        self.evaluate, self.runs = {}, {}

    def draw(self, evaluate, scheduler_device=None):
        return draw(in_dtype(evaluate, self.dtype), self.scheduler, self.noise, self.labels,
                    self.steps, self.guidance, self.null_class, scheduler_device)

    def compile(self, mode):
        if mode == "graph" and not self.on_gpu:
            raise SystemExit("--mode graph needs --device cuda")
        if mode == "eager":
            self.evaluate[mode] = self.unet
        elif mode == "graph":
            self.evaluate[mode] = captured(self.unet, self.rows, self.dtype)
        else:
            like = {"device": self.noise.device, "dtype": self.dtype}
            sample = torch.zeros(self.rows, 1, 32, 32, **like)
            self.evaluate[mode] = peer.compiled(
                self.unet, sample.to(memory_format=torch.channels_last),
                torch.zeros(self.rows, **like), return_dict=False,
                class_labels=torch.zeros(self.rows, device=self.noise.device, dtype=torch.int64))

    def prepare(self, mode):
        evaluate = self.evaluate[mode]
        if mode == "compile" and self.on_gpu:
            self.runs[mode] = peer.captured(lambda _: self.draw(evaluate, "cpu"), 1).replay
        else:
            self.runs[mode] = lambda: self.draw(evaluate)
        self.run(mode)

    def run(self, mode):
        self.runs[mode]()
        if self.on_gpu:
            torch.cuda.synchronize()

    def milliseconds(self, mode):
        if mode == "compile" and self.on_gpu:
            return peer.model_ms(self.runs[mode])
        times, begin = [], time.perf_counter()
        while len(times) < 3 or time.perf_counter() - begin < 1:
            start = time.perf_counter()
            self.run(mode)
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)

    def answer(self, verb, mode):
        if verb == "measure":
            return {"ms": self.milliseconds(mode)}
        start = time.perf_counter()
        {"compile": self.compile, "prepare": self.prepare}[verb](mode)
        return {"seconds": round(time.perf_counter() - start, 1)}


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
    parser.add_argument("--turns", action="store_true")
    args = parser.parse_args()

    batches = Batches(args)
    if args.turns:
        peer.serve(lambda: peer.context() | {"diffusers": diffusers_version}, batches.answer)
        return
    for mode in args.mode.split(","):
        start = time.perf_counter()
        batches.compile(mode)
        batches.prepare(mode)
        first = time.perf_counter() - start

        def run():
            start, cpu_start = time.perf_counter(), time.process_time()
            batches.run(mode)
            return time.perf_counter() - start, time.process_time() - cpu_start

        seconds, cpu_seconds = zip(*(run() for _ in range(args.repeats)))
        figures = {
            "torch": torch.__version__,
            "device": (torch.cuda.get_device_name() if batches.on_gpu
                       else f"cpu, {args.threads} threads"),
            "mode": mode, "dtype": args.dtype, "digits": args.count, "steps": batches.steps,
            "guidance_scale": batches.guidance, "rows_per_evaluation": batches.rows,
            "load_seconds": round(batches.load_seconds, 3),
            "first_seconds": round(first, 4),
            "seconds": round(statistics.median(seconds), 4),
            "cpu_seconds": round(statistics.median(cpu_seconds), 4),
            "all_seconds": [round(s, 4) for s in seconds],
            # Linux counts ru_maxrss in KiB.
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }  # fmt: skip
        if batches.on_gpu:
            figures["peak_device_mib"] = torch.cuda.max_memory_reserved() // 2**20
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
