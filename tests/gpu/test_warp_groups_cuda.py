"""What only a Hopper can show of its own kernels: bits, FP64 and the general kernels, graphs and compilation."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from flashpoint.drop_in import attention as drop_in
from flashpoint.numerics import launch, passes
from flashpoint.numerics.deltas import whole_saved_out
from flashpoint.numerics.dispatch import attention
from tests.gpu.test_attention_cuda import exact
from tests.gpu.test_kernels_cuda import out_and_grads, tensors
from tests.numerics.oracle import exact_attention
from tests.numerics.test_kernels import FROM_FILES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
    ),
]
FIXED = FROM_FILES["flash_fixed"]
LENGTHS = [1, 63, 64, 65, 127, 129, 200, 1040]


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Tensor]]]:
    """What the general kernels compute."""

    def run(*arguments: object) -> list[Tensor]:
        with monkeypatch.context() as changed:
            changed.setattr(launch, "runs_warp_groups", lambda *_: False)
            forget()
            found = out_and_grads(*arguments)
        forget()
        return found

    yield run
    forget()


def forget() -> None:
    """Have it decided anew which kernels compute what."""
    launch._plan.cache_clear()
    passes._passes_of.cache_clear()


def error(x: Tensor, expected: Tensor) -> float:
    return float((x.double().to(expected.device) - expected).square().mean().sqrt())


def uses_warp_groups(x: Tensor) -> bool:
    scale = x.shape[-1] ** -0.5
    return launch._plan(FIXED, 2, x.shape, x.device, "sm_90", True, scale).warp_groups is not None


@pytest.mark.parametrize("length", LENGTHS)
def test_they_are_as_near_to_fp64_as_the_general_kernels(length: int, general: Callable[..., list[Tensor]]) -> None:
    inputs = tensors(2, 3, length, 128)
    assert uses_warp_groups(inputs[0])
    for expected, mine, other in zip(
        exact(*(x.cpu() for x in inputs)), out_and_grads(inputs, FIXED), general(inputs, FIXED), strict=True
    ):
        assert error(mine, expected) <= 1.05 * error(other, expected) + 1e-6


@pytest.mark.parametrize("scale", [None, 0.1, 0.125])
def test_l_and_the_unrounded_o_are_as_near_to_fp64(scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = tensors(4, 12, 1040, 128)
    context = {"layer": 2, "seed_and_step": torch.zeros(2, dtype=torch.int64, device="cuda"), "scale": scale}
    mine = launch.flash_fwd(q, k, v, FIXED, **context)
    monkeypatch.setattr(launch, "runs_warp_groups", lambda *_: False)
    launch._plan.cache_clear()
    other = launch.flash_fwd(q, k, v, FIXED, **context)
    launch._plan.cache_clear()
    alpha = 128**-0.5 if scale is None else scale
    # Their exponentials have one factor, which is FP32: so L, too, is of an α up to 2⁻²⁴ of it away. In the general
    # kernels α is exact where it is a power of two, and L nearer: half of FP32's unit at L is the bound there.
    of_factor = float(torch.tensor(alpha / math.log(2)).double()) * math.log(2)
    products = q.double() @ k.double().mT
    products = products.masked_fill(torch.ones_like(products[0, 0], dtype=torch.bool).triu(1), -math.inf)
    scores = products * alpha
    of_mine, of_other = error(mine[1], (products * of_factor).logsumexp(-1)), error(other[1], scores.logsumexp(-1))
    half_a_unit = 2.0 ** (math.floor(math.log2(float(other[1].abs().max()))) - 24)
    assert of_mine <= (half_a_unit if math.frexp(alpha)[0] == 0.5 else 1.05 * of_other)
    whole = scores.softmax(-1) @ v.double()
    errors = [error(whole_saved_out(out, saved, FIXED), whole) for out, _, saved, _ in (mine, other)]
    assert errors[0] <= 1.05 * errors[1]


def test_bits_depend_neither_on_the_batch_nor_on_the_heads_nor_on_repeats() -> None:
    inputs = tensors(5, 7, 700, 128)
    whole = out_and_grads(inputs, FIXED)
    for _ in range(20):
        assert all(map(torch.equal, whole, out_and_grads(inputs, FIXED)))
    for sequence, head in ((0, 0), (4, 6), (2, 3)):
        at = slice(sequence, sequence + 1), slice(head, head + 1)
        alone = out_and_grads([x[at] for x in inputs], FIXED)
        assert all(torch.equal(x[at], one) for x, one in zip(whole, alone, strict=True))


def test_bits_depend_not_on_strides() -> None:
    """Rows at odd addresses and a gradient of one number are copied first."""
    inputs = tensors(2, 4, 200, 128)
    contiguous = out_and_grads(inputs, FIXED)
    packed = torch.stack(inputs[:3], 3).permute(3, 0, 1, 2, 4).unbind(0)
    odd = [torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in inputs]
    for given in ([*packed, inputs[3].transpose(1, 2).contiguous().transpose(1, 2)], odd):
        assert all(map(torch.equal, contiguous, out_and_grads(given, FIXED)))
    one = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(inputs[3].shape)
    same = [out_and_grads([*inputs[:3], grad], FIXED) for grad in (one, one.contiguous())]
    assert all(map(torch.equal, *same))


def test_more_sequences_and_heads_than_a_grid_has_rows() -> None:
    inputs = tensors(4097, 16, 3, 128)
    whole = [x[-1:] for x in out_and_grads(inputs, FIXED)]
    assert all(map(torch.equal, whole, out_and_grads([x[-1:] for x in inputs], FIXED)))


@pytest.mark.parametrize(("is_causal", "scale"), [(False, None), (True, -0.3), (True, None)])
@pytest.mark.parametrize("length", [1, 129, 300])
def test_the_drop_in_with_grouped_heads_is_near_fp64(is_causal: bool, scale: float | None, length: int) -> None:
    """What is not causal, or has a negative scale, has the general kernels."""
    q, k, v, grad_out = tensors(2, 6, length, 128)
    given = [x.detach().requires_grad_() for x in (q, k[:, :2], v[:, :2])]
    out = drop_in(*given, is_causal=is_causal, scale=scale, enable_gqa=True, variant="flash_fixed")
    grads = torch.autograd.grad(out, given, grad_out)
    of_each_head = (x[:, :2].repeat_interleave(3, 1) for x in (k, v))
    exactly = exact_attention(*(x.cpu() for x in (q, *of_each_head, grad_out)), is_causal, scale)
    for name, mine in zip(("out", "grad_q", "grad_k", "grad_v"), (out.detach(), *grads), strict=True):
        expected = exactly[name]
        if name in ("grad_k", "grad_v"):
            expected = expected.unflatten(1, (2, 3)).sum(2)
        assert error(mine, expected) <= 0.01 * float(expected.square().mean().sqrt()) + 1e-4, name


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_not_a_number_stays_in_the_rows_that_see_it(place: int) -> None:
    inputs = tensors(2, 2, 300, 128)
    inputs[place][0, 0, 150, 3] = torch.nan
    spoilt = out_and_grads(inputs, FIXED)[0].isnan().any(-1)
    expected = torch.zeros(2, 2, 300, dtype=torch.bool, device="cuda")
    expected[0, 0, 150 : (151 if place == 0 else None)] = True
    assert torch.equal(spoilt, expected)


def test_a_cuda_graph_and_a_compiled_function_compute_the_same_bits() -> None:
    inputs, others = tensors(2, 3, 300, 128), [x.flip(0) for x in tensors(2, 3, 300, 128)]
    expected = out_and_grads(others, FIXED)
    static = [x.clone() for x in inputs]
    out_and_grads(static, FIXED)
    with torch.cuda.stream(torch.cuda.Stream()):
        out_and_grads(static, FIXED)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = out_and_grads(static, FIXED)
    for x, other in zip(static, others, strict=True):
        x.copy_(other)
    graph.replay()
    assert all(map(torch.equal, expected, captured))

    seed_and_step = torch.tensor([1, 2], device="cuda")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, FIXED, layer=2, seed_and_step=seed_and_step)

    q, k, v = (x.detach().requires_grad_() for x in others[:3])
    out = torch.compile(call, fullgraph=True)(q, k, v)
    assert all(map(torch.equal, expected, [out.detach(), *torch.autograd.grad(out, (q, k, v), others[3])]))
