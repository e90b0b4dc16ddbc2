#!/usr/bin/env bash
# transformers 5.24.0: a training on a stream that is resumed after its first pass starts at the stream's beginning.
#
# A resume skips the epochs and batches that were trained on, so that the data go on where they were: so the
# documentation of ignore_data_skip, and so it is for a dataset with a length. A stream has none, and takes max_steps.
# The Trainer takes all of its training for one epoch, and skips the batches of all passes in the first. That ends, and
# the next one starts at its first example, though the run was in the middle of a pass: examples come too often, and
# others too seldom, after each resume anew. Nothing warns, and the steps' number goes on. Within the first pass the
# resume is exact.
#
# Seen with transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 and Python 3.11, 2026-11-30. The examples 0 to 9 in
# order, one a step, or two with accumulation; those of the last steps, uninterrupted and resumed:
#
#   list, after step 13 of 18: uninterrupted 3 4 5 6 7, resumed 3 4 5 6 7
#   stream, after step 4 of 9: uninterrupted 4 5 6 7 8, resumed 4 5 6 7 8
#   stream, after step 13 of 18: uninterrupted 3 4 5 6 7, resumed 0 1 2 3 4
#   stream, after step 6 of 9, accumulated: uninterrupted 2 3 4 5 6 7, resumed 0 1 2 3 4 5
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy
cd "$folder"
cat > program.py <<'PY'
import tempfile

import torch
from transformers import Trainer, TrainingArguments

EXAMPLES = [{"x": torch.tensor(number)} for number in range(10)]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from EXAMPLES


class Noting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []

    def forward(self, x, **_):
        self.seen += x.tolist()
        return {"loss": (self.weight * x).mean()}


def seen(dataset, after, steps, accumulated, start=None):
    folder = tempfile.mkdtemp(dir=".")
    arguments = TrainingArguments(
        folder, max_steps=steps, save_steps=after, save_strategy="steps", gradient_accumulation_steps=accumulated,
        per_device_train_batch_size=1, report_to="none", disable_tqdm=True, use_cpu=True,
        train_sampling_strategy="sequential",
    )
    trainer = Trainer(Noting(), arguments, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=start)
    return trainer.model.seen, f"{folder}/checkpoint-{after}"


same = True
for name, dataset, after, steps, accumulated in (
    ("list", EXAMPLES, 13, 18, 1),
    ("stream", Stream(), 4, 9, 1),
    ("stream", Stream(), 13, 18, 1),
    ("stream", Stream(), 6, 9, 2),
):
    whole, checkpoint = seen(dataset, after, steps, accumulated)
    resumed, _ = seen(dataset, after, steps, accumulated, checkpoint)
    rest = whole[-len(resumed):]
    told = ", accumulated" if accumulated > 1 else ""
    print(f"{name}, after step {after} of {steps}{told}: uninterrupted", *rest, end=", resumed ")
    print(*resumed, flush=True)
    exact = name == "list" or after == 4
    same &= resumed == (rest if exact else list(range(len(rest)))) and (resumed == rest) == exact
raise SystemExit(0 if same else "changed")
PY
venv/bin/python program.py 2> /dev/null | grep uninterrupted
