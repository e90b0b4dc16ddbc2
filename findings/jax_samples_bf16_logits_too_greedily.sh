#!/usr/bin/env bash
# jax 0.10.2: jax.random.categorical draws from BF16 logits as if they were colder, and prefers the first tokens.
#
# A sample of a model in BF16 is drawn from its logits. They are rounded by 0.4 % at most, so one may expect the
# probabilities of softmax, up to such an error; the documentation speaks of FP32 and of events below 1E-7. The Gumbel
# noise is drawn in the logits' dtype: in BF16 it has 128 values and is never above 5, where the largest of 4,096 is to
# be near 8. So rare tokens are never drawn, likely ones too often, and of equal tokens the first: all draws of 4,096
# equal ones fall into the first quarter. Texts look as if they were sampled at a lower temperature, and rewards or
# diversity are measured on another policy. FP16 errs less. mode="high" errs the other way. Nothing warns. Cast the
# logits to FP32 first. PyTorch and MLX draw rightly from BF16.
#
# Seen with jax 0.10.2, mlx 0.32.4 and Python 3.11 on a CPU, 2026-11-30. 4,096 equal logits: the share of draws that
# fall into the first 1,024 tokens, to be 0.25. Then normal logits with a standard deviation of 3: the share of the
# likeliest token, to be 0.31, and the mean of -log p of what is drawn, to be the entropy, 4.25:
#
#   mlx bfloat16: first quarter 0.26
#   jax float32: first quarter 0.25; likeliest 0.30; -log p 4.3
#   jax bfloat16: first quarter 1.00; likeliest 0.49; -log p 2.8
#   jax float16: first quarter 0.64; likeliest 0.36; -log p 3.6
#   jax bfloat16, mode="high": first quarter 0.27; likeliest 0.25; -log p 5.9
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 "mlx[cpu]==0.32.4" numpy
cat > "$folder/program.py" <<'PY'
import jax
import jax.numpy as jnp
import mlx.core as mx
import numpy as np

TOKENS, DRAWS = 4096, 5000
logits = 3 * jax.random.normal(jax.random.key(1), (TOKENS,))
rounded = np.asarray(logits.astype(jnp.bfloat16).astype(jnp.float32), np.float64)
p = np.exp(rounded) / np.exp(rounded).sum()


def first_quarter(tokens):
    return (np.asarray(tokens) < TOKENS // 4).mean()


def of_jax(dtype, mode="low"):
    equal = jax.random.categorical(jax.random.key(0), jnp.zeros(TOKENS, dtype), shape=(DRAWS,), mode=mode)
    normal = np.asarray(jax.random.categorical(jax.random.key(0), logits.astype(dtype), shape=(DRAWS,), mode=mode))
    found = first_quarter(equal), (normal == p.argmax()).mean(), -np.log(p[normal]).mean()
    named = dtype.__name__ + (', mode="high"' if mode == "high" else "")
    print("jax {}: first quarter {:.2f}; likeliest {:.2f}; -log p {:.1f}".format(named, *found))
    return found


mx.random.seed(0)
of_mlx = first_quarter(mx.random.categorical(mx.zeros(TOKENS, mx.bfloat16), num_samples=DRAWS))
print(f"mlx bfloat16: first quarter {of_mlx:.2f}")
fp32, bf16, fp16, high = of_jax(jnp.float32), of_jax(jnp.bfloat16), of_jax(jnp.float16), of_jax(jnp.bfloat16, "high")
right = max(abs(share - 0.25) for share in (of_mlx, fp32[0])) < 0.03 and abs(fp32[2] - 4.25) < 0.2
wrong = bf16[0] > 0.95 and bf16[1] > 0.4 and bf16[2] < 3.2 and 0.5 < fp16[0] < 0.8 and high[2] > 5
raise SystemExit(0 if right and wrong else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
