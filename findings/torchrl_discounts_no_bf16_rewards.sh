#!/usr/bin/env bash
# torchrl 0.14.1: reward2go of BF16 rewards does not discount by a gamma of 0.999, and other returns stop at 256.
#
# The return of a step is the sum of the rewards that follow, each times gamma to the power of its distance. So one may
# expect BF16 rewards, whose ones are exact, to have the returns that FP32 ones have. reward2go makes gamma BF16, in
# which 0.999 is 1: nothing is discounted, and the return is the number of steps. td_lambda_return_estimate and
# td1_return_estimate, which are what the estimators compute when they are compiled or vectorized=False, add up in BF16:
# the return stops at 256, where one more reward is lost. The vectorised ones compute in FP32, and are right. Nothing
# warns. Cast the rewards and values to FP32.
#
# Seen with torchrl 0.14.1, tensordict 0.14.3, torch 2.13.0 and Python 3.11 on a CPU, 2026-12-01. The return of the
# first of 2,000 steps with a reward of 1 each, values of 0 and a gamma of 0.999:
#
#   reward2go: FP32 864.8, BF16 2000.0
#   td1_return_estimate: FP32 864.8, BF16 256.0
#   td_lambda_return_estimate: FP32 864.8, BF16 256.0
#   vec_td1_return_estimate: FP32 864.8, BF16 864.8
#   vec_td_lambda_return_estimate: FP32 864.8, BF16 864.8
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torchrl==0.14.1 tensordict==0.14.3 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from torchrl.objectives.value import functional

STEPS, GAMMA = 2000, 0.999
EXACT = (1 - GAMMA**STEPS) / (1 - GAMMA)


def returned(name, dtype):
    rewards, never = torch.ones(1, STEPS, 1, dtype=dtype), torch.zeros(1, STEPS, 1, dtype=torch.bool)
    values = torch.zeros_like(rewards)
    function = getattr(functional, name)
    if name == "reward2go":
        found = function(rewards, never, GAMMA)
    elif "lambda" in name:
        found = function(GAMMA, 1.0, values, rewards, never, never)
    else:
        found = function(GAMMA, values, rewards, never, never)
    return float(found[0, 0, 0])


seen = {}
for name in (
    "reward2go",
    "td1_return_estimate",
    "td_lambda_return_estimate",
    "vec_td1_return_estimate",
    "vec_td_lambda_return_estimate",
):
    single, brain = (returned(name, dtype) for dtype in (torch.float32, torch.bfloat16))
    print(f"{name}: FP32 {single:.1f}, BF16 {brain:.1f}")
    seen[name] = single, brain
right = all(abs(single - EXACT) < 0.1 for single, _ in seen.values())
right &= all(abs(brain - EXACT) < 0.1 for name, (_, brain) in seen.items() if name.startswith("vec"))
wrong = [seen[name][1] for name in ("reward2go", "td1_return_estimate", "td_lambda_return_estimate")]
raise SystemExit(0 if right and wrong == [2000, 256, 256] else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
