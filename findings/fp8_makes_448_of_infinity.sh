#!/usr/bin/env bash
# PyTorch 2.13.0: a cast to float8_e4m3fn makes 448 of infinity, which other FP8 formats do not.
#
# float8_e4m3fn has a NaN and no infinity. So one may expect NaN for what lies beyond its largest number, 448, as
# PyTorch 2.11 had it, and as ml_dtypes, and so JAX, have it; or at least for infinity, as what saturates a number need
# not make a number of what is none. In 2.13 all of it is 448, so that activations that have overflowed are finite
# again behind the cast, and a check for infinity or NaN there, or in a checkpoint of FP8, passes. The two FP8 formats
# beside it, float8_e4m3fnuz and float8_e5m2, still tell: they make NaN or infinity. NaN stays NaN in all. Check before
# the cast.
#
# Seen with torch 2.13.0, ml_dtypes 0.6.0, numpy 2.4.6 and Python 3.11 on a CPU, 2026-11-30; with torch 2.11.0 the first
# line is that of ml_dtypes. Of the numbers 192, 1,000, 1e6, infinity and NaN:
#
#   torch float8_e4m3fn: 192 448 448 448 nan
#   torch float8_e4m3fnuz: 192 nan nan nan nan
#   torch float8_e5m2: 192 1024 inf inf nan
#   ml_dtypes float8_e4m3fn: 192 nan nan nan nan
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 ml_dtypes==0.6.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import math

import ml_dtypes
import numpy as np
import torch

NUMBERS = [192.0, 1000.0, 1e6, math.inf, math.nan]


def said(what, values):
    words = " ".join(f"{value:.0f}" for value in values)
    print(f"{what}: {words}")
    return words


seen = [
    said(f"torch {name}", torch.tensor(NUMBERS).to(getattr(torch, name)).float().tolist())
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
]
seen.append(said("ml_dtypes float8_e4m3fn", np.array(NUMBERS).astype(ml_dtypes.float8_e4m3fn).astype(float)))
expected = ["192 448 448 448 nan", "192 nan nan nan nan", "192 1024 inf inf nan", "192 nan nan nan nan"]
raise SystemExit(0 if seen == expected else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
