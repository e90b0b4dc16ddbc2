#!/usr/bin/env bash
# mlx 0.32.4: on a CPU, the rows of mx.softmax of BF16 scores add up to 2.5 at 4,096 keys, not to 1.
#
# A softmax of BF16 is to be one of FP32 that is rounded, as PyTorch has it, or at worst one whose every operation is
# rounded to three digits. So one may expect rows that add up to 1 within a few percent. MLX adds up the exponentials in
# BF16, one after another: of equal ones the sum stops at 256, where 256 + 1 rounds to 256. The weights are divided by
# too small a sum, and O of an attention that one writes oneself is too large by a factor that grows with the number of
# keys. Nothing is NaN, and nothing warns. In FP16 the sum stops at 2,048. precise=True takes FP32, as
# mx.fast.scaled_dot_product_attention does by itself.
#
# Seen with mlx 0.32.4 and Python 3.11 on a CPU, 2026-11-30. The mean sum of the weights of a row; scores are 0, or
# have a standard deviation of 1 nat, seed 0. Then |O| over that of FP32, with 2,048 tokens:
#
#   256 keys: equal scores 1.00, scores of 1 nat 1.04, precise 1.00
#   1024 keys: equal scores 4.00, scores of 1 nat 1.37, precise 1.00
#   4096 keys: equal scores 16.00, scores of 1 nat 2.50, precise 1.00
#   4096 keys in FP16: equal scores 2.00, scores of 1 nat 1.14, precise 1.00
#   |O|: softmax(QK^T)V 1.78, precise 1.00, mx.fast.scaled_dot_product_attention 1.00
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "mlx[cpu]==0.32.4" numpy
cat > "$folder/program.py" <<'PY'
import mlx.core as mx

mx.set_default_device(mx.cpu)
mx.random.seed(0)


def mean_sum(scores, **options):
    return mx.softmax(scores, axis=-1, **options).astype(mx.float32).sum(-1).mean().item()


def sums(keys, dtype):
    scores = mx.random.normal((64, keys)).astype(dtype)
    found = mean_sum(mx.zeros((1, keys), dtype)), mean_sum(scores), mean_sum(scores, precise=True)
    told = "equal scores {:.2f}, scores of 1 nat {:.2f}, precise {:.2f}".format(*found)
    print(f"{keys} keys{' in FP16' if dtype == mx.float16 else ''}: {told}", flush=True)
    return found


_, _, large, half = (sums(*of) for of in ((256, mx.bfloat16), (1024, mx.bfloat16), (4096, mx.bfloat16),
                                          (4096, mx.float16)))
q, k, v = (mx.random.normal((1, 2, 2048, 64)).astype(mx.bfloat16) for _ in range(3))
SCALE = 64**-0.5


def attention(q, k, v, **options):
    return mx.softmax(SCALE * q @ k.swapaxes(-1, -2), axis=-1, **options) @ v


exact = attention(*(x.astype(mx.float32) for x in (q, k, v)))
norms = [
    (mx.linalg.norm(out.astype(mx.float32).reshape(-1)) / mx.linalg.norm(exact.reshape(-1))).item()
    for out in (
        attention(q, k, v),
        attention(q, k, v, precise=True),
        mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE),
    )
]
told = "softmax(QK^T)V {:.2f}, precise {:.2f}, mx.fast.scaled_dot_product_attention {:.2f}".format(*norms)
print(f"|O|: {told}")
right = all(abs(x - 1) < 0.01 for x in (large[2], half[2], *norms[1:]))
raise SystemExit(0 if right and large[0] > 8 and large[1] > 2 and half[0] > 1.5 and norms[0] > 1.5 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
