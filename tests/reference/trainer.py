# SPDX-License-Identifier: Apache-2.0
"""The training loop: optimiser, average of the weights, learning rate by the clock."""

import json
import math
import time

import torch


class Trainer:
    """Steps of AdamW on `loss()`, a scalar made of data that lives on the device. On CUDA, with
    `graph`, a step is one graph, so `loss` may neither read a value back nor copy one from the host; the
    random numbers in it are new each time.

    `averages` are the exponential moving average of `weights`, in the same order, but start at 0 as
    Adam's moments do, and `load_averages` divides by `share`: what a short training began with is no
    part of them.
    """

    def __init__(self, loss, weights, ema_decay=0.999, graph=True):
        self.loss, self.weights, self.ema_decay = loss, list(weights), ema_decay
        self.averages = [torch.zeros_like(w) for w in self.weights]
        self.share = torch.zeros((), device=self.weights[0].device)  # of the steps in an average
        device = self.weights[0].device
        on_gpu = device.type == "cuda"
        # Tensors, so that a captured graph reads their current values.
        self.learning_rate = torch.zeros((), device=device)
        self.loss_sum = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(
            self.weights, lr=self.learning_rate, betas=(0.9, 0.99), weight_decay=1e-2,
            capturable=on_gpu, fused=on_gpu or None,
        )  # fmt: skip
        self.step = self._capture() if on_gpu and graph else self._step

    def _step(self):
        loss = self.loss()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=True)
        self.optimizer.step()
        torch._foreach_lerp_(self.averages, self.weights, 1 - self.ema_decay)
        self.share += (1 - self.ema_decay) * (1 - self.share)
        self.loss_sum += loss.detach()

    def _capture(self):
        # With a learning rate of 0 the steps that warm up the allocator change nothing but the
        # moments. PyTorch asks for a side stream before a capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(5):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.loss_sum.zero_()
        torch._foreach_zero_([*self.averages, self.share])
        return graph.replay

    def train(self, name, minutes, learning_rate, decay, every=200, warmup=100):
        """Trains for `minutes` from now. The learning rate rises over `warmup` steps and falls to 0
        over the last fraction `decay` of the time. Prints the mean loss of each `every` steps;
        returns the last one and the number of steps."""
        start, step, progress, mean = time.time(), 0, 0.0, math.nan
        while progress < 1:
            for _ in range(every):
                progress = (time.time() - start) / (60 * minutes)
                left = min(1, max(0, 1 - progress) / decay) if decay else 1
                self.learning_rate.fill_(learning_rate * min(1, (step + 1) / warmup) * left)
                self.step()
                step += 1
            mean = self.mean_loss(every)
            print(json.dumps({"stage": name, "step": step, "loss": round(mean, 5),
                              "seconds": round(time.time() - start, 1)}), flush=True)  # fmt: skip
            if not math.isfinite(mean):
                raise SystemExit(f"{name}: the loss is {mean} at step {step}; lower the learning rate")
        return mean, step

    def mean_loss(self, steps):
        """Of the last `steps` steps, since the last call."""
        mean = self.loss_sum.item() / steps
        self.loss_sum.zero_()
        return mean

    @torch.no_grad()
    def load_averages(self):
        torch._foreach_copy_(self.weights, torch._foreach_div(self.averages, self.share.item()))
