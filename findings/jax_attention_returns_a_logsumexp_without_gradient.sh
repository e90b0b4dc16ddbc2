#!/usr/bin/env bash
# jax 0.10.2: the logsumexp of jax.nn.dot_product_attention has no gradient, so that merged attentions train wrongly.
#
# With return_residual=True the call returns the logsumexp L of each row beside O. With it one merges the attentions to
# two parts of the keys, as ring attention does, or makes a z-loss of the scores. So one may expect L to be a function
# of q and k. Its gradient is cut off: a loss of L trains nothing, and the merged O, which is right to the last bits,
# has a wrong dQ and dK, while dV is right. Nothing warns. And for BF16 inputs L is rounded to BF16, though the softmax
# is in FP32. An L that one computes oneself, beside the same O, gives the right gradients.
#
# Seen with jax 0.10.2 and Python 3.11 on a CPU, 2026-11-29. Of O and gradients |a − b| / |b| from the attention to all
# keys at once:
#
#   L computed, merged: O 0.0000, dQ 0.0000, dK 0.0000, dV 0.0000
#   L computed: norm of the gradient of ΣL² by q 27.2929
#   L returned, merged: O 0.0000, dQ 0.4150, dK 0.3976, dV 0.0000
#   L returned: norm of the gradient of ΣL² by q 0.0000
#   dtype of L of BF16 inputs: bfloat16
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy
cat > "$folder/program.py" <<'PY'
import jax
import jax.numpy as jnp
from jax.nn import dot_product_attention

*qkv, weights = (jax.random.normal(key, (1, 16, 2, 8)) for key in jax.random.split(jax.random.key(0), 4))


def returned(q, k, v):
    return dot_product_attention(q, k, v, return_residual=True)


def computed(q, k, v):
    scores = jnp.einsum("bthd,bshd->bths", q, k) / q.shape[-1] ** 0.5
    return dot_product_attention(q, k, v), jax.nn.logsumexp(scores, axis=-1)


def merged(attend, q, k, v):
    (out, first), (other, second) = attend(q, k[:, :8], v[:, :8]), attend(q, k[:, 8:], v[:, 8:])
    whole = jnp.logaddexp(first, second)
    return out * jnp.exp(first - whole)[..., None] + other * jnp.exp(second - whole)[..., None]


def results(attend):
    gradients = jax.grad(lambda *of: (attend(*of) * weights).sum(), argnums=(0, 1, 2))(*qkv)
    return attend(*qkv), *gradients


def size(x):
    return float(jnp.linalg.norm(x.astype(jnp.float32)))


def z_loss(attend, q):
    return (attend(q, *qkv[1:])[1] ** 2).sum()


exact = results(dot_product_attention)
ok = True
for name, attend, right in (("L computed", computed, True), ("L returned", returned, False)):
    apart = [size(a - b) / size(b) for a, b in zip(results(lambda *of, by=attend: merged(by, *of)), exact)]
    print(f"{name}, merged:", ", ".join(f"{x} {far:.4f}" for x, far in zip(("O", "dQ", "dK", "dV"), apart)))
    gradient = size(jax.grad(z_loss, argnums=1)(attend, qkv[0]))
    print(f"{name}: norm of the gradient of ΣL² by q {gradient:.4f}")
    ok &= apart[0] < 1e-5 and apart[3] < 1e-5 and (max(apart[1:3]) < 1e-5) == right and (gradient > 0.1) == right
dtype = returned(*(x.astype(jnp.bfloat16) for x in qkv))[1].dtype
print(f"dtype of L of BF16 inputs: {dtype}")
raise SystemExit(0 if ok and dtype == jnp.bfloat16 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
