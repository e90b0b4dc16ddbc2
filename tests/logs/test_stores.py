"""Stores of several runs, with the tables and lines that MLflow 3.17 and trackio 0.5 and 0.43 write."""

import json
import math
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashpoint.cli.runs import command
from flashpoint.errors import UserError
from flashpoint.logs.log import logs_at, read_log
from flashpoint.logs.stored_log import logged_runs
from tests.logs.test_readers import losses

EXPLODED_AT = 200
LARGEST = 1.7976931348623157e308
MLFLOW = """
CREATE TABLE runs (
    run_uuid VARCHAR(32) NOT NULL, name VARCHAR(250), start_time BIGINT, lifecycle_stage VARCHAR(20),
    CONSTRAINT run_pk PRIMARY KEY (run_uuid)
);
CREATE TABLE metrics (
    "key" VARCHAR(250) NOT NULL, value FLOAT NOT NULL, timestamp BIGINT NOT NULL, run_uuid VARCHAR(32) NOT NULL,
    step BIGINT DEFAULT '0' NOT NULL, is_nan BOOLEAN DEFAULT '0' NOT NULL,
    CONSTRAINT metric_pk PRIMARY KEY ("key", timestamp, step, run_uuid, value, is_nan)
);
"""
TRACKIO = """
CREATE TABLE metrics (
    id INTEGER PRIMARY KEY AUTOINCREMENT, {id} timestamp TEXT NOT NULL, run_name TEXT NOT NULL, step INTEGER NOT NULL,
    metrics TEXT NOT NULL
);
"""


def of_kind(kind: str) -> list[float]:
    """Losses of a training, from step 0."""
    found = [3 - step / 200 + 0.01 * math.sin(7 * step) for step in range(300)]
    if kind == "exploded":
        return [loss + max(0, step - EXPLODED_AT) / 10 for step, loss in enumerate(found)]
    return [math.nan if kind == "nan" and step >= EXPLODED_AT else loss for step, loss in enumerate(found)]


def mlflow_database(path: Path, runs: Iterable[tuple[str, str, list[float]]], stage: str = "active") -> Path:
    """Of ids, names and losses."""
    database = sqlite3.connect(path)
    database.executescript(MLFLOW)
    for begun, (one, name, found) in enumerate(runs):
        database.execute("INSERT INTO runs VALUES (?, ?, ?, ?)", (one, name, begun, stage))
        for step, loss in enumerate(found):
            value = 0.0 if math.isnan(loss) else max(-LARGEST, min(LARGEST, loss))
            row = ("train/loss", value, 1_796_088_286_542 + step, one, step, math.isnan(loss))
            database.execute("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", row)
    database.commit()
    database.close()
    return path


def trackio_database(path: Path, runs: Iterable[tuple[str, str, list[float]]], *, ids: bool = True) -> Path:
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.executescript(TRACKIO.format(id="run_id TEXT NOT NULL," if ids else ""))
    for one, name, found in runs:
        for step, loss in enumerate(found):
            spelled = loss if math.isfinite(loss) else {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(loss)]
            row = (
                *([one] if ids else []),
                "2026-12-01T01:26",
                name,
                step,
                json.dumps({"train/loss": spelled}).encode(),
            )
            database.execute(f"INSERT INTO metrics VALUES (NULL, {', '.join('?' * len(row))})", row)
    database.commit()
    database.close()
    return path


def mlflow_folder(path: Path, runs: Iterable[tuple[str, str, list[float]]], stage: str = "active") -> Path:
    experiment = path / "852763606203978995"
    for one, name, found in runs:
        file = experiment / one / "metrics/train/loss"
        file.parent.mkdir(parents=True)
        file.write_text("".join(f"{1_796_088_320_326 + step} {loss} {step}\n" for step, loss in enumerate(found)))
        (experiment / one / "meta.yaml").write_text(f"lifecycle_stage: {stage}\nrun_id: {one}\nrun_name: {name}\n")
    (experiment / "meta.yaml").write_text("name: mine\n")
    return path


STORES = {"mlflow.db": mlflow_database, "project.db": trackio_database, "mlruns": mlflow_folder}
RUNS = [(f"{number}c1f", kind, of_kind(kind)) for number, kind in enumerate(("stable", "exploded", "nan"))]


@pytest.mark.parametrize("name", STORES)
def test_a_store_is_all_of_its_runs_and_each_is_judged(tmp_path: Path, name: str) -> None:
    store = STORES[name](tmp_path / name, RUNS)
    shown = CliRunner().invoke(command, [str(store), "--format", "json"])
    assert shown.exit_code == 0, shown.output
    runs = logged_runs(str(store))
    assert [run.verdict for run in runs][:2] == ["stable to 299", f"exploded at {runs[1].onset}"]
    assert runs[1].onset is not None
    assert EXPLODED_AT < runs[1].onset < EXPLODED_AT + 50
    assert runs[2].verdict == f"nonfinite at {EXPLODED_AT}"
    for run, (_, _, written) in zip(runs, RUNS, strict=True):
        assert list(losses(read_log(Path(run.where), None)).values()) == pytest.approx(written, abs=0, nan_ok=True)


@pytest.mark.parametrize("name", STORES)
def test_infinite_losses_are_infinite(tmp_path: Path, name: str) -> None:
    found = [2.0, math.inf, -math.inf, 1e300, 2.0]
    store = STORES[name](tmp_path / name, [("0c1f", "one", found)])
    (path,) = logs_at(store)
    assert list(losses(read_log(path, None)).values()) == found


@pytest.mark.parametrize("name", ["mlflow.db", "project.db"])
def test_a_run_in_a_database_is_named_behind_it(tmp_path: Path, name: str) -> None:
    store = STORES[name](tmp_path / name, RUNS)
    for word in (f"{store}/nan", f"{store}/2c1f", f"{store}/nan:train/loss"):
        (run,) = logged_runs(word)
        assert run.verdict == f"nonfinite at {EXPLODED_AT}"
    (missing,) = logged_runs(f"{store}/explode")
    with pytest.raises(
        UserError, match=r"no run explode; did you mean exploded\? it has stable, exploded, nan; .*/NAME names"
    ):
        _ = missing.verdict
    with pytest.raises(UserError, match="it has stable, exploded, nan; "):
        read_log(store, None)


@pytest.mark.parametrize("name", ["mlflow.db", "project.db"])
def test_runs_whose_names_do_not_tell_them_apart_have_their_ids(tmp_path: Path, name: str) -> None:
    runs = [(one, called, [2.0] * 3) for one, called in (("a", "same"), ("b", "same"), ("c", "../c"), ("d", "x/y"))]
    store = STORES[name](tmp_path / name, runs)
    assert [str(path.relative_to(store)) for path in logs_at(store)] == ["a", "b", "c", "x/y"]


def test_a_trackio_database_without_ids_is_read_by_names(tmp_path: Path) -> None:
    store = trackio_database(tmp_path / "project.db", RUNS, ids=False)
    assert [path.name for path in logs_at(store)] == ["stable", "exploded", "nan"]


@pytest.mark.parametrize("name", ["mlflow.db", "mlruns"])
def test_deleted_runs_are_left_out(tmp_path: Path, name: str) -> None:
    make = {"mlflow.db": mlflow_database, "mlruns": mlflow_folder}[name]
    store = make(tmp_path / name, RUNS, "deleted")
    if name == "mlruns":
        assert not logs_at(store)
    else:
        with pytest.raises(UserError, match="it has no run with metrics"):
            read_log(store, None)


@pytest.mark.parametrize("name", ["mlflow.db", "mlruns"])
def test_metrics_without_a_step_are_counted(tmp_path: Path, name: str) -> None:
    """``mlflow.log_metric`` without ``step=`` writes step 0."""
    store = STORES[name](tmp_path / name, RUNS[:1])
    if name == "mlruns":
        (file,) = store.glob("*/*/metrics/train/loss")
        file.write_text("".join(f"{time} {loss} 0\n" for time, loss in enumerate(RUNS[0][2])))
    else:
        with sqlite3.connect(store) as database:
            database.execute("UPDATE metrics SET step = 0")
        database.close()
    (path,) = logs_at(store)
    log = read_log(path, None)
    assert list(losses(log).values()) == RUNS[0][2]
    assert "no value has a step, so those of each name are counted" in log.remarks


def test_a_folder_of_mlflow_tells_the_runs_name_and_a_line_that_is_cut(tmp_path: Path) -> None:
    (run,) = logs_at(mlflow_folder(tmp_path / "mlruns", RUNS[:1]))
    file = run / "metrics/train/loss"
    file.write_text(file.read_text()[:-3])
    log = read_log(run, None)
    assert len(losses(log)) == 299
    assert log.remarks == ("MLflow calls it stable", "the last line of train/loss has no end, and is left out")
    file.write_text("1796088320326 x 0\n")
    with pytest.raises(UserError, match="train/loss:1: no time, value and step"):
        read_log(run, None)


def test_a_trackio_run_of_the_trainer_has_the_trainings_own_steps(tmp_path: Path) -> None:
    """trackio counts calls of ``log``; the Trainer logs every ten steps, and its step beside it."""
    store = trackio_database(tmp_path / "project.db", RUNS[:1])
    with sqlite3.connect(store) as database:
        place = "json_set(CAST(metrics AS TEXT), '$.\"train/global_step\"', 10 + 10 * step)"
        database.execute(f"UPDATE metrics SET metrics = {place}")
    database.close()
    log = read_log(store, None)
    assert losses(log) == dict(zip(range(10, 3010, 10), RUNS[0][2], strict=True))
    assert log.remarks == ("its steps are those of train/global_step",)


def test_what_a_trackio_that_goes_on_has_not_yet_moved_into_its_database_is_read(tmp_path: Path) -> None:
    store = trackio_database(tmp_path / "project.db", RUNS[:1])
    goes_on = sqlite3.connect(store)
    row = ("0c1f", "2026-12-01T01:26", "stable", 300, '{"train/loss": 7.0}')
    goes_on.execute("INSERT INTO metrics VALUES (NULL, ?, ?, ?, ?, ?)", row)
    goes_on.commit()
    assert losses(read_log(store, None))[300] == 7.0
    goes_on.close()


def test_reading_a_database_leaves_nothing_beside_it(tmp_path: Path) -> None:
    """SQLite makes two files beside one with a write-ahead journal, and refuses it in a folder that takes none."""
    store = trackio_database(tmp_path / "project.db", RUNS[:1])
    assert len(losses(read_log(store, None))) == 300
    assert os.listdir(tmp_path) == ["project.db"]


@pytest.mark.parametrize("rest", [0, 60, 3_000, 20_000])
def test_a_database_that_is_cut_or_anothers_is_told_in_one_line(tmp_path: Path, rest: int) -> None:
    store = mlflow_database(tmp_path / "mlflow.db", RUNS)
    if rest:
        store.write_bytes(store.read_bytes()[:rest])
    else:
        with sqlite3.connect(store) as database:
            database.execute("ALTER TABLE metrics RENAME TO others")
        database.close()
    (run,) = logged_runs(str(store))
    told = "SQLite cannot read it" if rest else "neither MLflow's nor trackio's"
    with pytest.raises(UserError, match=told):
        _ = run.verdict


def test_a_view_that_computes_for_ever_is_not_asked(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        rows = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n AS id"
        database.execute(f"CREATE VIEW metrics AS {rows}, n AS run_name, n AS step, n AS metrics FROM c")
    database.close()
    with pytest.raises(UserError, match="neither MLflow's nor trackio's"):
        read_log(tmp_path / "mlflow.db", None)
