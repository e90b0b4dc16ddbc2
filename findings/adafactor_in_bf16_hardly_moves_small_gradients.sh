#!/usr/bin/env bash
# PyTorch 2.13.0: on BF16 weights torch.optim.Adafactor divides gradients below 0.008 by 0.008, and so stands still.
#
# Adafactor divides a gradient by its own size, as Adam does, and saves memory, so that it is taken for weights in BF16.
# So one may expect steps that do not depend on the gradient's size, and in BF16 those of FP32 up to rounding. Where
# eps is left alone, its first number is that of the weights' dtype: 1e-7 in FP32, and 0.0078 in BF16. It is no small
# number there: a gradient below it is divided by it. Gradients of large models are 1e-3 to 1e-5, so that steps are 7 to
# 750 times too small, and those of weights with smaller gradients smaller still, as in SGD. Nothing warns: the loss
# falls slowly. The documentation gives None for this default, and not what it stands for. eps=(1e-30, 1e-3), the
# paper's, gives the steps of FP32, and so does the Adafactor of transformers, whose default that is.
#
# Seen with torch 2.13.0, transformers 5.24.0 and Python 3.11 on a CPU, 2026-11-30. Ten steps with equal normal gradients
# of a size and a learning rate of 0.01: the root of the mean square by which a weight of zeros moved, times 1e6:
#
#   size 1: float32 100.0, bfloat16 99.6, bfloat16 with eps 99.6, of transformers 100.1
#   size 0.01: float32 100.0, bfloat16 99.9, bfloat16 with eps 99.6, of transformers 100.1
#   size 0.001: float32 100.0, bfloat16 13.4, bfloat16 with eps 99.8, of transformers 100.0
#   size 0.0001: float32 100.0, bfloat16 1.3, bfloat16 with eps 99.7, of transformers 100.1
#   size 1e-05: float32 100.0, bfloat16 0.1, bfloat16 with eps 99.4, of transformers 100.0
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from transformers.optimization import Adafactor

RATE = 0.01


def of_torch(**options):
    return lambda weights: torch.optim.Adafactor(weights, lr=RATE, **options)


def of_transformers(weights):
    return Adafactor(weights, lr=RATE, scale_parameter=True, relative_step=False)


def moved(make, dtype, size):
    torch.manual_seed(0)
    gradient = (size * torch.randn(8, 8)).to(dtype)
    weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=dtype))
    optimizer = make([weight])
    for _ in range(10):
        weight.grad = gradient.clone()
        optimizer.step()
    return 1e6 * float(weight.detach().float().square().mean().sqrt())


same = True
for size in (1.0, 1e-2, 1e-3, 1e-4, 1e-5):
    exact = moved(of_torch(), torch.float32, size)
    rounded = moved(of_torch(), torch.bfloat16, size)
    with_eps = moved(of_torch(eps=(1e-30, 1e-3)), torch.bfloat16, size)
    others = moved(of_transformers, torch.bfloat16, size)
    told = "float32 {:.1f}, bfloat16 {:.1f}, bfloat16 with eps {:.1f}, of transformers {:.1f}"
    print(f"size {size:g}: " + told.format(exact, rounded, with_eps, others))
    expected = exact * min(1, size / torch.finfo(torch.bfloat16).eps)
    same &= abs(rounded / expected - 1) < 0.1 and abs(with_eps / exact - 1) < 0.02
raise SystemExit(0 if same else "changed")
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/program.py"
