#!/usr/bin/env bash
# Lightning 2.6.6: a training that is resumed behind epoch 2 has the order and the dropout of epoch 0 again.
#
# A checkpoint of Lightning has weights, optimisers, schedulers, loops and callbacks, so that a resume goes on where the
# run was. So one may expect the order and the dropout masks that an uninterrupted run has there, or at least new ones.
# It keeps no state of a random generator. A script that calls seed_everything, as a resume of the same script does, has
# the random numbers of the first step again: epoch 2 has the order and masks of epoch 0, and epoch 3 those of epoch 1.
# A run that is resumed each two epochs sees two orders in all its life. Nothing warns; epoch and step go on. The Trainer
# of transformers saves the generators' states. So may a callback, by state_dict and on_train_epoch_start. Where several
# devices train, Lightning puts in a DistributedSampler, whose order follows the epoch.
#
# Seen with lightning 2.6.6, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. The order of six examples in the epochs of
# a run, and a random number that is drawn at each epoch's first step; then those of one that is resumed behind epoch 1:
#
#   whole, epoch 0: [5, 0, 3, 2, 1, 4], 0.49
#   whole, epoch 1: [1, 5, 2, 4, 3, 0], 0.698
#   whole, epoch 2: [2, 0, 4, 5, 3, 1], 0.953
#   whole, epoch 3: [4, 3, 1, 2, 5, 0], 0.208
#   resumed, epoch 2: [5, 0, 3, 2, 1, 4], 0.49
#   resumed, epoch 3: [1, 5, 2, 4, 3, 0], 0.698
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 lightning==2.6.6 numpy
cd "$folder"
cat > "$folder/program.py" <<'PY'
import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

EXAMPLES = 6


class Noting(lightning.LightningModule):
    """A model that notes its examples and what dropout would draw, by epoch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.epochs = {}

    def training_step(self, batch, index):
        examples, noise = self.epochs.setdefault(self.current_epoch, ([], []))
        examples.append(int(batch))
        noise.append(round(torch.rand(()).item(), 3))
        return self.layer(batch.float()[:, None]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trained(epochs, folder, resumed=False):
    lightning.seed_everything(0, verbose=False)
    model = Noting()
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder,
    )
    path = f"{folder}/last.ckpt"
    trainer.fit(model, DataLoader(range(EXAMPLES), shuffle=True), ckpt_path=path if resumed else None)
    if not resumed:
        trainer.save_checkpoint(path)
    return model.epochs


whole = trained(4, sys.argv[1])
trained(2, sys.argv[1])
resumed = trained(4, sys.argv[1], resumed=True)
for name, epochs in (("whole", whole), ("resumed", resumed)):
    for epoch, (examples, noise) in epochs.items():
        print(f"{name}, epoch {epoch}: {examples}, {noise[0]}")
again = list(resumed) == [2, 3] and [resumed[2], resumed[3]] == [whole[0], whole[1]]
raise SystemExit(0 if again and whole[2] not in (whole[0], whole[1]) else "changed")
PY
venv/bin/python -W ignore program.py "$folder" 2> /dev/null | grep "epoch [0-3]:"
