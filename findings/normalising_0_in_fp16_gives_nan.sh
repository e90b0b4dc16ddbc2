#!/usr/bin/env bash
# PyTorch 2.13.0: in FP16, F.normalize and cosine_similarity make NaN of a row of zeros, whatever their eps is for.
#
# Both divide by a norm, and have an eps so that a row of zeros, as of padding or of a dead unit, gives 0. So one may
# expect 0 in FP16, too. F.normalize's eps is 1e-12 and that of cosine_similarity 1e-8: both are 0 in FP16, whose
# smallest number is 6e-8. 0 / 0 is NaN, and so are the gradients: normalised queries and keys, contrastive losses and
# routers by cosine break at a padded row. FP32 and BF16, which hold the eps, give 0. Autocast to FP16 leaves F.normalize
# in FP16 on a CPU. Nothing warns. An eps of 1e-4 gives 0 and a gradient; 1e-6 gives 0, and 1 / 1e-6 is infinite in its
# gradient. F.layer_norm and F.rms_norm, which compute in FP32, give 0 with 1e-12, too, and such a gradient.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. What becomes of a row of zeros:
#
#   normalize: float32 0.0; bfloat16 0.0; float16 nan, gradient not finite
#   normalize, eps=1e-4: float32 0.0; bfloat16 0.0; float16 0.0
#   cosine_similarity: float32 0.0; bfloat16 0.0; float16 nan, gradient not finite
#   layer_norm, eps=1e-12: float32 0.0; bfloat16 0.0; float16 0.0, gradient not finite
#   rms_norm, eps=1e-12: float32 0.0; bfloat16 0.0; float16 0.0, gradient not finite
#   normalize of a layer's zeros under autocast to float16: nan
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import math

import torch
import torch.nn.functional as F
from torch import nn

FUNCTIONS = {
    "normalize": lambda x: F.normalize(x, dim=-1),
    "normalize, eps=1e-4": lambda x: F.normalize(x, dim=-1, eps=1e-4),
    "cosine_similarity": lambda x: F.cosine_similarity(x, torch.ones_like(x), dim=-1),
    "layer_norm, eps=1e-12": lambda x: F.layer_norm(x, (4,), eps=1e-12),
    "rms_norm, eps=1e-12": lambda x: F.rms_norm(x, (4,), eps=1e-12),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def of_zeros(function, dtype):
    zeros = torch.zeros(1, 4, dtype=dtype, requires_grad=True)
    result = function(zeros)
    result.sum().backward()
    return result.flatten()[0].item() + 0.0, bool(zeros.grad.isfinite().all())


broken = {}
for name, function in FUNCTIONS.items():
    results = [of_zeros(function, dtype) for dtype in DTYPES]
    told = (f"{str(dtype)[6:]} {result}" + ("" if finite else ", gradient not finite") for dtype, (result, finite) in zip(DTYPES, results))
    print(f"{name}: " + "; ".join(told))
    broken[name] = [math.isnan(result) for result, _ in results]

layer = nn.Linear(4, 4, bias=False)
with torch.autocast("cpu", torch.float16):
    normalised = F.normalize(layer(torch.zeros(1, 4)), dim=-1)
print(f"normalize of a layer's zeros under autocast to float16: {normalised[0, 0].item()}")
in_fp16 = [False, False, True]
same = broken["normalize"] == broken["cosine_similarity"] == in_fp16 and normalised.isnan().all()
same &= not any(any(broken[name]) for name in ("normalize, eps=1e-4", "layer_norm, eps=1e-12", "rms_norm, eps=1e-12"))
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
