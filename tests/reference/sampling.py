# SPDX-License-Identifier: Apache-2.0
"""Draws images from a UNet2DModel with one of diffusers' own schedulers."""

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
