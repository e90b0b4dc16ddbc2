#!/usr/bin/env bash
# mlx 0.32.4, tensorflow 2.21.0: on a CPU, cumulative sums of BF16 probabilities end at 0.46, and top-p keeps all tokens.
#
# Nucleus sampling adds up the sorted probabilities, and keeps tokens until the sum reaches p. Probabilities in BF16 are
# right to 0.4 %, so one may expect the nucleus of FP32 but for some tokens at its end, as PyTorch and JAX give it. MLX
# and TensorFlow keep the running sum in the array's dtype, one after another. Once it is above 0.25, a probability
# below 0.001 is lost in it, though thousands of those are the rest. The sum never reaches 0.9, all 32,000 tokens are
# kept, and top-p is off without a word. In FP16 it is alike. So are thresholds, schedules and quantiles by a cumulative
# sum. tf.function(jit_compile=True) adds up rightly; elsewhere cast to FP32 first, as mlx-lm and keras-hub do.
#
# Seen with mlx 0.32.4, tensorflow 2.21.0, jax 0.10.2, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. 32,000 normal
# logits with a standard deviation of 2.5, p = 0.9; the tokens kept, and the last cumulative sum:
#
#   torch float32: 3837 tokens, sum 1.00
#   torch bfloat16: 3851 tokens, sum 1.00
#   jax bfloat16: 3921 tokens, sum 1.00
#   mlx bfloat16: 32000 tokens, sum 0.46
#   tensorflow bfloat16: 32000 tokens, sum 0.46
#   tensorflow bfloat16, jit_compile: 3851 tokens, sum 1.00
#   mlx float16: 32000 tokens, sum 0.70
#   tensorflow float16: 32000 tokens, sum 0.70
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "mlx[cpu]==0.32.4" tensorflow-cpu==2.21.0 jax==0.10.2 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import jax.numpy as jnp
import mlx.core as mx
import numpy as np
import tensorflow as tf
import torch

mx.set_default_device(mx.cpu)
TOKENS, P = 32_000, 0.9
weights = np.exp(2.5 * np.random.default_rng(0).normal(size=TOKENS))
sorted_p = np.sort(weights / weights.sum())[::-1].astype(np.float32).copy()
compiled = tf.function(tf.cumsum, jit_compile=True)
SUMS = {
    "torch": lambda dtype: torch.from_numpy(sorted_p).to(getattr(torch, dtype)).cumsum(0).float(),
    "jax": lambda dtype: jnp.asarray(sorted_p, dtype).cumsum().astype(jnp.float32),
    "mlx": lambda dtype: mx.cumsum(mx.array(sorted_p).astype(getattr(mx, dtype))).astype(mx.float32),
    "tensorflow": lambda dtype: tf.cast(tf.cumsum(tf.cast(sorted_p, dtype)), tf.float32),
    "compiled": lambda dtype: tf.cast(compiled(tf.cast(sorted_p, dtype)), tf.float32),
}


def kept(library, dtype):
    sums = np.asarray(SUMS[library](dtype))
    count = min(int((sums < P).sum()) + 1, TOKENS)
    name = f"tensorflow {dtype}, jit_compile" if library == "compiled" else f"{library} {dtype}"
    print(f"{name}: {count} tokens, sum {sums[-1]:.2f}", flush=True)
    return count


right = [kept(*of) for of in (("torch", "float32"), ("torch", "bfloat16"), ("jax", "bfloat16"))]
wrong = [kept(library, "bfloat16") for library in ("mlx", "tensorflow")]
right.append(kept("compiled", "bfloat16"))
wrong += [kept(library, "float16") for library in ("mlx", "tensorflow")]
raise SystemExit(0 if all(3700 < x < 4000 for x in right) and set(wrong) == {TOKENS} else "changed")
PY
JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" "$folder/program.py" 2> /dev/null
