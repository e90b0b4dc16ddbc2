"""Exact row sums in one pass over the keys: against those of two passes, FP64 and the sums themselves."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint.numerics import launch
from flashpoint.numerics.choices import UNROUNDED, DeltaError
from flashpoint.numerics.variant import AttentionVariant
from tests.numerics.oracle import exact_attention, injected_gradients, run_reference
from tests.numerics.test_kernels import DEVICE, FROM_FILES, kernels_and_reference
from tests.numerics.test_reference_fp64 import STRESSES, normal, one_signed

ONE, TWO = FROM_FILES["flash_exact_rowsum_one_pass"], FROM_FILES["flash_exact_rowsum"]
UNROUNDED_OPERANDS: dict[str, Any] = {"probs": UNROUNDED, "grad_scores": UNROUNDED}


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("stress", STRESSES, ids=lambda stress: stress.__name__)
def test_the_error_to_fp64_is_that_of_two_passes(stress: Any) -> None:
    tensors = [x.bfloat16() for x in stress(150, 32)]
    exact = exact_attention(*tensors)  # type: ignore[arg-type]
    one, two = (run_reference(*tensors, variant) for variant in (ONE, TWO))  # type: ignore[arg-type]
    for gradient in ("grad_q", "grad_k"):
        assert error(one[gradient], exact[gradient]) < 1.05 * error(two[gradient], exact[gradient]), gradient
    assert torch.equal(one["grad_v"], two["grad_v"])


def row_sums(variant: AttentionVariant, engine: str) -> Tensor:
    """α·Σⱼ dSᵢⱼ through the feature of K that is 1 in all keys and that Q does not see."""
    q, k, v, grad_out = (x.bfloat16() for x in one_signed(100, 32))
    k[..., -1], q[..., -1] = 1.0, 0.0
    if engine == "reference":
        return run_reference(q, k, v, grad_out, variant)["grad_q"][..., -1]
    tensors = [x[:1].to(DEVICE) for x in (q, k, v, grad_out)]
    return kernels_and_reference(tensors, variant)[0]["grad_q"][..., -1]


@pytest.mark.parametrize("engine", ["reference", "kernels"])
def test_row_sums_of_ds_are_zero_in_one_pass(engine: str) -> None:
    """Up to FP32, and without it they are not; dQ is rounded to BF16, but not its zero."""
    begun = dataclasses.replace(ONE, **UNROUNDED_OPERANDS)
    left = row_sums(begun, engine).double().abs().max().item()
    assert left < 1e-4
    assert row_sums(dataclasses.replace(begun, exact_row_sum=False), engine).abs().max().item() > 1e-2


@pytest.mark.parametrize("into", ["both", "grad_q", "grad_k"])
@pytest.mark.parametrize("center_grad_q", [False, True])
def test_an_injected_error_comes_after_the_correction(into: Any, center_grad_q: bool) -> None:
    """FP64 with the error in an exact δ."""
    q, k, v, grad_out = normal(60, 16)
    injected = DeltaError(kind="bias", size=0.05, into=into)
    variant = AttentionVariant(
        **UNROUNDED_OPERANDS, exact_row_sum=True, exact_row_sum_passes=1, delta_error=injected,
        center_grad_q=center_grad_q,
    )  # fmt: skip
    found = run_reference(q, k, v, grad_out, variant)
    ones = torch.ones(q.shape[:-1])
    expected = injected_gradients(q, k, v, grad_out, 0.05, ones, into=into, center_grad_q=center_grad_q)
    plain = exact_attention(q, k, v, grad_out)
    for gradient, erring in (("grad_q", into != "grad_k"), ("grad_k", into != "grad_q")):
        effect = (expected[gradient] - plain[gradient]).norm()
        assert (found[gradient].double() - expected[gradient]).norm() < 1e-2 * (effect if erring else 1.0), gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"delta_error": DeltaError(kind="noise", size=0.1, into="grad_k")},
        {"center_grad_q": True, "delta": "out_fp32", "out_residual_bits": 3},
        {"grad_blocks": TWO.scores, "probs": UNROUNDED},
    ],
    ids=["injected", "centered_and_split", "blocks"],
)
def test_kernels_do_so_beside_other_choices(fields: dict[str, Any]) -> None:
    tensors = [x[:1].bfloat16().to(DEVICE) for x in one_signed(70, 32)]
    variant = dataclasses.replace(ONE, **fields)
    assert launch.kernels_support(tensors[0].dtype, tensors[0].shape[-1], variant)
    kernels, reference = kernels_and_reference(tensors, variant)
    for gradient in ("grad_q", "grad_k"):
        assert error(kernels[gradient], reference[gradient]) < 3e-3, gradient


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exact_row_sum_passes": 3}, "choose one of 1, 2"),
        ({"delta": "p_dp"}, "set attn.delta=out"),
        ({"center_keys": True}, "set attn.exact_row_sum_passes=2"),
    ],
)
def test_what_one_pass_cannot_do_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        dataclasses.replace(ONE, **fields)
    assert "\n" not in str(refused.value)
