#!/usr/bin/env bash
# PyTorch 2.13.0: torch.compile drops a cast to BF16 or FP16 and back, so that rounding errors are 0 and Kahan's sum fails.
#
# x.to(torch.bfloat16).float() rounds x, and x less it is what the rounding lost. Compensated sums, residuals of split
# products and emulated formats are built so, and one may expect them of compiled code, up to rounding. The compiler
# takes the two casts out, whatever they were written for, and computes BF16 expressions in FP32 between loads and
# stores. So the residual is 0, an emulated BF16 is FP32, and BF16 weights with Kahan's sum never move: they round as if
# there were no compensation, and nothing warns. A cast to FP8 is kept. emulate_precision_casts of torch._inductor.config
# brings the roundings back.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. The largest |x - x rounded| of 4,096 normal numbers, and
# where a BF16 weight of 1 is after 1,000 steps of 0.001, to be 2:
#
#   largest error of bfloat16: eager 0.0078, compiled 0.0000
#   largest error of float16: eager 0.0010, compiled 0.0000
#   largest error of float8_e4m3fn: eager 0.1245, compiled 0.1245
#   Kahan's sum of 1,000 steps: eager 2.000, compiled 1.000
#   with emulate_precision_casts
#   largest error of bfloat16: eager 0.0078, compiled 0.0078
#   Kahan's sum of 1,000 steps: eager 2.000, compiled 2.000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy setuptools
cat > "$folder/program.py" <<'PY'
import torch
import torch._inductor.config


def kahan(weight, lost, step):
    step = step + lost
    moved = weight + step
    return moved, step - (moved - weight)


def largest(dtype):
    def error(x):
        return x - x.to(dtype).float()

    torch.manual_seed(0)
    x = torch.randn(4096)
    found = [run(x).abs().max().item() for run in (error, torch.compile(error))]
    print("largest error of {}: eager {:.4f}, compiled {:.4f}".format(str(dtype)[6:], *found), flush=True)
    return found


def trained():
    found = []
    for update in (kahan, torch.compile(kahan)):
        weight, lost = torch.ones(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
        for _ in range(1000):
            weight, lost = update(weight, lost, torch.full_like(weight, 0.001))
        found.append(weight[0].item())
    print("Kahan's sum of 1,000 steps: eager {:.3f}, compiled {:.3f}".format(*found), flush=True)
    return found


dropped, kept = [largest(dtype) for dtype in (torch.bfloat16, torch.float16)], largest(torch.float8_e4m3fn)
stuck = trained()
print("with emulate_precision_casts")
torch._inductor.config.emulate_precision_casts = True
torch.compiler.reset()
again, moved = largest(torch.bfloat16), trained()
wrong = all(eager > 0 and compiled == 0 for eager, compiled in dropped) and stuck == [2.0, 1.0]
right = all(eager == compiled for eager, compiled in (kept, again)) and moved == [2.0, 2.0]
raise SystemExit(0 if wrong and right else "changed")
PY
cd "$folder"
TORCHINDUCTOR_CACHE_DIR="$folder/cache" venv/bin/python -W ignore program.py 2> /dev/null
