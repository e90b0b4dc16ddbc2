#!/usr/bin/env bash
# torchao 0.18.0 and bitsandbytes 0.50.2: beside gradients 1,000 times as large, AdamW of 8 bits errs 4- and 60-fold.
#
# AdamW of 8 bits keeps its moments in blocks of 256 numbers, and is to take the steps of AdamW in FP32, which do not
# depend on a gradient's size. So one may expect steps that are a few percent off. Where one input of a layer is 1,000
# times as large as the others, so are its weights' gradients. The second moments of the other weights in the block are
# then a millionth of its largest. torchao rounds some of them to 0, at a factor of 3,000 most: such a step is divided
# by its own gradient alone. Steps are 60 to 800 times too large, with FP8 from a factor of 300 on. bitsandbytes makes
# these moments too large: its steps are 4 to 12 times too small. Nothing is NaN, and nothing warns. torchao's AdamW4bit
# stays within a third.
#
# Seen with torchao 0.18.0, bitsandbytes 0.50.2, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Normal gradients of
# 32 x 256 weights, seed 1, of which those of the first column are multiplied by a factor. The step of the others, in
# learning rates, as a root mean square of the last 100 of 300:
#
#   factor 1: AdamW 0.23; torchao 8bit 0.23, Fp8 0.22, 4bit 0.22; bitsandbytes 8bit 0.23
#   factor 300: AdamW 0.23; torchao 8bit 0.25, Fp8 20.10, 4bit 0.16; bitsandbytes 8bit 0.19
#   factor 1000: AdamW 0.23; torchao 8bit 14.66, Fp8 190.46, 4bit 0.16; bitsandbytes 8bit 0.06
#   factor 3000: AdamW 0.23; torchao 8bit 181.98, Fp8 217.70, 4bit 0.16; bitsandbytes 8bit 0.02
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torchao==0.18.0 bitsandbytes==0.50.2 torch==2.13.0 numpy setuptools
cat > "$folder/program.py" <<'PY'
import bitsandbytes
import torch
import torchao.optim

RATE = 1e-3
OPTIMIZERS = (
    torch.optim.AdamW,
    torchao.optim.AdamW8bit,
    torchao.optim.AdamWFp8,
    torchao.optim.AdamW4bit,
    bitsandbytes.optim.AdamW8bit,
)


def step(optimizer_class, factor):
    weight = torch.nn.Parameter(torch.zeros(32, 256))
    optimizer = optimizer_class([weight], lr=RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    squares = []
    for _ in range(300):
        before = weight.detach().clone()
        weight.grad = 1e-3 * torch.randn(32, 256, generator=generator)
        weight.grad[:, 0] *= factor
        optimizer.step()
        squares.append((weight.detach() - before)[:, 1:].square().mean())
    return float(torch.stack(squares[-100:]).mean()) ** 0.5 / RATE


TOLD = "factor {}: AdamW {:.2f}; torchao 8bit {:.2f}, Fp8 {:.2f}, 4bit {:.2f}; bitsandbytes 8bit {:.2f}"
seen = {}
for factor in (1, 300, 1000, 3000):
    seen[factor] = exact, *_ = [step(one, factor) for one in OPTIMIZERS]
    print(TOLD.format(factor, *seen[factor]), flush=True)
same = all(abs(x / exact - 1) < 0.1 for x in seen[1])
for factor in (1000, 3000):
    _, ao, fp8, four, other = seen[factor]
    same &= min(ao, fp8) > 30 * exact and other < exact / 3 and four > exact / 2
raise SystemExit(0 if same and seen[300][2] > 30 * exact else "changed")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/program.py" 2> /dev/null
