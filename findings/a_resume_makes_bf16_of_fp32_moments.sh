#!/usr/bin/env bash
# heavyball 3.2.1 with PyTorch 2.13.0: a resume turns the FP32 moments beside BF16 weights into BF16, for good.
#
# heavyball keeps its moments in FP32 beside weights in BF16, and saves them so. So one may expect a resumed training to
# take the steps of one that is not interrupted, as with FP32 weights. Optimizer.load_state_dict of PyTorch casts each
# floating state to the dtype of its weight: the moments lose 16 bits, and are BF16 from then on. So a replay from a
# checkpoint is another run than the one that it replays. Nothing warns. It is so for its AdamW, Muon and SOAP, and for
# any optimiser that keeps FP32 beside BF16 and leaves load_state_dict as it is. Put the saved tensors back into
# optimizer.state behind the load.
#
# Seen with heavyball 3.2.1, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. AdamW, resumed after 10 steps or not: the
# dtype of its two moments then, and by how much they change, at most, when they are loaded:
#
#   BF16 weights, uninterrupted: float32 float32
#   BF16 weights, resumed: bfloat16 bfloat16, changed by up to 0.39%
#   FP32 weights, resumed: float32 float32, changed by up to 0.00%
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet heavyball==3.2.1 torch==2.13.0 numpy setuptools
cat > "$folder/program.py" <<'PY'
import copy

import heavyball
import torch


def moments(adamw, weight):
    states = [state for state in adamw.state[weight].values() if isinstance(state, dict)]
    return [tensor for state in states for name, tensor in sorted(state.items()) if "exp_avg" in name]


def trained(dtype, resumed):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    adamw = heavyball.AdamW([weight], lr=1e-3)
    for _ in range(10):
        weight.grad = torch.randn_like(weight)
        adamw.step()
        adamw.zero_grad()
    before = [moment.clone() for moment in moments(adamw, weight)]
    if resumed:
        saved = copy.deepcopy(adamw.state_dict())
        adamw = heavyball.AdamW([weight], lr=1e-3)
        adamw.load_state_dict(saved)
    after = moments(adamw, weight)
    change = max(((b.float() - a) / a).abs().max().item() for a, b in zip(before, after, strict=True))
    dtypes = " ".join(str(moment.dtype).removeprefix("torch.") for moment in after)
    name = "BF16" if dtype == torch.bfloat16 else "FP32"
    how = f"resumed: {dtypes}, changed by up to {change:.2%}" if resumed else f"uninterrupted: {dtypes}"
    print(f"{name} weights, {how}", flush=True)
    return dtypes, 0.001 < change < 0.004


seen = [trained(torch.bfloat16, False), trained(torch.bfloat16, True), trained(torch.float32, True)]
kept, rounded = ("float32 float32", False), ("bfloat16 bfloat16", True)
raise SystemExit(0 if seen == [kept, rounded, kept] else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py" 2> /dev/null
