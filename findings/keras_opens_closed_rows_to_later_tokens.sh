#!/usr/bin/env bash
# keras 3.15.1: a row of MultiHeadAttention that no key is open to sees all tokens, also later ones, or none.
#
# With use_causal_mask=True no token sees a later one, and attention_mask can only close more. So one may expect the O
# of a token of padding, whose every key is closed, to depend on no later token, and to be the same where one asks for
# the weights beside it. O alone is made by the backend's attention, under PyTorch as under JAX: in such a row it is
# the mean of the values of all tokens, in GroupQueryAttention, too. With return_attention_scores=True, and with dropout
# in a training, Keras makes it itself, and the weights are 0. So a look at the weights changes O, a training with
# dropout is evaluated by another function than it trains, and the later tokens leak into a pooled loss.
# Nothing warns, and all other rows agree.
#
# Seen with keras 3.15.1, torch 2.13.0, jax 0.10.2 and Python 3.11 on a CPU, 2026-11-30. Six tokens, causal, of which
# attention_mask closes the first as a key, so that its own row has none; the tokens that the first row's O depends on:
#
#   torch: MultiHeadAttention 0 1 2 3 4 5; with scores none; in a training with dropout none
#   jax: MultiHeadAttention 0 1 2 3 4 5; with scores none; in a training with dropout none
#   tokens that the last row depends on: 1 2 3 4 5
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 torch==2.13.0 jax==0.10.2 numpy
cat > "$folder/program.py" <<'PY'
import sys

import keras
import numpy as np

TOKENS = 6
generator = np.random.default_rng(0)
x = generator.normal(size=(1, TOKENS, 16)).astype(np.float32)
mask = np.ones((1, TOKENS, TOKENS), bool)
mask[:, :, 0] = False


def depends(row, dropout=0.0, **options):
    layer = keras.layers.MultiHeadAttention(1, 16, dropout=dropout, seed=0)

    def out(values):
        found = layer(x, values, use_causal_mask=True, attention_mask=mask, **options)
        found = found[0] if isinstance(found, tuple) else found
        return keras.ops.convert_to_numpy(found)[0, row]

    out(x)  # makes the weights
    seen = []
    for token in range(TOKENS):
        changed = x.copy()
        changed[:, token] += 1
        if np.abs(out(changed) - out(x)).max() > 1e-4:
            seen.append(token)
    return " ".join(map(str, seen)) or "none"


rows = depends(0), depends(0, return_attention_scores=True), depends(0, dropout=1e-6, training=True)
said = f"MultiHeadAttention {rows[0]}; with scores {rows[1]}; in a training with dropout {rows[2]}"
print(f"{keras.backend.backend()}: {said}")
last = depends(TOKENS - 1)
if keras.backend.backend() == "jax":
    print(f"tokens that the last row depends on: {last}")
sys.exit(0 if rows == ("0 1 2 3 4 5", "none", "none") and last == "1 2 3 4 5" else "changed")
PY
for backend in torch jax; do
    KERAS_BACKEND=$backend JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py" 2> /dev/null
done
