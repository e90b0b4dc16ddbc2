#!/usr/bin/env bash
# PyTorch 2.13.0: attention modules that train without NaN give NaN in the evaluation, for a row whose keys are closed.
#
# A causal sequence that is padded on the left has rows without an open key. So one may expect 0 there or NaN, and the
# same in training and evaluation where no dropout is set. nn.MultiheadAttention with need_weights=False, and
# nn.TransformerEncoderLayer, take scaled_dot_product_attention in a training, which makes 0 of such rows. In eval() and
# under no_grad they take a fast path that makes NaN of them, and with need_weights=True it is NaN in both. The next
# layer multiplies the NaN by weights of 0, so that it spreads: a run whose training loss is fine has evaluations of
# NaN, and looks as if it had failed. torch.backends.mha.set_fastpath_enabled(False) gives 0 in both.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Two sequences of six tokens, causal, of which the first
# begins with two tokens of padding; tokens whose output is NaN:
#
#   MultiheadAttention: train 0, eval 2
#   MultiheadAttention, need_weights=True: train 2, eval 2
#   two TransformerEncoderLayer: train 0, eval 6
#   two TransformerEncoderLayer, no fast path: train 0, eval 0
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

torch.manual_seed(0)
x = torch.randn(2, 6, 16)
padding = torch.zeros(2, 6, dtype=torch.bool)
padding[0, :2] = True
causal = torch.ones(6, 6, dtype=torch.bool).triu(1)  # True closes a key
attention = nn.MultiheadAttention(16, 2, batch_first=True)
layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]


def attend(need_weights):
    return attention(x, x, x, attn_mask=causal, key_padding_mask=padding, need_weights=need_weights)[0]


def encode():
    hidden = x
    for layer in layers:
        hidden = layer(hidden, src_mask=causal, src_key_padding_mask=padding)
    return hidden


def broken(what, out):
    found = []
    for training in (True, False):
        for module in (attention, *layers):
            module.train(training)
        with torch.no_grad():
            found.append(int(out().isnan().any(-1).sum()))
    print(f"{what}: train {found[0]}, eval {found[1]}")
    return found


seen = [
    broken("MultiheadAttention", lambda: attend(False)),
    broken("MultiheadAttention, need_weights=True", lambda: attend(True)),
    broken("two TransformerEncoderLayer", encode),
]
torch.backends.mha.set_fastpath_enabled(False)
seen.append(broken("two TransformerEncoderLayer, no fast path", encode))
raise SystemExit(0 if seen == [[0, 2], [2, 2], [0, 6], [0, 0]] else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
