# SPDX-License-Identifier: Apache-2.0
"""Makes tests/training/goldens: what PyTorch's autograd says in float64 about every backward op, about
all parameters of the tiny models of tests/models/goldens, and about ten AdamW steps of a few of them.

usage: make_training_goldens.py [--output ../training/goldens]
ops.json and ops.safetensors hold whole tensors (NHWC, as float32), and "bf16" is how far PyTorch's own
gradients in bfloat16 are from them, as a share of their norm; models.json holds, for every
parameter, the norm of its gradient and its projections on four vectors of signs, which is small and
misses nothing: see sign() here and in tests/training/golden.h.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import UNet2DModel
from diffusers.models import downsampling, upsampling
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parent.parent
PROJECTIONS = 4
torch.set_default_dtype(torch.float64)
upfirdn2d = upsampling.upfirdn2d_native
for module in (upsampling, downsampling):  # which make the filter in float32
    module.upfirdn2d_native = lambda x, kernel, **rest: upfirdn2d(x, kernel.to(x.dtype), **rest)


def signs(count, stream):
    """±1 for elements 0 … count − 1: the top bit of splitmix64(stream · 2^32 + element)."""
    with np.errstate(over="ignore"):
        z = np.arange(count, dtype=np.uint64) + np.uint64(stream << 32)
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return torch.from_numpy(1.0 - 2.0 * (z >> np.uint64(63)).astype(np.float64))


def summary(tensor):
    flat = tensor.detach().double().reshape(-1)
    return [flat.norm().item()] + [
        (flat @ signs(len(flat), stream)).item() for stream in range(1, PROJECTIONS + 1)
    ]


def bfloat16_errors(inputs, forward, cotangents):
    """Everything in bfloat16 on the CPU: ‖gradient − float64's‖ / ‖float64's‖ by name."""
    low = {
        key: value.detach().bfloat16().requires_grad_() if value.is_floating_point() else value
        for key, value in inputs.items()
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layer norm's sums depend on it
    outputs = forward(**low)
    torch.autograd.backward(
        list(outputs.values()), [cotangents[key].to(value.dtype) for key, value in outputs.items()])  # fmt: skip
    torch.set_num_threads(threads)
    return {
        "d" + key: float(f"{(low[key].grad.double() - value.grad).norm() / value.grad.norm():.2g}")
        for key, value in inputs.items()
        if value.grad is not None
    }


class Ops:
    def __init__(self):
        self.cases, self.tensors = [], {}
        self.generator = torch.Generator().manual_seed(7)

    def random(self, *shape, scale=1.0, shift=0.0):
        """Values that float32 holds exactly."""
        value = torch.randn(*shape, generator=self.generator) * scale + shift
        return value.float().double().requires_grad_()

    def add(self, op, fields, inputs, forward, scale=None, bf16=True):
        """`inputs`: name → leaf tensor; `forward` makes of them name → output. Gradients of
        Σ output·cotangent are stored as d<name>; the cotangent is random, or `scale`. Images are NCHW
        here and NHWC in the file. Not `bf16`: the op has float32 alone."""
        name = f"{op}_{sum(case['op'] == op for case in self.cases)}"
        inputs = {key: value for key, value in inputs.items() if value is not None}
        outputs, cotangents = forward(**inputs), {}
        for key, value in outputs.items():
            cotangents[key] = (
                self.random(*value.shape).detach() if scale is None else torch.full_like(value, scale)
            ).detach()
            self.store(name, key, value)
            self.store(name, "d" + key, cotangents[key])
        torch.autograd.backward(list(outputs.values()), list(cotangents.values()))
        for key, value in inputs.items():
            self.store(name, key, value)
            if value.grad is not None:
                self.store(name, "d" + key, value.grad)
        if bf16:
            fields = {**fields, "bf16": bfloat16_errors(inputs, forward, cotangents)}
        self.cases.append({"name": name, "op": op, **fields})

    def store(self, case, key, value):
        value = value.detach()
        if value.dim() == 4 and not key.endswith("weight"):
            value = value.permute(0, 2, 3, 1)
        dtype = torch.int32 if value.dtype == torch.int32 else torch.float32
        self.tensors[f"{case}/{key}"] = value.to(dtype).contiguous()


def make_ops():
    ops = Ops()

    for n, h, w, cin, cout, kernel, stride, pads, upsample, add, residual, scale in [
        (2, 7, 5, 3, 6, 3, 1, (1, 1, 1, 1), False, True, True, 0.7),
        (2, 8, 6, 5, 4, 3, 2, (1, 1, 1, 1), False, False, False, 1.0),
        (2, 8, 6, 5, 4, 3, 2, (0, 0, 1, 1), False, False, False, 1.0),
        (2, 4, 3, 6, 5, 3, 1, (1, 1, 1, 1), True, False, False, 1.0),
        (2, 5, 5, 1, 8, 3, 1, (1, 1, 1, 1), False, False, False, 1.0),
        (2, 5, 5, 8, 1, 3, 1, (1, 1, 1, 1), False, False, False, 1.0),
        (4, 6, 6, 16, 32, 3, 1, (1, 1, 1, 1), False, True, False, 1.0),
        (2, 6, 4, 20, 12, 1, 1, (0, 0, 0, 0), False, False, True, 1.0),
    ]:
        x = ops.random(n, cin, h, w)
        weight = ops.random(cout, cin, kernel, kernel, scale=0.3)
        bias = ops.random(cout)
        top, left, bottom, right = pads
        inputs = {"x": x, "weight": weight, "bias": bias}
        if add:
            inputs["add"] = ops.random(n, cout)

        def conv(x, weight, bias, add=None, residual=None):
            source = F.interpolate(x, scale_factor=2, mode="nearest") if upsample else x
            out = F.conv2d(F.pad(source, (left, right, top, bottom)), weight, bias, stride)
            out = out if add is None else out + add[:, :, None, None]
            out = out if residual is None else out + residual
            return {"out": out * scale}

        if residual:
            inputs["residual"] = ops.random(*conv(**inputs)["out"].shape)
        fields = {"stride": stride, "pads": pads, "upsample": upsample, "scale": scale}
        ops.add("conv2d", fields, inputs, conv)

    for shape, k, parts, bias, residual, scale in [
        ((3, 7), 7, (5,), True, False, 1.0),
        ((2, 9, 6), 6, (5, 3, 7), True, False, 1.0),
        ((2, 9, 6), 6, (6,), True, True, 0.5),
        ((4, 33), 33, (17, 2), False, False, 1.0),
    ]:
        x = ops.random(*shape)
        inputs = {"x": x}
        for i, part in enumerate(parts):
            inputs[f"weight{i}"] = ops.random(part, k, scale=0.4)
            inputs[f"bias{i}"] = ops.random(part) if bias else None

        def linear(x, residual=None, **of):
            outs = [F.linear(x, of[f"weight{i}"], of.get(f"bias{i}")) for i in range(len(parts))]
            out = torch.cat(outs, -1)
            return {"out": (out if residual is None else out + residual) * scale}

        if residual:
            inputs["residual"] = ops.random(*shape[:-1], sum(parts))
        ops.add("linear", {"parts": parts, "bias": bias, "scale": scale}, inputs, linear)

    acts = {"none": lambda x: x, "silu": F.silu, "mish": F.mish, "gelu": F.gelu, "relu": F.relu}
    for n, c, size, groups, eps, act, scale_shift, shift in [
        (2, 12, (5, 7), 4, 1e-5, "silu", False, 0.0),
        (2, 12, (5, 7), 3, 1e-6, "none", False, 0.0),
        (3, 8, (4, 4), 8, 1e-5, "silu", True, 0.0),
        (2, 70, (3, 3), 7, 1e-2, "gelu", True, 0.0),
        (2, 8, (6, 5), 2, 1e-5, "mish", False, 0.0),
        (2, 8, (6, 5), 1, 1e-5, "relu", True, 0.0),
        (2, 16, (9,), 4, 1e-5, "none", False, 0.0),
        (2, 8, (16, 16), 2, 1e-5, "silu", False, 20.0),
    ]:
        x = ops.random(n, c, *size, shift=shift)
        gamma, beta = ops.random(c, scale=0.5, shift=1.0), ops.random(c)
        inputs = {"x": x, "gamma": gamma, "beta": beta}
        if scale_shift:
            inputs["scale_shift"] = ops.random(n, 2 * c, scale=0.5)
        fields = {"groups": groups, "eps": eps, "activation": act, "tokens": len(size) == 1}
        if len(size) == 1:  # stored as [N, tokens, C]
            inputs["x"] = ops.random(n, c, size[0], 1, shift=shift)

        def norm(x, gamma, beta, scale_shift=None):
            out = F.group_norm(x, groups, gamma, beta, eps)
            if scale_shift is not None:
                factor, offset = scale_shift[:, :, None, None].chunk(2, 1)
                out = out * (1 + factor) + offset
            return {"out": acts[act](out)}

        ops.add("group_norm", fields, inputs, norm)

    for n, tokens, heads, dim, scale in [
        (2, 7, 1, 4, 0.5), (2, 9, 3, 5, 5**-0.5), (1, 70, 2, 8, 8**-0.5), (1, 130, 1, 16, 1.3)]:  # fmt: skip
        q, k, v = (ops.random(n, tokens, heads * dim) for _ in range(3))
        split = lambda t: t.reshape(n, tokens, heads, dim).transpose(1, 2)

        def attention(q, k, v):
            p = (split(q) @ split(k).transpose(2, 3) * scale).softmax(-1)
            return {"out": (p @ split(v)).transpose(1, 2).reshape(n, tokens, heads * dim)}

        ops.add("attention", {"heads": heads, "scale": scale}, {"q": q, "k": k, "v": v}, attention)

    for act in ("silu", "mish", "gelu", "relu"):
        x = ops.random(3, 33, scale=2.0)
        ops.add("activate", {"activation": act}, {"x": x}, lambda x: {"out": acts[act](x)})

    x = ops.random(2, 3, 5, 4)
    up = lambda x: {"out": F.interpolate(x, scale_factor=2, mode="nearest")}
    ops.add("upsample2x", {}, {"x": x}, up)
    x = ops.random(2, 3, 6, 4)
    ops.add("average_pool2x", {}, {"x": x}, lambda x: {"out": F.avg_pool2d(x, 2)})
    a, b = ops.random(2, 3, 4, 5), ops.random(2, 7, 4, 5)
    ops.add("concat", {}, {"a": a, "b": b}, lambda a, b: {"out": torch.cat([a, b], 1)})
    x, divisor = ops.random(3, 2, 4, 5), torch.tensor([0.5, 2.0, 7.0])
    divide = lambda x, divisor: {"out": x / divisor[:, None, None, None]}
    ops.add("divide_rows", {}, {"x": x, "divisor": divisor}, divide, bf16=False)
    table, index = ops.random(5, 6), torch.tensor([3, 0, 3, 4], dtype=torch.int32)
    look_up = lambda table, index: {"out": F.embedding(index.long(), table)}
    ops.add("embedding", {}, {"table": table, "index": index}, look_up)
    make_variance_losses(ops)
    for n, c, h, w in [(2, 3, 5, 4), (1, 9, 2, 6)]:
        x = ops.random(n, c, h, w)
        up = lambda x: {"out": upsampling.upsample_2d(x, kernel=(1, 3, 3, 1))}
        ops.add("fir_up2x", {}, {"x": x}, up)
        x = ops.random(n, c, 2 * h, 2 * w)
        down = lambda x: {"out": downsampling.downsample_2d(x, kernel=(1, 3, 3, 1))}
        ops.add("fir_down2x", {}, {"x": x}, down)
    # What is concatenated gets its gradient from the norm behind it.
    for a_channels, b_channels, groups in [(3, 7, 2), (8, 16, 4)]:
        c = a_channels + b_channels
        inputs = {
            "a": ops.random(2, a_channels, 4, 5), "b": ops.random(2, b_channels, 4, 5),
            "gamma": ops.random(c, scale=0.5, shift=1.0), "beta": ops.random(c),
        }  # fmt: skip
        norm = lambda a, b, gamma, beta: {
            "out": F.silu(F.group_norm(torch.cat([a, b], 1), groups, gamma, beta, 1e-5))}  # fmt: skip
        ops.add("concat_norm", {"groups": groups}, inputs, norm)
    output, target = ops.random(4, 2, 3, 5), ops.random(4, 2, 3, 5).detach()
    weights = [0.5, 2.0, 1.0, 7.0]
    loss = lambda output, target: {
        "out": torch.tensor(weights) * ((output - target) ** 2).flatten(1).mean(1)}  # fmt: skip
    ops.add("loss", {"weights": weights, "scale": 0.25}, {"output": output, "target": target}, loss,
            0.25, bf16=False)  # fmt: skip
    return ops


def make_variance_losses(ops):
    """The hybrid loss of a learned variance (arXiv 2102.09672), written from whole images: posterior
    means and variances, and the likelihood of 8-bit levels at t = 0. Its plan of a row (mean_factor
    and the logarithms) comes from the same formulas."""
    steps = 50
    betas = torch.linspace(1e-4 * 20, 0.02 * 20, steps)
    bars = torch.cumprod(1 - betas, 0)
    before = torch.cat([torch.ones(1), bars[:-1]])
    posterior = (1 - before) / (1 - bars) * betas
    clipped = torch.cat([posterior[1:2], posterior[1:]]).log()
    of_image = before.sqrt() * betas / (1 - bars)
    of_state = (1 - betas).sqrt() * (1 - before) / (1 - bars)
    cdf = torch.special.ndtr
    for predicts, weight, vlb, scale in [
        ("epsilon", 1.0, 0.05, 0.25), ("v", 0.7, 2.0, 1.0), ("x0", 3.0, 0.5, 0.125)]:  # fmt: skip
        n, c, h, w = 4, 2, 3, 5
        t = torch.tensor([0, 1, 7, steps - 1])
        at = lambda table: table[t][:, None, None, None]
        signal, noise = at(bars).sqrt(), (1 - at(bars)).sqrt()
        levels = torch.randint(0, 256, (n, c, h, w), generator=ops.generator)
        levels[:, :, 0, 0], levels[:, :, 0, 1] = 0, 255  # open to one side
        image = (levels / 127.5 - 1).float().double()
        eps = ops.random(n, c, h, w).detach()
        x = signal * image + noise * eps
        target = {"epsilon": eps, "v": signal * eps - noise * image, "x0": image}[predicts]
        # Close to the target, as a network that has learned something; at t = 0 far from it, too.
        prediction = target + ops.random(n, c, h, w, scale=0.3).detach() * at(1 - bars).sqrt()
        output = torch.cat([prediction, ops.random(n, c, h, w, scale=0.7).detach()], 1)
        output = output.float().double().requires_grad_()
        target = target.float().double()
        mean, v = output.chunk(2, 1)
        simple = ((mean - target) ** 2).flatten(1).mean(1)
        mean = mean.detach()
        predicted = {"epsilon": (x - noise * mean) / signal, "v": signal * x - noise * mean, "x0": mean}[predicts]
        mean_p = at(of_image) * predicted + at(of_state) * x
        mean_q = at(of_image) * image + at(of_state) * x
        log_p = (v + 1) / 2 * at(betas.log()) + (1 - v) / 2 * at(clipped)
        log_q = at(clipped)
        kl = 0.5 * (log_p - log_q - 1 + (log_q - log_p).exp() + (mean_q - mean_p) ** 2 * (-log_p).exp())
        inverse = (-0.5 * log_p).exp()
        # Mirrored where the level lies above the mean, so that float64 holds the small mass.
        z = image - mean_p
        sign = torch.where(z > 0, -1.0, 1.0)
        low, high = cdf((sign * z - 1 / 255) * inverse), cdf((sign * z + 1 / 255) * inverse)
        lowest, highest = image < -0.999, image > 0.999
        low = torch.where(torch.where(sign > 0, lowest, highest), torch.zeros(()), low)
        high = torch.where(torch.where(sign > 0, highest, lowest), torch.ones(()), high)
        nll = -(high - low).clamp(min=1e-12).log()
        bound = torch.where(at(torch.arange(steps)) == 0, nll, kl).flatten(1).mean(1)
        factor = {"epsilon": (1 - bars).sqrt() / bars.sqrt(), "v": (1 - bars).sqrt(), "x0": -torch.ones(steps)}[predicts]
        fields = {
            "weight": weight, "variance_weight": vlb, "scale": scale, "condition": t.tolist(),
            "mean_factor": (of_image * factor)[t].tolist(),
            "log_variance_min": clipped[t].tolist(), "log_variance_max": betas.log()[t].tolist(),
        }  # fmt: skip
        value = weight * simple + vlb * bound
        ops.add("variance_loss", fields, {"output": output, "target": target, "image": image},
                lambda **_: {"out": value}, scale, bf16=False)  # fmt: skip


def load_model(folder):
    config = json.loads((folder / "config.json").read_text())
    model = UNet2DModel.from_config(config)
    model.load_state_dict(load_file(folder / "diffusion_pytorch_model.safetensors"))
    model.double().eval()  # no dropout
    # diffusers computes these in float32.
    if config.get("time_embedding_type", "positional") == "positional":
        channels = config["block_out_channels"][0]
        flip, shift = config.get("flip_sin_to_cos", True), config.get("freq_shift", 0)

        def embed(t):
            i = torch.arange(channels // 2)
            angle = t.double()[:, None] * torch.exp(-math.log(10000) * i / (channels // 2 - shift))
            parts = [angle.cos(), angle.sin()] if flip else [angle.sin(), angle.cos()]
            return torch.cat(parts, -1)

        model.time_proj.forward = embed
    return model


def inputs_of(folder):
    io = load_file(folder / "io.safetensors")
    learned = json.loads((folder / "config.json").read_text()).get("time_embedding_type") == "learned"
    inputs = {
        "sample": io["sample"].double(),
        "timestep": io["timestep"].long() if learned else io["timestep"].double(),
    }
    if "class_labels" in io:
        labels = io["class_labels"]
        inputs["class_labels"] = labels.double() if labels.is_floating_point() else labels
    return inputs


def make_models():
    models = {}
    for folder in sorted((ROOT / "models" / "goldens").iterdir()):
        if not (folder / "io.safetensors").exists():
            continue
        if not (folder / "diffusion_pytorch_model.safetensors").exists():
            continue  # half precision and shards: the same networks
        model = load_model(folder)
        output = model(**inputs_of(folder)).sample
        cotangent = signs(output.numel(), 0).reshape(output.shape)
        (output * cotangent).sum().backward()
        models[folder.name] = {
            name: summary(p.grad) for name, p in model.named_parameters() if p.grad is not None
        }
    return models


STEPS = 10
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.02}
CLIP, DECAY = 0.5, 0.8


def make_steps():
    """Ten AdamW steps with clipping and an average, all on one batch."""
    steps = {}
    for name in ("class_labels", "scale_shift", "like_ddpm", "time_fourier"):
        folder = ROOT / "models" / "goldens" / name
        model = load_model(folder)
        inputs = inputs_of(folder)
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        first = {n: p.detach().clone() for n, p in parameters.items()}
        average = {n: p.detach().clone() for n, p in parameters.items()}
        optimizer = torch.optim.AdamW(parameters.values(), **ADAMW)
        losses = []
        for _ in range(STEPS):
            output = model(**inputs).sample
            target = signs(output.numel(), 0).reshape(output.shape)
            loss = F.mse_loss(output, target)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
            optimizer.step()
            losses.append(loss.item())
            for n, p in parameters.items():
                average[n].lerp_(p.detach(), 1 - DECAY)
        steps[name] = {
            "losses": losses,
            "moved": {n: summary(p.detach() - first[n]) for n, p in parameters.items()},
            "average": {n: summary(average[n] - first[n]) for n in parameters},
        }
    return steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "training" / "goldens")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    ops = make_ops()
    save_file(ops.tensors, args.output / "ops.safetensors")

    def write(name, value):
        text = json.dumps(value, indent=1)
        (args.output / name).write_text(text + "\n")

    write("ops.json", ops.cases)
    rounded = lambda value: (
        {k: rounded(v) for k, v in value.items()} if isinstance(value, dict)
        else [float(f"{x:.8g}") for x in value]
    )  # fmt: skip
    (args.output / "models.json").write_text(json.dumps(rounded(make_models())) + "\n")
    (args.output / "steps.json").write_text(json.dumps(rounded(make_steps())) + "\n")


if __name__ == "__main__":
    main()
