"""Runs that are kept: all that a run holds comes back from the tables, and what cannot be kept is told."""

import csv
import json
import math
import shlex
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from flashpoint.cli.run_words import open_run, select_runs
from flashpoint.errors import UserError
from flashpoint.lab.evidence import archiving as module
from flashpoint.lab.evidence.archiving import archive, remove
from flashpoint.lab.evidence.tables import Evidence
from flashpoint.lab.replay import resumed_values
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metrics import MetricsFile
from flashpoint.runs.run import Run
from tests.lab.evidence.kept import STEPS, assert_equal, bytes_of, rounded, set_outcome, write_kept_run


@pytest.mark.slow
@pytest.mark.parametrize("digits", [3, 4, 6, 17])
def test_a_run_is_the_same_in_a_table_as_in_its_folder(tmp_path: Path, digits: int) -> None:
    runs = [write_kept_run(tmp_path / f"seed-{seed}", seed, heads) for seed, heads in enumerate([(2, 3), (1, 1)])]
    archive(runs, "small", tmp_path / "reference", every=1, digits=digits)
    for run, kept in zip(runs, select_runs(["small:*"], tmp_path), strict=True):
        assert_equal(run, kept, digits)
        assert (kept.experiment, kept.folder, kept.ended, kept.where) == ("small", None, True, f"small:{run.name}")
        assert (kept.verdict, kept.hottest_head) == (run.verdict, run.hottest_head)


@pytest.mark.parametrize("name", ["metrics", "chains"])
def test_tables_are_not_written_behind_a_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / name).symlink_to(tmp_path / "others")
    with pytest.raises(UserError, match=f"{name}: a link to another folder; put the folder itself in its place"):
        archive([write_kept_run(tmp_path / "run")], "small", tmp_path / "reference")
    assert not list((tmp_path / "others").iterdir())


def test_evidence_has_six_digits_of_every_tenth_step(tmp_path: Path) -> None:
    run = write_kept_run(tmp_path / "run")
    archive([run], "small", tmp_path / "reference")
    kept = open_run("small:run", tmp_path)
    for name in ("loss", "grad_norm"):
        assert kept.columns[name][0].tolist() == [0, 10, 20, 30, 40, STEPS - 1]
        expected = rounded(run.columns[name][1][[0, 10, 20, 30, 40, STEPS - 1]], 6)
        assert rounded(kept.columns[name][1], 17) == rounded(np.array(expected, float), 17)
    assert kept.columns["w_q_spectral_norm"][0].tolist() == [9, 19, 29, 39]
    assert kept.chain.records.tobytes() == run.chain.records.tobytes()
    assert math.isnan(kept.chain.records["grad_norm"].view(np.float32)[3])


def test_of_named_metrics_values_a_given_number_of_steps_apart_stay(tmp_path: Path) -> None:
    run = write_kept_run(tmp_path / "run")
    archive([run], "small", tmp_path / "reference", only=["w_q_spectral_norm"], spacing=20)
    kept = open_run("small:run", tmp_path)
    assert list(kept.columns) == ["w_q_spectral_norm"]
    steps, values = kept.columns["w_q_spectral_norm"]
    assert steps.tolist() == [9, 29, 39]
    expected = rounded(run.columns["w_q_spectral_norm"][1][..., [0, 2, 3]], 3)
    assert rounded(values, 17) == rounded(np.array(expected, float), 17)


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes_in_whatever_order_they_came(tmp_path: Path) -> None:
    runs = [write_kept_run(tmp_path / f"seed-{seed:02}", seed) for seed in range(20)]
    for number, parts in enumerate([[runs], [runs[7:], runs[:7]], [[run] for run in runs[::-1]]]):
        for part in parts:
            archive(part, "small", tmp_path / str(number) / "reference")
    first, *others = (bytes_of(tmp_path / str(number) / "reference") for number in range(3))
    assert set(first) == {"runs.parquet", "index.csv", "metrics/small.parquet", "chains/small.parquet"}
    assert others == [first, first]


def test_a_run_taken_out_leaves_no_trace(tmp_path: Path) -> None:
    runs = [write_kept_run(tmp_path / f"seed-{seed}", seed) for seed in range(3)]
    metrics = MetricsFile(tmp_path / "seed-2/metrics.jsonl")
    metrics.log(0, {"of_its_own": 1.0, "loss": 1.0})
    metrics.close()
    root = tmp_path / "reference"
    archive(runs[:2], "small", root)
    before = bytes_of(root)
    archive([Run.of_folder(RunFolder(tmp_path / "seed-2"))], "small", root)
    archive(runs[:1], "other", root)
    remove(select_runs(["small:seed-2", "other:*"], tmp_path), root)
    assert bytes_of(root) == before
    with pytest.raises(UserError, match=r"seed-0: in a folder of its own, not in the tables; delete the folder"):
        remove(runs[:1], root)


def test_every_run_has_a_line_in_the_index(tmp_path: Path) -> None:
    runs = [write_kept_run(tmp_path / f"seed-{seed}", seed) for seed in (3, 1)]
    archive(runs, "small", tmp_path / "reference")
    with (tmp_path / "reference/index.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first == {
        "experiment": "small",
        "run": "seed-1",
        "attention": "flash_bf16",
        "seed": "1",
        "outcome": "exploded",
        "onset": "40",
        "steps": "45",
        "digest": "0000000000000001",
        "date": "2026-11-21",
    }
    assert second["run"] == "seed-3"


def test_what_cannot_be_kept_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    root = tmp_path / "reference"
    good, run = (write_kept_run(tmp_path / name) for name in ("good", "run"))
    archive([good], "small", root)
    before = bytes_of(root)

    def refused(*runs: Run, experiment: str = "small", **options: int | list[str]) -> str:
        with pytest.raises(UserError) as told:
            archive(runs, experiment, root, **options)  # type: ignore[arg-type]
        assert bytes_of(root) == before
        return str(told.value)

    assert refused(run, good) == f"{good.where}: small:good is kept already; rename the run, or --remove that"
    assert refused(run, run) == f"{run.where}: a second run named run; rename one of them"
    (kept,) = select_runs(["small:*"], tmp_path)
    assert refused(kept, experiment="more") == "small:good: is in the evidence tables already; give a run's folder"
    assert refused(run, experiment="a/b") == "'a/b': no name of an experiment; give letters, digits, hyphens"
    assert refused(run, every=0) == "every 0, spacing 1, digits 3: give 1 or more"
    assert refused(run, only=["los"]) == (
        f"{run.where}: measured no los; it has grad_norm, loss, only_once, w_q_spectral_norm"
    )
    assert run.folder
    metrics = run.folder.metrics.read_text()
    run.folder.metrics.write_text(metrics + '{"step": 1000000, "run": 1.0}\n')
    assert refused(again(run)) == f"{run.where}: a metric cannot be kept as run; --only NAME keeps others alone"
    run.folder.metrics.write_text(metrics)
    set_outcome(run.folder.path, chain_digest="0123456789abcdef")
    assert f"chain.bin: ends in {run.chain.digest}, the outcome says 0123456789abcdef" in refused(again(run))
    run.folder.chain.unlink()
    assert refused(again(run)).endswith(
        f"has no chain.bin, which evidence keeps; replay={run.where} makes the run anew"
    )
    run.folder.outcome.unlink()
    assert refused(again(run)) == f"{run.where}: has not ended; resume={run.where} goes on with it"


def again(run: Run) -> Run:
    assert run.folder
    return Run.of_folder(run.folder)


def test_what_a_crash_left_of_a_run_counts_for_nothing(tmp_path: Path) -> None:
    """The table of all runs is written last."""
    runs = [write_kept_run(tmp_path / f"seed-{seed}", seed) for seed in range(2)]
    root = tmp_path / "reference"
    archive(runs[:1], "small", root)
    before = Evidence(root).runs_path.read_bytes()
    archive(runs[1:], "small", root)
    whole = bytes_of(root)
    Evidence(root).runs_path.write_bytes(before)
    assert [run.name for run in select_runs(["small:*"], tmp_path)] == ["seed-0"]
    archive(runs[1:], "small", root)
    assert bytes_of(root) == whole


def test_runs_that_are_added_at_the_same_time_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that wrote last dropped what the other had added, and both said that theirs was."""
    one, other = (write_kept_run(tmp_path / name) for name in ("one", "other"))
    root, thinned = tmp_path / "reference", module._thinned
    beside = Thread(target=lambda: archive([other], "small", root))

    def slowly(*given: Any) -> Any:
        if given[1] is one:
            beside.start()
            beside.join(0.5)
        return thinned(*given)

    monkeypatch.setattr(module, "_thinned", slowly)
    archive([one], "small", root)
    beside.join()
    assert [run.name for run in select_runs(["small:*"], tmp_path)] == ["one", "other"]


def test_a_run_kept_in_a_folder_is_not_resumed(tmp_path: Path) -> None:
    """The command that is told instead is one word for a shell, whatever the folder's name."""
    run = RunFolder(tmp_path / "my run")
    run.path.mkdir()
    run.config.write_text(json.dumps({}))
    run.packed_metrics.touch()
    with pytest.raises(UserError, match=r"resume=.*: a thinned run has no checkpoints; ") as refused:
        resumed_values({"resume": str(run.path), "runs_dir": "runs"}, [])
    assert f"replay={run.path}" in shlex.split(str(refused.value))
