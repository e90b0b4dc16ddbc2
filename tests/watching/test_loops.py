"""Loops of other shapes than the examples': what of them is observed."""

import copy
import pickle
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flashpoint
from flashpoint.cli.run_words import open_run
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from tests.watching.loops import Pair, beside_the_first_line, loop, plain, spectral_norms


def test_parts_of_one_tensor_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Pair()
    expected = [spectral_norms(block.qkv.weight[:32]) for block in (model.first, model.second)]
    run = loop(tmp_path, model, steps=1)
    assert beside_the_first_line(capsys.readouterr().err) == ""
    np.testing.assert_allclose(run.columns["w_q_spectral_norm"][1][..., 0], expected, rtol=1e-3)


def test_parts_of_a_model_may_be_called_one_by_one(tmp_path: Path) -> None:
    """With gradients accumulated: the first forward pass alone is observed, and no hook of the model tells its end."""

    def step(model: Any, _number: int, watched: Watch) -> None:
        expected.extend([spectral_norms(block.qkv.weight[:32]) for block in (model.first, model.second)])
        for _ in range(3):
            loss = model.second(model.first(torch.randn(3, 12, 32))).square().mean() / 3
            loss.backward()
        watched.step(loss)

    expected: list[Any] = []
    run = loop(tmp_path, step=step, steps=1)
    assert run.shape.n_layer == 2
    np.testing.assert_allclose(run.columns["w_q_spectral_norm"][1][..., 0], expected, rtol=1e-3)


@pytest.mark.parametrize("before", [True, False])
def test_a_pass_without_a_backward_pass_is_not_the_trainings(tmp_path: Path, before: bool) -> None:
    """An evaluation that forgets ``no_grad``, and another model beside: neither is captured."""

    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        watched.capture()
        if before:
            teacher(model(torch.randn(1, 7, 32)))
        x = torch.randn(3, 12, 32)
        loss = model(x).square().mean()
        teacher(x)
        loss.backward()
        watched.step(loss)

    teacher = Pair()
    loop(tmp_path, step=step, steps=1)
    assert [(call.layer, tuple(call.q.shape)) for call in read_calls(tmp_path / "own")] == [
        (1, (3, 4, 12, 8)), (2, (3, 4, 12, 8)),
    ]  # fmt: skip


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_found_or_missed_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reentrant: bool
) -> None:
    class Checkpointed(Pair):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.first, x, use_reentrant=reentrant)
            return checkpoint(self.second, x, use_reentrant=reentrant)

    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32, requires_grad=True)).square().mean()
        loss.backward()
        watched.step(loss)

    run = loop(tmp_path, Checkpointed(), step, steps=1)
    assert ("w_q_spectral_norm" in run.columns) != reentrant
    assert ("use_reentrant=False" in capsys.readouterr().err) == reentrant


def test_layers_of_several_lengths_are_measured_cross_attention_among_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Crossed(Pair):
        def forward(self, x: Tensor) -> Tensor:
            memory = self.first(torch.cat([x, x], 1))
            return self.second(self.second(x), memory)

    run = loop(tmp_path, Crossed())
    assert run.shape.n_layer == 3
    assert run.columns["row_sum_relative_bias"][0].tolist() == [0, 1, 2, 3]
    assert "not recorded" not in capsys.readouterr().err


def test_attention_that_begins_late_is_found(tmp_path: Path) -> None:
    class Late(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if begun else self.first.out(x)

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        begun.extend([True] * (number == 3))
        plain(model, number, watched)

    begun: list[bool] = []
    run = loop(tmp_path, Late(), step, steps=8, interval=500, weights_interval=8)
    assert run.columns["row_sum_relative_bias"][0].tolist() == [4]
    assert "w_q_spectral_norm" in run.columns


def test_layers_that_are_skipped_in_some_steps_leave_a_readable_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Skipping(Pair):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            return super().forward(x) if len(calls) % 2 else self.first(x)

    calls: list[Tensor] = []
    run = loop(tmp_path, Skipping())
    assert run.columns["row_sum_relative_bias"][0].tolist() == [0, 2]
    assert capsys.readouterr().err.count("not every step has the same ones") == 1


def test_copies_and_files_of_the_model_have_nothing_of_the_watch(tmp_path: Path) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            other(torch.randn(1, 7, 32)).sum().backward()
        watched.capture()
        plain(model, number, watched)

    loop(tmp_path, step=step, steps=1)
    assert read_calls(tmp_path / "own")[0].q.shape[0] == 3


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


SAID_OF_CAPTURES = ("says what its attention did", "counts them in")


def test_the_command_that_a_capture_tells_can_be_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Into a shell, also where a folder's name has a blank."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        watched.capture()
        plain(model, number, watched)

    loop(tmp_path / "my runs", step=step, steps=3)
    lines = [line for line in capsys.readouterr().err.splitlines() if "flashpoint diagnose" in line]
    commands = [shlex.split(line[line.index("flashpoint diagnose") :]) for line in lines]
    assert all(Path(command[2]).is_dir() for command in commands)
    assert {tuple(command[3:]) for command in commands} == {tuple(said.split()) for said in SAID_OF_CAPTURES}


def test_a_function_is_seen_where_another_module_has_imported_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``from MODULE import attend`` in the model's file; a reference in an object is not seen, and that is told."""
    theirs: Any = types.ModuleType("theirs")
    theirs.attend = attend
    monkeypatch.setitem(sys.modules, "theirs", theirs)

    class Imported(Pair):
        kept = staticmethod(attend)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.first.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            out: Tensor = (theirs.attend if named else self.kept)(q, k, v)
            return out

    for named in (True, False):
        run = loop(tmp_path / str(named), Imported(), steps=1, functions=[f"{__name__}:attend"])
        assert ("row_sum_relative_bias" in run.columns) == named
        assert ("called by its name in a module" in capsys.readouterr().err) != named
    assert theirs.attend is attend


def hidden_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_token(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def windowed(q: Tensor, k: Tensor, v: Tensor, width: int = 1) -> Tensor:
    near = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().triu(1 - width)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "causal"),
    [("attend", False), ("hidden_mask", True), ("by_token@bthd", True), ("windowed", None)],
)
def test_a_named_function_is_recorded_as_what_it_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, causal: bool | None
) -> None:
    """A mask that no argument tells is seen by O; what is neither causal nor full attention is left out aloud."""

    class Named(Pair):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.first.qkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
            if name != "by_token":
                q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            out: Tensor = globals()[name](q, k * 8, v)
            return out

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        watched.capture()
        plain(model, number, watched)

    name = word.partition("@")[0]
    loop(tmp_path, Named(), step, steps=2, functions=[f"{__name__}:{word}"])
    if causal is None:
        assert f"{name}: O is not softmax" in capsys.readouterr().err
    else:
        assert [call.form.is_causal for call in read_calls(tmp_path / "own")] == [causal]


def test_two_models_of_one_loop_are_watched_in_turn(tmp_path: Path) -> None:
    """As in adversarial training: their observations overlap, and nothing of them stays behind."""
    models = [Pair(), Pair()]
    with (
        flashpoint.watch(models[0], runs_dir=tmp_path, name="one", interval=3) as one,
        flashpoint.watch(models[1], runs_dir=tmp_path, name="other", interval=3) as other,
    ):
        for number in range(6):
            plain(models[0], number, one)
            plain(models[1], number, other)
    for name in ("one", "other"):  # an observation that finds the other one under way comes some steps later
        run = open_run(name, tmp_path)
        assert len(run.columns["row_sum_relative_bias"][0]) >= 2
        assert run.shape.n_layer == 2
    assert not torch.overrides._get_current_function_mode_stack()
    assert not any(module._forward_hooks or module._forward_pre_hooks for model in models for module in model.modules())
