"""torch.compile takes the whole model as one graph, for every kind of variant."""

import dataclasses

import pytest
import torch
import yaml

from flashpoint.lab.config import ModelConfig
from flashpoint.lab.model import GPT
from flashpoint.numerics.variant import AttentionVariant
from tests.conftest import REPOSITORY

CONFIG = ModelConfig(n_layer=2, n_head=2, d_model=32, context=24, vocab_size=31)
SELECTED = AttentionVariant(name="selected", center_keys=True, layers=(2,), heads=(1,), elsewhere=AttentionVariant())


NAMES = ("flash_bf16", "flash_centered", "flash_delta_pdp", "flash_exact_rowsum", "flash_independent_delta")
NAMES += ("flash_stochastic", "released_fixed", "sdpa", "standard")
VARIANTS = [
    AttentionVariant.from_dict(yaml.safe_load((REPOSITORY / f"configs/attn/{name}.yaml").read_text())) for name in NAMES
]
"""What an op returns and saves differs between these: another O for δ, centred keys, no op at all."""


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*VARIANTS, SELECTED], ids=lambda variant: variant.name)
def test_compiled_losses_and_gradients_equal_eager_ones(variant: AttentionVariant) -> None:
    config = CONFIG if variant is SELECTED else dataclasses.replace(CONFIG, n_layer=1)
    torch.compiler.reset()
    tokens = torch.randint(0, 31, (2, 24), generator=torch.Generator().manual_seed(0))
    seed_and_step = torch.tensor([1, 2])
    results = []
    for compiled in (False, True):
        model = GPT(config, variant, 0, z_loss=1e-4 if variant.name == "sdpa" else 0.0)
        forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = forward(tokens, tokens.flip(1), seed_and_step)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for eager, compiled_one in zip(*results, strict=True):
        assert torch.equal(eager, compiled_one)
