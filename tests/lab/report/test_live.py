"""The live view of runs under way: what it shows, from files as a run leaves them while it writes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from flashpoint.cli.live import frame
from flashpoint.cli.progress import progress_of
from flashpoint.lab.report.page import page
from flashpoint.lab.report.terminal_curves import curves
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.run import Run
from tests.records import write_run


def _shown(runs: list[Run], width: int = 110, height: int = 45) -> str:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(frame(runs, width, height, curves))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_curves_of_a_loop_that_goes_on_from_a_checkpoint_begin_there(tmp_path: Path) -> None:
    """From step 0 on, all of them would share the last column."""
    metrics = [{"step": 40_000 + step, "loss": 5.0 - step / 100, "grad_norm": 1.0} for step in range(300)]
    for name, made in (("on", metrics), ("one", metrics[:1])):
        write_run(tmp_path / name, {"name": "sdpa"}, metrics=made, manifest={"watched": True, "first_step": 40_000})
    assert "| 40,000 " in _shown([Run.of_folder(RunFolder(tmp_path / "on"))])
    assert "loss, nats per token" in _shown([Run.of_folder(RunFolder(tmp_path / "one"))])


def _under_way(folder: Path, steps: int, norms: float = 1.0) -> Run:
    """A run as it is while it trains: no outcome, a last line cut short."""
    metrics = [{"step": step, "loss": 5.0 - step / 100, "grad_norm": 1.0} for step in range(steps)]
    metrics += [{"step": steps - 1, "tokens_per_second": 64_000.0}]
    for step in range(0, steps, 100):
        head = norms * 1.01**step if norms != 1.0 else 1.0
        metrics.append({"step": step, "w_q_spectral_norm": [[1.0, 1.0, 1.0], [1.0, head, 1.0]]})
    train = {"steps": 1000, "batch_size": 8}
    write_run(folder, {"name": "flash_bf16"}, train=train, metrics=metrics)
    (folder / "outcome.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["model"] |= {"n_layer": 2, "n_head": 3, "d_model": 48, "context": 16}
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99999, "lo')
    return Run.of_folder(RunFolder(folder))


def test_progress_is_what_the_files_say(tmp_path: Path) -> None:
    run = _under_way(tmp_path / "going", 300)
    assert run.folder
    written = run.folder.metrics.stat().st_mtime
    progress = progress_of(run, now=written + 90)
    assert (progress.done, progress.steps, progress.tokens_per_second) == (300, 1000, 64_000)
    assert progress.seconds_left == pytest.approx(700 * 8 * 16 / 64_000)
    assert progress.silent_seconds == pytest.approx(90)
    assert progress.warning is None


def test_a_head_that_grows_is_warned_of(tmp_path: Path) -> None:
    warning = progress_of(_under_way(tmp_path / "hot", 700, norms=1.1)).warning
    assert warning
    assert (warning.layer, warning.head) == (2, 2)


def test_one_run_is_drawn_and_several_stand_in_a_table(tmp_path: Path) -> None:
    going, hot = _under_way(tmp_path / "going", 300), _under_way(tmp_path / "hot", 700, norms=1.1)
    shown = _shown([going])
    assert "300 of 1,000" in shown
    assert "64,000" in shown
    assert sum("\u2800" <= character <= "\u28ff" for character in shown) > 100  # Braille dots draw the curves
    assert len(shown.splitlines()) <= 45
    both = _shown([going, hot])
    assert "going" in both
    assert "warning at step" in both


def test_brackets_in_a_name_are_no_markup(tmp_path: Path) -> None:
    shown = _shown([_under_way(tmp_path / name, 100) for name in ("one[red]", "two")])
    assert "one[red]" in shown.split("training loss")[0]


def test_a_run_that_has_written_nothing_yet_is_shown(tmp_path: Path) -> None:
    run = _under_way(tmp_path / "new", 300)
    assert run.folder
    run.folder.metrics.write_text("")
    assert "0 of 1,000" in _shown([Run.of_folder(run.folder)])
    run.folder.metrics.unlink()  # begun after the configuration
    assert "0 of 1,000" in _shown([Run.of_folder(run.folder)])


@pytest.mark.slow
def test_the_page_of_a_run_under_way_loads_itself_again(tmp_path: Path) -> None:
    run = _under_way(tmp_path / "going", 300)
    going = page([run], reload_seconds=15)
    assert '<meta http-equiv="refresh" content="15">' in going
    assert "not ended" in going
    assert "data:image/png" in going
    assert "refresh" not in page([run])
