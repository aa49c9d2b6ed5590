# SPDX-License-Identifier: Apache-2.0
"""A training step of a UNet2DModel of diffusers as PyTorch runs it fastest, timed when measure.py
says.

usage: peer_train.py --config=DIR/config.json --batch=128 [--device=cuda]
       peer_train.py --config=DIR/config.json --batch=64 --device=cpu [--eager] [--layout=nchw]

The work of a step of denoise-train: EDM's loss on noise that is drawn anew, forward and backward,
clipping of the gradient's norm, fused AdamW, one average of the weights. torch.compile of the
network, channels last. On a GPU under autocast in bf16, and the whole step captured in one CUDA
graph, which is replayed back to back; on a CPU in float32. Requests: "compile" (with cuDNN's own
choice of kernels), "prepare" (cuDNN measures its kernels; the graph) and "measure". Needs diffusers.
"""
import argparse
import json
import time
from pathlib import Path

import torch
from diffusers import UNet2DModel
from diffusers import __version__ as diffusers_version

import peer

SIGMA_DATA = 0.5


class Step:
    def __init__(self, args):
        peer.prepare()
        torch.set_grad_enabled(True)
        torch.manual_seed(0)
        self.device, self.on_gpu = args.device, args.device == "cuda"
        if self.on_gpu:
            torch.set_float32_matmul_precision("high")
        layout = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}[args.layout]
        config = json.loads(Path(args.config).read_text())
        with torch.device(self.device):
            network = UNet2DModel.from_config(config)
        self.network = network.to(memory_format=layout).train()
        self.weights = list(network.parameters())
        self.averages = [weight.detach().clone() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-4, fused=True,
                                           capturable=self.on_gpu)
        edge = network.config.sample_size
        self.pictures = torch.randn(args.batch, network.config.in_channels, edge, edge,
                                    device=self.device).to(memory_format=layout)
        self.kwargs = {"return_dict": False}
        classes = network.config.num_class_embeds
        if classes:
            self.kwargs["class_labels"] = torch.randint(0, classes, (args.batch,),
                                                        device=self.device)
        peer.use_one_ptxas()
        self.forward = network if args.eager else torch.compile(
            network, fullgraph=True, dynamic=False, mode=args.mode)
        self.replay, self.seconds = self.step, {}
        if self.on_gpu:
            self.stream = torch.cuda.Stream()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        y = self.pictures
        sigma = (torch.randn(len(y), 1, 1, 1, device=self.device) * 1.2 - 1.2).exp()
        variance = sigma**2 + SIGMA_DATA**2
        noisy = y + sigma * torch.randn_like(y)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.on_gpu):
            output = self.forward(noisy / variance.sqrt(), (sigma.log() / 4).flatten(),
                                  **self.kwargs)[0]
        target = (y - SIGMA_DATA**2 / variance * noisy) * variance.sqrt() / (sigma * SIGMA_DATA)
        (output.float() - target).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.weights, 1e-3)

    def steps(self, count):
        """On the stream of the capture, as autograd wants it."""
        with torch.cuda.stream(self.stream):
            for _ in range(count):
                self.step()
        torch.cuda.synchronize()

    def compile(self):
        if not self.on_gpu:
            return self.step()
        torch.backends.cudnn.benchmark = False
        self.steps(1)

    def prepare(self):
        if not self.on_gpu:
            return self.step()
        torch.backends.cudnn.benchmark = True
        self.steps(3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.step()
        self.replay = graph.replay
        self.replay()
        torch.cuda.synchronize()

    def answer(self, verb, _name):
        begin = time.monotonic()
        if verb == "measure":
            return {"ms": peer.model_ms(self.replay)}
        {"compile": self.compile, "prepare": self.prepare}[verb]()
        self.seconds[verb] = round(time.monotonic() - begin, 1)
        memory = {"MiB_allocated": torch.cuda.max_memory_allocated() >> 20,
                  "MiB_reserved": torch.cuda.max_memory_reserved() >> 20,
                  "MiB_reserved_at_last": torch.cuda.memory_reserved() >> 20} if self.on_gpu else {}
        return {"seconds": dict(self.seconds), "first_step_seconds": sum(self.seconds.values()),
                **memory}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--eager", action="store_true", help="without torch.compile; on a CPU")
    parser.add_argument("--mode", default="default", help="of torch.compile")
    parser.add_argument("--layout", default="nhwc", choices=["nhwc", "nchw"], help="of images")
    args = parser.parse_args()
    step = Step(args)
    peer.serve(lambda: peer.context() | {"diffusers": diffusers_version}, step.answer)


if __name__ == "__main__":
    main()
