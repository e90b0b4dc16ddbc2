#!/usr/bin/env bash
# torchmetrics 1.9.0: metrics of a MetricCollection that agree on the first batch are one metric from then on.
#
# A collection is there to update several metrics at once. So one may expect of each the value that it has alone. After
# the first batch the collection compares the states: those that are equal it takes for one kind that needs one update,
# as precision and recall do. But accuracies at two thresholds, or with and without an ignored class, also have equal
# states if the first batch holds no prediction between the thresholds, or no such class. Small batches and sure models
# make that likely. The rest of the epoch updates one of them alone, and the other shows its value, so that the result
# goes by the order of the batches. Nothing warns, and reset() keeps the groups for all later epochs. Pass
# compute_groups=False. Issue 2916 of torchmetrics reports it for BLEU scores.
#
# Seen with torchmetrics 1.9.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Two batches of three, in this order
# and in the other; the accuracies at thresholds 0.5 and 0.9, then of all classes and of all but class 0:
#
#   thresholds, alone: 0.667, 0.833; collection: 0.667, 0.667; other order: 0.667, 0.833
#   ignored class, alone: 0.667, 0.500; collection: 0.667, 0.667; other order: 0.667, 0.500
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torchmetrics==1.9.0 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
from torch import tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy

CASES = {
    "thresholds": (
        lambda: {"first": BinaryAccuracy(threshold=0.5), "second": BinaryAccuracy(threshold=0.9)},
        (tensor([0.01, 0.99, 0.95]), tensor([0, 1, 1])),
        (tensor([0.6, 0.7, 0.8]), tensor([0, 1, 0])),
    ),
    "ignored class": (
        lambda: {
            "first": MulticlassAccuracy(3, average="micro"),
            "second": MulticlassAccuracy(3, average="micro", ignore_index=0),
        },
        (tensor([1, 2, 2]), tensor([1, 2, 1])),
        (tensor([0, 0, 2]), tensor([0, 0, 1])),
    ),
}


def alone(make, batches):
    values = {}
    for name, metric in make().items():
        for batch in batches:
            metric.update(*batch)
        values[name] = round(float(metric.compute()), 3)
    return values["first"], values["second"]


def together(make, batches):
    collection = MetricCollection(make())
    for batch in batches:
        collection.update(*batch)
    values = {name: round(float(value), 3) for name, value in collection.compute().items()}
    return values["first"], values["second"]


seen = {}
for name, (make, one, other) in CASES.items():
    seen[name] = alone(make, (one, other)), together(make, (one, other)), together(make, (other, one))
    shown = (", ".join(f"{value:.3f}" for value in values) for values in seen[name])
    print("{}, alone: {}; collection: {}; other order: {}".format(name, *shown))
merged = all(right == turned and right != wrong and wrong[0] == wrong[1] for right, wrong, turned in seen.values())
raise SystemExit(0 if merged else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
