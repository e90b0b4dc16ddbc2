"""The PyTorch attention on CUDA against FP64 and against its own random bits on the CPU."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from flashpoint.numerics.choices import NEAREST
from flashpoint.numerics.dispatch import attention
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant
from flashpoint_kernels.codes import Stream
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.gpu
VARIANTS = [
    path
    for path in sorted((REPOSITORY / "configs/attn").glob("*.yaml"))
    if yaml.safe_load(path.read_text()).get("kernel", "flash") in ("flash", "sdpa")
]
"""Those that a CPU computes, too; the others are in ``test_production_cuda.py``."""


def inputs(length: int, head_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, 3, length, head_size, generator=generator).bfloat16() for _ in range(4)]


def run(variant: AttentionVariant, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, device: str) -> list[Tensor]:
    q, k, v = (x.detach().to(device).requires_grad_() for x in (q, k, v))
    seed_and_step = torch.tensor([3, 5], device=device)
    out = attention(q, k, v, variant, layer=2, seed_and_step=seed_and_step)
    out.backward(grad_out.to(device).to(out.dtype))
    grads = [x.grad for x in (q, k, v)]
    return [x.detach().double().cpu() for x in (out, *grads) if x is not None]


def exact(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> list[Tensor]:
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    out = scores.softmax(-1) @ v
    out.backward(grad_out.double())
    return [x.detach() for x in (out, q.grad, k.grad, v.grad) if x is not None]


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
@pytest.mark.parametrize(("length", "head_size"), [(1, 64), (65, 32), (512, 64), (200, 128)])
def test_every_variant_is_as_close_to_fp64_on_cuda_as_on_the_cpu(path: Path, length: int, head_size: int) -> None:
    variant = AttentionVariant.from_dict(yaml.safe_load(path.read_text()))
    tensors = inputs(length, head_size)
    reference = exact(*tensors)
    on_cpu, on_cuda = (run(variant, *tensors, device=device) for device in ("cpu", "cuda"))
    for expected, cpu, cuda in zip(reference, on_cpu, on_cuda, strict=True):
        cpu_error, cuda_error = (cpu - expected).norm(), (cuda - expected).norm()
        assert cuda_error <= 1.2 * cpu_error + 1e-3 * expected.norm() + 1e-6


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_two_runs_give_the_same_bits(path: Path) -> None:
    variant = AttentionVariant.from_dict(yaml.safe_load(path.read_text()))
    torch.use_deterministic_algorithms(True)
    try:
        tensors = inputs(300, 64)
        for first, second in zip(
            run(variant, *tensors, device="cuda"), run(variant, *tensors, device="cuda"), strict=True
        ):
            assert torch.equal(first, second)
    finally:
        torch.use_deterministic_algorithms(False)


def test_random_words_do_not_depend_on_the_device() -> None:
    words = []
    for device in ("cpu", "cuda"):
        key = NoiseKey(torch.tensor([7, 11], device=device), 2, torch.arange(3, device=device), 3, 2)
        rows, columns = torch.arange(50, device=device)[:, None], torch.arange(64, device=device)[None]
        words.append(key.words(Stream.OUT_UNNORMALIZED, rows, columns).cpu())
    assert torch.equal(*words)


def test_memory_grows_linearly_with_the_sequence() -> None:
    """At T = 8,192 one T × T matrix per head in FP32 would take 268 MB; both passes stay far below one."""
    q, k, v = (torch.randn(1, 1, 8192, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    variant = AttentionVariant(scores=NEAREST, out_unnormalized=NEAREST)
    attention(
        q, k, v, variant, layer=1, seed_and_step=torch.zeros(2, dtype=torch.int64, device="cuda")
    ).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 100e6
