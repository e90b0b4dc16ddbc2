#!/usr/bin/env bash
# PyTorch 2.13.0: on a CPU, cross_entropy of FP16 logits is infinite at 16,384 tokens, and at 65,536 its gradient is 0.
#
# torch.mean of FP16 numbers adds up in FP32, and cross_entropy of each token alone is right. So one may expect the
# mean loss of many tokens to be right within three digits. nll_loss adds the losses and counts the tokens in FP16: the
# sum passes 65,504 at 16,384 tokens with a loss of 4.4, and the loss is infinite while the gradient is still right. At
# 65,536 tokens the count is infinite, too: the loss is NaN, and the gradient of all logits is exactly 0, so that a
# step decays the weights and nothing else. reduction="none" and a mean behind it are right, and so is a cast to FP32.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Normal logits of 50 classes, seed 0: the loss in FP16,
# the mean of its losses by token, that in FP32, and the norm of the gradient over that in FP32:
#
#   4096 tokens: loss 4.402, mean 4.406, FP32 4.405; gradient 1.00
#   16384 tokens: loss inf, mean 4.398, FP32 4.397; gradient 1.00
#   65536 tokens: loss nan, mean 4.395, FP32 4.396; gradient 0.00
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
from torch.nn.functional import cross_entropy


def loss(tokens):
    torch.manual_seed(0)
    logits, labels = torch.randn(tokens, 50).half(), torch.randint(50, (tokens,))
    half, exact = logits.clone().requires_grad_(), logits.float().requires_grad_()
    found, expected = cross_entropy(half, labels), cross_entropy(exact, labels)
    found.backward()
    expected.backward()
    mean = cross_entropy(logits, labels, reduction="none").mean().item()
    gradient = (half.grad.float().norm() / exact.grad.norm()).item()
    told = "{} tokens: loss {:.3f}, mean {:.3f}, FP32 {:.3f}; gradient {:.2f}"
    print(told.format(tokens, found.item(), mean, expected.item(), gradient), flush=True)
    return found.item(), abs(mean / expected.item() - 1) < 0.002, gradient


few, more, many = (loss(tokens) for tokens in (4096, 16_384, 65_536))
right = all(found[1] for found in (few, more, many)) and abs(few[2] - 1) < 0.01 and abs(more[2] - 1) < 0.01
same = right and math.isfinite(few[0]) and math.isinf(more[0]) and math.isnan(many[0]) and many[2] == 0
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
