#!/usr/bin/env bash
# PyTorch 2.13.0: on a CPU the L1 norm of 200 million FP32 weights is a third of the right one, the L2 norm 3 % too small.
#
# torch.sum adds up in a tree and errs by 1e-7 of any number of FP32 weights. So one may expect their norm to be right
# within that. torch.linalg.vector_norm, and so norm() and clip_grad_norm_, adds number to number in as many running
# sums as its vectors have entries. Where such a sum is 2^24 times a number, it stands still. The embedding of a model
# with 128,000 tokens and 4,096 features has 500 million weights: an L1 penalty on it does not grow, and gradients on a
# CPU (an offloaded optimizer) are clipped too late. How many numbers it takes depends on the machine's vectors.
# Nothing warns; x.abs().sum() and x.square().sum().sqrt() are right.
#
# Seen with torch 2.13.0 and Python 3.11 on an AMD EPYC, 2026-11-30. ATEN_CPU_CAPABILITY asks for AVX2, of 8 numbers.
# Normal FP32 numbers of standard deviation 0.1, seed 0: norms over those in FP64, and that of clip_grad_norm_:
#
#   1 million: L1 1.000, L2 1.000, clip_grad_norm_ 1.000; by torch.sum 1.000, 1.000
#   50 million: L1 0.825, L2 0.997, clip_grad_norm_ 0.997; by torch.sum 1.000, 1.000
#   200 million: L1 0.315, L2 0.974, clip_grad_norm_ 0.974; by torch.sum 1.000, 1.000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from torch.linalg import vector_norm

torch.set_num_threads(1)


def norms(count):
    torch.manual_seed(0)
    x = torch.randn(count) * 0.1
    parts = [part.double() for part in x.split(10_000_000)]
    one, two = sum(part.abs().sum() for part in parts), sum(part.square().sum() for part in parts).sqrt()
    weight = torch.nn.Parameter(torch.zeros(1).expand(count))
    weight.grad = x
    clipped = torch.nn.utils.clip_grad_norm_([weight], torch.inf)
    by_sums = x.abs().sum() / one, x.square().sum().sqrt() / two
    found = [y.item() for y in (vector_norm(x, 1) / one, vector_norm(x) / two, clipped / two, *by_sums)]
    told = "{} million: L1 {:.3f}, L2 {:.3f}, clip_grad_norm_ {:.3f}; by torch.sum {:.3f}, {:.3f}"
    print(told.format(count // 1_000_000, *found), flush=True)
    return found


few, more, many = (norms(count * 1_000_000) for count in (1, 50, 200))
right = all(abs(y - 1) < 1e-3 for y in (*few, *more[3:], *many[3:]))
raise SystemExit(0 if right and many[0] < 0.5 and many[1] < 0.99 and many[2] < 0.99 else "changed")
PY
ATEN_CPU_CAPABILITY=avx2 "$folder/venv/bin/python" "$folder/program.py"
