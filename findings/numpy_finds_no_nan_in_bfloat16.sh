#!/usr/bin/env bash
# numpy 2.4.6 with ml_dtypes 0.6.0: NumPy's functions for NaN do not see the NaN of a bfloat16 array.
#
# ml_dtypes gives NumPy the type bfloat16, in which JAX and others hand tensors over. isnan knows its NaN. So one may
# expect of nansum, nanmean and nan_to_num what they do with float16. They look for NaN only in NumPy's own types, and
# leave it in, without a word. sort and argsort leave the array unsorted around a NaN, which they put last in float16.
# And mean adds up in bfloat16: the mean of 1,000 ones is 0.26. Cast such an array to float32 first.
#
# Seen with numpy 2.4.6, ml_dtypes 0.6.0 and Python 3.11, 2026-11-29. The array is 3 NaN 1 2, and that of the mean
# 1,000 ones:
#
#   isnan: float16 0 1 0 0, bfloat16 0 1 0 0
#   nansum: float16 6, bfloat16 nan
#   nanmean: float16 2, bfloat16 nan
#   nan_to_num: float16 3 0 1 2, bfloat16 3 nan 1 2
#   sort: float16 1 2 3 nan, bfloat16 3 nan 1 2
#   mean: float16 1, bfloat16 0.255859
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6 ml_dtypes==0.6.0
cat > "$folder/program.py" <<'PY'
import warnings

import ml_dtypes
import numpy as np

warnings.simplefilter("ignore")
array, ones = np.array([3, np.nan, 1, 2], np.float32), np.ones(1000, np.float32)
expected = {
    "isnan": ("0 1 0 0", "0 1 0 0"), "nansum": ("6", "nan"), "nanmean": ("2", "nan"),
    "nan_to_num": ("3 0 1 2", "3 nan 1 2"), "sort": ("1 2 3 nan", "3 nan 1 2"), "mean": ("1", "0.255859"),
}
seen = {}
for name in expected:
    of = ones if name == "mean" else array
    found = [getattr(np, name)(of.astype(dtype)) for dtype in (np.float16, ml_dtypes.bfloat16)]
    seen[name] = tuple(" ".join(f"{x:g}" for x in np.ravel(np.float64(result))) for result in found)
    print(f"{name}: float16 {seen[name][0]}, bfloat16 {seen[name][1]}")
raise SystemExit(0 if seen == expected else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
