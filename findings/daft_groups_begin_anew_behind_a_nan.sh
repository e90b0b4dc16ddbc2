#!/usr/bin/env bash
# daft 0.7.26: the largest and smallest loss of a group are those of the rows behind its last NaN.
#
# max, min and mean of a whole column know NaN, and add FP32 up in FP64. So one may expect the same by groupby, where one
# asks for the worst loss, or the mean, of each run. There a NaN is the largest and the smallest until the next row, whose
# number replaces it, and all that came before: of 3, NaN, 1 the largest is 1. The order of the rows decides. Sums by
# group are kept in FP32 besides: 5.6 million losses of 3 have the last right one, from 2^24 on each counts as 4, and from
# 2^26 on as 0. The mean is the quotient of that sum.
#
# Seen with daft 0.7.26, numpy 2.4.6, pyarrow 25.0.1 and Python 3.11, 2026-11-30. Largest and smallest of a group, and of
# the same rows as a column; and means of FP32 losses of 3:
#
#   NaN, 1, 3: group 3 and 1; column NaN and 1
#   3, NaN, 1: group 1 and 1; column NaN and 1
#   3, 1, NaN: group NaN and NaN; column NaN and 1
#   10,000,000 losses: group 3.441, column 3.000
#   40,000,000 losses: group 1.678, column 3.000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet daft==0.7.26 numpy==2.4.6 pyarrow==25.0.1
cat > "$folder/program.py" <<'PY'
import math

import daft
import numpy as np
import pyarrow as pa
from daft import col


def both(losses, *aggregates):
    """The aggregates of the losses as one group, and as a column."""
    frame = daft.from_arrow(pa.table({"run": pa.array(np.zeros(len(losses), np.int8)), "loss": pa.array(losses)}))
    asked = [getattr(col("loss"), name)().alias(name) for name in aggregates]
    group, column = frame.groupby("run").agg(*asked).to_pydict(), frame.agg(*asked).to_pydict()
    return [[answer[name][0] for name in aggregates] for answer in (group, column)]


def words(values):
    return " and ".join("NaN" if math.isnan(value) else f"{value:g}" for value in values)


seen = []
for losses in ((math.nan, 1, 3), (3, math.nan, 1), (3, 1, math.nan)):
    group, column = both(np.array(losses, np.float32), "max", "min")
    print(f"{words(losses).replace(' and', ',')}: group {words(group)}; column {words(column)}")
    seen.append(f"{words(group)}; {words(column)}")
means = []
for number in (10_000_000, 40_000_000):
    (group,), (column,) = both(np.full(number, 3, np.float32), "mean")
    print(f"{number:,} losses: group {group:.3f}, column {column:.3f}")
    means.append((abs(group - 3) > 0.1, column == 3))
same = seen == ["3 and 1; NaN and 1", "1 and 1; NaN and 1", "NaN and NaN; NaN and 1"]
raise SystemExit(0 if same and means == [(True, True)] * 2 else "changed")
PY
DAFT_PROGRESS_BAR=0 "$folder/venv/bin/python" "$folder/program.py" 2> /dev/null
