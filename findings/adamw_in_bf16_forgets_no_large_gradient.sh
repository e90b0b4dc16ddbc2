#!/usr/bin/env bash
# PyTorch 2.13.0: AdamW on BF16 weights never forgets a large gradient, and fused and foreach end far apart.
#
# Weights in BF16 are known to lose small steps. The moments have the weights' dtype, too. With beta2 = 0.999 the second
# one is to lose 0.1 % a step, less than half of the distance of two BF16 numbers: it stands still. So one gradient of
# 1 among those of 0.01 divides all later steps by three, for good, where with FP32 weights its trace halves each 693
# steps. And fused and foreach, which are the same up to the last bits in FP32, round at other places: where gradients
# grow, one rounds the increments away that the other takes, and the weight ends elsewhere.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-29. Gradients of 0.01, the first of them 1: the root of the
# second moment, without its first steps 0.01; then one weight with gradients that grow from 1 to 201 in 1,000 steps:
#
#   after 10 steps: fp32 0.0315, bf16 0.0316
#   after 5000 steps: fp32 0.0103, bf16 0.0316
#   weight with growing gradients: fp32 fused -15.52, foreach -15.52; bf16 fused -8.00, foreach -4.56
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch


def trained(gradients, dtype, lr, **form):
    weight = torch.nn.Parameter(torch.zeros(64, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=lr, weight_decay=0.0, **form)
    roots = []
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        roots.append(float(optimizer.state[weight]["exp_avg_sq"][0]) ** 0.5)
    return roots, weight[0].item()


spike = [1.0] + [0.01] * 4999
exact, rounded = (trained(spike, dtype, lr=1e-3, fused=True)[0] for dtype in (torch.float32, torch.bfloat16))
for steps in (10, 5000):
    print(f"after {steps} steps: fp32 {exact[steps - 1]:.4f}, bf16 {rounded[steps - 1]:.4f}")
growing = [1 + step / 5 for step in range(1000)]
ends = {}
for dtype in (torch.float32, torch.bfloat16):
    for form in ("fused", "foreach"):
        ends[dtype, form] = trained(growing, dtype, lr=1e-2, **{form: True})[1]
told = ["{:.2f}, foreach {:.2f}".format(*(ends[dtype, form] for form in ("fused", "foreach")))
        for dtype in (torch.float32, torch.bfloat16)]
print(f"weight with growing gradients: fp32 fused {told[0]}; bf16 fused {told[1]}")
same = rounded[-1] == rounded[9] > 2 * exact[-1]
apart = abs(ends[torch.bfloat16, "fused"] - ends[torch.bfloat16, "foreach"])
close = abs(ends[torch.float32, "fused"] - ends[torch.float32, "foreach"])
raise SystemExit(0 if same and apart > 1 and close < 0.01 else "changed")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/program.py"
