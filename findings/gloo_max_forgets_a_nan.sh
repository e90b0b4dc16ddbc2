#!/usr/bin/env bash
# PyTorch 2.13.0 with Gloo: all_reduce(MAX) returns a number where a process has NaN, and forgets larger ones for it.
#
# torch.max of numbers and a NaN is NaN. So one may expect it of all_reduce(MAX), by which processes agree on the
# largest gradient, on a flag, or on the norm of sharded gradients. Gloo keeps the greater of two by a comparison that is
# false for NaN. So it depends on the process, the number of elements and the place in the tensor whether the NaN is
# kept or dropped, and where it is dropped the larger numbers before it go with it: of 1, 2, NaN on the third, and 4 the
# maximum is said to be 2. Thus clip_grad_norm_ by the infinite norm scales gradients that hold a NaN by their finite
# part. MIN is alike. SUM keeps NaN. All processes get the same result.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Process r of 4 has r + 1, and one of them NaN:
#
#   1 number, NaN nowhere: MAX 4
#   1 number, NaN on process 0: MAX nan
#   1 number, NaN on process 1: MAX 1
#   1 number, NaN on process 2: MAX 2
#   1 number, NaN on process 3: MAX 3
#   10000 numbers, NaN on process 3: MAX 3 at the first, nan at the last
#   1 number, NaN on process 3: SUM nan
#   infinite norm of sharded gradients, NaN in the second shard: 4
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import json
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

PROCESSES = 4


def reduced(rank, bad, length, op):
    numbers = torch.full((length,), math.nan if rank == bad else rank + 1.0)
    dist.all_reduce(numbers, op)
    return [numbers[0].item(), numbers[-1].item()]


def process(rank, folder):
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    found = {}
    for bad in (None, 0, 1, 2, 3):
        where = "nowhere" if bad is None else f"on process {bad}"
        found[f"1 number, NaN {where}: MAX"] = reduced(rank, bad, 1, dist.ReduceOp.MAX)[:1]
    found["10000 numbers, NaN on process 3: MAX"] = reduced(rank, 3, 10_000, dist.ReduceOp.MAX)
    found["1 number, NaN on process 3: SUM"] = reduced(rank, 3, 1, dist.ReduceOp.SUM)[:1]
    mesh = init_device_mesh("cpu", (PROCESSES,))
    shard = torch.tensor([1.0, math.nan if rank == 1 else 4.0])
    gradient = DTensor.from_local(shard, mesh, [Shard(0)])
    norm = torch.nn.utils.get_total_norm([gradient], norm_type=math.inf)
    found["infinite norm of sharded gradients, NaN in the second shard:"] = [norm.full_tensor().item()]
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(PROCESSES)])
    os._exit(0)  # leaves out what Gloo's threads do at the end


if __name__ == "__main__":
    folder = sys.argv[1]
    torch.multiprocessing.spawn(process, (folder,), nprocs=PROCESSES)
    texts = [open(f"{folder}/{rank}.json").read() for rank in range(PROCESSES)]
    found = json.loads(texts[0])
    for name, numbers in found.items():
        told = " at the first, ".join(f"{x:.0f}" for x in numbers) + (" at the last" if len(numbers) == 2 else "")
        print(name, told)
    told = ["4", "nan", "1", "2", "3", "3 nan", "nan", "4"]
    same = [" ".join(f"{x:.0f}" for x in numbers) for numbers in found.values()] == told and len(set(texts)) == 1
    raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py" "$folder" 2> /dev/null
