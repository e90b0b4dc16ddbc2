#!/usr/bin/env bash
# PyTorch 2.13.0: in BF16, on a CPU, uniform_(0.99, 1.01) gives numbers from 0.988 to 1.0, of mean 0.994.
#
# Mixtures of experts multiply their input by noise around 1, between 1 - j and 1 + j: in transformers Mixtral, PhiMoE,
# MiniMax and DBRX do so in the dtype of the input, and Switch in FP32. So one may expect noise of mean 1, up and down,
# rounded to the nearest BF16. uniform_ rounds down, so that no number reaches the upper bound. Above 1 BF16's next
# number is 1.0078: with j = 0.01 none is above 1, and each jitter makes the numbers 0.6 % smaller. With j = 0.001 there
# is no noise at all. Mixtral multiplies its hidden states in place: what each layer hands to its experts is smaller
# than in the evaluation. FP16 loses 0.05 to 0.1 % so. Nothing warns. FP32 noise that is cast is right. PyTorch 2.11 has
# 0.998 and reaches 1.0078.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. A million numbers, seed 0: the smallest, mean and largest;
# behind it those of FP32 that are cast:
#
#   bfloat16, 0.1: 0.8984 0.9977 1.0938; cast 0.8984 1.0000 1.1016
#   float16, 0.1: 0.8999 0.9992 1.0986; cast 0.8999 1.0000 1.0996
#   bfloat16, 0.01: 0.9883 0.9940 1.0000; cast 0.9883 1.0000 1.0078
#   float16, 0.01: 0.9902 0.9993 1.0088; cast 0.9902 1.0000 1.0098
#   bfloat16, 0.001: 1.0000 1.0000 1.0000; cast 1.0000 1.0000 1.0000
#   float16, 0.001: 0.9990 0.9995 1.0000; cast 0.9990 1.0000 1.0010
#   what a Mixtral's block in training makes of ones: 0.9883 0.9940 1.0000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

SIZE = 1_000_000


def three(numbers):
    exact = numbers.double()
    return exact.min().item(), exact.mean().item(), exact.max().item()


seen = {}
for jitter in (0.1, 0.01, 0.001):
    for dtype in (torch.bfloat16, torch.float16):
        bounds = 1 - jitter, 1 + jitter
        torch.manual_seed(0)
        drawn = three(torch.empty(SIZE, dtype=dtype).uniform_(*bounds))
        cast = three(torch.empty(SIZE).uniform_(*bounds).to(dtype))
        seen[jitter, dtype] = drawn, cast
        print("{}, {}: {:.4f} {:.4f} {:.4f}; cast {:.4f} {:.4f} {:.4f}".format(str(dtype)[6:], jitter, *drawn, *cast))

config = MixtralConfig(hidden_size=16, intermediate_size=16, num_local_experts=2, router_jitter_noise=0.01)
torch.manual_seed(0)
block = MixtralSparseMoeBlock(config).bfloat16().train()
hidden = torch.ones(64, 64, 16, dtype=torch.bfloat16)
with torch.no_grad():
    block(hidden)
mixtral = three(hidden)
print("what a Mixtral's block in training makes of ones: {:.4f} {:.4f} {:.4f}".format(*mixtral))

small, one, none = (seen[jitter, torch.bfloat16] for jitter in (0.1, 0.01, 0.001))
same = one[0][2] == 1 and 0.993 < one[0][1] < 0.995 and abs(one[1][1] - 1) < 2e-4 and none[0] == (1, 1, 1)
same &= all(abs(cast[1] - 1) < 3e-4 for _, cast in seen.values()) and mixtral[2] == 1 and mixtral[1] < 0.995
raise SystemExit(0 if same else "changed")
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/program.py" 2> /dev/null
