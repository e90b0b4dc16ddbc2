#!/usr/bin/env bash
# entmax 1.3: rows of entmax15 in BF16 sum to 0.85 to 1.24, where softmax and entmax_bisect keep to 1 within 0.5 %.
#
# entmax15 takes the place of softmax in attention, with weights of exact 0 for most keys. Each row is to sum to 1. So
# one may expect that of scores in BF16, up to the 0.4 % of such a number, as PyTorch's softmax has it, which computes
# in FP32. entmax15 finds its threshold from running sums over the sorted row, of the scores and of their squares, and
# subtracts one from the other: in BF16 both stop growing and the difference is noise. The threshold lands beside the
# right one, so that rows weigh up to a quarter too much or a sixth too little, each by another factor. Nothing warns,
# and a training goes on with attention whose output is scaled at random. sparsemax errs by up to 3 %. entmax_bisect
# of the same scores is right, and so is entmax15 of scores.float().
#
# Seen with entmax 1.3, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Eight rows of normal scores, in BF16 but
# for the last line: the least and the largest sum of a row; of softmax the largest:
#
#   1,024 scores of 0.1: entmax15 0.964 to 1.120, sparsemax 0.975 to 1.012, entmax_bisect 0.998 to 1.001, softmax 1.000
#   4,096 scores of 0.03: entmax15 0.892 to 1.036, sparsemax 0.987 to 1.011, entmax_bisect 0.998 to 1.003, softmax 1.000
#   32,768 scores of 0.1: entmax15 0.850 to 1.239, sparsemax 0.990 to 1.015, entmax_bisect 0.997 to 1.003, softmax 1.000
#   1,024 scores of 0.1, in FP32: entmax15 1.000 to 1.000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet entmax==1.3 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import entmax
import torch

torch.set_num_threads(1)
WAYS = {
    "entmax15": entmax.entmax15,
    "sparsemax": entmax.sparsemax,
    "entmax_bisect": lambda scores, dim: entmax.entmax_bisect(scores, 1.5, dim),
}


def sums(way, scores):
    rows = way(scores, dim=-1).double().sum(-1)
    return rows.min().item(), rows.max().item()


right = True
for keys, size in ((1024, 0.1), (4096, 0.03), (32768, 0.1)):
    torch.manual_seed(0)
    scores = (size * torch.randn(8, keys)).bfloat16()
    found = {name: sums(way, scores) for name, way in WAYS.items()}
    softmax = sums(torch.softmax, scores)
    told = ", ".join("{} {:.3f} to {:.3f}".format(name, *ends) for name, ends in found.items())
    print(f"{keys:,} scores of {size:g}: {told}, softmax {softmax[1]:.3f}")
    right &= found["entmax15"][1] - found["entmax15"][0] > 0.08
    right &= all(abs(end - 1) < 0.005 for end in (*found["entmax_bisect"], *softmax))
torch.manual_seed(0)
exact = sums(entmax.entmax15, 0.1 * torch.randn(8, 1024))
print("1,024 scores of 0.1, in FP32: entmax15 {:.3f} to {:.3f}".format(*exact))
raise SystemExit(0 if right and max(abs(end - 1) for end in exact) < 1e-4 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
