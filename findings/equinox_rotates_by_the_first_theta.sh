#!/usr/bin/env bash
# equinox 0.13.8: RotaryPositionalEmbedding turns by the theta of the first one that was called in the process.
#
# theta says how fast the angles of a rotary embedding fall, 10,000 in one model and 500,000 in another. So one may
# expect two embeddings with two thetas to turn by theirs. Cosines and sines are kept in one cache for all embeddings,
# by head size and dtype alone: who comes second with the same head size gets the angles of the first, without a word.
# So a comparison of thetas in one process compares nothing, a teacher and its student share one, and a model that was
# trained by the wrong angles is another one in a process of its own, where its loss jumps. A longer sequence makes the
# cache anew, by the theta of whoever has it: then the first one turns by the angles of the second.
#
# Seen with equinox 0.13.8, jax 0.10.2 and Python 3.11 on a CPU, 2026-11-30. Heads of 64 numbers; |a − b| / |b| from the
# rotation by formula, of 512 tokens, and then of 1,024:
#
#   512 tokens: theta 10000, called first: 0.0000; theta 500000, called second: 1.0883
#   1024 tokens: theta 500000, called first: 0.0000; theta 10000, called second: 1.1653
#   512 tokens again: theta 10000: 1.0883, theta 500000: 0.0000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet equinox==0.13.8 jax==0.10.2 numpy
cat > "$folder/program.py" <<'PY'
import equinox
import jax
import numpy as np

SIZE = 64


def error(theta, tokens):
    x = jax.random.normal(jax.random.key(0), (tokens, SIZE))
    found = np.asarray(equinox.nn.RotaryPositionalEmbedding(SIZE, theta=theta)(x), np.float64)
    angles = np.outer(np.arange(tokens), theta ** (-np.arange(0, SIZE, 2) / SIZE))
    first, second = np.split(np.asarray(x, np.float64), 2, axis=1)
    cos, sin = np.cos(angles), np.sin(angles)
    exact = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


early = error(1e4, 512), error(5e5, 512)
print("512 tokens: theta 10000, called first: {:.4f}; theta 500000, called second: {:.4f}".format(*early))
longer = error(5e5, 1024), error(1e4, 1024)
print("1024 tokens: theta 500000, called first: {:.4f}; theta 10000, called second: {:.4f}".format(*longer))
again = error(1e4, 512), error(5e5, 512)
print("512 tokens again: theta 10000: {:.4f}, theta 500000: {:.4f}".format(*again))
right, wrong = (early[0], longer[0], again[1]), (early[1], longer[1], again[0])
raise SystemExit(0 if max(right) < 1e-3 and min(wrong) > 0.3 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
