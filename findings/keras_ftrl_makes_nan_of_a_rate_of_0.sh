#!/usr/bin/env bash
# keras 3.15.1: a learning rate of 0 makes all weights NaN under Ftrl, where 12 other optimizers leave them alone.
#
# A warm-up from 0 takes its first step with a rate of 0, and a decay ends there. So one may expect of such a step no
# change, which is what the others do. Ftrl divides its state by the rate, which makes it infinite, and the weight is a
# ratio of two such: NaN. The training is lost at its first step, or at the last of a schedule, while the loss before
# it was good. Nothing warns.
#
# Seen with keras 3.15.1 on jax 0.10.2 and Python 3.11 on a CPU, 2026-11-30. 16 weights of 1 and gradients of 1, two
# steps at a rate of 0: the optimizers that change the weights; then Ftrl with a warm-up from 0 over 10 steps:
#
#   Ftrl: 16 of 16 weights are NaN
#   12 of 13 optimizers leave the weights alone
#   warm-up from 0, 20 steps: Ftrl 16 NaN, Adagrad 0 NaN
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import keras
import numpy as np

NAMES = "SGD RMSprop Adam AdamW Adadelta Adagrad Adamax Adafactor Nadam Lion Lamb Muon Ftrl".split()


def after(name, rate, steps=2):
    weight = keras.Variable(np.ones((4, 4), np.float32))
    optimizer = getattr(keras.optimizers, name)(learning_rate=rate)
    optimizer.build([weight])
    for _ in range(steps):
        optimizer.apply([np.ones((4, 4), np.float32)], [weight])
    return np.asarray(weight)


changed = {name: weights for name in NAMES if (weights := after(name, 0.0)).tolist() != np.ones((4, 4)).tolist()}
for name, weights in changed.items():
    print(f"{name}: {np.isnan(weights).sum()} of 16 weights are NaN")
print(f"{len(NAMES) - len(changed)} of {len(NAMES)} optimizers leave the weights alone")
warm = keras.optimizers.schedules.CosineDecay(0.0, decay_steps=100, warmup_target=0.1, warmup_steps=10)
broken = [int(np.isnan(after(name, warm, steps=20)).sum()) for name in ("Ftrl", "Adagrad")]
print("warm-up from 0, 20 steps: Ftrl {} NaN, Adagrad {} NaN".format(*broken))
same = list(changed) == ["Ftrl"] and np.isnan(changed["Ftrl"]).all() and broken == [16, 0]
raise SystemExit(0 if same else "changed")
PY
KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
