"""One forward of diffusers' UNet2DModel on the GPU, timed: a process of peer_models.py."""
import gc
import json
import os
import time
from pathlib import Path

import torch
from diffusers import UNet2DModel

import peer

CONFIGS = Path(__file__).parents[1] / "models" / "configs"
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def inputs_for(unet, rows):
    config = unet.config
    x = torch.randn(rows, config.in_channels, config.sample_size, config.sample_size, **BF16)
    inputs = {"sample": x.to(memory_format=torch.channels_last),
              "timestep": torch.randint(0, 1000, (rows,), device="cuda")}
    if config.num_class_embeds:
        inputs["class_labels"] = torch.randint(0, config.num_class_embeds, (rows,), device="cuda")
    return inputs


class Turn:
    """The process's turn with the GPU, which its parent gives it once."""

    def __init__(self, parent):
        self.parent = parent
        self.seconds_waited = None

    def wait(self):
        if self.seconds_waited is None:
            begin = time.monotonic()
            self.parent.send("ready")
            self.parent.recv()
            self.seconds_waited = time.monotonic() - begin


def eager(unet, inputs, turn):
    turn.wait()
    return peer.captured(lambda _: unet(**inputs), 1).replay


def compiled(unet, inputs, turn, mode):
    """torch.compile(mode=mode), with a wait between the compiler and the first run."""
    # Inductor's processes compile with PyTorch's ptxas if there is one, Inductor itself with Triton's
    # (torch/_inductor/runtime/compile_tasks.py). Triton's cache tells them apart, so that all that
    # max-autotune compares would be compiled again, one after the other.
    ptxas = Path(torch.__file__).parent / "bin" / "ptxas"
    if ptxas.exists():
        os.environ.setdefault("TRITON_PTXAS_PATH", str(ptxas))

    def backend(graph, example_inputs):
        forward = torch._inductor.compile(graph, example_inputs,
                                          options=torch._inductor.list_mode_options(mode))
        turn.wait()
        return forward

    forward = torch.compile(unet, backend=backend, fullgraph=True, dynamic=False)
    for _ in range(3):  # the second call records its CUDA graph
        forward(**inputs)
    return lambda: forward(**inputs)


def measure(model, rows, way, parent):
    """Sends milliseconds of a forward to the parent, and what it took to get there."""
    peer.prepare()
    unet = UNet2DModel.from_config(json.loads((CONFIGS / model / "config.json").read_text()))
    unet = unet.to(**BF16).to(memory_format=torch.channels_last).eval()
    inputs = inputs_for(unet, rows)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    turn = Turn(parent)
    start = time.monotonic()
    run = eager(unet, inputs, turn) if way == "eager" else compiled(unet, inputs, turn, way)
    run()
    torch.cuda.synchronize()
    first = time.monotonic() - start - turn.seconds_waited
    ms = peer.median_ms(run, samples=50)
    parent.send({"ms": ms, "seconds_to_first": round(first, 1),
                 "MiB_allocated": torch.cuda.max_memory_allocated() >> 20,
                 "MiB_reserved": torch.cuda.max_memory_reserved() >> 20,
                 "context": peer.context()})
