#!/usr/bin/env bash
# torchrl 0.14.1: a NaN reward makes the advantages of the episodes before it NaN, too, in GAE as it is by default.
#
# The advantage of a step is made of the rewards that follow in its episode: where an episode ends, that sum ends. So
# one may expect a reward that is NaN or infinite, as of a physics engine that blew up, to spoil the steps before it in
# its own episode alone. GAE goes backwards through the steps and multiplies what came later by 0 where an episode ends;
# 0 times NaN is NaN. So all episodes before it in the same row of the batch are lost, too. With vectorized=True they
# are not. The documentation calls that the default, but the default of GAE is None, which is taken for False. The
# default of TDLambdaEstimator is True; compiled, both loop. Nothing warns.
#
# Seen with torchrl 0.14.1, tensordict 0.14.3, torch 2.13.0 and Python 3.11 on a CPU, 2026-12-01. Two episodes of three
# steps in a row, the reward of step 5 is NaN; which advantages are NaN:
#
#   GAE: steps 1, 2, 3, 4, 5
#   GAE, vectorized=False: steps 1, 2, 3, 4, 5
#   GAE, vectorized=True: steps 4, 5
#   TDLambdaEstimator: steps 4, 5
#   TDLambdaEstimator, vectorized=False: steps 1, 2, 3, 4, 5
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torchrl==0.14.1 tensordict==0.14.3 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import math

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.objectives.value import GAE, TDLambdaEstimator

STEPS = 6
value = TensorDictModule(torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=["state_value"])


def broken(estimator, **options):
    torch.manual_seed(0)
    reward = torch.randn(1, STEPS, 1)
    reward[0, 4] = math.nan
    done = torch.zeros(1, STEPS, 1, dtype=torch.bool)
    done[0, [2, 5]] = True
    following = {"observation": torch.randn(1, STEPS, 3), "reward": reward, "done": done, "terminated": done.clone()}
    data = TensorDict({"observation": torch.randn(1, STEPS, 3), "next": TensorDict(following, [1, STEPS])}, [1, STEPS])
    made = estimator(gamma=0.99, lmbda=0.95, value_network=value, **options)
    steps = [step + 1 for step in range(STEPS) if made(data)["advantage"][0, step].isnan()]
    name = ", ".join([estimator.__name__, *(f"{key}={kept}" for key, kept in options.items())])
    print(f"{name}: steps {', '.join(map(str, steps))}")
    return steps


seen = [
    broken(GAE),
    broken(GAE, vectorized=False),
    broken(GAE, vectorized=True),
    broken(TDLambdaEstimator),
    broken(TDLambdaEstimator, vectorized=False),
]
both, own = [1, 2, 3, 4, 5], [4, 5]
raise SystemExit(0 if seen == [both, both, own, own, both] else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
