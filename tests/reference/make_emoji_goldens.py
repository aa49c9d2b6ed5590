# SPDX-License-Identifier: Apache-2.0
"""Makes tests/models/emoji: what diffusers draws with models/emoji-64 from given noise, for
tests/engine/emoji_test.cc. Run it again whenever the weights change.

usage: make_emoji_goldens.py [--model FOLDER] [--output FOLDER]
"""

import argparse
import json
from pathlib import Path

import diffusers
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parent.parent.parent
PROMPTS = ["a red apple", "cat with sunglasses", "green heart", ""]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "emoji-64")
    parser.add_argument("--output", type=Path, default=ROOT / "tests" / "models" / "emoji")
    args = parser.parse_args()
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(
        args.model, torch_dtype=torch.float32, safety_checker=None, feature_extractor=None)  # fmt: skip
    ours = json.loads((args.model / "model_index.json").read_text())["_denoised"]
    size = pipeline.unet.config.sample_size
    noise = torch.randn(len(PROMPTS), 4, size, size, generator=torch.Generator().manual_seed(29))
    facts = {
        "made_with": {"torch": torch.__version__.split("+")[0], "diffusers": diffusers.__version__},
        "prompts": PROMPTS,
        "steps": ours["default_steps"],
        "guidance_scale": ours["default_guidance_scale"],
    }
    images = pipeline(
        PROMPTS, latents=noise, num_inference_steps=facts["steps"],
        guidance_scale=facts["guidance_scale"], output_type="pt",
    ).images  # fmt: skip
    args.output.mkdir(parents=True, exist_ok=True)
    save_file({"noise": noise, "image": images.contiguous()}, args.output / "goldens.safetensors")
    (args.output / "goldens.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
