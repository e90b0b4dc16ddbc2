#!/usr/bin/env bash
# optax 0.2.8: the norm of BF16 gradients, and what clip_by_global_norm makes of them, depend on the number of leaves.
#
# jnp.sum of BF16 adds up in FP32 and rounds once. So one may expect the norm of all gradients, by which they are
# clipped, within a percent. Each leaf's sum of squares is right. But these are BF16, and optax adds them in BF16, one
# leaf after another: 256 + 1 rounds to 256, so that of 1,000 equal leaves the norm is 16, not 31.6, and the clipped
# gradients are twice as large as allowed. A model whose layers are stacked for a scan has few leaves, and its norm is
# right: the same training, unrolled, takes other steps. Norms that are logged are too small, and nothing warns.
#
# Seen with optax 0.2.8, jax 0.10.2 and Python 3.11 on a CPU, 2026-11-30. Leaves of four gradients of 0.5, each of norm
# 1; the norm of what is clipped to 1 is that in FP32:
#
#   100 leaves: norm 10, clipped 1.001
#   1000 leaves: norm 16, clipped 1.976
#   4000 leaves: norm 16, clipped 3.953
#   1000 leaves, stacked in one: norm 31.6, clipped 1.004
#   1000 leaves in FP32: norm 31.6, clipped 1.000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet optax==0.2.8 jax==0.10.2 numpy
cat > "$folder/program.py" <<'PY'
import jax
import jax.numpy as jnp
import optax

clip = optax.clip_by_global_norm(1.0)


def norms(what, gradients):
    clipped, _ = clip.update(gradients, clip.init(gradients))
    found = float(optax.global_norm(gradients))
    left = float(optax.global_norm(jax.tree.map(lambda x: x.astype(jnp.float32), clipped)))
    print(f"{what}: norm {found:.3g}, clipped {left:.3f}", flush=True)
    return found, left


def leaves(count, dtype=jnp.bfloat16):
    return [jnp.full(4, 0.5, dtype)] * count


seen = [
    norms("100 leaves", leaves(100)),
    norms("1000 leaves", leaves(1000)),
    norms("4000 leaves", leaves(4000)),
    norms("1000 leaves, stacked in one", [jnp.stack(leaves(1000))]),
    norms("1000 leaves in FP32", leaves(1000, jnp.float32)),
]
same = [round(found) for found, _ in seen] == [10, 16, 16, 32, 32]
right = all(abs(left - 1) < 0.01 for _, left in (seen[0], *seen[3:]))
raise SystemExit(0 if same and right and seen[1][1] > 1.9 and seen[2][1] > 3.9 else "changed")
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
