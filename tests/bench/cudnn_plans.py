# SPDX-License-Identifier: Apache-2.0
"""Convolutions, their gradients and that of attention by cuDNN's graph API: every engine that its
heuristics name, built and timed.

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
# A plan that takes so many times as long as the fastest before it, launched alone, is not timed in a
# graph. The microseconds are what the host may take of that.
HOPELESS, HOST_US = 3, 200


def channels_last_strides(shape):
    _, c, h, w = shape
    return [c * h * w, 1, w * c, c]


class Plans:
    """An operation graph, which a subclass describes, and the plans that cuDNN has for it."""

    modes = [cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK]

    def __init__(self, handle):
        self.graph = cudnn.pygraph(io_data_type=BF16, intermediate_data_type=FP32,
                                   compute_data_type=FP32, handle=handle)
        self.handle = handle
        self.tensors, self.outputs = {}, []  # by name; outputs: (name, shape, strides)
        self.index = self.workspace = None
        self.found = {}  # microseconds by the name of a plan, None where it failed

    def input(self, name, shape, strides, data_type=BF16):
        self.tensors[name] = self.graph.tensor(dim=list(shape), stride=list(strides),
                                               data_type=data_type, name=name)

    def images(self, tensors):
        """Inputs and weights of a convolution, channels last."""
        for name, tensor in tensors.items():
            self.input(name, tensor.shape, channels_last_strides(tensor.shape))

    def output(self, name, tensor, shape, strides):
        tensor.set_output(True).set_data_type(BF16)
        tensor.set_dim(list(shape)).set_stride(list(strides))
        self.tensors[name] = tensor
        self.outputs.append((name, list(shape), list(strides)))

    def new_outputs(self):
        return {name: torch.empty_strided(shape, strides, device="cuda", dtype=torch.bfloat16)
                for name, shape, strides in self.outputs}

    def describe(self):
        """What needs no GPU: checks the graph."""
        self.graph.validate()
        self.graph.build_operation_graph()

    def run(self, index, tensors, outputs=None):
        """Enqueues plan `index` on PyTorch's current stream. `tensors`: by the names above. Returns
        the output, or a tuple of several."""
        outputs = outputs or self.new_outputs()
        pack = {self.tensors[name]: value for name, value in (tensors | outputs).items()}
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.graph.execute_plan_at_index(pack, self.workspace, index, handle=self.handle)
        made = tuple(outputs.values())
        return made if len(made) > 1 else made[0]

    def search(self, tensors, seconds, alone, end):
        """Builds and times plans for so many seconds and keeps the fastest; `tensors` as in run(),
        `alone()` a context in which the process has the GPU for itself. What the process waits for
        the GPU does not count, but none is begun after `end` of time.monotonic()."""
        spent = Stopwatch()
        self.describe()
        self.graph.create_execution_plans(self.modes)
        fastest, left, last = None, 0, ""
        outputs = self.new_outputs()

        def enqueue(_=0):
            self.run(index, tensors, outputs)

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
                    us = 1e3 * peer.times_ms(enqueue, 2)[1]  # the first loads the kernel
                    if fastest is None or us < HOPELESS * fastest + HOST_US:
                        graph = peer.captured(enqueue, peer.LEAST_LAUNCHES)
                        ms = peer.median_ms(graph.replay, SEARCH_SAMPLES, SEARCH_WARM_UP_MS)
                        us = 1e3 * ms / peer.LEAST_LAUNCHES
                    torch.cuda.synchronize()
            except Exception as error:  # a plan that cannot be built or refuses
                last = f"{type(error).__name__}: {error}"[:200]
                continue
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


class Convolution(Plans):
    """conv [+ bias] [+ residual] [→ SiLU] of x and weight; shapes are [n, c, h, w]."""

    def __init__(self, handle, tensors, out, before=(1, 1), after=(1, 1), stride=(1, 1), silu=False):
        super().__init__(handle)
        self.images(tensors)
        y = self.graph.conv_fprop(image=self.tensors["x"], weight=self.tensors["weight"],
                                  pre_padding=list(before), post_padding=list(after),
                                  stride=list(stride), dilation=[1, 1])
        if "bias" in tensors:  # [1, c, 1, 1]
            y = self.graph.bias(input=y, bias=self.tensors["bias"])
        if "residual" in tensors:
            y = self.graph.add(a=y, b=self.tensors["residual"])
        if silu:
            y = self.graph.swish(input=y)
        self.output("out", y, out, channels_last_strides(out))


class ConvolutionGradient(Plans):
    """dx of dout and weight, or dweight of dout and x."""

    def __init__(self, handle, tensors, out, padding, stride):
        super().__init__(handle)
        self.images(tensors)
        geometry = {"pre_padding": [padding] * 2, "post_padding": [padding] * 2,
                    "stride": [stride] * 2, "dilation": [1, 1]}
        if "weight" in tensors:
            gradient = self.graph.conv_dgrad(loss=self.tensors["dout"],
                                             filter=self.tensors["weight"], **geometry)
        else:
            gradient = self.graph.conv_wgrad(image=self.tensors["x"], loss=self.tensors["dout"],
                                             **geometry)
        self.output("out", gradient, out, channels_last_strides(out))


class AttentionGradient(Plans):
    """(dq, dk, dv) of softmax(q kᵀ · scale) v, by cuDNN's deterministic algorithm. q, k, v, o and
    dout are [rows, heads, tokens, dim] of any strides, stats is fp32 [rows, heads, tokens, 1]."""

    modes = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]

    def __init__(self, handle, tensors, scale):
        super().__init__(handle)
        for name, tensor in tensors.items():
            self.input(name, tensor.shape, tensor.stride(), FP32 if name == "stats" else BF16)
        known = self.tensors
        gradients = self.graph.sdpa_backward(
            q=known["q"], k=known["k"], v=known["v"], o=known["o"], dO=known["dout"],
            stats=known["stats"], attn_scale=scale, use_deterministic_algorithm=True)
        rows, heads, tokens, dim = tensors["q"].shape
        for name, gradient in zip(("dq", "dk", "dv"), gradients):
            self.output(name, gradient, tensors["q"].shape,
                        [tokens * heads * dim, dim, heads * dim, 1])
