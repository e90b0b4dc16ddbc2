#!/usr/bin/env bash
# rotary-embedding-torch 0.9.1, keras-hub 0.32.0: in mixed precision up to 17 neighbouring tokens share one position.
#
# Mixed precision keeps the weights in FP32 and takes products in BF16. Positions have four digits, and so are to stay in
# FP32. So one may expect each token to have a position of its own, whose sine or rotation is then rounded. Both
# libraries make the positions in the dtype of their input, which is BF16: 257 rounds to 256, and from 2,048 on 16
# tokens get one number. What is made of it is the same to the last bit, so that an attention that goes by positions
# cannot tell these tokens apart. Nothing warns, the loss falls, and inputs of up to 256 tokens are right. keras-hub's
# RotaryEmbedding is right, its SinePositionEncoding is not.
#
# Seen with rotary-embedding-torch 0.9.1, keras-hub 0.32.0 with keras 3.15.1, torch 2.13.0 and Python 3.11 on a CPU,
# 2026-11-30. So many different rows of so many tokens with equal inputs, and the largest number of equal ones; the
# module of rotary-embedding-torch is FP32, under autocast to BF16, and keras has the policy mixed_bfloat16:
#
#   256 tokens: rotary-embedding-torch 256, at most 1 equal; SinePositionEncoding 256, at most 1 equal
#   1024 tokens: rotary-embedding-torch 513, at most 5 equal; SinePositionEncoding 513, at most 5 equal
#   4096 tokens: rotary-embedding-torch 769, at most 17 equal; SinePositionEncoding 769, at most 17 equal
#   4096 tokens, keras-hub's RotaryEmbedding: 4096, at most 1 equal
#   4096 tokens, rotary-embedding-torch of FP32, rounded to BF16: 4096, at most 1 equal
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
    rotary-embedding-torch==0.9.1 keras==3.15.1 torch==2.13.0 numpy regex tokenizers kagglehub
"$folder/venv/bin/pip" install --quiet --no-deps keras-hub==0.32.0  # which asks for TensorFlow, and imports without it
cat > "$folder/program.py" <<'PY'
import keras
import keras_hub
import torch
from rotary_embedding_torch import RotaryEmbedding

SIZE = 64
keras.mixed_precision.set_global_policy("mixed_bfloat16")


def counted(rows):
    """How many different rows there are, and how many are equal at most."""
    different, counts = torch.unique(rows.detach().float(), dim=0, return_counts=True)
    return len(different), int(counts.max())


def rotated(tokens, dtype):
    return RotaryEmbedding(SIZE).rotate_queries_or_keys(torch.ones(1, 1, tokens, SIZE, dtype=dtype))[0, 0]


def told(what, counts):
    return "{} {}, at most {} equal".format(what, *counts)


seen = {}
for tokens in (256, 1024, 4096):
    with torch.autocast("cpu", torch.bfloat16):
        rotary = counted(rotated(tokens, torch.bfloat16))
    sine = counted(keras_hub.layers.SinePositionEncoding()(torch.ones(1, tokens, SIZE, dtype=torch.bfloat16))[0])
    print(f"{tokens} tokens:", told("rotary-embedding-torch", rotary), end="; ")
    print(told("SinePositionEncoding", sine), flush=True)
    seen[tokens] = rotary, sine
right = counted(keras_hub.layers.RotaryEmbedding()(torch.ones(1, 4096, 1, SIZE, dtype=torch.bfloat16))[0, :, 0])
print("4096 tokens,", told("keras-hub's RotaryEmbedding:", right))
exact = counted(rotated(4096, torch.float32).bfloat16())
print("4096 tokens,", told("rotary-embedding-torch of FP32, rounded to BF16:", exact))
expected = {256: ((256, 1),) * 2, 1024: ((513, 5),) * 2, 4096: ((769, 17),) * 2}
raise SystemExit(0 if seen == expected and right == exact == (4096, 1) else "changed")
PY
KERAS_BACKEND=torch "$folder/venv/bin/python" "$folder/program.py" 2> /dev/null
