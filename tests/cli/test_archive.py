"""``flashpoint archive``: a run goes into the tables, and verbs find it there."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from flashpoint.runs.chain import ChainWriter
from tests.records import call, refusal, rows, write_run


def test_an_archived_run_is_named_by_its_experiment(tmp_path: Path) -> None:
    _write_run_with_chain(tmp_path / "runs/one", [3.0 - step / 32 for step in range(25)])

    added = call("archive", "one", "trial", "--every", "8", cwd=tmp_path)
    assert added.returncode == 0, added.stderr
    assert (tmp_path / "runs/reference/runs.parquet").is_file()
    of_folder, of_table = (rows(call("runs", word, cwd=tmp_path)) for word in ("one", "trial:o*"))
    assert of_table == of_folder
    assert [row.split(" | ")[0] for row in rows(call("series", "trial:one", "loss", cwd=tmp_path))] == [
        "| 0", "| 8", "| 16", "| 24",
    ]  # fmt: skip
    assert call("compare", "one", "trial:one", cwd=tmp_path).stdout == "equal: 25 steps\n"
    assert "trial:one is kept already" in refusal(call("archive", "one", "trial", cwd=tmp_path))
    assert "--out" in refusal(call("report", "trial:one", cwd=tmp_path))
    assert "trial:one: no reading of tokens_per_second; it keeps none" in refusal(
        call("runs", "trial:one", "--show", "rates", cwd=tmp_path)
    )
    assert "delete the folder" in refusal(call("archive", "--remove", "one", cwd=tmp_path))
    taken_with_options = call("archive", "--remove", "trial:one", "--only", "loss", "--every", "10", cwd=tmp_path)
    assert "--remove: takes no --every and no --only;" in refusal(taken_with_options)
    assert call("archive", "--remove", "trial:one", cwd=tmp_path).returncode == 0
    assert "trial" in refusal(call("runs", "trial:one", cwd=tmp_path))
    assert call("archive", "one", "trial", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ("one", [2.0] * 351, "equal: 351 steps"),
        ("trial:one", [2.0] * 340, "equal for 300 steps; of later ones no digest is kept of both"),
        ("one", [2.0] * 400, "equal for 300 steps; of later ones no digest is kept of both"),
        ("one", [2.0] * 340, "equal for the 340 steps that both have; one has 351"),
        (
            "one",
            [*[2.0] * 299, 3.0, *[2.0] * 51],
            "first difference after step 199, at step 299 or before: loss 2.0 against 3.0; "
            "losses differ by up to 1 nats (step 299), by 0 at step 350",
        ),
    ],
)
def test_an_archived_run_is_compared_by_the_steps_that_are_kept(
    tmp_path: Path, one: str, other: list[float], told: str
) -> None:
    _write_run_with_chain(tmp_path / "runs/one", [2.0] * 351)
    _write_run_with_chain(tmp_path / "runs/other", other)
    call("archive", "one", "other", "trial", cwd=tmp_path)
    assert call("compare", one, "trial:other", cwd=tmp_path).stdout == f"{told}\n"


def _write_run_with_chain(folder: Path, losses: Sequence[float]) -> None:
    metrics = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    run = Path(write_run(folder, {"name": "flash_bf16"}, steps=len(losses), metrics=metrics))
    chain = ChainWriter(run / "chain.bin")
    for loss in losses:
        chain.append(loss, 1.0)
    outcome = json.loads((run / "outcome.json").read_text())
    (run / "outcome.json").write_text(json.dumps({**outcome, "chain_digest": chain.digest}))


def test_a_run_without_an_experiment_is_told_what_is_missing(tmp_path: Path) -> None:
    for name in ("one", "two"):
        _write_run_with_chain(tmp_path / "runs" / name, [2.0] * 5)
    assert refusal(call("archive", "one", cwd=tmp_path)).startswith("error: one: only one word; ")
    for last in ("two", "runs/two"):  # which made an experiment of that name
        assert refusal(call("archive", "one", last, cwd=tmp_path)).startswith(f"error: {last}: a run; ")
