#!/usr/bin/env bash
# mlx-lm 0.32.2: where batch_size does not divide the number of examples, the longest are never trained on.
#
# A remainder that fills no batch is often left out of an epoch. So one may expect others to be left out in each epoch,
# as the batches are shuffled, and of an evaluation of val_batches = -1, "the entire validation set", that it holds all.
# iterate_batches sorts the examples by length, cuts the batches once, leaves the remainder at the end out, and shuffles
# batches only. So the same examples are missing in all epochs, and they are the longest: up to batch_size − 1. A test
# set of 7 examples in batches of 4 has a loss of its 4 shortest.
#
# Seen with mlx 0.32.4, mlx-lm 0.32.2, numpy 2.4.6 and Python 3.11, 2026-11-30. Eleven examples of 2 to 300 tokens, in
# batches of 4, for 50 epochs; tokens of the long ones, from 100 on, have a loss of 5, those of the others of 1:
#
#   lengths: 2 3 4 5 6 7 8 9 100 200 300
#   trained on: 2 3 4 5 6 7 8 9
#   evaluate() with num_batches=-1: 1.0; of all examples: 4.7
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.trainer import evaluate, iterate_batches

LENGTHS = 2, 3, 4, 5, 6, 7, 8, 9, 100, 200, 300
shuffled = np.random.default_rng(0).permutation(LENGTHS).tolist()
examples = [([2 if length >= 100 else 1] * length, 0) for length in shuffled]


def loss(_, batch, lengths):
    """5 for each token 2, 1 for each token 1: the mean, and the number of both."""
    tokens = np.array(batch)
    number = int((tokens > 0).sum())
    return mx.array(((tokens == 2).sum() * 5 + (tokens == 1).sum()) / number), mx.array(number)


batches, seen = iterate_batches(examples, 4, 2048, loop=True), set()
for _ in range(50 * (len(LENGTHS) // 4)):
    seen.update(next(batches)[1][:, 1].tolist())
mean = evaluate(nn.Module(), examples, 4, -1, loss=loss)
whole = sum(len(tokens) * (5 if tokens[0] == 2 else 1) for tokens, _ in examples) / sum(LENGTHS)
print("lengths:", *LENGTHS)
print("trained on:", *sorted(seen))
print(f"evaluate() with num_batches=-1: {mean:.1f}; of all examples: {whole:.1f}")
raise SystemExit(0 if seen == set(LENGTHS[:8]) and mean == 1 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
