#!/usr/bin/env bash
# torch-optimizer 0.3.0: RAdam moves all groups of parameters at the learning rate of the first group.
#
# A group of parameters may have a rate of its own: smaller for the lower layers, 0 for a frozen one. So one may expect
# it to move at that rate. RAdam keeps the size of its last ten steps, the rate among its factors, in a list. The list
# is made once as a default, so that all groups share it: the first group fills it at each step, and the others take
# what they find. Where the first group is frozen at a rate of 0, the
# whole model stands still; where a later one is, it moves. The groups print the rates that they were given. Groups
# with other betas have a list of their own. A schedule of all rates works. torch.optim.RAdam is right.
#
# Seen with torch-optimizer 0.3.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. How far the weights of two groups
# are from their start after 100 steps, at these two rates:
#
#   0.01 and 0.01: torch-optimizer 0.198 and 0.168, PyTorch 0.198 and 0.168
#   0 and 0.01: torch-optimizer 0.000 and 0.000, PyTorch 0.000 and 0.165
#   0.01 and 0: torch-optimizer 0.198 and 0.168, PyTorch 0.191 and 0.000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch-optimizer==0.3.0 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
import torch_optimizer

KINDS = {"torch-optimizer": torch_optimizer.RAdam, "PyTorch": torch.optim.RAdam}
torch.set_num_threads(1)


def moved(kind, rates):
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
    x, y = torch.randn(64, 8), torch.randn(64, 4)
    before = [layer.weight.detach().clone() for layer in layers]
    groups = [{"params": list(layer.parameters()), "lr": rate} for layer, rate in zip(layers, rates, strict=True)]
    optimizer = kind(groups, lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        (layers[1](layers[0](x).tanh()) - y).square().mean().backward()
        optimizer.step()
    return [(layer.weight - start).abs().max().item() for layer, start in zip(layers, before, strict=True)]


seen = {}
for rates in ((0.01, 0.01), (0, 0.01), (0.01, 0)):
    seen[rates] = {name: moved(kind, rates) for name, kind in KINDS.items()}
    shown = ", ".join("{} {:.3f} and {:.3f}".format(name, *far) for name, far in seen[rates].items())
    print("{} and {}: {}".format(*rates, shown))
wrong = {rates: far["torch-optimizer"] for rates, far in seen.items()}
right = {rates: far["PyTorch"] for rates, far in seen.items()}
first = wrong[0, 0.01] == [0, 0] and wrong[0.01, 0] == wrong[0.01, 0.01] and min(wrong[0.01, 0]) > 0.05
own = right[0, 0.01][0] == 0 < right[0, 0.01][1] and right[0.01, 0][1] == 0 < right[0.01, 0][0]
raise SystemExit(0 if first and own else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
