#!/usr/bin/env bash
# opacus 1.6.0: its attention with batch_first=True makes one token's output of other tokens' heads.
#
# DPMultiheadAttention takes the place of nn.MultiheadAttention, whose weights it loads, so that each sample's gradient
# can be clipped; ModuleValidator.fix puts it into a model. So one may expect the same output, as batch_first=False has
# it. With batch_first=True the heads' outputs, which lie head by head, are read as if they lay token by token: with H
# heads the first token gets what the first head has for the first H tokens, and so on. The attention's weights that are
# returned are right, one head is right, and a model learns around it, so that a comparison alone shows it. Weights from
# PyTorch, or back to it, are those of another model. A pull request of May 2026 that mends it was closed.
#
# Seen with opacus 1.6.0, torch 2.13.0, numpy 2.4.6 and Python 3.11, 2026-11-30. The largest error of O to an
# attention in FP64, in standard deviations of O:
#
#   batch_first=False, 4 heads: 0.00000, PyTorch's 0.00000
#   batch_first=True, 1 head: 0.00000, PyTorch's 0.00000
#   batch_first=True, 4 heads: 4.45, PyTorch's 0.00000
#   the same, to heads that are read token by token: 0.00000
#   nn.TransformerEncoderLayer behind ModuleValidator.fix: 0.7
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 opacus==1.6.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import warnings

warnings.simplefilter("ignore")
import numpy as np
import torch
from opacus.layers import DPMultiheadAttention
from opacus.validators import ModuleValidator

BATCH, TOKENS, SIZE = 3, 6, 8
torch.manual_seed(0)
x = torch.randn(BATCH, TOKENS, SIZE)
model = torch.nn.MultiheadAttention(SIZE, 4, batch_first=True)
for weight in model.parameters():
    torch.nn.init.normal_(weight)
state = {name: weight.detach() for name, weight in model.state_dict().items()}


def heads_of(number):
    """The heads' outputs in FP64 before the last projection, one head behind the other."""
    values = {name: weight.double().numpy() for name, weight in state.items()}
    q, k, v = np.split(x.double().numpy() @ values["in_proj_weight"].T + values["in_proj_bias"], 3, axis=-1)
    width = SIZE // number
    outputs = []
    for part in (slice(start, start + width) for start in range(0, SIZE, width)):
        scores = q[..., part] @ k[..., part].swapaxes(1, 2) / np.sqrt(width)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        outputs.append(weights / weights.sum(-1, keepdims=True) @ v[..., part])
    return np.stack(outputs, 1)


def projected(outputs):
    return outputs @ state["out_proj.weight"].double().numpy().T + state["out_proj.bias"].double().numpy()


def error(kind, number, batch_first, expected):
    layer = kind(SIZE, number, batch_first=batch_first)
    layer.load_state_dict(dict(state))
    tokens = x if batch_first else x.transpose(0, 1)
    output = layer(tokens, tokens, tokens)[0].detach()
    output = output if batch_first else output.transpose(0, 1)
    return np.abs(output.double().numpy() - expected).max() / expected.std()


errors = []
for number, batch_first in ((4, False), (1, True), (4, True)):
    expected = projected(heads_of(number).transpose(0, 2, 1, 3).reshape(BATCH, TOKENS, SIZE))
    kinds = DPMultiheadAttention, torch.nn.MultiheadAttention
    errors.append([error(kind, number, batch_first, expected) for kind in kinds])
    name = f"batch_first={batch_first}, {number} head{'s' if number > 1 else ''}"
    ours, theirs = errors[-1]
    print(f"{name}: {ours:.{2 if ours > 0.1 else 5}f}, PyTorch's {theirs:.5f}")
mixed = error(DPMultiheadAttention, 4, True, projected(heads_of(4).reshape(BATCH, TOKENS, SIZE)))
print(f"the same, to heads that are read token by token: {mixed:.5f}")
layer = torch.nn.TransformerEncoderLayer(SIZE, 4, dropout=0.0, batch_first=True)
difference = (ModuleValidator.fix(layer)(x) - layer(x)).abs().max().item()
print(f"nn.TransformerEncoderLayer behind ModuleValidator.fix: {difference:.1f}")
same = [error > 0.5 for pair in errors for error in pair] == [False, False, False, False, True, False]
raise SystemExit(0 if same and mixed < 1e-5 and difference > 0.1 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
