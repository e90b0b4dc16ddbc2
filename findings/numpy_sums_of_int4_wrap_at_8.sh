#!/usr/bin/env bash
# ml_dtypes 0.6.0 with numpy 2.4.6: the sum of 100 int4 weights of 1 is 4, their mean 0, and a product of rows int8.
#
# NumPy adds int8 up in 64 bits, so one may expect the same of int4, the dtype of weights that JAX and ml_dtypes
# quantise. A product with the inputs asks for the sum of each row of weights, times the zero point. NumPy knows int4
# from ml_dtypes only: its sum stays int4 and wraps at 8, so that each such sum lies between -8 and 7, and a mean is
# such a sum over the count. The matrix product gives int8, which wraps at 128. Nothing warns, and all numbers look
# like weights. sum(dtype=np.int32) is right.
#
# Seen with ml_dtypes 0.6.0, numpy 2.4.6 and Python 3.11, 2026-11-30. Weights of 1: their sum, mean, and the product
# with a vector of ones:
#
#   int4, 5 weights: sum 5, mean 1, product 5 (int8); sum in int32 5
#   int4, 100 weights: sum 4, mean 0, product 100 (int8); sum in int32 100
#   int4, 200 weights: sum -8, mean 0, product -56 (int8); sum in int32 200
#   uint4, 100 weights: sum 4, mean 0, product 100 (int8); sum in int32 100
#   int8, 100 weights: sum 100, mean 1, product 100 (int8); sum in int32 100
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


def sums(count, dtype):
    weights = np.ones((2, count), dtype)
    product = weights @ np.ones(count, dtype)
    found = int(weights[0].sum()), float(weights[0].mean()), int(product[0]), int(weights[0].sum(dtype=np.int32))
    told = "{}, {} weights: sum {}, mean {:g}, product {} ({}); sum in int32 {}"
    print(told.format(np.dtype(dtype).name, count, *found[:3], product.dtype.name, found[3]))
    return found


few, some, many = (sums(count, ml_dtypes.int4) for count in (5, 100, 200))
unsigned = sums(100, ml_dtypes.uint4)
eight = sums(100, np.int8)
right = few == (5, 1, 5, 5) and eight[:2] == (100, 1) and some[3] == 100 and many[3] == 200
raise SystemExit(0 if right and some[:2] == unsigned[:2] == (4, 0) and many[0] == -8 and many[2] == -56 else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
