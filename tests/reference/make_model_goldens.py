# SPDX-License-Identifier: Apache-2.0
"""Makes tests/models/goldens/<case>: tiny random UNet2DModels and what diffusers makes of them.

usage: make_model_goldens.py [--output ../models/goldens] [--only case,case]
Each case is a model directory of diffusers (config.json and weights) plus io.safetensors; README.md
in the output folder says what that holds. Two checks keep a golden from passing by luck: scaling
any one weight by 1.1 must change the output, and so must undoing the config field that the case is
about.
"""

import argparse
import json
import math
import zlib
from pathlib import Path

import torch
from diffusers import UNet2DModel
from safetensors.torch import save_file

GOLDENS = Path(__file__).parent.parent / "models" / "goldens"

PLAIN = ("DownBlock2D", "UpBlock2D")
ATTN = ("AttnDownBlock2D", "AttnUpBlock2D")
RESNET = ("ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D")
SKIP = ("SkipDownBlock2D", "SkipUpBlock2D")
ATTN_SKIP = ("AttnSkipDownBlock2D", "AttnSkipUpBlock2D")


def model(*blocks, **fields):
    """A config: `blocks` from the outermost level inwards, each a (down type, up type)."""
    channels = (8, 8, 16)[: len(blocks)]
    return dict(
        down_block_types=[down for down, _ in blocks],
        up_block_types=[up for _, up in reversed(blocks)],
        **{"sample_size": 8, "block_out_channels": channels, "layers_per_block": 1,
           "norm_num_groups": 4, "attention_head_dim": 8, **fields},
    )  # fmt: skip


class Case:
    """`instead`: the same fields with values for which the output must differ (same weights).
    `stream`: the size of residual streams."""

    def __init__(self, config, instead=None, timesteps=(17.0, 803.5), size=None, stream=1):
        self.config, self.instead, self.timesteps, self.stream = config, instead, timesteps, stream
        sample_size = config["sample_size"]
        self.size = size or ((sample_size,) * 2 if isinstance(sample_size, int) else sample_size)


CASES = {
    # Blocks.
    "plain": Case(model(PLAIN, PLAIN, layers_per_block=2, block_out_channels=(8, 16))),
    "plain_downsample_padding_0": Case(
        model(PLAIN, PLAIN, downsample_padding=0), {"downsample_padding": 1}),
    # DownBlock2D and UpBlock2D resample by convolution whatever the type says.
    "plain_type_resnet": Case(
        model(PLAIN, PLAIN, downsample_type="resnet", upsample_type="resnet")),
    "attn": Case(model(ATTN, ATTN, block_out_channels=(8, 16))),
    "attn_head_dim_null": Case(
        model(ATTN, ATTN, attention_head_dim=None, block_out_channels=(8, 16)),
        {"attention_head_dim": 4}),
    "attn_head_dim_4": Case(model(PLAIN, ATTN, attention_head_dim=4), {"attention_head_dim": 8}),
    "attn_downsample_padding_0": Case(
        model(ATTN, ATTN, downsample_padding=0), {"downsample_padding": 1}),
    "attn_type_resnet": Case(
        model(ATTN, ATTN, downsample_type="resnet", upsample_type="resnet")),
    "attn_type_resnet_down_only": Case(model(ATTN, PLAIN, downsample_type="resnet")),
    "resnet": Case(model(RESNET, RESNET, block_out_channels=(8, 16))),
    "resnet_attn": Case(model(RESNET, ATTN, layers_per_block=2)),
    # Skip blocks have groups of their own; those with attention need 32 channels.
    "skip": Case(model(SKIP, SKIP, block_out_channels=(16, 24))),
    "skip_then_plain": Case(model(SKIP, PLAIN, block_out_channels=(16, 16))),
    "skip_down_only": Case(
        model(("SkipDownBlock2D", "UpBlock2D"), ("DownBlock2D", "UpBlock2D"),
              block_out_channels=(16, 16))),
    "skip_three_levels": Case(
        model(SKIP, SKIP, ATTN_SKIP, sample_size=(8, 12), block_out_channels=(16, 32, 32),
              resnet_time_scale_shift="scale_shift", center_input_sample=True, num_class_embeds=5)),
    "mixed_up_and_down": Case(
        model(("DownBlock2D", "ResnetUpsampleBlock2D"),
              ("ResnetDownsampleBlock2D", "AttnUpBlock2D"),
              ("AttnDownBlock2D", "UpBlock2D"))),
    "three_levels_24x40": Case(
        model(PLAIN, ATTN, RESNET, sample_size=(24, 40))),
    "one_level_7x5": Case(model(ATTN, sample_size=None), size=(7, 5)),
    "layers_3": Case(model(PLAIN, ATTN, layers_per_block=3)),
    "channels_12_20": Case(model(PLAIN, ATTN, block_out_channels=(12, 20), attention_head_dim=5)),
    "channels_32": Case(
        model(ATTN, block_out_channels=(32,), attention_head_dim=32, norm_num_groups=8)),
    "channels_in_4_out_6": Case(model(PLAIN, in_channels=4, out_channels=6)),
    # Middle.
    "mid_none": Case(model(PLAIN, PLAIN, mid_block_type=None)),
    "mid_no_attention": Case(model(PLAIN, PLAIN, add_attention=False)),
    "mid_scale_factor": Case(
        model(PLAIN, PLAIN, mid_block_scale_factor=math.sqrt(2)), {"mid_block_scale_factor": 1}),
    "mid_attn_norm_groups": Case(
        model(PLAIN, ATTN, attn_norm_num_groups=2), {"attn_norm_num_groups": None}),
    # Time.
    "time_sin_cos": Case(model(PLAIN, flip_sin_to_cos=False), {"flip_sin_to_cos": True}),
    "time_freq_shift": Case(model(PLAIN, freq_shift=1), {"freq_shift": 0}),
    "time_sin_cos_freq_shift": Case(
        model(PLAIN, flip_sin_to_cos=False, freq_shift=1), {"flip_sin_to_cos": True}),
    "time_c_noise": Case(model(PLAIN), timesteps=(-1.5537, 1.0955)),
    "time_embedding_dim": Case(model(PLAIN, PLAIN, time_embedding_dim=20)),
    "time_fourier": Case(model(PLAIN, ATTN, time_embedding_type="fourier"), timesteps=(0.3, 4.2)),
    "time_learned": Case(
        model(PLAIN, ATTN, time_embedding_type="learned", num_train_timesteps=900),
        timesteps=(17, 803)),
    # The attention of the middle has no norm then, unlike those of the blocks.
    "scale_shift": Case(model(PLAIN, ATTN, resnet_time_scale_shift="scale_shift")),
    "scale_shift_attn_norm_groups": Case(
        model(PLAIN, ATTN, resnet_time_scale_shift="scale_shift", attn_norm_num_groups=4)),
    "scale_shift_resnet": Case(model(RESNET, RESNET, resnet_time_scale_shift="scale_shift")),
    # Classes.
    "class_labels": Case(model(PLAIN, PLAIN, num_class_embeds=5)),
    "class_timestep": Case(model(PLAIN, class_embed_type="timestep")),
    "class_timestep_fourier": Case(
        model(PLAIN, class_embed_type="timestep", time_embedding_type="fourier"),
        timesteps=(0.3, 4.2)),
    "class_identity": Case(model(PLAIN, class_embed_type="identity")),
    # Activations and norms; the embeddings' own activation stays SiLU.
    "act_mish": Case(model(PLAIN, ATTN, act_fn="mish"), {"act_fn": "silu"}),
    "act_gelu": Case(model(PLAIN, ATTN, act_fn="gelu"), {"act_fn": "silu"}),
    "act_relu": Case(model(PLAIN, ATTN, act_fn="relu"), {"act_fn": "silu"}),
    "norm_groups_2_eps": Case(
        model(PLAIN, ATTN, norm_num_groups=2, norm_eps=0.1), {"norm_eps": 1e-5}),
    # Of activations of unit size an eps of 1e-6 instead of 1e-5 changes 1e-5 to 7e-5.
    "small_activations": Case(model(PLAIN, ATTN), {"norm_eps": 1e-6}, stream=0.01),
    "center_input_sample": Case(
        model(PLAIN, center_input_sample=True), {"center_input_sample": False}),
    # Published families in small.
    "like_ddpm": Case(
        model(PLAIN, ATTN, PLAIN, attention_head_dim=None, norm_eps=1e-6, downsample_padding=0,
              flip_sin_to_cos=False, freq_shift=1, dropout=0.1)),
    "like_adm": Case(
        model(RESNET, ATTN, downsample_type="resnet", upsample_type="resnet", num_class_embeds=4,
              resnet_time_scale_shift="scale_shift", attn_norm_num_groups=4)),
    "like_ncsnpp": Case(
        model(SKIP, ATTN_SKIP, block_out_channels=(32, 32), attention_head_dim=None,
              norm_num_groups=None, norm_eps=1e-6, mid_block_scale_factor=math.sqrt(2),
              time_embedding_type="fourier"),
        {"mid_block_scale_factor": 1}, timesteps=(0.3, 4.2)),
    # Weight files: the expected output is that of the rounded weights.
    "weights_fp16": Case(model(PLAIN, ATTN)),
    "weights_bf16": Case(model(PLAIN, ATTN)),
    "weights_sharded": Case(model(PLAIN, ATTN)),
}  # fmt: skip


def randomise(unet, generator, stream):
    """Every weight random, none at the zero or one that training starts from.

    Matrices keep the scale of what passes; queries and keys are larger, so that the attention is
    far from uniform.
    """
    for name, weight in unet.named_parameters():
        value = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            value = (1 if name.endswith("weight") else 0) + 0.3 * value
        elif name.endswith("bias"):
            value = 0.3 * value
        elif weight.ndim > 1 and "class_embedding.weight" != name:
            gain = 1.4 if ".to_q." in name or ".to_k." in name else 0.8
            value = gain * value / math.sqrt(weight[0].numel())
        adds = any(layer in name for layer in ("conv_in.", ".conv2.", ".to_out.0."))
        maps = any(layer in name for layer in ("conv_shortcut.bias", "samplers.0.conv.bias"))
        weight.data.copy_(value * (stream if adds or maps else 1))


def make_inputs(unet, case, generator):
    """Arguments of UNet2DModel.forward for two rows."""
    config, rows = unet.config, len(case.timesteps)
    inputs = {
        "sample": torch.randn(rows, config.in_channels, *case.size, generator=generator),
        "timestep": torch.tensor(
            case.timesteps,
            dtype=torch.int64 if config.time_embedding_type == "learned" else torch.float32),
    }
    if config.class_embed_type == "timestep":
        inputs["class_labels"] = torch.tensor([0.5, 11.0])
    elif config.class_embed_type == "identity":
        width = unet.time_embedding.linear_2.out_features
        inputs["class_labels"] = torch.randn(rows, width, generator=generator)
    elif config.num_class_embeds:
        inputs["class_labels"] = torch.tensor([config.num_class_embeds - 1, 1])
    return inputs


def run_with_blocks(unet, inputs):
    """Returns {"output": ..., and the output of each part by its name in the checkpoint}."""
    seen, hooks = {}, []

    def record(name):
        def hook(_module, _args, output):
            seen[name] = (output[0] if isinstance(output, tuple) else output).clone()

        return hook

    def record_embedding(_module, _args, kwargs):
        seen["emb"] = kwargs["temb"].clone()

    parts = {"time_embedding": unet.time_embedding, "conv_in": unet.conv_in}
    parts |= {f"down_blocks.{i}": block for i, block in enumerate(unet.down_blocks)}
    parts |= {"mid_block": unet.mid_block} if unet.mid_block is not None else {}
    parts |= {f"up_blocks.{i}": block for i, block in enumerate(unet.up_blocks)}
    hooks = [module.register_forward_hook(record(name)) for name, module in parts.items()]
    hooks.append(
        unet.down_blocks[0].register_forward_pre_hook(record_embedding, with_kwargs=True))
    seen["output"] = unet(**inputs, return_dict=False)[0]
    for hook in hooks:
        hook.remove()
    return seen


def relative_difference(a, b):
    return ((a - b).norm() / b.norm()).item()


def check_every_weight_matters(name, unet, inputs, output):
    for weight_name, weight in unet.named_parameters():
        if weight_name.endswith("to_k.bias"):
            continue  # adds the same to every score of a query; softmax takes it away
        kept = weight.data.clone()
        weight.data.mul_(1.1)
        change = relative_difference(unet(**inputs, return_dict=False)[0], output)
        weight.data.copy_(kept)
        if not change > 8e-5:  # four times the tolerance of parity_test.cc in fp32
            raise SystemExit(f"{name}: {weight_name} hardly matters, {change:.1e}; change the case")


def check_field_matters(name, case, unet, inputs, output):
    other = UNet2DModel(**{**case.config, **case.instead}).eval()
    other.load_state_dict(unet.state_dict())
    change = relative_difference(other(**inputs, return_dict=False)[0], output)
    if not change > 1e-2:
        raise SystemExit(f"{name}: {case.instead} gives the same, {change:.1e}; change the case")


def save_model(name, unet, folder):
    if name == "weights_fp16":
        unet.half().save_pretrained(folder, variant="fp16")
    elif name == "weights_bf16":
        unet.bfloat16().save_pretrained(folder)
    elif name == "weights_sharded":
        unet.save_pretrained(folder, max_shard_size="30KB")
        if len(list(folder.glob("*-of-*.safetensors"))) < 2:
            raise SystemExit(f"{name}: one shard only; lower max_shard_size")
    else:
        unet.save_pretrained(folder)


@torch.no_grad()
def make(name, case, folder):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    unet = UNet2DModel(**case.config).eval()
    randomise(unet, generator, case.stream)
    rounding = {"weights_fp16": torch.float16, "weights_bf16": torch.bfloat16}.get(name)
    if rounding:
        unet.to(rounding).float()
    inputs = make_inputs(unet, case, generator)
    values = run_with_blocks(unet, inputs)
    output = values["output"]

    check_every_weight_matters(name, unet, inputs, output)
    if case.instead:
        check_field_matters(name, case, unet, inputs, output)
    # What float32 itself costs: the floor under any tolerance. The projection of the time gives
    # float32 whatever comes in.
    widen = unet.time_proj.register_forward_hook(lambda _module, _args, value: value.double())
    exact = unet.double()(**{k: v.double() if v.is_floating_point() else v
                             for k, v in inputs.items()}, return_dict=False)[0]  # fmt: skip
    rounding_error = relative_difference(output.double(), exact)
    unet.float()
    widen.remove()

    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.iterdir():
        stale.unlink()
    save_model(name, unet, folder)
    save_file({k: v.contiguous() for k, v in (inputs | values).items()}, folder / "io.safetensors")
    for file in folder.iterdir():
        file.chmod(0o644)
    print(json.dumps({"case": name, "parameters": unet.num_parameters(),
                      "output_std": round(output.std().item(), 3),
                      "float32_error": float(f"{rounding_error:.1e}"),
                      "bytes": sum(f.stat().st_size for f in folder.iterdir())}))  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=GOLDENS)
    parser.add_argument("--only", help="comma-separated cases")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.only.split(",") if args.only else CASES:
        make(name, CASES[name], args.output / name)


if __name__ == "__main__":
    main()
