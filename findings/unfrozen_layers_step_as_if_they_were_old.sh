#!/usr/bin/env bash
# schedulefree 1.4.1, torch-optimi 0.3.3, pytorch-optimizer 4.1.0: a layer that is unfrozen late takes other steps.
#
# Adam divides young moments by 1 - beta^n, as they start at 0. PyTorch counts n for each weight. So one may expect a
# layer that is unfrozen after 1,000 steps, or an expert that is first chosen then, to train as a new layer does.
# These count the steps of the whole group: the moments of the layer are young, and are taken for old. Its first steps
# are a tenth as large, or up to 25 times as large, as those of a layer that is there from the start: a spike just
# where one looks for none. Of Schedule-Free the averaged weights are those that one evaluates: the average counts the
# 1,000 steps in which the layer stood still, so that 100 steps of training hardly show. Nothing warns. Another group
# for the layer helps, if it is added when the layer is unfrozen.
#
# Seen with schedulefree 1.4.1, torch-optimi 0.3.3, pytorch-optimizer 4.1.0, torch 2.13.0 and Python 3.11 on a CPU,
# 2026-11-30. Equal gradients for a layer, at first in step 1,001 of the optimiser. How far it has gone after 1, 10
# and 100 steps, as a multiple of how far one goes that is there from step 1; of Schedule-Free the averaged weights:
#
#   torch AdamW: 1.00, 1.00, 1.00
#   schedulefree AdamWScheduleFree: 0.03, 0.15, 0.55
#   optimi AdamW: 1.00, 1.77, 1.62
#   optimi StableAdamW: 0.10, 0.41, 0.91
#   pytorch-optimizer AdamP: 2.52, 4.40, 3.75
#   pytorch-optimizer LaProp: 25.15, 16.19, 5.79
#   pytorch-optimizer StableAdamW: 0.10, 0.41, 0.91
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
    schedulefree==1.4.1 torch-optimi==0.3.3 pytorch-optimizer==4.1.0 torch==2.13.0 numpy packaging
cat > "$folder/program.py" <<'PY'
import optimi
import pytorch_optimizer
import schedulefree
import torch

torch.set_num_threads(1)
KINDS = {
    "torch AdamW": torch.optim.AdamW,
    "schedulefree AdamWScheduleFree": schedulefree.AdamWScheduleFree,
    "optimi AdamW": optimi.AdamW,
    "optimi StableAdamW": optimi.StableAdamW,
    "pytorch-optimizer AdamP": pytorch_optimizer.AdamP,
    "pytorch-optimizer LaProp": pytorch_optimizer.LaProp,
    "pytorch-optimizer StableAdamW": pytorch_optimizer.StableAdamW,
}


def gone(kind, frozen):
    torch.manual_seed(0)
    old, layer = torch.nn.Parameter(torch.zeros(8, 8)), torch.nn.Parameter(torch.zeros(8, 8))
    gradient = torch.randn(8, 8)
    optimizer = kind([old, layer], lr=0.01, weight_decay=0.0)
    averages = isinstance(optimizer, schedulefree.AdamWScheduleFree)
    found = []
    for step in range(1, frozen + 101):
        if averages:
            optimizer.train()
        old.grad = torch.randn(8, 8)
        layer.grad = gradient.clone() if step > frozen else None
        optimizer.step()
        if step - frozen in (1, 10, 100):
            if averages:
                optimizer.eval()
            found.append(float(layer.detach().norm()))
    return found


seen = {}
for name, kind in KINDS.items():
    seen[name] = [late / early for late, early in zip(gone(kind, 1000), gone(kind, 0))]
    print("{}: {:.2f}, {:.2f}, {:.2f}".format(name, *seen[name]))
right = all(abs(quotient - 1) < 0.01 for quotient in seen.pop("torch AdamW"))
raise SystemExit(0 if right and all(max(abs(q - 1) for q in three) > 0.25 for three in seen.values()) else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
