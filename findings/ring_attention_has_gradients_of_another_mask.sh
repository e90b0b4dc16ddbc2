#!/usr/bin/env bash
# ring-attention-pytorch 0.5.20: causal attention of fewer queries than keys has a right O and the gradients of another.
#
# Where T queries follow on a cache or a memory, query i sees all of the K keys up to i + K − T, and ring_flash_attn
# computes O so, where bucket_size holds all keys. So one may expect the gradients of that O. Its backward pass is
# written by hand and does not shift the mask: there query i sees the keys up to i alone. So dQ, dK and dV are wrong by
# their own size, and the last K − T keys have no gradient. With smaller buckets O is wrong, too. All is right with as
# many queries as keys. It needs neither a ring nor a GPU, and a loss that falls more slowly is all that shows. A mask=
# of padded keys beside causal=True is left out without a word, which is right for padding behind the text, and wrong
# for padding before it.
#
# Seen with ring-attention-pytorch 0.5.20, torch 2.13.0, numpy 2.4.6 and Python 3.11, 2026-11-30, in FP64, with 24 keys.
# The norm of the error, as part of the norm of what autograd gives for a plain softmax:
#
#   24 queries: O 0.00, dQ 0.00, dK 0.00, dV 0.00; keys without a gradient 0
#   12 queries: O 0.00, dQ 0.86, dK 0.81, dV 0.82; keys without a gradient 12
#   1 query: O 0.00, dQ 0.96, dK 0.96, dV 0.99; keys without a gradient 23
#   12 queries, buckets of 8: O 1.48, dQ 1.10, dK 1.06, dV 1.54; keys without a gradient 12
#   24 queries, 4 keys masked before the text: O is that without a mask
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 ring-attention-pytorch==0.5.20 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
from functools import partial

import torch
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


def plain(q, k, v):
    """Causal attention whose last query is that of the last key; all are [batch, token, head, feature]."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def ring(q, k, v, mask=None, **options):
    return ring_flash_attn(q, k, v, mask=mask, causal=True, **options)


def results(attention, inputs, weight):
    inputs = [array.clone().requires_grad_() for array in inputs]
    output = attention(*inputs)
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), inputs)]


same = True
for queries, options in ((24, {}), (12, {}), (1, {}), (12, {"bucket_size": 8})):
    inputs = torch.randn(2, queries, 4, 8), torch.randn(2, 24, 4, 8), torch.randn(2, 24, 4, 8)
    weight = torch.randn_like(inputs[0])
    seen = results(partial(ring, **options), inputs, weight)
    pairs = zip(seen, results(plain, inputs, weight), strict=True)
    errors = [((one - other).norm() / other.norm()).item() for one, other in pairs]
    without = int((seen[3].abs().amax((0, 2, 3)) == 0).sum())
    parts = ", ".join(f"{name} {error:.2f}" for name, error in zip(("O", "dQ", "dK", "dV"), errors, strict=True))
    name = f"{queries} quer{'ies' if queries > 1 else 'y'}" + (", buckets of 8" if options else "")
    print(f"{name}: {parts}; keys without a gradient {without}")
    same &= (errors[0] > 0.1) == bool(options) and all((error > 0.1) == (queries < 24) for error in errors[1:])
    same &= without == 24 - queries
inputs, mask = [torch.randn(2, 24, 4, 8) for _ in range(3)], torch.arange(24).expand(2, 24) >= 4
ignored = torch.equal(ring(*inputs, mask), ring(*inputs))
print(f"24 queries, 4 keys masked before the text: O is {'' if ignored else 'not '}that without a mask")
raise SystemExit(0 if same and ignored else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
