#!/usr/bin/env bash
# Lightning 2.6.6 and accelerate 1.15.0: where an epoch ends within an accumulation, its last step is a fraction.
#
# Gradient accumulation over four batches takes the mean of four. With five batches in an epoch, the fifth has a step of
# its own in Lightning and accelerate. So one may expect the mean of the one, as of a last batch that is smaller. Its
# loss is divided by four, as those of the others: the step of SGD is a quarter, and what is clipped is a quarter of
# the norm, so that logged norms fall once in each epoch. The Trainer of transformers divides by the batches that there
# are. Keras makes no step, and takes the fifth batch into the next epoch. So one training with four libraries goes
# three ways. Nothing warns.
#
# Seen with lightning 2.6.6, accelerate 1.15.0, transformers 5.24.0, keras 3.15.1, torch 2.13.0 and Python 3.11 on a
# CPU, 2026-11-30. SGD with a learning rate of 1 and gradients of 1, five batches in each of two epochs, accumulated four
# at a time: by how much each step moves the weight:
#
#   Lightning: 1.00 0.25 1.00 0.25
#   accelerate: 1.00 0.25 1.00 0.25
#   Trainer: 1.00 1.00 1.00 1.00
#   Keras: 1.00 1.00
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 lightning==2.6.6 transformers==5.24.0 accelerate==1.15.0 keras==3.15.1 numpy
cat > "$folder/program.py" <<'PY'
import keras
import lightning
import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

BATCHES, TOGETHER, EPOCHS = 5, 4, 2


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = [0.0]

    def forward(self, x):
        return {"loss": (self.weight * x).mean()}

    def training_step(self, batch, index):
        return self(batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)

    def on_train_batch_end(self, *_):
        self.seen.append(self.weight.item())


def with_lightning():
    model = Model()
    lightning.Trainer(
        max_epochs=EPOCHS, accumulate_grad_batches=TOGETHER, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, DataLoader(torch.ones(BATCHES, 1)))
    return model.seen


def with_accelerate():
    accelerator = Accelerator(gradient_accumulation_steps=TOGETHER, cpu=True)
    model = Model()
    seen = model.seen
    model, sgd, loader = accelerator.prepare(model, model.configure_optimizers(), DataLoader(torch.ones(BATCHES, 1)))
    for batch in (batch for _ in range(EPOCHS) for batch in loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch)["loss"])
            sgd.step()
            sgd.zero_grad()
        seen.append(accelerator.unwrap_model(model).weight.item())
    return seen


class Look(TrainerCallback):
    def on_step_end(self, *_, model, **__):
        model.seen.append(model.weight.item())


def with_trainer():
    model = Model()
    arguments = TrainingArguments(
        "out", num_train_epochs=EPOCHS, gradient_accumulation_steps=TOGETHER, per_device_train_batch_size=1,
        learning_rate=1.0, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True,
    )
    Trainer(model, arguments, train_dataset=[{"x": torch.ones(1)}] * BATCHES, callbacks=[Look()]).train()
    return model.seen


def with_keras():
    weight = keras.Variable(np.zeros(1, np.float32))
    sgd = keras.optimizers.SGD(1.0, gradient_accumulation_steps=TOGETHER)
    sgd.build([weight])
    seen = [0.0]
    for _ in range(BATCHES * EPOCHS):
        sgd.apply([keras.ops.ones(1)])
        seen.append(float(weight[0]))
    return seen


found = {}
for name, train in (("Lightning", with_lightning), ("accelerate", with_accelerate), ("Trainer", with_trainer),
                    ("Keras", with_keras)):
    seen = train()
    found[name] = [round(a - b, 2) for a, b in zip(seen, seen[1:]) if a != b]
    print(f"{name}: " + " ".join(f"{step:.2f}" for step in found[name]) + " steps", flush=True)
fraction = [1, 0.25, 1, 0.25]
same = found == {"Lightning": fraction, "accelerate": fraction, "Trainer": [1, 1, 1, 1], "Keras": [1, 1]}
raise SystemExit(0 if same else "changed")
PY
cd "$folder"
KERAS_BACKEND=torch HF_HUB_OFFLINE=1 venv/bin/python program.py 2> /dev/null | sed -n 's/ steps$//p'
