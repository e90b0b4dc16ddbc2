"""Whether the attention's kernels run on the GPU of a run: told in one line, before there is a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flashpoint.errors import UserError
from flashpoint.hardware import capability, chip_of
from flashpoint.numerics.variant import AttentionVariant

LEAST_CAPABILITY = 80
"""Compute capability from which Triton multiplies BF16."""
_REMEDY = "take attn=sdpa, another GPU, or PyTorch's operations with train.device=cpu"


def refuse_chip_without_kernels(attention: AttentionVariant, device: torch.device) -> None:
    """Refuse a GPU that the kernels are not for.

    Raises:
        UserError: it is NVIDIA's and too old, and some layer's attention has kernels.
    """
    variants = (attention, *filter(None, [attention.elsewhere]))
    number = capability(chip_of(device))
    if 0 < number < LEAST_CAPABILITY and any(variant.runs_kernels_of_ours for variant in variants):
        least, here = (f"{version // 10}.{version % 10}" for version in (LEAST_CAPABILITY, number))
        raise UserError(
            f"attn={attention.name}: its kernels need compute capability {least} or newer, and "
            f"{torch.cuda.get_device_name(device)} has {here}; {_REMEDY}"
        )


@contextmanager
def refusing_too_large(attention: AttentionVariant, device: torch.device) -> Iterator[None]:
    """Tell in one line of a kernel that does not fit the chip, where kernels are compiled for the first time.

    Raises:
        UserError: one takes more shared memory or threads than the chip has.
    """
    if device.type != "cuda":  # a CPU need not wait for Triton
        yield
        return
    from triton.runtime.errors import OutOfResources

    try:
        yield
    except OutOfResources as error:
        raise UserError(
            f"attn={attention.name}: a kernel needs {error.required:,} of {error.name}, and "
            f"{torch.cuda.get_device_name(device)} has {error.limit:,}; {_REMEDY}, or smaller heads (model.n_head)"
        ) from error
