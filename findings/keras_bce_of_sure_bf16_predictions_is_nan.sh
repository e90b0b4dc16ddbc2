#!/usr/bin/env bash
# keras 3.15.1: in BF16 and FP16, binary_crossentropy of a prediction of 1 is NaN where it is right.
#
# A cross-entropy of probabilities keeps away from log(0): Keras clips them to between 1e-7 and 1 - 1e-7. So one may
# expect about 0 where a prediction of 1 is right and about 16 where it is wrong, as in FP32. In BF16 and FP16 1 - 1e-7
# rounds to 1: the part of the other class is 0 · log(0), which is NaN, and where the prediction is wrong the loss is
# infinite. A sigmoid in BF16 is 1 from a logit of 6.25 on, so that the loss becomes NaN once a model is sure and
# right. categorical_crossentropy is right, and so is the class BinaryCrossentropy, which casts to FP32, unless it is
# given a dtype. The functions of custom training steps do not cast. Nothing warns.
#
# Seen with keras 3.15.1 on jax 0.10.2 and Python 3.11 on a CPU, 2026-11-30. A prediction of 1 for 0 and for 1: the
# losses by the function, by the focal one, and their mean by the class:
#
#   float32: wrong 15.9, right 0.0; focal 15.9, 0.0; class 8.0
#   bfloat16: wrong inf, right nan; focal inf, nan; class 8.0
#   float16: wrong inf, right nan; focal inf, nan; class 8.0
#   sigmoid of 6.25 in BF16: 1.0
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import math

import jax.numpy as jnp
import keras


def losses(dtype):
    labels, predictions = jnp.array([[0], [1]], dtype), jnp.ones((2, 1), dtype)
    wrong, right = (float(x) for x in keras.losses.binary_crossentropy(labels, predictions))
    focal = [float(x) for x in keras.losses.binary_focal_crossentropy(labels, predictions)]
    mean = float(keras.losses.BinaryCrossentropy()(labels, predictions))
    print(f"{dtype}: wrong {wrong:.1f}, right {right:.1f}; focal {focal[0]:.1f}, {focal[1]:.1f}; class {mean:.1f}")
    return wrong, right, focal[1], mean


single, brain, half = (losses(dtype) for dtype in ("float32", "bfloat16", "float16"))
sure = float(keras.ops.sigmoid(jnp.array(6.25, "bfloat16")))
print(f"sigmoid of 6.25 in BF16: {sure}")
broken = all(math.isinf(x[0]) and math.isnan(x[1]) and math.isnan(x[2]) and x[3] == single[3] for x in (brain, half))
raise SystemExit(0 if broken and 15 < single[0] < 17 and 0 <= single[1] < 1e-6 and sure == 1 else "changed")
PY
KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
