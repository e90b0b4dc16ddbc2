#!/usr/bin/env bash
# PyTorch 2.13.0: under autocast the gradient of an FP32 weight that is used n times is a sum in BF16, and stops at 256.
#
# Mixed precision keeps weights and gradients in FP32, so that long sums keep their small parts. So one may expect the
# gradient of a weight that is used often, as those of nn.GRU, of a layer that is shared, or of many forward passes in
# front of one backward, to be added up in FP32. Autocast casts a weight once in its block, and all uses share that BF16
# copy: the gradient of the copy is added up in BF16, one use after another, and cast to FP32 at the end. 256 + 1
# rounds to 256: of n equal parts 256 / n are left, and parts of either sign lose digits. Nothing warns, and the gradient
# is FP32. With cache_enabled=False, or a block for each use, it is right. A batch in place of many uses is right, too.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. A weight of 1 used 1,000 times, each with a gradient of 1;
# then the hidden weights of nn.GRU over 1,000 steps: |a - b| / |b|, b the gradient in FP64:
#
#   1,000 uses: float32, no autocast 1000; autocast 256; cache_enabled=False 1000
#   nn.GRU: float32, no autocast 0.000; autocast 0.372; cache_enabled=False 0.002
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import copy

import torch
from torch import nn

USES = 1000
WAYS = {
    "float32, no autocast": {"enabled": False},
    "autocast": {},
    "cache_enabled=False": {"cache_enabled": False},
}


def of_a_scalar(options):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    with torch.autocast("cpu", torch.bfloat16, **options):
        total = sum(layer(torch.ones(1, 1)).float() for _ in range(USES))
    total.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    return layer.weight.grad.item()


def of_a_gru(gru, inputs, options):
    gru = copy.deepcopy(gru)
    with torch.autocast("cpu", torch.bfloat16, **options):
        outputs, _ = gru(inputs)
    outputs.to(inputs.dtype).mean().backward()
    return gru.weight_hh_l0.grad


torch.manual_seed(0)
gru = nn.GRU(8, 16)
inputs = torch.randn(USES, 4, 8)
exact = of_a_gru(copy.deepcopy(gru).double(), inputs.double(), {"enabled": False})
sums = [of_a_scalar(options) for options in WAYS.values()]
errors = [float((of_a_gru(gru, inputs, options) - exact).norm() / exact.norm()) for options in WAYS.values()]
print("1,000 uses: " + "; ".join(f"{way} {total:.0f}" for way, total in zip(WAYS, sums)))
print("nn.GRU: " + "; ".join(f"{way} {error:.3f}" for way, error in zip(WAYS, errors)))
exactly, cached, uncached = errors
raise SystemExit(0 if sums == [1000, 256, 1000] and exactly < 1e-4 and cached > 5 * uncached else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
