"""A sequence that a loop trains on again is no further evidence about δ."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from flashpoint.cli.main import main
from flashpoint.watching.captures import read_calls, read_samples
from flashpoint.watching.loop import Watch
from tests.watching.loops import Pair, loop

Batch = Callable[[Tensor, int], Any]
Forward = Callable[[nn.Module, Tensor], Tensor]


def by_parts(model: nn.Module, x: Tensor) -> Tensor:
    """A loop that does not call the model shows not what it is given."""
    return model.second(model.first(x))


def cycling(different: int, batch: Batch, forward: Forward = by_parts) -> Callable[[nn.Module, int, Watch], None]:
    """Steps over two batches in turn, with so many different sequences together; the first step is captured."""
    data = torch.randn(different, 12, 32, generator=torch.Generator().manual_seed(1)).split(-(-different // 2))

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 0:
            watched.capture(sequences=20)
        x = data[number % 2]
        loss = forward(model, x).square().mean()
        loss.backward()
        watched.step(loss, batch(x, number))

    return step


def diagnosed(run: Path) -> str:
    result = CliRunner().invoke(main, ["diagnose", str(run)])
    assert result.exit_code == 0, result.output
    return result.stdout


BATCHES: dict[str, Batch] = {
    "a tensor": lambda x, _: x,
    "inputs and targets": lambda x, _: (x, 2 * x),
    "a dict, whose first tensor is alike in all rows": lambda x, _: {"mask": torch.ones(len(x), 12), "inputs": x},
    "a mask, alike in all rows, and inputs": lambda x, _: [torch.ones(len(x), 12), x],
    "micro-batches, in the same company": lambda x, _: [(x,), (x + 1,)],
    "an array": lambda x, _: x.numpy(),
}


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_the_batch_tells_repetitions_though_weights_move(tmp_path: Path, batch: Batch) -> None:
    loop(tmp_path, step=cycling(6, batch), steps=9, interval=500)
    run = tmp_path / "own"
    (capture, *_), samples = read_calls(run), read_samples(run, None, read_calls(run))
    for sample in samples.values():
        assert len(sample.identities) == 21
        assert len({*sample.identities, *capture.identities}) == 6
    assert "bias of δ: 24 sequences, 6 different, of 8 steps" in diagnosed(run)


class Given(Pair):
    """Is given more than it uses."""

    def forward(self, x: Any, *_: Any, **more: Any) -> Tensor:
        return super().forward(more["inputs"] if x is None else x[0] if isinstance(x, list) else x)


FORWARDS: dict[str, Forward] = {
    "x": lambda model, x: model(x),
    "a keyword, beside a mask": lambda model, x: model(None, torch.ones(len(x), 12), inputs=x),
    "a list": lambda model, x: model([x, torch.ones(len(x), 12)]),
    "a keyword in a dict": lambda model, x: model(x, batch={"inputs": x}),
}


@pytest.mark.slow
@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_what_the_model_is_given_tells_repetitions_without_a_batch(tmp_path: Path, forward: Forward) -> None:
    loop(tmp_path, Given(), cycling(6, lambda _x, _n: None, forward), steps=9, interval=500)
    assert "bias of δ: 24 sequences, 6 different, of 8 steps" in diagnosed(tmp_path / "own")


def test_the_same_inputs_with_other_targets_are_another_sequence(tmp_path: Path) -> None:
    loop(tmp_path, step=cycling(6, lambda x, number: (x, x + number)), steps=9, interval=500)
    assert "bias of δ: 24 sequences of 8 steps" in diagnosed(tmp_path / "own")


def test_what_differs_in_one_tensor_is_another_sequence(tmp_path: Path) -> None:
    drawn = torch.Generator().manual_seed(2)
    forward: Forward = lambda model, x: model(x, torch.randn(len(x), 4, generator=drawn))  # noqa: E731
    loop(tmp_path, Given(), cycling(6, lambda x, _: x, forward), steps=9, interval=500)
    assert "bias of δ: 24 sequences of 8 steps" in diagnosed(tmp_path / "own")


def test_a_sequence_is_known_by_what_the_model_was_given_when_it_was_called(tmp_path: Path) -> None:
    buffer = torch.empty(3, 12, 32)

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        result = model(buffer.copy_(x), torch.ones(3, 1))
        buffer.zero_()
        return result

    class Cloned(Given):
        def forward(self, x: Any, *_: Any, **more: Any) -> Tensor:
            return super().forward(x.clone())  # autograd refuses what was changed in place

    loop(tmp_path, Cloned(), cycling(6, lambda _x, _n: None, forward), steps=9, interval=500)
    assert "bias of δ: 24 sequences, 6 different, of 8 steps" in diagnosed(tmp_path / "own")


def test_without_a_batch_the_tensors_tell_as_long_as_weights_stand_still(tmp_path: Path) -> None:
    def still(model: nn.Module, number: int, watched: Watch) -> None:
        cycling(6, lambda _x, _n: None)(model, number, watched)
        model.zero_grad()

    loop(tmp_path, step=still, steps=9, interval=500)
    assert "24 sequences, 6 different, of 8 steps" in diagnosed(tmp_path / "own")


@pytest.mark.slow
def test_where_too_few_differ_nothing_is_said_of_delta(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop(tmp_path, step=cycling(2, lambda x, _: x), steps=23, interval=500)
    assert "δ of 2 layers was measured on 20 sequences, 2 different, of steps 1 to 20" in capsys.readouterr().err
    told = diagnosed(tmp_path / "own")
    assert "Too few sequences to say anything of δ: 21 sequences, 2 different, with loss" in told
    for file in (tmp_path / "own/captures/step-0000000").glob("layer-*"):
        file.unlink()
    assert "20 sequences, 2 different, of steps 1 to 20" in diagnosed(tmp_path / "own")


def test_a_file_that_does_not_tell_counts_all_of_them(tmp_path: Path) -> None:
    loop(tmp_path, step=cycling(6, lambda x, _: x), steps=9, interval=500)
    file = tmp_path / "own/captures/step-0000000/delta.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({k: v for k, v in one.items() if k != "identities"}) + "\n" for one in lines))
    assert "bias of δ: 24 sequences of 8 steps" in diagnosed(tmp_path / "own")
