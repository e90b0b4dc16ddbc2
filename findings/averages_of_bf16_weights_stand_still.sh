#!/usr/bin/env bash
# PyTorch 2.13.0, diffusers 0.42.1, ema-pytorch 0.8.3, pytorch-ignite 0.5.5: an average of BF16 weights never moves.
#
# An exponential average of the weights, with a decay of 0.999, is to follow them in some thousand steps. So one may
# expect it to come near weights that have moved, with the 0.4 % of a BF16 number as its error. All four keep it in the
# dtype of the weights, and take a thousandth of the distance a step. Where that is less than half of the distance of
# two BF16 numbers, it rounds to nothing, so that the average stands where the training began, for good: as in a weight
# that goes from 1 to 0 or to 3. An average that starts behind it, or a small decay at first, hides it for some time.
# Evaluations of the average then say that the training does not learn. Nothing warns. PyTorch's equal average loses 2 to
# 4 % in 3,000 steps. An average of a copy in FP32 is right.
#
# Seen with torch 2.13.0, diffusers 0.42.1, ema-pytorch 0.8.3, pytorch-ignite 0.5.5 and Python 3.11 on a CPU, 2026-11-30.
# A weight of 1 that becomes 3, or 0: its average after 3,000 steps, in FP32 and in BF16:
#
#   AveragedModel: to 3 2.901 and 1.000, to 0 0.050 and 1.000
#   EMAModel of diffusers: to 3 2.901 and 1.000, to 0 0.050 and 1.000
#   ema-pytorch: to 3 2.901 and 1.000, to 0 0.050 and 1.000
#   EMAHandler of ignite: to 3 2.901 and 1.000, to 0 0.050 and 1.000
#   AveragedModel, equal: to 3 2.999 and 2.875, to 0 0.000 and 0.003
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 diffusers==0.42.1 ema-pytorch==0.8.3 pytorch-ignite==0.5.5 numpy
cat > "$folder/program.py" <<'PY'
import torch
from diffusers.training_utils import EMAModel
from ema_pytorch import EMA
from ignite.engine import Engine, Events
from ignite.handlers import EMAHandler
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DECAY = 0.999
STEPS = 3000


def torch_average(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    return lambda: average.update_parameters(model), lambda: average.module.weight


def torch_equal_average(model):
    average = AveragedModel(model)
    return lambda: average.update_parameters(model), lambda: average.module.weight


def diffusers_average(model):
    average = EMAModel(model.parameters(), decay=DECAY, min_decay=DECAY)
    return lambda: average.step(model.parameters()), lambda: average.shadow_params[0]


def ema_pytorch_average(model):
    average = EMA(model, beta=DECAY, min_value=DECAY, update_every=1, update_after_step=0)
    return average.update, lambda: average.ema_model.weight


def ignite_average(model):
    average = EMAHandler(model, momentum=1 - DECAY)
    engine = Engine(lambda engine, batch: None)
    average.attach(engine)
    engine.state.ema_momentum = 1 - DECAY
    return lambda: engine.fire_event(Events.ITERATION_COMPLETED), lambda: average.ema_model.weight


AVERAGES = {
    "AveragedModel": torch_average,
    "EMAModel of diffusers": diffusers_average,
    "ema-pytorch": ema_pytorch_average,
    "EMAHandler of ignite": ignite_average,
    "AveragedModel, equal": torch_equal_average,
}


def averaged(make, dtype, goal):
    model = nn.Linear(1, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    update, average = make(model)
    update()
    nn.init.constant_(model.weight, goal)
    for _ in range(STEPS):
        update()
    return average().item()


same = True
for name, make in AVERAGES.items():
    rose, fell = ([averaged(make, dtype, goal) for dtype in (torch.float32, torch.bfloat16)] for goal in (3.0, 0.0))
    print("{}: to 3 {:.3f} and {:.3f}, to 0 {:.3f} and {:.3f}".format(name, *rose, *fell))
    if name == "AveragedModel, equal":
        same &= 2.998 < rose[0] and rose[1] < 2.9
    else:
        same &= rose[1] == fell[1] == 1 and rose[0] > 2.8 and fell[0] < 0.1
raise SystemExit(0 if same else "changed")
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/program.py" 2> /dev/null
