"""The memory that a training takes on a CUDA device beside its compiled step."""

from pathlib import Path

import pytest
import torch

from flashpoint.lab.config import ModelConfig
from flashpoint.lab.model import GPT
from flashpoint.numerics.variant import AttentionVariant
from tests.gpu.test_bench_cuda import measured

pytestmark = pytest.mark.gpu


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
    arguments = ("training", "--shape", "gpt2_124m:8", "--seconds", "0.05", "--attention", *attentions)
    graphed, launched, _ = (float(row["memory, GiB"]) for row in measured("training", tmp_path, *arguments))
    assert graphed < 1.3 * launched
