#!/usr/bin/env bash
# mlx 0.32.4: behind mx.checkpoint a dropout has the loss of one mask and the gradients of another.
#
# mx.checkpoint computes a function a second time in the backward pass, to save memory, and its documentation speaks of
# memory and time alone. PyTorch and JAX give both passes the same random numbers. So one may expect the gradients of
# the loss that was computed. MLX draws from one global key, which the first pass has moved on, so that the second pass
# drops other numbers, also in compiled code: gradients are 0 where the output was kept, and not 0 where it was dropped.
# The loss shows nothing. mlx-lm's --grad-checkpoint does so to the dropout of LoRA. Noise of other kinds, as that of a
# router, is drawn anew, too. A key that the function makes itself is the same in both passes.
#
# Seen with mlx 0.32.4, numpy 2.4.6 and Python 3.11, 2026-11-30. The loss is the sum of nn.Dropout(0.5) of 10,000 ones;
# its gradient is to be the output itself:
#
#   plain: gradient is the output at 10000 of 10000
#   checkpointed: gradient is the output at 5071 of 10000
#   checkpointed and compiled: gradient is the output at 5071 of 10000
#   checkpointed, with a key of its own: gradient is the output at 10000 of 10000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

layer, ones = nn.Dropout(0.5), mx.ones(10_000)


def keyed(x):
    return 2 * x * mx.random.bernoulli(0.5, x.shape, key=mx.random.key(1))


def step(function, x):
    """Output and gradient of one step."""

    def loss(x):
        output = function(x)
        return output.sum(), output

    (_, output), gradient = mx.value_and_grad(loss)(x)
    return output, gradient


def agreed(step):
    mx.random.seed(0)
    output, gradient = (np.array(array) for array in step(ones))
    assert set(output.tolist()) == set(gradient.tolist()) == {0, 2}
    return int((output == gradient).sum())


again, state = partial(step, mx.checkpoint(layer)), mx.random.state
counts = {
    "plain": agreed(partial(step, layer)),
    "checkpointed": agreed(again),
    "checkpointed and compiled": agreed(mx.compile(again, inputs=state, outputs=state)),
    "checkpointed, with a key of its own": agreed(partial(step, mx.checkpoint(keyed))),
}
for what, count in counts.items():
    print(f"{what}: gradient is the output at {count} of 10000")
whole, once, compiled, passed = counts.values()
raise SystemExit(0 if whole == passed == 10_000 and 4_500 < once < 5_500 and 4_500 < compiled < 5_500 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
