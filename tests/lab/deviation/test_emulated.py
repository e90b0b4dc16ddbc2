"""The two emulated attentions against PyTorch's softmax and autograd in FP64, and by hand."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashpoint.errors import UserError
from flashpoint.lab.deviation.arithmetic import EXACT, Arithmetic, arithmetic
from flashpoint.lab.deviation.drawn_inputs import drawn
from flashpoint.lab.deviation.emulated import Block, Inputs, Results, baseline, flash, golden
from flashpoint.lab.deviation.formats import BF16, E4M3, FP16, FP32, Format, format_named
from tests.numerics.oracle import exact_attention

BF16_FP32 = arithmetic(BF16, "fp32")


def drawn_of(length: int = 37, d: int = 16, seed: int = 0, compute: Arithmetic = EXACT) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, g = (torch.randn(2, 2, length, d, generator=generator, dtype=torch.float64) for _ in range(4))
    return Inputs(*(compute.round(x) for x in (2 * q, k, v, g)))


def by_autograd(inputs: Inputs, causal: bool) -> dict[str, Tensor]:
    """In FP64 from the definition."""
    if causal:
        names = {"O": "out", "L": "logsumexp", "dQ": "grad_q", "dK": "grad_k", "dV": "grad_v"}
        found = exact_attention(inputs.q, inputs.k, inputs.v, inputs.grad_out)
        values = {symbol: found[name] for symbol, name in names.items()}
    else:
        q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        out = scores.softmax(-1) @ v
        gradients = torch.autograd.grad(out, (q, k, v), inputs.grad_out)
        values = {"O": out.detach(), "L": scores.detach().logsumexp(-1)}
        values |= dict(zip(("dQ", "dK", "dV"), gradients, strict=True))
    return {**values, "δ": (inputs.grad_out * values["O"]).sum(-1)}


def assert_close(found: Results, expected: dict[str, Tensor]) -> None:
    assert found.values.keys() == expected.keys()
    for name, value in expected.items():
        assert (found.values[name] - value).abs().max() < 1e-12, name


@pytest.mark.parametrize("causal", [True, False])
def test_the_baseline_in_fp64_is_softmax_attention(causal: bool) -> None:
    inputs = drawn_of()
    assert_close(baseline(inputs, EXACT, causal=causal, backward=True), by_autograd(inputs, causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", [Block(1, 1), Block(8, 8), Block(5, 16), Block(16, 5), Block(37, 37), Block(64, 64)])
def test_flash_in_fp64_is_softmax_attention_for_every_block(block: Block, causal: bool) -> None:
    inputs = drawn_of()
    assert_close(flash(inputs, EXACT, block, causal=causal, backward=True), by_autograd(inputs, causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("elements", [1, 300, 1 << 20])
def test_the_golden_value_by_blocks_of_rows_is_that_of_all_rows(elements: int, causal: bool) -> None:
    assert_close(golden(drawn_of(), elements, causal=causal, backward=True), by_autograd(drawn_of(), causal))


class Largest(TorchDispatchMode):
    """Keeps how many elements the largest tensor has that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not out.is_inference():
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_neither_flash_nor_the_golden_value_holds_a_matrix_of_all_rows_by_all_keys(causal: bool) -> None:
    inputs = drawn("normal", 1, length := 512, 4).map(BF16_FP32.round)
    with Largest() as largest:
        flash(inputs, BF16_FP32, Block(16, 16), causal=causal, backward=True)
        golden(inputs, 1 << 13, causal=causal, backward=True)
    assert largest.elements < length**2 / 8


def test_alpha_is_that_of_the_inputs() -> None:
    inputs = drawn_of(seed=2)
    other = Inputs(inputs.q * 0.5, inputs.k, inputs.v, inputs.grad_out)
    scaled = Inputs(inputs.q, inputs.k, inputs.v, inputs.grad_out, scale=0.5 / math.sqrt(inputs.q.shape[-1]))
    for compute in (
        lambda x: baseline(x, EXACT, causal=True, backward=False),
        lambda x: flash(x, EXACT, Block(8, 8), causal=True, backward=False),
        lambda x: golden(x, 100, causal=True, backward=False),
    ):
        assert (compute(scaled).values["O"] - compute(other).values["O"]).abs().max() < 1e-14


def test_without_the_backward_pass_the_forward_is_the_same() -> None:
    inputs = drawn_of()
    for both, forward in (
        (baseline(inputs, BF16_FP32, causal=True, backward=back) for back in (True, False)),
        (flash(inputs, BF16_FP32, Block(8, 8), causal=True, backward=back) for back in (True, False)),
    ):
        assert list(forward.values) == ["O", "L"]
        assert all(torch.equal(both.values[name], forward.values[name]) for name in forward.values)


def test_rescalings_are_counted_by_hand() -> None:
    """The scores of every query are 1, 3, 2 and 4."""
    q, k = torch.ones(1, 1, 4, 1, dtype=torch.float64), torch.tensor([1.0, 3.0, 2.0, 4.0]).double().reshape(1, 1, 4, 1)
    inputs = Inputs(q, k, k, k)

    def rescalings(keys: int, causal: bool) -> list[int]:
        found = flash(inputs, EXACT, Block(4, keys), causal=causal, backward=False).rescalings
        assert found is not None
        return found.flatten().tolist()

    assert rescalings(1, causal=False) == [2, 2, 2, 2]  # at 3 and at 4
    assert rescalings(1, causal=True) == [0, 1, 1, 2]
    assert rescalings(2, causal=False) == [1, 1, 1, 1]  # (1, 3), then (2, 4)
    assert rescalings(2, causal=True) == [0, 0, 0, 1]
    assert rescalings(4, causal=False) == [0, 0, 0, 0]
    assert baseline(inputs, EXACT, causal=True, backward=False).rescalings is None


def bf16(x: float) -> float:
    return float(np.float64(x).astype(ml_dtypes.bfloat16))


def test_one_row_in_bf16_by_hand() -> None:
    """One query, two keys, one feature. Flash has a block a key and rescales once, by a factor in BF16."""
    key, value, grad = [0.5, 1.25], [1.0, -2.015625], 1.5
    q, k, v, g = (
        torch.tensor(x, dtype=torch.float64).reshape(1, 1, -1, 1) for x in ([1.0, 1.0], key, value, [grad] * 2)
    )
    row, inputs = 1, Inputs(q, k, v, g)
    low = bf16(math.exp(-0.75))
    assert low == 0.47265625  # 0.47237 between 0.470703125 and 0.47265625
    mass = 1 + low  # FP32
    found = {name: x[0, 0, row] for name, x in baseline(inputs, BF16_FP32, causal=True, backward=True).values.items()}
    p = [bf16(low / mass), bf16(1 / mass)]
    assert p == [0.3203125, 0.6796875]
    out = bf16(p[0] * 1.0 + p[1] * -2.015625)
    assert found["O"].item() == out == -1.046875
    delta = np.float32(p[0] * 1.5 + p[1] * bf16(-2.015625 * 1.5))
    assert found["δ"].item() == delta
    grad_scores = [bf16(p[j] * bf16(bf16(grad * value[j]) - float(delta))) for j in range(2)]
    assert found["dQ"].item() == bf16(grad_scores[0] * 0.5 + grad_scores[1] * 1.25)

    found = {
        name: x[0, 0, row]
        for name, x in flash(inputs, BF16_FP32, Block(1, 1), causal=True, backward=True).values.items()
    }
    out = bf16(float(np.float32(low * 1.0 - 2.015625) / np.float32(mass)))
    assert found["O"].item() == out == -1.046875
    logsumexp = np.float32(1.25) + np.float32(math.log(mass))
    assert found["L"].item() == logsumexp
    p = [bf16(math.exp(bf16(score - float(logsumexp)))) for score in key]
    delta = np.float32(grad * out)
    grad_scores = [bf16(p[j] * bf16(bf16(grad * value[j]) - float(delta))) for j in range(2)]
    assert found["dQ"].item() == bf16(float(np.float32(grad_scores[0] * 0.5) + np.float32(grad_scores[1] * 1.25)))
    whole = flash(inputs, arithmetic(BF16, "same"), Block(1, 1), causal=True, backward=False).values["O"][0, 0, row]
    assert whole.item() == bf16(bf16(low - 2.015625) / bf16(mass))


@pytest.mark.parametrize("precision", [FP32, FP16, BF16, E4M3, format_named("m2")])
@pytest.mark.parametrize("accumulate", ["fp32", "same", "within"])
def test_results_are_numbers_of_the_precision(precision: Format, accumulate: str) -> None:
    compute = arithmetic(precision, accumulate)
    inputs = drawn_of(12, compute=compute)
    for found in (
        baseline(inputs, compute, causal=True, backward=True),
        flash(inputs, compute, Block(4, 4), causal=True, backward=True),
    ):
        for name, value in found.values.items():
            kept = compute.lasting if name in ("L", "δ") else precision
            assert torch.equal(kept.round(value), value), name
            assert value.isfinite().all(), name


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["fp32", "same", "within"])
@pytest.mark.parametrize("engine", ["baseline", "flash"])
def test_fewer_mantissa_bits_deviate_more(engine: str, accumulate: str) -> None:
    sizes = []
    for bits in (23, 16, 10, 7, 4, 2):
        compute = arithmetic(format_named(f"m{bits}"), accumulate)
        inputs = drawn_of(48, compute=compute)
        golden = baseline(inputs, EXACT, causal=True, backward=True).values
        found = (
            baseline(inputs, compute, causal=True, backward=True)
            if engine == "baseline"
            else flash(inputs, compute, Block(16, 16), causal=True, backward=True)
        )
        sizes.append({name: (found.values[name] - golden[name]).square().mean().sqrt().item() for name in golden})
    for name in sizes[0]:
        of_name = [size[name] for size in sizes]
        assert of_name == sorted(of_name), (name, of_name)


def test_a_sum_adds_one_term_at_a_time_in_its_own_format() -> None:
    """In BF16, 256 + 1 is 256; in FP32 257 terms are 513."""
    a, b = torch.ones(1, 258, dtype=torch.float64), torch.ones(258, 1, dtype=torch.float64)
    a[0, 0] = 256
    assert arithmetic(BF16, "same").sum_of_products(a, b).item() == 256
    assert BF16_FP32.sum_of_products(a, b).item() == 513
    assert BF16_FP32.product(a, b).item() == 512
    assert arithmetic(BF16, "fp16").sum_of_products(a, b).item() == 513
    assert arithmetic(FP32, "bf16").sums == FP32  # never coarser than the operands


def test_an_unknown_accumulator_is_refused() -> None:
    with pytest.raises(UserError, match=r"^--accumulate fp99: no such format; give one of fp64, .*, same, or within$"):
        arithmetic(BF16, "fp99")
