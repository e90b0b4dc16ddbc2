#!/usr/bin/env bash
# PyTorch 2.13.0: with BF16 weights and nesterov=False, torch.optim.Muon overwrites its momentum at each step.
#
# Muon's momentum is a mean of gradients, and its step does not depend on their size. So one may expect a momentum of
# 0.95 to forget in the same number of steps, whatever the gradients' size, in BF16 as in FP32. The mean is cast to BF16
# and divided by its norm in place. A mean that is BF16 already is not copied by that cast: the momentum itself has
# norm 1 after each step. A small gradient adds less to it than BF16 holds, and the weight goes the way of the first
# gradients for good. A large one replaces it at once. Nothing warns. With nesterov=True, the default, another tensor
# is divided.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-29; with torch 2.14.1, too. After 30 equal gradients come
# those of the other sign. After so many of these the weight turns round:
#
#   float32, nesterov False: gradients of 0.001: 12, of 10: 12
#   bfloat16, nesterov True: gradients of 0.001: 11, of 10: 11
#   bfloat16, nesterov False: gradients of 0.001: more than 500, of 10: 1
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch

MOST = 500


def turns_after(dtype, nesterov, size):
    torch.manual_seed(0)
    gradient = (size * torch.randn(4, 4)).to(dtype)
    weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype))
    optimizer = torch.optim.Muon([weight], lr=0.01, weight_decay=0.0, momentum=0.95, nesterov=nesterov)
    for step in range(30 + MOST):
        weight.data.zero_()  # so that it holds this step alone
        weight.grad = gradient if step < 30 else -gradient
        optimizer.step()
        if step >= 30 and float((weight.detach() * gradient).sum()) > 0:
            return step - 29
    return MOST + 1


seen = []
for dtype, nesterov in ((torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)):
    small, large = turns_after(dtype, nesterov, 0.001), turns_after(dtype, nesterov, 10.0)
    small_as_text = str(small) if small <= MOST else f"more than {MOST}"
    print(f"{str(dtype)[6:]}, nesterov {nesterov}: gradients of 0.001: {small_as_text}, of 10: {large}")
    seen.append((small, large))
sound = all(10 <= small == large <= 14 for small, large in seen[:2])
raise SystemExit(0 if sound and seen[2] == (MOST + 1, 1) else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
