"""Somebody's own run on a GPU: watched, diagnosed with PyTorch's backends, and a branch of it."""

from pathlib import Path

import pytest
import torch

from examples import nanogpt
from flashpoint.cli.run_words import open_run
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.faults import Fault, faulty_attention
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.other_attention import function_named
from flashpoint.diagnosis.probe import Function, probe, results_of
from flashpoint.diagnosis.verdict import diagnose
from flashpoint.lab.localize.mixture import LayerOf, Mixture, mixed
from flashpoint.lab.localize.own_loop import OwnLoop
from flashpoint.runs.folder import RunFolder
from flashpoint.watching.captures import read_calls

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SMALL = {"layers": "2", "heads": "2", "width": "64", "context": "64", "batch": "16", "steps": "8", "keep": "3"}


def call(function: Function, length: int = 256) -> AttentionCall:
    """Six sequences of four heads that share two of keys, with the function's results."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(6, heads, length, 64) for heads in (4, 2, 2, 4)]
    q, k, v, grad_out = (torch.randn(shape, generator=generator).bfloat16().to(DEVICE) for shape in shapes)
    given = AttentionCall(q, k, v, grad_out, Form(True, 0.125), 1, 0, "f")
    found = results_of(function, given)
    results = (found.out, found.grad_q, found.grad_k, found.grad_v)
    return AttentionCall(q, k, v, grad_out, Form(True, 0.125), 1, 0, "f", *results)


@pytest.mark.parametrize("backend", ["math", "flash", "efficient", "cudnn"])
def test_nothing_is_found_in_pytorchs_backends_and_they_take_the_features(backend: str) -> None:
    function = function_named(f"sdpa:{backend}")
    of = call(function)
    assert probe(function, of) is not None
    assert diagnose(of, function).findings == ()


@pytest.mark.parametrize("kind", ["delta_bias", "dropped_tile", "rounded_denominator"])
def test_a_planted_fault_is_named(kind: str) -> None:
    faulty = faulty_attention(Fault(kind, head=2))

    def function(q, k, v, is_causal, scale):  # type: ignore[no-untyped-def]
        return faulty(q, k, v, is_causal=is_causal, scale=scale)

    assert [(one.kind, one.heads) for one in diagnose(call(function), function).findings] == [(kind, (3,))]


def test_a_branch_has_the_runs_attention_in_its_heads() -> None:
    of = call(function_named("sdpa:math"))
    both = [
        mixed(of.q, of.k, of.v, True, 0.125, place=LayerOf(Mixture("sdpa", "twin of sdpa", (1,), heads), 1))
        for heads in ((2,), None)
    ]
    assert torch.equal(both[0][:, 1], both[1][:, 1])
    assert not torch.equal(both[0][:, 0], both[1][:, 0])


@pytest.mark.parametrize("attention", ["sdpa", "flash_fixed"])
def test_a_loop_is_watched_and_branched_off(tmp_path: Path, attention: str) -> None:
    nanogpt.train(nanogpt.attention_named(attention), **SMALL, runs=str(tmp_path), name="own")
    run = open_run("own", tmp_path)
    assert (run.title, run.verdict) == (attention, "stable to 8")
    assert [found for one in read_calls(tmp_path / "own") for found in diagnose(one).findings] == []
    loop = OwnLoop.of(RunFolder(tmp_path / "own"), f"{nanogpt.__file__}:step", str(tmp_path / "own/step-*.pt"), None)
    trained = loop.train(loop.whole, 3, 4, tmp_path / "branch")
    assert trained.outcome == "stable"
    weights = torch.load(tmp_path / "own/step-000006.pt")["model"]["h.0.attn.c_attn.weight"][:64]
    norms = [float(torch.linalg.matrix_norm(part.double(), 2)) for part in weights.split(32)]
    assert trained.norms[0] == pytest.approx(norms, rel=1e-2)
