# SPDX-License-Identifier: Apache-2.0
"""Makes tests/training/goldens/latent_*: what PyTorch's autograd says in float64 about the ops that only
text encoders, text-conditional networks and autoencoders have, and about all parameters of the parts of
tests/models/latent.

usage: make_training_latent_goldens.py [--output ../training/goldens]
The files are as make_training_goldens.py writes them.
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

from make_training_goldens import ROOT, Ops, signs, summary

LATENT = ROOT / "models" / "latent"
# The same weights twice: with the act_fn that they have, SiLU, and with another.
ACTIVATIONS = {"unet": {}, "unet act_gelu": {"act_fn": "gelu"}}
torch.set_default_dtype(torch.float64)


def gradient_loss(a, b):
    """L1 of the differences of neighbours at four scales, of each picture."""
    loss = 0.0
    for _ in range(4):
        d = a - b
        loss = loss + d.diff(dim=-1).abs().mean((1, 2, 3)) + d.diff(dim=-2).abs().mean((1, 2, 3))
        a, b = F.avg_pool2d(a, 2), F.avg_pool2d(b, 2)
    return loss


def gaussian(moments, noise, weight):
    """Latents and the weighted KL of each row, as diffusers' DiagonalGaussianDistribution."""
    mean, log_variance = moments.chunk(2, 1)
    log_variance = log_variance.clamp(-30.0, 20.0)
    latents = mean + (0.5 * log_variance).exp() * noise
    kl = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean((1, 2, 3))
    return latents, weight * kl


def make_ops():
    ops = Ops()
    for shape, eps, shift in [((2, 7, 12), 1e-5, 0.0), ((3, 5, 33), 1e-3, 0.0), ((4, 3, 16), 1e-5, 20.0)]:  # fmt: skip
        c = shape[-1]
        x, gamma, beta = ops.random(*shape, shift=shift), ops.random(c, shift=1.0), ops.random(c)
        ops.add("layer_norm", {"eps": eps}, {"x": x, "gamma": gamma, "beta": beta},
                lambda x, gamma, beta: {"out": F.layer_norm(x, (c,), gamma, beta, eps)})  # fmt: skip

    def geglu(x):
        value, gate = x.chunk(2, -1)
        return {"out": value * F.gelu(gate)}

    for shape in [(2, 5, 14), (3, 1, 66)]:
        ops.add("geglu", {}, {"x": ops.random(*shape, scale=2.0)}, geglu)
    x = ops.random(3, 33, scale=2.0)
    quick_gelu = lambda x: {"out": x * (1.702 * x).sigmoid()}
    ops.add("activate", {"activation": "quick_gelu"}, {"x": x}, quick_gelu)
    for n, tokens, keys, heads, dim, causal in [
        (2, 7, 7, 1, 4, True), (2, 77, 77, 3, 8, True), (2, 9, 4, 2, 5, False),
        (1, 70, 77, 2, 8, False), (4, 130, 3, 1, 16, False)]:  # fmt: skip
        q = ops.random(n, tokens, heads * dim)
        k, v = (ops.random(n, keys, heads * dim) for _ in range(2))
        split = lambda t: t.reshape(n, t.shape[1], heads, dim).transpose(1, 2)

        def attention(q, k, v):
            scores = split(q) @ split(k).transpose(2, 3) * dim**-0.5
            if causal:
                scores = scores.masked_fill(torch.ones(tokens, keys).triu(1).bool(), -math.inf)
            out = scores.softmax(-1) @ split(v)
            return {"out": out.transpose(1, 2).reshape(n, tokens, heads * dim)}

        fields = {"heads": heads, "scale": dim**-0.5, "causal": causal}
        ops.add("attention", fields, {"q": q, "k": k, "v": v}, attention)
    table = ops.random(6, 5)
    index = torch.tensor([[3, 0, 3], [4, 3, 5], [0, 0, 0], [1, 3, 5]], dtype=torch.int32)
    look_up = lambda table, index: {"out": F.embedding(index.long(), table)}
    ops.add("embedding", {}, {"table": table, "index": index}, look_up)
    moments, noise = ops.random(2, 6, 3, 5), ops.random(2, 3, 3, 5).detach()
    moments.data[0, 4, 1, 1] = -35  # clamped
    posterior = lambda moments, noise: dict(zip(("latents", "kl"), gaussian(moments, noise, 0.3)))
    inputs = {"moments": moments, "noise": noise}
    ops.add("gaussian", {"weight": 0.3}, inputs, posterior, bf16=False)
    for edges in (0.0, 0.5):
        output, target = ops.random(2, 3, 16, 24), ops.random(2, 3, 16, 24).detach()
        loss = lambda output, target: {"loss": (output - target).abs().mean((1, 2, 3))
                                       + edges * gradient_loss(output, target)}  # fmt: skip
        inputs = {"output": output, "target": target}
        ops.add("reconstruction", {"edges": edges}, inputs, loss, bf16=False)
    return ops


def exact_time(model):
    """diffusers computes the embedding of timesteps in float32."""
    channels = model.config.block_out_channels[0]
    flip, shift = model.config.flip_sin_to_cos, model.config.freq_shift

    def embed(t):
        i = torch.arange(channels // 2)
        angle = t.double()[:, None] * torch.exp(-math.log(10000) * i / (channels // 2 - shift))
        parts = [angle.cos(), angle.sin()] if flip else [angle.sin(), angle.cos()]
        return torch.cat(parts, -1)

    model.time_proj.forward = embed


def gradients(model, prefix=""):
    return {prefix + name: summary(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def backward(output, stream=0):
    (output * signs(output.numel(), stream).reshape(output.shape)).sum().backward()


def open_text(folder):
    config = CLIPTextConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    model = CLIPTextModel._from_config(config, dtype=torch.float64)
    weights = load_file(folder / "model.safetensors")
    names = set(model.state_dict())
    weights = {k if k in names else k.removeprefix("text_model."): v for k, v in weights.items()}
    model.load_state_dict(weights, strict=True)
    return model.double().eval()


def text_gradients(folder, ids):
    model = open_text(folder)
    states = model(input_ids=ids).last_hidden_state
    backward(states)
    found = {name if name.startswith("text_model.") else f"text_model.{name}": value
             for name, value in gradients(model).items()}  # fmt: skip
    return {"output": summary(states), **found}


def open_model(kind, folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    model = kind.from_config(config)
    model.load_state_dict(load_file(folder / "diffusion_pytorch_model.safetensors"))
    return model.double().eval()


def unet_gradients(folder, sample, timestep, states, **changes):
    model = open_model(UNet2DConditionModel, folder, **changes)
    exact_time(model)
    states = states.clone().requires_grad_()
    output = model(sample, timestep, encoder_hidden_states=states).sample
    backward(output)
    return {"output": summary(output.permute(0, 2, 3, 1)), "states": summary(states.grad),
            **gradients(model)}  # fmt: skip


def vae_gradients(folder, image):
    """Of the whole loss; noise is signs of stream 9."""
    model = open_model(AutoencoderKL, folder)
    moments = model.quant_conv(model.encoder(image))
    rows, channels, height, width = moments.shape
    noise = signs(moments.numel() // 2, 9).reshape(rows, height, width, channels // 2).permute(0, 3, 1, 2)
    latents, kl = gaussian(moments, noise, 0.1)
    output = model.decode(latents).sample
    loss = (output - image).abs().mean((1, 2, 3)) + 0.5 * gradient_loss(output, image) + kl
    loss.mean().backward()
    return {"output": summary(output.permute(0, 2, 3, 1)), "loss": summary(loss), **gradients(model)}


def make_models():
    models = {}
    for family in ("sd1", "sd2"):
        io = load_file(LATENT / family / "goldens.safetensors")
        io = {k: v.double() if v.is_floating_point() else v for k, v in io.items()}
        models[f"{family}/text_encoder"] = text_gradients(LATENT / family / "text_encoder", io["text.ids"])
        for name, changes in ACTIVATIONS.items():
            models[f"{family}/{name}"] = unet_gradients(
                LATENT / family / "unet", io["unet.sample"], io["unet.timestep"], io["text.states"][:2],
                **changes)
    io = load_file(LATENT / "sd2" / "goldens.safetensors")
    models["sd2/vae"] = vae_gradients(LATENT / "sd2" / "vae", io["vae.image"].double())
    return models


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "training" / "goldens")
    args = parser.parse_args()
    ops = make_ops()
    save_file(ops.tensors, args.output / "latent_ops.safetensors")
    (args.output / "latent_ops.json").write_text(json.dumps(ops.cases, indent=1) + "\n")
    rounded = {model: {name: [float(f"{x:.8g}") for x in values] for name, values in found.items()}
               for model, found in make_models().items()}  # fmt: skip
    (args.output / "latent_models.json").write_text(json.dumps(rounded) + "\n")


if __name__ == "__main__":
    main()
