#!/usr/bin/env bash
# transformers 5.24.0: under gradient accumulation the Trainer counts a Mixtral's auxiliary loss once a micro-batch.
#
# Gradient accumulation is to train as the whole batch does. The Trainer sees to it that the loss is divided by the
# targets of all micro-batches. A mixture of experts adds an auxiliary loss, which keeps its experts evenly used, times
# router_aux_loss_coef. So one may expect that coefficient to have one meaning. The auxiliary loss is one of a
# micro-batch, is divided by nothing, and adds up: with four micro-batches it weighs four times as much, in the loss
# that is logged and in the gradients. So whoever halves the batch that fits, and accumulates two, trains another
# model. Nothing warns. A coefficient divided by the micro-batches gives nearly the gradients of the whole batch.
#
# Seen with transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Four equal rows,
# so that each micro-batch has the loss of the whole batch: the loss that is logged, and the gradient's norm:
#
#   coefficient 0: one batch 3.45, 2.09; four micro-batches 3.45, 2.09
#   coefficient 1: one batch 5.45, 2.19; four micro-batches 11.48, 3.17
#   coefficient 1, divided by 4: four micro-batches 5.45, 2.19
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

ROWS = 4


def logged(coefficient, micro_batches):
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=coefficient,
    ))
    arguments = TrainingArguments(
        "out", max_steps=1, logging_steps=1, learning_rate=0.0, per_device_train_batch_size=ROWS // micro_batches,
        gradient_accumulation_steps=micro_batches, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, optim="sgd", max_grad_norm=1e9,
    )
    row = torch.randint(32, (16,))
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row}] * ROWS)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return entry["loss"], entry["grad_norm"]


def said(pair):
    return f"{pair[0]:.2f}, {pair[1]:.2f}"


without = logged(0.0, 1), logged(0.0, 4)
print(f"coefficient 0: one batch {said(without[0])}; four micro-batches {said(without[1])} norm")
whole, accumulated = logged(1.0, 1), logged(1.0, 4)
print(f"coefficient 1: one batch {said(whole)}; four micro-batches {said(accumulated)} norm")
divided = logged(0.25, 4)
print(f"coefficient 1, divided by 4: four micro-batches {said(divided)} norm")
auxiliary, counted = whole[0] - without[0][0], accumulated[0] - without[0][0]
same = abs(without[0][0] - without[1][0]) < 1e-3 and abs(counted / auxiliary - 4) < 0.01
raise SystemExit(0 if same and abs(divided[0] - whole[0]) < 1e-3 and abs(divided[1] - whole[1]) < 1e-3 else "changed")
PY
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python program.py 2> /dev/null | sed -n 's/ norm$//p'
