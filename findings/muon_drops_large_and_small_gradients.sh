#!/usr/bin/env bash
# PyTorch 2.13.0: torch.optim.Muon makes no step from a finite gradient of 1e20, or from one of 1e-20.
#
# Muon replaces a gradient by the nearest orthogonal matrix, so that its step does not depend on the gradient's size. So
# one may expect the usual step from a gradient that is large, as one before unscaling or in an explosion, or small. The
# sum of its squares exceeds FP32 at 1e20, and what is divided by infinity is 0. At 1e-20 it is divided by a floor of
# 1e-7. In both cases the weights stand still, but for weight decay, while gradients and weights are finite: nothing
# tells. And the momentum holds a larger one: after one of 1e24 there is no step for 178 ordinary gradients.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-29. The step is the largest change of a weight, with a
# learning rate of 0.1, without weight decay:
#
#   gradient of size 1e+00: step 0.0840
#   gradient of size 1e+18: step 0.0844
#   gradient of size 1e+20: step 0.0000
#   gradient of size 1e-20: step 0.0000
#   ordinary gradients without a step after one of size 1e+24: 178
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch


class Trained:
    def __init__(self):
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        self.optimizer = torch.optim.Muon([self.weight], lr=0.1, weight_decay=0.0)

    def step(self, size):
        before = self.weight.detach().clone()
        self.weight.grad = size * torch.randn(4, 4)
        assert self.weight.grad.isfinite().all()
        self.optimizer.step()
        return float((self.weight.detach() - before).abs().max())


stepped = []
for size in (1.0, 1e18, 1e20, 1e-20):
    change = Trained().step(size)
    print(f"gradient of size {size:.0e}: step {change:.4f}")
    stepped.append(change > 0)
trained = Trained()
trained.step(1e24)
still = 0
while still < 1000 and trained.step(1.0) == 0:
    still += 1
print(f"ordinary gradients without a step after one of size 1e+24: {still}")
raise SystemExit(0 if stepped == [True, True, False, False] and still > 100 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
