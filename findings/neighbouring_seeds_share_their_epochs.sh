#!/usr/bin/env bash
# PyTorch 2.13.0, transformers 5.24.0: the epochs of seed 1 are those of seed 0, one later.
#
# Runs with seeds 0, 1, 2 … are to differ by chance alone, so that their spread says how much chance does. So one may
# expect independent orders of the data. DistributedSampler and accelerate's SeedableRandomSampler, which the Trainer
# uses by default, take seed + epoch as the seed of an epoch's order: epoch 1 of seed 0 is epoch 0 of seed 1, batch by
# batch, and of ten epochs two neighbouring seeds share nine. So orders that make a loss spike come back in the
# neighbours, one epoch earlier, and the spread over seeds is too small. Nothing warns, and weights and dropout differ.
# Seeds that lie further apart than the epochs are many share none. RandomSampler of a DataLoader with a generator of
# its own has independent orders.
#
# Seen with torch 2.13.0, transformers 5.24.0, accelerate 1.15.0 and Python 3.11 on a CPU, 2026-11-30. Eight examples in
# the order of three epochs, by seed:
#
#   DistributedSampler, seed 0: 40732516, 54267310, 04726513
#   DistributedSampler, seed 1: 54267310, 04726513, 24351067
#   Trainer, seed 0: 40732516, 54267310, 04726513
#   Trainer, seed 1: 54267310, 04726513, 24351067
#   DataLoader, seed 0: 53172640, 23471065, 35670214
#   DataLoader, seed 1: 40367152, 20163475, 16743250
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy
cd "$folder"
cat > "$folder/program.py" <<'PY'
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer, TrainingArguments

EXAMPLES = 8
EPOCHS = 3


class Noting(nn.Module):
    """A model that notes which examples it is given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.given = []

    def forward(self, x):
        self.given += x.flatten().int().tolist()
        return {"loss": self.layer(x).mean()}


def of_the_sampler(seed):
    sampler = DistributedSampler(range(EXAMPLES), num_replicas=1, rank=0, seed=seed)
    order = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        order += list(sampler)
    return order


def of_the_trainer(seed):
    arguments = TrainingArguments(
        "out", num_train_epochs=EPOCHS, per_device_train_batch_size=2, seed=seed, report_to=[], save_strategy="no",
        logging_strategy="no", use_cpu=True, disable_tqdm=True,
    )
    model = Noting()
    Trainer(model, arguments, train_dataset=[{"x": torch.tensor([float(i)])} for i in range(EXAMPLES)]).train()
    return model.given


def of_a_loader(seed):
    loader = DataLoader(range(EXAMPLES), shuffle=True, generator=torch.Generator().manual_seed(seed))
    return [int(example) for _ in range(EPOCHS) for example in loader]


shared = []
for name, order_of in (("DistributedSampler", of_the_sampler), ("Trainer", of_the_trainer), ("DataLoader", of_a_loader)):
    orders = []
    for seed in (0, 1):
        order = order_of(seed)
        orders.append([order[i : i + EXAMPLES] for i in range(0, len(order), EXAMPLES)])
        told = ", ".join("".join(str(example) for example in epoch) for epoch in orders[-1])
        print(f"{name}, seed {seed}: {told}")
    shared.append(orders[0][1:] == orders[1][:-1])
raise SystemExit(0 if shared == [True, True, False] else "changed")
PY
HF_HUB_OFFLINE=1 venv/bin/python -W ignore program.py 2> /dev/null | grep -v "^{"
