#!/usr/bin/env bash
# keras 3.15.1: with TensorFlow and JAX the variance that ops.moments gives for BF16 is never above 65,536.
#
# BF16 has the range of FP32. So one may expect keras.ops.moments of BF16 activations to give the variance that ops.var
# gives, to 0.4 %. moments computes in FP32, and clips mean and variance to FP16's range before it rounds them, whether
# the dtype is FP16 or BF16. So a standard deviation above 256 has a variance of 65,536 and not more, and a mean above
# 65,504 is cut. A norm that one writes with moments divides by too little: activations with a standard deviation of
# 1,000 come out of it with 3.9, not 1, in BF16 alone, and only once they have grown. With PyTorch the same code is
# right, and so are Keras' own norms, which cast to FP32 before.
#
# Seen with keras 3.15.1, tensorflow 2.21.0, jax 0.10.2, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. 4,096 normal
# numbers in BF16:
#
#   tensorflow, std 100: moments 9984, var 9984; behind a norm 1.00
#   tensorflow, std 1000: moments 65536, var 995328; behind a norm 3.90
#   jax, std 100: moments 9984, var 9984; behind a norm 1.00
#   jax, std 1000: moments 65536, var 995328; behind a norm 3.90
#   torch, std 100: moments 9984, var 9984; behind a norm 1.00
#   torch, std 1000: moments 995328, var 995328; behind a norm 1.00
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0 jax==0.10.2 torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import keras
import numpy as np
from keras import ops

backend = keras.backend.backend()
normal = np.random.default_rng(0).normal(size=4096).astype(np.float32)


def number(x):
    return float(ops.cast(x, "float32"))


def told(std):
    x = ops.cast(std * normal, "bfloat16")
    mean, variance = ops.moments(x, axes=[0])
    normed = (x - mean) / ops.sqrt(variance)
    found = number(variance), number(ops.var(x)), number(ops.std(ops.cast(normed, "float32")))
    print("{}, std {}: moments {:.0f}, var {:.0f}; behind a norm {:.2f}".format(backend, std, *found), flush=True)
    return found


small, large = told(100), told(1000)
right = abs(small[0] / small[1] - 1) < 0.01 and abs(large[1] / 995_328 - 1) < 0.01
right = right and (abs(large[2] - 1) < 0.02 if backend == "torch" else large[0] == 65_536 and abs(large[2] - 3.9) < 0.05)
raise SystemExit(0 if right else "changed")
PY
for backend in tensorflow jax torch; do
    KERAS_BACKEND=$backend JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" -W ignore "$folder/program.py" 2> /dev/null
done
