#!/usr/bin/env bash
# pandas 3.1.1 with Bottleneck 1.6.0: once it is installed, std() of FP32 losses is three to nine times too large.
#
# pandas recommends Bottleneck, which is to make reductions faster, and uses it wherever it is installed, also as a
# dependency of something else. So one may expect the same numbers. For var() and std() of a column in FP32 pandas hands
# over to it, and it adds the numbers up one by one in FP32: from some millions of rows on, as per-token losses have
# them, the sum is off, and so is the mean that it takes off each loss. The losses of a model at its beginning, near
# 10.8 and alike, seem to spread; a column of one constant has a standard deviation; z-scores and thresholds by it move.
# The mean, sem() and all of FP64 are as without, so that the error stands alone. Nothing warns.
# pandas.set_option("compute.use_bottleneck", False) mends it.
#
# Seen with pandas 3.1.1, Bottleneck 1.6.0, numpy 2.4.6 and Python 3.11, 2026-11-30. Losses in FP32, normal around 10.8
# with a standard deviation of 0.1: what std() says without and with Bottleneck, and with it in FP64; then a constant:
#
#   100,000 rows: without 0.100, with 0.100, FP64 0.100
#   3,000,000 rows: without 0.100, with 0.327, FP64 0.100
#   10,000,000 rows: without 0.100, with 0.898, FP64 0.100
#   3,000,000 rows of 10.8: without 0.000, with 0.322, FP64 0.000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pandas==3.1.1 Bottleneck==1.6.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import numpy as np
import pandas as pd

numbers = np.random.default_rng(0)


def deviation(losses, bottleneck):
    with pd.option_context("compute.use_bottleneck", bottleneck):
        return float(losses.std())


def compared(what, losses):
    found = deviation(losses, False), deviation(losses, True), deviation(losses.astype("float64"), True)
    print("{}: without {:.3f}, with {:.3f}, FP64 {:.3f}".format(what, *found))
    return found


seen = [
    compared(f"{rows:,} rows", pd.Series(numbers.normal(10.8, 0.1, rows).astype(np.float32)))
    for rows in (100_000, 3_000_000, 10_000_000)
]
constant = compared("3,000,000 rows of 10.8", pd.Series(np.full(3_000_000, 10.8, np.float32)))
default = pd.get_option("compute.use_bottleneck")
right = all(abs(value - 0.1) < 1e-3 for without, _, fp64 in seen for value in (without, fp64)) and constant[0] < 1e-3
raise SystemExit(0 if default and right and seen[2][1] > 0.3 and constant[1] > 0.01 else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
