"""What the peers' measurements share: PyTorch on the GPU, timed as denoised times itself."""
import datetime
import json
import math
import statistics
from pathlib import Path

import torch

ROTATED_BYTES = 256 << 20
MOST_COPIES, LEAST_LAUNCHES = 128, 8
WARM_UP_MS, SAMPLES = 100, 9


def prepare():
    torch.set_grad_enabled(False)
    torch.backends.cudnn.benchmark = True


def copies_for(bytes_per_launch):
    """So many copies of an op's activations do not fit into a chip's last cache."""
    return max(1, min(MOST_COPIES, -(-ROTATED_BYTES // bytes_per_launch)))


def captured(enqueue, launches):
    """A CUDA graph of enqueue(0) … enqueue(launches − 1)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # PyTorch asks for warm-up on a side stream
        for _ in range(2):
            enqueue(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            enqueue(i)
    return graph


def median_ms(run, samples=SAMPLES):
    """Median device milliseconds of run(), which is queued over and over, as denoised does it: what
    the host takes for it does not count as long as it is less, and the device does not idle."""

    def timed(count):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        marks[-1].synchronize()
        return [begin.elapsed_time(end) for begin, end in zip(marks, marks[1:])]

    once = timed(2)[1]  # the first replay of a graph uploads it
    warm = math.ceil(WARM_UP_MS / once)
    return statistics.median(timed(warm + samples)[warm:])


def op_us(op, copies):
    """Median microseconds of op(i), i an index of a copy, within a CUDA graph of many.

    Outputs are kept, so that they rotate as well: a block of memory that is free again at once would
    be written anew while it is still in the cache, and never reach memory.
    """
    launches = max(copies, LEAST_LAUNCHES)
    outputs = [None] * copies

    def enqueue(i):
        outputs[i % copies] = op(i % copies)

    graph = captured(enqueue, launches)
    return 1e3 * median_ms(graph.replay) / launches


def context():
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def write(path, **content):
    Path(path).write_text(json.dumps({"context": context(), **content}, indent=1) + "\n")
