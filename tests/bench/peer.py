# SPDX-License-Identifier: Apache-2.0
"""What the peers' measurements share: PyTorch, timed as denoised times itself, when measure.py says.

A peer is a program that speaks the protocol of turns.h: one line of JSON when it has started and one
for each line of its standard input, "VERB NAME".
"""
import json
import math
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch

ROTATED_BYTES = 256 << 20
MOST_COPIES, LEAST_LAUNCHES = 128, 8
WARM_UP_MS, SAMPLES = 100, 9
MOST_SAMPLES, LONGEST_MS = 99, 1000  # of a model's forward


def prepare():
    torch.set_grad_enabled(False)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 10  # PyTorch's default


def context():
    on_gpu = torch.cuda.is_available()
    return {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
            "gpu": torch.cuda.get_device_name() if on_gpu else None}


def serve(ready, answer):
    """Answers requests until the input ends. Libraries print what they like: it goes to stderr."""
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(what):
        protocol.write(json.dumps(what) + "\n")
        protocol.flush()

    say({"ready": ready()})
    for line in sys.stdin:
        verb, _, name = line.strip().partition(" ")
        try:
            say(answer(verb, name))
        except Exception as error:  # one shape that fails must not end the others
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"[:500]})


def copies_for(bytes_per_launch):
    """So many copies of an op's activations do not fit into a chip's last cache."""
    return max(1, min(MOST_COPIES, -(-ROTATED_BYTES // bytes_per_launch)))


def captured(enqueue, launches, warm_ups=2):
    """A CUDA graph of enqueue(0) … enqueue(launches − 1)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # PyTorch asks for warm-up on a side stream
        for _ in range(warm_ups):
            enqueue(0)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            enqueue(i)
    return graph


def times_ms(run, count):
    """Device milliseconds of each of `count` runs, queued one after the other: the host's time does
    not count as long as it is less, and the device does not idle."""
    if not torch.cuda.is_available():
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    return [begin.elapsed_time(end) for begin, end in zip(marks, marks[1:])]


def median_ms(run, samples=SAMPLES, warm_up_ms=WARM_UP_MS):
    """Median milliseconds of run() after so many of work."""
    once = max(times_ms(run, 2)[1], 1e-3)  # the first replay of a graph uploads it
    warm = math.ceil(warm_up_ms / once)
    return statistics.median(times_ms(run, warm + samples)[warm:])


def model_ms(run):
    """As denoised-bench samples: nine runs at least, 99 at most, a second in all."""
    once = max(times_ms(run, 2)[1], 1e-3)
    return median_ms(run, samples=max(SAMPLES, min(MOST_SAMPLES, int(LONGEST_MS / once))))


class Op:
    """op(i) on copy i, captured in a graph of many launches.

    Outputs are kept, so that they rotate as well: a block of memory that is free again at once would
    be written anew while it is still in the cache, and never reach memory.
    """

    def __init__(self, op, copies):
        self.launches = max(copies, LEAST_LAUNCHES)
        self.op = op  # whose buffers the graph reads
        self.outputs = [None] * copies

        def enqueue(i):
            self.outputs[i % copies] = op(i % copies)

        self.graph = captured(enqueue, self.launches)

    def us(self, **sampling):
        return 1e3 * median_ms(self.graph.replay, **sampling) / self.launches


class Compiled(Exception):
    """Ends the first call of a compiled function between the compiler and the first run."""


def use_one_ptxas():
    # Inductor's processes compile with PyTorch's ptxas if there is one, Inductor itself with Triton's
    # (torch/_inductor/runtime/compile_tasks.py). Triton's cache tells them apart, so that all that
    # max-autotune compares would be compiled again, one after the other.
    ptxas = Path(torch.__file__).parent / "bin" / "ptxas"
    if ptxas.exists():
        os.environ.setdefault("TRITON_PTXAS_PATH", str(ptxas))


def compiled(function, *args, mode="default", **kwargs):
    """torch.compile of a function for these arguments, without the first run: in that kernels are
    chosen by their speed, so nothing else may be on the GPU then."""
    use_one_ptxas()
    may_run = False

    def backend(graph, example_inputs):
        code = torch._inductor.compile(graph, example_inputs,
                                       options=torch._inductor.list_mode_options(mode))

        def first_run_later(*inputs):
            if not may_run:
                raise Compiled
            return code(*inputs)

        return first_run_later

    # Shapes that share a function's code would exhaust what Dynamo compiles of one.
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 4096
    result = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    try:
        result(*args, **kwargs)
    except Compiled:
        pass
    may_run = True
    return result
