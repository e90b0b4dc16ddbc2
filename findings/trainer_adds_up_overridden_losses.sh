#!/usr/bin/env bash
# transformers 5.24.0: a Trainer with a compute_loss of its own adds micro-batches up, and so steps n times as far.
#
# Whoever needs another loss overrides compute_loss, which returns the loss of a batch. Gradient accumulation divides
# by the number of micro-batches: so it does for a model without **kwargs. So one may expect the mean of the
# micro-batches' losses. If the model's forward takes **kwargs, as those of transformers do, the Trainer divides by
# nothing, and leaves that to the model, which the override does not ask for its loss. Four micro-batches give four
# times the loss in the log and four times the gradient, before it is clipped: with max_grad_norm each step is clipped
# that would not be. The signature has num_items_in_batch, by which one may divide a sum. Nothing warns, and the
# evaluated loss is right.
#
# Seen with transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Four rows in one
# batch, and in four micro-batches: the loss that is logged, and the gradient's norm:
#
#   Trainer: one batch 3.49, 1.56; four micro-batches 3.49, 1.56
#   compute_loss returns a mean: one batch 3.49, 1.56; four micro-batches 13.96, 6.26
#   compute_loss divides a sum by num_items_in_batch: one batch 3.49, 1.56; four micro-batches 3.49, 1.56
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ROWS = 4


class Mean(Trainer):
    reduction = "mean"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = cross_entropy(logits, targets, reduction=self.reduction)
        if self.reduction == "sum":
            loss = loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class Sum(Mean):
    reduction = "sum"


def logged(trainer_class, micro_batches):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    ))
    arguments = TrainingArguments(
        "out", max_steps=1, logging_steps=1, learning_rate=0.0, per_device_train_batch_size=ROWS // micro_batches,
        gradient_accumulation_steps=micro_batches, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, optim="sgd", max_grad_norm=1e9,
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (ROWS, 8))]
    trainer = trainer_class(model, arguments, train_dataset=rows)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return entry["loss"], entry["grad_norm"]


factors = []
names = "Trainer", "compute_loss returns a mean", "compute_loss divides a sum by num_items_in_batch"
for name, trainer_class in zip(names, (Trainer, Mean, Sum), strict=True):
    (loss, norm), (summed, longer) = logged(trainer_class, 1), logged(trainer_class, ROWS)
    print(f"{name}: one batch {loss:.2f}, {norm:.2f}; four micro-batches {summed:.2f}, {longer:.2f} norm")
    factors.append((round(summed / loss, 3), round(longer / norm, 3)))
raise SystemExit(0 if factors == [(1, 1), (4, 4), (1, 1)] else "changed")
PY
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python program.py 2> /dev/null | sed -n 's/ norm$//p'
