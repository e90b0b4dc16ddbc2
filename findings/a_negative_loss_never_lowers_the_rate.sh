#!/usr/bin/env bash
# PyTorch 2.13.0: with a negative loss that stands still or rises, ReduceLROnPlateau never lowers the rate.
#
# ReduceLROnPlateau divides the rate by 10 once the metric has not fallen for 10 epochs, by more than threshold=1e-4 of
# it. So one may expect the same of a loss of 100 and one of −100 that do not change. "Fallen" is metric < best · (1 −
# threshold): of a best loss of −100 that is −99.99, and −100 itself lies below. Each epoch counts as better than the
# one before, and a loss that rises by less than 0.01 % an epoch does, too. Log-likelihoods of densities, ELBOs and
# rewards with their sign turned are negative. A maximum does the same with mode="max" and negative metrics, such as a
# log-likelihood. threshold_mode="abs" is right. Nothing warns.
#
# Seen with torch 2.13.0 and Python 3.11, 2026-11-30. The rate, at first 1, behind 100 epochs of a metric that starts
# so:
#
#   min, 100, constant: 1e-08; -100, constant: 1; -100, rises by 0.005 an epoch: 1
#   max, 100, constant: 1e-08; -100, constant: 1; -100, falls by 0.005 an epoch: 1
#   abs, -100, constant: 1e-08
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau


def rate(first, change=0.0, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = ReduceLROnPlateau(optimizer, **options)
    for epoch in range(100):
        optimizer.step()
        schedule.step(first + epoch * change)
    return optimizer.param_groups[0]["lr"]


seen = []
for mode, change, word in (("min", 0.005, "rises"), ("max", -0.005, "falls")):
    seen.append((rate(100.0, mode=mode), rate(-100.0, mode=mode), rate(-100.0, change, mode=mode)))
    told = "{}, 100, constant: {:.3g}; -100, constant: {:.3g}; -100, {} by 0.005 an epoch: {:.3g}"
    print(told.format(mode, *seen[-1][:2], word, seen[-1][2]))
absolute = rate(-100.0, threshold_mode="abs")
print(f"abs, -100, constant: {absolute:.3g}")
same = all(positive < 1e-6 and fixed == worse == 1 for positive, fixed, worse in seen) and absolute < 1e-6
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
