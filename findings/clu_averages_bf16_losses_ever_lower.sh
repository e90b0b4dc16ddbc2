#!/usr/bin/env bash
# clu 0.0.12: the longer an evaluation is, the lower is its mean of BF16 losses: 0.51 after 2,000 losses of 3.
#
# clu.metrics.Average keeps a sum and a count, and merges those of each batch, in the loops of many models in JAX. So one
# may expect the mean of losses in BF16 to be off by their rounding. The sum has the losses' dtype: in BF16 it stops at
# 1,024, where 3 is less than half of the distance to the next number, and the count goes on. So a model's loss falls
# with the number of batches, one of two evaluations is lower as it is longer, and the model whose loss is larger looks
# better. Nothing warns. nnx.metrics.Average of flax keeps its sum in FP32. Cast the loss to FP32 before it is gathered.
#
# Seen with clu 0.0.12, flax 0.12.8, jax 0.10.2 and Python 3.11 on a CPU, 2026-11-30. The mean of n equal losses:
#
#   clu, float32 losses of 3: 100: 3.00, 500: 3.00, 2000: 3.00
#   clu, bfloat16 losses of 3: 100: 3.12, 500: 2.05, 2000: 0.51
#   clu, bfloat16 losses of 2: 100: 2.00, 500: 1.02, 2000: 0.26
#   nnx, bfloat16 losses of 3: 100: 3.00, 500: 3.00, 2000: 3.00
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet clu==0.0.12 flax==0.12.8 jax==0.10.2 jaxlib==0.10.2 numpy
cat > "$folder/program.py" <<'PY'
import jax.numpy as jnp
from clu import metrics
from flax import nnx

Loss = metrics.Average.from_output("loss")
LENGTHS = (100, 500, 2000)


def of_clu(loss):
    batch = Loss.from_model_output(loss=loss)
    means, gathered = [], batch
    for count in range(1, max(LENGTHS) + 1):
        if count in LENGTHS:
            means.append(float(gathered.compute()))
        gathered = gathered.merge(batch)
    return means


def of_nnx(loss):
    means, gathered = [], nnx.metrics.Average()
    for count in range(1, max(LENGTHS) + 1):
        gathered.update(values=loss)
        if count in LENGTHS:
            means.append(float(gathered.compute()))
    return means


def said(what, means):
    print(f"{what}: " + ", ".join(f"{length}: {mean:.2f}" for length, mean in zip(LENGTHS, means, strict=True)))
    return means


fp32 = said("clu, float32 losses of 3", of_clu(jnp.float32(3)))
three = said("clu, bfloat16 losses of 3", of_clu(jnp.bfloat16(3)))
two = said("clu, bfloat16 losses of 2", of_clu(jnp.bfloat16(2)))
nnx_three = said("nnx, bfloat16 losses of 3", of_nnx(jnp.bfloat16(3)))
right = max(abs(mean - 3) for mean in (*fp32, *nnx_three)) < 0.01
raise SystemExit(0 if right and three[0] > 3.1 and three[1] < 2.2 and three[2] < 0.6 and two[2] < 0.3 else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
