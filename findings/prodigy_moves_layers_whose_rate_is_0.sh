#!/usr/bin/env bash
# pytorch-optimizer 4.1.0: Prodigy and the DAdapt optimizers move all groups at the learning rate of the first group.
#
# Prodigy finds its step size itself; a group's rate is a factor of it, and 0 freezes the group. So one may expect a
# layer whose rate is 0 to stand still: prodigyopt and dadaptation, whose optimizers these are, either keep it or raise
# an error for two other rates. In pytorch-optimizer the first group's rate is that of all, and so are its betas. So a
# frozen layer behind the first is trained, and where the first is frozen, as the lower layers of a model that is
# fine-tuned, nothing moves at all. A factor of 0.1 for the lower layers is that of all, or of none. Nothing warns, and
# a schedule of all rates works.
#
# Seen with pytorch-optimizer 4.1.0, prodigyopt 1.1.2, dadaptation 3.2, torch 2.13.0 and Python 3.11 on a CPU,
# 2026-11-30. How far the weights of two groups are from their start after 100 steps, at rates of 1 and 0, and 0 and 1:
#
#   Prodigy of prodigyopt: 43.091 and 0.000, 0.000 and 5.183
#   Prodigy of pytorch_optimizer: 4.887 and 2.019, 0.000 and 0.000
#   DAdaptAdam of dadaptation: 20.672 and 0.000, 0.000 and 4.084
#   DAdaptAdam of pytorch_optimizer: 20.386 and 1.846, 0.000 and 0.000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
    pytorch-optimizer==4.1.0 prodigyopt==1.1.2 dadaptation==3.2 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import dadaptation
import prodigyopt
import pytorch_optimizer
import torch

torch.set_num_threads(1)


def moved(kind, rates):
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
    x, y = torch.randn(64, 8), torch.randn(64, 4)
    before = [layer.weight.detach().clone() for layer in layers]
    groups = [{"params": list(layer.parameters()), "lr": rate} for layer, rate in zip(layers, rates, strict=True)]
    optimizer = kind(groups, lr=1.0)
    for _ in range(100):
        optimizer.zero_grad()
        (layers[1](layers[0](x).tanh()) - y).square().mean().backward()
        optimizer.step()
    return [(layer.weight - start).abs().max().item() for layer, start in zip(layers, before, strict=True)]


seen = {}
for name, packages in {
    "Prodigy": (prodigyopt, pytorch_optimizer),
    "DAdaptAdam": (dadaptation, pytorch_optimizer),
}.items():
    for package in packages:
        upper, lower = (moved(getattr(package, name), rates) for rates in ((1.0, 0.0), (0.0, 1.0)))
        print("{} of {}: {:.3f} and {:.3f}, {:.3f} and {:.3f}".format(name, package.__name__, *upper, *lower))
        seen[name, package] = [distance > 1e-2 for distance in (*upper, *lower)]
wrong = all(seen.pop((name, pytorch_optimizer)) == [True, True, False, False] for name in ("Prodigy", "DAdaptAdam"))
right = all(moves == [True, False, False, True] for moves in seen.values())
raise SystemExit(0 if wrong and right else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
