"""Times PyTorch's libraries on the shapes of backend-throughput, and the ceilings of the GPU.

usage: backend-throughput --benchmark_list_tests | peer_kernels.py --out=peer_kernels.json [--seconds=150]

Writes microseconds for each peer of each shape: cuDNN bare and followed by its separate passes,
cuBLAS and cuBLASLt, every backend of scaled_dot_product_attention, GroupNorm and SiLU eager and
compiled, and what a pass takes that only reads and writes as much as these. All in bf16, channels
last, in CUDA graphs, over activations that rotate through more memory than the last cache holds. A
peer that refuses a shape is left out; the "math" of attention is asked only where flash refuses.
Once the seconds are spent the remaining shapes are left out too, and named.
"""
import argparse
import re
import sys
import time
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import peer

PASS = "pass"
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def image(rows, size, channels):
    return torch.randn(rows, channels, size, size, **BF16).to(memory_format=torch.channels_last)


def alike(copies, tensor):
    return [tensor] + [tensor.clone() for _ in range(copies - 1)]


def convolutions(name, rows, size, **channels):
    cin, cout = channels["in"], channels["out"]
    out_size = {"conv_down": size // 2, "conv_up": size * 2}.get(name, size)
    fused = name == "conv_bias_residual_silu"
    shortcut = channels.get("shortcut", 0)
    elements = rows * (size**2 * (cin + shortcut) + out_size**2 * cout * (2 if fused else 1))
    copies = peer.copies_for(2 * elements)
    xs = alike(copies, image(rows, size, cin))
    weight = torch.randn(cout, cin, 3, 3, **BF16) / (9 * cin) ** 0.5
    weight = weight.to(memory_format=torch.channels_last)
    if name == "conv":
        return {"cuDNN": lambda i: F.conv2d(xs[i], weight, padding=1)}, copies
    if name == "conv_down":
        pad = lambda x: F.pad(x, (0, 1, 0, 1))
        return {"cuDNN + pad": lambda i: F.conv2d(pad(xs[i]), weight, stride=2)}, copies
    if name == "conv_up":
        up = lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest")
        return {"cuDNN + interpolate": lambda i: F.conv2d(up(xs[i]), weight, padding=1)}, copies
    bias = torch.randn(cout, **BF16)
    if name == "conv_shortcut":
        skips = alike(copies, image(rows, size, shortcut))
        skip_weight = torch.randn(cout, shortcut, 1, 1, **BF16) / shortcut**0.5
        skip_weight = skip_weight.to(memory_format=torch.channels_last)

        def with_shortcut(i):
            return F.conv2d(xs[i], weight, bias, padding=1) + F.conv2d(skips[i], skip_weight, bias)

        return {"cuDNN + passes": with_shortcut}, copies
    residuals = alike(copies, image(rows, size, cout))

    def passes(i):
        return F.silu(F.conv2d(xs[i], weight, bias, padding=1) + residuals[i])

    return {"cuDNN + passes": passes}, copies


def linears(name, rows, tokens, **features):
    cin, cout = features["in"], features["out"]
    copies = peer.copies_for(2 * rows * tokens * (cin + cout))
    xs = alike(copies, torch.randn(rows * tokens, cin, **BF16))
    weight = torch.randn(cout, cin, **BF16) / cin**0.5

    def through(library):
        def run(i):
            torch.backends.cuda.preferred_blas_library(library)
            return F.linear(xs[i], weight)

        return run

    return {"cuBLAS": through("cublas"), "cuBLASLt": through("cublaslt")}, copies


def attentions(name, rows, heads, tokens, dim):
    copies = peer.copies_for(2 * 4 * rows * tokens * heads * dim)
    qkvs = alike(copies, torch.randn(rows, tokens, 3, heads, dim, **BF16))

    def through(backend):
        def run(i):
            q, k, v = qkvs[i].permute(2, 0, 3, 1, 4)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v)

        return run

    return {
        "flash": through(SDPBackend.FLASH_ATTENTION),
        "cuDNN": through(SDPBackend.CUDNN_ATTENTION),
        "efficient": through(SDPBackend.EFFICIENT_ATTENTION),
        "math": through(SDPBackend.MATH),
    }, copies


def group_norms(name, rows, size, channels):
    copies = peer.copies_for(2 * 2 * rows * size**2 * channels)
    xs = alike(copies, image(rows, size, channels))
    gamma, beta = torch.randn(channels, **BF16), torch.randn(channels, **BF16)

    def eager(x):
        return F.silu(F.group_norm(x, 32, gamma, beta))

    torch._dynamo.reset()  # it gives up on a function after eight shapes
    compiled = torch.compile(eager, dynamic=False)
    # No copy, which in a graph is a node of its own kind, and slower.
    return {
        "eager": lambda i: eager(xs[i]),
        "compiled": lambda i: compiled(xs[i]),
        PASS: lambda i: -xs[i],
    }, copies


OPS = {"conv": convolutions, "conv_bias_residual_silu": convolutions, "conv_shortcut": convolutions,
       "conv_down": convolutions, "conv_up": convolutions, "linear": linears, "attention": attentions,
       "group_norm_silu": group_norms}


def shape_of(name):
    """"conv/rows:64/size:32/…" → "conv", {"rows": 64, "size": 32, …}."""
    op, *arguments = name.split("/")
    return op, {key: int(value) for key, value in (a.split(":") for a in arguments)}


def ceilings():
    n = 8192
    a, b = torch.randn(n, n, **BF16), torch.randn(n, n, **BF16)
    gemm_us = peer.op_us(lambda i: a @ b, 1)
    source = torch.randn(1 << 29, **BF16)
    target = torch.empty_like(source)
    copy_us = 1e3 * peer.median_ms(lambda: target.copy_(source))  # a graph's copy node is slower
    return {"flop_per_s": 2 * n**3 / gemm_us * 1e6, "bytes_per_s": 4 * source.numel() / copy_us * 1e6}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=150)
    args = parser.parse_args()
    # What Google Benchmark appends to a name tells how it ran, not what.
    names = [re.sub(r"/(iterations:\d+|manual_time)", "", line.strip()) for line in sys.stdin]
    warnings.simplefilter("ignore")  # a backend says by warnings why it refuses
    peer.prepare()
    start = time.monotonic()
    measured_ceilings = ceilings()
    benchmarks, left_out, seconds = [], [], {}
    for name in names:
        begin = time.monotonic()
        if begin - start > args.seconds:
            left_out.append(name)
            continue
        op, shape = shape_of(name)
        peers, copies = OPS[op](op, **shape)
        us, refused = {}, {}
        for label, run in peers.items():
            if label == "math" and "flash" in us:
                continue
            try:
                us[label] = peer.op_us(run, copies)
            except RuntimeError as error:
                refused[label] = str(error).splitlines()[0]
        benchmark = {"name": name, "unit": "us", "peers": us, "refused": refused}
        if PASS in us:
            benchmark[PASS] = us.pop(PASS)
        benchmarks.append(benchmark)
        seconds[op] = seconds.get(op, 0) + time.monotonic() - begin
        del peers
        torch.cuda.empty_cache()
    peer.write(args.out, ceilings=measured_ceilings, benchmarks=benchmarks)
    print("Seconds:", ", ".join(f"{op} {s:.0f}" for op, s in seconds.items()), file=sys.stderr)
    if left_out:
        print(f"No time left for {', '.join(left_out)}: raise --seconds.", file=sys.stderr)


if __name__ == "__main__":
    main()
