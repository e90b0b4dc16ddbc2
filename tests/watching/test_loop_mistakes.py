"""Mistakes in loops, and loops that end early: what is told and what is kept."""

import copy
import errno
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import flashpoint
from flashpoint.cli.run_words import open_run
from flashpoint.errors import UserError
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from tests.watching.loops import Pair, loop, plain


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ("step, backward", "no gradient came to any attention before watched.step"),
        ("backward, zero_grad, step", "no gradients at watched.step"),
        ("backward, zero_grad to zeros, step", "no gradients at watched.step, or zeros alone"),
    ],
)
def test_step_in_the_wrong_place_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: str, told: str
) -> None:
    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32)).square().mean()
        if order == "step, backward":
            watched.step(loss)
        loss.backward()
        if order != "step, backward":
            model.zero_grad(set_to_none=order == "backward, zero_grad, step")
            watched.step(loss)

    assert loop(tmp_path, step=step).columns["loss"][0].tolist() == [0, 1, 2, 3]
    assert capsys.readouterr().err.count(told) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_optimizer_step_in_the_backward_pass_has_its_norms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], set_to_none: bool
) -> None:
    model, exact = Pair(), list[float]()
    squares: dict[Tensor, Tensor] = {}

    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        squares[parameter] = parameter.grad.double().square().sum()
        with torch.no_grad():
            parameter -= 0.01 * parameter.grad
        parameter.grad = None if set_to_none else torch.zeros_like(parameter)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        plain(model, number, watched)
        exact.append(float(torch.stack([*squares.values()]).sum().sqrt()))

    norms = loop(tmp_path, model, step, steps=8, log_interval=1).columns["grad_norm"][1]
    told = capsys.readouterr().err
    assert told.count("the backward pass gives them up") == 1
    assert "call it after the backward pass" not in told
    known = norms > 0
    assert known.sum() >= 5
    assert norms[known] == pytest.approx(np.array(exact)[known], rel=1e-5)
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_gradients_of_other_parameters_are_not_awaited_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``functional_call`` trains what it is given: no other place of ``watched.step`` has gradients of the model."""
    trained = {name: torch.randn_like(one).requires_grad_() for name, one in Pair().named_parameters()}

    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        loss = torch.func.functional_call(model, trained, (torch.randn(3, 12, 32),)).square().mean()
        loss.backward()
        watched.step(loss)

    loop(tmp_path, step=step, steps=6)
    told = capsys.readouterr().err
    assert "Watch the model whose parameters are trained" in told
    assert "call it after the backward pass" not in told


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own, of vmap
def test_gradients_of_each_example_by_torch_func_are_told_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        def loss_of(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            found: Tensor = torch.func.functional_call(model, parameters, (x[None],)).square().mean()
            return found

        x = torch.randn(3, 12, 32)
        parameters = {name: one.detach() for name, one in model.named_parameters()}
        gradients = torch.vmap(torch.func.grad(loss_of), (None, 0))(parameters, x)
        for name, one in model.named_parameters():
            one.grad = gradients[name].mean(0)
        watched.step(model(x).square().mean(), x)

    loop(tmp_path, step=step, steps=12)
    told = capsys.readouterr().err
    assert "failed" not in told
    assert "inside torch.vmap" in told
    assert "no gradients at watched.step" not in told


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_an_ensemble_inside_vmap_leaves_the_look_for_nan_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters, _ = torch.func.stack_module_state([Pair(), Pair()])

    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32)
        out = torch.vmap(lambda some: torch.func.functional_call(model, some, (x,)))(parameters)
        loss = out.square().mean()
        loss.backward()
        watched.step(loss, x)

    loop(tmp_path, step=step)
    assert "failed" not in capsys.readouterr().err


def test_a_model_that_is_trained_in_turn_lacks_no_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number % 3 == 2:
            plain(model, number, watched)
        else:
            watched.step(1.0)

    loop(tmp_path, step=step, steps=9)
    assert "no gradients at watched.step" not in capsys.readouterr().err


def test_a_batch_without_labels_is_no_step_in_the_wrong_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mean of nothing is NaN, and PyTorch's cross-entropy has gradients of 0 then."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        labels = torch.full((3 * 12,), -100 if number == 2 else 1)
        loss = nn.functional.cross_entropy(model(torch.randn(3, 12, 32)).flatten(0, 1), labels)
        loss.backward()
        watched.step(loss)

    loop(tmp_path, step=step, log_interval=1)
    told = capsys.readouterr().err
    assert "has the batch no label" in told
    assert "no gradients at watched.step" not in told


def in_micro_batches(number_of: int, once: bool) -> Callable[..., None]:
    """A loop that counts micro-batches; ``once``: it hands over the last one alone."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0 if number == 0 else 1e-5)
        for micro in range(number_of):
            loss = model(torch.randn(3, 12, 32)).square().mean() / number_of
            loss.backward()
            if not once or micro == number_of - 1:
                watched.step(loss * number_of)
        optimizer.step()

    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number_of", "once", "told"), [(2, False, "in 5 of 10"), (4, False, "in 8 of 10"), (4, True, ""), (1, False, "")]
)
def test_a_step_for_each_micro_batch_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number_of: int, once: bool, told: str
) -> None:
    """Of calls 2 to 11. The first update is at a learning rate of 0."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        in_micro_batches(number_of, once)(model, number, watched)
        model.zero_grad()

    loop(tmp_path, step=step, steps=14)
    lines = [
        line for line in capsys.readouterr().err.splitlines() if "the weights were those of the step before" in line
    ]
    assert len(lines) == bool(told)
    assert not told or told in lines[0]


def test_a_step_without_a_forward_pass_of_the_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        plain(model, number, watched)
        watched.step(torch.tensor(1.0))

    loop(tmp_path, step=step)
    assert "was not called in this step" in capsys.readouterr().err


@pytest.mark.parametrize(("case", "told"), [("measured alone", 0), ("too small an update", 0), ("added", 1)])
def test_weights_that_stand_still_are_micro_batches_where_gradients_are_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, told: int
) -> None:
    """A checkpoint that is measured, BF16 weights that no update moves, and gradients that nobody clears but once: the
    step that hands over none tells nothing, those that follow do."""
    model = Pair().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    with flashpoint.watch(model, runs_dir=tmp_path, name="own", log_interval=2) as watched:
        for number in range(14):
            loss = model(torch.randn(3, 12, 32).bfloat16()).square().mean()
            loss.backward()
            if case == "added" and number == 0:
                model.zero_grad()
            watched.step(loss)
            if case == "too small an update":
                optimizer.step()
            if case != "added":
                model.zero_grad()
    assert capsys.readouterr().err.count("in 10 of 10 steps the weights were those of the step before") == told


@pytest.mark.parametrize(("times", "told"), [(1, 0), (36 * 32, 1)])
def test_a_loss_that_is_a_sum_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], times: int, told: int
) -> None:
    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32)).square().mean() * times
        loss.backward()
        watched.step(loss)

    loop(tmp_path, step=step)
    assert capsys.readouterr().err.count("if it is a sum, divide it") == told


def test_step_that_is_forgotten_or_outside_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Pair()
    with flashpoint.watch(model, runs_dir=tmp_path, name="own") as watched:
        model(torch.randn(3, 12, 32)).sum().backward()
    assert "watched.step was never called" in capsys.readouterr().err
    plain(model, 0, watched)
    watched.capture()
    told = capsys.readouterr().err
    assert "step outside of the block" in told
    assert "capture outside of the block" in told
    with flashpoint.watch(model, runs_dir=tmp_path, name="own") as watched:
        plain(model, 0, watched)
    assert f"this run is {tmp_path / 'own-2'}" in capsys.readouterr().err
    with pytest.raises(UserError, match="entered once"), watched:
        pass
    assert (tmp_path / "own-2").is_dir()


@pytest.mark.parametrize(("error", "said"), [(KeyboardInterrupt, "SIGINT"), (ZeroDivisionError, "ZeroDivisionError")])
def test_what_ends_the_loop_early_is_kept(tmp_path: Path, error: type[BaseException], said: str) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 2:
            raise error
        plain(model, number, watched)

    with pytest.raises(error):
        loop(tmp_path, step=step)
    outcome = json.loads((tmp_path / "own/outcome.json").read_text())
    assert (outcome["outcome"], outcome["step"], outcome["interrupted"]) == ("stable", 2, said)
    assert open_run("own", tmp_path).verdict == "stopped at 2"


def test_a_folder_that_is_gone_does_not_end_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 1:
            (tmp_path / "own").rename(tmp_path / "elsewhere")
        plain(model, number, watched)

    with pytest.raises(UserError, match="no run there"):
        loop(tmp_path, step=step)
    assert capsys.readouterr().err.count("own has been removed") == 1


def test_a_model_that_holds_its_watch_can_be_copied(tmp_path: Path) -> None:
    """As a callback does that averages the weights."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        model.watched = watched  # type: ignore[assignment]
        assert copy.deepcopy(model).watched is watched
        plain(model, number, watched)

    assert loop(tmp_path, step=step).columns["loss"][0].tolist() == [0, 1, 2, 3]


def test_a_step_that_a_gradient_scaler_skips_is_captured_and_is_no_verdict(tmp_path: Path) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32)
        loss = model(x).square().mean()
        loss.backward()
        watched.step(loss, x, grad_norm=float("inf") if number in (1, 3) else 1.0)

    assert loop(tmp_path, step=step).verdict == "stable to 4"
    assert [path.name for path in (tmp_path / "own/captures").iterdir()] == ["step-0000001"]


def test_a_capture_of_a_model_without_attention_is_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 1:
            watched.capture()
        plain(model, number, watched)

    loop(tmp_path, nn.Linear(32, 32), step, interval=500)
    told = capsys.readouterr().err
    assert "functions=['MODULE:NAME']" in told
    assert "no capture (asked for)" in told
    with pytest.raises(UserError, match=r"its attention was not recorded \(the watched model called none"):
        read_calls(tmp_path / "own")


@pytest.mark.slow
def test_an_explosion_that_ends_the_loop_is_captured(tmp_path: Path) -> None:
    """The loop stops by the verdict, so that no step follows: the last observation is kept."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32)).square().mean()
        loss.backward()
        watched.step(loss * 0 + (1.0 if number < 100 else 9.0))
        if watched.verdict != "stable":
            raise StopIteration

    with pytest.raises(StopIteration):
        loop(tmp_path, step=step, steps=200, interval=500, weights_interval=500)
    assert open_run("own", tmp_path).verdict.startswith("exploded")
    assert [call.layer for call in read_calls(tmp_path / "own")] == [1, 2]


def test_a_capture_that_never_came_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        plain(model, number, watched)
        watched.capture("why not")

    loop(tmp_path, nn.Linear(32, 32), step, steps=1)
    assert "no capture (why not)" in capsys.readouterr().err


def test_a_disk_that_is_full_before_the_first_step_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("flashpoint.watching.watched_run.write_json", full)
    with pytest.raises(ValueError, match="No space left on device; free space, or choose"):
        flashpoint.watch(Pair(), runs_dir=tmp_path)


def test_what_fails_in_one_line_elsewhere_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise UserError("no such thing")

    monkeypatch.setattr("flashpoint.watching.logged_metrics.by_sequence", refuse)
    assert loop(tmp_path).verdict == "stable to 4"
    assert capsys.readouterr().err.count("no such thing") == 1


def test_losses_are_judged_where_they_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32)).square().mean()
        loss.backward()
        watched.step(loss * float("nan") if number == 3 else loss)

    monkeypatch.setattr("flashpoint.runs.metrics.MetricsFile.log_all", full)
    assert loop(tmp_path, step=step, log_interval=4).verdict == "nonfinite at 3"


@pytest.mark.parametrize("captured", [1, 6])
def test_a_run_that_vanishes_while_it_trains_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], captured: int
) -> None:
    """Before a capture, or while errors of δ are collected after one: captures are written all the same."""
    torch.manual_seed(0)
    model = Pair()
    with flashpoint.watch(model, runs_dir=tmp_path, name="own", interval=4, log_interval=2) as watched:
        for number in range(12):
            if number == 3:
                shutil.rmtree(tmp_path / "own")
            if number == captured:
                watched.capture(sequences=9)
            plain(model, number, watched)
    assert watched.verdict == "stable"
    told = capsys.readouterr().err.splitlines()
    (line,) = [line for line in told if "has been removed" in line or "failed" in line]
    assert line.startswith(f"watch own: {tmp_path}/own has been removed")
    folder = tmp_path / f"own/captures/step-{captured:07}"
    tensors = {"layer-01.safetensors", "layer-02.safetensors", "batch.pt"} if captured > 3 else set()
    assert {path for path in (tmp_path / "own").rglob("*") if path.is_file()} == {
        folder / name for name in ("delta.jsonl", *tensors)
    }
    collected = {json.loads(line)["step"] for line in (folder / "delta.jsonl").open()}
    assert collected == ({7, 8, 9} if captured > 3 else {3, 4})


def test_a_model_that_another_thread_trains_is_not_said_to_call_no_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch shows calls to the thread alone that asks for them. One thread for all steps is seen from its second."""

    def in_a_new_one(model: nn.Module, number: int, watched: Watch) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(plain, model, number, watched).result()

    loop(tmp_path, step=in_a_new_one)
    told = capsys.readouterr().err
    assert "the model was called in another thread than watched.step before; call both in one thread" in told
    assert "called none" not in told
    with ThreadPoolExecutor(1) as pool:
        run = loop(tmp_path, step=lambda *given: pool.submit(plain, *given).result())
    assert run.by_head("row_sum_relative_bias") is None  # of the first run of this name
    assert not _get_current_function_mode_stack()
    assert open_run("own-2", tmp_path).measured_by_head("row_sum_relative_bias")[0].tolist() == [1, 2, 3]
