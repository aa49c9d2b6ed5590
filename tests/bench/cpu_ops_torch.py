# SPDX-License-Identifier: Apache-2.0
"""PyTorch on the layers of cpu_ops_bench.cc: the time to beat. usage: cpu_ops_torch.py [threads]

With one thread it prints processor time, which a busy machine disturbs least.
"""
import sys
import time

import torch
import torch.nn.functional as F

torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
torch.set_grad_enabled(False)
clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def best_ms(fn, seconds=0.5):
    """Least of many: other programs on the machine only ever add time."""
    fn(), fn()
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds or len(times) < 5:
        t = clock()
        fn()
        times.append(clock() - t)
    return 1e3 * min(times)


for layout in (torch.contiguous_format, torch.channels_last):
    for n, h, cin, cout, k in [(16, 32, 1, 64, 3), (16, 32, 64, 1, 3), (16, 32, 64, 64, 3),
                               (16, 32, 128, 64, 3), (16, 32, 128, 64, 1), (16, 16, 64, 128, 3),
                               (16, 16, 128, 128, 3), (16, 16, 256, 128, 3), (16, 8, 128, 128, 3),
                               (16, 8, 256, 128, 3), (1, 32, 64, 64, 3), (1, 8, 128, 128, 3)]:
        conv = torch.nn.Conv2d(cin, cout, k, padding=k // 2).to(memory_format=layout)
        x = torch.randn(n, cin, h, h).to(memory_format=layout)
        add, residual = torch.randn(n, cout, 1, 1), torch.randn(n, cout, h, h).to(memory_format=layout)
        print(f"conv+add+residual {layout} {n} {h} {cin} {cout} {k}: "
              f"{best_ms(lambda: conv(x) + add + residual):.3f} ms", flush=True)
    for n, h, c in [(16, 32, 64), (16, 32, 128), (16, 16, 128), (16, 8, 256), (1, 32, 64)]:
        norm, x = torch.nn.GroupNorm(32, c), torch.randn(n, c, h, h).to(memory_format=layout)
        print(f"norm+silu {layout} {n} {h} {c}: {best_ms(lambda: F.silu(norm(x))):.3f} ms", flush=True)
for n, t, c, heads in [(16, 256, 128, 1), (16, 256, 128, 16), (16, 64, 128, 1), (16, 64, 128, 2)]:
    q, k, v = (torch.randn(n, heads, t, c // heads) for _ in range(3))
    print(f"attention {n} {t} {c} {heads}: "
          f"{best_ms(lambda: F.scaled_dot_product_attention(q, k, v)):.3f} ms", flush=True)
for n, t, cin, cout in [(16, 256, 128, 384), (16, 64, 128, 384), (16, 64, 128, 128), (16, 1, 256, 2048),
                        (1, 1, 256, 2048)]:
    linear, x = torch.nn.Linear(cin, cout), torch.randn(n, t, cin)
    print(f"linear {n} {t} {cin} {cout}: {best_ms(lambda: linear(x)):.3f} ms", flush=True)
