#!/usr/bin/env bash
# liger-kernel 0.8.5: behind LigerCrossEntropyLoss the logits hold its gradient, and all that reads them is wrong.
#
# LigerCrossEntropyLoss takes the place of nn.CrossEntropyLoss, and has its loss and gradients. So one may expect the
# logits to be what they were: for the accuracy, the entropy, or a second loss. In training its kernel writes the
# gradient over them, which is how it saves memory. Where one reads them then, the target has the lowest number, as its
# gradient is negative: a model that is always right has an accuracy of 0, and its entropy is that of a uniform guess. A
# second loss behind it has a wrong value and wrong gradients. PyTorch's check for tensors that were overwritten does not
# see a Triton kernel's writes: nothing warns or raises. The README names in-place replacement, and the class does not.
# Reported as Liger-Kernel issue 272. Read the logits in front of the loss, or hand it a clone. Without gradients they
# are left alone, so that evaluations are right.
#
# Seen with liger-kernel 0.8.5, triton 3.6.0 in its interpreter, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. 64
# rows of 32 logits, whose largest is that of the target: what is read behind the loss, and the norm of the logits'
# gradient from loss + entropy:
#
#   CrossEntropyLoss: loss 0.0234, accuracy 1.00, entropy 0.165, gradient 0.0262
#   LigerCrossEntropyLoss: loss 0.0234, accuracy 0.00, entropy 3.466, gradient 0.0043
#   LigerCrossEntropyLoss of a clone: loss 0.0234, accuracy 1.00, entropy 0.165, gradient 0.0262
#   LigerCrossEntropyLoss, no gradients: loss 0.0234, accuracy 1.00, entropy 0.165
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 triton==3.6.0 "numpy<2.4" packaging
"$folder/venv/bin/pip" install --quiet --no-deps liger-kernel==0.8.5  # which asks for more than this uses
cat > "$folder/program.py" <<'PY'
import torch
from liger_kernel.transformers import LigerCrossEntropyLoss
from torch import nn


def read(loss_of, training):
    torch.manual_seed(0)
    targets = torch.randint(0, 32, (64,))
    weights = torch.randn(64, 32)
    weights[torch.arange(64), targets] += 8
    weights.requires_grad_(training)
    logits = weights * 1  # as a layer's output
    loss = loss_of(logits, targets)
    accuracy = (logits.argmax(-1) == targets).double().mean()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    norm = torch.autograd.grad(loss + entropy, weights)[0].norm() if training else torch.zeros(())
    return [number.item() for number in (loss, accuracy, entropy, norm)]


LOSSES = {
    "CrossEntropyLoss": nn.CrossEntropyLoss(),
    "LigerCrossEntropyLoss": LigerCrossEntropyLoss(),
    "LigerCrossEntropyLoss of a clone": lambda logits, targets: LigerCrossEntropyLoss()(logits.clone(), targets),
}
seen = []
for name, loss_of in LOSSES.items():
    seen.append(read(loss_of, training=True))
    print("{}: loss {:.4f}, accuracy {:.2f}, entropy {:.3f}, gradient {:.4f}".format(name, *seen[-1]))
evaluated = read(LOSSES["LigerCrossEntropyLoss"], training=False)
print("LigerCrossEntropyLoss, no gradients: loss {:.4f}, accuracy {:.2f}, entropy {:.3f}".format(*evaluated[:3]))


def close(one, other):
    return all(abs(a - b) < 1e-4 for a, b in zip(one, other, strict=True))


right, liger, cloned = seen
same = close(right, cloned) and close(right[:3], evaluated[:3]) and abs(right[0] - liger[0]) < 1e-5
same &= right[1] == 1 and liger[1] == 0 and liger[2] > 3.4 and not close(right[3:], liger[3:])
raise SystemExit(0 if same else "changed")
PY
TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES="" "$folder/venv/bin/python" -W ignore "$folder/program.py" 2> /dev/null
