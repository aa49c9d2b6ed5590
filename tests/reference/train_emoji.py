# SPDX-License-Identifier: Apache-2.0
"""Trains models/emoji-64: text to image at 64x64, a StableDiffusionPipeline of 22 M parameters.

usage, one stage a command, in this order:
    train_emoji.py vae       --data FOLDER --model models/emoji-64 --minutes 4
    train_emoji.py judge     --data FOLDER --model models/emoji-64 --judge FILE --minutes 1.5
    train_emoji.py diffusion --data FOLDER --model models/emoji-64 --minutes 7
    train_emoji.py diffusion --data FOLDER --model models/emoji-64 --minutes 7 --resume --decay 0.5
    train_emoji.py evaluate  --data FOLDER --model models/emoji-64 --judge FILE
FOLDER holds Noto Emoji (emoji.py). --minutes is the time of the training steps alone; building,
compiling and encoding add one to two. tests/reference/README.md has the commands of a whole
training. --resume goes on from the weights in --model, which are
averages in float16, with a new optimiser: nothing else has to be kept between two commands. Give
--compile on a GPU; --tiny proves the path on a CPU in minutes, and draws nothing.

vae: AutoencoderKL to 16x16x4 latents, L1 and gradients at four scales, a small KL term. Its latents
come out with mean 0 and variance 1 in every channel: what was measured is folded into quant_conv and
post_quant_conv, and scaling_factor is 1.
judge: a dual encoder of pictures and captions, trained by contrast on all pictures, the held-out
ones too. It only measures.
diffusion: the text encoder and the UNet together; v-prediction, with the loss weight of min-SNR
(arXiv 2303.09556) where the noise is low; 10 % of the captions empty.
evaluate: retrieval among 100 captions, the grid and the card.
"""

import argparse
import json
import math
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    DPMSolverMultistepScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import emoji
from trainer import Trainer

CLIP = Path(__file__).parent.parent / "text" / "clip"
TRAIN_STEPS = 1000
SCHEDULE = dict(num_train_timesteps=TRAIN_STEPS, beta_start=1e-4, beta_end=0.02,
                beta_schedule="linear", prediction_type="v_prediction",
                timestep_spacing="trailing", steps_offset=1)  # fmt: skip
SNR_CLIP = 5.0
EMPTY_CAPTIONS = 0.1
KL_WEIGHT = 1e-4
DEFAULT_STEPS, DEFAULT_GUIDANCE = 16, 2.0
TOKENS = 77
RETRIEVAL = 100  # captions to choose among


# --- Models ----------------------------------------------------------------------------------


def make_vae(tiny):
    """3.2 M parameters; 1.2 GFLOP to encode a picture, 3.3 to decode it."""
    return AutoencoderKL(
        sample_size=emoji.EDGE, latent_channels=4, scaling_factor=1.0, layers_per_block=1,
        block_out_channels=(16, 16, 32) if tiny else (48, 96, 128), norm_num_groups=16,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
    )  # fmt: skip


def make_text_encoder(vocabulary, tiny):
    width = 64 if tiny else 192
    return CLIPTextModel(CLIPTextConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=1 if tiny else 4, num_attention_heads=width // 64,
        projection_dim=width, max_position_embeddings=TOKENS, hidden_act="quick_gelu",
        bos_token_id=vocabulary - 2, eos_token_id=vocabulary - 1, pad_token_id=vocabulary - 1,
    ))  # fmt: skip


def make_unet(context, tiny):
    """16.4 M parameters, 3.5 GFLOP per latent and evaluation; attention at 16x16 and 8x8."""
    return UNet2DConditionModel(
        sample_size=emoji.EDGE // 4, in_channels=4, out_channels=4,
        block_out_channels=(64, 64) if tiny else (128, 192), layers_per_block=1 if tiny else 2,
        attention_head_dim=(1, 1) if tiny else (2, 3),  # heads; 64 channels each
        down_block_types=("CrossAttnDownBlock2D",) * 2, up_block_types=("CrossAttnUpBlock2D",) * 2,
        cross_attention_dim=context, use_linear_projection=True,
    )  # fmt: skip


def text_states(encoder, ids):
    """CLIPTextModel's last hidden state. Spelled out: the library's own forward makes its mask in a
    way that no CUDA graph can capture in every version; `check_text_states` compares the two."""
    model = getattr(encoder, "text_model", encoder)
    hidden = model.embeddings(input_ids=ids)
    for layer in model.encoder.layers:
        attention, x = layer.self_attn, layer.layer_norm1(hidden)
        q, k, v = (project(x).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
                   for project in (attention.q_proj, attention.k_proj, attention.v_proj))  # fmt: skip
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + attention.out_proj(x.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.layer_norm2(hidden))
    return model.final_layer_norm(hidden)


@torch.no_grad()
def check_text_states(encoder, ids):
    error = (text_states(encoder, ids) - encoder(input_ids=ids).last_hidden_state).abs().max().item()
    if not error < 1e-3:
        raise SystemExit(f"text_states is {error:.2g} off transformers' CLIPTextModel")


class Denoiser(nn.Module):
    """Noisy latents, timesteps and token ids to v; one module, so that it compiles as one."""

    def __init__(self, unet, text):
        super().__init__()
        self.unet, self.text = unet, text

    def forward(self, noisy, timesteps, ids):
        states = text_states(self.text, ids)
        return self.unet(noisy, timesteps, encoder_hidden_states=states, return_dict=False)[0]


class Judge(nn.Module):
    """Unit vectors of pictures and of captions; the pair that belongs together is closest."""

    def __init__(self, vocabulary, width=256):
        super().__init__()
        channels = (3, 64, 128, 192, 256)
        self.picture = nn.Sequential(
            *(layer for a, b in zip(channels, channels[1:])
              for layer in (nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU(),
                            nn.Conv2d(b, b, 3, stride=2, padding=1), nn.GroupNorm(8, b), nn.SiLU())),
            nn.Flatten(), nn.Linear(256 * 16, width),
        )  # fmt: skip
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(TOKENS, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True,
                                           norm_first=True)  # fmt: skip
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.caption = nn.Linear(width, width)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.end = vocabulary - 1  # ends a caption and pads it

    def see(self, pictures):
        """Pictures in [-1, 1], [n, 3, 64, 64]."""
        return F.normalize(self.picture(pictures).float(), dim=-1)

    def read(self, ids):
        kept = ids != self.end
        x = self.layers(self.tokens(ids) + self.places, src_key_padding_mask=~kept)
        mean = (x * kept[..., None]).sum(1) / kept.sum(1, keepdim=True)
        return F.normalize(self.caption(mean).float(), dim=-1)


# --- Data on the device ----------------------------------------------------------------------


def to_unit(images):
    """uint8 [n, 64, 64, 3] to [-1, 1] in [n, 3, 64, 64]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def tokenize(tokenizer, texts):
    ids = tokenizer(texts, padding="max_length", truncation=True, max_length=TOKENS)["input_ids"]
    return torch.tensor(ids, dtype=torch.int16)


class Draw:
    """Indices by given weights; only tensor operations, for a graph."""

    def __init__(self, weights, device):
        cumulative = np.cumsum(weights, dtype=np.float64)
        self.cumulative = torch.tensor(cumulative / cumulative[-1], dtype=torch.float32).to(device)

    def __call__(self, n):
        place = torch.rand(n, device=self.cumulative.device)
        return torch.searchsorted(self.cumulative, place).clamp_max(len(self.cumulative) - 1)


def autocast(device):
    # cache_enabled: a cast of the weights kept from one step would go stale in the next. CPUs are
    # slower in bfloat16 than in float32.
    return torch.autocast(device.type, torch.bfloat16, device.type == "cuda", cache_enabled=False)


def per_name(rows):
    """The weight of each row when the skin tones of a name weigh as much as one picture."""
    tones = {}
    for row in rows:
        tones[row.base] = tones.get(row.base, 0) + row.toned
    return np.array([1 / tones[row.base] if row.toned else 1.0 for row in rows])


# --- Stages ----------------------------------------------------------------------------------


def gradient_loss(a, b):
    """L1 of the differences of neighbours, at four scales: edges in the right places."""
    loss = 0.0
    for _ in range(4):
        d = a - b
        loss = loss + d.diff(dim=-1).abs().mean() + d.diff(dim=-2).abs().mean()
        a, b = F.avg_pool2d(a, 2), F.avg_pool2d(b, 2)
    return loss


class Pictures:
    """Batches of pictures: mirrored, with channels exchanged, moved, or four small ones in one."""

    def __init__(self, images, draw, device):
        self.images, self.draw = torch.from_numpy(images.copy()).to(device), draw
        self.device = device

    def __call__(self, n):
        def chance(p):
            return torch.rand(n, 1, 1, 1, device=self.device) < p

        x = to_unit(self.images[self.draw(n)])
        tiles = F.avg_pool2d(x, 2)[torch.randint(n, (n, 4), device=self.device)]
        rows = [torch.cat([tiles[:, 2 * i], tiles[:, 2 * i + 1]], 3) for i in (0, 1)]
        x = torch.where(chance(0.2), torch.cat(rows, 2), x)
        x = torch.where(chance(0.5), x.flip(3), x)
        x = torch.where(chance(0.15), torch.cat([x[:, 1:], x[:, :1]], 1), x)
        x = torch.where(chance(0.15), x.flip(1), x)
        moved = F.pad(x, (4, 4, 4, 4), value=1.0)
        offset = torch.randint(9, (n, 2), device=self.device)
        steps = torch.arange(emoji.EDGE, device=self.device)
        ys, xs = offset[:, :1] + steps, offset[:, 1:] + steps
        moved = moved.permute(0, 2, 3, 1)[
            torch.arange(n, device=self.device)[:, None, None], ys[:, :, None], xs[:, None, :]]
        return torch.where(chance(0.5), moved.permute(0, 3, 1, 2), x)


def train_vae(args, device):
    images, rows = emoji.load(args.data)
    weights = per_name(rows)
    pictures = Pictures(images, Draw(weights, device), device)
    vae = make_vae(args.tiny).to(device, memory_format=torch.channels_last).train()

    def pass_through(x, noise):
        posterior = vae.encode(x).latent_dist
        mean, log_variance = posterior.mean.float(), posterior.logvar.float()
        latents = mean + (0.5 * log_variance).exp() * noise
        return mean, log_variance, vae.decode(latents).sample.float()

    forward = torch.compile(pass_through) if args.compile else pass_through

    def loss():
        x = pictures(args.batch).contiguous(memory_format=torch.channels_last)
        noise = torch.randn(args.batch, 4, emoji.EDGE // 4, emoji.EDGE // 4, device=device)
        with autocast(device):
            mean, log_variance, y = forward(x, noise)
        kl = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
        return (y - x).abs().mean() + 0.5 * gradient_loss(y, x) + KL_WEIGHT * kl

    report_size("vae", vae)
    trainer = Trainer(loss, vae.parameters(), args.ema_decay, not args.no_graph)
    trainer.train("vae", args.minutes, args.learning_rate, args.decay or 0.4, args.every)
    trainer.load_averages()
    vae = vae.eval().to(memory_format=torch.contiguous_format)
    draw = torch.from_numpy(images[np.random.RandomState(0).choice(
        len(images), min(1024, len(images)), p=weights / weights.sum())]).to(device)  # fmt: skip
    standardise(vae, to_unit(draw))
    vae.half().save_pretrained(args.model / "vae")
    vae.float()
    error = squared_error(vae, to_unit(draw))
    print(json.dumps({"stage": "vae", "reconstruction_psnr": round(-10 * math.log10(error), 2)}))


@torch.no_grad()
def encode(vae, x, batch=256):
    moments = [vae.encode(part).latent_dist for part in x.split(batch)]
    return torch.cat([m.mean for m in moments]), torch.cat([m.logvar for m in moments])


@torch.no_grad()
def standardise(vae, x):
    """Folds the mean and the deviation of each latent channel into the 1x1 convolutions beside."""
    mean, log_variance = encode(vae, x)
    centre = mean.mean((0, 2, 3))
    scale = ((mean.var((0, 2, 3), correction=0) + log_variance.exp().mean((0, 2, 3)))).sqrt()
    outward, inward = vae.quant_conv, vae.post_quant_conv
    n = len(scale)
    outward.weight[:n] /= scale[:, None, None, None]
    outward.bias[:n] = (outward.bias[:n] - centre) / scale
    outward.bias[n:] -= 2 * scale.log()
    inward.bias += inward.weight[:, :, 0, 0] @ centre
    inward.weight *= scale[None, :, None, None]
    after, _ = encode(vae, x)
    print(json.dumps({"stage": "vae", "latent_deviation": scale.tolist(), "latent_mean":
                      centre.tolist(), "mean_after": after.mean((0, 2, 3)).tolist()}))  # fmt: skip


@torch.no_grad()
def squared_error(vae, x):
    """Of reconstructions from the posterior's mean, pixels in [0, 1]."""
    y = torch.cat([vae.decode(part).sample for part in encode(vae, x)[0].split(256)])
    return F.mse_loss(y.clamp(-1, 1) / 2, x / 2).item()


def train_judge(args, device):
    images, rows = emoji.load(args.data)
    tokenizer, _ = open_tokenizer(args, rows)
    rng = emoji.random.Random(3)
    rows = [row for row in rows if row.name]
    texts = [emoji.caption(rng, emoji.describe(rng, row)) for row in rows for _ in range(8)]
    tokens = tokenize(tokenizer, texts).view(len(rows), 8, TOKENS).to(device)
    draw = Draw(per_name(rows), device)
    pixels = torch.from_numpy(images[[row.index for row in rows]]).to(device)
    judge = Judge(len(tokenizer)).to(device)

    def loss():
        n = args.batch
        index = draw(n)
        x = to_unit(pixels[index])
        # What drawn pictures differ in from real ones: place, colour, blur, noise.
        moved = F.grid_sample(x, affine_grids(n, device), padding_mode="border", align_corners=False)
        blur = F.avg_pool2d(moved, 3, 1, 1, count_include_pad=False)
        x = torch.lerp(moved, blur, torch.rand(n, 1, 1, 1, device=device))
        x = x * (1 + 0.1 * torch.randn(n, 3, 1, 1, device=device))
        x = x + 0.1 * torch.rand(n, 1, 1, 1, device=device) * torch.randn_like(x)
        ids = tokens[index, torch.randint(8, (n,), device=device)].long()
        with autocast(device):
            seen, read = judge.see(x), judge.read(ids)
        scores = seen @ read.T * judge.log_scale.exp().clamp_max(50)
        # The same row twice in a batch is no wrong answer.
        same = (index[:, None] == index[None]).fill_diagonal_(False)
        scores = scores.masked_fill(same, -1e4)
        target = torch.arange(n, device=device)
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2

    report_size("judge", judge)
    trainer = Trainer(loss, judge.parameters(), args.ema_decay, not args.no_graph)
    trainer.train("judge", args.minutes, args.learning_rate, args.decay or 0.4, args.every)
    trainer.load_averages()
    args.judge.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.half().contiguous() for k, v in judge.state_dict().items()}, args.judge)


def affine_grids(n, device):
    """Moves by up to 6 pixels, scales by up to 12 %, mirrors nothing."""
    scale = 1 + 0.12 * (2 * torch.rand(n, device=device) - 1)
    shift = 0.18 * (2 * torch.rand(n, 2, device=device) - 1)
    zero = torch.zeros_like(scale)
    theta = torch.stack([torch.stack([scale, zero, shift[:, 0]], 1),
                         torch.stack([zero, scale, shift[:, 1]], 1)], 1)  # fmt: skip
    return F.affine_grid(theta, (n, 3, emoji.EDGE, emoji.EDGE), align_corners=False)


def open_tokenizer(args, rows):
    fillers = emoji.write_tokenizer(args.model / "tokenizer", CLIP, rows)
    return CLIPTokenizer.from_pretrained(args.model / "tokenizer"), fillers


def train_diffusion(args, device):
    images, rows = emoji.load(args.data)
    tokenizer, fillers = open_tokenizer(args, rows)
    tiny = dict(pairs=60, captions=2, limit=40) if args.tiny else {}
    variants = emoji.make_variants(images, rows, fillers, **tiny)
    draw = Draw(variants.weights, device)
    count, forms = len(variants.images), len(variants.captions[0])
    tokens = tokenize(tokenizer, [text for texts in variants.captions for text in texts])
    tokens = tokens.view(count, forms, TOKENS).to(device)
    empty = tokenize(tokenizer, [""]).to(device)
    vae = AutoencoderKL.from_pretrained(args.model / "vae").float().to(device).eval()
    parts = [encode(vae, to_unit(part.to(device)))
             for part in torch.from_numpy(variants.images).split(2048)]  # fmt: skip
    means = torch.cat([mean for mean, _ in parts])
    deviations = torch.cat([(0.5 * log_variance).exp() for _, log_variance in parts])
    print(json.dumps({"stage": "diffusion", "variants": count, "captions": count * forms,
                      "latent_std": means.std().item()}), flush=True)  # fmt: skip

    if args.resume:
        text = CLIPTextModel.from_pretrained(args.model / "text_encoder").float()
        unet = UNet2DConditionModel.from_pretrained(args.model / "unet").float()
    else:
        text = make_text_encoder(len(tokenizer), args.tiny)
        unet = make_unet(text.config.hidden_size, args.tiny)
    check_text_states(text, empty.cpu().long())  # on the CPU: TF32 would be in the way
    unet.to(device, memory_format=torch.channels_last)
    denoiser = Denoiser(unet, text.to(device)).train()
    report_size("unet", unet)
    report_size("text_encoder", text)
    scheduler = DPMSolverMultistepScheduler(**SCHEDULE)
    signal_power = scheduler.alphas_cumprod.to(device)
    forward = torch.compile(denoiser) if args.compile else denoiser

    def loss():
        n = args.batch
        index = draw(n)
        ids = tokens[index, torch.randint(forms, (n,), device=device)]
        dropped = torch.rand(n, 1, device=device) < EMPTY_CAPTIONS
        ids = torch.where(dropped, empty, ids).long()
        latents = means[index] + deviations[index] * torch.randn_like(means[index])
        noise = torch.randn_like(latents)
        timesteps = torch.randint(TRAIN_STEPS, (n,), device=device)
        power = signal_power[timesteps].view(n, 1, 1, 1)
        signal, sigma = power.sqrt(), (1 - power).sqrt()
        with autocast(device):
            v = forward(signal * latents + sigma * noise, timesteps, ids)
        snr = power / (1 - power)
        # 1 where noise rules, as for v; as min-SNR, at most SNR_CLIP on the image, where little is left.
        weight = (snr.clamp_max(SNR_CLIP) + 1) / (snr + 1)
        return (weight * (v.float() - (signal * noise - sigma * latents)) ** 2).mean()

    trainer = Trainer(loss, denoiser.parameters(), args.ema_decay, not args.no_graph)
    _, steps = trainer.train("diffusion", args.minutes, args.learning_rate, args.decay, args.every)
    trainer.load_averages()
    note_training(args, steps)
    unet.half().eval().to(memory_format=torch.contiguous_format).save_pretrained(args.model / "unet")
    text.half().eval().save_pretrained(args.model / "text_encoder")
    scheduler.save_pretrained(args.model / "scheduler")
    index = {
        "_class_name": "StableDiffusionPipeline",
        "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "scheduler": ["diffusers", "DPMSolverMultistepScheduler"],
        "safety_checker": [None, None],
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "requires_safety_checker": False,
        "_denoised": {"default_steps": DEFAULT_STEPS, "default_guidance_scale": DEFAULT_GUIDANCE},
    }
    (args.model / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def note_training(args, steps):
    """Adds this run to training.json, which the card reads."""
    file = args.model / "training.json"
    runs = json.loads(file.read_text()) if args.resume and file.exists() else []
    runs.append({"minutes": args.minutes, "steps": steps, "batch": args.batch,
                 "learning_rate": args.learning_rate, "decay": args.decay})  # fmt: skip
    file.write_text(json.dumps(runs) + "\n")


def report_size(name, model):
    print(json.dumps({"part": name, "parameters": sum(w.numel() for w in model.parameters())}),
          flush=True)  # fmt: skip


# --- Figures ---------------------------------------------------------------------------------


def open_pipeline(folder, device):
    return StableDiffusionPipeline.from_pretrained(
        folder, torch_dtype=torch.float32, safety_checker=None, feature_extractor=None
    ).to(device)  # fmt: skip


def draw_prompts(pipeline, prompts, steps, guidance, batch=100):
    """uint8 [n, 64, 64, 3]; prompt i from the noise of seed i."""
    pipeline.set_progress_bar_config(disable=True)
    drawn = []
    for first in range(0, len(prompts), batch):
        texts = prompts[first : first + batch]
        noise = [torch.Generator().manual_seed(first + i) for i in range(len(texts))]
        drawn.append(pipeline(texts, num_inference_steps=steps, guidance_scale=guidance,
                              height=emoji.EDGE, width=emoji.EDGE, generator=noise,
                              output_type="np").images)  # fmt: skip
    return (np.concatenate(drawn) * 255).round().astype(np.uint8)


@torch.no_grad()
def retrieval(judge, tokenizer, images, captions, device):
    """The fraction of pictures whose own caption is the closest of `captions`."""
    seen = judge.see(to_unit(torch.from_numpy(images).to(device)))
    read = judge.read(tokenize(tokenizer, captions).long().to(device))
    return ((seen @ read.T).argmax(1).cpu() == torch.arange(len(images))).float().mean().item()


@torch.no_grad()
def through(vae, images, device):
    """The pictures as they come back from the VAE: the best that any latent can do."""
    mean, _ = encode(vae, to_unit(torch.from_numpy(images).to(device)))
    y = torch.cat([vae.decode(part).sample for part in mean.split(256)]).clamp(-1, 1)
    return ((y + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def grid(images, columns):
    rows = [np.concatenate(list(images[i : i + columns]), 1) for i in range(0, len(images), columns)]
    return Image.fromarray(np.concatenate(rows, 0))


def evaluate(args, device):
    images, rows = emoji.load(args.data)
    seen, unseen = emoji.split(rows)
    tokenizer = CLIPTokenizer.from_pretrained(args.model / "tokenizer")
    judge = Judge(len(tokenizer))
    judge.load_state_dict({k: v.float() for k, v in load_file(args.judge).items()})
    judge = judge.to(device).eval()
    pipeline = open_pipeline(args.model, device)
    figures = {"captions": args.captions, "real": {}, "decoded": {}, "drawn": []}
    sets = {name: emoji.sample_of(part, args.captions)
            for name, part in (("seen", seen), ("held out", unseen))}  # fmt: skip
    for name, chosen in sets.items():
        real = images[[row.index for row in chosen]]
        names = [row.name for row in chosen]
        figures["real"][name] = retrieval(judge, tokenizer, real, names, device)
        decoded = through(pipeline.vae, real, device)
        figures["decoded"][name] = retrieval(judge, tokenizer, decoded, names, device)
    for steps in args.steps:
        for guidance in args.guidance:
            line = {"steps": steps, "guidance": guidance}
            for name, chosen in sets.items():
                names = [row.name for row in chosen]
                drawn = draw_prompts(pipeline, names, steps, guidance)
                line[name] = retrieval(judge, tokenizer, drawn, names, device)
                if (steps, guidance) == (DEFAULT_STEPS, DEFAULT_GUIDANCE):
                    grid(drawn, 10).save(args.model / f"{name.replace(' ', '_')}.png")
            print(json.dumps(line), flush=True)
            figures["drawn"].append(line)
    prompts = emoji.SEEN_PROMPTS + emoji.COMPOSED_PROMPTS
    drawn = draw_prompts(pipeline, [p for p in prompts for _ in range(2)],
                         DEFAULT_STEPS, DEFAULT_GUIDANCE)  # fmt: skip
    grid(drawn, 8).save(args.model / "grid.png")
    (args.model / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    (args.model / "README.md").write_text(card(args, pipeline, figures))
    print(json.dumps({"real": figures["real"], "decoded": figures["decoded"]}))


def card(args, pipeline, figures):
    def size(part):
        return f"{sum(w.numel() for w in part.parameters()):,}"

    def percent(x):
        return f"{100 * x:.0f} %"

    runs = json.loads((args.model / "training.json").read_text())
    real, decoded = figures["real"], figures["decoded"]
    lines = "\n".join(
        f"| drawn, {line['steps']} steps, guidance {line['guidance']:g} | {percent(line['seen'])} | "
        f"{percent(line['held out'])} |" for line in figures["drawn"])  # fmt: skip
    trained = "\n".join(
        f"- {run['minutes']:g} minutes: {run['steps']:,} steps of {run['batch']}, learning rate "
        f"{run['learning_rate']:g}, falling to 0 over the last {percent(run['decay'])}" for run in runs)  # fmt: skip
    weights = sum(f.stat().st_size for f in args.model.rglob("*.safetensors")) / 1e6
    rows_of = [", ".join(p) for p in (emoji.SEEN_PROMPTS, emoji.COMPOSED_PROMPTS)]
    return CARD.format(
        vae=size(pipeline.vae), text=size(pipeline.text_encoder), unet=size(pipeline.unet),
        vocabulary=f"{len(pipeline.tokenizer):,}", weights=f"{weights:.1f}", lines=lines,
        decoded_seen=percent(decoded["seen"]), decoded_held=percent(decoded["held out"]),
        real_seen=percent(real["seen"]), real_held=percent(real["held out"]), trained=trained,
        steps=DEFAULT_STEPS, guidance=DEFAULT_GUIDANCE, captions=figures["captions"],
        chance=f"{100 / figures['captions']:g}", seen=rows_of[0], composed=rows_of[1],
    )  # fmt: skip


CARD = """# emoji-64

Emoji from a few words, 64×64. The text-to-image model that ships with denoised: an unchanged
`StableDiffusionPipeline` directory of diffusers, small enough for two CPU cores.

![Two pictures of each prompt](grid.png)

Rows 1 and 2, two pictures each: prompts whose pictures were seen in training ({seen}). Rows 3 and 4:
prompts that were not, put together from known words ({composed}).

| | |
|---|---|
| UNet | `UNet2DConditionModel`, {unet} parameters, 16×16×4 latents |
| Text encoder | `CLIPTextModel`, {text} parameters, {vocabulary} tokens |
| VAE | `AutoencoderKL`, {vae} parameters, 4 pixels a latent; latents have variance 1, `scaling_factor` is 1 |
| Tokenizer | `CLIPTokenizer` with those merges of CLIP that the captions need, and those of common words |
| Weights | float16, {weights} MB |
| Objective | v-prediction, 1000 steps, betas linear from 0.0001 to 0.02 |
| Defaults | `DPMSolverMultistepScheduler`, {steps} steps, guidance scale {guidance:g} |

## How often is the picture what was asked for?
A dual encoder of pictures and captions chooses, for each picture, the nearest of {captions} captions;
chance is {chance} %. It is trained on all pictures, the held-out ones too. The generator has seen
neither the held-out pictures nor their names.

| pictures | captions seen | captions held out |
|---|---|---|
| real | {real_seen} | {real_held} |
| real, through the VAE | {decoded_seen} | {decoded_held} |
{lines}

`seen.png` and `held_out.png` show the {captions} pictures each.

## Training
`tests/reference/train_emoji.py`, one GPU. The UNet and the text encoder together:

{trained}

Of the pictures with a name, 8 % of the names are held out with all their skin tones. The five skin
tones of a name weigh as much as one picture. Besides each picture and its mirror image, where sides do
not matter, the model sees small ones, recoloured ones ("blue banana") and pairs ("cat and pizza").

## Limits
It draws emoji and nothing else. It knows the words of emoji names and keywords; other words mean
little to it. What is far from every emoji comes out as something near. It was trained on pictures of
people with their skin tones; a prompt without one gives the yellow of the plain emoji.

## Data and licence
Trained on [Noto Emoji](https://github.com/googlefonts/noto-emoji) by Google, Apache-2.0, with names
and keywords of Unicode's CLDR; the model may reproduce its training pictures. The merges of the
tokenizer are from OpenAI's CLIP (MIT).
"""


def numbers(kind):
    return lambda text: [kind(part) for part in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=["vae", "judge", "diffusion", "evaluate"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="the pipeline directory")
    parser.add_argument("--judge", type=Path, default=Path("out/emoji_judge.safetensors"))
    parser.add_argument("--minutes", type=float, default=4, help="of training steps")
    parser.add_argument("--batch", type=int, help="vae 128, others 512")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--decay", type=float, default=0.0,
                        help="the learning rate falls to 0 over this last fraction of the time")
    parser.add_argument("--ema-decay", type=float, default=0.999)
    parser.add_argument("--every", type=int, default=200, help="steps between two reports")
    parser.add_argument("--resume", action="store_true", help="diffusion: go on from --model")
    parser.add_argument("--compile", action="store_true", help="fuse with torch.compile")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graph of a step")
    parser.add_argument("--tiny", action="store_true", help="small parts, to try the stages")
    parser.add_argument("--captions", type=int, default=RETRIEVAL, help="to choose among")
    parser.add_argument("--steps", type=numbers(int), default=[DEFAULT_STEPS])
    parser.add_argument("--guidance", type=numbers(float), default=[DEFAULT_GUIDANCE, 3.0, 4.0, 6.0])
    args = parser.parse_args()
    args.batch = args.batch or (128 if args.stage == "vae" else 512)
    warnings.filterwarnings("ignore", category=FutureWarning)

    torch.manual_seed(args.resume)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.model.mkdir(parents=True, exist_ok=True)
    start = time.time()
    {"vae": train_vae, "judge": train_judge, "diffusion": train_diffusion,
     "evaluate": evaluate}[args.stage](args, device)  # fmt: skip
    print(json.dumps({"stage": args.stage, "whole_seconds": round(time.time() - start, 1)}))


if __name__ == "__main__":
    main()
