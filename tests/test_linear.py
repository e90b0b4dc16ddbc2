"""Linear layers on a CPU against FP64: bit for bit where FP32 sums are exact, else within their error bound."""

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from flashpoint.lab.config import ModelConfig
from flashpoint.lab.linear import Linear, linear, rounded_matmul
from flashpoint.lab.model import GPT
from flashpoint.numerics.variant import AttentionVariant
from tests.conftest import REPOSITORY

B, T, IN, OUT = 3, 50, 96, 70


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """FP32 close to BF16 values, which are whole and within 128: sums of up to 1,000 products are exact in FP32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 129, shape, generator=generator) * (1 + 2.0**-10)


def normals(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded_once(x: npt.NDArray[np.float64]) -> Tensor:
    """To BF16, by ml_dtypes; kept in FP32."""
    return torch.from_numpy(x.astype(ml_dtypes.bfloat16).astype(np.float32))


def operands(x: Tensor) -> npt.NDArray[np.float64]:
    """BF16 values [rows, columns] of x [..., columns]."""
    return rounded_once(x.detach().flatten(0, -2).double().numpy()).double().numpy()


def products(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """The three products of a linear layer under autocast: result, left and right operand, each [rows, columns]."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x, weight)
    y.backward(grad.bfloat16())
    assert y.dtype == torch.bfloat16
    assert y.shape == grad.shape
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
    a, w, g = operands(x), operands(weight), operands(grad)
    return {
        "y": (y.detach().float().flatten(0, -2), a, w.T),
        "grad_x": (x.grad.flatten(0, -2), g, w),
        "grad_weight": (weight.grad, g.T, a),
    }


INPUTS = {
    "matrix": lambda draw: (draw(B * T, IN, seed=0), draw(OUT, IN, seed=1), draw(B * T, OUT, seed=2)),
    "sequences": lambda draw: (draw(B, T, IN, seed=0), draw(OUT, IN, seed=1), draw(B, T, OUT, seed=2)),
    "strided": lambda draw: (
        draw(T, B, IN, seed=0).transpose(0, 1),
        draw(IN, 2 * OUT, seed=1).mT[::2],
        draw(B, OUT, T, seed=2).mT,
    ),
}


@pytest.mark.parametrize("shape", INPUTS)
def test_exact_sums_are_rounded_once_to_nearest_even(shape: str) -> None:
    for name, (result, left, right) in products(*INPUTS[shape](whole_numbers)).items():
        exact = left @ right
        assert np.abs(left).max() == np.abs(right).max() == 128
        assert (rounded_once(exact).double().numpy() != exact).mean() > 0.5, "rounding has to matter"
        assert torch.equal(result, rounded_once(exact)), name


@pytest.mark.parametrize("shape", INPUTS)
def test_other_sums_are_within_fp32_sums_and_half_an_ulp_of_bf16(shape: str) -> None:
    for name, (result, left, right) in products(*INPUTS[shape](normals)).items():
        exact = left @ right
        of_sum = left.shape[1] * 2.0**-24 * (np.abs(left) @ np.abs(right))
        half_ulp = 2.0 ** (np.floor(np.log2(np.abs(exact) + of_sum)) - 8)
        assert (np.abs(result.double().numpy() - exact) <= of_sum + half_ulp).all(), name


def test_a_frozen_operand_has_no_gradient() -> None:
    x, weight = normals(5, IN, seed=0).requires_grad_(), normals(OUT, IN, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_second_derivatives_are_refused_and_not_half_of_them() -> None:
    x, weight = normals(5, IN, seed=0).requires_grad_(), normals(OUT, IN, seed=1).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x, weight)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


def test_without_autocast_it_is_a_plain_linear_layer() -> None:
    layer, x = Linear(IN, OUT), normals(B, T, IN, seed=0)
    assert torch.equal(layer(x), F.linear(x, layer.weight))


def test_not_a_number_and_infinity_stay_what_they_are() -> None:
    x = torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, 1.0], [1.0, 1.0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear(x, torch.ones(1, 2)).float()
    torch.testing.assert_close(found, x.sum(1, keepdim=True), rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_the_op_meets_what_pytorch_asks_of_one() -> None:
    a, b = (normals(*shape, seed=0).bfloat16().requires_grad_() for shape in ((6, 5), (5, 4)))
    torch.library.opcheck(rounded_matmul, (a, b))
    torch.library.opcheck(rounded_matmul, (a.detach().mT, a.detach()))


@pytest.mark.parametrize("shape", INPUTS)
def test_a_compiled_layer_has_the_bits_of_an_eager_one(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = products(*INPUTS[shape](normals))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for name, (result, _, _) in products(*INPUTS[shape](normals)).items():
        assert torch.equal(result, eager[name][0]), name


@pytest.mark.parametrize("attention", ["flash_bf16", "flash_fixed", "standard"])
def test_a_training_step_multiplies_no_bf16_matrices(attention: str) -> None:
    variant = AttentionVariant.from_dict(yaml.safe_load((REPOSITORY / f"configs/attn/{attention}.yaml").read_text()))
    model = GPT(ModelConfig(n_layer=2, n_head=2, d_model=32, context=24, vocab_size=31), variant, 0)
    tokens = torch.randint(0, 31, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.profiler.profile(record_shapes=True) as profile:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens, tokens.flip(1), torch.tensor([0, 0]))
        loss.backward()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    multiplications = [e for e in events if e.name() in {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"}]
    assert {dtype for event in multiplications for dtype in event.dtypes()[:2]} == {"float"}
    assert sum(event.name() == "aten::mm" for event in events) == 3 * (2 * 4 + 1)
