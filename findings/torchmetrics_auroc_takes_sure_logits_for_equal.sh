#!/usr/bin/env bash
# torchmetrics 1.9.0: the AUROC of logits above 17 is 0.5, though they part the classes without an error.
#
# The area under the ROC curve asks for the order of predictions alone, and torchmetrics takes logits. So one may
# expect that a sigmoid, or a constant that is added, changes nothing. torchmetrics takes the sigmoid of logits first:
# in FP32 that is 1 from 17 on, so that all sure logits are one number. A ranking without an error becomes one by
# chance, and so does the average precision; a bias of the last layer changes the figure of a real one. Whether a batch
# holds logits it decides batch by batch, by whether a number lies outside of 0 to 1: logits of a small batch that all
# lie within stay as they are, and stand above the sigmoids of larger ones. torcheval ranks the logits. Nothing warns.
#
# Seen with torchmetrics 1.9.0, torcheval 0.0.7, torch 2.13.0 and Python 3.11, 2026-11-30. Logits 18, 19 of one class
# and 20, 25 of the other; 10,000 logits of standard deviation 4, seed 0, to which 0 and 15 are added; then logits 0.9
# and 0.2 of one class and 1.5 and 1.1 of the other, in one batch and in two:
#
#   sure logits: AUROC 0.500, average precision 0.500; torcheval 1.000
#   real logits, bias 0: AUROC 0.9341; torcheval 0.9341
#   real logits, bias 15: AUROC 0.9250; torcheval 0.9341
#   in one batch: AUROC 1.000; in two: 0.500
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torchmetrics==1.9.0 torcheval==0.0.7 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from torcheval.metrics.functional import binary_auroc as ranked
from torchmetrics.classification import BinaryAUROC
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

logits, labels = torch.tensor([18.0, 19, 20, 25]), torch.tensor([0, 0, 1, 1])
sure = [y.item() for y in (binary_auroc(logits, labels), binary_average_precision(logits, labels), ranked(logits, labels))]
print("sure logits: AUROC {:.3f}, average precision {:.3f}; torcheval {:.3f}".format(*sure))

torch.manual_seed(0)
logits = 4 * torch.randn(10_000)
labels = (logits + 2 * torch.randn(10_000) > 0).long()
real = [(binary_auroc(logits + bias, labels).item(), ranked(logits + bias, labels).item()) for bias in (0, 15)]
for bias, found in zip((0, 15), real, strict=True):
    print("real logits, bias {}: AUROC {:.4f}; torcheval {:.4f}".format(bias, *found))

together, apart = BinaryAUROC(), BinaryAUROC()
batches = [(torch.tensor([0.9, 0.2]), torch.tensor([0, 0])), (torch.tensor([1.5, 1.1]), torch.tensor([1, 1]))]
for batch in batches:
    apart.update(*batch)
together.update(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
split = together.compute().item(), apart.compute().item()
print("in one batch: AUROC {:.3f}; in two: {:.3f}".format(*split))
same = sure == [0.5, 0.5, 1] and real[0][0] - real[1][0] > 0.005 and abs(real[0][1] - real[1][1]) < 1e-4
raise SystemExit(0 if same and split == (1, 0.5) else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
