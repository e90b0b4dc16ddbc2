#!/usr/bin/env bash
# pychop 0.6.2: in FP16, numbers from 65,536 to 131,071 become 0, and 65,520 becomes 65,536, which FP16 does not have.
#
# Chop(exp_bits=5, sig_bits=10) rounds to FP16, to show what a format does to an algorithm. So one may expect infinity
# from 65,520 on, as NumPy has it, and the largest number below. A number that is rounded up to the next power of two
# stays finite. In the binade above it all are 0, with no sign. Only from 131,072 on they are infinite. So a loss or
# an attention score that overflows looks like one that vanishes, and goes on. All formats err, BF16 in FP64 arithmetic
# above 3.4e38, and so do the backends of NumPy, JAX and PyTorch. Nothing warns. Set what exceeds the largest number to
# infinity beforehand.
#
# Seen with pychop 0.6.2, ml_dtypes 0.6.0, numpy 2.4.6 and Python 3.11, 2026-11-30. Numbers, and what becomes of them
# by pychop and by ml_dtypes:
#
#   FP16: 65504: 65504, 65504; 65520: 65536, inf; 72089.6: 0, inf; -124518: 0, -inf; 131072: inf, inf
#   E5M2: 57344: 57344, 57344; 61440: 65536, inf; 72089.6: 0, inf; -124518: 0, -inf; 131072: inf, inf
#   E4M3: 240: 240, 240; 248: 256, inf; 281.6: 0, inf; -486.4: 0, -inf; 512: inf, inf
#   BF16, in units of 2^127: 1.99219: 1.99219, 1.99219; 1.99609: 2, inf; 2.2: 0, inf; -3.8: 0, -inf; 4: inf, inf
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pychop==0.6.2 ml_dtypes==0.6.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import ml_dtypes
import numpy as np
import pychop

pychop.backend("numpy")
FORMATS = {
    "FP16": (5, 10, np.float16),
    "E5M2": (5, 2, ml_dtypes.float8_e5m2),
    "E4M3": (4, 3, ml_dtypes.float8_e4m3),
    "BF16": (8, 7, ml_dtypes.bfloat16),
}
same = True
for name, (exponent, mantissa, dtype) in FORMATS.items():
    largest, power = float(ml_dtypes.finfo(dtype).max), 2.0 ** 2 ** (exponent - 1)
    numbers = np.array([largest, (largest + power) / 2, 1.1 * power, -1.9 * power, 2 * power])
    found = np.asarray(pychop.Chop(exp_bits=exponent, sig_bits=mantissa)(numbers))
    with np.errstate(over="ignore"):
        right = numbers.astype(dtype).astype(float)
    unit = 2.0**127 if name == "BF16" else 1
    told = ["{:.6g}: {:.6g}, {:.6g}".format(*row) for row in np.stack([numbers, found, right], 1) / unit]
    print(name + (", in units of 2^127: " if unit > 1 else ": ") + "; ".join(told))
    same = same and found.tolist() == [largest, power, 0, 0, np.inf]
    same = same and right.tolist() == [largest, np.inf, np.inf, -np.inf, np.inf]
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
