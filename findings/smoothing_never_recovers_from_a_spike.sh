#!/usr/bin/env bash
# scipy 1.17.1, bottleneck 1.6.0: behind one loss of 1e20 a running mean is 0 to its end, behind an infinite one NaN.
#
# A running mean over five losses forgets a loss after five steps. So one may expect a curve to be what it was, once a
# spike has passed, and the smoothed curve to show whether a training has recovered. scipy.ndimage.uniform_filter1d and
# bottleneck's move_mean keep one sum: they add the loss that comes and take off the one that goes. A sum with 1e20 in
# it has lost the losses of 3, and without it again it is 0. With FP32 losses 1e10 is enough for bottleneck. An infinite
# loss leaves infinity less infinity, which is NaN, to the end of the curve, as if the training had never come back. A
# NaN does so in SciPy alone. pandas, polars, xarray and np.convolve are right.
#
# Seen with scipy 1.17.1, bottleneck 1.6.0, pandas 3.1.1, numpy 2.4.6 and Python 3.11, 2026-11-30. 1,000 losses of 3,
# one of them another; the running mean of five at the last step, by SciPy, bottleneck, pandas and NumPy:
#
#   nothing else: scipy 3, bottleneck 3, pandas 3, convolve 3
#   one of 1e+20: scipy 0, bottleneck 0, pandas 3, convolve 3
#   one of 1e+10 in FP32: scipy 3, bottleneck 0, pandas 3, convolve 3
#   one of inf: scipy nan, bottleneck nan, pandas 3, convolve 3
#   one of nan: scipy nan, bottleneck 3, pandas 3, convolve 3
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet scipy==1.17.1 bottleneck==1.6.0 pandas==3.1.1 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import math

import bottleneck
import numpy as np
import pandas as pd
from scipy.ndimage import uniform_filter1d

MEANS = {
    "scipy": lambda losses: uniform_filter1d(losses, 5)[-1],
    "bottleneck": lambda losses: bottleneck.move_mean(losses, 5)[-1],
    "pandas": lambda losses: pd.Series(losses).rolling(5).mean().iloc[-1],
    "convolve": lambda losses: np.convolve(losses, np.full(5, 0.2), "valid")[-1],
}


def last_means(name, other, dtype=np.float64):
    losses = np.full(1000, 3, dtype)
    losses[100] = other
    found = {library: float(mean(losses)) for library, mean in MEANS.items()}
    print(f"{name}: " + ", ".join(f"{library} {value:.3g}" for library, value in found.items()), flush=True)
    assert abs(found["pandas"] - 3) < 1e-6 and abs(found["convolve"] - 3) < 1e-6
    return found["scipy"], found["bottleneck"]


quiet = last_means("nothing else", 3)
spike = last_means("one of 1e+20", 1e20)
fp32 = last_means("one of 1e+10 in FP32", 1e10, np.float32)
infinite, nan = last_means("one of inf", math.inf), last_means("one of nan", math.nan)
same = [abs(x - 3) < 1e-6 for x in (*quiet, fp32[0], nan[1])] == [True] * 4 and spike == (0, 0) and fp32[1] == 0
raise SystemExit(0 if same and all(map(math.isnan, (*infinite, nan[0]))) else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
