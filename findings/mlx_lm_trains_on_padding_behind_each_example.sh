#!/usr/bin/env bash
# mlx-lm 0.32.2: fine-tuning and its validation count one token of padding behind each example, token 0, as a target.
#
# Examples of one batch are padded with token 0, and the loss has a mask. So one may expect the mean over an example's
# own targets: L − 1 of L tokens, or the tokens of the answer with --mask-prompt. The mask of default_loss counts the
# targets from 1 and lets them pass up to number L, and target L is the first token of padding. So a model is taught to
# write token 0, whatever that is, behind its end-of-text token; both losses that are printed contain it; and where an
# answer has two tokens, as "yes" and the end, it has a third of the loss. An example that max_seq_length cuts has no
# padding, and is counted rightly.
#
# Seen with mlx 0.32.4, mlx-lm 0.32.2, numpy 2.4.6 and Python 3.11, 2026-11-30. The model gives token 0 a logit 8 below
# the others. "Its own" loss is the mean in FP64 over the targets that an example has:
#
#   a text of 4 tokens: loss 5.863 over 4 targets; its own: 3.851 over 3
#   an answer of 2 tokens: loss 6.541 over 3 targets; its own: 3.862 over 2
#   a text that is cut: loss 3.851 over 3 targets; its own: 3.851 over 3
#   evaluate() of both answers: 6.503; their own: 3.804
#   probability of token 0 behind the end: 0.00001, after 60 steps of train() 0.989
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.tuner.trainer import TrainingArgs, default_loss, evaluate, iterate_batches, train

VOCABULARY, END = 50, 1


class Bigrams(nn.Module):
    def __init__(self):
        super().__init__()
        table = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32) * 0.1
        table[:, 0] = -8
        self.table = mx.array(table)
        self.layers = []

    def __call__(self, tokens):
        return self.table[tokens]


def own(model, examples):
    """Mean loss in FP64 over the targets that the examples have, and their number."""
    table = np.array(model.table, np.float64)
    logarithms = table - np.log(np.exp(table).sum(1, keepdims=True))
    pairs = [pair for tokens, start in examples for pair in list(zip(tokens, tokens[1:]))[max(start - 1, 0) :]]
    return np.mean([-logarithms[pair] for pair in pairs]), len(pairs)


model, same = Bigrams(), True
text, answers = [7, 8, 9, END], [([5, 6, 7, 20, END], 3), ([9, 4, 3, 21, END], 3)]
for what, example, length, excess in (
    ("a text of 4 tokens", (text, 0), 2048, 1),
    ("an answer of 2 tokens", answers[0], 2048, 1),
    ("a text that is cut", (text, 0), 4, 0),
):
    loss, targets = (value.item() for value in default_loss(model, *next(iterate_batches([example], 1, length))))
    expected, number = own(model, [example])
    print(f"{what}: loss {loss:.3f} over {targets} targets; its own: {expected:.3f} over {number}")
    same &= targets == number + excess and (abs(loss - expected) > 1 if excess else abs(loss - expected) < 1e-3)
loss, (expected, _) = evaluate(model, answers, 1, -1), own(model, answers)
print(f"evaluate() of both answers: {loss:.3f}; their own: {expected:.3f}")
same &= loss > expected + 1
before = mx.softmax(model.table[END])[0].item()
train(model, optim.SGD(5.0), answers, args=TrainingArgs(2, 60, steps_per_report=60, steps_per_save=1000))
after = mx.softmax(model.table[END])[0].item()
print(f"probability of token 0 behind the end: {before:.5f}, after 60 steps of train() {after:.3f}")
raise SystemExit(0 if same and before < 1e-4 < 0.9 < after else "changed")
PY
cd "$folder"
venv/bin/python program.py | grep -E "its own|their own|behind the end"
