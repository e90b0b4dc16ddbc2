#!/usr/bin/env bash
# jax 0.10.2: on a CPU, jax.device_put shares memory with aligned NumPy arrays, also with may_alias=False.
#
# JAX's arrays do not change, and device_put returns "a copy of x that resides on device"; with may_alias=False "x will
# be copied", says its documentation. So one may expect a batch to stay as it was where a loader fills its buffer anew.
# On a CPU device_put takes over the buffer itself where its address is a multiple of 64, whatever may_alias says: as in
# np.memmap, in shared memory, by which loaders' workers hand over their batches, and in PyTorch's tensors. An array of
# np.empty mostly lies at 16 beyond such an address, and is copied, so that a test with one passes. Two batches in one
# buffer are then one batch twice, weights of PyTorch that are kept for a comparison train on, and a replay differs from
# its run. Nothing warns. jnp.array and jnp.asarray copy. from_dlpack shares, and its documentation says so.
#
# Seen with jax 0.10.2, numpy 2.4.6 and Python 3.11 on Linux, 2026-11-30. An array of ones, whose buffer is filled with
# 2 behind the call: the mean of what the call returned, for three kinds of arrays:
#
#   device_put: np.memmap 2, shared memory 2, at 16 beyond 64 1
#   device_put, may_alias=False: np.memmap 2, shared memory 2, at 16 beyond 64 1
#   jnp.asarray: np.memmap 1, shared memory 1, at 16 beyond 64 1
#   jnp.array: np.memmap 1, shared memory 1, at 16 beyond 64 1
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
from multiprocessing import shared_memory

import jax
import jax.numpy as jnp
import numpy as np

SHAPE = (8, 1024)
block = shared_memory.SharedMemory(create=True, size=4 * SHAPE[0] * SHAPE[1])
beside = np.empty(4 * SHAPE[0] * SHAPE[1] + 128, np.uint8)
start = -beside.ctypes.data % 64 + 16  # where np.empty puts such arrays by itself
arrays = {
    "np.memmap": np.memmap("batch.bin", np.float32, "w+", shape=SHAPE),
    "shared memory": np.ndarray(SHAPE, np.float32, buffer=block.buf),
    "at 16 beyond 64": beside[start : start + 4 * SHAPE[0] * SHAPE[1]].view(np.float32).reshape(SHAPE),
}
calls = {
    "device_put": jax.device_put,
    "device_put, may_alias=False": lambda array: jax.device_put(array, may_alias=False),
    "jnp.asarray": jnp.asarray,
    "jnp.array": jnp.array,
}


def mean_behind(call, array):
    array[:] = 1
    taken = jax.block_until_ready(call(array))
    array[:] = 2
    return float(jnp.mean(taken))


seen = {name: [mean_behind(call, array) for array in arrays.values()] for name, call in calls.items()}
for name, means in seen.items():
    print(f"{name}: " + ", ".join(f"{kind} {mean:g}" for kind, mean in zip(arrays, means, strict=True)))
arrays.pop("shared memory")
block.unlink()
same = seen["device_put"] == seen["device_put, may_alias=False"] == [2, 2, 1]
raise SystemExit(0 if same and seen["jnp.asarray"] == seen["jnp.array"] == [1, 1, 1] else "changed")
PY
cd "$folder"
venv/bin/python -W ignore program.py
