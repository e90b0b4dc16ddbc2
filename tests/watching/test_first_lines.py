"""What a watch tells while its loop runs, and when: records of the logger that a host program filters."""

import logging
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor, nn

from flashpoint.watching.loop import Watch
from tests.watching.loops import Pair, capturing, loop, plain


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What a host program's handler takes."""
    taken: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = taken.append  # type: ignore[method-assign]
    logger = logging.getLogger("flashpoint.watch")
    logger.addHandler(handler)
    yield taken
    logger.removeHandler(handler)


class Own(Pair):
    """Its attention is none that is known."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first.qkv(x).chunk(3, -1)
        attended: Tensor = (q @ k.mT).softmax(-1) @ v
        return attended


@pytest.mark.parametrize(("model", "watched"), [(Pair(), "sdpa in 2 layers of 4 heads"), (Own(), "no attention")])
def test_after_its_first_step_a_watch_tells_what_it_watches_where_it_writes_and_how_to_follow(
    tmp_path: Path, records: list[logging.LogRecord], model: nn.Module, watched: str
) -> None:
    told: list[list[str]] = []

    def step(model: nn.Module, number: int, watch: Watch) -> None:
        plain(model, number, watch)
        told.append([record.getMessage() for record in records])

    loop(tmp_path, model, step)
    *reasons, line = told[0]
    assert watched in line
    folder = str(tmp_path / "own")
    assert folder in line
    assert line.endswith(shlex.join(["flashpoint", "watch", folder]))
    assert ["no attention was recorded" in reason for reason in reasons] == [True] * isinstance(model, Own)
    assert told[-1] == told[0]  # once
    (level,) = {record.levelname for record in records if "to follow" in record.getMessage()}
    assert level == "INFO"


def test_each_quarter_of_the_sequences_is_told_while_delta_is_measured(
    tmp_path: Path, records: list[logging.LogRecord]
) -> None:
    loop(tmp_path, step=capturing(1, 24), steps=14, interval=500)  # three sequences a step
    told = [record.getMessage() for record in records if " of 24 sequences" in record.getMessage()]
    assert [line.split("δ: ")[1] for line in told] == [f"{count} of 24 sequences" for count in (6, 12, 18)]
