#!/usr/bin/env bash
# PyTorch 2.13.0: item() of a sharded weight's norm, mean or NaN check is that of the process's own shard.
#
# fully_shard makes weights and gradients DTensors, which one reads like whole tensors: shape, numel and std() are those
# of the whole. So one may expect weight.norm().item() to be the norm, and weight.isnan().any() to find a NaN in any
# shard. Sum, mean, norm, max and any are partial results, and item(), bool() and float() take the part of the process
# that asks. So process 0 logs the norm of its shard, and a check for NaN passes on all processes but one, which then
# part at an `if`. Nothing warns. full_tensor() in front of item() gives the whole, but for max under Gloo, which drops
# NaN. What clip_grad_norm_ returns is whole.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, two processes with Gloo, 2026-11-30. A weight of 3, 0, 4 and 0, of
# which each process has two, then with NaN as its last: what item() says in the two processes, and full_tensor():
#
#   norm: 3.0 and 4.0, full_tensor 5.0
#   sum: 3.0 and 4.0, full_tensor 7.0
#   mean: 1.5 and 2.0, full_tensor 1.75
#   max: 3.0 and 4.0, full_tensor 4.0
#   std: 2.061 and 2.061
#   isnan().any() of the second: False and True, full_tensor True
#   max of the second: 3.0 and nan, full_tensor 3.0
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
from torch.distributed.tensor import Shard, distribute_tensor

PROCESSES = 2


def process(rank, folder):
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    weight, broken = (distribute_tensor(torch.tensor([3.0, 0.0, 4.0, last]), mesh, [Shard(0)]) for last in (0, math.nan))
    results = {
        "norm": weight.norm(), "sum": weight.sum(), "mean": weight.mean(), "max": weight.max(), "std": weight.std(),
        "isnan().any() of the second": broken.isnan().any(), "max of the second": broken.max(),
    }
    said = {name: (str(result.item())[:5], str(result.full_tensor().item())) for name, result in results.items()}
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(said, file)
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(PROCESSES)])
    os._exit(0)  # leaves out what Gloo's threads do at the end


if __name__ == "__main__":
    torch.multiprocessing.spawn(process, (sys.argv[1],), PROCESSES)
    first, second = (json.load(open(f"{sys.argv[1]}/{rank}.json")) for rank in range(PROCESSES))
    for name, (item, whole) in first.items():
        print(f"{name}: {item} and {second[name][0]}" + (f", full_tensor {whole}" if name != "std" else ""))
    seen = [f"{item} {second[name][0]}" for name, (item, _) in first.items()]
    expected = ["3.0 4.0", "3.0 4.0", "1.5 2.0", "3.0 4.0", "2.061 2.061", "False True", "3.0 nan"]
    sys.exit(0 if seen == expected and first["max of the second"][1] == "3.0" else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py" "$folder"
