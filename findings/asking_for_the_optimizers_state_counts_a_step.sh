#!/usr/bin/env bash
# PyTorch 2.13.0: a distributed checkpoint before the first step changes the training that it is of.
#
# get_optimizer_state_dict and get_state_dict hand over what torch.distributed.checkpoint saves. So one may expect the
# same training with a checkpoint before step 1 as without. An optimiser has no state until its first step. So the call
# takes one, with gradients and a learning rate of 0, and what it leaves stays in the optimiser that trains on: Adam
# counts that step, and so corrects the bias of its moments for one step more than there were. Its first step is 0.74 of
# what it would be, its first ten 0.93. SGD with dampening damps its first gradient, too, and Rprop, whose step sizes
# start at the learning rate, stands still. Nothing warns, and the replay of such a run without its checkpoint is
# another run. optimizer.state_dict() only reads. Reported as pytorch issue 164929.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. A weight of 0 after 1 and 10 steps with gradients of 1 and
# a learning rate of 0.1, when before the first step nothing was called, optimizer.state_dict(), or
# get_optimizer_state_dict:
#
#   AdamW: nothing -0.100 -1.000, state_dict -0.100 -1.000, get_optimizer_state_dict -0.074 -0.933
#   Adamax: nothing -0.100 -1.000, state_dict -0.100 -1.000, get_optimizer_state_dict -0.053 -0.836
#   SGD, dampened: nothing -0.100 -1.000, state_dict -0.100 -1.000, get_optimizer_state_dict -0.010 -0.414
#   Rprop: nothing -0.100 -2.596, state_dict -0.100 -2.596, get_optimizer_state_dict 0.000 0.000
#   SGD: nothing -0.100 -1.000, state_dict -0.100 -1.000, get_optimizer_state_dict -0.100 -1.000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

OPTIMIZERS = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.0),
    "Adamax": lambda weights: torch.optim.Adamax(weights, lr=0.1),
    "SGD, dampened": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.9),
    "Rprop": lambda weights: torch.optim.Rprop(weights, lr=0.1),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1),
}
CALLS = {
    "nothing": lambda model, optimizer: None,
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "get_optimizer_state_dict": get_optimizer_state_dict,
}


def trained(make, call):
    """The weight after 1 step and after 10."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = make(model.parameters())
    call(model, optimizer)
    weights = []
    for _ in range(10):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        weights.append(round(model.weight.item(), 3) + 0.0)  # no -0.0
    return weights[0], weights[-1]


same = True
for name, make in OPTIMIZERS.items():
    nothing, read, asked = seen = [trained(make, call) for call in CALLS.values()]
    told = ", ".join("{} {:.3f} {:.3f}".format(call, *weights) for call, weights in zip(CALLS, seen, strict=True))
    print(f"{name}: {told}")
    same &= nothing == read and (nothing == asked) == (name == "SGD")
    same &= name == "SGD" or abs(asked[0]) < 0.8 * abs(nothing[0])
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py" 2> /dev/null
