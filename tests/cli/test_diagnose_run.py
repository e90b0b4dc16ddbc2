"""What ``flashpoint diagnose`` says of a watched run beside the tensors of one capture. The loop knows what it did."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

from flashpoint.cli.main import main
from flashpoint.diagnosis.faults import Fault
from flashpoint.files import write_json
from flashpoint.watching.loop import Watch
from tests.cli.diagnosed import captured as captured_call
from tests.records import MANIFEST
from tests.watching.loops import Pair, capturing, loop, plain

BAD = 5
"""The step whose weights are NaN."""


def told(*arguments: str) -> str:
    """The note of the last table."""
    result = CliRunner().invoke(main, ["diagnose", *arguments, "--format", "json"])
    assert result.exit_code == 0, result.output
    note: str = json.loads(result.stdout)["tables"][-1]["note"]
    return note


def spoiled(model: Any, number: int, watched: Watch) -> None:
    if number == BAD:
        with torch.no_grad():
            model.second.qkv.weight[64:] = float("nan")  # of W_V
    if number == 2:
        watched.capture(sequences=0)
    plain(model, number, watched)
    if number >= BAD:
        model.zero_grad()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Captures of step 2, as asked for, of the loss that was NaN, with tensors of step 2, and of the next one."""
    monkeypatch.chdir(tmp_path)
    loop(Path("runs"), step=spoiled, steps=12, interval=500)
    captures = sorted(path.name for path in Path("runs/own/captures").iterdir())
    assert captures == ["step-0000002", f"step-{BAD:07}", "step-0000006"]
    return Path("runs/own")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cleared", "shows"),
    [("before the watch", "gradients were missing or all 0"), ("after it", "no W_Q changed its norm"), ("", "")],
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_cleared_too_early_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleared: str, shows: str, set_to_none: bool
) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 1:
            watched.capture(sequences=0)
        x = torch.randn(3, 12, 32)
        loss = model(x).square().mean()
        loss.backward()
        if cleared == "before the watch":
            model.zero_grad(set_to_none)
        watched.step(loss, x)
        if cleared == "after it":
            model.zero_grad(set_to_none)

    monkeypatch.chdir(tmp_path)
    loop(Path("runs"), step=step)
    note = told("runs/own")
    words = {"gradients were missing or all 0", "no W_Q changed its norm"}
    assert {one for one in words if one in note} == ({shows, "no W_Q changed its norm"} if shows else set())


def test_matrices_that_are_frozen_are_not_said_to_lack_their_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where biases alone are trained."""
    model = Pair()
    for block in (model.first, model.second):
        block.qkv.weight.requires_grad_(False)
    monkeypatch.chdir(tmp_path)
    loop(Path("runs"), model, capturing(1, 0))
    assert "no W_Q changed its norm: all are frozen, or" in told("runs/own")


@pytest.mark.slow
@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(("step", "next_one"), [(2, BAD), (BAD, 6)])
def test_a_capture_from_before_a_nan_tells_of_it_and_of_the_next_capture(
    run: Path, ended: bool, step: int, next_one: int
) -> None:
    """Also while the loop runs, or after it was killed: then the metrics alone show it."""
    if not ended:
        (run / "outcome.json").unlink()
    capture = run / f"captures/step-{step:07}"
    for arguments in ((str(run), "--step", str(step)), (str(capture),), (str(capture / "layer-01.safetensors"),)):
        assert told(*arguments).startswith(
            f"After these tensors, which are of step 2, the loss was no finite number at step {BAD}. "
            f"The next capture: flashpoint diagnose runs/own --step {next_one}."
        )


def test_the_errors_of_delta_that_a_capture_leaves_tell_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 1:
            watched.capture(sequences=6)
        spoiled(model, number, watched)

    monkeypatch.chdir(tmp_path)
    loop(Path("runs"), step=step, steps=12, interval=500)
    capture = Path("runs/own/captures/step-0000001")
    for tensors in capture.glob("*.safetensors"):
        tensors.unlink()
    assert f"the loss was no finite number at step {BAD}" in told(str(capture))


@pytest.mark.slow
def test_a_capture_of_the_nan_itself_or_of_a_run_without_one_tells_nothing_more(run: Path) -> None:
    assert "After these tensors" not in told(str(run))
    changed = {**json.loads((run / "outcome.json").read_text()), "outcome": "stable", "onset_step": None}
    (run / "outcome.json").write_text(json.dumps(changed))
    assert "After these tensors" not in told(str(run), "--step", "2")


class Mapped(Pair):
    """Two blocks, of which the first calls its attention inside a transform of torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        attended = torch.vmap(lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True))(q, k, v)
        left: Tensor = self.second(x + attended.transpose(1, 2).flatten(2))
        return left


def captured(model: nn.Module, number: int, watched: Watch) -> None:
    if number == 0:
        watched.capture(sequences=0)
    plain(model, number, watched)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch 2.14's own, of vmap
@pytest.mark.parametrize("left_out", [True, False])
def test_a_layer_that_was_left_out_is_told_for_layers_are_counted_without_it(tmp_path: Path, left_out: bool) -> None:
    """The second layer is told as layer 1, and a line of the loop alone had said so."""
    loop(tmp_path, Mapped() if left_out else Pair(), captured, steps=2)
    said = "other attentions were not recorded, and are not judged: scaled_dot_product_attention: called inside"
    result = CliRunner().invoke(main, ["diagnose", str(tmp_path / "own"), "--format", "json"])
    answer = json.loads(result.stdout)
    assert (said in answer["tables"][-1]["note"]) == left_out
    assert answer["heading"].startswith("Nothing found in the attentions that were recorded") == left_out


class Called(Pair):
    """Two blocks, of which each is called with some arguments of its own."""

    def __init__(self, *own: dict[str, Any]) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        for block, own in zip((self.first, self.second), self.own, strict=True):
            q, k, v = block.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, **{"is_causal": True, **own}).transpose(1, 2).flatten(2)
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "said"),
    [
        (({}, {}), ""),
        (({}, {"scale": 1.0}), "; scale 1, where 1/√d is 0.354, in layer 2"),
        (({"scale": 1.0}, {"scale": 1.0}), "; scale 1, where 1/√d is 0.354, in every layer"),
        (({}, {"is_causal": False}), "; without a causal mask in layer 2"),
        (
            ({"is_causal": False}, {"is_causal": False, "scale": 1.0}),
            "; without a causal mask in every layer; scale 1, where 1/√d is 0.354, in layer 2",
        ),
    ],
)
def test_a_scale_and_a_mask_that_a_layer_was_called_with_are_told(
    tmp_path: Path, own: tuple[dict[str, Any], ...], said: str
) -> None:
    """A layer without a mask sees the tokens that it is to predict: a loss that falls too well, and no finding."""
    loop(tmp_path, Called(*own), captured, steps=2)
    output = CliRunner().invoke(main, ["diagnose", str(tmp_path / "own")]).output
    (line,) = [line for line in output.splitlines() if line.startswith("sdpa, as recorded")]
    assert line.split(", d 8")[1] == said


@pytest.fixture
def grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in which W_Q of layer 2, head 2, grew threefold. δ is biased in that head, and in layer 3, head 1."""
    monkeypatch.chdir(tmp_path)
    run = Path("runs/grown")
    capture = run / "captures/step-0001500"
    capture.mkdir(parents=True)
    for layer, fault in enumerate((Fault("none"), Fault("delta_bias", 1, 2e-3), Fault("delta_bias", 0, 2e-3)), 1):
        call = dataclasses.replace(captured_call(fault), layer=layer, step=1500)
        call.write(capture / f"layer-{layer:02}.safetensors")
    write_json(run / "manifest.json", {**MANIFEST, "watched": True})
    detector = {"window": 200, "margin": 0.5, "hold_steps": 100}
    write_json(run / "config.json", {"train": {"warmup_steps": 0}, "detector": detector})
    norms = {step: [[1.0, 1.0], [1.0, last], [1.0, 1.0]] for step, last in ((500, 1.0), (1000, 1.2), (1500, 3.0))}
    lines = [json.dumps({"step": step, "w_q_spectral_norm": of}) for step, of in norms.items()]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return run


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["diagnose", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(text: str) -> list[list[str]]:
    """The cells of all tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_the_first_line_names_the_head_that_is_biased_and_grew_and_the_attention_to_try(grown: Path) -> None:
    text = printed(str(grown))
    first, *_ = text.splitlines()
    assert first.startswith("layer 2, head 2: δ is biased")
    assert "its W_Q grew" in first
    assert "flash_fixed" in first
    header, _, *heads = rows(text)
    assert len(header) == 5
    assert [head[:3] for head in heads] == [["2", "2", "delta_bias"]]  # not beside it: layer 3, which did not grow
    assert "sequences would show" not in text


@pytest.mark.slow
def test_all_columns_are_of_all_heads(grown: Path) -> None:
    of_all = [row for row in rows(printed(str(grown), "--columns", "all")) if len(row) > 5]
    assert [head[:3] for head in of_all[-6:]] == [
        ["1", "1", ""], ["1", "2", ""], ["2", "1", ""], ["2", "2", "delta_bias"], ["3", "1", "delta_bias"],
        ["3", "2", ""],
    ]  # fmt: skip
    assert rows(printed(str(grown), "--columns", "finding,δ bias"))[0] == ["finding"]


@pytest.mark.parametrize(
    ("layer", "first"),
    [
        ("1", "Nothing found, and W_Q grew in layer 2, which is not among these."),
        ("3", "layer 3, head 1: δ is biased, and W_Q grew in layer 2, which is not among these; try flash_fixed."),
    ],
)
def test_a_layer_that_grew_is_named_where_it_is_not_diagnosed(grown: Path, layer: str, first: str) -> None:
    assert printed(str(grown), "--layer", layer).splitlines()[0] == first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("called", "first"),
    [
        (("b", "c", "d"), "layer 1 (b), head 2: δ is biased, and its W_Q grew; try flash_fixed."),
        (("a", "b", "c"), "layer 2 (b), head 2: δ is biased, and its W_Q grew; try flash_fixed."),
        (("b", "a", "b"), "layer 2 (a), head 2: δ is biased; try flash_fixed."),
        (("", "", ""), "layer 2, head 2: δ is biased, and its W_Q grew; try flash_fixed."),
    ],
)
def test_a_w_q_is_told_of_the_module_whose_it_is(grown: Path, called: tuple[str, ...], first: str) -> None:
    """The run's layers are a, b and c, and W_Q of b grew; a loop may thaw, add or leave out layers later."""
    config = json.loads((grown / "config.json").read_text())
    shape = {"n_layer": 3, "n_head": 2, "d_model": 32, "context": 64, "modules": ["a", "b", "c"]}
    write_json(grown / "config.json", {**config, "attn": {"name": "sdpa"}, "model": shape})
    for layer, module in enumerate(called, 1):
        fault = Fault("delta_bias", 1, 2e-3) if f"layer {layer}" in first else Fault("none")
        call = dataclasses.replace(captured_call(fault), layer=layer, step=1500, module=module)
        call.write(grown / f"captures/step-0001500/layer-{layer:02}.safetensors")
    assert printed(str(grown)).splitlines()[0] == first
    if called[0] and "grew" not in first:
        assert "W_Q of b grew" in printed(str(grown))


class _Spoiled(torch.autograd.Function):
    on = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * float("nan") if _Spoiled.on else grad


def nan_in_backward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
    return F.scaled_dot_product_attention(q, _Spoiled.apply(k), v, is_causal=is_causal)


class Spoiling(Pair):
    """Two blocks, of which the second's dK can be NaN."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = self.second.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        left: Tensor = x + self.second.out(nan_in_backward(q, k, v).transpose(1, 2).flatten(2))
        return left


@pytest.mark.slow
def test_the_first_of_the_captures_with_nan_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From step 4 on dK of layer 2 is NaN, while the loss of that step is finite; then all weights are NaN."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        monkeypatch.setattr(_Spoiled, "on", number >= 4)
        if number in (1, 3):
            watched.capture(sequences=0)
        plain(model, number, watched)
        if number == 3:
            watched.capture(sequences=0)

    loop(tmp_path, Spoiling(), step, steps=12, interval=500, functions=[f"{__name__}:nan_in_backward"])
    captures = sorted(int(path.name[5:]) for path in (tmp_path / "own/captures").iterdir())
    assert captures[:3] == [1, 3, 4]
    assert captures[-1] > 4
    result = CliRunner().invoke(main, ["diagnose", str(tmp_path / "own")])
    assert result.exit_code == 0, result.output
    assert "the first capture of those that hold NaN or infinity" in result.output
    assert "layer 2, heads 1, 2, 3, 4: a number is not finite." in result.output
    assert "dK holds NaN or infinity" in result.output
    assert "the backward pass of this attention made it at step 4" in result.output
