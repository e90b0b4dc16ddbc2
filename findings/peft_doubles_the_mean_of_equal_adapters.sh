#!/usr/bin/env bash
# peft 0.21.2: half of a LoRA adapter and half of an equal one make, as linear combination, twice the adapter.
#
# add_weighted_adapter merges adapters that were trained apart. So one may expect the linear combination with weights
# of a half to be the mean of the two updates B A of a weight, and that of equal adapters to be the adapter. It adds
# the A and adds the B, each times the root of its weight, and so multiplies the B of one with the A of the other,
# too. Such products, which nobody has trained, make half of what comes out: of equal adapters twice the update. An
# adapter with the signs of A and of B flipped is the same model, and the mean of the two is 0. Nothing warns, as the
# shapes are right. "cat" gives the mean up to rounding, at twice the rank, and "svd" the nearest to it of the old
# rank.
#
# Seen with peft 0.21.2, transformers 5.24.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Two adapters with
# halves as weights: by how much the update differs from the mean of the two, in norms of that mean; and how large it
# is beside it:
#
#   equal, linear: 1.00, 2.00
#   random, linear: 1.02, 1.58
#   equal up to signs, linear: 1.00, 0.00
#   random, cat: 0.00, 1.00
#   equal up to signs, cat: 0.00, 1.00
#   equal up to signs, svd: 0.00, 1.00
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from peft import LoraConfig, get_peft_model

SIZE, RANK = 32, 4


def adapters(kind):
    """A layer with two adapters: of random numbers, equal, or equal but for the signs of both factors."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["0"], r=RANK)
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE)), config, "a")
    model.add_adapter("b", config)
    layer = model.base_model.model[0]
    for factors in (layer.lora_A, layer.lora_B):
        a, b = factors["a"].weight.data, factors["b"].weight.data
        a.normal_()
        b.normal_() if kind == "random" else b.copy_(a if kind == "equal" else -a)
    return model, layer.get_delta_weight


def merged(kind, way):
    model, update = adapters(kind)
    mean = (update("a") + update("b")) / 2
    model.add_weighted_adapter(["a", "b"], [0.5, 0.5], "mean", combination_type=way)
    made = update("mean")
    return float((made - mean).norm() / mean.norm()), float(made.norm() / mean.norm())


seen = {}
for kind, way in (
    ("equal", "linear"),
    ("random", "linear"),
    ("equal up to signs", "linear"),
    ("random", "cat"),
    ("equal up to signs", "cat"),
    ("equal up to signs", "svd"),
):
    with torch.no_grad():
        seen[kind, way] = merged(kind, way)
    print("{}, {}: {:.2f}, {:.2f}".format(kind, way, *seen[kind, way]))
sizes = [seen["equal", "linear"][1], seen["equal up to signs", "linear"][1]]
wrong = abs(sizes[0] - 2) < 1e-4 and sizes[1] < 1e-4 and seen["random", "linear"][0] > 0.8
right = all(error < 1e-4 for (_, way), (error, _) in seen.items() if way != "linear")
raise SystemExit(0 if wrong and right else "changed")
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/program.py"
