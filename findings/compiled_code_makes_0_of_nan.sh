#!/usr/bin/env bash
# PyTorch 2.13.0: torch.compile makes 0 of NaN * 0, and of a NaN that passes softshrink.
#
# 0 times NaN or infinity is NaN, so that whatever is broken reaches the loss and is seen. So one may expect it of
# compiled code, which is to give what eager code gives. A loss often has a term times 0, that all weights get a
# gradient: `loss + 0 * unused.sum()`. Compiled, a product with the integer 0 is 0, and its factor is not computed: a
# broken branch leaves a loss that is fine, where the eager run stops. The float 0.0 and a tensor of zeros give NaN. And
# F.softshrink, which passes NaN on, makes 0 of it when it is compiled: a weight that is thresholded so looks healthy.
# Nothing warns. A run that looks for its first NaN compiled may find it elsewhere than its eager replay.
#
# Seen with torch 2.13.0, g++ 12 and Python 3.11 on a CPU, 2026-11-30. What is made of 1, NaN and infinity:
#
#   x * 0: eager [0.0, nan, nan], compiled [0.0, 0.0, 0.0]
#   2 + 0 * x.sum(): eager nan, compiled 2.0
#   x * 0.0: eager [0.0, nan, nan], compiled [0.0, nan, nan]
#   x * zeros: eager [0.0, nan, nan], compiled [0.0, nan, nan]
#   softshrink(x): eager [0.5, nan, inf], compiled [0.5, 0.0, inf]
#   hardshrink(x): eager [1.0, nan, inf], compiled [1.0, nan, inf]
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy setuptools
cat > "$folder/program.py" <<'PY'
import math

import torch
import torch.nn.functional as F

BROKEN = torch.tensor([1.0, math.nan, math.inf])
FUNCTIONS = {
    "x * 0": lambda x: x * 0,
    "2 + 0 * x.sum()": lambda x: 2 + 0 * x.sum(),
    "x * 0.0": lambda x: x * 0.0,
    "x * zeros": lambda x: x * torch.zeros_like(x),
    "softshrink(x)": F.softshrink,
    "hardshrink(x)": F.hardshrink,
}

differ = []
for name, function in FUNCTIONS.items():
    for dtype in (torch.float32, torch.bfloat16):
        torch._dynamo.reset()
        x = BROKEN.to(dtype)
        eager, compiled = (f(x).float() for f in (function, torch.compile(function)))
        differ.append(not torch.equal(eager.isnan(), compiled.isnan()))
        if dtype == torch.float32:
            print(f"{name}: eager {eager.tolist()}, compiled {compiled.tolist()}")
        else:
            assert differ[-1] == differ[-2]
raise SystemExit(0 if differ[::2] == [True, True, False, False, True, False] else "changed")
PY
cd "$folder"
TORCHINDUCTOR_CACHE_DIR="$folder/cache" venv/bin/python -W ignore program.py 2> /dev/null
