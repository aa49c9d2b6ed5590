# SPDX-License-Identifier: Apache-2.0
"""Draws images from a UNet2DModel with one of diffusers' own schedulers."""

import numpy as np
import torch


@torch.no_grad()
def draw(unet, scheduler, noise, labels, steps, guidance_scale=1.0, null_class=None,
         scheduler_device=None):
    """Returns the images [n, c, h, w], of the dtype of `noise`, not clipped.

    `noise` is of unit variance; the scheduler scales it to its largest sigma. `labels` is int64
    [n], or None for a model without classes. A guidance scale of at most 1 evaluates the UNet once
    per step, above it twice (labels and `null_class`), combined as F = F_u + g (F_c - F_u).
    The loop is that of diffusers' pipelines. With a scheduler on the CPU nothing waits for a GPU, so
    that the whole can be captured in a CUDA graph; `unet` then gets its timesteps on the CPU.
    """
    scheduler.set_timesteps(steps, device=scheduler_device or noise.device)
    x = noise * scheduler.init_noise_sigma
    guided = guidance_scale > 1
    if guided:
        labels = torch.cat([labels, torch.full_like(labels, null_class)])
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, t)
        if guided:
            scaled = torch.cat([scaled, scaled])
        timesteps = t.to(scaled.dtype).expand(len(scaled))
        output = unet(scaled, timesteps, class_labels=labels, return_dict=False)[0].to(x.dtype)
        if guided:
            conditional, unconditional = output.chunk(2)
            output = unconditional + guidance_scale * (conditional - unconditional)
        x = scheduler.step(output, t, x, return_dict=False)[0]
    return x


def philox_normal(seed, draw, count):
    """`count` standard normals of engine/core/philox.h."""
    mask = np.uint64(0xFFFFFFFF)
    block = np.arange((count + 3) // 4, dtype=np.uint64)
    c = [block & mask, block >> np.uint64(32), np.full_like(block, draw), np.zeros_like(block)]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]), p1 & mask,
             (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]), p0 & mask]  # fmt: skip
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    u, angle = ([(word >> np.uint64(8)).astype(float) for word in words] for words in (c[::2], c[1::2]))
    pairs = []
    for first, second in zip(u, angle):
        radius = np.sqrt(-2 * np.log((first + 1) / 2**24))
        pairs += [radius * np.cos(second / 2**24 * 2 * np.pi),
                  radius * np.sin(second / 2**24 * 2 * np.pi)]  # fmt: skip
    return np.stack(pairs, axis=1).reshape(-1)[:count]
