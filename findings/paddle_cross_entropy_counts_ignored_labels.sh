#!/usr/bin/env bash
# paddlepaddle 3.3.1: cross_entropy divides by labels of -100, too, so that padding makes loss and gradients smaller.
#
# ignore_index is -100 by default, as in PyTorch, and such labels have a loss of 0. So one may expect the mean of the
# others. For a negative ignore_index cross_entropy and CrossEntropyLoss divide by the number of all labels: the loss
# of a batch that is half padding is half of the right one, and so are its gradients. A loss of 4 nats is 2, and its
# perplexity 7 in place of 55. With ignore_index=0, and with a weight of 1 for each class, the mean is right. Nothing
# warns. The manual says that a negative ignore_index ignores no label. Issues 47418 and 48663 report it, and pull
# request 76033 is to mend it. Take reduction="sum", and divide by the number of labels that count.
#
# Seen with paddlepaddle 3.3.1, numpy 2.4.6 and Python 3.11 on a CPU, 2026-11-30. 1,000 random logits of 5 classes: the
# loss divided by the mean over the labels that count, in FP64, where 0, 25, 50 and 90 % of them are ignored:
#
#   cross_entropy, -100: 1, 0.75, 0.5, 0.1
#   CrossEntropyLoss, -100: 1, 0.75, 0.5, 0.1
#   cross_entropy, 0: 1, 1, 1, 1
#   cross_entropy with weights of 1, -100: 1, 1, 1, 1
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet paddlepaddle==3.3.1 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import numpy as np
import paddle
from paddle.nn import functional

paddle.set_device("cpu")
draws = np.random.default_rng(0)
logits = draws.normal(size=(1000, 5))
logarithms = logits - np.log(np.exp(logits).sum(1, keepdims=True))


def ratio(loss, ignored, share):
    labels = draws.integers(1, 5, size=len(logits))
    labels[: int(share * len(labels))] = ignored
    kept = labels != ignored
    right = -logarithms[kept, labels[kept]].mean()
    return float(loss(paddle.to_tensor(logits), paddle.to_tensor(labels), ignored)) / right


def plain(scores, labels, ignored):
    return functional.cross_entropy(scores, labels, ignore_index=ignored)


def module(scores, labels, ignored):
    return paddle.nn.CrossEntropyLoss(ignore_index=ignored)(scores, labels)


def weighted(scores, labels, ignored):
    return functional.cross_entropy(scores, labels, weight=paddle.ones([5], "float64"), ignore_index=ignored)


seen = {}
for name, loss, ignored in (
    ("cross_entropy, -100", plain, -100),
    ("CrossEntropyLoss, -100", module, -100),
    ("cross_entropy, 0", plain, 0),
    ("cross_entropy with weights of 1, -100", weighted, -100),
):
    seen[name] = [round(ratio(loss, ignored, share), 4) for share in (0, 0.25, 0.5, 0.9)]
    print(f"{name}: " + ", ".join(f"{one:g}" for one in seen[name]))
wrong, right = [1, 0.75, 0.5, 0.1], [1] * 4
raise SystemExit(0 if list(seen.values()) == [wrong, wrong, right, right] else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
