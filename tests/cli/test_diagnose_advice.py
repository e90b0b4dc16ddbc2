"""What ``flashpoint diagnose`` advises to try, and where it hedges."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from flashpoint.cli import diagnose_tables
from flashpoint.cli.main import main
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.delta_bias import delta_sample
from flashpoint.diagnosis.faults import Fault
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.probe import results_of
from flashpoint.drop_in import attention, variant_of
from flashpoint.numerics.choices import DeltaError
from tests.cli.diagnosed import captured, diagnose


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plain", "mask", "soft cap"])
@pytest.mark.parametrize(
    ("dtype", "attention", "advised"),
    [
        (torch.bfloat16, "mine", True),
        (torch.bfloat16, "mine with FP16 inside", False),
        (torch.bfloat16, "flash_bf16", False),  # stabilize does not change what flashpoint.attention computes
        (torch.float16, "mine with FP16 inside", False),
        (torch.float16, "mine", False),
        (torch.float32, "mine", False),
    ],
)
def test_fp16_inside_is_advised_where_stabilize_would_put_it(
    tmp_path: Path, dtype: torch.dtype, attention: str, advised: bool, form: str
) -> None:
    call = captured(Fault("delta_bias", size=2e-3))
    forms = {
        "plain": {},
        "mask": {"mask": torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()},
        "soft cap": {"softcap": 1e4},
    }
    call = dataclasses.replace(call, attention=attention, form=dataclasses.replace(call.form, **forms[form]))
    held = {name: getattr(call, name).to(dtype) for name in ("q", "k", "v", "grad_out", "out")}
    held |= {f"grad_{name}": getattr(call, f"grad_{name}").to(dtype) for name in "qkv"}
    dataclasses.replace(call, **held).write(tmp_path / "layer-03.safetensors")
    told = CliRunner().invoke(main, ["diagnose", str(tmp_path)]).stdout
    assert "δ is biased" in told.splitlines()[0]
    assert ("flashpoint.stabilize(" in told) == advised
    assert ("try FP16 inside" in told) == (advised and form == "mask")
    assert "flash_fixed" in told


@pytest.mark.parametrize("name", ["sdpa", "flash_fixed"])
@pytest.mark.parametrize("size", [0.0, 2e-3])
def test_what_a_run_has_is_not_advised_to_it(tmp_path: Path, size: float, name: str) -> None:
    call = dataclasses.replace(captured(Fault("delta_bias", size=size)), attention=name)
    call.write(tmp_path / "layer-03.safetensors")
    told = CliRunner().invoke(main, ["diagnose", str(tmp_path)]).stdout
    assert ("δ is biased" in told.splitlines()[0]) == (size > 0)
    assert ("try flash_fixed" in told or "and with flash_fixed" in told) == (name == "sdpa")
    assert ("flashpoint.stabilize(" in told) == (name == "sdpa" and size > 0)
    (_, found) = diagnose_tables.delta_tables({3: delta_sample(call)}, attentions=name)
    assert ("variant='flash_fixed'" in found[0].note) == (name == "sdpa" and size > 0)


@pytest.mark.parametrize(
    ("attentions", "advised"),
    [("sdpa", True), ("sdpa with FP16 inside", False), ("sdpa_cudnn", True), ("flash_bf16 scores=none", False)],
)
def test_fp16_inside_is_advised_once_also_without_tensors(attentions: str, advised: bool) -> None:
    samples = {3: delta_sample(captured(Fault("delta_bias", size=2e-3)))}
    first, found = diagnose_tables.delta_tables(samples, attentions=attentions)
    assert "δ is biased" in first
    assert ("flashpoint.stabilize(" in found[0].note) == advised


@pytest.mark.parametrize("name", ["mine", "mine with FP16 inside"])
@pytest.mark.parametrize("spoiled", ["q", "grad_q"])
def test_of_nan_where_fp16_is_inside_its_overflow_is_told(tmp_path: Path, spoiled: str, name: str) -> None:
    call = captured(Fault("none"))
    tensor = getattr(call, spoiled).clone()
    tensor[0, 1, 3] = torch.nan
    dataclasses.replace(call, attention=name, **{spoiled: tensor}).write(tmp_path / "layer-03.safetensors")
    told = CliRunner().invoke(main, ["diagnose", str(tmp_path)]).stdout
    assert "a number is not finite" in told.splitlines()[0]
    assert ("With FP16 inside dQ and dK overflow" in told) == (name != "mine")


def test_a_wrong_backward_pass_in_all_heads_is_not_taken_for_a_design(tmp_path: Path) -> None:
    """O is right: no soft cap or window leaves it so."""
    call = captured(Fault("none"))
    assert call.grad_k is not None
    wrong = dataclasses.replace(call, grad_k=call.grad_k * 1.25, attention="mine:attend")
    wrong.write(tmp_path / "layer-03.safetensors")
    (findings, *_) = diagnose(str(tmp_path))["tables"]
    assert {row["finding"] for row in findings["rows"]} == {"gradients_off"}
    assert "backward pass" in findings["note"]
    assert "no fault" not in findings["note"].split(".")[0]


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "hedged"), [(8, False), (4, False), (8, True), (5, True), (4, True), (1, True)])
@pytest.mark.parametrize("name", ["mine:attend", "sdpa"])
def test_a_function_of_the_users_that_means_something_else_is_not_called_faulty(
    tmp_path: Path, wrong: int, hedged: bool, name: str
) -> None:
    """A soft cap in some of eight heads, in FP64. It is a fault in the attentions that are known, and where the forward
    pass alone has it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(3, 8, 48, 16, generator=generator) for _ in range(4))

    def capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
        scores = q.double() @ k.double().mT * scale
        scores[:, :wrong] = torch.tanh(scores[:, :wrong])
        later = torch.ones(48, 48, dtype=torch.bool).triu(1)
        return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v.double()).to(q.dtype)

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
        exactly = (x.double() for x in (q, k, v))
        return F.scaled_dot_product_attention(*exactly, is_causal=True, scale=scale).to(q.dtype)

    tensors = [x.bfloat16() for x in (q, k, v, grad_out)]
    call = AttentionCall(*tensors, Form(True, 0.25), 1, 0, name)
    results = vars(results_of(capped if hedged else exact, call)) | {"out": results_of(capped, call).out}
    dataclasses.replace(call, **results).write(tmp_path / "layer-01.safetensors")
    (findings, *_) = diagnose(str(tmp_path))["tables"]
    assert [row["heads"] for row in findings["rows"]] == [", ".join(map(str, range(1, wrong + 1)))]
    said = findings["note"].startswith("mine:attend returns something else than softmax(QKᵀ·scale)V")
    assert said == (hedged and name == "mine:attend")
    assert findings["note"].startswith("The attention computes something wrong") != said


@pytest.mark.parametrize(("what", "hedged"), [("gate", True), ("coarse", False)])
def test_a_first_row_that_turns_is_no_other_attention(tmp_path: Path, what: str, hedged: bool) -> None:
    """A gate takes another part of each row of O, also of the first, which has one key. An O of FP8's E5M2, with two
    mantissa bits, turns it."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(3, 4, 48, 16, generator=generator).bfloat16() for _ in range(4)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
        later = torch.ones(48, 48, dtype=torch.bool).triu(1)
        weights = (q.double() @ k.double().mT * scale).masked_fill(later, -torch.inf).exp()
        gate = 0.8 + 0.2 * torch.sin(3 * torch.arange(48.0))[:, None] if what == "gate" else 1.0
        out = weights @ v.double() / weights.sum(-1, keepdim=True) * gate
        coarse = out.detach().to(torch.float8_e5m2).double()
        return (out + (coarse - out.detach()) * (what == "coarse")).to(q.dtype)

    call = AttentionCall(*tensors, Form(True, 0.25), 1, 0, "mine:attend")
    dataclasses.replace(call, **vars(results_of(attend, call))).write(tmp_path / "layer-01.safetensors")
    (findings, *_) = diagnose(str(tmp_path))["tables"]
    assert {row["heads"] for row in findings["rows"]} == {"1, 2, 3, 4"}
    assert findings["note"].startswith("mine:attend") == hedged


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine:attend", "sdpa"])
def test_a_sink_that_depends_on_the_query_is_hedged_as_another_attention(tmp_path: Path, name: str) -> None:
    """It makes rows short by other shares than a sink with one score, by which dQ looks as if δ had a bias: the advice
    was to exchange the attention for one with the same rounding."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(16, 4, 48, 16, generator=generator).bfloat16() for _ in range(3))
    tensors = [q, k, v, v.clone()]  # dO is along O
    key = torch.randn(4, 1, 16, generator=generator).double()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
        later = torch.ones(48, 48, dtype=torch.bool).triu(1)
        scores = (q.double() @ k.double().mT * scale).masked_fill(later, -torch.inf)
        column = q.double() @ key.mT * scale + 1
        return (torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v.double()).to(q.dtype)

    call = AttentionCall(*tensors, Form(True, 0.25), 1, 0, name)
    dataclasses.replace(call, **vars(results_of(attend, call))).write(tmp_path / "layer-01.safetensors")
    (findings, *_) = diagnose(str(tmp_path))["tables"]
    assert {row["finding"] for row in findings["rows"]} == {"dead_rows"}
    assert findings["note"].startswith("mine:attend") == (name == "mine:attend")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdpa", "mine:attend"])
@pytest.mark.parametrize("source", ["the rounding of O", "another"])
def test_fp16_inside_is_advised_of_a_bias_that_comes_of_rounding(tmp_path: Path, source: str, name: str) -> None:
    """Values near 1 round alike, and dO has one sign mostly: δ of the rounded O is too small."""
    q, k, v, grad_out = torch.randn(4, 48, 2, 64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    error = DeltaError(kind="bias", size=2e-3) if source == "another" else DeltaError()
    variant = dataclasses.replace(variant_of("flash_fp32"), delta_error=error)
    if source == "the rounding of O":
        v, grad_out = 1 + 0.05 * v, 1 + 0.3 * grad_out
    call = AttentionCall(q, k, v, grad_out, Form(True, 0.25), 3, 9, name)
    found = results_of(lambda q, k, v, c, s: attention(q, k, v, is_causal=c, scale=s, variant=variant), call)
    dataclasses.replace(call, **vars(found)).write(tmp_path / "layer-03.safetensors")
    told = CliRunner().invoke(main, ["diagnose", str(tmp_path)]).stdout
    assert "δ is biased" in told.splitlines()[0]
    assert ("look at the backward pass" in told.splitlines()[0]) == (source == "another")
    assert ("the bias has another source" in told) == (source == "another")
    assert ("fault in the kernel's own" in told) == (source == "another")
    assert ("flashpoint.stabilize(" in told) == (source == "the rounding of O")
    assert ("functions=[…]" in told) == (source == "the rounding of O" and ":" in name)
