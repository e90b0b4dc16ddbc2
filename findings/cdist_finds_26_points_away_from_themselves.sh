#!/usr/bin/env bash
# PyTorch 2.13.0: from 26 rows on torch.cdist of FP32 vectors errs, and a vector is at a distance from itself.
#
# The distance of two vectors depends on nothing but them. So one may expect that of 25 embeddings to stay what it was
# if a 26th comes, and that of a vector to itself to be 0. Up to 25 rows cdist subtracts; beyond, it takes |x|² + |y|² -
# 2xy, which leaves nothing of a distance below some 0.05 % of the norm. A test on a few rows passes, and the codebook,
# the nearest neighbours or the contrastive loss of the real batch go by rounding errors. F.pairwise_distance is right,
# and so is compute_mode="donot_use_mm_for_euclid_dist".
#
# Seen with PyTorch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. FP32 vectors of 16 numbers around a value, spread by
# 0.01: their largest true distance, and the largest error and distance of a vector to itself that cdist has:
#
#   25 rows around 100: largest distance 0.0917, error 9.3e-09, to itself 0
#   26 rows around 100: largest distance 0.0917, error 2.5e-01, to itself 0.25
#   26 rows around 10: largest distance 0.0917, error 1.6e-02, to itself 0.0156
#   26 rows around 0: largest distance 0.0917, error 2.2e-05, to itself 2.16e-05
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
spread = 0.01 * torch.randn(26, 16)


def errors(rows, around):
    x = spread[:rows] + around
    exact = (x.double()[:, None] - x.double()).norm(dim=-1)
    found = torch.cdist(x, x).double()
    result = exact.max().item(), (found - exact).abs().max().item(), found.diagonal().max().item()
    text = "{} rows around {}: largest distance {:.4f}, error {:.1e}, to itself {:.3g}"
    print(text.format(rows, around, *result))
    return result


few, many = errors(25, 100), errors(26, 100)
errors(26, 10)
errors(26, 0)
raise SystemExit(0 if few[1] < 1e-6 and few[2] == 0 and many[1] > many[0] and many[2] > many[0] else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
