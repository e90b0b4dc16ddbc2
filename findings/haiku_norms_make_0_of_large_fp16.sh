#!/usr/bin/env bash
# dm-haiku 0.0.17: LayerNorm and RMSNorm of FP16 activations of a few hundred are 0, where flax and equinox have 1.
#
# A norm divides activations by their own size, so that the result does not depend on it: so one may expect the same of
# 300 times the activations, in FP16, too, which goes to 65,504. Haiku squares them in their own dtype. The mean square
# of 256 is above 65,504 and becomes infinite, its inverse root is 0, and so is the norm: a layer is silently off, its
# gradients are 0, and the residual stream passes by as if it were fine. Nothing is NaN, so that no dynamic loss scale
# skips the step, and nothing warns. RMSNorm loses rows from a standard deviation of 100 on, for single numbers
# overflow. BF16 has no such limit. flax and equinox take the square in FP32. Set a policy of FP32 for the norms.
#
# Seen with dm-haiku 0.0.17, flax 0.12.8, equinox 0.13.8, jax 0.10.2 and Python 3.11 on a CPU, 2026-11-30. Normal
# activations in FP16 times a factor: the standard deviation of the norm, to be 1; then the gradients' norm times the
# factor, to be the same for all:
#
#   haiku LayerNorm: 1: 1.00, 100: 1.00, 300: 0.00, 1000: 0.00; gradients 1: 32.01, 100: 32.01, 300: 0.00, 1000: 0.00
#   haiku RMSNorm: 1: 1.00, 100: 0.66, 300: 0.00, 1000: 0.00; gradients 1: 32.03, 100: 21.62, 300: 0.00, 1000: 0.00
#   flax RMSNorm: 1: 1.00, 100: 1.00, 300: 1.00, 1000: 1.00; gradients 1: 32.03, 100: 32.03, 300: 32.03, 1000: 32.03
#   equinox RMSNorm: 1: 1.00, 100: 1.00, 300: 1.00, 1000: 1.00; gradients 1: 32.03, 100: 32.03, 300: 32.03, 1000: 32.03
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet dm-haiku==0.0.17 flax==0.12.8 equinox==0.13.8 jax==0.10.2 jaxlib==0.10.2 numpy
cat > "$folder/program.py" <<'PY'
import equinox
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

WIDTH, FACTORS = 64, (1, 100, 300, 1000)
normal = jax.random.normal(jax.random.key(0), (16, WIDTH))


def of_haiku(make):
    norm = hk.without_apply_rng(hk.transform(lambda x: make()(x)))
    parameters = norm.init(jax.random.key(1), normal.astype(jnp.float16))
    return lambda x: norm.apply(parameters, x)


def deviation(norm, factor):
    return float(norm((factor * normal).astype(jnp.float16)).astype(jnp.float32).std())


def gradient(norm, factor):
    def loss(x):
        return (norm(x).astype(jnp.float32) * normal[::-1]).sum()

    return float(jnp.linalg.norm(factor * jax.grad(loss)((factor * normal).astype(jnp.float16)).astype(jnp.float32)))


half = {"dtype": jnp.float16, "param_dtype": jnp.float16}
norms = {
    "haiku LayerNorm": of_haiku(lambda: hk.LayerNorm(-1, create_scale=True, create_offset=True)),
    "haiku RMSNorm": of_haiku(lambda: hk.RMSNorm(-1)),
    "flax RMSNorm": nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0), **half),
    "equinox RMSNorm": jax.vmap(equinox.nn.RMSNorm(WIDTH, dtype=jnp.float16)),
}
seen = {}
for name, norm in norms.items():
    seen[name] = [deviation(norm, factor) for factor in FACTORS], [gradient(norm, factor) for factor in FACTORS]
    pairs = [zip(FACTORS, row, strict=True) for row in seen[name]]
    said = [", ".join(f"{factor}: {value:.2f}" for factor, value in row) for row in pairs]
    print(f"{name}: {said[0]}; gradients {said[1]}")
others = [*seen["flax RMSNorm"][0], *seen["equinox RMSNorm"][0]]
right = max(abs(value - 1) for value in others) < 0.01
wrong = all(seen[name][row][2:] == [0, 0] for name in ("haiku LayerNorm", "haiku RMSNorm") for row in (0, 1))
raise SystemExit(0 if right and wrong and seen["haiku RMSNorm"][0][1] < 0.95 else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
