"""``flashpoint diagnose`` on tensors that another program has written."""

import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from flashpoint.cli.main import main
from tests.cli.diagnosed import diagnose


def test_tensors_of_ones_own_are_diagnosed_with_an_attention_that_is_named(tmp_path: Path) -> None:
    q, k, v, grad_out = torch.randn(4, 4, 2, 64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file(
        {"q": q.clone(), "k": k.clone(), "v": v.clone(), "grad_out": grad_out.clone()}, tmp_path / "own.safetensors"
    )
    own = str(tmp_path / "own.safetensors")
    told = CliRunner().invoke(main, ["diagnose", own, "--attention", "sdpa:flash"]).stdout
    assert "sdpa:flash on these tensors, called anew: step 0, 1 layer of 2 heads" in told
    refused = CliRunner().invoke(main, ["diagnose", own])
    assert refused.exit_code == 2
    assert refused.output == f"error: {own}: the call holds no O; --attention names what computes it\n"


def of_another_program(path: Path, *, causal: bool, by_token: bool = False, rolls: bool = False) -> str:
    """Write tensors as JAX's users may: by their own formula, and without a word of the form."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(4, 2, 40, 16, generator=generator).bfloat16() for _ in range(4))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].mT / 4
    if causal:
        scores = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf)
    out = scores.softmax(-1) @ exact[2]
    grads = torch.autograd.grad(out, exact, grad_out.double())
    if rolls:
        out = torch.stack([out[:, 0].roll(1, 1), out[:, 1]], 1)
    tensors = {"q": q, "k": k, "v": v, "grad_out": grad_out, "out": out.detach()}
    tensors |= dict(zip(("grad_q", "grad_k", "grad_v"), grads, strict=True))
    turned = {name: (x.transpose(1, 2) if by_token else x).bfloat16() for name, x in tensors.items()}
    save_file({name: x.clone(memory_format=torch.contiguous_format) for name, x in turned.items()}, path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_tensors_of_another_program_are_causal_or_not_as_their_o_is(tmp_path: Path, causal: bool) -> None:
    told = diagnose(of_another_program(tmp_path / "own.safetensors", causal=causal))
    assert told["heading"].startswith("Nothing found")
    assert ("without a causal mask" in told["heading"]) == (not causal)
    told = diagnose(of_another_program(tmp_path / "own.safetensors", causal=causal, rolls=True))
    (first, _) = told["tables"]
    assert [(row["heads"], row["finding"]) for row in first["rows"]] == [("1", "out_rows")]


@pytest.mark.parametrize("causal", [True, False])
def test_tensors_by_token_of_another_program_are_refused_with_what_turns_them(tmp_path: Path, causal: bool) -> None:
    file = of_another_program(tmp_path / "own.safetensors", causal=causal, by_token=True)
    result = CliRunner().invoke(main, ["diagnose", file])
    assert result.exit_code == 2
    assert "x.transpose(1, 2)" in result.output


def test_tensors_with_names_that_nobody_reads_are_told(tmp_path: Path) -> None:
    file = of_another_program(tmp_path / "own.safetensors", causal=True)
    held = load_file(file)
    held["dq"] = held.pop("grad_q")
    save_file(held, file)
    told = CliRunner().invoke(main, ["diagnose", file])
    assert told.exit_code == 0
    assert "dq not read" in told.stderr
    held["query"] = held.pop("q")
    save_file(held, file)
    told = CliRunner().invoke(main, ["diagnose", file])
    assert told.exit_code == 2
    assert "no tensor q" in told.stderr
    assert "query" in told.stderr
