#!/usr/bin/env bash
# PyTorch 2.13.0: under autocast to BF16, attention computes inputs that were cast to FP16 on purpose in BF16.
#
# Whoever casts q, k and v to FP16 in front of an attention, for its three more mantissa bits, may expect that the cast
# stands, as one to FP64 does. It does not: autocast's list names scaled_dot_product_attention, and every floating dtype
# but FP64 is cast to BF16, downwards too, without a word. The result is BF16, and has BF16's error. Other operations in
# between leave FP16 as it is, so that a look at the tensor in front of the attention shows FP16. Outside autocast the
# same call computes in FP16.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-28; with torch 2.11.0 on an H200, too. The error is the
# largest difference from FP64, seed 0:
#
#   layer norm of float16 under autocast: float16
#   attention of float16 outside autocast: float16, error 0.0006
#   attention of float16 under autocast: bfloat16, error 0.0110
#   attention of float64 under autocast: float64, error 0.0000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
import torch.nn.functional as F


def name(tensor):
    return str(tensor.dtype).removeprefix("torch.")


torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 64, 32, dtype=torch.float64).half().double() for _ in range(3))
exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)


def told(what, dtype, enabled):
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        out = F.scaled_dot_product_attention(*(x.to(dtype) for x in (q, k, v)), is_causal=True)
    error = float((out.double() - exact).abs().max())
    print(f"attention of {what}: {name(out)}, error {error:.4f}")
    return out.dtype, error


with torch.autocast("cpu", torch.bfloat16):
    kept = F.layer_norm(q.half(), (32,))
print(f"layer norm of float16 under autocast: {name(kept)}")
outside, small = told("float16 outside autocast", torch.float16, False)
inside, large = told("float16 under autocast", torch.float16, True)
double, _ = told("float64 under autocast", torch.float64, True)
same = (kept.dtype, outside, inside, double) == (torch.float16, torch.float16, torch.bfloat16, torch.float64)
raise SystemExit(0 if same and large > 4 * small else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
