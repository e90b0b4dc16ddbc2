#!/usr/bin/env bash
# diffusers 0.42.1: in BF16, add_noise leaves the first steps without noise, and gives neighbouring steps one level.
#
# A diffusion model is trained to find the noise that the scheduler has added, at one of 1,000 levels. In mixed precision
# the latents are in BF16, as in the training scripts of diffusers. So one may expect 1,000 levels, each right up to the
# 0.4 % of BF16's rounding. The scheduler casts alphas_cumprod to the latents' dtype, and subtracts it from 1 behind the
# cast: near 1 BF16's numbers lie 0.004 apart. Where less noise belongs there is none, so that the model is to find
# noise that it has not been shown, and all other levels are a staircase of 190. In FP16 it is so near the first steps.
# Nothing warns. get_velocity computes so, too. Latents that are cast to FP32 in front of add_noise are right.
#
# Seen with diffusers 0.42.1, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. The noise in step t of 1,000, that is
# sqrt(1 - alphas_cumprod[t]), and how many levels there are:
#
#   DDPM, by default, float32: 0.010, 0.015, 0.019, 0.030, 0.047, 0.079, 0.173; 1000 levels, 0 without noise
#   DDPM, by default, float16: 0.000, 0.000, 0.022, 0.031, 0.044, 0.080, 0.174; 573 levels, 2 without noise
#   DDPM, by default, bfloat16: 0.000, 0.000, 0.000, 0.000, 0.062, 0.088, 0.177; 190 levels, 10 without noise
#   DDPM of Stable Diffusion, float32: 0.029, 0.041, 0.051, 0.072, 0.098, 0.137, 0.220; 1000 levels, 0 without noise
#   DDPM of Stable Diffusion, float16: 0.031, 0.038, 0.049, 0.073, 0.099, 0.136, 0.220; 762 levels, 0 without noise
#   DDPM of Stable Diffusion, bfloat16: 0.000, 0.000, 0.062, 0.062, 0.088, 0.140, 0.217; 192 levels, 2 without noise
#   DDIM, by default, float32: 0.010, 0.015, 0.019, 0.030, 0.047, 0.079, 0.173; 1000 levels, 0 without noise
#   DDIM, by default, float16: 0.000, 0.000, 0.022, 0.031, 0.044, 0.080, 0.174; 573 levels, 2 without noise
#   DDIM, by default, bfloat16: 0.000, 0.000, 0.000, 0.000, 0.062, 0.088, 0.177; 190 levels, 10 without noise
#   t: 0, 1, 2, 5, 10, 20, 50
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 diffusers==0.42.1 numpy
cat > "$folder/program.py" <<'PY'
import torch
from diffusers import DDIMScheduler, DDPMScheduler

STEPS = torch.arange(1000)
SHOWN = (0, 1, 2, 5, 10, 20, 50)
SCHEDULERS = {
    "DDPM, by default": DDPMScheduler(),
    "DDPM of Stable Diffusion": DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012),
    "DDIM, by default": DDIMScheduler(),
}


def levels(scheduler, dtype):
    nothing, ones = torch.zeros(1000, 1, dtype=dtype), torch.ones(1000, 1, dtype=dtype)
    return scheduler.add_noise(nothing, ones, STEPS).flatten().double()


same = True
for name, scheduler in SCHEDULERS.items():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        noise = levels(scheduler, dtype)
        told = ", ".join(f"{noise[step]:.3f}" for step in SHOWN)
        print(f"{name}, {str(dtype)[6:]}: {told}; {len(noise.unique())} levels, {int((noise == 0).sum())} without noise")
        same &= (noise.count_nonzero() == 1000) == (dtype == torch.float32 or "Stable" in name and dtype == torch.float16)
    exact = levels(scheduler, torch.float32).bfloat16()
    same &= len(noise.unique()) < 200 and len(exact.unique()) > len(noise.unique()) and not (exact == 0).any()
print("t: " + ", ".join(str(step) for step in SHOWN))
raise SystemExit(0 if same else "changed")
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/program.py" 2> /dev/null
