#!/usr/bin/env bash
# transformers 5.24.0: a loss of NaN lowers the loss that the Trainer logs, and losses of NaN alone are logged as 0.
#
# With logging_nan_inf_filter, which is on unless it is set otherwise, a loss that is NaN or infinite is replaced in the
# mean that is logged. The documentation says by what: the average loss of the current logging window. So where every
# other loss is 3, the log would say 3. But the sum of the losses so far is divided by one step more than they are of:
# a NaN at the third step adds 6 / 3 = 2, and one at the first step adds 0 / 1 = 0. A window of NaN alone adds up to 0, so
# that a training that has failed looks like one whose loss has become 0.
#
# Seen with transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 and Python 3.11, 2026-11-29. Five steps are logged as
# one; every loss that is no NaN is 3:
#
#   no NaN: logged 3.0
#   NaN at the first of five steps: logged 2.4
#   NaN at the third: logged 2.8
#   NaN at all: logged 0.0
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy
cd "$folder"
cat > program.py <<'PY'
import math

import torch
from transformers import Trainer, TrainingArguments

BAD = {5, 12, *range(15, 20)}  # steps from 0: the first of the second five, the third of the third, all of the fourth


class Three(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.step = 0

    def forward(self, x, **_):
        loss = (self.weight * x).sum() + (math.nan if self.step in BAD else 3)
        self.step += 1
        return {"loss": loss}


arguments = TrainingArguments(
    "out", max_steps=20, logging_steps=5, learning_rate=0.0, per_device_train_batch_size=1, save_strategy="no",
    report_to="none", disable_tqdm=True, use_cpu=True, max_grad_norm=0.0, optim="sgd",
)
trainer = Trainer(Three(), arguments, train_dataset=[{"x": torch.ones(1)}] * 20)
trainer.train()
logged = [round(entry["loss"], 6) for entry in trainer.state.log_history if "loss" in entry]
for what, loss in zip(("no NaN", "NaN at the first of five steps", "NaN at the third", "NaN at all"), logged, strict=True):
    print(f"{what}: logged {loss}")
raise SystemExit(0 if logged == [3.0, 2.4, 2.8, 0.0] else "changed")
PY
venv/bin/python program.py | grep ": logged"
