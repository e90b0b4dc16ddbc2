#!/usr/bin/env bash
# torchmetrics 1.9.0: one token that a model finds unlikely makes the perplexity of all infinite, most easily in FP16.
#
# Perplexity takes logits, and is the exponential of their cross entropy. So one may expect exp(cross_entropy), which is
# 63.5 where one of 1,024 tokens lies 24 nats below the likeliest. The metric takes softmax in the logits' dtype, and
# then the logarithm: a probability that is rounded to 0 has an infinite one, and with it the whole evaluation. FP16
# does so below 3e-8, 17 nats, as any text has such tokens; FP32 and BF16 below 1e-45 and 1e-40, as a training that
# diverges has them: its perplexity is infinite, and not merely large, evaluations before the loss is. In BF16 it errs
# by 0.8 %, where the cross entropy of the same logits errs by 0.02 %. Nothing warns. Take cross_entropy of
# logits.float().
#
# Seen with torchmetrics 1.9.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. 1,024 tokens of 1,000 kinds, sampled
# from normal logits; then one of them lies 24 or 110 nats below. Perplexity, then exp(cross_entropy) of the same
# logits:
#
#   all tokens sampled: float32 62.34, 62.34; bfloat16 61.87, 62.35; float16 62.35, 62.34
#   one token 24 nats below: float32 63.48, 63.48; bfloat16 63.83, 63.49; float16 inf, 63.48
#   one token 110 nats below: float32 inf, 69.04; bfloat16 inf, 69.05; float16 inf, 69.04
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torchmetrics==1.9.0 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import math

import torch
from torch.nn.functional import cross_entropy
from torchmetrics.text import Perplexity

torch.set_num_threads(1)
torch.manual_seed(0)
logits = torch.randn(8, 128, 1000) * 2.5
targets = torch.distributions.Categorical(logits=logits).sample()


def compared(what, logits, targets):
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cast = logits.to(dtype)
        exact = cross_entropy(cast.float().flatten(0, 1), targets.flatten()).exp().item()
        found.append((str(dtype).removeprefix("torch."), Perplexity()(cast, targets).item(), exact))
    print(f"{what}: " + "; ".join("{} {:.2f}, {:.2f}".format(*row) for row in found))
    return [(metric, exact) for _, metric, exact in found]


sampled = compared("all tokens sampled", logits, targets)
logits[0, 0], targets[0, 0] = 0, 1
seen = []
for nats in (24, 110):
    logits[0, 0, 0] = nats
    seen.append([math.isinf(metric) for metric, _ in compared(f"one token {nats} nats below", logits, targets)])
off = [abs(metric / exact - 1) for metric, exact in sampled]
same = seen == [[False, False, True], [True, True, True]] and off[0] < 1e-4 and off[1] > 3e-3
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
