#!/usr/bin/env bash
# PyTorch 2.13.0: the mean loss of a DTensor that is unevenly sharded is another one than that of the whole tensor.
#
# A DTensor gives what the whole tensor gives, and where the rows do not divide by the processes, one shard is smaller.
# So one may expect mse_loss to be (x - y).square().mean(), which is right. mse_loss, smooth_l1_loss, huber_loss and both
# binary cross-entropies take the mean of each shard and then the mean of those: a row of the smaller shard weighs more,
# in the loss, and but for the cross-entropies in the gradients. full_tensor() gives that number, too. So a last batch
# that is not full has a loss that depends on the number of processes, without a word. l1_loss is right, and so are
# reduction="sum" with a division, and even shards.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, two processes with Gloo, 2026-11-30. Rows of size 1, 1, 1, 1 and 6, of
# which the processes have three and two: the loss against 0, and the gradient of the first and the last row:
#
#   square().mean(): whole [8.0, 0.4, 2.4], sharded [8.0, 0.4, 2.4]
#   mse_loss: whole [8.0, 0.4, 2.4], sharded [9.75, 0.667, 6.0]
#   smooth_l1_loss: whole [1.5, 0.2, 0.2], sharded [1.75, 0.333, 0.5]
#   huber_loss: whole [1.5, 0.2, 0.2], sharded [1.75, 0.333, 0.5]
#   binary_cross_entropy_with_logits: whole [2.251, 0.146, 0.2], sharded [2.486, 0.146, 0.2]
#   l1_loss: whole [2.0, 0.2, 0.2], sharded [2.0, 0.2, 0.2]
#   mse_loss of a sum: whole [8.0, 0.4, 2.4], sharded [8.0, 0.4, 2.4]
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

PROCESSES = 2
ROWS = torch.tensor([[1.0], [1.0], [1.0], [1.0], [6.0]])
LOSSES = {
    "square().mean()": lambda x, y: (x - y).square().mean(),
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "l1_loss": F.l1_loss,
    "mse_loss of a sum": lambda x, y: F.mse_loss(x, y, reduction="sum") / x.numel(),
}


def numbers(loss_of, rows):
    rows = rows.detach().requires_grad_()
    loss = loss_of(rows, torch.zeros_like(rows))
    loss.backward()
    loss, gradient = (x.full_tensor() if isinstance(x, DTensor) else x for x in (loss, rows.grad))
    return [round(number, 3) for number in (loss.item(), gradient[0].item(), gradient[-1].item())]


def process(rank, folder):
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    seen = {name: numbers(loss_of, distribute_tensor(ROWS, mesh, [Shard(0)])) for name, loss_of in LOSSES.items()}
    if rank == 0:
        with open(f"{folder}/seen.json", "w") as file:
            json.dump(seen, file)
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(PROCESSES)])
    os._exit(0)  # leaves out what Gloo's threads do at the end


if __name__ == "__main__":
    torch.multiprocessing.spawn(process, (sys.argv[1],), PROCESSES)
    seen = json.load(open(f"{sys.argv[1]}/seen.json"))
    equal = []
    for name, loss_of in LOSSES.items():
        whole = numbers(loss_of, ROWS)
        print(f"{name}: whole {whole}, sharded {seen[name]}")
        equal.append(whole == seen[name])
    sys.exit(0 if equal == [True, False, False, False, False, True, True] else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py" "$folder"
