#!/usr/bin/env bash
# transformers 5.24.0: of a model of one's own the Trainer accumulates a mean of means, without a word.
#
# Gradient accumulation is to train as the whole batch does. Since 4.46 the Trainer counts the targets of all
# micro-batches and divides by their number, so one may expect it of every model. It does so if forward takes **kwargs,
# and has the model divide by num_items_in_batch. A model whose forward names its arguments alone trains on the mean of
# the means of its micro-batches: a target of a row that has one of them weighs as much as all eight of another row.
# Loss and gradient differ from those of the whole batch, and no warning comes.
#
# Seen with transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 and Python 3.11, 2026-11-29. Four rows with 8, 1, 8 and
# 4 targets, in one batch of four, and in four of one: the loss that is logged, and the gradient's norm. The same model,
# but for its **kwargs:
#
#   forward(input_ids, labels): one batch 3.0757, 0.2099; accumulated 2.7749, 0.2637
#   forward(input_ids, labels, **kwargs): one batch 3.0757, 0.2099; accumulated 3.0757, 0.2099
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy
cd "$folder"
cat > program.py <<'PY'
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 16)

    def forward(self, input_ids, labels):
        return self.of(input_ids, labels, None)

    def of(self, input_ids, labels, count):
        logits = self.table(input_ids)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": total / ((labels != -100).sum() if count is None else count), "logits": logits}


class ModelOfKwargs(Model):
    def forward(self, input_ids, labels, **kwargs):
        return self.of(input_ids, labels, kwargs.get("num_items_in_batch"))


ids = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(0))
targets = ids.roll(-1, 1)
targets[1, 1:] = -100
targets[3, 4:] = -100
rows = [{"input_ids": row, "labels": labels} for row, labels in zip(ids, targets, strict=True)]


def trained(make, size):
    arguments = TrainingArguments(
        "out", max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=4 // size, optim="sgd",
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )
    trainer = Trainer(make(), arguments, train_dataset=rows)
    trainer.log = lambda logs, *more: trainer.state.log_history.append(logs)
    trainer.train()
    first = trainer.state.log_history[0]
    return float(first["loss"]), float(first["grad_norm"])


seen = {}
for make, arguments in ((Model, "input_ids, labels"), (ModelOfKwargs, "input_ids, labels, **kwargs")):
    whole, parts = seen[make] = trained(make, 4), trained(make, 1)
    told = ("{:.4f}, {:.4f}".format(*one) for one in (whole, parts))
    print("forward({}): one batch {}; accumulated {}".format(arguments, *told))


def differ(one, other):
    return any(abs(a - b) > 0.01 for a, b in zip(one, other, strict=True))


raise SystemExit(0 if differ(*seen[Model]) and not differ(*seen[ModelOfKwargs]) else "changed")
PY
HF_HUB_OFFLINE=1 venv/bin/python program.py
