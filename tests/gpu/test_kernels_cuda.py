"""What only a GPU can show of the kernels: repeats, indices beyond 2³¹, PyTorch's own checks of the op."""

import functools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flashpoint.numerics.dispatch import attention
from flashpoint.numerics.ops import flash_fwd_op
from flashpoint.numerics.variant import AttentionVariant
from tests.numerics.test_kernels import FROM_FILES

pytestmark = pytest.mark.gpu


def tensors(*shape: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(4)]


@functools.cache
def seed_and_step() -> Tensor:
    return torch.tensor([1, 2], device="cuda")  # once: a captured CUDA graph refuses the copy


def out_and_grads(inputs: list[Tensor], variant: AttentionVariant) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = attention(q, k, v, variant, layer=2, seed_and_step=seed_and_step())
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].to(out.dtype))]


@pytest.mark.parametrize("name", [name for name, variant in FROM_FILES.items() if variant.kernel == "flash"])
def test_fifty_launches_give_the_same_bits(name: str) -> None:
    inputs = tensors(4, 12, 700, 64)
    first = out_and_grads(inputs, FROM_FILES[name])
    for _ in range(49):
        for one, other in zip(first, out_and_grads(inputs, FROM_FILES[name]), strict=True):
            assert torch.equal(one, other)


class Mode(TorchDispatchMode):
    """Sees each operation: the kernels are then called by an op."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["flash_fixed", "flash_exact_rowsum", "flash_centered", "flash_stochastic"])
def test_called_without_an_op_they_give_the_same_bits(name: str) -> None:
    """Also where rows start at odd addresses, so that tensors have to be copied."""
    wide = tensors(4, 3, 100, 65)
    for given in (tensors(2, 3, 100, 64), [x[..., 1:] for x in wide]):
        with Mode():
            by_op = out_and_grads(given, FROM_FILES[name])
        for _ in range(2):  # the second launch is one that was kept
            for one, other in zip(by_op, out_and_grads(given, FROM_FILES[name]), strict=True):
                assert torch.equal(one, other)


def test_kept_launches_follow_memory_streams_graphs_and_hooks() -> None:
    from triton import knobs

    inputs, seed_and_step = tensors(2, 3, 100, 64), torch.tensor([1, 2], device="cuda")

    def results() -> list[Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in inputs[:3])  # where the last call's lay, or elsewhere
        out = attention(q, k, v, FROM_FILES["flash_fixed"], layer=2, seed_and_step=seed_and_step)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]

    first, held, seen = results(), [], []
    found = [results() for _ in range(3)]
    for _ in range(3):
        held.append(torch.empty(2, 3, 100, 64, device="cuda", dtype=torch.bfloat16))
        found.append(results())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found += [results() for _ in range(3)]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results()
    for x in captured:
        x.zero_()
    graph.replay()
    found.append(captured)
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        found.append(results())
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) >= 3
    for again in found:
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one, other)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one_gives_the_same_bits() -> None:
    variant, results = FROM_FILES["flash_fixed"], []
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        q, k, v, grad_out = (x.to(device) for x in tensors(2, 3, 100, 64))
        for x in (q, k, v):
            x.requires_grad_()
        out = attention(q, k, v, variant, layer=2, seed_and_step=torch.tensor([1, 2], device=device))
        results.append([x.cpu() for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out))])
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert torch.equal(one, other)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[1] < 80e9, reason="takes 45 GB")
@pytest.mark.parametrize("name", ["flash_bf16", "flash_fixed"])  # on Hopper the second has other kernels
def test_more_than_2_to_the_31_elements(name: str) -> None:
    inputs = tensors(65, 64, 4096, 128)
    assert inputs[0].numel() > 2**31
    variant = FROM_FILES[name]
    whole = [x[-1:].clone() for x in out_and_grads(inputs, variant)]
    alone = out_and_grads([x[-1:].clone() for x in inputs], variant)
    for one, other in zip(whole, alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "name",
    [
        "flash_bf16",
        "flash_centered",
        "flash_delta_fp32",
        "flash_delta_split",
        "flash_exact_rowsum_one_pass",
        "flash_independent_delta",
        "flash_centered_grad",
    ],
)
def test_the_op_passes_pytorchs_own_checks(name: str) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(2, 3, 100, 64)[:3])
    torch.library.opcheck(
        flash_fwd_op, (q, k, v, torch.tensor([1, 2], device="cuda"), FROM_FILES[name].key, 2, True, 0.125)
    )


def test_activation_checkpointing_changes_no_bit() -> None:
    inputs, variant = tensors(2, 3, 100, 64), FROM_FILES["flash_stochastic"]
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    seed_and_step = torch.tensor([1, 2], device="cuda")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, variant, layer=2, seed_and_step=seed_and_step)

    out = checkpoint(call, q, k, v, use_reentrant=False)
    again = [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]
    for one, other in zip(out_and_grads(inputs, variant), again, strict=True):
        assert torch.equal(one, other)


def test_strides_of_a_packed_projection_change_no_bit() -> None:
    """q, k, v as the model makes them: slices of one tensor, read in place."""
    packed = torch.randn(2, 200, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    views = list(packed.permute(2, 0, 3, 1, 4).unbind(0))
    grad_out = torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16)
    for name in ("flash_bf16", "flash_centered", "flash_centered_grad"):
        strided = out_and_grads([*views, grad_out], FROM_FILES[name])
        copied = out_and_grads([*(x.contiguous() for x in views), grad_out], FROM_FILES[name])
        for one, other in zip(strided, copied, strict=True):
            assert torch.equal(one, other)
