#!/usr/bin/env bash
# diffusers 0.42.1: sliced attention, and AttnProcessor, leave out the norm of queries and keys.
#
# set_attention_slice, which pipeline.enable_attention_slicing() calls, computes some heads at a time, and is to save
# memory alone. AttnProcessor is the one to take for looking at attention weights, and the one of PyTorch before 2.0.
# So one may expect the output of AttnProcessor2_0, the default, up to rounding. A layer with qk_norm normalises
# queries and keys in AttnProcessor2_0. The other two do not ask for it: the scores are as large as QK-norm is
# there to prevent, and softmax sees one key. Nothing warns, and the shapes are right. Without qk_norm all three
# agree.
#
# Seen with diffusers 0.42.1, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. A layer of four heads with large
# weights: by how much the output differs from that of AttnProcessor2_0, at most, in the latter's standard deviations;
# and the mean of each query's largest weight, as configured and without the norm:
#
#   qk_norm=None: AttnProcessor 0.00, sliced 0.00; largest weight 0.92, unnormed 0.92
#   qk_norm=layer_norm: AttnProcessor 9.32, sliced 9.32; largest weight 0.16, unnormed 0.92
#   qk_norm=rms_norm: AttnProcessor 9.37, sliced 9.37; largest weight 0.15, unnormed 0.92
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet diffusers==0.42.1 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0

torch.set_num_threads(1)


@torch.no_grad()
def differences(qk_norm):
    torch.manual_seed(0)
    layer = Attention(query_dim=64, heads=4, dim_head=16, qk_norm=qk_norm).eval()
    for projection in (layer.to_q, layer.to_k):
        projection.weight.mul_(8)
    hidden = torch.randn(2, 32, 64)
    q, k = (layer.head_to_batch_dim(projection(hidden)) for projection in (layer.to_q, layer.to_k))
    largest = float(layer.get_attention_scores(q, k).amax(-1).mean())
    layer.set_processor(AttnProcessor2_0())
    exact = layer(hidden)
    layer.set_processor(AttnProcessor())
    found = [layer(hidden)]
    layer.set_attention_slice(2)
    found.append(layer(hidden))
    if qk_norm is not None:
        q, k = layer.norm_q(q), layer.norm_k(k)
    normed = float(layer.get_attention_scores(q, k).amax(-1).mean())
    return *(float((out - exact).abs().max() / exact.std()) for out in found), normed, largest


seen = {}
for qk_norm in (None, "layer_norm", "rms_norm"):
    seen[qk_norm] = differences(qk_norm)
    told = "AttnProcessor {:.2f}, sliced {:.2f}; largest weight {:.2f}, unnormed {:.2f}"
    print(f"qk_norm={qk_norm}: " + told.format(*seen[qk_norm]))
same = max(seen.pop(None)[:2]) < 1e-4
raise SystemExit(0 if same and all(min(found[:2]) > 0.5 for found in seen.values()) else "changed")
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/program.py"
