#!/usr/bin/env bash
# PyTorch 2.13.0: a training that is resumed to be longer keeps its old schedule, and its rate rises again from 0.
#
# A run that has ended is often resumed for more steps: one makes a cosine over 20 steps in place of 10, and loads the
# states. So one may expect the rate of the longer cosine, or an error. load_state_dict of a scheduler overwrites its
# settings by the loaded ones, T_max too: the new length is forgotten, without a word. Behind its end the old cosine
# goes up: the rate climbs to its peak again, and what follows looks like an instability. LinearLR and PolynomialLR stay
# at their end for good, so that the rest trains at the old run's last rate, or at 0. LambdaLR, whose function is not
# saved, has the new length from its second step on. Another eta_min or warm-up is forgotten, too. Set the attributes
# behind the loading.
#
# Seen with torch 2.13.0 and Python 3.11, 2026-11-30. Rates of steps 10, 12, 15, 17 and 19 of 20, resumed from the last
# step of a run of 10; then those of a run of 20 from the start:
#
#   CosineAnnealingLR: resumed [0.0, 0.095, 0.5, 0.794, 0.976]; from the start [0.5, 0.345, 0.146, 0.054, 0.006]
#   PolynomialLR: resumed [0.0, 0.0, 0.0, 0.0, 0.0]; from the start [0.5, 0.4, 0.25, 0.15, 0.05]
#   LinearLR: resumed [0.1, 0.1, 0.1, 0.1, 0.1]; from the start [0.55, 0.46, 0.325, 0.235, 0.145]
#   LambdaLR: resumed [0.0, 0.345, 0.146, 0.054, 0.006]; from the start [0.5, 0.345, 0.146, 0.054, 0.006]
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import math

import torch
from torch.optim import lr_scheduler

SHOWN = (10, 12, 15, 17, 19)
SCHEDULES = {
    "CosineAnnealingLR": lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, steps),
    "PolynomialLR": lambda optimizer, steps: lr_scheduler.PolynomialLR(optimizer, steps),
    "LinearLR": lambda optimizer, steps: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps),
    "LambdaLR": lambda optimizer, steps: lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps)
    ),
}


def trained(make, steps, states=None, first=0):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = make(optimizer, steps)
    if states is not None:
        optimizer.load_state_dict(states[0])
        scheduler.load_state_dict(states[1])
    rates = {}
    for step in range(first, steps):
        rates[step] = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
    return [round(rates[step], 3) for step in SHOWN if step in rates], (optimizer.state_dict(), scheduler.state_dict())


differ = {}
for name, make in SCHEDULES.items():
    _, states = trained(make, 10)
    resumed, _ = trained(make, 20, states, first=10)
    whole, _ = trained(make, 20)
    print(f"{name}: resumed {resumed}; from the start {whole}")
    differ[name] = resumed, whole
cosine = differ["CosineAnnealingLR"][0]
same = cosine == sorted(cosine) and cosine[0] < 0.01 and cosine[-1] > 0.9
same &= len(set(differ["PolynomialLR"][0])) == len(set(differ["LinearLR"][0])) == 1
same &= differ["LambdaLR"][0][1:] == differ["LambdaLR"][1][1:]
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
