# SPDX-License-Identifier: Apache-2.0
"""Makes tests/models/goldens/run_<name>: whole sampling runs of diffusers from given noise.

usage: make_pipeline_goldens.py [--output ../models/goldens] [--mnist ../../models/mnist-32]
       [--only name,name]
Each run is a diffusers pipeline directory (a tiny UNet2DModel and a scheduler) plus run.json and
run.safetensors; README.md in the output folder says what those hold. run_mnist_32 has no model of
its own: it is the shipped one. Every run is done in float64 as well; the distance between the two
is in run.json, as the floor under any tolerance.

The tiny models are trained for a moment. A random one would not do: it removes no noise, so that
x0 = (x - sqrt(1 - a) F) / sqrt(a) with a near 0 multiplies each rounding error by hundreds.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import zlib
from pathlib import Path

import diffusers
import diffusers.schedulers.scheduling_sde_ve as sde_ve
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import ConsistencyModelPipeline, DDIMPipeline, ScoreSdeVePipeline, UNet2DModel
from diffusers.pipelines.deprecated.score_sde_ve import pipeline_score_sde_ve
from safetensors.torch import save_file

from make_model_goldens import (ATTN, ATTN_SKIP, GOLDENS, PLAIN, SKIP, model, randomise,
                                relative_difference)  # fmt: skip
from sampling import draw, philox_normal

EDM = dict(sigma_min=0.002, sigma_max=80.0, sigma_data=0.5, rho=7.0)
CLASSES = 4  # the last is the null class
EDGE = 8


class Run:
    def __init__(self, scheduler, steps, guidance_scale=1.0, **fields):
        self.scheduler, self.steps, self.fields = scheduler, steps, fields
        self.guidance_scale = guidance_scale


RUNS = {
    "ddim": Run("DDIMScheduler", 10),
    "ddim_v_prediction_zero_snr": Run(
        "DDIMScheduler", 8, prediction_type="v_prediction", rescale_betas_zero_snr=True,
        timestep_spacing="trailing", beta_schedule="scaled_linear", clip_sample=False),
    "pndm": Run(
        "PNDMScheduler", 10, skip_prk_steps=True, steps_offset=1, beta_schedule="scaled_linear",
        beta_start=0.00085, beta_end=0.012),
    "euler": Run("EulerDiscreteScheduler", 10, timestep_spacing="linspace"),
    "euler_karras": Run(
        "EulerDiscreteScheduler", 7, use_karras_sigmas=True, timestep_spacing="leading",
        steps_offset=1, beta_schedule="scaled_linear"),
    "dpm_solver": Run("DPMSolverMultistepScheduler", 10, algorithm_type="dpmsolver++"),
    "edm_dpm_solver": Run("EDMDPMSolverMultistepScheduler", 10, **EDM),
    "edm_dpm_solver_guided": Run("EDMDPMSolverMultistepScheduler", 6, guidance_scale=2.5, **EDM),
    "edm_euler": Run("EDMEulerScheduler", 12, **EDM),
}  # fmt: skip


def generator_of(name):
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def toy_images(labels, generator):
    """Blocks of 2 x 2 pixels, +-0.8 at random; the class sets one quarter to 0.8."""
    blocks = torch.randint(2, (len(labels), 1, 4, 4), generator=generator) * 1.6 - 0.8
    for label, (y, x) in enumerate([(0, 0), (0, 2), (2, 0)]):
        blocks[labels == label, :, y : y + 2, x : x + 2] = 0.8
    return F.interpolate(blocks, scale_factor=2)


def noisy_inputs(scheduler, images, noise, generator):
    """Returns what the UNet sees, its timesteps, and the output that would be right."""
    rows = (len(images), 1, 1, 1)
    if hasattr(scheduler.config, "sigma_data"):  # EDM: arXiv 2206.00364, Table 1
        data = scheduler.config.sigma_data
        sigma = (torch.rand(rows, generator=generator) * 10.6 - 6.2).exp()  # 0.002 to 80
        variance = sigma**2 + data**2
        x = images + sigma * noise
        target = (images - data**2 / variance * x) * variance.sqrt() / (sigma * data)
        return x / variance.sqrt(), sigma.log().flatten() / 4, target
    steps = torch.randint(scheduler.config.num_train_timesteps, rows, generator=generator)
    kept = scheduler.alphas_cumprod[steps]
    x = kept.sqrt() * images + (1 - kept).sqrt() * noise
    velocity = kept.sqrt() * noise - (1 - kept).sqrt() * images
    by_type = {"epsilon": noise, "v_prediction": velocity}
    return x, steps.flatten().float(), by_type[scheduler.config.prediction_type]


@torch.enable_grad()
def train_briefly(unet, scheduler, guided, generator, steps=400, batch=64):
    optimizer = torch.optim.AdamW(unet.parameters(), lr=3e-3)
    for step in range(steps):
        labels = torch.randint(CLASSES, (batch,), generator=generator)
        noise = torch.randn(batch, 1, EDGE, EDGE, generator=generator)
        images = toy_images(labels, generator)
        x, timesteps, target = noisy_inputs(scheduler, images, noise, generator)
        output = unet(x, timesteps, class_labels=labels if guided else None).sample
        loss = F.mse_loss(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - (step + 1) / steps)
    return loss.item()


def tiny_unet(scheduler, guided, generator):
    classes = {"num_class_embeds": CLASSES} if guided else {}
    unet = UNet2DModel(**model(PLAIN, ATTN, in_channels=1, out_channels=1, **classes)).eval()
    randomise(unet, generator)
    train_briefly(unet, scheduler, guided, generator)
    return unet.requires_grad_(False)


def draw_twice(unet, make_scheduler, noise, *arguments):
    """Returns the images of a float32 run and how far they are from those of a float64 run."""
    image = draw(unet, make_scheduler(), noise, *arguments)
    exact = draw(unet.double(), make_scheduler(), noise.double(), *arguments)
    unet.float()
    return image, relative_difference(image.double(), exact)


def save_run(folder, tensors, steps, guidance_scale, error):
    save_file(tensors, folder / "run.safetensors")
    run = {"steps": steps, "guidance_scale": guidance_scale,
           "float32_error": float(f"{error:.1e}")}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run, indent=2) + "\n")
    for file in folder.rglob("*.*"):
        file.chmod(0o644)
    print(json.dumps({"run": folder.name, **run,
                      "image_std": round(tensors["image"].std().item(), 3)}))  # fmt: skip
    if error > 2e-5:
        raise SystemExit(f"{folder.name}: float32 is {error:.1e} off; too ill-conditioned to test")


def check_against_ddim_pipeline(unet, make_scheduler, steps):
    """The loop of draw() is that of diffusers' own pipeline."""
    pipeline = DDIMPipeline(unet, make_scheduler())
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(batch_size=2, generator=torch.Generator().manual_seed(1), eta=0.0,
                      num_inference_steps=steps, output_type="np").images  # fmt: skip
    noise = torch.randn(2, 1, EDGE, EDGE, generator=torch.Generator().manual_seed(1))
    ours = (draw(unet, make_scheduler(), noise, None, steps) / 2 + 0.5).clamp(0, 1)
    if not torch.equal(torch.from_numpy(theirs).permute(0, 3, 1, 2), ours):
        raise SystemExit("draw() differs from DDIMPipeline")


@torch.no_grad()
def make(name, run, folder):
    generator = generator_of(name)
    guided = run.guidance_scale > 1
    noise = torch.randn(2, 1, EDGE, EDGE, generator=generator)
    labels = torch.tensor([2, 0]) if guided else None
    scheduler_class = getattr(diffusers, run.scheduler)

    def make_scheduler():
        return scheduler_class(**run.fields)

    unet = tiny_unet(make_scheduler(), guided, generator)
    if name == "ddim":
        check_against_ddim_pipeline(unet, make_scheduler, run.steps)
    image, error = draw_twice(
        unet, make_scheduler, noise, labels, run.steps, run.guidance_scale, CLASSES - 1)
    unet.save_pretrained(folder / "unet")
    make_scheduler().save_pretrained(folder / "scheduler")
    index = {"_class_name": "DiffusionPipeline", "unet": ["diffusers", "UNet2DModel"],
             "scheduler": ["diffusers", run.scheduler]}  # fmt: skip
    if guided:
        index["_denoised"] = {"null_class": CLASSES - 1}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    tensors = {"noise": noise, "image": image} | ({"class_labels": labels} if guided else {})
    save_run(folder, tensors, run.steps, run.guidance_scale, error)


@torch.enable_grad()
def tiny_score_unet(sigma_min, sigma_max, generator, steps=400, batch=32):
    """NCSN++ in small, which reads images in [0, 1] and predicts their score: arXiv 2011.13456."""
    unet = UNet2DModel(**model(
        SKIP, ATTN_SKIP, block_out_channels=(32, 32), time_embedding_type="fourier",
        norm_num_groups=None, attention_head_dim=None, mid_block_scale_factor=2**0.5,
        norm_eps=1e-6, center_input_sample=True)).eval()  # fmt: skip
    randomise(unet, generator)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=3e-3)
    for step in range(steps):
        images = toy_images(torch.zeros(batch, dtype=torch.long), generator) / 2 + 0.5
        t = torch.rand(batch, 1, 1, 1, generator=generator)
        sigma = sigma_min * (sigma_max / sigma_min) ** t
        noise = torch.randn(batch, 3, EDGE, EDGE, generator=generator)
        output = unet(images + sigma * noise, sigma.flatten()).sample
        loss = F.mse_loss(sigma * output, -noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - (step + 1) / steps)
    return unet.requires_grad_(False)


SEED = 1  # of the first image, as in tests/engine/run_parity_test.cc


def give_noise(row, dtype):
    """The scheduler draws what the engine draws for an image: of evaluation 0, 1, ..."""
    draws = itertools.count()

    def drawn(shape, **_):
        _, channels, height, width = shape
        normal = philox_normal(SEED + row, next(draws), channels * height * width)
        nhwc = torch.from_numpy(normal).reshape(1, height, width, channels)
        return nhwc.permute(0, 3, 1, 2).to(dtype)

    sde_ve.randn_tensor = drawn


@contextlib.contextmanager
def batch_noise(scheduler_class, dtype):
    """As give_noise(), for a scheduler that draws once for each evaluation, all images together."""
    place = sys.modules[scheduler_class.__module__]
    draws, kept = itertools.count(), place.randn_tensor

    def drawn(shape, **_):
        rows, channels, height, width = shape
        evaluation = next(draws)
        normal = np.stack([philox_normal(SEED + row, evaluation, channels * height * width)
                           for row in range(rows)])  # fmt: skip
        nhwc = torch.from_numpy(normal).reshape(rows, height, width, channels)
        return nhwc.permute(0, 3, 1, 2).to(dtype)

    place.randn_tensor = drawn
    yield draws
    place.randn_tensor = kept
    if next(draws) == 0:
        raise SystemExit(f"{scheduler_class.__name__} drew nothing")


@torch.no_grad()
def make_noisy(name, folder, scheduler, steps, network=None, pipeline="DDPMPipeline", **fields):
    """A run that draws noise, with the network of another run (`network`), or a random one that also
    predicts a variance: predictions are clipped, so that rounding errors do not grow."""
    scheduler_class = getattr(diffusers, scheduler)
    generator = generator_of(name)
    noise = torch.randn(2, 1, EDGE, EDGE, generator=generator)
    if network:
        unet = UNet2DModel.from_pretrained(folder.parent / f"run_{network}" / "unet").eval()
    else:
        unet = UNet2DModel(**model(PLAIN, ATTN, in_channels=1, out_channels=2)).eval()
        randomise(unet, generator)
    labels = torch.tensor([2, 0]) if unet.config.num_class_embeds else None

    def make_scheduler():
        return scheduler_class(**fields)

    def drawn(noise):
        with batch_noise(scheduler_class, noise.dtype):
            return draw(unet, make_scheduler(), noise, labels, steps)

    image = drawn(noise)
    if pipeline == "ConsistencyModelPipeline":  # draw() has its loop
        whole = ConsistencyModelPipeline(unet, make_scheduler())
        whole.set_progress_bar_config(disable=True)
        whole.check_inputs = lambda *args: None  # it wants three channels
        with batch_noise(scheduler_class, noise.dtype):
            theirs = whole(batch_size=2, latents=noise, class_labels=labels, output_type="np",
                           num_inference_steps=steps).images  # fmt: skip
        difference = (torch.from_numpy(theirs).permute(0, 3, 1, 2) - (image / 2 + 0.5).clamp(0, 1))
        if difference.abs().max() > 1e-6:
            raise SystemExit(f"draw() differs from {pipeline} by {difference.abs().max():.1g}")
    unet.double()
    error = relative_difference(image.double(), drawn(noise.double()))
    folder.mkdir(parents=True, exist_ok=True)
    if network:
        (folder / "unet").unlink(missing_ok=True)
        os.symlink(Path("..") / f"run_{network}" / "unet", folder / "unet")
    else:
        unet.float().save_pretrained(folder / "unet")
    make_scheduler().save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text(json.dumps(
        {"_class_name": pipeline, "unet": ["diffusers", "UNet2DModel"],
         "scheduler": ["diffusers", scheduler]}, indent=2) + "\n")  # fmt: skip
    tensors = {"noise": noise, "image": image} | ({} if labels is None else {"class_labels": labels})
    save_run(folder, tensors, steps, 1.0, error)


NOISY = {
    "ddpm": dict(network="ddim", scheduler="DDPMScheduler", steps=10),
    "ddpm_learned_range": dict(
        scheduler="DDPMScheduler", steps=8, variance_type="learned_range", beta_schedule="linear"),
    "consistency": dict(
        network="edm_dpm_solver_guided", scheduler="CMStochasticIterativeScheduler", steps=3,
        pipeline="ConsistencyModelPipeline"),
}  # fmt: skip


def draw_score(unet, scheduler, noise, steps):
    """What ScoreSdeVePipeline draws, in [-1, 1] and not clamped. One image after the other, because
    the corrector takes means over a batch."""
    images = []
    for row, initial in enumerate(noise):
        give_noise(row, noise.dtype)
        scheduler.set_timesteps(steps)
        scheduler.set_sigmas(steps)
        x = initial[None] * scheduler.init_noise_sigma
        for t, sigma in zip(scheduler.timesteps, scheduler.sigmas):
            sigma = sigma.reshape(1).to(noise.dtype)
            for _ in range(scheduler.config.correct_steps):
                x = scheduler.step_correct(unet(x, sigma).sample, x).prev_sample
            step = scheduler.step_pred(unet(x, sigma).sample, t, x)
            x = step.prev_sample
        images.append(2 * step.prev_sample_mean - 1)
    return torch.cat(images)


def check_against_score_pipeline(unet, make_scheduler, noise, steps):
    """The loop of draw_score() is that of diffusers' own pipeline."""
    ours = (draw_score(unet, make_scheduler(), noise[:1], steps) / 2 + 0.5).clamp(0, 1)
    pipeline = ScoreSdeVePipeline(unet, make_scheduler())
    pipeline.set_progress_bar_config(disable=True)
    give_noise(0, noise.dtype)
    pipeline_score_sde_ve.randn_tensor = lambda *args, **kwargs: noise[:1]
    theirs = pipeline(batch_size=1, num_inference_steps=steps, output_type="np").images
    difference = (torch.from_numpy(theirs).permute(0, 3, 1, 2) - ours).abs().max().item()
    if difference > 1e-6:  # ours were in [-1, 1]
        raise SystemExit(f"draw_score() differs from ScoreSdeVePipeline by {difference:.1g}")


@torch.no_grad()
def make_score(name, folder, steps=40, **fields):
    generator = generator_of(name)
    noise = torch.randn(2, 3, EDGE, EDGE, generator=generator)

    def make_scheduler():
        return diffusers.ScoreSdeVeScheduler(**fields)

    unet = tiny_score_unet(fields["sigma_min"], fields["sigma_max"], generator)
    check_against_score_pipeline(unet, make_scheduler, noise, steps)
    image = draw_score(unet, make_scheduler(), noise, steps)
    exact = draw_score(unet.double(), make_scheduler(), noise.double(), steps)
    unet.float()
    ScoreSdeVePipeline(unet, make_scheduler()).save_pretrained(folder)
    error = relative_difference(image.double(), exact)
    save_run(folder, {"noise": noise, "image": image}, steps, 1.0, error)


@torch.no_grad()
def make_mnist(name, model_folder, folder):
    folder.mkdir(parents=True, exist_ok=True)
    unet = UNet2DModel.from_pretrained(model_folder / "unet", torch_dtype=torch.float32).eval()
    defaults = json.loads((model_folder / "model_index.json").read_text())["_denoised"]
    steps, scale = defaults["default_steps"], defaults["default_guidance_scale"]
    noise = torch.randn(4, 1, 32, 32, generator=generator_of(name))
    labels = torch.tensor([3, 1, 4, 9])

    def make_scheduler():
        return diffusers.EDMDPMSolverMultistepScheduler.from_pretrained(model_folder / "scheduler")

    image, error = draw_twice(
        unet, make_scheduler, noise, labels, steps, scale, defaults["null_class"])
    save_run(folder, {"noise": noise, "image": image, "class_labels": labels}, steps, scale, error)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=GOLDENS)
    parser.add_argument("--mnist", type=Path,
                        default=Path(__file__).parents[2] / "models" / "mnist-32")
    parser.add_argument("--only", help="comma-separated runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.only.split(",") if args.only else [*RUNS, *NOISY, "score_sde_ve", "mnist_32"]:
        folder = args.output / f"run_{name}"
        if name == "mnist_32":
            make_mnist(name, args.mnist, folder)
        elif name in NOISY:
            make_noisy(name, folder, **NOISY[name])
        elif name == "score_sde_ve":
            make_score(name, folder, sigma_min=0.05, sigma_max=5.0)
        else:
            make(name, RUNS[name], folder)


if __name__ == "__main__":
    main()
