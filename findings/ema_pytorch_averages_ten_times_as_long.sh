#!/usr/bin/env bash
# ema-pytorch 0.8.3: by its default of update_every=10 a decay of 0.999 averages over 10,000 steps, not over 1,000.
#
# A decay of beta is known to average over 1 / (1 - beta) steps. update_every says how often the average is updated, by
# the README to save on compute, and is 10 unless it is given. So one may expect an average of the same length that is
# computed more rarely. The decay is not adapted: an average that moves a thousandth each tenth step takes ten times as
# many steps. With the default beta of 0.9999 it is 100,000 steps, which many trainings do not have, so that their
# evaluated average is one of the first steps. Nothing warns. get_current_decay() says 0.999 in both cases. PyTorch's
# AveragedModel, updated at each step, takes 1,000. A beta of 0.99 beside update_every=10 does, too.
#
# Seen with ema-pytorch 0.8.3, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. A weight of 1 that becomes 2 behind
# 10,000 steps: the average after 1,000 and after 10,000 more:
#
#   beta=0.999: 1.095, 1.632
#   beta=0.999, update_every=1: 1.632, 2.000
#   beta=0.99, update_every=10: 1.634, 2.000
#   AveragedModel of PyTorch, 0.999: 1.632, 2.000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 ema-pytorch==0.8.3 numpy
cat > "$folder/program.py" <<'PY'
import torch
from ema_pytorch import EMA
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

BEFORE = 10_000
SHOWN = (1_000, 10_000)


def of_ema_pytorch(**options):
    def make(model):
        average = EMA(model, **options)
        return average.update, lambda: average.ema_model.weight

    return make


def of_torch(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    return lambda: average.update_parameters(model), lambda: average.module.weight


AVERAGES = {
    "beta=0.999": of_ema_pytorch(beta=0.999, power=1.0),
    "beta=0.999, update_every=1": of_ema_pytorch(beta=0.999, power=1.0, update_every=1),
    "beta=0.99, update_every=10": of_ema_pytorch(beta=0.99, power=1.0, update_every=10),
    "AveragedModel of PyTorch, 0.999": of_torch,
}


def averaged(make):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    update, average = make(model)
    for _ in range(BEFORE):
        update()
    nn.init.constant_(model.weight, 2.0)
    averages = []
    for step in range(1, max(SHOWN) + 1):
        update()
        if step in SHOWN:
            averages.append(average().item())
    return averages


seen = []
for name, make in AVERAGES.items():
    seen.append(averaged(make))
    print("{}: {:.3f}, {:.3f}".format(name, *seen[-1]))
default, each, adapted, other = seen
same = default[0] < 1.11 and abs(default[1] - each[0]) < 0.01
same &= all(abs(a - b) < 0.01 for pair in (each, adapted) for a, b in zip(pair, other, strict=True))
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
