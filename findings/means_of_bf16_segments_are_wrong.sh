#!/usr/bin/env bash
# PyTorch 2.13.0, tensorflow 2.21.0, flax 0.12.8: on a CPU, means of 1,024 BF16 numbers by segment or pool are wrong.
#
# The mean of BF16 numbers is added up in FP32 and rounded once, by torch.mean, tf.reduce_mean and jnp.mean. So one may
# expect it of the means of segments, which pool tokens into sequences or nodes into graphs, and of an average pool over
# a whole image. torch.segment_reduce, tf.math.segment_mean and flax's avg_pool add up in BF16. A sum stops where the
# next number is below half of its unit: of ones at 256, and it is still divided by their number. So the longer a
# sequence, the smaller its mean, which a model reads as a feature; training on short ones shows nothing.
# tf.math.unsorted_segment_mean counts in BF16, too: its mean of ones is 1 by chance, that of smaller numbers too large.
# scatter_reduce("mean") and reductions over an axis are right.
#
# Seen with torch 2.13.0, tensorflow 2.21.0, flax 0.12.8, jax 0.10.2 and Python 3.11 on a CPU, 2026-11-30. Means of n
# ones, and of n uniform numbers, whose mean is 0.52:
#
#   torch.segment_reduce: 256 1.00, 1024 0.25, 4096 0.06; uniform, 1024 0.25
#   torch scatter_reduce: 256 1.00, 1024 1.00, 4096 1.00; uniform, 1024 0.52
#   tf.math.segment_mean: 256 1.00, 1024 0.25, 4096 0.06; uniform, 1024 0.25
#   tf.math.unsorted_segment_mean: 256 1.00, 1024 1.00, 4096 1.00; uniform, 1024 1.00
#   flax avg_pool: 256 1.00, 1024 0.25, 4096 0.25; uniform, 1024 0.25
#   jnp.mean: 256 1.00, 1024 1.00, 4096 1.00; uniform, 1024 0.52
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 tensorflow-cpu==2.21.0 flax==0.12.8 jax==0.10.2 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import math

import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch
from flax import nnx


def segment_reduce(x):
    return torch.segment_reduce(torch.from_numpy(x).bfloat16(), "mean", lengths=torch.tensor([len(x)]))


def scatter_reduce(x):
    at = torch.zeros(len(x), dtype=torch.long)
    zero = torch.zeros(1, dtype=torch.bfloat16)
    return zero.scatter_reduce(0, at, torch.from_numpy(x).bfloat16(), "mean", include_self=False)


def of_tensorflow(x, **options):
    of = tf.math.unsorted_segment_mean if options else tf.math.segment_mean
    return of(tf.cast(x, tf.bfloat16), tf.zeros(len(x), tf.int32), **options)[0]


def image(x):
    side = math.isqrt(len(x))
    return jnp.asarray(x, jnp.bfloat16).reshape(1, side, side, 1)


MEANS = {
    "torch.segment_reduce": segment_reduce,
    "torch scatter_reduce": scatter_reduce,
    "tf.math.segment_mean": of_tensorflow,
    "tf.math.unsorted_segment_mean": lambda x: of_tensorflow(x, num_segments=1),
    "flax avg_pool": lambda x: nnx.avg_pool(image(x), image(x).shape[1:3])[0, 0, 0, 0],
    "jnp.mean": lambda x: image(x).mean(),
}
found = {}
uniform = np.random.default_rng(0).uniform(size=1024).astype(np.float32)
for name, mean in MEANS.items():
    found[name] = [float(mean(np.ones(n, np.float32))) for n in (256, 1024, 4096)] + [float(mean(uniform))]
    told = "256 {:.2f}, 1024 {:.2f}, 4096 {:.2f}; uniform, 1024 {:.2f}".format(*found[name])
    print(f"{name}: {told}", flush=True)
small, (right, large, right_again) = list(found.values())[::2], list(found.values())[1::2]
same = all(means[:2] == [1, 0.25] and means[2] < 0.3 and means[3] < 0.3 for means in small)
same = same and large == [1] * 4 and all(abs(x[3] - uniform.mean()) < 0.01 for x in (right, right_again))
raise SystemExit(0 if same else "changed")
PY
JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" -W ignore "$folder/program.py" 2> /dev/null
