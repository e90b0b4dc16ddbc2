"""What is told of captures without tensors, and of runs without captures."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flashpoint.errors import UserError
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from tests.watching.loops import Block, Pair, loop, plain


class Own(Pair):
    """Its attention is none that is known."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first.qkv(x).chunk(3, -1)
        attended: Tensor = (q @ k.mT).softmax(-1) @ v
        return attended


def refused(path: Path, step: int | None = None) -> str:
    with pytest.raises(UserError) as raised:
        read_calls(path, step)
    return str(raised.value)


def test_a_capture_of_the_batch_alone_is_told_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The words "wrote FOLDER" sounded as if there were something to diagnose."""
    batches = []

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        batches.append(torch.randn(3, 12, 32))
        loss = model(batches[-1]).square().mean() * (torch.nan if number == 2 else 1.0)
        loss.backward()
        watched.step(loss, batches[-1])

    loop(tmp_path, Own(), step)
    batch = tmp_path / "own/captures/step-0000002/batch.pt"
    told = f"there is nothing to diagnose; {batch} is the batch of that step alone"
    assert len([line for line in capsys.readouterr().err.splitlines() if told in line]) == 1
    for path, told in ((tmp_path / "own", ""), (batch.parent, str(batch)), (batch, str(batch))):  # a run's are the last
        assert f"{told} is the batch of that step alone" in refused(path)
        assert "the watched model called none that is PyTorch's" in refused(path)
    assert torch.equal(torch.load(batch), batches[2])


def test_a_batch_is_told_where_it_is_kept_and_can_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be the text of users."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 1:
            watched.capture()
        x = torch.randn(3, 12, 32)
        loss = model(x).square().mean() * (torch.nan if number == 3 else 1.0)
        loss.backward()
        watched.step(loss, {"x": x, "text": ["a", "b", "c"]})

    kept, left_out = loop(tmp_path, step=step), loop(tmp_path / "without", step=step, save_batch=False)
    told = capsys.readouterr().err.splitlines()
    announced = [line for line in told if "; wrote " in line]
    assert len(announced) >= 4
    for line in announced:
        assert ("with the batch of that step (save_batch=False leaves it out)" in line) == ("/without/" not in line)
    assert not list((tmp_path / "without").rglob("*.pt"))
    batch, _ = (torch.load(file, weights_only=True) for file in sorted(tmp_path.rglob("*.pt")))
    assert batch["text"] == ["a", "b", "c"]
    assert kept.folder is not None
    assert left_out.folder is not None
    assert kept.folder.batches.read_text() == left_out.folder.batches.read_text()  # fingerprints alone


def test_a_step_with_the_batch_alone_beside_a_capture_is_told_as_that(tmp_path: Path) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 0:
            watched.capture(sequences=0)
        plain(model, number, watched)

    loop(tmp_path, step=step)
    batch = tmp_path / "own/captures/step-0000003/batch.pt"
    batch.parent.mkdir()
    torch.save(torch.zeros(1), batch)
    assert "batch.pt is the batch of that step alone" in refused(tmp_path / "own", 3)
    assert "captured steps 0" in refused(tmp_path / "own", 2)


def test_of_a_run_without_a_capture_the_remedy_is_that_of_its_cause(tmp_path: Path) -> None:
    class Partly(Pair):
        """The second attention has keys of one sequence alone."""

        def forward(self, x: Tensor) -> Tensor:
            return Expanding.forward(self.second, self.first(x))

    class Expanding(Block):
        def forward(self, x: Tensor, _: Tensor | None = None) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k[:1], v[:1]).transpose(1, 2).flatten(2)

    loop(tmp_path / "partly", Partly())
    assert refused(tmp_path / "partly/own").endswith("watched.capture() in the loop makes one")
    loop(tmp_path / "unknown", Own())
    assert "its attention was not recorded (the watched model called none" in refused(tmp_path / "unknown/own")
    loop(tmp_path / "never", step=lambda *_: None)
    assert refused(tmp_path / "never/own").endswith("watched.step was never called; call it once an optimiser step")
    loop(tmp_path / "later", step=lambda *_: None, first_step=7)
    assert "watched.step was never called" in refused(tmp_path / "later/own")


def test_an_error_before_the_first_step_is_named(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        loop(tmp_path, step=fail)
    assert "watched.step was never called, ArithmeticError came first" in refused(tmp_path / "own")
