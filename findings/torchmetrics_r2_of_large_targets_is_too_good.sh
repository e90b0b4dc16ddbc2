#!/usr/bin/env bash
# torchmetrics 1.9.0, torcheval 0.0.7: R² of targets around 10,000 is 1.04 where it is 0.75, and 0.9997 around 100,000.
#
# A constant that is added to targets and predictions changes neither residuals nor variance, so one may expect the
# same R² within the seven digits of FP32. Both libraries keep the sum of the squares of the targets in FP32, and take
# from it the square of the sum. For targets whose mean is 10,000 times their standard deviation the difference has no
# right digit: it is too large here, so that bad predictions look good. Temperatures, years, prices and sizes are such
# targets. The explained variance errs likewise, the correlation of Pearson is right. Nothing warns. Subtract a
# constant first.
#
# Seen with torchmetrics 1.9.0, torcheval 0.0.7, torch 2.13.0 and Python 3.11, 2026-11-30. 10,000 targets of standard
# deviation 1 around a mean, seed 0, and predictions with errors of 0.5: R² of both, the explained variance and the
# correlation of torchmetrics, and R² in FP64:
#
#   mean 0: torchmetrics 0.7472, torcheval 0.7472, explained variance 0.7473, correlation 0.8952; FP64 0.7472
#   mean 1000: torchmetrics 0.7522, torcheval 0.7522, explained variance 0.7463, correlation 0.8952; FP64 0.7472
#   mean 10000: torchmetrics 1.0387, torcheval 1.0387, explained variance 0.0000, correlation 0.8952; FP64 0.7472
#   mean 100000: torchmetrics 0.9997, torcheval 0.9997, explained variance 0.9998, correlation 0.8952; FP64 0.7472
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torchmetrics==1.9.0 torcheval==0.0.7 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
import torchmetrics.functional as metrics
from torcheval.metrics.functional import r2_score


def scores(mean):
    torch.manual_seed(0)
    targets = torch.randn(10_000) + mean
    predictions = targets + 0.5 * torch.randn(10_000)
    exact = 1 - (targets - predictions).double().square().mean() / targets.double().var(correction=0)
    found = [
        metrics.r2_score(predictions, targets),
        r2_score(predictions, targets),
        metrics.explained_variance(predictions, targets),
        metrics.pearson_corrcoef(predictions, targets),
        exact,
    ]
    found = [y.item() for y in found]
    told = "mean {}: torchmetrics {:.4f}, torcheval {:.4f}, explained variance {:.4f}, correlation {:.4f}; FP64 {:.4f}"
    print(told.format(mean, *found))
    return found


none, thousand, large, larger = (scores(mean) for mean in (0, 1000, 10_000, 100_000))
right = all(abs(found[4] - 0.75) < 0.02 and abs(found[3] - 0.894) < 0.01 for found in (none, thousand, large, larger))
right = right and abs(none[0] - none[4]) < 1e-4 and abs(none[1] - none[4]) < 1e-4
wrong = all(abs(found[i] - found[4]) > 0.1 for found in (large, larger) for i in (0, 1, 2))
raise SystemExit(0 if right and wrong else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
