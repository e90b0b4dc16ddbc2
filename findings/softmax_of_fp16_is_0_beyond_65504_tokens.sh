#!/usr/bin/env bash
# jax 0.10.2: the softmax of 100,000 equal FP16 logits is 0, and their logsumexp infinite.
#
# A softmax subtracts the largest logit, so that its exponentials are at most 1 and nothing overflows. So one may
# expect 1e-5 for each of 100,000 equal logits, as FP16 has it within 1 %, and a logsumexp of 11.5. JAX adds the
# exponentials up, or rounds their sum, in FP16, which ends at 65,504: the sum is infinite, each probability 0 and its
# logarithm minus infinity. A vocabulary of 128,000 tokens whose last layer starts at 0 meets it in the first step: the
# loss is infinite. Logits that vary have smaller sums, and the fault goes away with training. Nothing warns.
#
# Seen with jax 0.10.2, numpy 2.4.6 and Python 3.11 on a CPU, 2026-11-30. Equal FP16 logits: the sum of their softmax
# in FP64, their logsumexp and the log_softmax of one:
#
#   50000 logits of float16: softmax sums to 1.001, logsumexp 10.82, log_softmax -10.82
#   100000 logits of float16: softmax sums to 0.000, logsumexp inf, log_softmax -inf
#   100000 logits of float32: softmax sums to 1.000, logsumexp 11.51, log_softmax -11.51
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import jax
import numpy as np


def rows(count, dtype=np.float16):
    logits = np.zeros(count, dtype)
    total = np.asarray(jax.nn.softmax(logits), np.float64).sum()
    found = float(total), float(jax.nn.logsumexp(logits)), float(jax.nn.log_softmax(logits)[0])
    told = "{} logits of {}: softmax sums to {:.3f}, logsumexp {:.2f}, log_softmax {:.2f}"
    print(told.format(count, np.dtype(dtype).name, *found), flush=True)
    return found


few, many, single = (rows(*of) for of in ((50_000,), (100_000,), (100_000, np.float32)))
right = all(abs(found[0] - 1) < 0.03 and 10 < found[1] < 12 for found in (few, single))
raise SystemExit(0 if right and many == (0, np.inf, -np.inf) else "changed")
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
