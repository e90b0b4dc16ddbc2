#!/usr/bin/env bash
# PyTorch 2.13.0: on a CPU torch.optim.SGD with fused=True writes no step into weights of BF16 or FP16.
#
# fused=True is to take the same step in one pass over the memory. So one may expect weights in BF16 to move as
# without it, up to their rounding. Sixteen weights at a time are computed and never written. Only what is left over
# of a multiple of sixteen moves, so that most matrices stand still for good, and a bias of ten moves. The buffer of
# the momentum is written, and looks alive. The loss stays where it began, and neither a warning nor an error comes.
# FP32 weights move, and so do BF16 weights under a fused Adam, AdamW or Adagrad.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30; with ATEN_CPU_CAPABILITY of default, avx2 and avx512
# alike. 2.14.1 has it mended. One step on weights of 1 with gradients of 1 and a rate of 0.1: how many of them moved,
# and the largest entry of the momentum:
#
#   SGD float32: of 10 10, of 64 64, of 100 100; momentum 1
#   SGD bfloat16: of 10 10, of 64 64, of 100 100; momentum 1
#   SGD bfloat16, fused: of 10 10, of 64 0, of 100 4; momentum 1
#   SGD float16, fused: of 10 10, of 64 0, of 100 4; momentum 1
#   SGD float32, fused: of 10 10, of 64 64, of 100 100; momentum 1
#   AdamW bfloat16, fused: of 10 10, of 64 64, of 100 100
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch

SIZES = (10, 64, 100)


def moved(kind, dtype, size, **options):
    weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
    optimizer = kind([weight], lr=0.1, **options)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    buffer = optimizer.state[weight].get("momentum_buffer")
    return int((weight != 1).sum()), None if buffer is None else float(buffer.max())


seen = []
for kind, dtype, fused in (
    (torch.optim.SGD, torch.float32, False),
    (torch.optim.SGD, torch.bfloat16, False),
    (torch.optim.SGD, torch.bfloat16, True),
    (torch.optim.SGD, torch.float16, True),
    (torch.optim.SGD, torch.float32, True),
    (torch.optim.AdamW, torch.bfloat16, True),
):
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    found = [moved(kind, dtype, size, fused=fused, **options) for size in SIZES]
    counts = ", ".join(f"of {size} {count}" for size, (count, _) in zip(SIZES, found))
    momentum = "" if found[1][1] is None else f"; momentum {found[1][1]:g}"
    print(f"{kind.__name__} {str(dtype)[6:]}{', fused' * fused}: {counts}{momentum}")
    seen.append(([count for count, _ in found], found[1][1]))
all_moved, stood = list(SIZES), [10, 0, 4]
expected = [(all_moved, 1), (all_moved, 1), (stood, 1), (stood, 1), (all_moved, 1), (all_moved, None)]
raise SystemExit(0 if seen == expected else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
