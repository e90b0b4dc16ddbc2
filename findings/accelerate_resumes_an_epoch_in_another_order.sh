#!/usr/bin/env bash
# accelerate 1.15.0: a resume within an epoch by save_state and skip_first_batches goes on in another order.
#
# The guide to checkpoints has save_state keep weights, optimiser and random numbers, and skip_first_batches leave out the
# batches that were trained on. So one may expect the rest of the epoch, and, as the random numbers are kept, the same
# dropout. A shuffled DataLoader draws its order when an epoch begins; the state is that of the middle of the epoch, and
# gives another order, of which the first batches are skipped: some examples come twice in that epoch, and others not.
# So do those of all later epochs come in another order. Nothing warns. use_seedable_sampler=True brings the order back,
# and not the random numbers of dropout and augmentations: the loader is one batch ahead when the state is saved. A
# state that is saved at an epoch's end brings all back. Reported as accelerate issue 2823.
#
# Seen with accelerate 1.15.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Eight examples, one a batch; the first
# epoch whole, and its rest behind a resume from batch 3; then whether random numbers drawn at each batch came back:
#
#   by default: whole [7, 2, 0, 5, 3, 4, 6, 1], resumed [0, 2, 1, 7, 5]; random numbers others
#   use_seedable_sampler: whole [4, 0, 7, 3, 2, 5, 1, 6], resumed [3, 2, 5, 1, 6]; random numbers others
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 accelerate==1.15.0 numpy
cd "$folder"
cat > "$folder/program.py" <<'PY'
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

EXAMPLES = 8


def trained(folder, seedable, saved_at, resumed):
    """The examples of the first epoch, or of its rest, and a random number drawn beside each."""
    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(range(EXAMPLES), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    rest = loader
    if resumed:
        accelerator.load_state(folder)
        rest = accelerator.skip_first_batches(loader, saved_at)
    examples, noises = [], []
    for example in rest:
        examples.append(example.item())
        noises.append(torch.rand(()).item())  # as dropout would
        if not resumed and len(examples) == saved_at:
            accelerator.save_state(folder)
    return examples, noises


seen = []
for seedable in (False, True):
    folder = f"{sys.argv[1]}/state_{seedable}"
    whole, noises = trained(folder, seedable, 3, resumed=False)
    rest, noises_of_rest = trained(folder, seedable, 3, resumed=True)
    name = "use_seedable_sampler" if seedable else "by default"
    same_noise = noises[3:] == noises_of_rest
    print(f"{name}: whole {whole}, resumed {rest}; random numbers {'the same' if same_noise else 'others'}")
    seen.append((whole[3:] == rest, same_noise))
raise SystemExit(0 if seen == [(False, False), (True, False)] else "changed")
PY
venv/bin/python -W ignore program.py "$folder" 2> /dev/null
