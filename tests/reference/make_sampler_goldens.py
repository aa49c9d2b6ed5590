#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/sampling/goldens/*.json: diffusers' schedulers run in float64 on a fake denoiser.

    python tests/reference/make_sampler_goldens.py        # needs torch, diffusers, scipy

Each case holds the scheduler config, what is asked, what the denoiser was told at every evaluation
and the state after it. The C++ test runs the compiled step plan on the same denoiser and noise.

diffusers computes its schedules in float32 by naming the dtype. Its modules are run here with
`torch` and `numpy` replaced by views of them whose float32 is float64, and torch's default dtype is
float64, so nothing is left in single precision. Four more changes:
  - _sigma_to_t snaps to an integer within 1e-6. DPM-Solver and UniPC truncate its result, and
    whether ln(exp(ln sigma)) lands above or below timestep 999 is an accident of the last bit.
  - with churn the model is asked at the state that step() is about to make, not before, as algorithm
    2 of EDM has it; diffusers' update is then the paper's.
  - the Brownian tree of DPM++ SDE is replaced by a draw of its own for every evaluation.
  - begin_index is set, as pipelines may: otherwise two equal first timesteps skip a step.
"""

import importlib
import json
import math
import pathlib
import sys
import types

import diffusers
import numpy as np
import torch

SHAPE = (1, 3, 1, 1)
STEPS = (1, 2, 5, 18, 50)
DRAWS = 128
# Draws by name; those of evaluations count from 0.
INITIAL, CHURN, SOURCE = DRAWS - 1, DRAWS - 2, DRAWS - 3


class Upcast:
    """A module whose float32 is float64."""

    def __init__(self, module, float64):
        self._module = module
        self.float32 = float64

    def __getattr__(self, name):
        return getattr(self._module, name)


def noise(draw):
    return torch.tensor(NOISE[draw], dtype=torch.float64).reshape(SHAPE)


NOISE = np.round(np.random.RandomState(20261121).randn(DRAWS, SHAPE[1]), 6)
draw = 0  # the evaluation whose noise a scheduler draws


def snap(sigma_to_t):
    def snapped(self, *args):
        t = sigma_to_t(self, *args)
        return np.where(np.abs(t - np.round(t)) < 1e-6, np.round(t), t)

    return snapped


def load(module_name, class_name):
    module = importlib.import_module(f"diffusers.schedulers.scheduling_{module_name}")
    module.torch = Upcast(torch, torch.float64)
    module.np = Upcast(np, np.float64)
    module.randn_tensor = lambda *args, **kwargs: noise(draw)
    module.BrownianTreeNoiseSampler = lambda *args: lambda *span: noise(draw)
    scheduler = getattr(module, class_name)
    if hasattr(scheduler, "_sigma_to_t"):
        scheduler._sigma_to_t = snap(scheduler._sigma_to_t)
    return scheduler


# Only for the Brownian tree that load() replaces.
sys.modules.setdefault("torchsde", types.ModuleType("torchsde"))
diffusers.logging.set_verbosity_error()
torch.set_default_dtype(torch.float64)
CLASSES = {
    "ddpm": load("ddpm", "DDPMScheduler"),
    "ddim": load("ddim", "DDIMScheduler"),
    "pndm": load("pndm", "PNDMScheduler"),
    "euler": load("euler_discrete", "EulerDiscreteScheduler"),
    "euler_ancestral": load("euler_ancestral_discrete", "EulerAncestralDiscreteScheduler"),
    "lms": load("lms_discrete", "LMSDiscreteScheduler"),
    "heun": load("heun_discrete", "HeunDiscreteScheduler"),
    "dpm_solver": load("dpmsolver_multistep", "DPMSolverMultistepScheduler"),
    "uni_pc": load("unipc_multistep", "UniPCMultistepScheduler"),
    "lcm": load("lcm", "LCMScheduler"),
    "edm_euler": load("edm_euler", "EDMEulerScheduler"),
    "edm_dpm_solver": load("edm_dpmsolver_multistep", "EDMDPMSolverMultistepScheduler"),
    "dpmpp_sde": load("dpmsolver_sde", "DPMSolverSDEScheduler"),
    "deis": load("deis_multistep", "DEISMultistepScheduler"),
    "kdpm2": load("k_dpm_2_discrete", "KDPM2DiscreteScheduler"),
    "kdpm2_ancestral": load("k_dpm_2_ancestral_discrete", "KDPM2AncestralDiscreteScheduler"),
    "tcd": load("tcd", "TCDScheduler"),
    "dpm_solver_singlestep": load("dpmsolver_singlestep", "DPMSolverSinglestepScheduler"),
    "flow_match_euler": load("flow_match_euler_discrete", "FlowMatchEulerDiscreteScheduler"),
    "sa_solver": load("sasolver", "SASolverScheduler"),
    "consistency": load("consistency_models", "CMStochasticIterativeScheduler"),
    "score_sde_ve": load("sde_ve", "ScoreSdeVeScheduler"),
}


def fake_model(u, t):
    """The model's output for scaled input u at condition t; nonlinear in both."""
    phase = torch.arange(SHAPE[1], dtype=torch.float64).reshape(SHAPE)
    return torch.tanh(0.7 * u + 0.3 * torch.sin(0.013 * float(t) + phase))


def fake_variance(u, t):
    """The learned variance, in (0, 1)."""
    phase = torch.arange(SHAPE[1], dtype=torch.float64).reshape(SHAPE)
    return 0.5 + 0.4 * torch.sin(u + 0.02 * float(t) + phase)


def numbers(tensor):
    return [float(f"{v:.14g}") for v in tensor.flatten().tolist()]


class Recorder:
    def __init__(self):
        self.conditions, self.states, self.x0s = [], [], []

    def case(self, steps):
        case = {"conditions": self.conditions, "states": self.states}
        if steps == 5 and len(self.x0s) == len(self.states):
            case["x0"] = self.x0s
        return case


def churned(scheduler, i, x, t, s_churn=0.0, s_tmin=0.0, s_tmax=math.inf, s_noise=1.0, **_):
    """What step() is about to make of x, with the model's scaled input and condition there."""
    sigma = scheduler.sigmas[i]
    gamma = min(s_churn / (len(scheduler.sigmas) - 1), 2**0.5 - 1) if s_tmin <= sigma <= s_tmax else 0
    if gamma == 0:
        return x, scheduler.scale_model_input(x, t), t
    raised = sigma * (1 + gamma)
    x = x + noise(draw) * s_noise * (raised**2 - sigma**2) ** 0.5
    if hasattr(scheduler, "precondition_inputs"):
        return x, scheduler.precondition_inputs(x, raised), scheduler.precondition_noise(raised)
    logs = np.log(np.array(((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod) ** 0.5))
    return x, x / (raised**2 + 1) ** 0.5, scheduler._sigma_to_t(raised.numpy(), logs)


def run(scheduler, steps, strength=1.0, **step_arguments):
    """The loop of diffusers' pipelines, image to image when strength < 1."""
    global draw
    scheduler.set_timesteps(steps)
    timesteps = scheduler.timesteps
    count = getattr(scheduler, "num_inference_steps", steps)
    start = count - max(1, min(int(count * strength), count))
    begin = start * scheduler.order
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    if strength < 1:
        if hasattr(scheduler, "scale_noise"):
            x = scheduler.scale_noise(noise(SOURCE), timesteps[begin : begin + 1], noise(INITIAL))
        else:
            x = scheduler.add_noise(noise(SOURCE), noise(INITIAL), timesteps[begin : begin + 1])
    else:
        x = noise(INITIAL) * getattr(scheduler, "init_noise_sigma", 1)
    record = Recorder()
    for i, t in enumerate(timesteps[begin:]):
        u = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        told = t
        if "s_churn" in step_arguments:
            draw = CHURN if i == 0 else i - 1
            x_hat, u, told = churned(scheduler, begin + i, x, t, **step_arguments)
            if i > 0:  # the plan adds this churn where the step before ends
                record.states[-1] = numbers(x_hat)
        else:
            draw = i
        f = fake_model(u, told)
        if (scheduler.config.get("variance_type") or "").startswith("learned"):
            f = torch.cat([f, fake_variance(u, t)], dim=1)
        out = scheduler.step(f, t, x, **step_arguments)
        x = out.prev_sample
        record.conditions.append(float(f"{float(told):.14g}"))
        record.states.append(numbers(x))
        if hasattr(out, "pred_original_sample"):
            record.x0s.append(numbers(out.pred_original_sample))
    return record


def walk(scheduler, sigmas, initial, condition, denoise):
    """A diffusers scheduler on someone else's sigmas and denoiser, through epsilon = (x - D)/sigma."""
    global draw
    scheduler.set_timesteps(len(sigmas) - 1)
    heun = scheduler.order == 2
    sigmas = torch.as_tensor(sigmas)
    if heun:
        sigmas = torch.cat([sigmas[:1], sigmas[1:-1].repeat_interleave(2), sigmas[-1:]])
    scheduler.sigmas = sigmas
    scheduler.timesteps = torch.arange(len(sigmas) - 1, dtype=torch.float64)
    scheduler.set_begin_index(0)
    x = noise(INITIAL) * initial
    record = Recorder()
    for draw, t in enumerate(scheduler.timesteps):
        sigma = sigmas[draw]
        scheduler.scale_model_input(x, t)
        x0 = denoise(x, sigma)
        x = scheduler.step((x - x0) / sigma, t, x).prev_sample
        record.conditions.append(float(f"{float(condition(sigma)):.14g}"))
        record.states.append(numbers(x))
    return record


def edm_denoiser(config):
    data = config.get("sigma_data", 0.5)
    sign = -1 if config.get("prediction_type") == "v_prediction" else 1

    def denoise(x, sigma):
        """arXiv 2206.00364, equation 7 and table 1."""
        norm = math.sqrt(sigma**2 + data**2)
        f = fake_model(x / norm, 0.25 * math.log(sigma))
        return data**2 / norm**2 * x + sign * sigma * data / norm * f

    return denoise


def edm_heun(config, steps, s_churn=0.0, s_tmin=0.0, s_tmax=math.inf, s_noise=1.0):
    """Algorithm 2 of arXiv 2206.00364 as printed; algorithm 1 when s_churn is 0."""
    lo, hi, rho = config.get("sigma_min", 0.002), config.get("sigma_max", 80.0), config.get("rho", 7.0)
    t = [
        (hi ** (1 / rho) + i / max(steps - 1, 1) * (lo ** (1 / rho) - hi ** (1 / rho))) ** rho
        for i in range(steps)
    ] + [0.0]
    denoise = edm_denoiser(config)
    record = Recorder()
    x = t[0] * noise(INITIAL)
    fresh = noise(CHURN)
    for i in range(steps):
        gamma = min(s_churn / steps, math.sqrt(2) - 1) if s_tmin <= t[i] <= s_tmax else 0
        t_hat = t[i] + gamma * t[i]
        x_hat = x + math.sqrt(t_hat**2 - t[i] ** 2) * s_noise * fresh
        if i > 0:  # the plan adds this churn where the step before ends
            record.states[-1] = numbers(x_hat)
        d = (x_hat - denoise(x_hat, t_hat)) / t_hat
        x = x_hat + (t[i + 1] - t_hat) * d
        record.conditions.append(0.25 * math.log(t_hat))
        record.states.append(numbers(x))
        if t[i + 1] != 0:
            d_next = (x - denoise(x, t[i + 1])) / t[i + 1]
            x = x_hat + (t[i + 1] - t_hat) * (d / 2 + d_next / 2)
            record.conditions.append(0.25 * math.log(t[i + 1]))
            record.states.append(numbers(x))
        fresh = noise(len(record.states) - 1)
    return record


def score_sde_ve(config, steps, strength=1.0):
    """The loop of ScoreSdeVePipeline. Its images are in [0, 1], the states here in [-1, 1]."""
    global draw
    scheduler = CLASSES["score_sde_ve"](**config)
    scheduler.set_timesteps(steps)
    scheduler.set_sigmas(steps)
    start = steps - max(1, min(int(steps * strength), steps))
    x = noise(INITIAL) * scheduler.init_noise_sigma
    if strength < 1:
        x = (noise(SOURCE) + 1) / 2 + scheduler.sigmas[start] * noise(INITIAL)
    record = Recorder()
    draw = 0
    for i in range(start, steps):
        sigma = scheduler.sigmas[i]
        for corrector in range(scheduler.config.correct_steps + 1):
            f = fake_model(x, sigma)
            record.x0s.append(numbers(2 * (x + sigma**2 * f) - 1))
            if corrector < scheduler.config.correct_steps:
                x = scheduler.step_correct(f, x).prev_sample
            else:
                out = scheduler.step_pred(f, scheduler.timesteps[i], x)
                x = out.prev_sample_mean if i + 1 == steps else out.prev_sample
            draw += 1
            record.conditions.append(float(f"{float(sigma):.14g}"))
            record.states.append(numbers(2 * x - 1))
    return record


files = {}


def add(file, name, config, params, steps, record):
    # A step of TCD has a default that is not a request's: pipelines pass 0.
    if "tcd" in (file, params.get("sampler")):
        params = {**params, "eta": params.get("eta", 0.3)}
    case = {"name": name, "config": config, "params": params, "steps": steps}
    files.setdefault(file, []).append(case | record.case(steps))


def own(sampler, name, config=None, steps=STEPS, params=None, step=None):
    """A class with a config of its own."""
    config = config or {}
    full = {"_class_name": CLASSES[sampler].__name__} | config
    for n in steps:
        strength = (params or {}).get("strength", 1.0)
        record = run(CLASSES[sampler].from_config(config), n, strength, **(step or {}))
        add(sampler, f"{sampler}/{name}/{n}", full, params or {}, n, record)


def swapped(config, name, sampler, steps=(5, 18)):
    """A class made from another class' config, as diffusers' from_config does."""
    for n in steps:
        scheduler = CLASSES[sampler].from_config(config)
        stochastic = sampler == "dpm_solver" and scheduler.config.algorithm_type.startswith("sde")
        params = {"sampler": "dpm_solver_sde" if stochastic else sampler}
        add("swapped", f"swapped/{name}/{sampler}/{n}", config, params, n, run(scheduler, n))


SPACINGS = ("linspace", "leading", "trailing")
PREDICTIONS = ("epsilon", "sample", "v_prediction")
CONVERSIONS = {"karras": "use_karras_sigmas", "exponential": "use_exponential_sigmas", "beta": "use_beta_sigmas"}
LATENT = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
ZERO_SNR = dict(rescale_betas_zero_snr=True, prediction_type="v_prediction", timestep_spacing="trailing")
TRAINED = dict(num_train_timesteps=64, trained_betas=[round(0.001 + 0.002 * i, 6) for i in range(64)])


def common(sampler, predictions=PREDICTIONS, spacings=SPACINGS):
    own(sampler, "default")
    for prediction in predictions:
        own(sampler, prediction, LATENT | dict(prediction_type=prediction))
    for spacing in spacings:
        own(sampler, spacing, LATENT | dict(timestep_spacing=spacing, steps_offset=1))
    # In two steps KDPM2's ancestral sigmas cancel to noise, even in float64.
    steps = (5, 18, 50) if sampler == "kdpm2_ancestral" else STEPS
    own(sampler, "squaredcos", dict(beta_schedule="squaredcos_cap_v2"), steps)
    own(sampler, "trained_betas", TRAINED)


def strengths(sampler, config=None):
    for strength in (0.05, 0.3, 0.75):
        own(sampler, f"strength_{strength}", config, (1, 5, 18), dict(strength=strength))


def conversions(sampler, **config):
    for name, field in CONVERSIONS.items():
        own(sampler, name, LATENT | config | {field: True})


common("ddpm")
for variance in ("fixed_small_log", "fixed_large", "learned", "learned_range"):
    own("ddpm", variance, dict(variance_type=variance))
own("ddpm", "unclipped", dict(clip_sample=False))
own("ddpm", "clip_range", dict(clip_sample_range=0.4))
own("ddpm", "sigmoid", dict(beta_schedule="sigmoid"))
own("ddpm", "laplace", dict(beta_schedule="laplace"))
own("ddpm", "zero_snr", ZERO_SNR)
strengths("ddpm")

common("ddim")
for eta in (0.3, 1.0):
    own("ddim", f"eta_{eta}", LATENT, params=dict(eta=eta), step=dict(eta=eta))
own("ddim", "alpha_not_one", LATENT | dict(set_alpha_to_one=False, clip_sample=False, steps_offset=1))
own("ddim", "clip_range", dict(clip_sample_range=0.4))
own("ddim", "zero_snr", ZERO_SNR | dict(clip_sample=False))
strengths("ddim")

PNDM = dict(skip_prk_steps=True)
own("pndm", "skip_prk", PNDM)
own("pndm", "stable_diffusion", LATENT | PNDM | dict(steps_offset=1, set_alpha_to_one=False))
own("pndm", "v_prediction", LATENT | PNDM | dict(prediction_type="v_prediction", set_alpha_to_one=True))
own("pndm", "trained_betas", PNDM | TRAINED)
own("pndm", "runge_kutta", steps=(4, 5, 18, 50))
own("pndm", "runge_kutta_v", LATENT | dict(prediction_type="v_prediction"), steps=(4, 5, 18, 50))
for spacing in SPACINGS:
    own("pndm", spacing, LATENT | PNDM | dict(timestep_spacing=spacing))
    own("pndm", f"runge_kutta_{spacing}", LATENT | dict(timestep_spacing=spacing), (5, 18, 50))

common("euler")
conversions("euler")
conversions("euler", timestep_spacing="leading", sigma_min=0.05, sigma_max=12.0)
own("euler", "log_linear", LATENT | dict(interpolation_type="log_linear"))
own("euler", "log_linear_karras", LATENT | dict(interpolation_type="log_linear", use_karras_sigmas=True))
own("euler", "continuous", dict(timestep_type="continuous", prediction_type="v_prediction", use_karras_sigmas=True, sigma_min=0.002, sigma_max=700.0))
own("euler", "zero_snr", ZERO_SNR)
own("euler", "sigma_min", LATENT | dict(final_sigmas_type="sigma_min"))
churn = dict(s_churn=3.0, s_tmin=0.05, s_tmax=10.0, s_noise=1.007)
# Not v: diffusers takes its output for one at sigma, though the state is at sigma_hat.
for prediction in ("epsilon", "sample"):
    own("euler", f"churn_{prediction}", LATENT | dict(prediction_type=prediction), params=churn, step=churn)
strengths("euler", LATENT)

common("euler_ancestral", predictions=("epsilon", "v_prediction"))
own("euler_ancestral", "zero_snr", ZERO_SNR)
strengths("euler_ancestral", LATENT)
for n in STEPS:
    donor = CLASSES["euler"](**LATENT, use_karras_sigmas=True)
    donor.set_timesteps(n)
    told = dict(zip(donor.sigmas.tolist(), donor.timesteps.tolist()))
    vp = lambda x, s: x - s * fake_model(x / math.sqrt(s**2 + 1), told[float(s)])
    record = walk(CLASSES["euler_ancestral"](**LATENT), donor.sigmas, donor.init_noise_sigma, lambda s: told[float(s)], vp)
    config = {"_class_name": "EulerAncestralDiscreteScheduler"} | LATENT
    add("euler_ancestral", f"euler_ancestral/karras/{n}", config, dict(schedule="karras"), n, record)

common("lms")
conversions("lms")
common("heun")
conversions("heun")
own("heun", "clip", LATENT | dict(clip_sample=True, clip_sample_range=0.4))
own("heun", "exp", dict(beta_schedule="exp"))
strengths("heun", LATENT)

common("dpm_solver")
conversions("dpm_solver")
for order in (1, 2, 3):
    for kind in ("midpoint", "heun"):
        for algorithm in ("dpmsolver++", "dpmsolver", "sde-dpmsolver++", "sde-dpmsolver"):
            if algorithm == "sde-dpmsolver" and order == 3:
                continue  # diffusers has no such update
            final = "zero" if algorithm.endswith("++") else "sigma_min"
            own("dpm_solver", f"{algorithm}_{order}_{kind}", LATENT | dict(solver_order=order, solver_type=kind, algorithm_type=algorithm, final_sigmas_type=final))
for algorithm in ("dpmsolver++", "dpmsolver"):
    for prediction in ("sample", "v_prediction"):
        own("dpm_solver", f"{algorithm}_{prediction}", LATENT | dict(algorithm_type=algorithm, prediction_type=prediction, final_sigmas_type="sigma_min"))
own("dpm_solver", "lu", LATENT | dict(use_lu_lambdas=True))
own("dpm_solver", "squaredcos_karras", dict(beta_schedule="squaredcos_cap_v2", use_karras_sigmas=True))
for spacing in SPACINGS:
    own("dpm_solver", f"clipped_lambda_{spacing}", dict(beta_schedule="squaredcos_cap_v2", lambda_min_clipped=-5.1, timestep_spacing=spacing))
own("dpm_solver", "full_order_final", LATENT | dict(solver_order=3, lower_order_final=False, final_sigmas_type="sigma_min"))
own("dpm_solver", "euler_at_final", LATENT | dict(euler_at_final=True, final_sigmas_type="sigma_min"))
own("dpm_solver", "karras_sigma_min", LATENT | dict(use_karras_sigmas=True, final_sigmas_type="sigma_min"))
own("dpm_solver", "zero_snr", ZERO_SNR)
strengths("dpm_solver", LATENT | dict(solver_order=3))

common("uni_pc")
conversions("uni_pc")
for order in (1, 2, 3):
    for kind in ("bh1", "bh2"):
        for x0 in (True, False):
            # At sigma 0 diffusers multiplies 0 by infinity but for bh2 with predict_x0.
            final = "zero" if x0 and kind == "bh2" else "sigma_min"
            own("uni_pc", f"{kind}_{order}_{'x0' if x0 else 'epsilon'}", LATENT | dict(solver_order=order, solver_type=kind, predict_x0=x0, final_sigmas_type=final))
for prediction in ("sample", "v_prediction"):
    own("uni_pc", f"epsilon_of_{prediction}", LATENT | dict(predict_x0=False, prediction_type=prediction, final_sigmas_type="sigma_min"))
own("uni_pc", "no_corrector", LATENT | dict(disable_corrector=[0, 2, 3], solver_order=3))
own("uni_pc", "full_order_final", LATENT | dict(lower_order_final=False, final_sigmas_type="sigma_min"))
own("uni_pc", "karras_range", LATENT | dict(use_karras_sigmas=True, sigma_min=0.05, sigma_max=12.0))
own("uni_pc", "zero_snr", ZERO_SNR)
strengths("uni_pc", LATENT | dict(solver_order=3))

own("lcm", "default")
for prediction in PREDICTIONS:
    own("lcm", prediction, dict(prediction_type=prediction))
own("lcm", "clip", dict(clip_sample=True, clip_sample_range=0.4, timestep_scaling=5.0))
own("lcm", "original_80", dict(original_inference_steps=80))
own("lcm", "zero_snr", dict(rescale_betas_zero_snr=True, prediction_type="v_prediction"))
strengths("lcm")

for sampler in ("dpmpp_sde", "kdpm2", "kdpm2_ancestral"):
    common(sampler, predictions=("epsilon", "v_prediction"))
    conversions(sampler)
    conversions(sampler, timestep_spacing="leading", sigma_min=0.05, sigma_max=12.0)
    strengths(sampler, LATENT)

common("deis")
conversions("deis")
for order in (1, 3):
    own("deis", f"order_{order}", LATENT | dict(solver_order=order))
own("deis", "full_order_final", LATENT | dict(solver_order=3, lower_order_final=False))
own("deis", "dpm_words", LATENT | dict(algorithm_type="dpmsolver++", solver_type="midpoint"))
strengths("deis", LATENT | dict(solver_order=3))

common("sa_solver")
conversions("sa_solver")
for predictor, corrector in ((1, 1), (1, 3), (2, 1), (3, 3), (4, 4)):
    for kind in ("data", "noise"):
        own("sa_solver", f"{kind}_{predictor}_{corrector}", LATENT | dict(predictor_order=predictor, corrector_order=corrector, algorithm_type=f"{kind}_prediction"))
own("sa_solver", "full_order_final", LATENT | dict(predictor_order=3, corrector_order=3, lower_order_final=False))
own("sa_solver", "clipped_lambda", dict(beta_schedule="squaredcos_cap_v2", lambda_min_clipped=-5.1))
strengths("sa_solver", LATENT | dict(predictor_order=3, corrector_order=3))

own("tcd", "default")
for prediction in PREDICTIONS:
    own("tcd", prediction, dict(prediction_type=prediction))
for eta in (0.0, 0.45, 1.0):
    own("tcd", f"eta_{eta}", params=dict(eta=eta), step=dict(eta=eta))
own("tcd", "original_80", dict(original_inference_steps=80))
own("tcd", "zero_snr", dict(rescale_betas_zero_snr=True, prediction_type="v_prediction"))
strengths("tcd")

common("dpm_solver_singlestep", spacings=())
conversions("dpm_solver_singlestep")
for order in (1, 2, 3):
    for kind in ("midpoint", "heun"):
        for algorithm in ("dpmsolver++", "dpmsolver", "sde-dpmsolver++"):
            for final in ("zero", "sigma_min"):
                if final == "zero" and algorithm == "dpmsolver":
                    continue  # diffusers refuses it
                own("dpm_solver_singlestep", f"{algorithm}_{order}_{kind}_{final}", LATENT | dict(solver_order=order, solver_type=kind, algorithm_type=algorithm, final_sigmas_type=final), (1, 2, 5, 6, 18))
own("dpm_solver_singlestep", "lower_order_final", LATENT | dict(solver_order=3, lower_order_final=True, final_sigmas_type="sigma_min"))
own("dpm_solver_singlestep", "clipped_lambda", dict(beta_schedule="squaredcos_cap_v2", lambda_min_clipped=-5.1))
own("dpm_solver_singlestep", "karras_sigma_min", LATENT | dict(use_karras_sigmas=True, final_sigmas_type="sigma_min"))
strengths("dpm_solver_singlestep", LATENT | dict(solver_order=3))

own("flow_match_euler", "default")
for shift in (0.5, 3.0):
    own("flow_match_euler", f"shift_{shift}", dict(shift=shift))
for name, field in CONVERSIONS.items():
    own("flow_match_euler", name, {"shift": 3.0, field: True})
own("flow_match_euler", "stochastic", dict(shift=3.0, stochastic_sampling=True))
strengths("flow_match_euler", dict(shift=3.0))

own("consistency", "default", steps=(1, 2, 5, 18, 40))
own("consistency", "unclipped", dict(clip_denoised=False, s_noise=1.1), (1, 2, 5, 18, 40))
own("consistency", "range", dict(num_train_timesteps=151, sigma_min=0.01, sigma_max=50.0, sigma_data=1.0, rho=5.0))
strengths("consistency")

SMALL = dict(sigma_max=50.0, num_train_timesteps=1000)
for name, config, steps, strength in (
    ("default", {}, STEPS, 1.0),
    ("cifar10", SMALL, STEPS, 1.0),
    ("two_correctors", SMALL | dict(correct_steps=2, snr=0.3), (1, 2, 5, 18), 1.0),
    ("no_corrector", SMALL | dict(correct_steps=0, sigma_min=0.1), STEPS, 1.0),
    ("early_end", SMALL | dict(sampling_eps=0.3), STEPS, 1.0),
    ("strength_0.05", SMALL, (1, 5, 18), 0.05),
    ("strength_0.3", SMALL, (1, 5, 18), 0.3),
    ("strength_0.75", SMALL, (1, 5, 18), 0.75),
):
    for n in steps:
        params = {} if strength == 1 else {"strength": strength}
        add("score_sde_ve", f"score_sde_ve/{name}/{n}", {"_class_name": "ScoreSdeVeScheduler"} | config, params, n, score_sde_ve(config, n, strength))

for prediction in ("epsilon", "v_prediction"):
    own("edm_euler", prediction, dict(prediction_type=prediction))
    own("edm_dpm_solver", prediction, dict(prediction_type=prediction))
RANGE = dict(sigma_min=0.01, sigma_max=50.0, sigma_data=1.0, rho=5.0)
for sampler in ("edm_euler", "edm_dpm_solver"):
    own(sampler, "range", RANGE)
    own(sampler, "exponential", dict(sigma_schedule="exponential"), STEPS[1:])
    own(sampler, "sigma_min", RANGE | dict(final_sigmas_type="sigma_min"), STEPS[1:])
    strengths(sampler)
churn = dict(s_churn=40.0, s_tmin=0.05, s_tmax=50.0, s_noise=1.003)
for prediction in ("epsilon", "v_prediction"):
    own("edm_euler", f"churn_{prediction}", dict(prediction_type=prediction), params=churn, step=churn)
for order in (1, 2, 3):
    for kind in ("midpoint", "heun"):
        for algorithm in ("dpmsolver++", "sde-dpmsolver++"):
            if order == 3 and algorithm.startswith("sde"):
                continue  # diffusers has no such update
            own("edm_dpm_solver", f"{algorithm}_{order}_{kind}", dict(solver_order=order, solver_type=kind, algorithm_type=algorithm))
own("edm_dpm_solver", "full_order_final", dict(solver_order=3, lower_order_final=False, euler_at_final=True))

EDM = {"_class_name": "EDMEulerScheduler"}
for n in STEPS:
    for name, config in (("default", {}), ("v_prediction", {"prediction_type": "v_prediction"}), ("range", RANGE)):
        add("edm_heun", f"edm_heun/{name}/{n}", EDM | config, dict(sampler="heun"), n, edm_heun(config, n))
        for churn in (dict(s_churn=30.0, s_tmin=0.05, s_tmax=50.0, s_noise=1.003), dict(s_churn=80.0)):
            add("edm_heun", f"edm_heun/{name}_churn_{churn['s_churn']}/{n}", EDM | config, dict(sampler="heun") | churn, n, edm_heun(config, n, **churn))
        scheduler = CLASSES["edm_euler"](**config)
        scheduler.set_timesteps(n)
        for sampler in ("euler_ancestral", "lms"):
            record = walk(CLASSES[sampler](), scheduler.sigmas, scheduler.init_noise_sigma, lambda s: 0.25 * math.log(s), edm_denoiser(config))
            add("edm_walks", f"edm_walks/{name}_{sampler}/{n}", EDM | config, dict(sampler=sampler), n, record)

# Published configs, by the model whose scheduler/scheduler_config.json they are.
PUBLISHED = {
    "ddpm-cifar10-32": {"_class_name": "DDPMScheduler", "_diffusers_version": "0.1.1", "beta_end": 0.02, "beta_schedule": "linear", "beta_start": 0.0001, "clip_sample": True, "num_train_timesteps": 1000, "trained_betas": None, "variance_type": "fixed_large"},
    "ldm-celebahq-256": {"_class_name": "DDIMScheduler", "_diffusers_version": "0.0.4", "beta_end": 0.0195, "beta_schedule": "scaled_linear", "beta_start": 0.0015, "clip_sample": False, "timestep_values": None, "timesteps": 1000, "trained_betas": None},
    "stable-diffusion-v1-5": {"_class_name": "PNDMScheduler", "_diffusers_version": "0.6.0", "beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "num_train_timesteps": 1000, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1, "trained_betas": None, "clip_sample": False},
    "stable-diffusion-2-1": {"_class_name": "DDIMScheduler", "_diffusers_version": "0.8.0", "beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": False, "num_train_timesteps": 1000, "prediction_type": "v_prediction", "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1, "trained_betas": None},
    "stable-diffusion-xl-base-1.0": {"_class_name": "EulerDiscreteScheduler", "_diffusers_version": "0.19.0.dev0", "beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": False, "interpolation_type": "linear", "num_train_timesteps": 1000, "prediction_type": "epsilon", "sample_max_value": 1.0, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1, "timestep_spacing": "leading", "trained_betas": None, "use_karras_sigmas": False},
    "sdxl-turbo": {"_class_name": "EulerAncestralDiscreteScheduler", "_diffusers_version": "0.24.0.dev0", "beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": False, "interpolation_type": "linear", "num_train_timesteps": 1000, "prediction_type": "epsilon", "sample_max_value": 1.0, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1, "timestep_spacing": "trailing", "trained_betas": None},
    "karras-sde": {"_class_name": "DPMSolverMultistepScheduler", "num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "algorithm_type": "sde-dpmsolver++", "solver_type": "heun", "solver_order": 2, "use_karras_sigmas": True, "thresholding": False, "variance_type": None, "timestep_spacing": "trailing"},
}
for name, config in PUBLISHED.items():
    for sampler in CLASSES:
        if sampler.startswith("edm") or sampler in ("flow_match_euler", "consistency", "score_sde_ve"):
            continue
        if sampler == "sa_solver" and "algorithm_type" in config:
            continue  # diffusers refuses it
        if sampler == "deis" and config.get("algorithm_type", "").startswith("sde"):
            continue  # diffusers refuses it
        if sampler == "pndm" and not config.get("skip_prk_steps"):
            continue
        swapped(config, name, sampler)

# The same with the class of the file alone, in as many steps as people take.
SD = LATENT | {"num_train_timesteps": 1000, "clip_sample": False, "trained_betas": None}
TURBO = SD | {"interpolation_type": "linear", "prediction_type": "epsilon", "sample_max_value": 1.0, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1, "timestep_spacing": "trailing"}
THRESHOLD = {"dynamic_thresholding_ratio": 0.995, "sample_max_value": 1.0, "thresholding": False}
for name, sampler, steps, config in (
    ("sd-turbo", "euler", (1, 2, 4), TURBO | {"timestep_type": "discrete", "use_karras_sigmas": False}),
    ("lcm-dreamshaper-v7", "lcm", (1, 4, 8), SD | THRESHOLD | {"clip_sample_range": 1.0, "original_inference_steps": 50, "prediction_type": "epsilon", "rescale_betas_zero_snr": False, "set_alpha_to_one": True, "steps_offset": 1, "timestep_scaling": 10.0, "timestep_spacing": "leading"}),
    ("playground-v2.5", "edm_dpm_solver", (20,), THRESHOLD | {"algorithm_type": "dpmsolver++", "euler_at_final": False, "final_sigmas_type": "zero", "lower_order_final": True, "num_train_timesteps": 1000, "prediction_type": "epsilon", "rho": 7.0, "sigma_data": 0.5, "sigma_max": 80.0, "sigma_min": 0.002, "solver_order": 2, "solver_type": "midpoint"}),
    ("cd-imagenet64", "consistency", (1, 2), {"clip_denoised": True, "num_train_timesteps": 40, "rho": 7.0, "s_noise": 1.0, "sigma_data": 0.5, "sigma_max": 80.0, "sigma_min": 0.002}),
    ("stable-diffusion-3", "flow_match_euler", (28,), {"num_train_timesteps": 1000, "shift": 3.0}),
    ("flux-schnell", "flow_match_euler", (4,), {"base_image_seq_len": 256, "base_shift": 0.5, "max_image_seq_len": 4096, "max_shift": 1.15, "num_train_timesteps": 1000, "shift": 1.0, "use_dynamic_shifting": False}),
):
    for n in steps:
        scheduler = CLASSES[sampler].from_config(config)
        full = {"_class_name": CLASSES[sampler].__name__, "_diffusers_version": "0.24.0"} | config
        add("published", f"published/{name}/{n}", full, {}, n, run(scheduler, n))

folder = pathlib.Path(__file__).resolve().parent.parent / "sampling" / "goldens"
folder.mkdir(parents=True, exist_ok=True)
for file, cases in files.items():
    for case in cases:
        for state in case["states"]:
            assert all(map(math.isfinite, state)), case["name"]
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (folder / f"{file}.json").write_text(f"[\n{lines}\n]\n")
(folder / "noise.json").write_text(json.dumps({"draws": NOISE.tolist(), "initial": INITIAL, "churn": CHURN, "source": SOURCE}) + "\n")
print(sum(map(len, files.values())), "cases")
