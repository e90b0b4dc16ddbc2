#!/usr/bin/env bash
# pytorch-metric-learning 2.9.0: under FP16 autocast NTXentLoss has no gradient for the pairs that are furthest apart.
#
# NTXentLoss, the loss of SimCLR, draws a pair together, and a pair further apart has a larger loss. So one may expect
# FP16 autocast to change it by a rounding. The loss takes the logarithm of the pair's share of exp(similarity /
# temperature), and adds the smallest normal number to the share, lest it be 0. Under autocast the similarities are
# FP16, in which that number is 6e-5: at the default temperature of 0.07 a pair more than about 0.7 less similar than
# others has a smaller share. Its loss stops at 9.7, and its gradient vanishes, so the hardest pairs of a batch are the
# ones that are not learnt. Nothing warns. BF16, whose numbers reach as far down as those of FP32, is right, and so is
# SupConLoss, which takes the logarithm first. Compute the loss outside of autocast, in FP32.
#
# Seen with pytorch-metric-learning 2.9.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-12-01. The loss of a batch with
# one pair, whose first vector is close to another vector, and the norm of its gradient there; the columns are
# the angle within the pair, in degrees:
#
#              0              60             120            180
#   FP32       0.40, 0.7      3.49, 9.0      13.93, 12.6    21.08, 2.2
#   BF16       0.39, 0.7      3.47, 9.0      13.94, 12.6    21.12, 2.2
#   FP16       0.40, 0.7      3.46, 8.8      8.39, 5.7      9.70, 0.0
#   SupConLoss 0.48, 0.6      2.55, 6.4      9.77, 8.8      14.75, 1.6
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pytorch-metric-learning==2.9.0 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import contextlib
import math

import torch
from pytorch_metric_learning.losses import NTXentLoss, SupConLoss

ANGLES = (0, 60, 120, 180)


def losses(name, loss_function, context):
    found = []
    for angle in (math.radians(degrees) for degrees in ANGLES):
        x = torch.zeros(4, 8)
        x[0, 0], x[3, 3] = 1, 1
        x[1, :2] = torch.tensor([math.cos(angle), math.sin(angle)])
        x[2, 0], x[2, 2] = 0.95, 0.31
        x.requires_grad_()
        with context:
            loss = loss_function(x, torch.tensor([0, 0, 1, 2]))
        loss.backward()
        found.append((float(loss), float(x.grad[0].norm())))
    print(f"{name:10} " + "".join(f"{loss:.2f}, {norm:.1f}".ljust(15) for loss, norm in found).rstrip())
    return found


print(" " * 11 + "".join(str(angle).ljust(15) for angle in ANGLES).rstrip())
single = losses("FP32", NTXentLoss(), contextlib.nullcontext())
brain = losses("BF16", NTXentLoss(), torch.autocast("cpu", torch.bfloat16))
half = losses("FP16", NTXentLoss(), torch.autocast("cpu", torch.float16))
other = losses("SupConLoss", SupConLoss(), torch.autocast("cpu", torch.float16))
close = all(abs(a - b) < 0.05 * a and abs(c - d) < 0.05 * c for (a, c), (b, d) in zip(single, brain, strict=True))
lost = single[3][0] > 20 and half[3][0] < 9.8 and single[3][1] > 2 and half[3][1] < 1e-2
raise SystemExit(0 if close and lost and other[3][1] > 1 else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
