# SPDX-License-Identifier: Apache-2.0
"""Makes tests/models/emoji: what diffusers draws with models/emoji-64 from given noise, for
tests/engine/emoji_test.cc. Run it again whenever the weights change. It needs scipy.

usage: make_emoji_goldens.py [--model FOLDER] [--output FOLDER]
"""

import argparse
import importlib
import inspect
import json
import sys
import types
from pathlib import Path

import diffusers
import torch
from safetensors.torch import save_file

from make_latent_goldens import evaluation_noise

ROOT = Path(__file__).parent.parent.parent
PROMPTS = ["a red apple", "cat with sunglasses", "green heart", ""]
# All that sample a model with betas: module, class, and fields of an option.
SAMPLERS = {
    "ddpm": ("ddpm", "DDPMScheduler"),
    "ddim": ("ddim", "DDIMScheduler"),
    "pndm": ("pndm", "PNDMScheduler"),
    "euler": ("euler_discrete", "EulerDiscreteScheduler"),
    "euler_ancestral": ("euler_ancestral_discrete", "EulerAncestralDiscreteScheduler"),
    "lms": ("lms_discrete", "LMSDiscreteScheduler"),
    "heun": ("heun_discrete", "HeunDiscreteScheduler"),
    "dpm_solver": ("dpmsolver_multistep", "DPMSolverMultistepScheduler"),
    "dpm_solver_sde": ("dpmsolver_multistep", "DPMSolverMultistepScheduler",
                       {"algorithm_type": "sde-dpmsolver++"}),
    "uni_pc": ("unipc_multistep", "UniPCMultistepScheduler"),
    "lcm": ("lcm", "LCMScheduler"),
    "dpmpp_sde": ("dpmsolver_sde", "DPMSolverSDEScheduler"),
    "deis": ("deis_multistep", "DEISMultistepScheduler"),
    "kdpm2": ("k_dpm_2_discrete", "KDPM2DiscreteScheduler"),
    "kdpm2_ancestral": ("k_dpm_2_ancestral_discrete", "KDPM2AncestralDiscreteScheduler"),
    "tcd": ("tcd", "TCDScheduler"),
    "dpm_solver_singlestep": ("dpmsolver_singlestep", "DPMSolverSinglestepScheduler"),
    # Its class refuses the algorithm_type of the model's config.
    "sa_solver": ("sasolver", "SASolverScheduler", {"algorithm_type": "data_prediction"}),
}  # fmt: skip
SAMPLER_STEPS = 20
# Only for the Brownian tree that draw_by_all() replaces.
sys.modules.setdefault("torchsde", types.ModuleType("torchsde"))


def draw_by_all(pipeline, noise, guidance_scale):
    """The first prompt's picture by each sampler, in bytes. Noise is the engine's, of seed 1."""
    config, images = pipeline.scheduler.config, {}
    for name, (module, class_name, *fields) in SAMPLERS.items():
        module = importlib.import_module(f"diffusers.schedulers.scheduling_{module}")
        kind, fields = getattr(module, class_name), dict(*fields)
        # The latents of this model have no bounds. Without the field, from_config() would give DDIM
        # and DDPM their own default, which clips.
        if "clip_sample" in inspect.signature(kind).parameters:
            fields["clip_sample"] = False
        if name == "dpmpp_sde":
            module.randn_tensor = evaluation_noise  # which replaces it in each step
            module.BrownianTreeNoiseSampler = lambda x, *_: (
                lambda *_: module.randn_tensor(x.shape, dtype=x.dtype))  # fmt: skip
        parts = pipeline.components | {"scheduler": kind.from_config(config, **fields)}
        with evaluation_noise(parts["scheduler"]):
            pixels = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)(
                PROMPTS[:1], latents=noise[:1], num_inference_steps=SAMPLER_STEPS,
                guidance_scale=guidance_scale, output_type="pt",
            ).images  # fmt: skip
        images[f"by.{name}"] = (pixels * 255).round().to(torch.uint8).contiguous()
    return images


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "emoji-64")
    parser.add_argument("--output", type=Path, default=ROOT / "tests" / "models" / "emoji")
    args = parser.parse_args()
    # As it is: its files are float16, and all parts compute in float32.
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(
        args.model, safety_checker=None, feature_extractor=None)  # fmt: skip
    for part in (pipeline.text_encoder, pipeline.unet, pipeline.vae):
        assert part.dtype == torch.float32, f"{type(part).__name__} is {part.dtype}"
    ours = json.loads((args.model / "model_index.json").read_text())["_denoised"]
    size = pipeline.unet.config.sample_size
    noise = torch.randn(len(PROMPTS), 4, size, size, generator=torch.Generator().manual_seed(29))
    facts = {
        "made_with": {"torch": torch.__version__.split("+")[0], "diffusers": diffusers.__version__},
        "prompts": PROMPTS,
        "steps": ours["default_steps"],
        "guidance_scale": ours["default_guidance_scale"],
        "sampler_steps": SAMPLER_STEPS,
    }
    images = pipeline(
        PROMPTS, latents=noise, num_inference_steps=facts["steps"],
        guidance_scale=facts["guidance_scale"], output_type="pt",
    ).images  # fmt: skip
    by_sampler = draw_by_all(pipeline, noise, facts["guidance_scale"])
    args.output.mkdir(parents=True, exist_ok=True)
    save_file({"noise": noise, "image": images.contiguous()} | by_sampler,
              args.output / "goldens.safetensors")  # fmt: skip
    (args.output / "goldens.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
