"""``flashpoint archive``: a run goes into the tables, and verbs find it there."""

import json
from pathlib import Path

from flashpoint.runs.chain import ChainWriter
from tests.records import call, refusal, rows, write_run


def test_an_archived_run_is_named_by_its_experiment(tmp_path: Path) -> None:
    metrics = [{"step": step, "loss": 3.0 - step / 32} for step in range(25)]
    run = Path(write_run(tmp_path / "runs/one", {"name": "flash_bf16"}, steps=25, metrics=metrics))
    chain = ChainWriter(run / "chain.bin")
    for line in metrics:
        chain.append(line["loss"], 1.0)
    outcome = json.loads((run / "outcome.json").read_text())
    (run / "outcome.json").write_text(json.dumps({**outcome, "chain_digest": chain.digest}))

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


def test_a_run_without_an_experiment_is_told_what_is_missing(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/one", {"name": "flash_bf16"})
    assert refusal(call("archive", "one", cwd=tmp_path)).startswith("error: one: only one word; ")
