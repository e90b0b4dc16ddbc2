#!/usr/bin/env bash
# PyTorch 2.13.0: a warm-up that is made behind optimizer.load_state_dict leaves the rate 10 times too low for good.
#
# Optimiser and scheduler have a state_dict each, and one loads both. So one may expect the old learning rate in either
# order; at worst one step with a wrong one. A scheduler that is made sets the optimiser's rate, and its
# load_state_dict sets none. LinearLR and ConstantLR multiply the rate that is there by their factor, the loaded one,
# too; later steps multiply what they find. So the rest of the training has a tenth of its rate, also in a SequentialLR
# with a cosine behind the warm-up. LambdaLR and OneCycleLR err for one step, the first behind the resume. A cosine
# alone is right, and so is a scheduler that is made before the optimiser is loaded, as the documentation asks, "to avoid
# overwriting the loaded learning rates". Nothing warns.
#
# Seen with torch 2.13.0 and Python 3.11, 2026-11-30. Learning rates of steps 7 to 11 of 20, of a training that is not
# interrupted, and of one resumed at step 7, whose scheduler is made before or behind the optimiser's load_state_dict:
#
#   LinearLR: whole 0.73 0.82 0.91 1.00 1.00; before 0.73 0.82 0.91 1.00 1.00; behind 0.07 0.08 0.09 0.10 0.10
#   warm-up and cosine: whole 0.96 0.90 0.83 0.75 0.65; before 0.96 0.90 0.83 0.75 0.65; behind 0.10 0.09 0.09 0.08 0.07
#   LambdaLR: whole 0.80 0.90 1.00 1.00 1.00; before 0.80 0.90 1.00 1.00 1.00; behind 0.10 0.90 1.00 1.00 1.00
#   cosine: whole 0.73 0.65 0.58 0.50 0.42; before 0.73 0.65 0.58 0.50 0.42; behind 0.73 0.65 0.58 0.50 0.42
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import copy

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

RESUMED_AT = 7
schedulers = {
    "LinearLR": lambda sgd: LinearLR(sgd, 0.1, 1.0, 10),
    "warm-up and cosine": lambda sgd: SequentialLR(sgd, [LinearLR(sgd, 0.1, 1.0, 5), CosineAnnealingLR(sgd, 15)], [5]),
    "LambdaLR": lambda sgd: LambdaLR(sgd, lambda step: min(1, (step + 1) / 10)),
    "cosine": lambda sgd: CosineAnnealingLR(sgd, 20),
}


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def rates(sgd, scheduler, steps):
    found = []
    for _ in range(steps):
        found.append(sgd.param_groups[0]["lr"])
        sgd.step()
        scheduler.step()
    return found


def resumed(make, saved, made_before):
    sgd = optimizer()
    if made_before:
        scheduler = make(sgd)
    sgd.load_state_dict(saved[0])
    if not made_before:
        scheduler = make(sgd)
    scheduler.load_state_dict(saved[1])
    return rates(sgd, scheduler, 20 - RESUMED_AT)


right = []
for name, make in schedulers.items():
    sgd = optimizer()
    scheduler = make(sgd)
    rates(sgd, scheduler, RESUMED_AT)
    saved = copy.deepcopy((sgd.state_dict(), scheduler.state_dict()))
    rows = rates(sgd, scheduler, 20 - RESUMED_AT), resumed(make, saved, True), resumed(make, saved, False)
    said = [" ".join(f"{rate:.2f}" for rate in row[:5]) for row in rows]
    print(f"{name}: whole {said[0]}; before {said[1]}; behind {said[2]}")
    right.append([sum(abs(a - b) < 1e-6 for a, b in zip(rows[0], row, strict=True)) for row in rows[1:]])
raise SystemExit(0 if right == [[13, 0], [13, 0], [13, 12], [13, 13]] else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
