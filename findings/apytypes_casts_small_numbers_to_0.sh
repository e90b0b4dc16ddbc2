#!/usr/bin/env bash
# apytypes 0.5.1: a cast makes 0 of numbers just below the smallest normal one, where from_float rounds them up.
#
# APyFloat tries out formats of few bits. So one may expect cast() to round to the nearest number of the format, as
# from_float and ml_dtypes do. A number nearer to the smallest normal one than to the largest subnormal becomes the
# former. cast() makes 0 of it, with its sign, as if the fraction's carry were lost. In E4M3 that is an eighth of the
# numbers of a binade, in E5M2 a quarter: a weight of 0.015 is gone, where one of 0.002 remains. Scalars and arrays err
# alike. Nothing warns, and a study of a format finds it to lose more than it does. Issue 671 showed the same of
# from_float with fixed-point numbers, and is closed. Use from_float(float(number), …), or from_array.
#
# Seen with apytypes 0.5.1, ml_dtypes 0.6.0, numpy 2.4.6 and Python 3.11, 2026-11-30. 65,536 FP32 numbers that fill the
# binade below the smallest normal number: how many differ from ml_dtypes, by cast() and by from_float. Then the first
# one that does, what cast() makes of it, and ml_dtypes:
#
#   BF16: cast 512, from_float 0; 1.1709e-38: 0, 1.17549e-38
#   FP16: cast 64, from_float 0; 6.10054e-05: 0, 6.10352e-05
#   E5M2: cast 16384, from_float 0; 5.34058e-05: 0, 6.10352e-05
#   E4M3: cast 8192, from_float 0; 0.0146484: 0, 0.015625
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet apytypes==0.5.1 ml_dtypes==0.6.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import ml_dtypes
import numpy as np
from apytypes import APyFloat, APyFloatArray

COUNT = 2**16
FORMATS = {
    "BF16": (8, 7, ml_dtypes.bfloat16),
    "FP16": (5, 10, np.float16),
    "E5M2": (5, 2, ml_dtypes.float8_e5m2),
    "E4M3": (4, 3, ml_dtypes.float8_e4m3),
}
same = True
for name, (exponent, mantissa, dtype) in FORMATS.items():
    smallest = float(ml_dtypes.finfo(dtype).smallest_normal)
    numbers = smallest * (0.5 + np.arange(COUNT) / (2 * COUNT))
    right = numbers.astype(dtype).astype(float)
    cast = APyFloatArray.from_float(numbers, 8, 23).cast(exponent, mantissa).to_numpy()
    direct = APyFloatArray.from_float(numbers, exponent, mantissa).to_numpy()
    wrong = cast != right
    first = float(numbers[wrong.argmax()])
    scalar = float(APyFloat.from_float(first, 8, 23).cast(exponent, mantissa))
    print(f"{name}: cast {wrong.sum()}, from_float {(direct != right).sum()}; ", end="")
    print(f"{first:.6g}: {scalar:g}, {right[wrong.argmax()]:.6g}")
    upper = (right == smallest) & (numbers < smallest)
    same = same and (wrong == upper).all() and not cast[wrong].any() and scalar == 0 and (direct == right).all()
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
