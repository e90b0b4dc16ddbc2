"""Drawn targets on a GPU: the tokens that a CPU draws, and the same in a recorded pass."""

import pytest
import torch

from flashpoint.lab.config import ModelConfig, Targets
from flashpoint.lab.model import GPT
from flashpoint.lab.probes.instrumented import InstrumentedPass
from flashpoint.lab.probes.targets import draw
from flashpoint.numerics.choices import NEAREST
from flashpoint.numerics.variant import AttentionVariant

pytestmark = pytest.mark.gpu


def test_a_gpu_draws_what_a_cpu_draws() -> None:
    logits = torch.randn(2, 300, 1000, generator=torch.Generator().manual_seed(0))
    key = torch.tensor([7, 11])
    assert torch.equal(draw(logits.cuda(), key.cuda()).cpu(), draw(logits, key))


@pytest.mark.parametrize("targets", ["model", "unrounded"])
def test_a_recorded_pass_draws_anew_for_each_key(targets: Targets) -> None:
    shape = ModelConfig(n_layer=2, n_head=2, d_model=64, context=64, vocab_size=50)
    variant = AttentionVariant(name="flash_bf16", scores=NEAREST, out_unnormalized=NEAREST)
    model = GPT(shape, variant, seed=0).cuda()
    sequences = torch.randint(0, 50, (4, 65), generator=torch.Generator().manual_seed(0))
    observe = InstrumentedPass(model, sequences, 4, torch.device("cuda"), targets)
    keys = [torch.tensor([0, step]) for step in (0, 1, 2, 0)]  # the second call records, the others repeat
    gradients = [observe(sequences, key.cuda()).grad_out.clone() for key in keys]
    assert torch.equal(gradients[0], gradients[3])
    assert not torch.equal(gradients[1], gradients[2])
