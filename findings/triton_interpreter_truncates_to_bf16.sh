#!/usr/bin/env bash
# Triton 3.9.0: the interpreter truncates FP32 to BF16, where a GPU rounds, and sums BF16 numbers as bit patterns.
#
# TRITON_INTERPRET=1 runs a kernel without a GPU, to test it. Its guide says that operations on BF16 are not supported,
# and advises to cast to FP32 first. So one may expect an error otherwise, and of casts what a GPU does. Loads and casts
# to FP32 are exact. But x.to(tl.bfloat16), and a store to a BF16 tensor, cut the lower bits off. A GPU rounds to the
# nearest. Outputs are 0.28 % too small in the mean, one half of them by one unit, and a test against PyTorch passes by
# its tolerance, where a long training or a sum of such values is another one. And sums, products and tl.argmax of BF16
# numbers take their bit patterns as integers: 1 + 3 - 2 + 0.5 is 1e38, and nothing warns. FP16 is right in all of it.
#
# Seen with triton 3.9.0, torch 2.13.0, numpy 2.4.6 and Python 3.11 on a CPU, 2026-11-30. The mean relative error of
# 4,096 normal numbers in size, the share that is not the nearest, and operations on 1, 3, -2 and 0.5:
#
#   bfloat16 by PyTorch: mean error +0.000, not the nearest 0.00
#   bfloat16 by the interpreter: mean error -0.003, not the nearest 0.50
#   float16 by the interpreter: mean error +0.000, not the nearest 0.00
#   float16: sum 2.5, sum of x + x 5, argmax 1
#   bfloat16: sum 1.28e+38, sum of x + x 2.13e+38, argmax 2
#   bfloat16 cast to FP32: sum 2.5, sum of x + x 5, argmax 1
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 triton==3.9.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import torch
import triton
import triton.language as tl

N = 4096


@triton.jit
def cast(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


@triton.jit
def operations(x_ptr, out_ptr, UPCAST: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    if UPCAST:
        x = x.to(tl.float32)
    tl.store(out_ptr + 0, tl.sum(x, 0).to(tl.float32))
    tl.store(out_ptr + 1, tl.sum((x + x).to(tl.float32), 0))
    tl.store(out_ptr + 2, tl.argmax(x, 0).to(tl.float32))


torch.manual_seed(0)
x = torch.randn(N)


def error(name, rounded):
    mean = ((rounded.float() - x) / x).mean().item()
    other = (rounded != x.to(rounded.dtype)).float().mean().item()
    print(f"{str(rounded.dtype)[6:]} by {name}: mean error {mean:+.3f}, not the nearest {other:.2f}", flush=True)
    return mean, other


def interpreted(dtype):
    out = torch.empty(N, dtype=dtype)
    cast[(1,)](x, out, N)
    return error("the interpreter", out)


def told(dtype, upcast=False):
    out = torch.empty(3)
    operations[(1,)](torch.tensor([1, 3, -2, 0.5]).to(dtype), out, upcast)
    name = str(dtype)[6:] + (" cast to FP32" if upcast else "")
    print("{}: sum {:.3g}, sum of x + x {:.3g}, argmax {:.0f}".format(name, *out.tolist()), flush=True)
    return out.tolist()


error("PyTorch", x.to(torch.bfloat16))
bf16, fp16 = interpreted(torch.bfloat16), interpreted(torch.float16)
right = told(torch.float16)
wrong = told(torch.bfloat16)
right_again = told(torch.bfloat16, upcast=True)
same = bf16[0] < -0.002 and 0.45 < bf16[1] < 0.55 and abs(fp16[0]) < 1e-4 and fp16[1] == 0
same = same and right == right_again == [2.5, 5, 1] and wrong[0] > 1e38 and wrong[1] > 1e38 and wrong[2] == 2
raise SystemExit(0 if same else "changed")
PY
TRITON_INTERPRET=1 "$folder/venv/bin/python" -W ignore "$folder/program.py"
