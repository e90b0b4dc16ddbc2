#!/usr/bin/env bash
# PyTorch 2.13.0: fully_shard with param_dtype=torch.bfloat16 rounds a block's positions to BF16, too.
#
# MixedPrecisionPolicy(param_dtype=torch.bfloat16) computes with parameters in BF16. Positions are no parameters, and
# stand in FP32 on purpose: so one may expect them to reach a block as they are given. cast_forward_inputs, which is on,
# casts every floating tensor among a block's arguments, also those in keywords, lists and dicts: 257 becomes 256, and
# of 4,096 positions 769 are left. Tables of cosines and sines, and times of a diffusion, are rounded so, too, where
# blocks are handed them. Without fully_shard, and under autocast, they are not.
# Nothing warns. Integers pass, and cast_forward_inputs=False leaves all to the block.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, one process, 2026-11-30. The positions 0 to 4,095 in FP32 that a block
# is handed, and what it gets:
#
#   not sharded, autocast: torch.float32, 4096 different positions
#   keyword: torch.bfloat16, 769 different positions
#   in a dict: torch.bfloat16, 769 different positions
#   keyword, cast_forward_inputs=False: torch.float32, 4096 different positions
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

TOKENS = 4096


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x, positions):
        found = positions["of"] if isinstance(positions, dict) else positions
        self.seen = found.dtype, len(found.unique())
        return self.linear(x)


def seen(what, block, dtype, in_dict=False):
    positions = torch.arange(TOKENS, dtype=torch.float32)
    block(torch.ones(TOKENS, 2, dtype=dtype), positions={"of": positions} if in_dict else positions)
    print(f"{what}: {block.seen[0]}, {block.seen[1]} different positions")
    return block.seen


def sharded(**options):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, **options)
    return fully_shard(Block(), mesh=mesh, mp_policy=policy)


dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
with torch.autocast("cpu", dtype=torch.bfloat16):
    rows = [seen("not sharded, autocast", Block(), torch.float32)]
rows.append(seen("keyword", sharded(), torch.float32))
rows.append(seen("in a dict", sharded(), torch.float32, in_dict=True))
rows.append(seen("keyword, cast_forward_inputs=False", sharded(cast_forward_inputs=False), torch.bfloat16))
dist.destroy_process_group()
kept, rounded = (torch.float32, TOKENS), (torch.bfloat16, 769)
sys.exit(0 if rows == [kept, rounded, rounded, kept] else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py" "$folder/store"
