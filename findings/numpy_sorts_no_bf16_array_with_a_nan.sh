#!/usr/bin/env bash
# ml_dtypes 0.6.0 with numpy 2.4.6: np.sort and argsort of a BF16 array that holds a NaN leave it unsorted.
#
# NumPy sorts NaN to the end, in FP16 as in FP64, so one may expect the numbers before it in order. Of a BF16 array, as
# np.asarray makes it of a JAX array, NumPy asks ml_dtypes whether one number is less than another. NaN is less than
# none, so that to the sort it equals all: what stands before and behind a NaN is not brought together. The largest
# losses of a batch, a threshold for sparsity and np.unique are then wrong, while all numbers look plausible. FP8 does
# the same. Nothing warns. Cast to FP32 first.
#
# Seen with ml_dtypes 0.6.0, numpy 2.4.6 and Python 3.11 on a CPU, 2026-11-30. 3, NaN, 1, 2 sorted; then 1,000 normal
# numbers, seed 0, of which 100 are NaN: how many of the 900 others stand at a wrong place, how many of the last 10 of
# them are among the 10 largest, and how many values np.unique finds beside NaN:
#
#   float16: [ 1.  2.  3. nan]; 0 of 900 misplaced, 10 of 10 largest, 855 values of 855
#   bfloat16: [ 3. nan  1.  2.]; 233 of 900 misplaced, 7 of 10 largest, 669 values of 610
#   float8_e5m2: [ 3. nan  1.  2.]; 316 of 900 misplaced, 2 of 10 largest, 1 values of 70
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ml_dtypes==0.6.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import math

import ml_dtypes
import numpy as np

generator = np.random.default_rng(0)
numbers = generator.normal(size=1000)
numbers[generator.choice(1000, 100, replace=False)] = math.nan


def without_nan(array):
    exact = array.astype(float)
    return exact[~np.isnan(exact)]


def ranked(dtype):
    few = np.sort(np.array([3, math.nan, 1, 2], dtype)).astype(float)
    cast = numbers.astype(dtype)
    found = without_nan(np.sort(cast))
    right = np.sort(without_nan(cast))
    wrong, largest = int((found != right).sum()), int((found[-10:] >= right[-10]).sum())
    values = len(without_nan(np.unique(cast))), len(set(right))
    told = "{}: {}; {} of 900 misplaced, {} of 10 largest, {} values of {}"
    print(told.format(dtype.__name__, few, wrong, largest, *values))
    return few.tolist()[:3] == [1, 2, 3], wrong, largest, values[0] - values[1]


half, brain, eight = (ranked(dtype) for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2))
wrong = all(not few and misplaced and largest < 10 and other for few, misplaced, largest, other in (brain, eight))
raise SystemExit(0 if wrong and half == (True, 0, 10, 0) else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
