#!/usr/bin/env bash
# numba 0.68.1: the mean or sum of FP32 losses in a njit function is the lower the more there are: 2.62 of 3.00 at 40 M.
#
# njit compiles NumPy's functions, and is to give what NumPy gives, up to rounding. NumPy adds up FP32 in pairs, and is
# right to six digits whatever the number. Numba's np.sum and np.mean add one number after another in FP32. Once the sum
# is 2**24 times a number, it does not move: losses per token of a validation, or squares of weights, are added rounded,
# and then not at all. The mean comes out as FP64 with 16 digits, of which the second is wrong. np.std takes that mean.
# Nothing warns, and a test on a thousand numbers passes. np.sum(x, axis=...), np.nanmean and x.astype(np.float64) err
# far less.
#
# Seen with numba 0.68.1, numpy 2.4.6 and Python 3.11, 2026-11-30. Losses of mean 3, exponentially distributed:
#
#   10,000 losses: numpy 2.9789, numba 2.9789
#   1,000,000 losses: numpy 2.9992, numba 2.9988
#   10,000,000 losses: numpy 2.9994, numba 2.9709
#   40,000,000 losses: numpy 3.0002, numba 2.6224
#   40,000,000 losses: std by numpy 3.000, by numba 3.024
#   40,000,000 losses in FP64: numba 3.0002
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numba==0.68.1 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import numba
import numpy as np


@numba.njit
def mean(x):
    return np.mean(x)


@numba.njit
def spread(x):
    return np.std(x)


def losses(count):
    return np.random.default_rng(0).exponential(3.0, count).astype(np.float32)


def told(count):
    x = losses(count)
    found = float(x.mean()), float(mean(x))
    print("{:,} losses: numpy {:.4f}, numba {:.4f}".format(count, *found), flush=True)
    return abs(found[1] / found[0] - 1)


errors = [told(count) for count in (10_000, 1_000_000, 10_000_000, 40_000_000)]
x = losses(40_000_000)
stds = float(x.std()), float(spread(x))
print("40,000,000 losses: std by numpy {:.3f}, by numba {:.3f}".format(*stds), flush=True)
fp64 = mean(x.astype(np.float64))
print(f"40,000,000 losses in FP64: numba {fp64:.4f}")
right = errors[0] < 1e-5 and abs(fp64 - 3) < 1e-3 and abs(stds[0] - 3) < 1e-3
raise SystemExit(0 if right and errors[2] > 0.005 and errors[3] > 0.1 and stds[1] > 3.02 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
