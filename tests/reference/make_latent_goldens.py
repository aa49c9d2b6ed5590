# SPDX-License-Identifier: Apache-2.0
"""Makes tests/models/latent/<family>: tiny random pipelines of the Stable Diffusion family and what
diffusers and transformers make of them.

usage: make_latent_goldens.py [--output ../models/latent] [--only family,family]
                              [--clip FOLDER with vocab.json and merges.txt of CLIP]
Each family is a pipeline directory of diffusers plus goldens.safetensors and goldens.json; README.md
in the output folder says what those hold. The weights are stored in float16; every number is
computed in float32 from the rounded weights, and again in float64 to know what float32 costs.

Random weights hide errors, so queries and keys are large enough for a peaked attention, norms scale
and shift at random, and outputs are of unit size. What passes between blocks is small (STREAM), so
that the eps of a norm can be told from another one. Checks keep a golden from passing by luck: every
weight matters, and so does each planted error (a wrong eps, swapped halves of GEGLU, the other GELU,
an eos off by one).
"""

import argparse
import contextlib
import functools
import inspect
import itertools
import json
import math
import os
import re
import shutil
import sys
import warnings
import zlib
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    KDPM2AncestralDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    SASolverScheduler,
    TCDScheduler,
    UNet2DConditionModel,
    UNet2DModel,
    VQModel,
)
from diffusers.models.embeddings import TimestepEmbedding
from diffusers.models.resnet import ResnetBlock2D
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from sampling import philox_normal

VERSIONS = {"diffusers": "0.42.1", "transformers": "5.23.0"}
LATENT = Path(__file__).parent.parent / "models" / "latent"
CLIP = Path(__file__).parent.parent / "text" / "clip"
PUBLISHED = Path(__file__).parent.parent / "models" / "pipelines"

MERGES = 126  # the first merges of CLIP: 640 tokens in all
PROMPTS = [
    "a red apple on the table!",
    "",
    "thin threads in the oven, " * 12 + "and more than seventy-seven tokens",
]
NEGATIVE = "blurry, the worst"
STEPS, GUIDANCE = 4, 5.0
PROMPTED = {"prompt": PROMPTS[:2], "negative_prompt": [NEGATIVE, ""]}
SIZED = {"height": 16, "width": 16}
STREAM = 0.02  # the size of residual streams: a variance of 4e-4, which eps of 1e-5 changes by 2.5 %


# --- Weights ---------------------------------------------------------------------------------


def generator_of(name, device="cpu"):
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


@torch.no_grad()
def randomise(model, generator):
    """Every weight random, none at the zero or one that training starts from; then rounded."""
    norms = (nn.GroupNorm, nn.LayerNorm)
    drawn = {"generator": generator, "device": generator.device}
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if isinstance(module, norms):
                value = torch.rand(weight.shape, **drawn) - 0.5
                value += 1 if name == "weight" else 0
            else:
                value = torch.randn(weight.shape, **drawn)
                if name == "bias":
                    value *= 0.3
                elif isinstance(module, nn.Embedding):
                    value *= 0.7
                else:
                    last = path.rsplit(".", 1)[-1]
                    gain = 1.7 if last in ("to_q", "to_k", "q_proj", "k_proj") else 0.9
                    value *= gain / math.sqrt(weight[0].numel())
            weight.copy_(value * stream_factor(path, name))
    return round_weights(model)


def stream_factor(path, parameter):
    """What a layer adds to a residual stream is small, and so is the bias of one that maps streams."""
    adds = ("conv_in", "conv2", "proj_in", "to_out.0", "ff.net.2", "out_proj", "fc2",
            "token_embedding", "position_embedding")  # fmt: skip
    maps = ("conv_shortcut", "downsamplers.0.conv", "upsamplers.0.conv", "proj_out")
    small = path.endswith(adds) or (path.endswith(maps) and parameter == "bias")
    return STREAM if small else 1


@torch.no_grad()
def round_weights(model):
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.copy_(tensor.half().float())
    return model.eval().requires_grad_(False)


@torch.no_grad()
def scale_layer(layer, factor):
    layer.weight.mul_(factor)
    if layer.bias is not None:
        layer.bias.mul_(factor)
    round_weights(layer)


def relative_difference(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# --- Parts -----------------------------------------------------------------------------------


def text_encoder(name, projection=None, legacy_eos=True, **fields):
    config = CLIPTextConfig(**{
        "vocab_size": 514 + MERGES, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 77,
        "hidden_act": "quick_gelu", "projection_dim": projection or 32,
        "bos_token_id": 0 if legacy_eos else 512 + MERGES,
        "eos_token_id": 2 if legacy_eos else 513 + MERGES, "pad_token_id": 1, **fields,
    })  # fmt: skip
    kind = CLIPTextModelWithProjection if projection else CLIPTextModel
    return randomise(kind(config), generator_of(name))


def unet(name, context, size=8, states_std=1.0, **fields):
    """`context`: width of the text states. The output for a latent of unit size has unit size."""
    model = UNet2DConditionModel(**{
        "sample_size": size, "in_channels": 4, "out_channels": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "block_out_channels": (16, 24), "layers_per_block": 1, "norm_num_groups": 8,
        "cross_attention_dim": context, "attention_head_dim": 2, **fields,
    })  # fmt: skip
    generator = generator_of(name)
    randomise(model, generator)
    for path, layer in model.named_modules():
        if path.endswith(("attn2.to_k", "attn2.to_v")):
            scale_layer(layer, 1 / states_std)
    states = torch.randn(2, 77, context, generator=generator) * states_std
    inputs = unet_inputs(model, states, generator)
    for _ in range(2):
        scale_layer(model.conv_out, 1 / model(**inputs).sample.std().item())
    return model


def unet_inputs(model, states, generator, size=None, timesteps=(17, 803)):
    config, rows = model.config, len(timesteps)
    size = size or (config.sample_size, config.sample_size)
    inputs = {
        "sample": torch.randn(rows, config.in_channels, *size, generator=generator),
        "timestep": torch.tensor(timesteps),
        "encoder_hidden_states": states[:rows],
    }
    if config.time_cond_proj_dim:
        inputs["timestep_cond"] = guidance_embedding(
            torch.tensor([7.5, 2.0]), config.time_cond_proj_dim)
    if config.addition_embed_type == "text_time":
        width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs["added_cond_kwargs"] = {
            "text_embeds": torch.randn(rows, width, generator=generator),
            "time_ids": torch.tensor(
                [[16.0, 24, 0, 0, 16, 16], [1024, 768, 32, 64, 512, 1024]])[:rows],
        }
    return inputs


def guidance_embedding(scales, width):
    """get_guidance_scale_embedding of diffusers' LatentConsistencyModelPipeline, in float64: its angles
    are thousands, of which float32 leaves three digits behind the point."""
    w = (scales.double() - 1) * 1000
    half = width // 2
    frequencies = torch.exp(torch.arange(half).double() * -(math.log(10000.0) / (half - 1)))
    angles = w[:, None] * frequencies[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


def vae(name, latent_std, **fields):
    """`latent_std`: of what a run gives the decoder after scaling, so that its first maps have unit
    size and are not swamped by the latents, nor swamp them."""
    model = AutoencoderKL(**{
        "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": 4, "sample_size": 16, **fields,
    })  # fmt: skip
    generator = generator_of(name)
    randomise(model, generator)
    scale_layer(model.post_quant_conv, 1 / latent_std)
    unscaled = torch.randn(2, 4, 8, 8, generator=generator) * latent_std
    for _ in range(2):
        scale_layer(model.decoder.conv_out, 0.4 / model.decode(unscaled).sample.std().item())
    return model


# --- Directories -----------------------------------------------------------------------------


def clip_files(clip):
    vocabulary = json.loads((clip / "vocab.json").read_text(encoding="utf-8"))
    lines = (clip / "merges.txt").read_text(encoding="utf-8").split("\n")[: MERGES + 1]
    names = sorted(vocabulary, key=vocabulary.get)[: 512 + MERGES]
    names += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = json.dumps({name: i for i, name in enumerate(names)}, ensure_ascii=False)
    return vocabulary, "\n".join(lines) + "\n"


def write_tokenizer(folder, clip, pad):
    """The files that published pipelines have, and that transformers 4 wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary, merges = clip_files(clip)
    (folder / "vocab.json").write_text(vocabulary + "\n", encoding="utf-8")
    (folder / "merges.txt").write_text(merges, encoding="utf-8")

    def special(content):
        return {"content": content, "lstrip": False, "normalized": True, "rstrip": False,
                "single_word": False}  # fmt: skip

    tokens = {"bos_token": special("<|startoftext|>"), "eos_token": special("<|endoftext|>"),
              "pad_token": pad, "unk_token": special("<|endoftext|>")}  # fmt: skip
    typed = {key: value if isinstance(value, str) else {"__type": "AddedToken", **value}
             for key, value in tokens.items()}  # fmt: skip
    config = {"add_prefix_space": False, "do_lower_case": True, "errors": "replace",
              "model_max_length": 77, "tokenizer_class": "CLIPTokenizer",
              **typed, "pad_token": "<|endoftext|>"}  # as SD 2: the map says which pad it is
    write_json(folder / "special_tokens_map.json", tokens)
    write_json(folder / "tokenizer_config.json", config)
    return CLIPTokenizer.from_pretrained(folder)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_half(model, folder):
    """Saves the model in float16, and leaves it as it was."""
    model.half().save_pretrained(folder)
    model.float()


def rename_weights(file, renamed):
    tensors = load_file(file)
    save_file({renamed(name): tensor for name, tensor in tensors.items()}, file, {"format": "pt"})


def prefix_text_model(folder):
    """The names of published files; transformers since 5.6 saves CLIPTextModel without the prefix."""
    rename_weights(folder / "model.safetensors",
                   lambda name: name if name.startswith("text_model.") else "text_model." + name)  # fmt: skip


def old_attention_names(folder):
    """The names of the VAE's attention in published files of 2022."""
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def renamed(name):
        for new, before in old.items():
            name = name.replace(f"attentions.0.{new}.", f"attentions.0.{before}.")
        return name

    rename_weights(folder / "diffusion_pytorch_model.safetensors", renamed)


def write_index(folder, class_name, **parts):
    write_json(folder / "model_index.json",
               {"_class_name": class_name, "_diffusers_version": diffusers.__version__, **parts})  # fmt: skip


def share(folder, part, family):
    """A part that is the same in another family."""
    link = folder / part
    link.unlink(missing_ok=True)
    os.symlink(Path("..") / family / part, link)


SCHEDULE = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
                set_alpha_to_one=False, steps_offset=1)  # fmt: skip

STABLE_DIFFUSION = {
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "safety_checker": [None, None],
    "feature_extractor": [None, None],
    "requires_safety_checker": False,
}


# --- Goldens ---------------------------------------------------------------------------------


class Goldens:
    """Values of one family, and how far float32 is from float64 in each."""

    def __init__(self, family):
        self.family, self.tensors, self.facts, self.errors = family, {}, {}, {}

    def add(self, name, tensor):
        self.tensors[name] = tensor.detach().clone().contiguous()

    def add_checked(self, prefix, compute, *models):
        """`compute()` gives tensors by name; it runs once more with the models in float64."""
        values = compute()
        with in_double(*models):
            exact = compute()
        for name, value in values.items():
            error = relative_difference(value, exact[name])
            self.errors[f"{prefix}{name}"] = float(f"{error:.1e}")
            if not error < 1e-5:
                raise SystemExit(f"{self.family}: {prefix}{name}: float32 is {error:.1e} off")
            self.add(f"{prefix}{name}", value.float())
        return values

    def save(self, folder):
        save_file(self.tensors, folder / "goldens.safetensors")
        facts = {"made_with": {"torch": torch.__version__.split("+")[0], **VERSIONS},
                 "prompts": PROMPTS, **self.facts,
                 "float32_error": self.errors}  # fmt: skip
        write_json(folder / "goldens.json", facts)
        for file in folder.rglob("*.*"):
            if not file.is_symlink():
                file.chmod(0o644)
        size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink())
        stds = {k: round(v.float().std().item(), 2) for k, v in self.tensors.items()
                if k.endswith(("output", "latents", "image", "decoded", "states", "pooled"))}  # fmt: skip
        print(json.dumps({"family": self.family, "bytes": size, "worst_float32_error":
                          max(self.errors.values()), "std": stds}))  # fmt: skip


@contextlib.contextmanager
def in_double(*models):
    for model in models:
        model.double()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        for model in models:
            model.float()


def as_dtype(values, dtype):
    if isinstance(values, dict):
        return {key: as_dtype(value, dtype) for key, value in values.items()}
    return values.to(dtype) if values.is_floating_point() else values


def dtype_of(model):
    return next(model.parameters()).dtype


def add_text(goldens, prefix, tokenizer, encoder):
    """Ids of the prompts, every hidden layer, last state, pooled vector. Returns all of them."""
    ids = tokenizer(PROMPTS, padding="max_length", max_length=tokenizer.model_max_length,
                    truncation=True, return_tensors="pt").input_ids  # fmt: skip
    goldens.add(f"{prefix}.ids", ids)

    def compute():
        out = encoder(ids, output_hidden_states=True)
        pooled = out.text_embeds if hasattr(out, "text_embeds") else out.pooler_output
        return {
            "states": out.last_hidden_state,
            "penultimate": out.hidden_states[-2],
            "clip_skip_1": final_of(encoder).final_layer_norm(out.hidden_states[-2]),
            "pooled": pooled,
        }

    values = goldens.add_checked(f"{prefix}.", compute, encoder)
    check_every_weight_matters(
        f"{goldens.family}: {prefix}", encoder,
        lambda: torch.cat([v.flatten(1) for k, v in compute().items() if k != "clip_skip_1"], 1))  # fmt: skip
    activation = encoder.config.hidden_act
    other = transformers.activations.ACT2FN["gelu" if activation == "quick_gelu" else "quick_gelu"]
    mlp = type(final_of(encoder).encoder.layers[0].mlp)
    check_planted(f"{goldens.family}: {prefix}", lambda: compute()["states"], {
        "activation": attributes(encoder, mlp, "", activation_fn=other),
        "eps of LayerNorm": attributes(encoder, nn.LayerNorm, "", eps=1e-6)})  # fmt: skip
    # The pooled vector is that of the first eos, not of its neighbours; the long prompt has no other.
    if not (ids[2] == tokenizer.eos_token_id).sum() == 1:
        raise SystemExit("the long prompt must fill all tokens")
    for offset in (-1, 1):
        eos = (ids[0] == tokenizer.eos_token_id).int().argmax() + offset
        wrong = values["states"][0, eos]
        if hasattr(encoder, "text_projection"):
            wrong = encoder.text_projection(wrong)
        if relative_difference(wrong, values["pooled"][0]) < 0.01:
            raise SystemExit(f"{goldens.family}: {prefix}: an eos off by one hardly matters")
    return values


def final_of(encoder):
    """The module that has the layers; CLIPTextModel itself since transformers 5.6."""
    return encoder.text_model if hasattr(encoder, "text_model") else encoder


BLOCKS = re.compile(r"((encoder|decoder)\.)?((down|up)_blocks\.\d+|mid_block)"
                    r"|(time|add)_embedding|conv_in")  # fmt: skip


def with_blocks(model, compute):
    """The tensors of `compute()`, and what blocks of the model give meanwhile."""
    seen = {}

    def record(name):
        def hook(_module, _args, output):
            seen[name] = (output[0] if isinstance(output, tuple) else output).clone()

        return hook

    hooks = [module.register_forward_hook(record(name)) for name, module in model.named_modules()
             if BLOCKS.fullmatch(name)]  # fmt: skip
    values = compute()
    for hook in hooks:
        hook.remove()
    return seen | values


def run_with_blocks(model, inputs):
    def compute():
        return {"output": model(**as_dtype(inputs, dtype_of(model)), return_dict=False)[0]}

    return with_blocks(model, compute)


def add_unet(goldens, model, states):
    """Two rows with the states of the first two prompts; once more at a size that does not halve."""
    generator = generator_of(goldens.family + " unet")
    for prefix, size in {"unet": None, "unet_7x5": (7, 5)}.items():
        inputs = unet_inputs(model, states, generator, size)
        for name, value in inputs.items():
            if name == "added_cond_kwargs":
                for key, tensor in value.items():
                    goldens.add(f"{prefix}.{key}", tensor)
            elif name != "encoder_hidden_states":
                goldens.add(f"{prefix}.{name}", value)
        compute = lambda inputs=inputs: run_with_blocks(model, inputs)  # noqa: E731
        if size:
            goldens.add_checked(f"{prefix}.", lambda: {"output": compute()["output"]}, model)
            continue
        goldens.add_checked(f"{prefix}.", compute, model)
        check_every_weight_matters(f"{goldens.family}: unet", model, lambda: compute()["output"])
        check_planted(f"{goldens.family}: unet", lambda: compute()["output"], {
            "eps of resnets": attributes(model, nn.GroupNorm, "resnets", eps=1e-6),
            "eps at the end": attributes(model, nn.GroupNorm, "conv_norm_out", eps=1e-6),
            "eps before transformers": attributes(model, nn.GroupNorm, "attentions", eps=1e-5),
            "eps of LayerNorm": attributes(model, nn.LayerNorm, "transformer", eps=1e-6),
            "halves of GEGLU": swapped_geglu(model),
        })  # fmt: skip


def add_vae(goldens, model, latent_std):
    generator = generator_of(goldens.family + " vae")
    channels = model.config.latent_channels
    latents = torch.randn(2, channels, 8, 8, generator=generator) * latent_std
    odd = torch.randn(1, channels, 5, 3, generator=generator) * latent_std
    image = torch.rand(2, 3, 16, 16, generator=generator) * 2 - 1
    goldens.add("vae.latents", latents)
    goldens.add("vae_5x3.latents", odd)
    goldens.add("vae.image", image)
    if isinstance(model, VQModel):
        check_codes(model, latents)
        check_codes(model, odd)

    def decode(z):
        return {"decoded": model.decode(z.to(dtype_of(model))).sample}

    def encode():
        x = image.to(dtype_of(model))
        if isinstance(model, AutoencoderKL):
            return {"moments": model._encode(x)}
        return {"encoded": model.encode(x).latents}

    goldens.add_checked("vae.", lambda: decode(latents), model)
    goldens.add_checked("vae_5x3.", lambda: with_blocks(model, lambda: decode(odd)), model)
    goldens.add_checked("vae.", lambda: with_blocks(model, encode), model)

    def both():
        values = decode(latents) | encode()
        return torch.cat([value.flatten(1) / value.std() for value in values.values()], 1)

    check_every_weight_matters(f"{goldens.family}: vae", model, both)
    if isinstance(model, AutoencoderTiny):
        return  # it has no norms
    for part in ("encoder", "decoder"):
        check_planted(f"{goldens.family}: vae", both, {
            f"eps of the {part}": attributes(model, nn.GroupNorm, part, eps=1e-5)})  # fmt: skip


def check_every_weight_matters(name, model, compute):
    reference = compute()
    for weight_name, weight in model.named_parameters():
        if weight_name.endswith(("to_k.bias", "k_proj.bias", "key.bias")):
            continue  # adds the same to every score of a query; softmax takes it away
        kept = weight.data.clone()
        weight.data.mul_(1.1)
        change = relative_difference(compute(), reference)
        weight.data.copy_(kept)
        if not change > 2e-4:  # the tolerance of the tests is 1e-4
            raise SystemExit(f"{name}: {weight_name} hardly matters, {change:.1e}; change the case")


@contextlib.contextmanager
def attributes(model, kind, where, **values):
    """For a while, modules of a kind whose path has `where` have other attributes."""
    modules = [m for path, m in model.named_modules() if isinstance(m, kind) and where in path]
    if not modules:
        raise SystemExit(f"nothing to plant an error in: {kind} {where}")
    kept = [{key: getattr(m, key) for key in values} for m in modules]
    for module in modules:
        for key, value in values.items():
            setattr(module, key, value)
    yield
    for module, old in zip(modules, kept):
        for key, value in old.items():
            setattr(module, key, value)


@contextlib.contextmanager
def swapped_geglu(model):
    layers = [m.proj for m in model.modules() if type(m).__name__ == "GEGLU"]

    def swap():
        for layer in layers:
            for tensor in (layer.weight.data, layer.bias.data):
                tensor.copy_(torch.cat(tensor.chunk(2)[::-1]))

    swap()
    yield
    swap()


def check_planted(name, compute, errors):
    """Errors that an implementation makes must be seen in the output."""
    reference = compute()
    for error, planted in errors.items():
        with planted:
            change = relative_difference(compute(), reference)
        if not change > 1e-3:
            raise SystemExit(f"{name}: {error} hardly matters, {change:.1e}; change the case")


def add_runs(goldens, pipe, arguments, prefix="run", steps=STEPS, schedulers=None, latents=True,
             seeded=False):  # fmt: skip
    """Whole runs from given noise: final latents and images in [0, 1]. Tensors among the arguments
    (diffusers_call) become goldens, the others facts. `latents`: whether it takes the noise as such.
    `schedulers`: classes by the engine's names, or a class with fields. `seeded`: some scheduler draws
    noise, the engine's; then every one of them must."""
    generator = generator_of(f"{goldens.family} {prefix}")
    channels = pipe.vae.config.latent_channels
    edges = [arguments.get(edge, pipe.unet.config.sample_size * pipe.vae_scale_factor)
             // pipe.vae_scale_factor for edge in ("height", "width")]  # fmt: skip
    noise = torch.randn(2, channels, *edges, generator=generator)
    goldens.add(f"{prefix}.noise", noise)
    arguments = {"num_inference_steps": steps, "guidance_scale": GUIDANCE, **arguments}
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        goldens.add(f"{prefix}.{name}", tensor)
    goldens.facts[prefix] = {k: v for k, v in arguments.items() if k not in tensors}
    models = [m for m in pipe.components.values() if isinstance(m, nn.Module)]
    pipe.set_progress_bar_config(disable=True)
    config = pipe.scheduler.config
    for name, kind in (schedulers or {"ddim": DDIMScheduler, "euler": EulerDiscreteScheduler}).items():
        kind, fields = kind if isinstance(kind, tuple) else (kind, {})

        def compute(kind=kind, fields=fields):
            dtype, values = dtype_of(pipe.unet), {}
            given = noise.to(dtype)
            for output in ("latent", "pt"):
                pipe.scheduler = kind.from_config(config, **fields)
                call = diffusers_call(pipe, {**arguments, **as_dtype(tensors, dtype)})
                call["output_type"] = output
                if latents:
                    call["latents"] = given
                draws = encoder_draws(pipe, arguments)
                with drawing(given, draws), evaluation_noise(pipe.scheduler) as drawn:
                    values["latents" if output == "latent" else "image"] = pipe(**call).images
                if seeded != bool(drawn):
                    raise SystemExit(f"{goldens.family}: {prefix}: {kind.__name__} drew {drawn}")
            return values

        goldens.add_checked(f"{prefix}.{name}.", compute, *models)
    pipe.scheduler = type(pipe.scheduler).from_config(config)


def diffusers_call(pipe, arguments):
    """The arguments of a pipeline of diffusers; of ours it does not know `chunks`, `guidance_start`
    and `guidance_stop`."""
    call = dict(arguments)
    chunks = call.pop("chunks", None)
    if chunks is not None:
        for name in ("prompt", "negative_prompt"):
            call[f"{name}_embeds"] = chunked_states(pipe, call.pop(name), chunks)
    start, stop = (call.pop(f"guidance_{end}", None) for end in ("start", "stop"))
    steps, scale = call["num_inference_steps"], call["guidance_scale"]
    first, last = int((start or 0) * steps), int((1 if stop is None else stop) * steps)

    def callback(pipe, step, _timestep, tensors):
        """As diffusers' documentation on callbacks does it: with a second row or without."""
        if step + 1 == first:
            pipe._guidance_scale = scale
            negative = pipe.encode_prompt(arguments["negative_prompt"], "cpu", 1, False)[0]
            tensors["prompt_embeds"] = torch.cat([negative, tensors["prompt_embeds"]])
        if step + 1 == last:
            pipe._guidance_scale = 0.0
            tensors["prompt_embeds"] = tensors["prompt_embeds"].chunk(2)[1]
        return tensors

    if first > 0:
        call["guidance_scale"] = 1.0
    if first > 0 or last < steps:
        call |= {"callback_on_step_end": callback,
                 "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}  # fmt: skip
    return call


def chunked_states(pipe, texts, chunks):
    """The states that docs/text.md describes: chunks of 75 tokens, each between begin and end, are
    read apart, and their states joined."""
    tokenizer, rows = pipe.tokenizer, []
    room = tokenizer.model_max_length - 2
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        parts = [ids[room * i : room * (i + 1)] for i in range(chunks)]
        if not parts[-1]:
            raise SystemExit(f"{len(ids)} tokens do not take {chunks} chunks; change the text")
        rows += [[tokenizer.bos_token_id, *part, tokenizer.eos_token_id]
                 + [tokenizer.pad_token_id] * (room - len(part)) for part in parts]  # fmt: skip
    states = pipe.text_encoder(torch.tensor(rows)).last_hidden_state
    return states.unflatten(0, (-1, chunks)).flatten(1, 2)


# The engine's noise of an encoded image, and of what a mask keeps of it (engine/core/philox.h).
ENCODER_DRAW, MASKED_ENCODER_DRAW = 0xFFFFFFFC, 0xFFFFFFFB
SEED = 1  # of the first image


def engine_noise(shape, draw, dtype):
    rows, channels, height, width = shape
    drawn = [philox_normal(SEED + row, draw, height * width * channels) for row in range(rows)]
    drawn = torch.from_numpy(np.stack(drawn)).reshape(rows, height, width, channels)
    return drawn.permute(0, 3, 1, 2).to(dtype)


@contextlib.contextmanager
def evaluation_noise(scheduler):
    """The scheduler draws what the engine draws for an image: the noise of evaluation 0, 1, ... Yields
    the numbers of the evaluations that drew."""
    place = sys.modules[type(scheduler).__module__]
    evaluations, drawn = itertools.count(), []
    step, kept = scheduler.step, getattr(place, "randn_tensor", None)

    @functools.wraps(step)  # pipelines look at its parameters
    def counted(*args, **kwargs):
        evaluation = next(evaluations)

        def draw(shape, dtype=None, **_):
            drawn.append(evaluation)
            return engine_noise(shape, evaluation, dtype or torch.get_default_dtype())

        if kept:
            place.randn_tensor = draw
        return step(*args, **kwargs)

    scheduler.step = counted
    yield drawn
    scheduler.step = step
    if kept:
        place.randn_tensor = kept
    if len(set(drawn)) != len(drawn):
        raise SystemExit(f"{type(scheduler).__name__} drew twice in one evaluation: {drawn}")


def encoder_draws(pipe, arguments):
    """In the order in which the pipeline samples. A model that reads the mask and starts from noise
    has no use for the whole image."""
    whole = pipe.unet.config.in_channels != 9 or arguments.get("strength", 1) < 1
    return [ENCODER_DRAW] * whole + [MASKED_ENCODER_DRAW]


@contextlib.contextmanager
def drawing(noise, draws):
    """Whatever is drawn is given: the noise of the run, and the engine's where an image is encoded."""
    draws = iter(draws)

    def sampled(self, generator=None):
        return self.mean + self.std * engine_noise(self.mean.shape, next(draws), self.mean.dtype)

    pipelines = diffusers.pipelines
    places = [pipelines.stable_diffusion.pipeline_stable_diffusion_img2img,
              pipelines.stable_diffusion.pipeline_stable_diffusion_inpaint,
              pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl_img2img,
              pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl_inpaint,
              pipelines.latent_consistency_models.pipeline_latent_consistency_img2img]  # fmt: skip
    kept = [place.randn_tensor for place in places]
    distribution = diffusers.models.autoencoders.vae.DiagonalGaussianDistribution
    sample = distribution.sample
    for place in places:
        place.randn_tensor = lambda shape, **_: noise.expand(shape)
    distribution.sample = sampled
    yield
    distribution.sample = sample
    for place, function in zip(places, kept):
        place.randn_tensor = function


def picture_and_mask():
    """Twice an image in [0, 1] and a mask, 1 where it is drawn anew, which is not aligned with latents."""
    generator = generator_of("picture")
    small = torch.rand(1, 3, 4, 4, generator=generator)
    image = nn.functional.interpolate(small, scale_factor=4, mode="bilinear").clamp(0, 1)
    mask = torch.zeros(1, 1, 16, 16)
    mask[..., 3:12, 5:14] = 1
    return image.repeat(2, 1, 1, 1), mask.repeat(2, 1, 1, 1)


# --- Families --------------------------------------------------------------------------------


def make_sd1(folder, clip):
    """SD 1.x: heads by number, convolutions around transformers, quick GELU, old names."""
    goldens = Goldens("sd1")
    tokenizer = write_tokenizer(folder / "tokenizer", clip, "<|endoftext|>")
    text = text_encoder("sd1 text")
    model = unet("sd1", 32, attention_head_dim=2)
    coder = vae("sd1", 32.0)
    save_half(text, folder / "text_encoder")
    prefix_text_model(folder / "text_encoder")
    save_half(model, folder / "unet")
    save_half(coder, folder / "vae")
    old_attention_names(folder / "vae")
    DDIMScheduler(**SCHEDULE).save_pretrained(folder / "scheduler")
    write_index(folder, "StableDiffusionPipeline", **STABLE_DIFFUSION)

    states = add_text(goldens, "text", tokenizer, text)["states"]
    add_unet(goldens, model, states)
    add_vae(goldens, coder, 32.0)
    pipe = load(diffusers.StableDiffusionPipeline, folder, text=text, unet=model, vae=coder)
    add_runs(goldens, pipe, PROMPTED)
    image, mask = picture_and_mask()
    other = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    add_runs(goldens, other, PROMPTED | {"image": image, "strength": 0.75},
             "run_img2img", latents=False)  # fmt: skip
    other = diffusers.StableDiffusionInpaintPipeline(**pipe.components, requires_safety_checker=False)
    several = {"ddim": DDIMScheduler, "euler": EulerDiscreteScheduler, "heun": HeunDiscreteScheduler}
    add_runs(goldens, other, PROMPTED | SIZED | {"image": image, "mask_image": mask, "strength": 1.0},
             "run_inpaint", schedulers=several | {"pndm": PNDMScheduler})  # fmt: skip
    add_runs(goldens, other, PROMPTED | SIZED | {"image": image, "mask_image": mask, "strength": 0.75},
             "run_inpaint_75", latents=False, schedulers=several)  # fmt: skip
    add_runs(goldens, pipe, PROMPTED | {"guidance_stop": 0.5}, "run_interval",
             schedulers={"ddim": DDIMScheduler})  # fmt: skip
    goldens.save(folder)


def make_sd2(folder, clip):
    """SD 2.x: heads of one width, linear layers around transformers, GELU, v-prediction, pad `!`."""
    goldens = Goldens("sd2")
    tokenizer = write_tokenizer(folder / "tokenizer", clip, "!")
    text = text_encoder("sd2 text", hidden_act="gelu", legacy_eos=False)
    model = unet("sd2", 32, attention_head_dim=[2, 3], use_linear_projection=True)
    coder = vae("sd2", 9.0)
    save_half(text, folder / "text_encoder")
    save_half(model, folder / "unet")
    save_half(coder, folder / "vae")
    DDIMScheduler(prediction_type="v_prediction", **SCHEDULE).save_pretrained(folder / "scheduler")
    write_index(folder, "StableDiffusionPipeline", **STABLE_DIFFUSION)

    states = add_text(goldens, "text", tokenizer, text)["states"]
    add_unet(goldens, model, states)
    add_vae(goldens, coder, 9.0)
    pipe = load(diffusers.StableDiffusionPipeline, folder, text=text, unet=model, vae=coder)
    add_runs(goldens, pipe, PROMPTED)
    add_runs(goldens, pipe, PROMPTED | {"guidance_rescale": 0.7}, "run_rescale",
             schedulers={"ddim": DDIMScheduler})  # fmt: skip
    goldens.save(folder)


TEXT_TIME = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8,
             "projection_class_embeddings_input_dim": 20 + 6 * 8}  # fmt: skip
SDXL_UNET = dict(
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=[2, 3],
    transformer_layers_per_block=[1, 2], use_linear_projection=True, **TEXT_TIME)  # fmt: skip

SMALL = {"block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": [1, 2],
         "transformer_layers_per_block": 1}  # fmt: skip


def make_sdxl(folder, clip):
    """SDXL: two encoders, text_time, a level of two transformers, a first level without attention."""
    goldens = Goldens("sdxl")
    tokenizers = [write_tokenizer(folder / name, clip, pad)
                  for name, pad in (("tokenizer", "<|endoftext|>"), ("tokenizer_2", "!"))]  # fmt: skip
    encoders = [
        text_encoder("sdxl text", hidden_size=16, intermediate_size=32, num_attention_heads=2,
                     projection_dim=16),
        text_encoder("sdxl text 2", hidden_size=24, intermediate_size=48, num_attention_heads=3,
                     hidden_act="gelu", projection=20),
    ]  # fmt: skip
    values = [add_text(goldens, prefix, tokenizer, encoder)
              for prefix, tokenizer, encoder in zip(("text", "text_2"), tokenizers, encoders)]  # fmt: skip
    states = torch.cat([value["penultimate"] for value in values], dim=-1)
    model = unet("sdxl", 40, states_std=states.std().item(), **SDXL_UNET)
    coder = vae("sdxl", 50.0, scaling_factor=0.13025, force_upcast=True)
    for encoder, name in zip(encoders, ("text_encoder", "text_encoder_2")):
        save_half(encoder, folder / name)
    # One tokenizer as transformers 5 saves it: everything in tokenizer.json.
    shutil.rmtree(folder / "tokenizer")
    tokenizers[0].save_pretrained(folder / "tokenizer")
    save_half(model, folder / "unet")
    save_half(coder, folder / "vae")
    (folder / "scheduler").mkdir()
    write_json(folder / "scheduler" / "scheduler_config.json", {  # as published
        "_class_name": "EulerDiscreteScheduler", "_diffusers_version": "0.19.0.dev0", **SCHEDULE,
        "interpolation_type": "linear", "num_train_timesteps": 1000,
        "prediction_type": "epsilon", "sample_max_value": 1.0, "skip_prk_steps": True,
        "timestep_spacing": "leading", "trained_betas": None, "use_karras_sigmas": False})  # fmt: skip
    index = {key: value for key, value in STABLE_DIFFUSION.items() if "safety" not in key}
    write_index(folder, "StableDiffusionXLPipeline", **index | {
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "scheduler": ["diffusers", "EulerDiscreteScheduler"],
        "image_encoder": [None, None], "force_zeros_for_empty_prompt": True})  # fmt: skip

    add_unet(goldens, model, states)
    add_vae(goldens, coder, 50.0)
    pipe = load(diffusers.StableDiffusionXLPipeline, folder, text=encoders[0], text_2=encoders[1],
                unet=model, vae=coder)  # fmt: skip
    sizes = {"original_size": (24, 20), "crops_coords_top_left": (2, 4), "target_size": (16, 16)}
    add_runs(goldens, pipe, PROMPTED | SIZED | sizes)
    # Without a negative prompt: zeros, not the states of "".
    unset = {key: value for key, value in PROMPTED.items() if key != "negative_prompt"}
    add_runs(goldens, pipe, unset | SIZED, "run_unset", schedulers={"ddim": DDIMScheduler})
    add_runs(goldens, pipe, unset | SIZED | {"negative_prompt": ["", ""]}, "run_empty",
             schedulers={"ddim": DDIMScheduler})  # fmt: skip
    image, mask = picture_and_mask()
    other = diffusers.StableDiffusionXLInpaintPipeline(**pipe.components)
    add_runs(goldens, other, PROMPTED | SIZED | {"image": image, "mask_image": mask,
                                                 "strength": 0.75},
             "run_inpaint", latents=False)  # fmt: skip
    goldens.save(folder)


def make_turbo(folder, family, kind, published, name):
    """A family with the scheduler of a published model that was distilled to 1 step without guidance."""
    goldens = Goldens(folder.name)
    index = json.loads((folder.parent / family / "model_index.json").read_text())
    for part, of in index.items():
        if part != "scheduler" and isinstance(of, list) and all(of):
            share(folder, part, family)
    shutil.copytree(PUBLISHED / published / "scheduler", folder / "scheduler")
    scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    scheduler = scheduler["_class_name"]
    write_json(folder / "model_index.json", index | {"scheduler": ["diffusers", scheduler]})
    pipe = load(kind, folder)
    arguments = {"prompt": PROMPTS[:2], "guidance_scale": 0.0} | SIZED
    options = {"schedulers": {name: getattr(diffusers, scheduler)}, "seeded": "Ancestral" in scheduler}
    add_runs(goldens, pipe, arguments, steps=1, **options)
    add_runs(goldens, pipe, arguments, "run_4_steps", **options)
    goldens.save(folder)


def make_sd2_turbo(folder, clip):
    """SD-Turbo, which was made from SD 2.1."""
    make_turbo(folder, "sd2", diffusers.StableDiffusionPipeline, "sd-turbo", "euler")


def make_sdxl_turbo(folder, clip):
    """SDXL-Turbo."""
    make_turbo(folder, "sdxl", diffusers.StableDiffusionXLPipeline, "sdxl-turbo", "euler_ancestral")


def make_sd2_saved(folder, clip):
    """sd2 as a pipeline of diffusers saves it, with nothing changed. Files that sd2 has too are links."""
    family = folder.parent / "sd2"
    with contextlib.chdir(folder.parent):  # configs tell what they were loaded from
        pipe = diffusers.StableDiffusionPipeline.from_pretrained("sd2", torch_dtype=torch.float16)
        pipe.save_pretrained(folder.name)
    for file in folder.glob("*/*"):
        other = family / file.relative_to(folder)
        file.chmod(0o644)
        if other.exists() and other.read_bytes() == file.read_bytes():
            file.unlink()
            os.symlink(Path("..") / ".." / "sd2" / file.relative_to(folder), file)


def make_lcm(folder, clip):
    """Latent consistency: the guidance scale goes into the time embedding, and no row is without."""
    goldens = Goldens("lcm")
    for part in ("tokenizer", "text_encoder", "vae"):
        share(folder, part, "sd1")
    model = unet("lcm", 32, time_cond_proj_dim=16)
    save_half(model, folder / "unet")
    LCMScheduler(**SCHEDULE | {"steps_offset": 0, "set_alpha_to_one": True}).save_pretrained(
        folder / "scheduler")  # fmt: skip
    write_index(folder, "LatentConsistencyModelPipeline",
                **STABLE_DIFFUSION | {"scheduler": ["diffusers", "LCMScheduler"]})  # fmt: skip
    add_unet(goldens, model, sd1_states(folder))
    pipe = load(diffusers.LatentConsistencyModelPipeline, folder, unet=model)
    embed_guidance_exactly(pipe)
    prompts = {"prompt": PROMPTS[:2]}
    lcm = {"lcm": LCMScheduler}
    add_runs(goldens, pipe, prompts | SIZED, steps=1, schedulers=lcm)
    add_runs(goldens, pipe, prompts | SIZED, "run_4_steps", schedulers=lcm, seeded=True)
    image, _ = picture_and_mask()
    other = diffusers.LatentConsistencyModelImg2ImgPipeline(
        **pipe.components, requires_safety_checker=False)  # fmt: skip
    embed_guidance_exactly(other)
    # This pipeline spreads all steps over the noise levels of the strength, where others leave steps
    # out. With these numbers both ways lead over the same levels.
    add_runs(goldens, other, prompts | {"image": image, "strength": 0.5}, "run_img2img",
             schedulers=lcm, latents=False, seeded=True)  # fmt: skip
    goldens.facts["run_img2img"]["steps_before_strength"] = 2 * STEPS
    goldens.save(folder)


def make_act_gelu(folder, clip):
    """A UNet alone whose act_fn is not SiLU, but add_embedding's activation is."""
    goldens = Goldens("act_gelu")
    model = unet("act_gelu", 32, **SMALL, act_fn="gelu", **TEXT_TIME)
    save_half(model, folder / "unet")
    add_unet(goldens, model, sd1_states(folder))
    inputs = unet_inputs(model, sd1_states(folder), generator_of("act_gelu planted"))
    output = lambda: run_with_blocks(model, inputs)["output"]  # noqa: E731
    silu, gelu = nn.SiLU(), nn.GELU()
    check_planted("act_gelu: unet", output, {
        "SiLU in time_embedding": attributes(model, TimestepEmbedding, "time_embedding", act=silu),
        "SiLU at the end": attributes(model, UNet2DConditionModel, "", conv_act=silu),
        "SiLU in resnets": attributes(model, ResnetBlock2D, "", nonlinearity=silu),
        "GELU in add_embedding": attributes(model, TimestepEmbedding, "add_embedding", act=gelu),
    })  # fmt: skip
    goldens.save(folder)


def embed_guidance_exactly(pipe):
    pipe.get_guidance_scale_embedding = lambda w, embedding_dim: guidance_embedding(
        w + 1, embedding_dim)  # fmt: skip


def make_sd1_runs(folder, clip):
    """More runs of sd1."""
    goldens = Goldens("sd1_runs")
    for part in ("tokenizer", "text_encoder", "unet", "vae", "scheduler"):
        share(folder, part, "sd1")
    write_index(folder, "StableDiffusionPipeline", **STABLE_DIFFUSION)
    pipe = load(diffusers.StableDiffusionPipeline, folder)
    ddim = {"ddim": DDIMScheduler}
    # diffusers reads text_encoder.text_model, which transformers since 5.6 does not have.
    CLIPTextModel.text_model = property(lambda self: self)
    add_runs(goldens, pipe, PROMPTED | {"clip_skip": 1}, "run_clip_skip", schedulers=ddim)
    del CLIPTextModel.text_model
    add_runs(goldens, pipe, PROMPTED | {"eta": 0.3}, "run_eta", seeded=True, schedulers={
        "ddim": DDIMScheduler, "tcd": TCDScheduler})  # fmt: skip
    add_runs(goldens, pipe, PROMPTED, "run_noise", seeded=True, schedulers={
        "ddpm": DDPMScheduler, "euler_ancestral": EulerAncestralDiscreteScheduler,
        "kdpm2_ancestral": KDPM2AncestralDiscreteScheduler, "lcm": LCMScheduler,
        "sa_solver": SASolverScheduler,
        "dpm_solver_sde": (DPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++"}),
    })  # fmt: skip
    image, mask = picture_and_mask()
    other = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    add_runs(goldens, other, PROMPTED | {"image": image, "strength": 0.5}, "run_img2img",
             schedulers={"lcm": LCMScheduler}, latents=False, seeded=True)  # fmt: skip
    add_odd_run(goldens, pipe, PROMPTED)
    other = diffusers.StableDiffusionInpaintPipeline(**pipe.components, requires_safety_checker=False)
    add_runs(goldens, other, PROMPTED | SIZED | {"image": image, "mask_image": mask, "strength": 0.75},
             "run_inpaint", latents=False, seeded=True, schedulers={
                 "lcm": LCMScheduler, "kdpm2_ancestral": KDPM2AncestralDiscreteScheduler})  # fmt: skip
    add_odd_run(goldens, other, PROMPTED | {"strength": 0.75, "image": image[..., :14, :10],
                                            "mask_image": mask[..., 2:, :10]},
                "run_odd_inpaint", latents=False)  # fmt: skip
    # One text more than fills the chunks.
    texts = {"prompt": ["a red apple on the table! " * 10, PROMPTS[2]],
             "negative_prompt": [f"{NEGATIVE} of apples, " * 8, "two apples! " * 30]}  # fmt: skip
    add_runs(goldens, pipe, texts | {"chunks": 2}, "run_chunks", schedulers=ddim)
    add_runs(goldens, pipe, PROMPTED | {"guidance_start": 0.5}, "run_late", schedulers=ddim)
    add_runs(goldens, pipe, PROMPTED | {"guidance_start": 0.25, "guidance_stop": 0.75},
             "run_interval", schedulers=ddim)  # fmt: skip
    goldens.save(folder)


def make_sd1_old(folder, clip):
    """sd1 with a scheduler config that StableDiffusionPipeline corrects, and what its constructors and
    others change in configs that are older than their fields."""
    goldens = Goldens("sd1_old")
    for part in ("tokenizer", "text_encoder", "unet", "vae"):
        share(folder, part, "sd1")
    old = SCHEDULE | {"clip_sample": True, "steps_offset": 0, "timestep_spacing": "leading"}
    DDIMScheduler(**old).save_pretrained(folder / "scheduler")
    write_index(folder, "StableDiffusionPipeline", **STABLE_DIFFUSION)
    pipe = load(diffusers.StableDiffusionPipeline, folder)
    add_runs(goldens, pipe, PROMPTED)
    goldens.facts["corrections"] = [
        correction(pipeline, name, fields)
        for pipeline in ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline",
                         "StableDiffusionInpaintPipeline", "StableDiffusionInstructPix2PixPipeline",
                         "StableDiffusionXLPipeline", "LatentConsistencyModelPipeline")
        for name in (SCHEDULERS if pipeline == "StableDiffusionPipeline" else SCHEDULERS[:3])
        for fields in ({}, {"steps_offset": 0, "clip_sample": True, "skip_prk_steps": False},
                       {"steps_offset": 7, "clip_sample": False, "skip_prk_steps": True})
    ]  # fmt: skip
    goldens.facts["unet_corrections"] = [
        unet_correction(pipeline, version, size)
        for pipeline in ("StableDiffusionPipeline", "StableDiffusionInpaintPipeline",
                         "StableDiffusionInstructPix2PixPipeline")
        for version, size in (("0.8.1", 32), ("0.9.0.dev0", 32), ("0.6.0.dev0", 32), ("0.6.0", 96),
                              ("0.10.2", 32), ("0.42.1", 32), (None, 32))
    ]  # fmt: skip
    goldens.save(folder)


# Those that the engine knows, but for two that need other packages.
SCHEDULERS = [
    "DDPMScheduler", "DDIMScheduler", "PNDMScheduler", "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler", "HeunDiscreteScheduler",
    "DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "LCMScheduler", "EDMEulerScheduler",
    "EDMDPMSolverMultistepScheduler", "DEISMultistepScheduler",
    "KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "TCDScheduler",
    "DPMSolverSinglestepScheduler", "FlowMatchEulerDiscreteScheduler",
    "CMStochasticIterativeScheduler", "SASolverScheduler", "ScoreSdeVeScheduler",
]  # fmt: skip


def construct(pipeline, scheduler=None, unet=None):
    """A pipeline that has nothing else."""
    kind = getattr(diffusers, pipeline)
    parts = dict.fromkeys(inspect.signature(kind).parameters)
    kind(**parts | {"scheduler": scheduler, "unet": unet, "requires_safety_checker": False}
         if "requires_safety_checker" in parts else parts | {"scheduler": scheduler, "unet": unet})


def correction(pipeline, name, fields):
    scheduler = getattr(diffusers, name).from_config(fields)
    before = dict(scheduler.config)
    construct(pipeline, scheduler=scheduler)
    changed = {key: value for key, value in scheduler.config.items()
               if not key.startswith("_") and before.get(key) != value}  # fmt: skip
    return {"pipeline": pipeline, "config": {"_class_name": name, **fields}, "changed": changed}


def unet_correction(pipeline, version, size):
    model = UNet2DConditionModel.from_config({
        "sample_size": size, "block_out_channels": [8], "norm_num_groups": 4,
        "down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"],
        **({"_diffusers_version": version} if version else {})})  # fmt: skip
    construct(pipeline, unet=model)
    config = {"sample_size": size} | ({"_diffusers_version": version} if version else {})
    changed = {} if model.config.sample_size == size else {"sample_size": model.config.sample_size}
    return {"pipeline": pipeline, "config": config, "changed": changed}


def add_odd_run(goldens, pipe, arguments, prefix="run_odd", **options):
    """14 x 10 pixels: latents of 7 x 5, which do not halve. diffusers' pipelines want multiples of 8,
    of which the published autoencoders, whose factor is 8, make such latents too."""
    pipe.check_inputs = lambda *args, **kwargs: None
    add_runs(goldens, pipe, arguments | {"height": 14, "width": 10}, prefix,
             schedulers={"ddim": DDIMScheduler}, **options)  # fmt: skip


def make_sdxl_runs(folder, clip):
    """More runs of sdxl."""
    goldens = Goldens("sdxl_runs")
    for part in ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", "unet", "vae",
                 "scheduler"):  # fmt: skip
        share(folder, part, "sdxl")
    shutil.copy(folder.parent / "sdxl" / "model_index.json", folder)
    pipe = load(diffusers.StableDiffusionXLPipeline, folder)
    ddim = {"ddim": DDIMScheduler}
    texts = {"prompt_2": ["two apples!", "thin threads"], "negative_prompt_2": ["", "in the oven"]}
    add_runs(goldens, pipe, PROMPTED | SIZED | texts, "run_second_texts", schedulers=ddim)
    add_runs(goldens, pipe, PROMPTED | SIZED | texts | {"clip_skip": 1}, "run_clip_skip",
             schedulers=ddim)  # fmt: skip
    add_runs(goldens, pipe, PROMPTED | SIZED, "run_noise", seeded=True, schedulers={
        "euler_ancestral": EulerAncestralDiscreteScheduler})  # fmt: skip
    image, _ = picture_and_mask()
    other = diffusers.StableDiffusionXLImg2ImgPipeline(**pipe.components)
    add_runs(goldens, other, PROMPTED | {"image": image, "strength": 0.75}, "run_img2img",
             latents=False)  # fmt: skip
    add_odd_run(goldens, pipe, PROMPTED)
    goldens.save(folder)


def make_sdxl_lcm(folder, clip):
    """SDXL distilled to latent consistency: text_time and a guidance scale in one time embedding."""
    goldens = Goldens("sdxl_lcm")
    for part in ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", "vae"):
        share(folder, part, "sdxl")
    model = unet("sdxl_lcm", 40, **SDXL_UNET | SMALL, time_cond_proj_dim=16)
    save_half(model, folder / "unet")
    LCMScheduler(**SCHEDULE | {"set_alpha_to_one": True}).save_pretrained(folder / "scheduler")
    index = json.loads((folder.parent / "sdxl" / "model_index.json").read_text())
    write_json(folder / "model_index.json", index | {"scheduler": ["diffusers", "LCMScheduler"]})
    pipe = load(diffusers.StableDiffusionXLPipeline, folder, unet=model)
    embed_guidance_exactly(pipe)
    prompts = {"prompt": PROMPTS[:2]}
    sizes = {"original_size": (24, 20), "crops_coords_top_left": (2, 4), "target_size": (16, 16)}
    add_runs(goldens, pipe, prompts | SIZED | sizes, schedulers={"lcm": LCMScheduler}, seeded=True)
    check_small_xl_unet("sdxl_lcm", model)
    image, _ = picture_and_mask()
    other = diffusers.StableDiffusionXLImg2ImgPipeline(**pipe.components)
    embed_guidance_exactly(other)
    add_runs(goldens, other, prompts | {"image": image, "strength": 0.75}, "run_img2img",
             schedulers={"lcm": LCMScheduler}, latents=False, seeded=True)  # fmt: skip
    goldens.save(folder)


def make_sdxl_inpaint(folder, clip):
    """SDXL's inpainting with nine channels. Its default strength leaves out one step."""
    goldens = Goldens("sdxl_inpaint")
    for part in ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", "vae", "scheduler"):
        share(folder, part, "sdxl")
    model = unet("sdxl_inpaint", 40, **SDXL_UNET | SMALL, in_channels=9)
    save_half(model, folder / "unet")
    index = json.loads((folder.parent / "sdxl" / "model_index.json").read_text())
    write_json(folder / "model_index.json",
               index | {"_class_name": "StableDiffusionXLInpaintPipeline"})  # fmt: skip
    check_small_xl_unet("sdxl_inpaint", model)
    pipe = load(diffusers.StableDiffusionXLInpaintPipeline, folder, unet=model)
    image, mask = picture_and_mask()
    arguments = PROMPTED | SIZED | {"image": image, "mask_image": mask}
    add_runs(goldens, pipe, arguments | {"strength": 1.0})
    add_runs(goldens, pipe, arguments | {"strength": 0.9999}, "run_default_strength", latents=False,
             schedulers={"euler": EulerDiscreteScheduler})  # fmt: skip
    goldens.save(folder)


def check_small_xl_unet(name, model):
    states = torch.randn(2, 77, 40, generator=generator_of(f"{name} states"))
    inputs = unet_inputs(model, states, generator_of(f"{name} inputs"))
    check_every_weight_matters(f"{name}: unet", model,
                               lambda: run_with_blocks(model, inputs)["output"])  # fmt: skip


def make_inpaint(folder, clip):
    """Inpainting with nine channels: latents, mask, latents of the masked image."""
    goldens = Goldens("inpaint")
    for part in ("tokenizer", "text_encoder", "vae", "scheduler"):
        share(folder, part, "sd1")
    model = unet("inpaint", 32, in_channels=9)
    save_half(model, folder / "unet")
    write_index(folder, "StableDiffusionInpaintPipeline", **STABLE_DIFFUSION)
    add_unet(goldens, model, sd1_states(folder))
    pipe = load(diffusers.StableDiffusionInpaintPipeline, folder, unet=model)
    image, mask = picture_and_mask()
    add_runs(goldens, pipe,
             PROMPTED | SIZED | {"image": image, "mask_image": mask, "strength": 1.0})  # fmt: skip
    add_runs(goldens, pipe,
             PROMPTED | SIZED | {"image": image, "mask_image": mask, "strength": 0.75},
             "run_75", latents=False)  # fmt: skip
    goldens.save(folder)


def make_pix2pix(folder, clip):
    """InstructPix2Pix: eight channels, three rows."""
    goldens = Goldens("pix2pix")
    for part in ("tokenizer", "text_encoder", "vae", "scheduler"):
        share(folder, part, "sd1")
    model = unet("pix2pix", 32, in_channels=8)
    save_half(model, folder / "unet")
    write_index(folder, "StableDiffusionInstructPix2PixPipeline", **STABLE_DIFFUSION)
    add_unet(goldens, model, sd1_states(folder))
    pipe = load(diffusers.StableDiffusionInstructPix2PixPipeline, folder, unet=model)
    image, _ = picture_and_mask()
    add_runs(goldens, pipe, PROMPTED | {"image": image,
                                        "image_guidance_scale": 1.5})  # fmt: skip
    add_runs(goldens, pipe, PROMPTED | {"image": image,
                                        "image_guidance_scale": 1.0}, "run_two_rows")  # fmt: skip
    goldens.save(folder)


def make_tiny_vae(folder, clip):
    """sd1 with an AutoencoderTiny."""
    goldens = Goldens("tiny_vae")
    for part in ("tokenizer", "text_encoder", "unet", "scheduler"):
        share(folder, part, "sd1")
    model = AutoencoderTiny(
        encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 2), num_decoder_blocks=(2, 1))  # fmt: skip
    randomise(model, generator_of("tiny_vae"))
    latents = torch.randn(2, 4, 8, 8, generator=generator_of("tiny_vae scale")) * 3
    for _ in range(2):
        scale_layer(model.decoder.layers[-1], 0.4 / model.decode(latents).sample.std().item())
    save_half(model, folder / "vae")
    write_index(folder, "StableDiffusionPipeline",
                **STABLE_DIFFUSION | {"vae": ["diffusers", "AutoencoderTiny"]})  # fmt: skip
    add_vae(goldens, model, 3.0)
    pipe = load(diffusers.StableDiffusionPipeline, folder, vae=model)
    add_runs(goldens, pipe, PROMPTED)
    image, _ = picture_and_mask()
    other = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    add_runs(goldens, other, PROMPTED | {"image": image, "strength": 0.75},
             "run_img2img", latents=False)  # fmt: skip
    goldens.save(folder)


def make_ldm(folder, clip):
    """LDM: an unconditional UNet2DModel in the latents of a VQModel."""
    goldens = Goldens("ldm")
    config = {"sample_size": 8, "in_channels": 3, "out_channels": 3, "layers_per_block": 1,
              "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
              "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "block_out_channels": (16, 24),
              "attention_head_dim": 8, "norm_num_groups": 8}  # fmt: skip
    model = UNet2DModel(**config)
    generator = generator_of("ldm")
    randomise(model, generator)
    sample = torch.randn(2, 3, 8, 8, generator=generator)
    for _ in range(2):
        scale_layer(model.conv_out, 1 / model(sample, torch.tensor([17, 803])).sample.std().item())
    latent_std = 32.0
    coder = VQModel(
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, latent_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        num_vq_embeddings=48, sample_size=16)  # fmt: skip
    randomise(coder, generator)
    scale_layer(coder.post_quant_conv, 1 / latent_std)
    # This seed leaves no pixel between two codes (check_codes).
    codes = torch.randn(48, 3, generator=generator_of("ldm codes 3")) * latent_std
    coder.quantize.embedding.weight.copy_(codes)
    round_weights(coder.quantize)
    for _ in range(2):
        scale_layer(coder.decoder.conv_out,
                    0.4 / coder.decode(sample * latent_std).sample.std().item())  # fmt: skip
    save_half(model, folder / "unet")
    save_half(coder, folder / "vqvae")
    published = json.loads((folder / "vqvae" / "config.json").read_text())
    del published["scaling_factor"]  # the default, 0.18215
    write_json(folder / "vqvae" / "config.json", published)
    schedule = SCHEDULE | {"beta_start": 0.0015, "beta_end": 0.0195, "steps_offset": 0}
    DDIMScheduler(**schedule).save_pretrained(folder / "scheduler")
    write_index(folder, "LDMPipeline", unet=["diffusers", "UNet2DModel"],
                vqvae=["diffusers", "VQModel"], scheduler=["diffusers", "DDIMScheduler"])  # fmt: skip

    goldens.add("unet.sample", sample)
    goldens.add("unet.timestep", torch.tensor([17, 803]))
    inputs = {"sample": sample, "timestep": torch.tensor([17, 803])}
    goldens.add_checked("unet.", lambda: run_with_blocks(model, inputs), model)
    check_every_weight_matters("ldm: unet", model, lambda: run_with_blocks(model, inputs)["output"])
    add_vae(goldens, coder, latent_std)

    pipe = diffusers.LDMPipeline.from_pretrained(folder)
    check_loaded(pipe, unet=model, vqvae=coder)
    noise = torch.randn(2, 3, 8, 8, generator=generator_of("ldm run"))
    goldens.add("run.noise", noise)
    goldens.facts["run"] = {"num_inference_steps": STEPS}

    def compute():
        scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
        scheduler.set_timesteps(STEPS)
        latents = noise.to(dtype_of(pipe.unet))
        for t in scheduler.timesteps:
            latents = scheduler.step(pipe.unet(latents, t).sample, t, latents).prev_sample
        check_codes(pipe.vqvae, latents / pipe.vqvae.config.scaling_factor)
        decoded = pipe.vqvae.decode(latents / pipe.vqvae.config.scaling_factor).sample
        return {"latents": latents, "image": (decoded / 2 + 0.5).clamp(0, 1)}

    values = goldens.add_checked("run.ddim.", compute, pipe.unet, pipe.vqvae)
    pipe.set_progress_bar_config(disable=True)
    theirs = pipe(batch_size=2, generator=generator_of("ldm run"), num_inference_steps=STEPS,
                  output_type="np").images  # fmt: skip
    if not torch.equal(torch.from_numpy(theirs).permute(0, 3, 1, 2), values["image"]):
        raise SystemExit("ldm: the run differs from LDMPipeline's")
    goldens.save(folder)


def check_codes(model, latents):
    """Rounding must not change which code of a VQModel is the nearest."""
    codes = model.quantize.embedding.weight
    pixels = latents.permute(0, 2, 3, 1).reshape(-1, codes.shape[1])
    nearest = torch.cdist(pixels, codes).sort(dim=1).values
    margin = ((nearest[:, 1] - nearest[:, 0]) / nearest[:, 1]).min().item()
    if margin < 1e-3:
        raise SystemExit(f"a pixel is between two codes, {margin:.1e}; change the case")


def sd1_states(folder):
    """The text states of the family whose encoder is shared."""
    return load_file(folder.parent / "sd1" / "goldens.safetensors")["text.states"]


def load(kind, folder, **models):
    """The pipeline as diffusers loads it."""
    pipe = kind.from_pretrained(folder, torch_dtype=torch.float32)
    check_loaded(pipe, **models)
    return pipe


def check_loaded(pipe, **models):
    """What is on disk is what was computed with."""
    loaded = {"text": "text_encoder", "text_2": "text_encoder_2"}
    for name, model in models.items():
        ours = dict(model.named_parameters())
        theirs = dict(getattr(pipe, loaded.get(name, name)).named_parameters())
        if ours.keys() != theirs.keys() or any(not torch.equal(ours[k], theirs[k]) for k in ours):
            raise SystemExit(f"{name} is not loaded as it was saved")


FAMILIES = {"sd1": make_sd1, "sd2": make_sd2, "sdxl": make_sdxl, "lcm": make_lcm,
            "act_gelu": make_act_gelu, "inpaint": make_inpaint, "pix2pix": make_pix2pix, "tiny_vae": make_tiny_vae,
            "ldm": make_ldm, "sd1_old": make_sd1_old, "sd1_runs": make_sd1_runs, "sdxl_runs": make_sdxl_runs,
            "sdxl_lcm": make_sdxl_lcm, "sdxl_inpaint": make_sdxl_inpaint,
            "sd2_turbo": make_sd2_turbo, "sdxl_turbo": make_sdxl_turbo,
            "sd2_saved": make_sd2_saved}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=LATENT)
    parser.add_argument("--clip", type=Path, default=CLIP)
    parser.add_argument("--only", help="comma-separated families")
    args = parser.parse_args()
    for module in (diffusers, transformers):
        if module.__version__ != VERSIONS[module.__name__]:
            raise SystemExit(f"{module.__name__} is {module.__version__}, not {VERSIONS[module.__name__]}")
    warnings.filterwarnings("ignore")
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for name in args.only.split(",") if args.only else FAMILIES:
        folder = args.output / name
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        FAMILIES[name](folder, args.clip)


if __name__ == "__main__":
    main()
