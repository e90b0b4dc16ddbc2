"""One of two processes that train a sharded model together, watched: ``RANK STORE HOW``."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import flashpoint
from tests.watching.loops import Pair


def sharded(model: Pair, how: str) -> nn.Module:
    """Of parts: the weight of a part is gathered when a gradient comes to its output."""
    mesh = init_device_mesh("cpu", (2,))
    for block in (model.first, model.second) if how == "fully_shard of parts" else ():
        fully_shard(block.qkv, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main(rank: str, store: str, how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    torch.manual_seed(0)
    model = sharded(Pair(), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with flashpoint.watch(model, name="own", interval=2, weights_interval=2, log_interval=1) as watched:
        for step in range(4):
            x = torch.randn(3, 12, 32)
            loss = model(x).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # with PyTorch 2.9 each process has a part
            watched.step(loss, x, grad_norm=norm if step >= 2 else None)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
