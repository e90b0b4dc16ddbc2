#!/usr/bin/env bash
# PyTorch 2.13.0: after 144 bad batches in a row GradScaler makes the weights NaN on the first good one.
#
# GradScaler passes over a step whose gradients are not finite, and halves its scale. So one may expect weights to stay
# finite whatever comes, and a training to go on once the batches are good, be it with small gradients until the scale
# has grown. The scale has no lower bound. After 144 halvings its inverse exceeds FP32. The gradients of the next good
# batch are checked before they are multiplied by that inverse, and found finite: the step is not skipped, and its
# gradients are infinite, or NaN where the scale is 0. A shard of bad data, or a feature that is NaN for some minutes,
# costs the weights that the scaler has kept until then. Watch get_scale(), and stop where it is small.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. AdamW drives a weight of 1 towards 2:
#
#   1 bad batches: scale 3.3e+04, weight 1.00; behind 10 good ones weight 1.91
#   140 bad batches: scale 4.7e-38, weight 1.00; behind 10 good ones weight 1.91
#   144 bad batches: scale 2.9e-39, weight 1.00; behind 10 good ones weight nan
#   200 bad batches: scale 0.0e+00, weight 1.00; behind 10 good ones weight nan
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


def weight_behind(bad):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(bad + 10):
        if step == bad:
            kept, scale = weight[0].item(), scaler.get_scale()
        optimizer.zero_grad()
        loss = ((weight - 2) ** 2).sum() * (math.nan if step < bad else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    found = weight[0].item()
    print(f"{bad} bad batches: scale {scale:.1e}, weight {kept:.2f}; behind 10 good ones weight {found:.2f}", flush=True)
    return kept == 1, found


one, many, too_many, most = (weight_behind(bad) for bad in (1, 140, 144, 200))
right = all(kept and abs(found - 1.91) < 0.01 for kept, found in (one, many))
wrong = all(kept and math.isnan(found) for kept, found in (too_many, most))
raise SystemExit(0 if right and wrong else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
