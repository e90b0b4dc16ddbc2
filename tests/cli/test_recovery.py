"""Whether the loss came back, on runs where it is known by hand."""

from pathlib import Path
from typing import Any

import pytest

from flashpoint.cli.run_words import select_runs
from flashpoint.runs.recovery import lasting
from tests.records import call, refusal, rows, write_run


def test_the_rise_is_from_the_last_validation_before_the_onset_to_the_end(tmp_path: Path) -> None:
    losses = [{"step": 99, "val_loss": 3.0}, {"step": 199, "val_loss": 2.0}, {"step": 299, "val_loss": 9.0}]
    losses += [{"step": 399, "val_loss": 2.1}, {"step": 499, "val_loss": 2.4}, {"step": 599, "val_loss": 2.31}]

    def run(name: str, end: float, onset: int | None) -> str:
        attn, detector = {"name": "flash_bf16"}, {"margin": 0.3}
        return write_run(tmp_path / name, attn, onset=onset, val_loss=end, detector=detector, metrics=losses)

    runs = [run("lost", 2.5, 200), run("nan", float("nan"), 200), run("back", 2.25, 200), run("stable", 2.0, None)]
    result = call("runs", *runs, "--show", "recovery")
    assert rows(result) == [
        "| `lost` | 200 | 1,000 | 2.00 | 2.50 | +0.50 | 500 | short tail |",
        "| `nan` | 200 | 1,000 | 2.00 | nan | +nan | 500 | short tail |",
        "| `back` | 200 | 1,000 | 2.00 | 2.25 | +0.25 | none | short tail |",
    ]
    assert result.stdout.splitlines()[-1].startswith("2 of 3 ended above the loss before the onset")
    early = run("early", 2.5, 50)
    assert "not validated both before its onset and at its end" in refusal(call("runs", early, "--show", "recovery"))
    some = call("runs", early, *runs, "--show", "recovery")
    assert (some.returncode, some.stdout.splitlines()[2:]) == (2, result.stdout.splitlines()[2:])
    assert some.stderr.startswith(f"error: {early}: not validated")


@pytest.mark.parametrize(("parameters", "tail"), [(7_343_360, 5000), (124_000_000, 1000)])
def test_a_rise_lasts_by_the_first_validation_after_the_common_tail(tmp_path: Path, parameters: int, tail: int) -> None:
    def run(name: str, *losses: tuple[int, float], end: int = 9000, **rest: Any) -> str:
        metrics = [{"step": step - 1, "val_loss": loss} for step, loss in ((200, 2.0), *losses)]
        about = {"onset": 200, "manifest": {"parameters": parameters}, **rest}
        return write_run(tmp_path / name, {"name": "flash_bf16"}, steps=end, metrics=metrics, **about)

    high, low = 2.31, 2.29
    runs = {
        "lasts": run("lasts", (199 + tail, low), (200 + tail, high), val_loss=low),
        "returns": run("returns", (199 + tail, high), (200 + tail, low), val_loss=high),
        "nan": run("nan", (200 + tail, float("nan"))),
        "short": run("short", end=199 + tail, val_loss=high, seed=4),
        "nonfinite": run("nonfinite", outcome="nonfinite", end=300, onset=None, seed=5),
    }
    found = {name: lasting(one) for name, path in runs.items() for one in select_runs([path])}
    assert found == {"lasts": True, "returns": False, "nan": True, "short": None, "nonfinite": True}
    told = call("survival", *[runs[name] for name in ("short", "nonfinite")], "--columns", "exploded,lasting")
    assert rows(told) == ["| 2 of 2, 1 by NaN | 1 of 1; short: 1 of 1 up |"]


def test_metrics_that_cannot_be_read_leave_the_onset_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"name": "flash_bf16"}, onset=200)
    (tmp_path / "run/metrics.jsonl").write_text("{")
    assert rows(call("survival", run, "--columns", "exploded,lasting")) == ["| 1 of 1 | 1 unknown |"]
