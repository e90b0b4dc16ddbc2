"""Why an attention call is not recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WITHOUT_GRADIENTS = "called without gradients, as in an evaluation or in checkpoints, which need use_reentrant=False"
TWICE = "differentiated twice, as for a gradient penalty, where only first derivatives are recorded"
FROZEN = "no gradient goes through it, as in a frozen layer"
TRANSFORMED = "called inside torch.vmap or another transform of torch.func, where nothing is recorded; call it outside"


def is_transformed(value: Any) -> bool:
    """Return whether a value is a tensor inside a transform of ``torch.func``: it has no gradients and no values of its
    own, and ends with the transform. PyTorch has no public way to ask."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)
