#!/usr/bin/env bash
# pandas 3.1.1: a rolling, expanding or exponential mean of losses passes over an infinite one, and so does their max.
#
# The mean of a window with an infinite loss is infinite, as Series.mean says, and as NumPy and polars have it. So one
# may expect a smoothed loss to be infinite where a training failed. rolling(), expanding() and ewm() take infinity as
# missing: the mean of the others comes out, and the largest loss of the window is finite. With min_periods=1, or where
# the window has enough others, the smoothed curve and its maximum show nothing of the failure. groupby, resample, max
# and cummax keep infinity. Look for it in the losses, before smoothing.
#
# Seen with pandas 3.1.1, polars 2.1.0, numpy 2.4.6 and Python 3.11, 2026-11-30. The losses are 3 2 inf 2 1:
#
#   mean, max: inf inf
#   cummax: 3 3 inf inf inf
#   rolling(3, min_periods=1).mean(): 3 2.5 2.5 2 1.5
#   rolling(3, min_periods=1).max(): 3 3 3 2 2
#   expanding().max(): 3 3 3 3 3
#   ewm(alpha=0.5).mean(): 3 2.333 2.333 2.091 1.444
#   polars rolling_mean(3, min_samples=1): 3 2.5 inf inf inf
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pandas==3.1.1 polars==2.1.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import math

import pandas
import polars

losses = [3.0, 2.0, math.inf, 2.0, 1.0]
series = pandas.Series(losses)


def said(what, values):
    print(f"{what}: " + " ".join(f"{value:.4g}" for value in values))
    return list(values)


rolling = series.rolling(3, min_periods=1)
kept = [
    said("mean, max", [series.mean(), series.max()]),
    said("cummax", series.cummax()),
]
passed_over = [
    said("rolling(3, min_periods=1).mean()", rolling.mean()),
    said("rolling(3, min_periods=1).max()", rolling.max()),
    said("expanding().max()", series.expanding().max()),
    said("ewm(alpha=0.5).mean()", series.ewm(alpha=0.5).mean()),
]
kept.append(said("polars rolling_mean(3, min_samples=1)", polars.Series(losses).rolling_mean(3, min_samples=1)))
finite = all(math.isfinite(value) for row in passed_over for value in row)
raise SystemExit(0 if finite and all(math.isinf(row[-1]) for row in kept) else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
