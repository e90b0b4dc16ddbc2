#!/usr/bin/env bash
# transformers 5.24.0: the Trainer's losses of GPT-2 are (T − 1)/T of the model's own; those of Llama are not.
#
# A causal model predicts T − 1 of a row's T tokens, and its loss is their mean. Whoever trains it with the Trainer, or
# evaluates it there, may expect that loss. The Trainer counts the targets itself, and has the model divide the sum by
# its count. Of Llama it leaves the first token of a row out. Of GPT-2 it counts all T, so that loss, perplexity and
# gradients of rows of 8 tokens come out an eighth too small, without a word. So GPT-2 looks better beside Llama than it
# is, most with short rows, and the same rows in another length have another loss. It knows a model as causal by its
# loss_type, which GPT2LMHeadModel has none of.
#
# Seen with transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 and Python 3.11, 2026-11-29. The quotients are of the
# Trainer's evaluated loss and of its gradient norm by those of the model alone, on the same rows of T tokens:
#
#   GPT-2, T 2: loss 0.5000, gradient norm 0.5000
#   GPT-2, T 8: loss 0.8750, gradient norm 0.8750
#   GPT-2, T 64: loss 0.9844, gradient norm 0.9844
#   Llama, T 2: loss 1.0000, gradient norm 1.0000
#   Llama, T 8: loss 1.0000, gradient norm 1.0000
#   Llama, T 64: loss 1.0000, gradient norm 1.0000
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
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ROWS = 4
gpt2 = GPT2Config(
    vocab_size=32, n_embd=32, n_layer=1, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    bos_token_id=0, eos_token_id=0,
)
llama = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2,
)


def quotients(make, config, length):
    torch.manual_seed(0)
    model = make(config)
    tokens = torch.randint(32, (ROWS, length))
    own = model(input_ids=tokens, labels=tokens).loss
    own.backward()
    norm = torch.nn.utils.get_total_norm([x.grad for x in model.parameters() if x.grad is not None])
    model.zero_grad()
    arguments = TrainingArguments(
        "out", max_steps=1, logging_steps=1, learning_rate=0.0, per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        optim="sgd", max_grad_norm=1e9,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    (logged,) = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return trainer.evaluate()["eval_loss"] / own.item(), logged / norm.item()


same = True
for name, make, config in (("GPT-2", GPT2LMHeadModel, gpt2), ("Llama", LlamaForCausalLM, llama)):
    for length in (2, 8, 64):
        loss, norm = quotients(make, config, length)
        print(f"{name}, T {length}: loss {loss:.4f}, gradient norm {norm:.4f}")
        expected = 1 if name == "Llama" else (length - 1) / length
        same &= abs(loss - expected) < 1e-3 and abs(norm - expected) < 1e-3
raise SystemExit(0 if same else "changed")
PY
HF_HUB_OFFLINE=1 venv/bin/python program.py 2>/dev/null | grep "gradient norm"
