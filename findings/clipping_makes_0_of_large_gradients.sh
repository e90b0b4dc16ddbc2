#!/usr/bin/env bash
# PyTorch 2.13.0, optax 0.2.8: clipping by the norm makes 0 of finite gradients of 1e20, and keras 3.15.1 makes NaN.
#
# What is clipped to a norm of 1 has that norm, and its direction. So one may expect gradients of 1e20 to become ones of
# norm 1, and one infinite gradient among others to make NaN of all, or of none. The sum of squares of 1e20 exceeds
# FP32, and what is divided by infinity is 0: the step is lost, while gradients and weights are finite. In FP16 it
# happens to finite gradients with a norm above 65,504. Beside one infinite gradient the others are 0, too, and that one
# alone is NaN: so one weight becomes NaN, which points to where the infinity was. Keras's global_clipnorm makes NaN of
# all in both cases, so that finite gradients end the training. Only the norm tells, which is infinite; in PyTorch
# error_if_nonfinite=True raises.
#
# Seen with torch 2.13.0, optax 0.2.8, jax 0.10.2, keras 3.15.1 and Python 3.11 on a CPU, 2026-11-30. The gradients
# of two weights, clipped to a norm of 1:
#
#   3 and 1: torch 0.95 0.32; optax 0.95 0.32; keras 0.95 0.32
#   1e+20 and 1: torch 0.00 0.00; optax 0.00 0.00; keras nan nan
#   inf and 1: torch nan 0.00; optax nan 0.00; keras nan nan
#   6e+04 and 3e+04 in FP16: torch 0.00 0.00
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 optax==0.2.8 jax==0.10.2 keras==3.15.1 numpy
cat > "$folder/program.py" <<'PY'
import math

import jax.numpy as jnp
import keras
import numpy as np
import optax
import torch


def by_torch(gradients, dtype=torch.float32):
    weights = [torch.nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = torch.full_like(weight, gradient)
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    return [weight.grad.item() for weight in weights]


def by_optax(gradients):
    clip = optax.clip_by_global_norm(1.0)
    clipped, _ = clip.update([jnp.full(1, gradient) for gradient in gradients], clip.init(None))
    return [float(gradient[0]) for gradient in clipped]


def by_keras(gradients):
    weights = [keras.Variable(np.zeros(1, np.float32)) for _ in gradients]
    sgd = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    sgd.build(weights)
    sgd.apply([keras.ops.full((1,), gradient) for gradient in gradients])
    return [-float(weight[0]) for weight in weights]


def said(values):
    return " ".join(f"{abs(value):.2f}" for value in values)


seen = []
for first in (3.0, 1e20, math.inf):
    row = [said(clipped([first, 1.0])) for clipped in (by_torch, by_optax, by_keras)]
    print(f"{first:.3g} and 1: torch {row[0]}; optax {row[1]}; keras {row[2]}", flush=True)
    seen.append(row)
half = said(by_torch([6e4, 3e4], torch.float16))
print(f"6e+04 and 3e+04 in FP16: torch {half}")
expected = [["0.95 0.32"] * 3, ["0.00 0.00", "0.00 0.00", "nan nan"], ["nan 0.00", "nan 0.00", "nan nan"]]
raise SystemExit(0 if seen == expected and half == "0.00 0.00" else "changed")
PY
KERAS_BACKEND=torch JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py" 2> /dev/null
