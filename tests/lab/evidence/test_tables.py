"""Damage to the evidence tables is told in one line."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flashpoint.cli.run_words import open_run
from flashpoint.errors import UserError
from flashpoint.lab.evidence.archiving import archive
from flashpoint.lab.evidence.tables import Evidence
from tests.lab.evidence.kept import write_kept_run


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    archive([write_kept_run(tmp_path / "run")], "small", tmp_path / "reference")
    return Evidence(tmp_path / "reference")


def read_all(evidence: Evidence) -> None:
    run = open_run("small:run", evidence.root.parent)
    assert run.seed == 0
    assert run.columns["loss"]
    assert run.chain.steps == 45


@pytest.mark.parametrize("name", ["runs.parquet", "metrics/small.parquet", "chains/small.parquet"])
def test_a_damaged_table_is_one_line(evidence: Evidence, name: str) -> None:
    path = evidence.root / name
    whole = path.read_bytes()
    read_all(evidence)
    flipped = bytearray(whole)
    flipped[len(pq.ParquetFile(path).metadata.created_by)] ^= 1  # in the first page
    for damaged in (whole[:-20], b"", b"PAR1", whole[: len(whole) // 2], bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{name}: damaged \(.*\); restore the file") as told:
            read_all(evidence)
        assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["metrics/small.parquet", "chains/small.parquet"])
def test_a_missing_table_or_run_is_one_line(evidence: Evidence, name: str) -> None:
    path = evidence.root / name
    table = pq.read_table(path)
    renamed = table.set_column(0, "run", pa.array(["walk"] * len(table)))
    pq.write_table(renamed, path)
    with pytest.raises(UserError, match=f"{name}: no rows of run; restore the file"):
        read_all(evidence)
    path.unlink()
    with pytest.raises(UserError, match=f"{name}: missing; restore the file"):
        read_all(evidence)


def test_an_edited_chain_does_not_end_in_the_recorded_digest(evidence: Evidence) -> None:
    path = evidence.chains_path("small")
    table = pq.read_table(path)
    norms = [1.5, *table["grad_norm"].to_pylist()[1:]]
    pq.write_table(table.set_column(3, "grad_norm", pa.array(norms, pa.float32())), path)
    with pytest.raises(UserError, match=r"chains/small.parquet: run ends in \w{16}, not \w{16}; restore the file"):
        read_all(evidence)


def test_a_table_is_plain_parquet_for_other_programs(evidence: Evidence) -> None:
    table = pq.read_table(evidence.metrics_path("small"), filters=[("run", "=", "run")], columns=["step", "loss"])
    run = open_run("small:run", evidence.root.parent)
    measured = [(row["step"], row["loss"]) for row in table.to_pylist() if row["loss"] is not None]
    assert [step for step, _ in measured] == run.columns["loss"][0].tolist()
    assert [f"{loss:.6g}" for _, loss in measured] == [f"{loss:.6g}" for loss in run.columns["loss"][1]]
