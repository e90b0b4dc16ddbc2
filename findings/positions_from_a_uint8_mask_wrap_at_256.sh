#!/usr/bin/env bash
# jax 0.10.2, mlx 0.32.4: the cumulative sum of a uint8 mask starts anew at 256, so that tokens share positions.
#
# The positions of tokens behind padding are the cumulative sum of the attention mask. NumPy and PyTorch add small
# integers up in 64 bits, and so do jnp.sum and jnp.cumsum of a bool mask in 32. So one may expect the same of the
# cumulative sum of uint8. It stays uint8: token 257 has the position of the first again, and a model with 1,000 tokens
# sees each position up to four times. Of int8 the positions become negative. Nothing warns: neither overflows, nor
# does an embedding or a rotation refuse such positions. A mask as it comes from a file of bytes has to be cast first.
#
# Seen with jax 0.10.2, mlx 0.32.4, numpy 2.4.6 and Python 3.11 on a CPU, 2026-11-30. A mask of 1,000 ones: the largest
# of the 1,000 positions, how many differ, and the sum:
#
#   numpy: uint8 1000, 1000 differ, sum 1000; int8 1000, bool 1000
#   jax: uint8 255, 256 differ, sum 1000; int8 127, bool 1000
#   mlx: uint8 255, 256 differ, sum 1000; int8 127, bool 1000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 "mlx[cpu]==0.32.4" numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import jax.numpy as jnp
import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
MASKS = [np.ones(1000, dtype) for dtype in (np.uint8, np.int8, bool)]


def positions(name, array, cumulated, summed):
    bytes_, signed, truths = (np.array(cumulated(array(mask))).astype(int) for mask in MASKS)
    found = bytes_.max(), len(set(bytes_)), int(summed(array(MASKS[0]))), signed.max(), truths.max()
    print("{}: uint8 {}, {} differ, sum {}; int8 {}, bool {}".format(name, *found), flush=True)
    return found


right = positions("numpy", np.asarray, np.cumsum, np.sum)
wraps = [positions("jax", jnp.asarray, jnp.cumsum, jnp.sum), positions("mlx", mx.array, mx.cumsum, mx.sum)]
same = right == (1000,) * 5 and all(found == (255, 256, 1000, 127, 1000) for found in wraps)
raise SystemExit(0 if same else "changed")
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
