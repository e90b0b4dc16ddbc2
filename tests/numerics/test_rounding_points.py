"""Each rounding point, switched on alone in any format, equals the NumPy oracle bit for bit.

Inputs make every sum exact in FP32 in any order: queries and dO have one non-zero feature each, no two the same
one, V holds powers of two, and there is one key in a block.
"""

from typing import Any

import numpy as np
import pytest
import torch

from flashpoint.numerics import key_blocks, reference
from flashpoint.numerics.choices import NEAREST, Rounding
from flashpoint.numerics.variant import AttentionVariant
from tests.numerics.oracle import NOTHING_ROUNDED, exponential_fp64, numpy_attention, run_reference

RESULTS = ("out", "logsumexp", "grad_q", "grad_k", "grad_v")
CHOICES = [
    {"scores": NEAREST},
    {"probs": NEAREST},
    {"out_unnormalized": NEAREST},
    {"out_unnormalized": NEAREST, "out_unnormalized_when": "per_block"},
    {"out_unnormalized": NEAREST, "out_unnormalized_when": "per_product"},
    {"denominator": NEAREST},
    {"out": NEAREST},
    {"grad_probs": NEAREST},
    {"grad_scores": NEAREST},
    {"grad_blocks": NEAREST},
]
FORMATS = [
    {**choices, next(iter(choices)): Rounding("nearest", bits)} for choices in CHOICES for bits in (1, 3, 6, 8, 10)
]


@pytest.fixture(autouse=True)
def _exponential_exact_to_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (key_blocks, reference):
        monkeypatch.setattr(module, "exponential", exponential_fp64)


def powers(generator: np.random.Generator, shape: tuple, low: int, high: int) -> np.ndarray:
    return (generator.choice([-1.0, 1.0], shape) * 2.0 ** generator.integers(low, high, shape)).astype(np.float32)


def exact_inputs(seed: int, choices: Any = (), length: int = 12, size: int = 16) -> list[np.ndarray]:
    """Q, K, V and dO [T, d] float32. V is of powers of two, but where dP is rounded, which is a product with them."""
    generator = np.random.default_rng(seed)
    rows = np.arange(length)
    q, grad_out = (np.zeros((length, size), np.float32) for _ in range(2))
    q[rows, generator.permutation(size)[:length]] = powers(generator, (length,), 0, 3)
    k = generator.standard_normal((length, size))  # no BF16 values: each enters products of one term only
    v = powers(generator, (length, size), -2, 2)
    if "grad_probs" in choices:
        v = generator.standard_normal((length, size)).astype(np.float32)
    grad_out[rows, generator.permutation(size)[:length]] = powers(generator, (length,), -1, 2)
    return [q, k.astype(np.float32), v, grad_out]


def reference_of(inputs: list[np.ndarray], **choices: Any) -> dict[str, np.ndarray]:
    (result,) = references_of([inputs], **choices)
    return result


def references_of(drawn: list[list[np.ndarray]], **choices: Any) -> list[dict[str, np.ndarray]]:
    """Return what each of ``drawn`` gives, as a sequence of one batch."""
    tensors = [torch.from_numpy(np.stack(x))[:, None] for x in zip(*drawn, strict=True)]
    variant = AttentionVariant(**{**NOTHING_ROUNDED, **choices, "block_k": 1})
    results = run_reference(*tensors, variant)  # type: ignore[arg-type]
    return [{name: value[index, 0].numpy() for name, value in results.items()} for index in range(len(drawn))]


def named(choices: dict[str, Any]) -> str:
    return "_".join(map(str, (*choices, *(value.bits for value in choices.values() if isinstance(value, Rounding)))))


@pytest.mark.slow
@pytest.mark.parametrize("choices", CHOICES + FORMATS, ids=named)
def test_a_rounding_point_alone_equals_numpy_bit_for_bit(choices: dict[str, Any]) -> None:
    drawn = [exact_inputs(seed, choices) for seed in range(4)]
    for seed, (inputs, result) in enumerate(zip(drawn, references_of(drawn, **choices), strict=True)):
        expected = numpy_attention(*inputs, **choices)
        for name in RESULTS:
            np.testing.assert_array_equal(result[name], expected[name], err_msg=f"{name}, seed {seed}")


@pytest.mark.slow
@pytest.mark.parametrize("choices", FORMATS, ids=named)
def test_each_format_differs_from_bf16(choices: dict[str, Any]) -> None:
    inputs = exact_inputs(0, choices)
    in_bf16 = reference_of(inputs, **{**choices, next(iter(choices)): NEAREST})
    result = reference_of(inputs, **choices)
    assert any(not np.array_equal(result[name], in_bf16[name]) for name in RESULTS)


@pytest.mark.parametrize("choices", CHOICES, ids=lambda choices: "_".join(choices))
def test_a_rounding_point_alone_changes_what_it_should(choices: dict[str, Any]) -> None:
    inputs = exact_inputs(0, choices)
    unrounded, rounded = reference_of(inputs), reference_of(inputs, **choices)
    changed = {name for name in RESULTS if not np.array_equal(unrounded[name], rounded[name])}
    if choices in ({"grad_scores": NEAREST}, {"grad_probs": NEAREST}):
        assert changed == {"grad_q", "grad_k"}
    elif choices == {"grad_blocks": NEAREST}:
        assert changed == {"grad_q", "grad_k", "grad_v"}
    elif choices in ({"scores": NEAREST}, {"denominator": NEAREST}):
        assert changed == set(RESULTS)
    elif choices == {"probs": NEAREST}:
        assert changed == {"out", "grad_q", "grad_k", "grad_v"}
    else:  # Ō and O reach the gradients through δ alone
        assert changed == {"out", "grad_q", "grad_k"}


def test_without_rounding_points_nothing_is_rounded() -> None:
    inputs = exact_inputs(1)
    result, expected = reference_of(inputs), numpy_attention(*inputs)
    for name in RESULTS:
        np.testing.assert_array_equal(result[name], expected[name], err_msg=name)
    assert (result["out"].view(np.uint32) & 0xFFFF != 0).mean() > 0.5


def test_rounding_per_block_differs_from_rounding_once() -> None:
    inputs = exact_inputs(2)
    final = reference_of(inputs, out_unnormalized=NEAREST)["out"]
    per_block = reference_of(inputs, out_unnormalized=NEAREST, out_unnormalized_when="per_block")["out"]
    assert not np.array_equal(final, per_block)


@pytest.mark.parametrize("seed", range(4))
def test_the_rounded_normalizer_sums_what_was_multiplied(seed: int) -> None:
    inputs = exact_inputs(seed)
    choices = {"probs": NEAREST, "normalizer": "rounded"}
    result, expected = reference_of(inputs, **choices), numpy_attention(*inputs, **choices)
    np.testing.assert_array_equal(result["out"], expected["out"])
    np.testing.assert_array_equal(result["logsumexp"], expected["logsumexp"])
    assert not np.array_equal(result["logsumexp"], reference_of(inputs, probs=NEAREST)["logsumexp"])


@pytest.mark.parametrize("counted", [{}, {"masked_blocks": "count"}], ids=["skipped", "counted"])
def test_the_floor_under_each_block_of_the_denominator(counted: dict[str, Any]) -> None:
    inputs, choices = exact_inputs(3), {"denominator_floor": 0.25, **counted}
    result, expected = reference_of(inputs, **choices), numpy_attention(*inputs, **choices)
    for name in RESULTS:
        np.testing.assert_array_equal(result[name], expected[name], err_msg=name)
    assert not np.array_equal(result["out"], reference_of(inputs)["out"])
