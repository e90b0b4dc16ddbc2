"""The ordered gradient of the embedding against FP64, in Triton's interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from flashpoint.lab.embedding import embedding_grad, token_embedding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = 37


def inputs(features: int) -> tuple[Tensor, Tensor]:
    """Gradients [2, 90, C] and tokens [2, 90]: one token on more than a tile of positions, the last token nowhere."""
    generator = torch.Generator().manual_seed(features)
    tokens = torch.randint(0, SIZE - 1, (2, 90), generator=generator)
    tokens[:, ::2] = 5
    return torch.randn(2, 90, features, generator=generator).to(DEVICE), tokens.to(DEVICE)


def in_fp64(grad: Tensor, tokens: Tensor) -> Tensor:
    total = torch.zeros(SIZE, grad.shape[-1], dtype=torch.float64, device=grad.device)
    return total.index_add_(0, tokens.flatten(), grad.flatten(0, 1).double())


@pytest.mark.slow
@pytest.mark.parametrize("features", [1, 48, 160])
def test_each_row_is_the_sum_over_its_positions(features: int) -> None:
    grad, tokens = inputs(features)
    result = embedding_grad(grad, tokens, SIZE)
    torch.testing.assert_close(result.double(), in_fp64(grad, tokens), rtol=1e-6, atol=1e-5)
    assert not result[SIZE - 1].any()
    whole_numbers = (8 * grad).round()
    assert torch.equal(embedding_grad(whole_numbers, tokens, SIZE).double(), in_fp64(whole_numbers, tokens))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_a_gpu_repeats_its_bits_compiled_or_not() -> None:
    grad, tokens = inputs(256)
    weight = torch.randn(SIZE, 256, device=DEVICE, requires_grad=True)
    stock = torch.autograd.grad(torch.nn.functional.embedding(tokens, weight), weight, grad)[0]
    torch.use_deterministic_algorithms(True)
    try:
        compiled = torch.compile(token_embedding, fullgraph=True)
        results = [torch.autograd.grad(f(tokens, weight), weight, grad)[0] for f in (token_embedding, compiled) * 10]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], stock, rtol=1e-5, atol=1e-5)
    assert torch.equal(results[0], embedding_grad(grad, tokens, SIZE))
