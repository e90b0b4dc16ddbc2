"""What a newcomer with a laptop sees: the loss explodes, and on the same batches the fix holds.

With one layer of one head, half the width and context, half the batch, a short text and a quicker optimiser than the
preset's: a fraction of the time. ``.ci/run`` has the preset itself.
"""

import json
from pathlib import Path

import pytest
import torch

from flashpoint.cli.run_words import open_run
from flashpoint.numerics.dispatch import attention
from tests import warm
from tests.composed import composed
from tests.conftest import environment, train_command
from tests.verdicts import outcome_of


@pytest.mark.slow
def test_the_laptop_explodes_and_its_fix_holds_on_the_same_batches(tmp_path: Path, text_file: Path) -> None:
    def train(*arguments: str) -> str:
        command = train_command("train.threads=1", "tracking=disabled", *arguments, tiny=False, text_file=text_file)
        return outcome_of(warm.run(command, cwd=tmp_path, env=environment(), timeout=900))[1]

    small = (
        "model.n_layer=1",
        "model.n_head=1",
        "model.d_model=32",
        "model.context=32",
        "train.batch_size=16",
        "detector.tail_steps=0",
        "train.eval_sequences=8",
        "data=text",
        f"data.path={text_file}",
    )
    unwatched = ("probes.attention_interval=0", "checkpoints.interval=0")
    quick = ("train.lr=4e-2", "train.beta2=0.7", "train.warmup_steps=50")
    assert train("attn=flash_bf16", "train.device=cpu", *small, *quick, *unwatched, "run_name=explosion") == "exploded"
    steps = json.loads((tmp_path / "runs/explosion/outcome.json").read_text())["step"]  # a replay goes beyond them
    assert train("replay=explosion", "attn=flash_fixed", "run_name=fixed", f"train.steps={steps}") == "stable"
    exploded, fixed = (open_run(name, tmp_path / "runs") for name in ("explosion", "fixed"))
    outcomes = [json.loads((tmp_path / f"runs/{name}/outcome.json").read_text()) for name in ("explosion", "fixed")]
    assert outcomes[0]["tape_digest"] == outcomes[1]["tape_digest"]
    assert outcomes[0]["step"] == outcomes[1]["step"]
    norms = [run.measured_by_head("w_q_spectral_norm")[1][..., -1].max() for run in (exploded, fixed)]
    assert norms[0] > 3 * norms[1]


@pytest.mark.slow
def test_both_commands_have_the_same_forward_pass_and_differ_in_delta_alone() -> None:
    """dV = Pᵀdo does not know of δ; dQ and dK do."""
    generator = torch.Generator().manual_seed(0)
    do, *inputs = (torch.randn(2, 2, 63, 32, generator=generator, dtype=torch.float32).bfloat16() for _ in range(4))
    results = []
    for name in ("flash_bf16", "flash_fixed"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        variant = composed("experiment=demo_cpu", f"attn={name}").attn
        out = attention(*leaves, variant, layer=1, seed_and_step=torch.tensor([0, 0]))
        results.append((out, *torch.autograd.grad(out, leaves, do)))
    (out, dq, dk, dv), (fixed_out, fixed_dq, fixed_dk, fixed_dv) = results
    assert torch.equal(out, fixed_out)
    assert torch.equal(dv, fixed_dv)
    assert not torch.equal(dq, fixed_dq)
    assert not torch.equal(dk, fixed_dk)
