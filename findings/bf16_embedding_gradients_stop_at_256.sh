#!/usr/bin/env bash
# PyTorch 2.13.0: on a CPU, the gradient of a BF16 embedding stops growing at 256 times one token's part.
#
# A token that stands n times in a batch has a gradient of n parts. Sums of BF16 in PyTorch are kept in FP32, and rounded
# at the end, so that 1,000 ones add up to 1,000. The gradient of an embedding is added up in BF16, one part after
# another: 256 + 1 rounds to 256, so that from there on nothing is added. The rows of the most frequent tokens, such as
# a space, get too small a gradient, without a word: of n equal parts 256/n. index_add and index_put with
# accumulate=True add up so, too, and scatter_add does not. With FP32 weights, as under autocast, the gradient is right.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-29. A token stands n times, and each part is 1:
#
#   n 200: embedding 200, sum 200
#   n 1000: embedding 256, sum 1000
#   n 10000: embedding 256, sum 9984
#   n 10000: embedding in FP32 10000
#   n 1000: index_add 256, index_put 256, scatter_add 1000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
import torch.nn.functional as F


def gradient(count, dtype=torch.bfloat16):
    weight = torch.zeros(4, 8, dtype=dtype, requires_grad=True)
    F.embedding(torch.zeros(count, dtype=torch.long), weight).sum().backward()
    return int(weight.grad[0, 0])


seen = []
for count in (200, 1000, 10_000):
    found = gradient(count), int(torch.ones(count, dtype=torch.bfloat16).sum())
    print(f"n {count}: embedding {found[0]}, sum {found[1]}")
    seen += found
seen.append(gradient(10_000, torch.float32))
print(f"n 10000: embedding in FP32 {seen[-1]}")
zeros, places, ones = (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.long),
                       torch.ones(1000, dtype=torch.bfloat16))
added = [
    int(out[0])
    for out in (
        zeros.index_add(0, places, ones),
        zeros.index_put((places,), ones, accumulate=True),
        zeros.scatter_add(0, places, ones),
    )
]
print("n 1000: index_add {}, index_put {}, scatter_add {}".format(*added))
raise SystemExit(0 if seen + added == [200, 200, 256, 1000, 256, 9984, 10_000, 256, 256, 1000] else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
