"""Whether a run and its attention's kernels fit the GPU: told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flashpoint.config import Config
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
    if 0 < number < LEAST_CAPABILITY and any(variant.kernel != "sdpa" for variant in variants):
        least, here = (f"{of // 10}.{of % 10}" for of in (LEAST_CAPABILITY, number))
        raise UserError(
            f"attn={attention.name}: its kernels need compute capability {least} or newer, and "
            f"{torch.cuda.get_device_name(device)} has {here}; {_REMEDY}"
        )


@contextmanager
def told_if_too_large(config: Config, device: torch.device) -> Iterator[None]:
    """Tell in one line if a kernel does not fit the chip or the run does not fit its memory.

    Raises:
        UserError: naming what to lower.
    """
    if device.type != "cuda":  # a CPU need not wait for Triton
        yield
        return
    from triton.runtime.errors import OutOfResources

    try:
        yield
    except OutOfResources as error:
        raise UserError(
            f"attn={config.attn.name}: a kernel needs {error.required:,} of {error.name}, and "
            f"{torch.cuda.get_device_name(device)} has {error.limit:,}; {_REMEDY}, or smaller heads (model.n_head)"
        ) from error
    except torch.OutOfMemoryError as error:
        sequences = config.train.micro_batch_size or config.train.batch_size
        fewer = f"give train.micro_batch_size={sequences // 2} or less" if sequences > 1 else "lower model.context"
        raise UserError(
            f"{torch.cuda.get_device_name(device)}: out of memory; {fewer}, lower probes.sequences="
            f"{config.probes.sequences}, or end what else computes there"
        ) from error
