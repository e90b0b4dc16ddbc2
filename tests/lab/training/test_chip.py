"""A GPU that cannot run the kernels is told before training; the GPU is made up."""

from collections.abc import Iterator

import pytest
import torch
from triton.runtime.errors import OutOfResources

from flashpoint import hardware
from flashpoint.errors import UserError
from flashpoint.lab.training.chip import refuse_chip_without_kernels, refusing_too_large
from flashpoint.numerics.variant import AttentionVariant

GPU = torch.device("cuda")
SDPA = AttentionVariant(name="sdpa", kernel="sdpa")
MIXED = AttentionVariant(name="mixed", kernel="sdpa", layers=(1,), elsewhere=AttentionVariant())


@pytest.fixture
def t4(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    hardware.chip_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA T4")
    yield
    hardware.chip_of.cache_clear()


@pytest.mark.usefixtures("t4")
@pytest.mark.parametrize("attention", [AttentionVariant(name="mixed"), MIXED])
def test_an_old_chip_is_refused_where_an_attention_has_kernels(attention: AttentionVariant) -> None:
    with pytest.raises(UserError, match=r"^attn=mixed: .* 8\.0 or newer, and NVIDIA T4 has 7\.5; take attn=sdpa"):
        refuse_chip_without_kernels(attention, GPU)
    refuse_chip_without_kernels(SDPA, GPU)
    refuse_chip_without_kernels(attention, torch.device("cpu"))


@pytest.mark.usefixtures("t4")
def test_a_kernel_that_does_not_fit_is_told() -> None:
    error, attention = OutOfResources(70_000, 65_536, "shared memory"), AttentionVariant(name="flash_fp32")
    told = r"^attn=flash_fp32: a kernel needs 70,000 of shared memory, and NVIDIA T4 has 65,536; .*model\.n_head"
    with pytest.raises(UserError, match=told), refusing_too_large(attention, GPU):
        raise error
    with pytest.raises(OutOfResources), refusing_too_large(attention, torch.device("cpu")):
        raise error
