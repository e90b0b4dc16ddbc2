#!/usr/bin/env bash
# PyTorch 2.13.0: inside one autocast, weights that a step or a load has changed are still the old ones in the forward.
#
# An evaluation of several checkpoints, or a training of some steps, can stand in one `with torch.autocast(...)`. So one
# may expect each forward pass to take the weights that are there. Autocast keeps the 16-bit copy of a weight that it
# has cast until its block ends, and looks at no change of the weight: the second checkpoint gets the losses of the
# first, averaged weights evaluate as the raw ones, and a loss stands still while the weights move along one gradient.
# Nothing warns. A state_dict, a norm or an optimiser's state shows the new weights. Weights with requires_grad=False,
# which are not kept, are right. A block for each forward pass, as the documentation shows for training, is right, and so
# is cache_enabled=False. FP32 without autocast is right, so that a check there finds nothing.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. A linear layer that learns a sum: the losses of three
# checkpoints, without gradients, and those of four steps of SGD:
#
#   checkpoints: one block for all [6.0, 6.0, 6.0]
#   checkpoints: a block for each [6.0, 2.16, 0.54]
#   checkpoints: one, cache_enabled=False [6.0, 2.16, 0.54]
#   steps: one block for all [6.0, 6.0, 6.0, 6.0]
#   steps: a block for each [6.0, 3.52, 2.14, 1.32]
#   steps: one, cache_enabled=False [6.0, 3.52, 2.14, 1.32]
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import contextlib

import torch
from torch import nn

torch.manual_seed(0)
INPUTS = torch.randn(32, 4)
TARGETS = INPUTS.sum(1, keepdim=True)
FIRST = nn.Linear(4, 1).state_dict()


def autocast(**options):
    return torch.autocast("cpu", torch.bfloat16, **options)


WAYS = {  # what stands around all, and around each
    "one block for all": (autocast, contextlib.nullcontext),
    "a block for each": (contextlib.nullcontext, autocast),
    "one, cache_enabled=False": (lambda: autocast(cache_enabled=False), contextlib.nullcontext),
}


def fresh():
    model = nn.Linear(4, 1)
    model.load_state_dict(FIRST)
    return model


def loss_of(model):
    return (model(INPUTS).float() - TARGETS).square().mean()


def evaluated(around_all, around_each):
    model = fresh()
    solved = {"weight": torch.ones(1, 4), "bias": torch.zeros(1)}
    checkpoints = [{name: torch.lerp(FIRST[name], solved[name], part) for name in FIRST} for part in (0, 0.4, 0.7)]
    losses = []
    with torch.no_grad(), around_all():
        for checkpoint in checkpoints:
            model.load_state_dict(checkpoint)
            with around_each():
                losses.append(round(loss_of(model).item(), 2))
    return losses


def trained(around_all, around_each):
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with around_all():
        for _ in range(4):
            with around_each():
                loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(round(loss.item(), 2))
    assert not torch.equal(model.weight, FIRST["weight"])
    return losses


right = True
for name, losses_of in (("checkpoints", evaluated), ("steps", trained)):
    seen = {way: losses_of(*blocks) for way, blocks in WAYS.items()}
    for way, losses in seen.items():
        print(f"{name}: {way} {losses}")
    one, each, uncached = seen.values()
    right &= len(set(one)) == 1 and each == uncached and each[0] == one[0] and each == sorted(each, reverse=True)
    right &= each[-1] < 0.5 * each[0]
raise SystemExit(0 if right else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
