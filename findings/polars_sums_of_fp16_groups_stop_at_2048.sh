#!/usr/bin/env bash
# polars 2.1.0: the sum of FP16 numbers in a group stops growing at 2,048 times one of them, where mean is right.
#
# mean of an FP16 column is right for any number of rows, in a group and without. So one may expect of sum the rounded
# sum: 10,000 ones are 10,000, which FP16 can hold. group_by adds number to number in FP16: from 2,048 on 1 is less
# than half a step, and the sum stands still. sum() of the whole column is right. A number of tokens, a loss or a
# weight that is summed by source is the same for all sources that are large. Nothing warns.
#
# Seen with polars 2.1.0, numpy 2.4.6 and Python 3.11, 2026-11-30. Ones in a group: their sum and mean in the group,
# and the sum of the column:
#
#   1000 ones: group sum 1000, mean 1; column 1000
#   10000 ones: group sum 2048, mean 1; column 10000
#   60000 ones: group sum 2048, mean 1; column 60000
#   10000 ones in FP32: group sum 10000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet polars==2.1.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import numpy as np
import polars as pl

SUM = pl.col("tokens").sum()


def frame(count, dtype=np.float16):
    return pl.DataFrame({"source": np.zeros(count, int), "tokens": np.ones(count, dtype)})


seen = []
for count in (1000, 10_000, 60_000):
    rows = frame(count)
    summed, mean = rows.group_by("source").agg(SUM, pl.col("tokens").mean().alias("mean")).row(0)[1:]
    seen.append((summed, mean, rows["tokens"].sum()))
    print("{} ones: group sum {:.0f}, mean {:.0f}; column {:.0f}".format(count, *seen[-1]))
single = frame(10_000, np.float32).group_by("source").agg(SUM)["tokens"][0]
print(f"10000 ones in FP32: group sum {single:.0f}")
same = seen == [(1000, 1, 1000), (2048, 1, 10_000), (2048, 1, 60_000)] and single == 10_000
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
