# SPDX-License-Identifier: Apache-2.0
"""Makes tests/models/parts/<case>: tiny random codecs and text encoders and what diffusers and
transformers make of them.

usage: make_part_goldens.py [--output ../models/parts] [--only case,case]
Each case is a directory as save_pretrained writes it (config.json and weights) plus io.safetensors;
README.md in the output folder says what that holds. As in make_model_goldens.py, scaling any one
weight by 1.1 must change the outputs, and so must undoing the config field that the case is about.
"""

import argparse
import json
import zlib
from pathlib import Path

import torch
from diffusers import AutoencoderKL, AutoencoderTiny, VQModel
from make_model_goldens import randomise, relative_difference
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

PARTS = Path(__file__).parent.parent / "models" / "parts"


# --- Codecs ----------------------------------------------------------------------------------


def vae(levels=2, attention=False, **fields):
    prefix = "Attn" if attention else ""
    return {"down_block_types": (f"{prefix}DownEncoderBlock2D",) * levels,
            "up_block_types": (f"{prefix}UpDecoderBlock2D",) * levels,
            "block_out_channels": (8, 16, 16)[:levels], "layers_per_block": 1,
            "norm_num_groups": 4, **fields}  # fmt: skip


class Codec:
    """`instead`: the same fields with values for which the outputs must differ (same weights)."""

    def __init__(self, kind, config, instead=None, adjust=None, old_names=False, check=None,
                 half=False):  # fmt: skip
        self.kind, self.config, self.instead, self.adjust = kind, config, instead, adjust
        self.old_names, self.check, self.half = old_names, check, half

    def build(self, **fields):
        return self.kind(**{**self.config, **fields})

    def make_inputs(self, model, generator):
        config = model.config
        channels = getattr(config, "vq_embed_dim", None) or config.latent_channels
        levels = getattr(config, "encoder_block_out_channels", None) or config.block_out_channels
        factor = 2 ** (len(levels) - 1)
        inputs = {
            "latents": torch.randn(2, channels, 5, 3, generator=generator),
            "image": torch.rand(2, 3, 3 * factor, 4 * factor, generator=generator) * 2 - 1,
        }
        if self.kind is AutoencoderKL:
            inputs["noise"] = torch.randn(2, channels, 3, 4, generator=generator)
        return inputs

    def run(self, model, inputs):
        """What pipelines make of the inputs: latents are scaled and shifted by the config."""
        config = model.config
        channel = lambda values: torch.tensor(values, dtype=torch.float64)[None, :, None, None]  # noqa: E731
        mean, std = 0.0, 1.0
        if getattr(config, "latents_mean", None):
            mean, std = channel(config.latents_mean), channel(config.latents_std)
        elif getattr(config, "shift_factor", None):
            mean = config.shift_factor
        dtype = inputs["latents"].dtype
        z = (inputs["latents"].double() * std / config.scaling_factor + mean).to(dtype)
        values = {"decoded": model.decode(z).sample}
        encoded = model.encode(inputs["image"])
        if self.kind is AutoencoderKL:
            posterior = encoded.latent_dist
            values["moments"] = posterior.parameters
            values["mode"] = posterior.mode()
            values["sampled"] = posterior.mean + posterior.std * inputs["noise"]
        else:
            values["mode"] = encoded.latents
        for name in ("mode", "sampled"):
            if name in values:
                scaled = (values[name].double() - mean) * config.scaling_factor / std
                values[name] = scaled.to(dtype)
        return values


def wide_variances(model):
    """Logarithms of variances from below −30 to above 20: both ends of the clamp."""
    channels = model.config.latent_channels
    model.quant_conv.weight.data[channels:].mul_(120)


def check_clamped(name, model, inputs, values):
    log_variance = values["moments"].chunk(2, dim=1)[1]
    if not (log_variance.min() < -30 and log_variance.max() > 20):
        raise SystemExit(f"{name}: nothing is clamped; change the case")


def wide_streams(model):
    """What residual blocks hand on is beyond float16, as in SDXL's autoencoder, and what they read
    (normalised) and what they weigh is not. In exact arithmetic only the eps of norms tell."""
    factor = 4e4
    for part in (model.encoder, model.decoder):
        for path, weight in part.named_parameters():
            layer, kind = path.rsplit(".", 1)
            adds = layer == "conv_in" or layer.endswith(("conv2", "to_out.0"))
            maps = layer.endswith(("conv_shortcut", "samplers.0.conv"))
            if adds or (maps and kind == "bias"):
                weight.data.mul_(factor)


def check_overflow(name, model, inputs, values):
    """float32 needs more than float16 has, and diffusers in float16 gives no picture."""
    largest, hooks = {}, []
    for path, module in model.named_modules():
        if path.endswith("conv2"):
            hooks.append(module.register_forward_hook(
                lambda _module, _args, out, path=path: largest.update({path: out.abs().max().item()})))  # fmt: skip
    z = inputs["latents"] / model.config.scaling_factor
    model.decode(z)
    model.encode(inputs["image"])
    for hook in hooks:
        hook.remove()
    for part in ("encoder", "decoder"):
        if not max(v for k, v in largest.items() if k.startswith(part)) > 65504:
            raise SystemExit(f"{name}: float16 can hold all of the {part}: {largest}")
    model.half()
    decoded = model.decode(z.half()).sample
    moments = model.encode(inputs["image"].half()).latent_dist.parameters
    model.float()
    if decoded.isfinite().all() or moments.isfinite().all():
        raise SystemExit(f"{name}: diffusers does not overflow in float16; change the case")


# --- Text encoders ---------------------------------------------------------------------------

VOCABULARY, END = 99, 98


class Text:
    def __init__(self, kind, config, instead=None, published=False):
        self.kind, self.instead, self.published = kind, instead, published
        self.config = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
                       "num_hidden_layers": 3, "num_attention_heads": 2,
                       "max_position_embeddings": 16, "projection_dim": 32, "bos_token_id": 97,
                       "eos_token_id": END, "pad_token_id": END, **config}  # fmt: skip

    def build(self, **fields):
        return self.kind(CLIPTextConfig(**{**self.config, **fields}))

    def make_inputs(self, model, generator):
        end = model.config.eos_token_id
        ids = torch.randint(3, 90, (3, 11), generator=generator)
        ids[:, 0] = 97
        for row, at in enumerate((4, 10, 1)):
            ids[row, at:] = END if end == 2 else end  # padded with it too: the first one counts
        if end == 2:
            ids[0, 5:] = 0  # padded with another
        elif end < END:
            ids[0, 2] = END  # the largest id, but not the end
        return {"ids": ids}

    def run(self, model, inputs):
        out = model(inputs["ids"], output_hidden_states=True)
        text = getattr(model, "text_model", model)
        values = {"states": out.last_hidden_state, "embeddings": out.hidden_states[0]}
        for i, state in enumerate(out.hidden_states[1:]):
            values[f"encoder.layers.{i}"] = state
        values["skip_1"] = text.final_layer_norm(out.hidden_states[-2])
        projected = self.kind is CLIPTextModelWithProjection
        values["pooled"] = out.text_embeds if projected else out.pooler_output
        return values


KL = AutoencoderKL
CASES = {
    "kl": Codec(KL, vae(3, layers_per_block=2), {"scaling_factor": 0.2}),
    "kl_one_level": Codec(KL, vae(1)),
    "kl_old_names": Codec(KL, vae(), old_names=True),
    "kl_attention_blocks": Codec(KL, vae(attention=True)),
    "kl_mid_no_attention": Codec(KL, vae(mid_block_add_attention=False)),
    "kl_latents_mean_std": Codec(
        KL, vae(latents_mean=(-1.6, 2.2, 0.9, -0.4), latents_std=(8.4, 5.9, 4.2, 6.3),
                scaling_factor=0.5),
        {"latents_mean": None, "latents_std": None}),
    "kl_latents_mean_std_no_quant": Codec(
        KL, vae(latents_mean=(-1.6, 2.2), latents_std=(8.4, 0.9), use_quant_conv=False,
                use_post_quant_conv=False, latent_channels=2),
        {"latents_mean": None, "latents_std": None}),
    "kl_shift_no_quant": Codec(
        KL, vae(shift_factor=0.7, scaling_factor=1.5305, use_quant_conv=False,
                use_post_quant_conv=False, latent_channels=6),
        {"shift_factor": None}),
    "kl_act_mish": Codec(KL, vae(act_fn="mish"), {"act_fn": "silu"}),
    "kl_clamped_variance": Codec(KL, vae(), adjust=wide_variances, check=check_clamped),
    "kl_overflows_fp16": Codec(
        KL, vae(force_upcast=True, scaling_factor=0.13025), adjust=wide_streams,
        check=check_overflow, half=True),
    "vq": Codec(VQModel, vae(num_vq_embeddings=24), {"scaling_factor": 1.0}),
    "vq_embed_dim": Codec(
        VQModel, vae(num_vq_embeddings=40, vq_embed_dim=2, latent_channels=4)),
    "tiny": Codec(
        AutoencoderTiny,
        {"encoder_block_out_channels": (8, 8, 8), "decoder_block_out_channels": (16, 16, 16),
         "num_encoder_blocks": (1, 2, 1), "num_decoder_blocks": (2, 1, 1)}),
    "tiny_act_silu_scaled": Codec(
        AutoencoderTiny,
        {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8),
         "num_encoder_blocks": (0, 1), "num_decoder_blocks": (1, 0), "act_fn": "silu",
         "scaling_factor": 0.4, "shift_factor": 0.3},
        {"act_fn": "relu"}),
    "text_published": Text(CLIPTextModel, {"eos_token_id": 2, "bos_token_id": 0}, published=True),
    "text_flat": Text(CLIPTextModel, {"eos_token_id": 95}),
    "text_gelu": Text(CLIPTextModel, {"hidden_act": "gelu"}, {"hidden_act": "quick_gelu"}),
    "text_projection": Text(
        CLIPTextModelWithProjection,
        {"projection_dim": 20, "layer_norm_eps": 0.1}, {"layer_norm_eps": 1e-5}),
}  # fmt: skip


def check_every_weight_matters(name, model, run):
    """In at least one of the outputs: encoder and decoder have each their own."""
    reference = run()
    for weight_name, weight in model.named_parameters():
        if weight_name.endswith(("to_k.bias", "k_proj.bias")):
            continue  # adds the same to every score of a query; softmax takes it away
        kept = weight.data.clone()
        weight.data.mul_(1.1)
        change = max(relative_difference(value, reference[k]) for k, value in run().items())
        weight.data.copy_(kept)
        if not change > 8e-5:  # four times the tolerance of parts_test.cc in fp32
            raise SystemExit(f"{name}: {weight_name} hardly matters, {change:.1e}; change the case")


OLD_NAMES = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def save(case, model, folder):
    half = getattr(case, "half", False)  # its weights were rounded
    (model.half() if half else model).save_pretrained(folder)
    model.float()
    if getattr(case, "published", False):
        # transformers since 5.6 saves CLIPTextModel without the prefix, before 4.31 with position
        # ids.
        file = folder / "model.safetensors"
        tensors = {f"text_model.{name}": value for name, value in load_file(file).items()}
        positions = torch.arange(model.config.max_position_embeddings)[None]
        tensors["text_model.embeddings.position_ids"] = positions
        save_file(tensors, file, {"format": "pt"})
    if getattr(case, "old_names", False):
        file = folder / "diffusion_pytorch_model.safetensors"
        tensors = {}
        for name, value in load_file(file).items():
            for new, old in OLD_NAMES.items():
                name = name.replace(f".{new}.", f".{old}.")
            tensors[name] = value
        save_file(tensors, file, {"format": "pt"})


@torch.no_grad()
def make(name, case, folder):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    model = case.build().eval()
    randomise(model, generator)
    for weight_name, weight in model.named_parameters():  # peaked, as randomise() does for to_q
        if "q_proj.weight" in weight_name or "k_proj.weight" in weight_name:
            weight.data.mul_(2.2)
    if getattr(case, "adjust", None):
        case.adjust(model)
    if getattr(case, "half", False):
        model.half().float()
    inputs = case.make_inputs(model, generator)
    values = case.run(model, inputs)
    if getattr(case, "check", None):
        case.check(name, model, inputs, values)

    check_every_weight_matters(name, model, lambda: case.run(model, inputs))
    if case.instead:
        other = case.build(**case.instead).eval()
        other.load_state_dict(model.state_dict())
        for key, value in case.run(other, inputs).items():
            change = relative_difference(value, values[key])
            if not change > 2e-3 and key not in ("moments", "embeddings"):
                raise SystemExit(f"{name}: {case.instead} gives the same {key}; change the case")
    exact = case.run(model.double(), {
        k: v.double() if v.is_floating_point() else v for k, v in inputs.items()})  # fmt: skip
    errors = {k: relative_difference(v.double(), exact[k]) for k, v in values.items()}
    model.float()

    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.iterdir():
        stale.unlink()
    save(case, model, folder)
    save_file({k: v.contiguous() for k, v in (inputs | values).items()}, folder / "io.safetensors")
    for file in folder.iterdir():
        file.chmod(0o644)
    print(json.dumps({"case": name, "parameters": sum(p.numel() for p in model.parameters()),
                      "std": {k: round(v.std().item(), 2) for k, v in values.items()},
                      "float32_error": float(f"{max(errors.values()):.1e}"),
                      "bytes": sum(f.stat().st_size for f in folder.iterdir())}))  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=PARTS)
    parser.add_argument("--only", help="comma-separated cases")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.only.split(",") if args.only else CASES:
        make(name, CASES[name], args.output / name)


if __name__ == "__main__":
    main()
