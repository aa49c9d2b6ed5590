# SPDX-License-Identifier: Apache-2.0
"""Times the libraries that PyTorch brings on the ops of backend-throughput when measure.py says.

usage: peer_ops.py [--lock=FILE] [--search-seconds=12]

Requests, each with the name of an op as backend-throughput lists them:
  search NAME END  what can be done side by side with other processes: builds cuDNN's plans and
                 times them one at a time on the GPU (whoever holds --lock), compiles with
                 torch.compile. No plan is begun after END, seconds of the monotonic clock. Answers
                 "searched", whether it found what it can, and "not_tried", how many plans it left
  prepare NAME   captures every candidate, times each once and keeps the fastest. Alone on the GPU.
  measure NAME   the microseconds of the fastest
  ceilings       FLOP/s of a GEMM of 8192³ on normal data, bytes/s of a copy of 1 GiB
  variant NAME   one way to time cuDNN on [8, 256, 128, 128]; see variant()

All in bf16, channels last, in CUDA graphs, over activations that rotate through more memory than
the last cache holds. A candidate that refuses a shape is left out. Without nvidia-cudnn-frontend, or
without a search, a convolution's only peer is PyTorch: its choice of cuDNN's engines for a convolution
alone, eager for one with more around it.
"""
import argparse
import contextlib
import fcntl
import functools
import statistics
import time
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import peer

try:
    import cudnn
    import cudnn_plans
except ImportError:
    cudnn = None

PASS = "pass"
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
SURVEY_SAMPLES, SURVEY_WARM_UP_MS = 5, 30
LARGEST_DIFFERENCE = 0.03  # of results in bf16, of their norm
GROUPS = 32


def image(rows, channels, size):
    return torch.randn(rows, channels, size, size, **BF16).to(memory_format=torch.channels_last)


def kernel(out, channels, size):
    weight = torch.randn(out, channels, size, size, **BF16) / (size**2 * channels) ** 0.5
    return weight.to(memory_format=torch.channels_last)


def alike(copies, tensor):
    return [tensor] + [tensor.clone() for _ in range(copies - 1)]


class Library:
    """What the searches share: cuDNN's handle, limits, and the plans that were found."""

    def __init__(self, lock, search_seconds):
        self.lock, self.search_seconds = lock, search_seconds
        self.handle = cudnn.create_handle() if cudnn else None
        self.plans = {}
        self.end = float("inf")  # of searches, of time.monotonic()

    @contextlib.contextmanager
    def alone(self):
        """The GPU without the other processes that search. Not to be nested."""
        with open(self.lock, "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield
            torch.cuda.synchronize()

    def plan(self, kind, tensors, *rest, **graph):
        """cuDNN's fastest plan of a graph, one of the classes of cudnn_plans, and what the search says.
        Each graph is searched once; None without the frontend."""
        if not cudnn:
            return None, {}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        key = repr((kind, shapes, rest, graph))
        if key not in self.plans:
            plans = None
            try:
                plans = getattr(cudnn_plans, kind)(self.handle, tensors, *rest, **graph)
                found = plans.search(tensors, self.search_seconds, self.alone, self.end)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
            self.plans[key] = None if "error" in found else plans, found
        return self.plans[key]


class Candidates:
    """Of one op. search(): see above. candidates(): {label: function of a copy's index}, and how many
    copies there are. A function returns the result, or a tuple of them."""

    must_repeat = False  # whether a candidate whose next run has other bits is refused


def out_size_of(op, size):
    return {"conv_down": size // 2, "conv_up": size * 2}.get(op, size)


class Convolutions(Candidates):
    """conv, conv_bias_residual_silu, conv_down, conv_up and conv_shortcut."""

    def __init__(self, library, op, rows, size, shortcut=0, **channels):
        self.library, self.op = library, op
        self.rows, self.size, self.shortcut = rows, size, shortcut
        self.cin, self.cout = channels["in"], channels["out"]
        self.out_size = out_size_of(op, size)
        self.fused = op == "conv_bias_residual_silu"
        self.weight = kernel(self.cout, self.cin, 3)
        self.bias = torch.randn(self.cout, **BF16)
        self.bias4 = self.bias.view(1, -1, 1, 1)
        self.skip_weight = kernel(self.cout, shortcut, 1) if shortcut else None
        self.functions, self.details = {}, {}

    def out_shape(self):
        return (self.rows, self.cout, self.out_size, self.out_size)

    def activations(self):
        """One set of what a launch reads."""
        made = {"x": image(self.rows, self.cin, self.size)}
        if self.fused:
            made["residual"] = image(self.rows, self.cout, self.size)
        if self.shortcut:
            made["skip"] = image(self.rows, self.shortcut, self.size)
        return made

    def bytes(self):
        read = self.rows * self.size**2 * (self.cin + self.shortcut)
        written = self.rows * self.out_size**2 * self.cout
        return 2 * (read + written * (2 if self.fused else 1))

    def label_of_pytorch(self):
        """Only a convolution alone is one kernel of cuDNN; around the others PyTorch adds its own."""
        return "cuDNN, PyTorch's choice" if self.op == "conv" else "PyTorch, eager"

    def by_pytorch(self, x, residual=None, skip=None):
        if self.op == "conv_down":
            return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, stride=2)
        if self.op == "conv_up":
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        if self.fused:
            return F.silu(F.conv2d(x, self.weight, self.bias, padding=1) + residual)
        if self.shortcut:
            return (F.conv2d(x, self.weight, self.bias, padding=1) +
                    F.conv2d(skip, self.skip_weight))
        return F.conv2d(x, self.weight, padding=1)

    def search(self):
        plan, out = functools.partial(self.library.plan, "Convolution"), self.out_shape()
        with self.library.alone():
            tensors = self.activations()
            base = {"x": tensors["x"], "weight": self.weight}
            if self.op == "conv_up":
                base["x"] = F.interpolate(tensors["x"], scale_factor=2.0, mode="nearest")
            sum_of_shortcut = image(*out[:3]) if self.shortcut else None
        if self.op == "conv":
            self.functions[self.label_of_pytorch()] = self.by_pytorch
        else:
            self.functions["torch.compile"] = peer.compiled(self.by_pytorch, **tensors)
        down = {"before": (0, 0), "after": (1, 1), "stride": (2, 2)} if self.op == "conv_down" else {}
        bare, self.details["cuDNN"] = plan(base, out, **down)
        weight, bias4, skip_weight = self.weight, self.bias4, self.skip_weight
        if bare and self.op in ("conv", "conv_down"):
            self.functions["cuDNN"] = lambda x: bare(x=x, weight=weight)
        if bare and self.op == "conv_up":
            self.functions["cuDNN after PyTorch's interpolation"] = lambda x: bare(
                x=F.interpolate(x, scale_factor=2.0, mode="nearest"), weight=weight)
        if self.fused:
            whole, self.details["cuDNN, fused"] = plan(
                base | {"bias": bias4, "residual": tensors["residual"]}, out, silu=True)
            if whole:
                self.functions["cuDNN, fused"] = lambda x, residual: whole(
                    x=x, weight=weight, bias=bias4, residual=residual)
            if bare:
                rest = peer.compiled(lambda y, residual: F.silu(y + bias4 + residual),
                                     tensors["residual"], tensors["residual"])
                self.functions["cuDNN and one compiled pass"] = lambda x, residual: rest(
                    bare(x=x, weight=weight), residual)
        if self.shortcut:
            first, self.details["cuDNN, 1×1"] = plan(
                {"x": tensors["skip"], "weight": skip_weight}, out, before=(0, 0), after=(0, 0))
            second, self.details["cuDNN, fused"] = plan(
                base | {"bias": bias4, "residual": sum_of_shortcut}, out)
            if first and second:
                self.functions["cuDNN, fused with the sum"] = lambda x, skip: second(
                    x=x, weight=weight, bias=bias4, residual=first(x=skip, weight=skip_weight))

    def candidates(self):
        if not self.functions:  # there was no time to search
            self.functions[self.label_of_pytorch()] = self.by_pytorch
        copies = peer.copies_for(self.bytes())
        sets = {name: alike(copies, tensor) for name, tensor in self.activations().items()}

        def on_copies(function):
            return lambda i: function(**{name: tensors[i] for name, tensors in sets.items()})

        return {label: on_copies(each) for label, each in self.functions.items()}, copies


class Linears(Candidates):
    def __init__(self, _library, _op, rows, tokens, **features):
        self.rows, self.cin, self.cout = rows * tokens, features["in"], features["out"]
        self.details = {}

    def search(self):
        pass

    def candidates(self):
        copies = peer.copies_for(2 * self.rows * (self.cin + self.cout))
        xs = alike(copies, torch.randn(self.rows, self.cin, **BF16))
        weight = torch.randn(self.cout, self.cin, **BF16) / self.cin**0.5
        bias = torch.randn(self.cout, **BF16)

        def through(library):
            def run(i):
                torch.backends.cuda.preferred_blas_library(library)
                return F.linear(xs[i], weight, bias)

            return run

        return {"cuBLAS": through("cublas"),
                "cuBLASLt, PyTorch's choice": through("cublaslt")}, copies


class Attentions(Candidates):
    def __init__(self, _library, _op, rows, heads, tokens, dim):
        self.shape = (rows, tokens, 3, heads, dim)
        self.details = {}

    def search(self):
        pass

    def candidates(self):
        rows, tokens, _, heads, dim = self.shape
        copies = peer.copies_for(2 * 4 * rows * tokens * heads * dim)
        qkvs = alike(copies, torch.randn(self.shape, **BF16))

        def through(backend):
            def run(i):
                q, k, v = qkvs[i].permute(2, 0, 3, 1, 4)
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v)

            return run

        found = {"flash": through(SDPBackend.FLASH_ATTENTION),
                 "cuDNN": through(SDPBackend.CUDNN_ATTENTION),
                 "efficient": through(SDPBackend.EFFICIENT_ATTENTION)}
        if dim > 256:  # what flash refuses
            found["math"] = through(SDPBackend.MATH)
        return found, copies


class GroupNorms(Candidates):
    def __init__(self, library, _op, rows, size, channels):
        self.library, self.shape = library, (rows, channels, size)
        self.gamma, self.beta = torch.randn(channels, **BF16), torch.randn(channels, **BF16)
        self.details, self.compiled = {}, None

    def eager(self, x):
        return F.silu(F.group_norm(x, GROUPS, self.gamma, self.beta))

    def search(self):
        with self.library.alone():
            x = image(*self.shape)
        self.compiled = peer.compiled(self.eager, x)

    def candidates(self):
        rows, channels, size = self.shape
        copies = peer.copies_for(2 * 2 * rows * size**2 * channels)
        xs = alike(copies, image(*self.shape))
        # No copy, which in a graph is a node of its own kind, and slower.
        found = {PASS: lambda i: -xs[i], "PyTorch eager": lambda i: self.eager(xs[i])}
        if self.compiled:
            found["torch.compile"] = lambda i: self.compiled(xs[i])
        return found, copies


OPS = {"conv": Convolutions, "conv_bias_residual_silu": Convolutions,
       "conv_shortcut": Convolutions, "conv_down": Convolutions, "conv_up": Convolutions,
       "linear": Linears, "attention": Attentions, "group_norm_silu": GroupNorms}


def result_of_search(details):
    """`details`: of the searches for cuDNN's plans of one op. That of the convolution alone,
    "cuDNN", must have found one; cuDNN may lack a fused graph, which then has an "error"."""
    alone = details.get("cuDNN")
    return {"searched": alone is None or alone.get("worked", 0) > 0,
            "not_tried": sum(each.get("not_tried", 0) for each in details.values()),
            "details": details}


def shape_of(name):
    """"conv/rows:64/size:32/…" → "conv", {"rows": 64, "size": 32, …}."""
    op, *arguments = name.split("/")
    return op, {key: int(value) for key, value in (a.split(":") for a in arguments)}


def ceilings():
    n = 8192
    a, b = torch.randn(n, n, **BF16), torch.randn(n, n, **BF16)
    gemm_us = peer.Op(lambda i: a @ b, 1).us()
    source = torch.randn(1 << 29, **BF16)
    target = torch.empty_like(source)
    copy_us = 1e3 * peer.median_ms(lambda: target.copy_(source))  # a graph's copy node is slower
    return {"flop_per_s": 2 * n**3 / gemm_us * 1e6,
            "bytes_per_s": 4 * source.numel() / copy_us * 1e6}


def variant(library, name):
    """cuDNN on one shape, timed in one of the ways that could explain a difference.

    `name`: key:value pairs after the op's. data: normal, zeros, or unscaled weights; layout: nhwc or
    nchw; limit: how many engines PyTorch's autotuner times, 0 for all, or plan: cuDNN's fastest by
    its graph API; copies: buffers to rotate through; graph: 1 in CUDA graphs of eight launches, 0
    launched one by one; idle, warm: seconds of rest and of work before; runs: launches timed.
    PyTorch keeps what its autotuner chose, so limits are compared in processes of their own.
    """
    op, *pairs = name.split("/")
    given = dict(pair.split(":") for pair in pairs)
    rows, size, cin, cout = (int(given[key]) for key in ("rows", "size", "in", "out"))
    copies, runs = int(given.get("copies", 1)), int(given.get("runs", 72))
    make = torch.zeros if given.get("data") == "zeros" else torch.randn
    layout = torch.contiguous_format if given.get("layout") == "nchw" else torch.channels_last
    xs = alike(copies, make(rows, cin, size, size, **BF16).to(memory_format=layout))
    scale = 1 if given.get("data") == "unscaled" else (9 * cin) ** -0.5
    weight = (make(cout, cin, 3, 3, **BF16) * scale).to(memory_format=layout)
    outputs = [None] * copies
    if given.get("limit") == "plan":
        plan, found = library.plan("Convolution", {"x": xs[0], "weight": weight},
                                   (rows, cout, size, size))
        if not plan:
            raise RuntimeError(f"no plan: {found}")
        function = lambda x: plan(x=x, weight=weight)  # noqa: E731
    else:
        found = {}
        torch.backends.cudnn.benchmark_limit = int(given.get("limit", 0))
        function = lambda x: F.conv2d(x, weight, padding=1)  # noqa: E731

    def enqueue(i):
        outputs[i % copies] = function(xs[i % copies])

    if given.get("graph", "1") == "1":
        launches = peer.LEAST_LAUNCHES
        run = peer.captured(enqueue, launches).replay
    else:
        launches = 1
        enqueue(0)
        run = lambda: enqueue(0)  # noqa: E731
    run()
    torch.cuda.synchronize()
    time.sleep(float(given.get("idle", 0)))
    count = max(3, runs // launches)
    warm_ms = 1e3 * float(given.get("warm", 0.1))
    warm = 0
    if warm_ms > 0:
        warm = int(warm_ms / max(peer.times_ms(run, 2)[1], 1e-3)) + 1
    times = peer.times_ms(run, warm + count)[warm:]
    end = time.monotonic()
    us = [1e3 * ms / launches for ms in times]
    return {"us": statistics.median(us), "first_us": us[0], "last_us": us[-1], "found": found,
            "timed": [end - 1e-3 * sum(times), end]}


def difference_of(results, reference):
    """The largest of the results' distances, each of its reference's norm. NaN stays."""
    return torch.stack([(one.float() - other).norm() / other.norm()
                        for one, other in zip(results, reference, strict=True)]).max().item()


def results_of(op):
    """Of copy 0, a tuple also where there is only one."""
    results = op.outputs[0]
    return results if isinstance(results, tuple) else (results,)


def repeats(op):
    """Whether another run has the same bits."""
    before = [result.clone() for result in results_of(op)]
    op.graph.replay()
    return all(map(torch.equal, before, results_of(op)))


class Worker:
    """`kinds`: the class of each op by its name, as OPS has them."""

    def __init__(self, library, kinds):
        self.library, self.kinds = library, kinds
        self.ops = {}
        self.prepared = None

    def op(self, name):
        if name not in self.ops:
            op, shape = shape_of(name)
            self.ops[name] = self.kinds[op](self.library, op, **shape)
        return self.ops[name]

    def search(self, asked):
        name, end = asked.split()
        self.library.end = float(end)
        self.op(name).search()
        torch.cuda.empty_cache()
        return result_of_search(self.op(name).details)

    def prepare(self, name):
        self.prepared = None
        torch.cuda.empty_cache()
        candidates, copies = self.op(name).candidates()
        us, refused, fastest, reference = {}, {}, None, None
        for label, run in candidates.items():
            try:
                op = peer.Op(run, copies)
                took = op.us(samples=SURVEY_SAMPLES, warm_up_ms=SURVEY_WARM_UP_MS)
                if label != PASS:
                    if reference is None:
                        reference = [result.float() for result in results_of(op)]
                    difference = difference_of(results_of(op), reference)
                    if not difference <= LARGEST_DIFFERENCE:
                        raise RuntimeError(f"another result, by {difference:.3g} of its norm")
                    if self.op(name).must_repeat and not repeats(op):
                        raise RuntimeError("other bits in the next run")
                us[label] = took
            except Exception as error:
                refused[label] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                continue
            if label != PASS and (fastest is None or us[label] < us[fastest]):
                fastest, self.prepared = label, (name, op)
            del op
        if fastest is None:
            raise RuntimeError(f"every candidate refused: {refused}")
        return {"fastest": fastest, "candidates_us": us, "refused": refused,
                "details": self.op(name).details}

    def measure(self, name):
        if not self.prepared or self.prepared[0] != name:
            raise RuntimeError(f"{name} is not prepared")
        return {"us": self.prepared[1].us()}

    def answer(self, verb, name):
        if verb == "ceilings":
            return ceilings()
        if verb == "variant":
            return variant(self.library, name)
        if verb == "release":
            self.prepared = None
            self.ops.pop(name, None)
            torch.cuda.empty_cache()
            return {}
        return {"search": self.search, "prepare": self.prepare, "measure": self.measure}[verb](name)


def main(kinds):
    parser = argparse.ArgumentParser(description="Times PyTorch's libraries on single ops.")
    parser.add_argument("--lock", default="/tmp/denoised-bench.lock")
    parser.add_argument("--search-seconds", type=float, default=12)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # a backend says by warnings why it refuses
    peer.prepare()
    if not cudnn:
        torch.backends.cudnn.benchmark_limit = 0  # no limit
    worker = Worker(Library(args.lock, args.search_seconds), kinds)
    versions = {"cudnn_frontend": cudnn.__version__} if cudnn else {}
    peer.serve(lambda: peer.context() | versions, worker.answer)


if __name__ == "__main__":
    main(OPS)
