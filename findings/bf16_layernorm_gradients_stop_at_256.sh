#!/usr/bin/env bash
# PyTorch 2.13.0: on a CPU, the gradients of a BF16 LayerNorm stop growing at 256 times one token's part.
#
# The gradient of a LayerNorm's weight and bias is a sum over all tokens. The sum, the bias of a Linear and the
# gradients of GroupNorm and RMSNorm are kept in FP32 and rounded once. So one may expect it of LayerNorm, which takes
# its means in FP32. It adds the tokens' parts up in BF16, one after another: 256 + 1 rounds to 256, and of n equal
# parts 256 / n are left, without a word. Random parts lose their sum in rounding. Each thread has a sum of its own, so
# that two threads stop at 512, and the gradient of a replay depends on their number. Weights in FP32, whose gradient is
# FP32, do not help where the input is BF16, as that behind a Linear under autocast. An input cast to FP32 does.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, one thread, 2026-11-30. The gradient of the first bias of layers of 8
# features, each token's part is 1:
#
#   200 tokens: LayerNorm 200, GroupNorm 200, Linear 200
#   1000 tokens: LayerNorm 256, GroupNorm 1000, Linear 1000
#   10000 tokens: LayerNorm 256, GroupNorm 9984, Linear 9984
#   10000 tokens, two threads: LayerNorm 512
#   10000 tokens, weights in FP32 under autocast: LayerNorm 256
#   10000 tokens with normal parts: the weight's gradient errs by 10%, that of RMSNorm by 0.2%
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from torch import nn

BF16 = torch.bfloat16


def first_bias(layer, tokens):
    y = layer(torch.linspace(-1, 1, 8, dtype=BF16).expand(tokens, 8))
    y.backward(torch.ones_like(y))
    return round(layer.bias.grad[0].item())


def error(make):
    torch.manual_seed(0)
    x, g = torch.randn(10000, 64, dtype=BF16), torch.randn(10000, 64, dtype=BF16)
    gradients = []
    for dtype in (BF16, torch.float64):
        layer = make(64, dtype=dtype, eps=1e-5)
        layer(x.to(dtype)).backward(g.to(dtype))
        gradients.append(layer.weight.grad.double())
    return ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item()


torch.set_num_threads(1)
seen = []
for tokens in (200, 1000, 10000):
    layers = nn.LayerNorm(8, dtype=BF16), nn.GroupNorm(2, 8, dtype=BF16), nn.Linear(8, 8, dtype=BF16)
    row = [first_bias(layer, tokens) for layer in layers]
    print(f"{tokens} tokens: LayerNorm {row[0]}, GroupNorm {row[1]}, Linear {row[2]}")
    seen.append(row)
torch.set_num_threads(2)
two = first_bias(nn.LayerNorm(8, dtype=BF16), 10000)
torch.set_num_threads(1)
layer = nn.LayerNorm(8)
with torch.autocast("cpu", dtype=BF16):
    layer(nn.Linear(8, 8)(torch.ones(10000, 8))).float().sum().backward()
autocast = round(layer.bias.grad[0].item())
print(f"10000 tokens, two threads: LayerNorm {two}")
print(f"10000 tokens, weights in FP32 under autocast: LayerNorm {autocast}")
layer_norm, rms_norm = error(nn.LayerNorm), error(nn.RMSNorm)
said = f"the weight's gradient errs by {layer_norm:.0%}, that of RMSNorm by {rms_norm:.1%}"
print(f"10000 tokens with normal parts: {said}")
same = seen == [[200] * 3, [256, 1000, 1000], [256, 9984, 9984]] and (two, autocast) == (512, 256)
raise SystemExit(0 if same and layer_norm > 10 * rms_norm else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
