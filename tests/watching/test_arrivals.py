"""Numbers of a GPU are read late, here from a device that is made up: when they come, and that nothing is lost."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flashpoint.errors import UserError
from flashpoint.watching.arrivals import Arrivals, begin_copies
from flashpoint.watching.captures import captured_steps
from flashpoint.watching.events import Dispatcher, Handler
from flashpoint.watching.loop import Watch
from flashpoint.watching.notices import Notices
from tests.watching.loops import Pair, beside_the_first_line, loop, plain


class Device:
    """Holds all tensors, as a GPU does: what of them is copied, and when it is waited for.

    Attributes:
        done: "begin" and "wait", each with the number of the copy.
        hosts: memory of the copies, which may be read.
    """

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.hosts: list[Tensor] = []

    def begin_copy(self, packed: Tensor) -> Callable[[], Tensor]:
        number = len(self.hosts)
        self.done.append(("begin", number))
        self.hosts.append(packed.clone())

        def wait() -> Tensor:
            self.done.append(("wait", number))
            return self.hosts[number]

        return wait


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return put_on_device(monkeypatch)


def put_on_device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Have all tensors on the device from now on."""
    made_up = Device()
    monkeypatch.setattr("flashpoint.watching.arrivals.is_far", lambda number: isinstance(number, Tensor))
    monkeypatch.setattr("flashpoint.watching.arrivals.begin_copy", made_up.begin_copy)
    return made_up


@dataclass(frozen=True, slots=True)
class Asked:
    """Numbers that were asked for under a name, with what they are to be."""

    name: str
    expected: Sequence[float]
    numbers: Sequence[Tensor | float]


class Taken:
    """What was handed over, in its order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        dispatcher = Dispatcher(Notices("own", 0))
        dispatcher.add(self)
        self.arrivals = Arrivals(dispatcher.publish)

    @property
    def handlers(self) -> Sequence[Handler]:
        return (Handler(Asked, "taking", self.take),)

    def ask(self, name: str, *numbers: Tensor | float) -> None:
        self.arrivals.ask(Asked(name, [float(one) for one in numbers], numbers))

    def take(self, event: Asked) -> None:
        same = [float(one) for one in event.numbers] == event.expected
        self.names.append(event.name if same else f"{event.name}, other numbers")
        if event.name == "fails":
            raise UserError("no such number")


def test_numbers_of_a_gpu_come_one_turn_after_their_copy_began_and_others_behind_them(device: Device) -> None:
    taken = Taken()
    taken.ask("first", 1.0)
    assert taken.names == ["first"]  # nothing is before it
    taken.ask("second", torch.tensor(2.0), 3.0)
    taken.ask("third", 4.0)
    taken.arrivals.turn()
    taken.ask("fourth", torch.tensor(5))
    assert taken.names == ["first"]
    assert device.done == [("begin", 0)]
    taken.arrivals.turn()
    assert taken.names == ["first", "second", "third"]
    assert device.done == [("begin", 0), ("begin", 1), ("wait", 0)]
    taken.ask("fifth", 6.0)
    taken.arrivals.end()
    assert taken.names == ["first", "second", "third", "fourth", "fifth"]
    taken.ask("sixth", 7.0)
    assert taken.names[-1] == "sixth"


def test_numbers_of_the_host_come_at_once() -> None:
    taken = Taken()
    for name in ("first", "second"):
        taken.ask(name, torch.tensor(1.0), 2.0)
        taken.arrivals.turn()
        assert taken.names[-1] == name


def test_what_fails_in_handing_over_takes_nothing_else_along(
    device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = Taken()
    for name in ("first", "fails", "second"):
        taken.ask(name, torch.tensor(1.0))
    taken.arrivals.end()
    assert taken.names == ["first", "fails", "second"]
    assert capsys.readouterr().err.count("taking failed (UserError: no such number)") == 1


def test_every_bit_arrives(device: Device) -> None:
    """Of widths in any order, so that some would not be aligned one behind the other."""
    sent = [
        torch.tensor([True, False, True]),
        torch.tensor(1.25, dtype=torch.bfloat16),
        torch.tensor(-(1 << 63) + 1),
        torch.tensor([[1.5, float("nan")], [float("-inf"), 1e-45]]),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(0x7FC12345).int().view(torch.float32),  # NaN with bits of its own
        torch.tensor(0x7EDCBA9876543210),
        torch.arange(6.0).view(2, 3).mT,
    ]
    copied = begin_copies(sent)
    for one, other in zip(copied(), sent, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.contiguous().view(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    assert len(device.hosts) == 1


def numbers_of(run: Path) -> dict[str, list[Any]]:
    """Return every metric's values with their steps, as they are written."""
    found: dict[str, list[Any]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        for name in metrics.keys() - {"step"}:
            found.setdefault(name, []).append((metrics["step"], metrics[name]))
    return found


def with_metrics(model: nn.Module, number: int, watched: Watch) -> None:
    x = torch.randn(3, 12, 32)
    loss = model(x).square().mean()
    loss.backward()
    aux = loss.detach() * 2 if number % 3 else 0.5
    watched.step(loss, {"x": x, "y": [torch.arange(number + 1)]}, aux=aux, lr=0.1)  # type: ignore[arg-type]
    if isinstance(aux, Tensor):
        aux.zero_()  # a buffer of the loop's


def test_a_run_has_the_same_numbers_wherever_they_are_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"steps": 23, "log_interval": 5, "weights_interval": 3, "interval": 7}
    near = loop(tmp_path / "near", step=with_metrics, **options)  # type: ignore[arg-type]
    made_up = put_on_device(monkeypatch)
    far = loop(tmp_path / "far", step=with_metrics, **options)  # type: ignore[arg-type]
    assert numbers_of(tmp_path / "far/own") == numbers_of(tmp_path / "near/own")
    assert near.columns.keys() == far.columns.keys() >= {"loss", "grad_norm", "aux", "lr", "w_q_spectral_norm"}
    rows = [(tmp_path / name / "own/batches.csv").read_text() for name in ("near", "far")]
    assert rows[0] == rows[1]
    assert len(rows[0].splitlines()) == 23
    waits = [done for done in made_up.done if done[0] == "wait"]
    assert waits == [("wait", number) for number in range(len(made_up.hosts))]
    assert all(made_up.done.index(("begin", n + 1)) < made_up.done.index(("wait", n)) for n in range(len(waits) - 1))


def test_losses_that_are_no_numbers_are_judged_one_read_later_and_the_first_batch_is_kept(
    tmp_path: Path, device: Device
) -> None:
    verdicts: list[str] = []

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32)
        batches.append(x)
        loss = model(x).square().mean()
        loss.backward()
        watched.step(loss * float("nan") if number >= 10 else loss, x)
        verdicts.append(watched.verdict)

    batches: list[Tensor] = []
    run = loop(tmp_path, step=step, steps=30, log_interval=5, interval=1000)
    assert run.verdict == "nonfinite at 10"
    assert verdicts.index("nonfinite") == 24  # ten of them last; steps 15 to 19 are copied at step 19
    assert list(captured_steps(tmp_path / "own")) == [10, 20]
    assert torch.equal(torch.load(tmp_path / "own/captures/step-0000010/batch.pt"), batches[10])


def test_a_loop_that_ends_has_every_loss(tmp_path: Path, device: Device) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        plain(model, number, watched)
        if number == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path, step=step, steps=30, log_interval=3)
    assert [step for step, _ in numbers_of(tmp_path / "own")["loss"]] == list(range(8))
    assert np.isfinite(json.loads((tmp_path / "own/outcome.json").read_text())["loss"])


class Unread(TorchDispatchMode):
    """Refuses to read a number from the device that is made up."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            here = {host.untyped_storage().data_ptr() for host in self._device.hosts}
            assert args[0].untyped_storage().data_ptr() in here, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_no_step_that_is_not_observed_reads_a_number_from_the_device(
    tmp_path: Path, device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32)
        loss = model(x).square().mean()
        loss.backward()
        if number == 0:
            watched.step(loss, x)
        else:
            with Unread(device):
                watched.step(loss, x, aux=loss)  # type: ignore[arg-type]

    run = loop(tmp_path, Pair(), step, steps=12, interval=1000, log_interval=3, weights_interval=2)
    assert beside_the_first_line(capsys.readouterr().err) == ""
    assert run.columns["aux"][0].tolist() == list(range(1, 12))
    assert run.columns["w_k_spectral_norm"][0].tolist() == [1, 3, 5, 7, 9, 11]
