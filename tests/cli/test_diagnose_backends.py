"""``flashpoint diagnose --attention`` with attentions of other libraries: one of them, and all in a table."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashpoint.cli.main import main
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.faults import Fault, faulty_attention
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.other_attention import Refused, function_named
from flashpoint.numerics.production import PRODUCTION, ProductionAttention

BACKENDS = {"sdpa:math": SDPBackend.MATH, "sdpa:flash": SDPBackend.FLASH_ATTENTION}
ERRORS = ("O error", "dQ error", "dK error", "dV error")
OTHERS = ("flash_attn", "fa4", "xformers")
SCALE = 0.3


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def diagnose(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["diagnose", *arguments, "--device", "cpu", "--format", "json"])
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v and dO of three sequences, in which four heads share two of keys."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(3, heads, 40, 16, generator=generator).to(dtype) for heads in (4, 2, 2, 4)]


def results(tensors: list[Tensor], causal: bool, backend: SDPBackend | None) -> list[Tensor]:
    """O, dQ, dK and dV [N, H, T, d] of PyTorch; of nothing in FP64, with a softmax line by line."""
    q, k, v = (x.double() if backend is None else x for x in tensors[:3])
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    if backend is None:
        scores = q @ k.repeat_interleave(2, 1).mT * SCALE
        later = torch.ones(40, 40, dtype=torch.bool).triu(1)
        out = scores.masked_fill(later & causal, -math.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    else:
        with sdpa_kernel(backend):
            more = [x.repeat_interleave(2, 1) for x in (k, v)]
            out = scaled_dot_product_attention(q, *more, is_causal=causal, scale=SCALE)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].to(out.dtype))]


def capture(
    folder: Path, dtype: torch.dtype, causal: bool = True, recorded: bool = True, form: Form | None = None
) -> list[Tensor]:
    """Write a layer that PyTorch's flash backend computed, and return its inputs."""
    tensors = inputs(dtype)
    q, k, v, grad_out = tensors
    found = results(tensors, causal, SDPBackend.FLASH_ATTENTION) if recorded else [None] * 4
    out, grad_q, grad_k, grad_v = found
    call = AttentionCall(q, k, v, grad_out, form or Form(causal, SCALE), 2, 7, "sdpa", out, grad_q, grad_k, grad_v)
    folder.mkdir(exist_ok=True)
    call.write(folder / "layer-02.safetensors")
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_backends_stand_in_a_table_with_their_errors_against_fp64(
    tmp_path: Path, dtype: torch.dtype, causal: bool
) -> None:
    tensors = capture(tmp_path, dtype, causal)
    told = diagnose(str(tmp_path), "--attention", "all")
    rows = {row["attention"]: row for row in told["tables"][0]["rows"]}
    assert list(rows) == ["sdpa, as recorded", *BACKENDS, "sdpa:efficient", "sdpa:cudnn", "flex", *OTHERS]
    exact = results(tensors, causal, None)
    for name, backend in {**BACKENDS, "sdpa, as recorded": SDPBackend.FLASH_ATTENTION}.items():
        assert not rows[name]["why not"]
        for column, found, wanted in zip(ERRORS, results(tensors, causal, backend), exact, strict=True):
            errors = (found.double() - wanted).norm(dim=(-2, -1)) / wanted.norm(dim=(-2, -1))
            error, shown = float(errors.mean(0).max()), rows[name][column]
            if column in ("O error", "dQ error"):
                assert shown == pytest.approx(error, rel=1e-6), (name, column)
            else:  # which count against gradients that cancel less
                assert 0.5 * error < shown < 1.001 * error, (name, column)
    assert all("GPU" in rows[name]["why not"] for name in ("sdpa:efficient", "sdpa:cudnn", "flex"))
    assert abs(rows["sdpa:math"]["follows O"]) < 0.2
    assert abs(rows["sdpa:flash"]["follows O"] - 1) < 0.2
    assert [rows[name]["deterministic"] for name in ("sdpa, as recorded", "sdpa:flash", "sdpa:cudnn")] == [
        "", "yes", "no",
    ]  # fmt: skip
    assert told["heading"].startswith("2 of 8 backends ran; nothing was found.")


def test_people_see_what_ran_and_a_line_for_each_that_did_not(tmp_path: Path) -> None:
    capture(tmp_path, torch.bfloat16, recorded=False)
    result = CliRunner().invoke(main, ["diagnose", str(tmp_path), "--attention", "all", "--device", "cpu"])
    lines = result.stdout.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line[:1] == "|"][2:] == list(BACKENDS)
    assert [line.split(":")[0] for line in lines if line[:1] == "-"] == [
        "- sdpa",
        "- sdpa",
        "- flex",
        *(f"- {name}" for name in OTHERS),
    ]


def test_what_is_found_in_a_backend_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture(tmp_path, torch.bfloat16)

    def fails(*_: object) -> Tensor:
        raise RuntimeError("no kernel image. More of it")

    faulty = faulty_attention(Fault("dropped_tile", head=1))

    def wrong(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> Tensor:
        return faulty(q, *(x.repeat_interleave(2, 1) for x in (k, v)), is_causal=is_causal, scale=scale)

    monkeypatch.setitem(PRODUCTION, "sdpa_math", ProductionAttention(wrong))
    monkeypatch.setitem(PRODUCTION, "flex", ProductionAttention(fails))
    told = diagnose(str(tmp_path), "--attention", "all")
    rows = {row["attention"]: row for row in told["tables"][0]["rows"]}
    assert rows["sdpa:math"]["findings"] == "dropped_tile"
    assert told["heading"].startswith("2 of 8 backends ran; something was found in sdpa:math.")
    assert rows["flex"]["why not"] == "does not take bfloat16 of head size 16 on cpu: no kernel image"


@pytest.mark.slow
def test_a_run_is_asked_for_all_with_its_own_attention_first(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recorded)
    monkeypatch.setattr("flashpoint.lab.trained_calls.TOKENS_AT_ONCE", 1)  # a sequence at a time
    rows = diagnose("runs/original", "--sequences", "4", "--layer", "2", "--attention", "all")["tables"][0]["rows"]
    own, *others = [row for row in rows if not row["why not"]]
    assert own["attention"] == json.loads((recorded / "runs/original/config.json").read_text())["attn"]["name"]
    assert [row["attention"] for row in others] == list(BACKENDS)
    alone = diagnose("runs/original", "--sequences", "4", "--layer", "2", "--attention", "sdpa:flash")
    of_heads = alone["tables"][-1]["rows"]
    assert max(abs(row["standard errors"]) for row in of_heads) == pytest.approx(abs(others[1]["standard errors"]))


def test_both_spellings_name_one_attention(tmp_path: Path) -> None:
    capture(tmp_path, torch.bfloat16)
    one, other = (diagnose(str(tmp_path), "--attention", word)["tables"] for word in ("sdpa:math", "sdpa_math"))
    assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("runs_in_it", [True, False])
def test_a_backend_that_does_not_run_in_deterministic_mode_is_called_outside_it(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, runs_in_it: bool
) -> None:
    """In this mode steps of a run are repeated, and PyTorch refuses cuDNN."""
    monkeypatch.chdir(recorded)
    modes: list[bool] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            modes.append(torch.are_deterministic_algorithms_enabled())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            modes.append(torch.are_deterministic_algorithms_enabled())
            return grad

    original = PRODUCTION["sdpa_math"]
    monkeypatch.setitem(
        PRODUCTION,
        "sdpa_math",
        dataclasses.replace(
            original, call=lambda q, *rest: original.call(Seen.apply(q), *rest), deterministic=runs_in_it
        ),
    )
    for word in ("sdpa:math", "all"):
        modes.clear()
        told = diagnose("runs/original", "--sequences", "2", "--layer", "2", "--attention", word)
        assert set(modes) == {runs_in_it}
        assert torch.are_deterministic_algorithms_enabled()
        said = "sdpa:math was called outside PyTorch's deterministic mode"
        assert (said in told["heading"] + told["tables"][-1]["note"]) == (not runs_in_it)


def test_why_a_backend_does_not_fit_is_pytorchs_own_word() -> None:
    q, k, v, _ = inputs(torch.float32)
    with pytest.raises(
        Refused, match="float32 of head size 16 on cpu: Flash attention requires q,k,v to have the same"
    ):
        function_named("sdpa:flash")(q, k, v[..., :8], True, SCALE)


@pytest.mark.parametrize("added", ["mask", "bias"])
def test_pytorchs_attention_is_given_the_mask_and_the_bias_of_a_call(tmp_path: Path, added: str) -> None:
    window = (torch.arange(40)[:, None] - torch.arange(40) < 9)[None, None]
    bias = torch.randn(1, 4, 40, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensor = {"mask": window} if added == "mask" else {"bias": bias}
    capture(tmp_path, torch.bfloat16, recorded=False, form=Form(True, SCALE, **tensor))  # type: ignore[arg-type]
    told = diagnose(str(tmp_path), "--attention", "sdpa:math")
    assert f"a {'window of 9 keys' if added == 'mask' else added} in every layer" in told["heading"]
    assert told["heading"].startswith("Nothing found")


def test_a_form_that_no_backend_is_given_is_refused(tmp_path: Path) -> None:
    capture(tmp_path, torch.bfloat16, form=Form(True, SCALE, softcap=30.0, sink=torch.zeros(4)))
    why = "is called with is_causal, scale and attn_mask alone, and the recorded call has softcap, sink"
    rows = diagnose(str(tmp_path), "--attention", "all")["tables"][0]["rows"]
    without_mask = why.replace(", scale and attn_mask", " and scale")
    assert {row["why not"] for row in rows} == {"", why, without_mask}
    assert [row["attention"] for row in rows if not row["why not"]] == ["sdpa, as recorded"]
    alone = CliRunner().invoke(main, ["diagnose", str(tmp_path), "--attention", "sdpa:math", "--device", "cpu"])
    assert (alone.exit_code, alone.stderr) == (2, f"error: sdpa:math: {why}\n")
