#!/usr/bin/env bash
# flax 0.12.8: nnx.dot_product_attention takes its softmax in BF16 where dropout is set, also in an evaluation.
#
# With deterministic=True there is no dropout. So one may expect the same O in an evaluation with dropout_rate 0 and
# 0.1, and the same O where a module keeps the weights to be looked at. With dropout_rate=0 and no module the call goes
# to jax.nn.dot_product_attention, whose scores and softmax are FP32 for BF16 inputs. Otherwise they are BF16, without a
# word, and O is up to six times as far from FP32. So a look at the weights changes what is looked at, and two trainings
# that differ in dropout differ in precision, too.
#
# Seen with flax 0.12.8, jax 0.10.2 and Python 3.11 on a CPU, 2026-11-29. 512 tokens, q, k and v in BF16, of which the
# scores have a standard deviation of 1, 4 and 9 nats: the error of O is |O − O of FP32| / |O of FP32|:
#
#   scores of 1: dropout_rate 0 0.0024, dropout_rate 0.1 0.0055, weights kept 0.0055
#   scores of 4: dropout_rate 0 0.0023, dropout_rate 0.1 0.0106, weights kept 0.0106
#   scores of 9: dropout_rate 0 0.0021, dropout_rate 0.1 0.0131, weights kept 0.0131
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet flax==0.12.8 jax==0.10.2 jaxlib==0.10.2 numpy
cat > "$folder/program.py" <<'PY'
import jax
import jax.numpy as jnp
from flax import nnx


class Looked(nnx.Module):
    pass


def error(size, **options):
    q, k, v = (jax.random.normal(key, (1, 512, 2, 64)) for key in jax.random.split(jax.random.key(0), 3))
    inputs = [x.astype(jnp.bfloat16) for x in (size * q, size * k, v)]
    exact = nnx.dot_product_attention(*(x.astype(jnp.float32) for x in inputs))
    out = nnx.dot_product_attention(*inputs, deterministic=True, **options).astype(jnp.float32)
    return float(jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact))


ok = True
for size in (1.0, 2.0, 3.0):
    plain, dropped, looked = error(size), error(size, dropout_rate=0.1), error(size, module=Looked())
    spread = f"scores of {size**2:.0f}"
    print(f"{spread}: dropout_rate 0 {plain:.4f}, dropout_rate 0.1 {dropped:.4f}, weights kept {looked:.4f}")
    ok &= plain < 0.004 and dropped == looked and dropped > 2 * plain
raise SystemExit(0 if ok else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
