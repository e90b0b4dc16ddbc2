"""Tensors of which this process holds a part: to compute with one of them is to wait for all other processes.

Only the first process watches. What it computes with such a tensor, the others do not, and the training stands still.
Nothing is imported here: a loop that shards has imported what it shards with.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

SHARDED = "tensors are DTensors, of which each process holds a part"
"""Why an attention is left out."""


def is_dtensor(value: Any) -> bool:
    return _is(value, "torch.distributed.tensor", "DTensor")


def is_sharded(model: nn.Module) -> bool:
    """Return whether processes share the weights of a model, or of a part of it.

    While ``fully_shard`` has a module's weights together they are plain tensors, so its modules are looked at, too.
    """
    wrappers = ("FSDPModule", "FullyShardedDataParallel")
    return any(map(is_dtensor, model.parameters())) or any(
        _is(module, "torch.distributed.fsdp", name) for module in model.modules() for name in wrappers
    )


def local(tensor: Any) -> Any:
    """Return the part of a tensor that this process holds, or the tensor if it is whole."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def whole(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor that every process holds whole as a plain one.

    Raises:
        ValueError: this process holds a part of it.
    """
    if is_dtensor(tensor) and not all(placement.is_replicate() for placement in tensor.placements):  # type: ignore[attr-defined]
        raise ValueError(f"{name} is a DTensor, of which each process holds a part: give {name}.full_tensor(), which "
                         "all processes have to call")  # fmt: skip
    found: Tensor = local(tensor)
    return found


def _is(value: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
