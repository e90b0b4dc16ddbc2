#!/usr/bin/env bash
# keras 3.15.1: with gradient accumulation the moving average of weights moves at each micro-batch, and forgets sooner.
#
# use_ema=True keeps a moving average of the weights, which takes in ema_momentum of itself at a step: 0.99 averages
# about the last 100. With gradient_accumulation_steps=8 the weights move at each eighth batch, and so do iterations,
# learning rates and weight decay. So one may expect the average to move then, too. It moves at each batch, by the
# same weights eight times: a momentum of 0.99 acts as 0.99^8 = 0.92, and the average is over about 12 steps. So whoever
# halves the batch that fits, and accumulates two, evaluates another average. Nothing warns. A momentum of m^(1/n) for
# n batches a step gives the average of m.
#
# Seen with keras 3.15.1, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. A weight that grows by 1 at each of 1,000
# steps, ema_momentum 0.99: by how much its average stays behind:
#
#   1 batch a step: weight 1000, average 99.0 behind
#   8 batches a step: weight 1000, average 12.8 behind
#   8 batches a step, momentum 0.99^(1/8): weight 1000, average 99.9 behind
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import keras
import numpy as np

STEPS = 1000


def behind(what, batches, momentum):
    weight = keras.Variable(np.zeros(1, np.float32))
    optimizer = keras.optimizers.SGD(
        1.0, use_ema=True, ema_momentum=momentum, gradient_accumulation_steps=batches if batches > 1 else None
    )
    optimizer.build([weight])
    for _ in range(STEPS * batches):
        optimizer.apply([keras.ops.array([-1.0])])
    reached = float(weight[0])
    optimizer.finalize_variable_values([weight])  # takes the average
    found = reached - float(weight[0])
    print(f"{what}: weight {reached:.0f}, average {found:.1f} behind", flush=True)
    return reached, found


seen = [
    behind("1 batch a step", 1, 0.99),
    behind("8 batches a step", 8, 0.99),
    behind("8 batches a step, momentum 0.99^(1/8)", 8, 0.99**0.125),
]
same = all(reached == STEPS for reached, _ in seen)
(_, alone), (_, accumulated), (_, mended) = seen
raise SystemExit(0 if same and abs(alone - 99) < 2 and accumulated < 15 and abs(mended - 99) < 5 else "changed")
PY
KERAS_BACKEND=torch "$folder/venv/bin/python" "$folder/program.py" 2> /dev/null
