#!/usr/bin/env bash
# PyTorch 2.13.0: on a CPU, rows of attention that a mask of -1e9 or finfo.min closes have T times their gradient.
#
# A mask that adds such a number in place of -inf, as many models have it, makes no NaN of a row that sees no key, as
# one of padding on the left: its O is the mean of v. So one may expect the gradients of a mean, dO / T for each of T
# keys. The math backend has them. The flash backend, which a CPU takes by default, has the same O, and T times the
# gradient: it keeps L = -1e9 + log T, which FP32 rounds to -1e9, and exp(S − L) in its backward pass is 1, not 1/T.
# Where dO of such a row is not 0, as after a pooling over all rows, dQ, dK and dV of the whole sequence are far off.
# Nothing is NaN, and the loss is right. With a bool mask or -inf O is 0 in that row, and it adds nothing to gradients.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-29; with torch 2.14.1, too. Causal attention of 64 tokens in
# FP32, of which the mask closes row 0, too: the weight of a key in the dV of that row, then |a − b| / |b| from FP64:
#
#   mask -1e+04, math: weight in dV 0.0063; O 0.00, dQ 0.00, dK 0.00, dV 0.00
#   mask -1e+04, flash: weight in dV 0.0063; O 0.00, dQ 0.00, dK 0.00, dV 0.00
#   mask -1e+09, math: weight in dV 0.0156; O 0.04, dQ 0.04, dK 0.04, dV 0.05
#   mask -1e+09, flash: weight in dV 1.0000; O 0.04, dQ 3.12, dK 3.56, dV 3.22
#   mask -3e+38, math: weight in dV 0.0156; O 0.00, dQ 0.00, dK 0.00, dV 0.00
#   mask -3e+38, flash: weight in dV 1.0000; O 0.00, dQ 3.10, dK 3.55, dV 3.22
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TOKENS = 64
torch.manual_seed(0)
*qkv, grad_out = (torch.randn(1, 1, TOKENS, 16) for _ in range(4))
seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
seen[0] = False


def plain(q, k, v, attn_mask):
    return (q @ k.mT / 4 + attn_mask).softmax(-1) @ v


def results(attend, dtype, mask):
    inputs = [x.to(dtype).requires_grad_() for x in qkv]
    out = attend(*inputs, attn_mask=mask.to(dtype))
    of_all = torch.autograd.grad(out, inputs, grad_out.to(dtype), retain_graph=True)
    weight = torch.autograd.grad(out[0, 0, 0].sum(), inputs[2])[0][0, 0, -1, 0]  # dO is 1 in row 0, 0 elsewhere
    return (out.detach(), *of_all), float(weight)


ok = True
for value in (-1e4, -1e9, torch.finfo(torch.float32).min):
    mask = torch.zeros(TOKENS, TOKENS).masked_fill(~seen, value)
    exact, _ = results(plain, torch.float64, mask)
    weights = []
    for name, backend in (("math", SDPBackend.MATH), ("flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            found, weight = results(scaled_dot_product_attention, torch.float32, mask)
        out, *gradients = (float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact))
        of_each = ", ".join(f"{of} {far:.2f}" for of, far in zip(("dQ", "dK", "dV"), gradients))
        print(f"mask {value:.0e}, {name}: weight in dV {weight:.4f}; O {out:.2f}, {of_each}", flush=True)
        weights.append(weight)
        wrong = name == "flash" and value <= -1e9
        ok &= out < 0.1 and (min(gradients) > 1 if wrong else max(gradients) < 0.1)
    ok &= abs(weights[1] / weights[0] - (TOKENS if wrong else 1)) < 0.01
raise SystemExit(0 if ok else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
