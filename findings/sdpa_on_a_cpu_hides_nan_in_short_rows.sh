#!/usr/bin/env bash
# PyTorch 2.13.0: on a CPU, scaled_dot_product_attention returns 0 where all scores of a short row are NaN.
#
# Whoever looks for the first NaN in O may expect O to be NaN where k is, as the math backend has it. The flash backend,
# which a CPU takes by default, returns 0 in rows of fewer keys than its vectors have numbers: 8 of FP32 with AVX2, 16
# with AVX-512. So the loss stays finite for a step more, and how many keys it takes depends on the machine.
#
# Seen with torch 2.13.0 and Python 3.11 on an AMD EPYC, 2026-11-29. Here ATEN_CPU_CAPABILITY asks for AVX2:
#
#   flash, 7 keys: 7 rows of 7 are 0, 0 are NaN
#   flash, 8 keys: 0 rows of 8 are 0, 8 are NaN
#   math, 7 keys: 0 rows of 7 are 0, 7 are NaN
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def rows(name, backend, keys):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, keys, 8) for _ in range(3))
    k[..., 0] = torch.nan
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v)
    zero, nan = (int(x.all(-1).sum()) for x in (out == 0, out.isnan()))
    print(f"{name}, {keys} keys: {zero} rows of {keys} are 0, {nan} are NaN", flush=True)
    return zero, nan


found = [
    rows("flash", SDPBackend.FLASH_ATTENTION, 7),
    rows("flash", SDPBackend.FLASH_ATTENTION, 8),
    rows("math", SDPBackend.MATH, 7),
]
raise SystemExit(0 if found == [(7, 0), (0, 8), (0, 7)] else "changed")
PY
ATEN_CPU_CAPABILITY=avx2 "$folder/venv/bin/python" "$folder/program.py"
