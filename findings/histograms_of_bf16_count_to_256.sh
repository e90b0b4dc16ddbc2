#!/usr/bin/env bash
# jax 0.10.2: jnp.histogram of BF16 numbers counts to 256 in each bin, and then stands still.
#
# A histogram counts, so one may expect whole numbers that add up to the size of the input, whatever its dtype. But
# jnp.histogram counts in the dtype of the input: in BF16 a bin stays at 256, where 256 + 1 rounds to 256, and in FP16
# at 2,048. jnp.bincount does so where its weights are BF16. So all bins that are full look alike, and the histogram of
# gradients or activations is flat where it should have a peak. Cast to FP32 first; nothing warns.
#
# Seen with jax 0.10.2, numpy 2.4.6 and Python 3.11 on a CPU, 2026-11-30. A million normal numbers in 6 bins from -3 to
# 3:
#
#   jnp.histogram, float32: 21218 135965 341026 341274 136108 21679
#   jnp.histogram, bfloat16: 256 256 256 256 256 256
#   jnp.histogram, float16: 2048 2048 2048 2048 2048 2048
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import jax.numpy as jnp
import numpy as np

numbers = np.random.default_rng(0).normal(size=1_000_000).astype(np.float32)


def counts(dtype):
    found = jnp.histogram(jnp.asarray(numbers, dtype), bins=6, range=(-3, 3))[0].astype(jnp.float32)
    print(f"jnp.histogram, {dtype.__name__}:", *(int(count) for count in found), flush=True)
    return found


single, brain, half = (counts(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16))
weighted = jnp.bincount(jnp.zeros(4096, int), weights=jnp.ones(4096, jnp.bfloat16))
stuck = (brain == 256).all() and (half == 2048).all() and float(weighted[0]) == 256
raise SystemExit(0 if stuck and 990_000 < float(single.sum()) <= 1_000_000 else "changed")
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore "$folder/program.py"
