#!/usr/bin/env bash
# PyTorch 2.13.0: FlexAttention without torch.compile attends to blocks that its BlockMask leaves out.
#
# BlockMask.from_kv_blocks names, for each block of queries, the blocks of keys that it sees. A mask_mod is optional. So
# one may expect the O of the compiled flex_attention from the one that is not compiled, with which one looks for an
# error. Uncompiled it reads the mask_mod alone, which is here one that lets all pass: the list of blocks is not read,
# and O is that of full attention. So a reference for a block-sparse attention computes no sparse one, and a test of a
# selection of blocks passes whatever is selected. The warning of the uncompiled call speaks of speed and memory, not of
# the mask. A mask_mod that says the same as the list gives the same O in both.
#
# Seen with torch 2.13.0, g++ 12 and Python 3.11 on a CPU, 2026-11-30. Of 256 tokens the first 128 see themselves, the
# others themselves. The largest differences of O from those of two masks:
#
#   list of blocks, compiled: from the blocks' 0.00, from full attention's 0.49
#   list of blocks, uncompiled: from the blocks' 0.49, from full attention's 0.00
#   list and mask_mod, compiled: from the blocks' 0.00, from full attention's 0.49
#   list and mask_mod, uncompiled: from the blocks' 0.00, from full attention's 0.49
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy setuptools
cat > "$folder/program.py" <<'PY'
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

TOKENS, BLOCK = 256, 128
torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, TOKENS, 32) for _ in range(3))
counts = torch.ones(1, 1, 2, dtype=torch.int32)
blocks = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)  # each block of queries sees its own block of keys
of_token = torch.arange(TOKENS) // BLOCK
full = scaled_dot_product_attention(q, k, v)
sparse = scaled_dot_product_attention(q, k, v, attn_mask=of_token[:, None] == of_token)


def own_block(b, h, query, key):
    return query // BLOCK == key // BLOCK


def differences(what, attention, mask_mod):
    mask = BlockMask.from_kv_blocks(counts, blocks, BLOCK_SIZE=BLOCK, mask_mod=mask_mod)
    out = attention(q, k, v, block_mask=mask)
    found = [(out - other).abs().max().item() for other in (sparse, full)]
    print(f"{what}: from the blocks' {found[0]:.2f}, from full attention's {found[1]:.2f}", flush=True)
    return found[0] < 0.01 < found[1], found[1] < 0.01 < found[0]


compiled = torch.compile(flex_attention)
seen = [
    differences("list of blocks, compiled", compiled, None),
    differences("list of blocks, uncompiled", flex_attention, None),
    differences("list and mask_mod, compiled", compiled, own_block),
    differences("list and mask_mod, uncompiled", flex_attention, own_block),
]
right, unmasked = (True, False), (False, True)
raise SystemExit(0 if seen == [right, unmasked, right, right] else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py" 2> /dev/null
