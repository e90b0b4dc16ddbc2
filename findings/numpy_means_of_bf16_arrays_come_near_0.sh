#!/usr/bin/env bash
# ml_dtypes 0.6.0 with numpy 2.4.6: np.mean of 10,000 BF16 losses of 3 is 0.10, and their sum 1,024.
#
# NumPy adds FP16 up in FP32 for a mean, and JAX and PyTorch do so for BF16. So one may expect the mean of a BF16
# array, as np.asarray makes it of a JAX array, to be right within three digits. NumPy knows the dtype from ml_dtypes
# only: it adds number to number in BF16, so that the sum of threes stops at 1,024, where 1,024 + 3 rounds to 1,024.
# The mean falls the more numbers there are. FP8 stops at 64. var takes the distances to that wrong mean. Of 100
# numbers the error is 4 %. Nothing warns; dtype=np.float32 gives the right mean.
#
# Seen with ml_dtypes 0.6.0, numpy 2.4.6 and Python 3.11 on a CPU, 2026-11-30. Numbers of 3: their mean, sum and
# variance, and the mean with dtype=np.float32:
#
#   100 of bfloat16: mean 3.125, sum 312, variance 0.01562; in FP32 3
#   1000 of bfloat16: mean 1.023, sum 1.02e+03, variance 1.023; in FP32 3
#   10000 of bfloat16: mean 0.1025, sum 1.02e+03, variance 0.4102; in FP32 3
#   10000 of float8_e4m3fn: mean 0.005859, sum 64, variance 0.02539; in FP32 3
#   10000 of float16: mean 3, sum 3e+04, variance 0; in FP32 3
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ml_dtypes==0.6.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import ml_dtypes
import numpy as np


def mean(count, dtype):
    losses = np.full(count, 3, dtype)
    found = [float(reduce(losses)) for reduce in (np.mean, np.sum, np.var)] + [float(losses.mean(dtype=np.float32))]
    print("{} of {}: mean {:.4g}, sum {:.3g}, variance {:.4g}; in FP32 {:.4g}".format(count, dtype.__name__, *found))
    return found


def same(found, expected):
    return all(abs(a / b - 1) < 0.01 for a, b in zip(found, expected, strict=False)) and found[3] == 3


hundred, thousand, many = (mean(count, ml_dtypes.bfloat16) for count in (100, 1000, 10_000))
eight = mean(10_000, ml_dtypes.float8_e4m3fn)
half = mean(10_000, np.float16)
stuck = same(hundred, (3.125, 312)) and same(thousand, (1.023, 1024)) and same(many, (0.1025, 1024))
raise SystemExit(0 if stuck and same(eight, (0.00586, 64)) and half[0] == half[3] == 3 else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
