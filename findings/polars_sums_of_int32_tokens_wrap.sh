#!/usr/bin/env bash
# polars 2.1.0: the sum of three billion tokens in an Int32 column is negative, where that of an Int16 column is right.
#
# polars adds Int8 and Int16 up in 64 bits, as NumPy, pandas and PyTorch add all integers. So one may expect of Int32,
# in which counts of tokens and bytes are often kept, the right sum, too, or an error. Its sum stays Int32 and wraps at
# 2^31 without a word: a mixture of data whose shares are taken from such sums is another one. group_by and cum_sum
# wrap, too. mean is right. dot wraps also where sum does not: of Int8 it stays Int8. Cast to Int64 first.
#
# Seen with polars 2.1.0, numpy 2.4.6 and Python 3.11, 2026-11-30. 30,000 documents of 100,000 tokens, and for Int16 of
# 10,000: the sum, that in a group, the last cumulative sum and the mean; then a dot product of three times 100:
#
#   Int16: sum 300000000, in a group 300000000, cumulative 300000000, mean 10000; numpy 300000000
#   Int32: sum -1294967296, in a group -1294967296, cumulative -1294967296, mean 100000; numpy 3000000000
#   Int64: sum 3000000000, in a group 3000000000, cumulative 3000000000, mean 100000; numpy 3000000000
#   Int8: sum 300, dot product 48 for 30000
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


def sums(length, dtype):
    tokens = np.full(30_000, length, dtype)
    frame = pl.DataFrame({"source": np.zeros(30_000, int), "tokens": tokens})
    column = frame["tokens"]
    group = frame.group_by("source").agg(pl.col("tokens").sum())["tokens"][0]
    found = column.sum(), group, column.cum_sum()[-1], column.mean()
    told = "{}: sum {}, in a group {}, cumulative {}, mean {:.0f}; numpy {}"
    print(told.format(column.dtype, *found, tokens.sum()))
    return found


small, usual, large = (sums(*of) for of in ((10_000, np.int16), (100_000, np.int32), (100_000, np.int64)))
bytes_ = pl.Series([100, 100, 100], dtype=pl.Int8)
dot = bytes_.dot(bytes_)
print(f"Int8: sum {bytes_.sum()}, dot product {dot} for 30000")
right = small[0] == 300_000_000 and large[:3] == (3_000_000_000,) * 3 and usual[3] == 100_000
raise SystemExit(0 if right and usual[0] == usual[1] == 3_000_000_000 - 2**32 and dot == 48 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
