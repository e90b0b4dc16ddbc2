#!/usr/bin/env bash
# xarray 2026.9.0 and dask 2026.8.0: the mean of 100,000 ones in FP16 is infinite, where NumPy says 1.
#
# Losses, activations and scores kept in FP16 are averaged with numpy.mean, which adds FP16 up in FP32. xarray and dask
# have NumPy's interface and name no other rule. So one may expect its mean. Both add up in FP16, whose numbers end at
# 65,504: once the sum or the number of values exceeds it, the mean is infinite or NaN. In dask it is so though the sum
# of each chunk is smaller, since the chunks' sums and counts are added up in FP16, too. Give the mean dtype="float32",
# or cast before.
#
# Seen with xarray 2026.9.0, dask 2026.8.0, numpy 2.4.6 and Python 3.11, 2026-12-01. The means of numbers in FP16:
#
#   10,000 ones: numpy 1, xarray 1, dask 1
#   100,000 ones: numpy 1, xarray inf, dask nan
#   1,000 times 300: numpy 300, xarray inf, dask inf
#   100,000 ones, with dtype="float32": numpy 1, xarray 1, dask 1
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet xarray==2026.9.0 'dask[array]==2026.8.0' numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import math

import dask.array
import numpy as np
import xarray


def means(name, count, number, **options):
    numbers = np.full(count, number, np.float16)
    kinds = {"numpy": numbers, "xarray": xarray.DataArray(numbers), "dask": dask.array.from_array(numbers, chunks=100)}
    found = {kind: float(np.asarray(held.mean(**options))) for kind, held in kinds.items()}
    print(f"{name}: " + ", ".join(f"{kind} {mean:g}" for kind, mean in found.items()))
    return [mean == number if math.isfinite(mean) else None for mean in found.values()]


seen = [
    means("10,000 ones", 10_000, 1),
    means("100,000 ones", 100_000, 1),
    means("1,000 times 300", 1_000, 300),
    means('100,000 ones, with dtype="float32"', 100_000, 1, dtype="float32"),
]
right, broken = [True] * 3, [True, None, None]
raise SystemExit(0 if seen == [right, broken, broken, right] else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
