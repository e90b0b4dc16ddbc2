"""The processes of one run, as ``torchrun`` starts them: each takes its share of every batch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among the run's ``world`` processes; every method is called by all of them."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the processes, in an order that is fixed by ``world``."""
        dist.all_reduce(tensor)

    def any(self, here: bool, device: torch.device) -> bool:
        """Return whether ``here`` is true in any of the processes."""
        if self.world == 1:
            return here
        flag = torch.tensor(int(here), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.world > 1:
            dist.barrier()


def flattened(tensors: Iterable[Tensor]) -> Tensor:
    """Return the elements of all tensors in one, [elements], for one collective in place of many."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@torch.no_grad()
def take_from(flat: Tensor, tensors: list[Tensor]) -> None:
    """Give the tensors their elements of what :func:`flattened` returned."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    # One launch for all: in a small model a launch takes longer than the copy of a tensor.
    torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


def join(device: torch.device) -> tuple[Ranks, torch.device]:
    """Join the processes that ``torchrun`` started, if any; return this process's rank and device."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Ranks(), device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        on_gpu = device.type == "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    return Ranks(dist.get_rank(), world), device


def leave() -> None:
    """End what :func:`join` began."""
    if dist.is_initialized():
        dist.destroy_process_group()
