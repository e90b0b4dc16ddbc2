"""``flashpoint series``: metrics side by side."""

from pathlib import Path

import pytest

from tests.records import call, refusal, rows, write_run


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Losses at every step to 9, two metrics of heads at every second one."""
    metrics = [
        {"step": step, "loss": 10.0 - step}
        | ({"ties": [[float(step), 1.5]], "norm": [[2.0, 12345.678]]} if step % 2 else {})
        for step in range(10)
    ]
    metrics.append({"step": 10, "never": 1.0})  # not beside a loss
    return write_run(tmp_path / "run", {"name": "flash_bf16"}, metrics=metrics)


def test_a_row_is_a_step_at_which_all_were_measured(run: str) -> None:
    assert rows(call("series", run, "loss", "ties", "--head", "1/1", "--every", "4")) == [
        "| 3 | 7 | 3 |",
        "| 7 | 3 | 7 |",
        "| 9 | 1 | 9 |",  # the last
    ]
    some = rows(call("series", run, "loss", "--since", "3", "--until", "5", "--columns", "loss"))
    assert some == ["| 7 |", "| 6 |"]
    assert rows(call("series", run, "norm", "--head", "1/2"))[0] == "| 1 | 1.235e+04 |"


def test_a_thinned_run_has_as_many_rows_as_a_whole_one(tmp_path: Path) -> None:
    metrics = [{"step": step, "loss": 1.0} for step in [*range(0, 99, 3), 99]]
    run = write_run(tmp_path / "run", {"name": "flash_bf16"}, metrics=metrics)
    assert rows(call("series", run, "loss", "--every", "50", "--columns", "step")) == ["| 48 |", "| 99 |"]


def test_heads_stand_side_by_side(run: str) -> None:
    result = call("series", run, "loss", "1/1/ties", "1/2/ties", "--format", "csv")
    assert result.stdout.splitlines()[:2] == ["step,loss,1/1/ties,1/2/ties", "1,9.0,1.0,1.5"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["los"], "no metric los; did you mean loss? it has loss, never, norm, ties"),
        (["tie", "--head", "1/1"], "no metric tie; did you mean ties? it has norm, ties"),
        (["ties"], "ties is of a head; give --head LAYER/HEAD, one of 1/1 to 1/2"),
        (["ties", "--head", "2/1"], "ties is of a head; give --head LAYER/HEAD, one of 1/1 to 1/2"),
        (["ties", "--head", "first"], "give LAYER/HEAD, e.g. 2/1"),
        ([], "missing NAME"),
        (["loss", "--since", "10"], "run: no such step of loss: steps 0 to 9 have all; give other --since and --until"),
        (["loss", "--since", "5", "--until", "5"], "no such step of loss: steps 0 to 9 have all; give other --since"),
        (["loss", "never"], "no such step of loss, never: no step has all; give fewer names"),
        (["loss", "--hottest-head"], "--hottest-head: needs --departures"),
        (["--departures", "ties", "--every", "2"], "--departures: takes no --every"),
    ],
)
def test_what_a_run_does_not_hold_is_one_line(run: str, arguments: list[str], told: str) -> None:
    assert told in refusal(call("series", run, *arguments))
