#!/usr/bin/env bash
# torchao 0.18.0, heavyball 3.2.1, pytorch-optimizer 4.1.0: stochastic rounding to BF16 makes 0 of the NaN of a GPU.
#
# These libraries can round a step in FP32 to BF16 weights by chance, so that small steps are not lost. One may expect
# NaN to stay NaN. They add a random number, or a carry, to the lower 16 bits of FP32. NVIDIA's GPUs return one NaN from
# FP32 arithmetic, 0x7FFFFFFF, and a carry makes 0x80000000 of it, which is -0. So a step that is NaN sets the weight to
# 0, and with moments that are NaN each later step does, too. The weights remain finite, and who looks for NaN in them
# finds none. The NaN of a CPU is 0x7FC00000 and stays NaN, so that a test on a CPU does not show it. Look at the
# gradients' norm.
#
# Seen with torchao 0.18.0, heavyball 3.2.1, pytorch-optimizer 4.1.0, torch 2.13.0 and Python 3.11, 2026-11-30, on a
# CPU that is given the bits of a GPU, and no GPU. How many of a million numbers are NaN or 0 behind the rounding:
#
#   to nearest, 0x7fc00000 of a CPU: 1000000 NaN, 0 zeros
#   to nearest, 0x7fffffff of a GPU: 1000000 NaN, 0 zeros
#   torchao, 0x7fc00000 of a CPU: 1000000 NaN, 0 zeros
#   torchao, 0x7fffffff of a GPU: 14 NaN, 999986 zeros
#   heavyball, 0x7fc00000 of a CPU: 1000000 NaN, 0 zeros
#   heavyball, 0x7fffffff of a GPU: 11 NaN, 999989 zeros
#   pytorch-optimizer, 0x7fc00000 of a CPU: 1000000 NaN, 0 zeros
#   pytorch-optimizer, 0x7fffffff of a GPU: 14 NaN, 999986 zeros
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 torchao==0.18.0 heavyball==3.2.1 pytorch-optimizer==4.1.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from heavyball.utils import stochastic_round_
from pytorch_optimizer.optimizer.utils import copy_stochastic
from torchao.optim.quant_utils import _fp32_to_bf16_sr

COUNT = 1_000_000
torch.manual_seed(0)


def of_heavyball(numbers):
    return stochastic_round_(torch.zeros(COUNT, dtype=torch.bfloat16), numbers)


def of_pytorch_optimizer(numbers):
    rounded = torch.zeros(COUNT, dtype=torch.bfloat16)
    copy_stochastic(rounded, numbers)
    return rounded


ROUNDINGS = {
    "to nearest": torch.Tensor.bfloat16,
    "torchao": _fp32_to_bf16_sr,
    "heavyball": of_heavyball,
    "pytorch-optimizer": of_pytorch_optimizer,
}
seen = {}
for name, rounding in ROUNDINGS.items():
    for maker, bits in (("CPU", 0x7FC00000), ("GPU", 0x7FFFFFFF)):
        rounded = rounding(torch.full((COUNT,), bits, dtype=torch.int32).view(torch.float32))
        seen[name, maker] = int(rounded.isnan().sum()), int((rounded == 0).sum())
        print("{}, {:#x} of a {}: {} NaN, {} zeros".format(name, bits, maker, *seen[name, maker]))
kept = all(found == (COUNT, 0) for (name, maker), found in seen.items() if maker == "CPU" or name == "to nearest")
lost = all(seen[name, "GPU"][1] > 0.999 * COUNT for name in list(ROUNDINGS)[1:])
raise SystemExit(0 if kept and lost else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
