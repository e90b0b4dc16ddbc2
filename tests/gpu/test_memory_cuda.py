"""Memory on a CUDA device: of the drop-in beside PyTorch's attention, and of a training beside its compiled step."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashpoint
from flashpoint.lab.config import ModelConfig
from flashpoint.lab.model import GPT
from flashpoint.numerics.variant import AttentionVariant
from tests.gpu.test_bench_cuda import measured

pytestmark = pytest.mark.gpu


def peak(attend: Callable[..., Tensor], shape: tuple[int, ...]) -> int:
    """Bytes of a second forward and backward pass beyond its inputs; the first one compiles."""
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = attend(q, k, v, is_causal=True)
        grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        taken = torch.cuda.max_memory_allocated() - before
        del out, grads
    return taken


@pytest.mark.parametrize("shape", [(32, 12, 1024, 64), (64, 4, 512, 64), (8, 16, 4096, 64), (8, 16, 4096, 128)])
def test_the_drop_in_takes_no_more_than_pytorchs_flash(shape: tuple[int, ...]) -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        of_pytorch = peak(F.scaled_dot_product_attention, shape)
    for variant in ("flash_exact_rowsum", "flash_fixed"):
        assert peak(partial(flashpoint.attention, variant=variant), shape) <= of_pytorch


@pytest.mark.parametrize("autocast", [False, True])
def test_a_validation_holds_few_logits_in_fp32_and_has_the_bits_of_one_that_holds_all(autocast: bool) -> None:
    config = ModelConfig(n_layer=1, n_head=1, d_model=64, context=1024, vocab_size=50257)
    model = GPT(config, AttentionVariant(), 0).cuda()
    tokens = torch.randint(50257, (16, 1025), device="cuda")
    arguments = tokens[:, :-1], tokens[:, 1:], torch.zeros(2, dtype=torch.int64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss = model(*arguments)
            taken = torch.cuda.max_memory_allocated() - before
        assert torch.equal(model(*arguments), loss)
    logits = 16 * 1024 * config.vocab_size * (2 if autocast else 4)
    assert taken < 1.5 * logits


@pytest.mark.slow
def test_a_graph_takes_little_memory_beside_its_step(tmp_path: Path) -> None:
    """The compilation left as much again as a step takes, on another stream."""
    attentions = ("flash_bf16", "flash_bf16,train.cuda_graph=false")
    arguments = ("training", "--shape", "gpt2_124m:8/8", "--seconds", "0.05", "--attention", *attentions)
    graphed, launched, _ = (float(row["memory, GiB"]) for row in measured("training", tmp_path, *arguments))
    assert graphed < 1.3 * launched
