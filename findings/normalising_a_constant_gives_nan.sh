#!/usr/bin/env bash
# keras 3.15.1 and flax 0.12.8: inputs that hardly vary become NaN in a BatchNormalization, or 70 times too large.
#
# A normalisation divides by the root of the variance plus epsilon. So one may expect 0 of inputs that are all the same,
# such as a constant feature, and a standard deviation of 1 of inputs that vary. Keras on PyTorch, and flax, take the
# variance in FP32 as E[x²] − E[x]², of two large numbers that are nearly equal. Keras leaves a difference below
# −epsilon negative: its root is NaN, and so is the whole feature, at 1000.1 in batches of 32, with epsilon 0.001.
# Flax takes 0 for it, so that only epsilon divides. Keras on JAX gives 0, and so do PyTorch, and flax with
# use_fast_variance=False. Nothing warns. An offset that is taken off before, once, repairs it.
#
# Seen with keras 3.15.1, flax 0.12.8, jax 0.10.2, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. The largest output
# of BatchNormalization for 32 equal numbers; then the standard deviation of what GroupNormalization of Keras and
# LayerNorm of flax make of normal numbers of standard deviation 0.1 and a mean:
#
#   keras on torch: equal 1.1 0.0, equal 1000.1 nan; mean 10 1.0, mean 3000 nan
#   keras on jax: equal 1.1 0.0, equal 1000.1 0.0; mean 10 1.0, mean 3000 1.0
#   flax: mean 10 1.0, mean 3000 70.2; without use_fast_variance mean 3000 1.0
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 flax==0.12.8 torch==2.13.0 jax==0.10.2 numpy
cat > "$folder/program.py" <<'PY'
import sys

import keras
import numpy as np
from flax import nnx

backend = keras.backend.backend()


def largest(value):
    layer = keras.layers.BatchNormalization()
    out = layer(np.full((32, 1), value, np.float32), training=True)
    return round(float(np.abs(keras.ops.convert_to_numpy(out)).max()), 1)


def normal(mean):
    return (mean + 0.1 * np.random.default_rng(0).normal(size=(4, 256))).astype(np.float32)


def spread(layer, mean):
    return round(float(np.asarray(keras.ops.convert_to_numpy(layer(normal(mean)))).std()), 1)


def group():
    return keras.layers.GroupNormalization(groups=1, epsilon=1e-6)


equal = largest(1.1), largest(1000.1)
spreads = spread(group(), 10), spread(group(), 3000)
said = f"mean 10 {spreads[0]}, mean 3000 {spreads[1]}"
print(f"keras on {backend}: equal 1.1 {equal[0]}, equal 1000.1 {equal[1]}; {said}")
nan = backend == "torch"
same = equal[0] == 0 and np.isnan(equal[1]) == nan and spreads[0] == 1 and np.isnan(spreads[1]) == nan
if backend == "jax":
    fast, slow = (nnx.LayerNorm(256, use_fast_variance=fast, rngs=nnx.Rngs(0)) for fast in (True, False))
    flax = [spread(fast, 10), spread(fast, 3000), spread(slow, 3000)]
    print(f"flax: mean 10 {flax[0]}, mean 3000 {flax[1]}; without use_fast_variance mean 3000 {flax[2]}")
    same &= equal[1] == 0 and spreads[1] == 1 and flax[0] == flax[2] == 1 and flax[1] > 10
sys.exit(0 if same else "changed")
PY
for backend in torch jax; do
    KERAS_BACKEND=$backend JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py" 2> /dev/null
done
