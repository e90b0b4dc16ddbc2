#!/usr/bin/env bash
# jax 0.10.2: jax.random.choice with BF16 probabilities draws 128 of 1,000 entries, the others never.
#
# Probabilities that a softmax makes in BF16 have three digits, so one may expect draws within a few percent of them,
# as torch.multinomial has them. choice adds the probabilities up in BF16: the steps of the sum near 1 are 0.004, and
# less likely entries vanish or stand for their neighbours. The number that it looks up is drawn in BF16, too, of which
# JAX has 128. bernoulli compares with such a number: of a probability of 0.001 it makes 0.0078, in FP16 0.002. A
# replay buffer, a mixture of data sources or a layer's drop-out that is so drawn leaves out most, and nothing warns.
# FP32 probabilities are right.
#
# Seen with jax 0.10.2, numpy 2.4.6 and Python 3.11 on a CPU, 2026-11-30. 200,000 draws of 1,000 entries whose
# probabilities are random (Dirichlet, seed 0), and the share of draws that stand at another entry; a million of
# bernoulli:
#
#   float32: 989 entries drawn, share elsewhere 0.03; bernoulli(0.001) 0.0010, bernoulli(0.01) 0.0099
#   bfloat16: 128 entries drawn, share elsewhere 0.76; bernoulli(0.001) 0.0077, bernoulli(0.01) 0.0154
#   float16: 653 entries drawn, share elsewhere 0.17; bernoulli(0.001) 0.0020, bernoulli(0.01) 0.0108
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

ENTRIES, DRAWS = 1000, 200_000
exact = np.random.default_rng(0).dirichlet(np.ones(ENTRIES))
key = jax.random.key(0)


def drawn(dtype):
    choices = jax.random.choice(key, ENTRIES, (DRAWS,), p=jnp.asarray(exact, dtype))
    counts = np.bincount(np.asarray(choices), minlength=ENTRIES)
    elsewhere = np.abs(counts / DRAWS - exact).sum() / 2
    rates = [float(jax.random.bernoulli(key, jnp.asarray(p, dtype), (1_000_000,)).mean()) for p in (0.001, 0.01)]
    told = "{}: {} entries drawn, share elsewhere {:.2f}; bernoulli(0.001) {:.4f}, bernoulli(0.01) {:.4f}"
    print(told.format(dtype.__name__, (counts > 0).sum(), elsewhere, *rates), flush=True)
    return (counts > 0).sum(), elsewhere, rates[0]


single, brain, half = (drawn(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16))
right = single[0] > 980 and single[1] < 0.05 and abs(single[2] - 0.001) < 2e-4
raise SystemExit(0 if right and brain[0] < 200 and brain[2] > 0.006 and half[1] > 2 * single[1] else "changed")
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
