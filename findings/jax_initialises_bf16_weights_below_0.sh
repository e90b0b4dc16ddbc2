#!/usr/bin/env bash
# jax 0.10.2 with flax 0.12.8: weights that are initialised in BF16 have 128 values, and a mean below 0.
#
# param_dtype=jnp.bfloat16 halves the memory of the weights. So one may expect the initial weights of FP32, rounded:
# with thousands of values, and a mean of 0. jax.random draws in the dtype that is asked for: a uniform number with 7
# bits, one of 128, whose mean is 0.496, for it is rounded down; and by it the normal and the truncated normal ones of
# all initialisers. None is further than 2.9 from 0, where a million have one near 5. The mean of -0.012 to -0.018
# standard deviations is nothing in one weight, but all of a layer have it: behind a ReLU, each output of 4,096 inputs
# starts at -0.6 of its standard deviation, and a wider layer further. FP16 has 1,024 values, and an eighth of the bias.
# Nothing warns. PyTorch and MLX round what they draw in FP32. Initialise in FP32 and cast.
#
# Seen with jax 0.10.2, flax 0.12.8, mlx 0.32.4 and Python 3.11 on a CPU, 2026-11-30. A million numbers: their values,
# the mean in standard deviations, to be 0 within 0.003, and the largest; then the mean output of nnx.Linear on a ReLU:
#
#   mlx normal, bfloat16: 3029 values, mean -0.001, largest 5.06
#   jax normal, float32: 942524 values, mean 0.000, largest 4.65
#   jax normal, bfloat16: 128 values, mean -0.012, largest 2.89
#   jax uniform, bfloat16: 128 values, mean -0.014, largest 1.00
#   flax lecun_normal, bfloat16: 128 values, mean -0.018, largest 2.25
#   nnx.Linear of 4,096 inputs: float32 -0.02, bfloat16 -0.46, standard deviation 0.71
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 "mlx[cpu]==0.32.4" numpy
cat > "$folder/program.py" <<'PY'
import jax
import jax.numpy as jnp
import mlx.core as mx
import numpy as np
from flax import nnx

SIZE = 1000


def described(what, numbers):
    numbers = np.asarray(numbers, np.float64).ravel()
    found = len(np.unique(numbers)), numbers.mean() / numbers.std(), np.abs(numbers).max()
    print("{}: {} values, mean {:.3f}, largest {:.2f}".format(what, *found))
    return found


def of_jax(draw, dtype):
    return draw(jax.random.key(0), (SIZE, SIZE), dtype).astype(jnp.float32)


def uniform(key, shape, dtype):
    return jax.random.uniform(key, shape, dtype, -1, 1)


def mean_output(dtype):
    layer = nnx.Linear(4096, 256, param_dtype=dtype, rngs=nnx.Rngs(0))
    inputs = jax.nn.relu(jax.random.normal(jax.random.key(5), (64, 4096)))
    outputs = inputs @ layer.kernel[...].astype(jnp.float32)
    return float(outputs.mean()), float(outputs.std())


mx.random.seed(0)
right = [
    described("mlx normal, bfloat16", mx.random.normal((SIZE, SIZE), dtype=mx.bfloat16).astype(mx.float32)),
    described("jax normal, float32", of_jax(jax.random.normal, jnp.float32)),
]
wrong = [
    described("jax normal, bfloat16", of_jax(jax.random.normal, jnp.bfloat16)),
    described("jax uniform, bfloat16", of_jax(uniform, jnp.bfloat16)),
    described("flax lecun_normal, bfloat16", SIZE**0.5 * of_jax(nnx.initializers.lecun_normal(), jnp.bfloat16)),
]
(fp32, _), (bf16, deviation) = mean_output(jnp.float32), mean_output(jnp.bfloat16)
print(f"nnx.Linear of 4,096 inputs: float32 {fp32:.2f}, bfloat16 {bf16:.2f}, standard deviation {deviation:.2f}")
same = all(values > 1000 and abs(mean) < 0.004 for values, mean, _ in right)
same = same and all(values == 128 and mean < -0.008 for values, mean, _ in wrong) and wrong[0][2] < 3
raise SystemExit(0 if same and abs(fp32) < 0.1 and bf16 < -0.3 else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
