#!/usr/bin/env bash
# ai2-olmo-core 3.0.0: a step that SkipStepAdamW skips for its NaN makes all weights NaN, or 128 more are skipped.
#
# SkipStepAdamW passes over a step whose loss or gradient norm is six standard deviations above those of the last 128
# steps, so that a spike does not harm the training. So one may expect the worst spike, one of NaN or infinity, to be
# passed over, too, and the next step to be taken. The step is skipped by a factor of 0, and 0 times NaN or infinity is
# NaN: where the gradients have one, all weights that they touch are NaN after the "skipped" step, and step_skipped says
# that it was skipped. Where the loss alone is NaN or infinite, as after an average over ranks, it stays among the 128
# losses: their mean is NaN, no later loss compares with it, and the next 128 steps are skipped, too, without a word.
# SkipStepLion's momentum becomes NaN, and its weights never move again. Test loss and norm before the step.
#
# Seen with ai2-olmo-core 3.0.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. 300 steps, of which step 100 has
# another loss or other gradients; the steps that did not move the weights, and the weights that are NaN at the end:
#
#   SkipStepAdamW, loss 50, gradients 10: 1 not moved, 0 of 64 NaN
#   SkipStepAdamW, loss nan: 129 not moved, 0 of 64 NaN
#   SkipStepAdamW, loss inf: 129 not moved, 0 of 64 NaN
#   SkipStepAdamW, loss nan, gradients nan: 0 not moved, 64 of 64 NaN; step 100 is called skipped
#   SkipStepAdamW, loss inf, gradients inf: 0 not moved, 64 of 64 NaN; step 100 is called skipped
#   SkipStepLion, loss nan, gradients nan: 200 not moved, 0 of 64 NaN
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ai2-olmo-core==3.0.0 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import math

import torch
from olmo_core.optim import SkipStepAdamW, SkipStepLion

SPIKE, STEPS = 100, 300


def train(optimizer_class, loss_of_spike, gradient_of_spike=None):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64))
    optimizer = optimizer_class([weight], lr=1e-3)
    unmoved, called_skipped = 0, False
    for step in range(STEPS):
        weight.grad = 0.1 * torch.randn(64)
        loss = torch.tensor(3 + 0.1 * math.sin(step))
        if step == SPIKE:
            loss = torch.tensor(loss_of_spike)
            if gradient_of_spike is not None:
                weight.grad.fill_(gradient_of_spike)
        optimizer.latest_loss, optimizer.latest_grad_norm = loss, weight.grad.norm()
        before = weight.detach().clone()
        optimizer.step()
        unmoved += torch.equal(before, weight.detach())
        if step == SPIKE:
            called_skipped = bool(optimizer.step_skipped)
    broken = int(weight.isnan().sum())
    spike = f"loss {loss_of_spike:g}" + ("" if gradient_of_spike is None else f", gradients {gradient_of_spike:g}")
    end = f"; step {SPIKE} is called skipped" if broken and called_skipped else ""
    print(f"{optimizer_class.__name__}, {spike}: {unmoved} not moved, {broken} of 64 NaN{end}")
    return unmoved, broken, called_skipped


seen = [
    train(SkipStepAdamW, 50.0, 10.0),
    train(SkipStepAdamW, math.nan),
    train(SkipStepAdamW, math.inf),
    train(SkipStepAdamW, math.nan, math.nan),
    train(SkipStepAdamW, math.inf, math.inf),
    train(SkipStepLion, math.nan, math.nan),
]
poisoned = (0, 64, True)
raise SystemExit(0 if seen == [(1, 0, True), (129, 0, True), (129, 0, True), *[poisoned] * 2, (200, 0, True)] else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py" 2> "$folder/warnings" || { cat "$folder/warnings"; exit 1; }
