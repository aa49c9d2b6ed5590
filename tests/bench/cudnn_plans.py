# SPDX-License-Identifier: Apache-2.0
"""cuDNN's convolutions by its graph API: every engine that its heuristics name, built and timed.

Needs nvidia-cudnn-frontend, whose functions this wraps. PyTorch asks cuDNN for a convolution alone;
here bias, residual and SiLU can be in cuDNN's own kernel.
"""
import time

import cudnn
import torch

import peer
from stopwatch import Stopwatch

BF16, FP32 = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
SEARCH_SAMPLES, SEARCH_WARM_UP_MS = 5, 5
MOST_WORKSPACE = 1 << 30


def channels_last_strides(shape):
    _, c, h, w = shape
    return [c * h * w, 1, w * c, c]


class Convolution:
    """The operation graph of conv [+ bias [+ residual]] [→ SiLU]; shapes are [n, c, h, w]."""

    def __init__(self, handle, x, weight, out, before=(1, 1), after=(1, 1), stride=(1, 1),
                 bias=False, residual=False, silu=False):
        graph = cudnn.pygraph(io_data_type=BF16, intermediate_data_type=FP32,
                              compute_data_type=FP32, handle=handle)

        def tensor(shape, name):
            return graph.tensor(dim=list(shape), stride=channels_last_strides(shape),
                                data_type=BF16, name=name)

        self.tensors = {"x": tensor(x, "x"), "weight": tensor(weight, "weight")}
        y = graph.conv_fprop(image=self.tensors["x"], weight=self.tensors["weight"],
                             pre_padding=list(before), post_padding=list(after),
                             stride=list(stride), dilation=[1, 1])
        if bias:
            self.tensors["bias"] = tensor([1, out[1], 1, 1], "bias")
            y = graph.bias(input=y, bias=self.tensors["bias"])
        if residual:
            self.tensors["residual"] = tensor(out, "residual")
            y = graph.add(a=y, b=self.tensors["residual"])
        if silu:
            y = graph.swish(input=y)
        y.set_output(True).set_data_type(BF16)
        y.set_dim(list(out)).set_stride(channels_last_strides(out))
        self.tensors["out"] = y
        self.graph, self.handle, self.out_shape = graph, handle, list(out)
        self.index = self.workspace = None
        self.found = {}  # microseconds by the name of a plan, None where it failed

    def describe(self):
        """What needs no GPU: checks the graph."""
        self.graph.validate()
        self.graph.build_operation_graph()

    def run(self, index, tensors, out=None):
        """Enqueues plan `index` on PyTorch's current stream. `tensors`: by the names above."""
        if out is None:
            out = torch.empty(self.out_shape, device="cuda", dtype=torch.bfloat16,
                              memory_format=torch.channels_last)
        pack = {self.tensors[name]: value for name, value in (tensors | {"out": out}).items()}
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.graph.execute_plan_at_index(pack, self.workspace, index, handle=self.handle)
        return out

    def search(self, tensors, seconds, alone, end):
        """Builds and times plans for so many seconds and keeps the fastest; `tensors` as in run(),
        `alone()` a context in which the process has the GPU for itself. What the process waits for
        the GPU does not count, but none is begun after `end` of time.monotonic()."""
        spent = Stopwatch()
        self.describe()
        self.graph.create_execution_plans(
            [cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK])
        fastest, left, last = None, 0, ""
        out = torch.empty(self.out_shape, device="cuda", dtype=torch.bfloat16,
                          memory_format=torch.channels_last)
        for index in range(self.graph.get_execution_plan_count()):
            try:
                name = self.graph.get_plan_name_at_index(index)
            except Exception:
                name = f"plan {index}"
            if name in self.found:  # of another mode
                continue
            if spent.seconds() > seconds or time.monotonic() > end:
                left += 1
                continue
            self.found[name] = None
            try:
                self.graph.build_plan_at_index(index)
                needed = max(1, self.graph.get_workspace_size_plan_at_index(index))
                if needed > MOST_WORKSPACE:
                    raise RuntimeError(f"{needed} bytes of workspace")
                if self.workspace is None or self.workspace.numel() < needed:
                    self.workspace = torch.empty(needed, device="cuda", dtype=torch.uint8)
                with spent.but_not_before(alone()):
                    graph = peer.captured(lambda _: self.run(index, tensors, out),
                                          peer.LEAST_LAUNCHES)
                    ms = peer.median_ms(graph.replay, SEARCH_SAMPLES, SEARCH_WARM_UP_MS)
                    torch.cuda.synchronize()
            except Exception as error:  # a plan that cannot be built or refuses
                last = f"{type(error).__name__}: {error}"[:200]
                continue
            us = 1e3 * ms / peer.LEAST_LAUNCHES
            self.found[name] = us
            if fastest is None or us < fastest:
                fastest, self.index = us, index
        worked = [(us, name) for name, us in self.found.items() if us is not None]
        result = {"plans": len(self.found), "worked": len(worked), "not_tried": left,
                  "seconds": round(spent.seconds(), 1)}
        if worked:
            return result | {"fastest": min(worked)[1]}
        return result | {"error": f"no plan worked: {last or 'none was tried'}"}

    def __call__(self, **tensors):
        return self.run(self.index, tensors)
