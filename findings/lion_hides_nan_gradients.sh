#!/usr/bin/env bash
# lion-pytorch 0.2.5 with PyTorch 2.13.0: after one NaN gradient Lion never moves the weight again, and nothing is NaN.
#
# A NaN gradient makes the weights NaN with AdamW and SGD, and so the loss, which one sees. So one may expect it of Lion,
# whose step is the sign of a mean of gradients. torch.sign of NaN is 0, where NumPy's is NaN: the weight stands still
# at that step. And the mean stays NaN, so that it stands still at all later ones, whose gradients are finite. Weights,
# losses and gradients are finite numbers from then on. Only the gradient norm of that one step tells.
#
# Seen with lion-pytorch 0.2.5, torch 2.13.0, numpy 2.4.6 and Python 3.11 on a CPU, 2026-11-29. One of two weights gets
# a NaN gradient at step 3 of 10, with a learning rate of 0.1, from 0:
#
#   sign of NaN: NumPy nan, PyTorch 0
#   SGD: nan -1.00
#   AdamW: nan -1.00
#   Lion: -0.20 -1.00
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 lion-pytorch==0.2.5 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import math

import numpy as np
import torch
from lion_pytorch import Lion


def trained(make, **options):
    weights = torch.nn.Parameter(torch.zeros(2))
    optimizer = make([weights], lr=0.1, weight_decay=0.0, **options)
    for step in range(1, 11):
        weights.grad = torch.ones(2)
        if step == 3:
            weights.grad[0] = math.nan
        optimizer.step()
    return weights.tolist()


signs = np.sign(np.float32("nan")), torch.sign(torch.tensor(math.nan)).item()
print(f"sign of NaN: NumPy {signs[0]:g}, PyTorch {signs[1]:g}")
seen = {make.__name__: trained(make) for make in (torch.optim.SGD, torch.optim.AdamW, Lion)}
for name, (hit, other) in seen.items():
    print(f"{name}: {hit:.2f} {other:.2f}")
others_nan = all(math.isnan(seen[name][0]) for name in ("SGD", "AdamW"))
stands = abs(seen["Lion"][0] + 0.2) < 1e-6 and abs(seen["Lion"][1] + 1.0) < 1e-6
raise SystemExit(0 if others_nan and stands and math.isnan(signs[0]) and signs[1] == 0 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
