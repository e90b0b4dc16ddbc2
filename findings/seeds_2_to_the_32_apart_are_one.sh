#!/usr/bin/env bash
# PyTorch 2.13.0, jax 0.10.2: seeds that differ by a multiple of 2^32 give the same random numbers on a CPU.
#
# torch.manual_seed takes 64 bits, and initial_seed() returns all of them; so one may expect other numbers of each. The
# generator of a CPU starts from the lower 32 bits. jax.random.key takes the same numbers and, without 64-bit mode,
# drops the upper 32 bits, too. A seed that is put together as (rank << 32) + seed gives all processes the same
# dropout, the same order and the same weights, and a hash or a time in nanoseconds is worth 32 bits. NumPy and
# Python's random tell such seeds apart. Nothing warns. For a process use numpy.random.SeedSequence or
# jax.random.fold_in.
#
# Seen with torch 2.13.0, jax 0.10.2, numpy 2.4.6 and Python 3.11 on a CPU, 2026-11-30. The seeds (rank << 32) + 1 of
# four ranks: how many of the four draws of 8 numbers differ:
#
#   torch: 1 of 4, initial_seed 4 of 4
#   torch, permutation of a RandomSampler: 1 of 4
#   jax: 1 of 4
#   numpy: 4 of 4
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 jax==0.10.2 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import jax
import numpy as np
import torch
from torch.utils.data import RandomSampler

SEEDS = [(rank << 32) + 1 for rank in range(4)]


def different(draw):
    return len({tuple(draw(seed)) for seed in SEEDS})


found = {
    "torch": different(lambda seed: torch.rand(8, generator=torch.Generator().manual_seed(seed)).tolist()),
    "sampler": different(lambda seed: RandomSampler(range(8), generator=torch.Generator().manual_seed(seed))),
    "jax": different(lambda seed: jax.random.uniform(jax.random.key(seed), 8).tolist()),
    "numpy": different(lambda seed: np.random.default_rng(seed).random(8)),
}
initial = len({torch.Generator().manual_seed(seed).initial_seed() for seed in SEEDS})
print(f"torch: {found['torch']} of 4, initial_seed {initial} of 4")
print(f"torch, permutation of a RandomSampler: {found['sampler']} of 4")
for name in ("jax", "numpy"):
    print(f"{name}: {found[name]} of 4")
same = initial == 4 and list(found.values()) == [1, 1, 1, 4]
raise SystemExit(0 if same else "changed")
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
