#!/usr/bin/env bash
# optax 0.2.8: inject_hyperparams makes NaN of the first step of Adam with BF16 weights, which trains well without it.
#
# inject_hyperparams keeps the hyperparameters in the optimiser's state, so that one can read or change the learning
# rate of a training. So one may expect the steps of the optimiser within. It also rounds every number that the
# optimiser is given, and every default, to the dtype of the weights, where Adam alone takes them in FP32. beta2 = 0.999
# is 1 in BF16: the second moment never takes a gradient in, and its bias correction divides 0 by 1 - 1. All weights are
# NaN after one step, at finite gradients and a finite loss. Nothing warns. It looks like an explosion, and lies in no
# gradient. In FP32 and FP16, and with one leaf of FP32 among the weights, the steps are right.
# hyperparam_dtype=jnp.float32 repairs it.
#
# Seen with optax 0.2.8, jax 0.10.2 and Python 3.11 on a CPU, 2026-11-30. A weight of 1 after three gradients of 0.5,
# with a learning rate of 0.1, and the beta2 that is kept:
#
#   float32: adam 0.700; injected 0.700, beta2 0.99900; with hyperparam_dtype 0.700, beta2 0.99900
#   float16: adam 0.700; injected 0.700, beta2 0.99902; with hyperparam_dtype 0.700, beta2 0.99900
#   bfloat16: adam 0.699; injected nan, beta2 1.00000; with hyperparam_dtype 0.695, beta2 0.99900
#   bfloat16 beside a leaf of float32: adam 0.699; injected 0.695, beta2 0.99900
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet optax==0.2.8 jax==0.10.2 numpy
cat > "$folder/program.py" <<'PY'
import math

import jax
import jax.numpy as jnp
import optax


def trained(optimizer, *dtypes):
    """The first weight after three steps, and the optimiser's state."""
    weights = {str(number): jnp.ones(4, dtype) for number, dtype in enumerate(dtypes)}
    state = optimizer.init(weights)
    for _ in range(3):
        updates, state = optimizer.update(jax.tree.map(lambda x: jnp.full_like(x, 0.5), weights), state, weights)
        weights = optax.apply_updates(weights, updates)
    return float(weights["0"][0]), state


seen = []
for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
    plain, _ = trained(optax.adam(0.1), dtype)
    injected, state = trained(optax.inject_hyperparams(optax.adam)(0.1), dtype)
    wide, wide_state = trained(optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(0.1), dtype)
    beta2, wide_beta2 = (float(of.hyperparams["b2"]) for of in (state, wide_state))
    print(
        f"{dtype.__name__}: adam {plain:.3f}; injected {injected:.3f}, beta2 {beta2:.5f}; "
        f"with hyperparam_dtype {wide:.3f}, beta2 {wide_beta2:.5f}"
    )
    seen.append((abs(plain - 0.7) < 0.01, math.isnan(injected), beta2 == 1, abs(wide - plain) < 0.01))
plain, _ = trained(optax.adam(0.1), jnp.bfloat16, jnp.float32)
injected, state = trained(optax.inject_hyperparams(optax.adam)(0.1), jnp.bfloat16, jnp.float32)
beta2 = float(state.hyperparams["b2"])
print(f"bfloat16 beside a leaf of float32: adam {plain:.3f}; injected {injected:.3f}, beta2 {beta2:.5f}")
right, wrong = (True, False, False, True), (True, True, True, True)
raise SystemExit(0 if seen == [right, right, wrong] and abs(injected - plain) < 0.01 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
