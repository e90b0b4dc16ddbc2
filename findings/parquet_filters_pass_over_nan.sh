#!/usr/bin/env bash
# DuckDB 2.0.1 and pyarrow 26.0.1: a filter for NaN on a Parquet file leaves out rows that are NaN.
#
# Whoever keeps losses in a Parquet file, and looks for a failed training with WHERE isnan(loss), may expect the rows
# that the same filter finds in the table in memory. A row group's statistics name its smallest and largest loss, and
# leave NaN out, as the format asks. By them DuckDB passes over each row group that has a number beside the NaN, and
# pyarrow over each whose other numbers are all equal, as those of a loss that stands still. The same holds for
# loss > 5 in DuckDB, for which NaN is the largest number, and for loss != 5 in both. polars 2.1.0 finds all rows.
# Files written with write_statistics=["step"], without the loss, are read rightly by all three.
#
# Seen with Python 3.11, 2026-11-29. The steps of NaN are 1, 6 and 9; the first three row groups hold 1 NaN 3, 5 5 5 NaN
# and 7 8 NaN:
#
#   isnan(loss): memory 1 6 9
#   pyarrow: 1 9
#   DuckDB:
#   polars: 1 6 9
#   loss > 5 in DuckDB: memory 1 6 7 8 9, file 7 8 9
#   without statistics: pyarrow 1 6 9, DuckDB 1 6 9
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pyarrow==26.0.1 duckdb==2.0.1 polars==2.1.0
cat > "$folder/program.py" <<'PY'
import math

import duckdb
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

NAN = math.nan
groups = [[1.0, NAN, 3.0], [5.0, 5.0, 5.0, NAN], [7.0, 8.0, NAN]]
losses = [loss for group in groups for loss in group]
rows = pa.table({"step": range(len(losses)), "loss": losses})
for name, statistics in (("usual", True), ("without", ["step"])):
    with pq.ParquetWriter(f"{name}.parquet", rows.schema, write_statistics=statistics) as writer:
        start = 0
        for group in groups:
            writer.write_table(rows.slice(start, len(group)))
            start += len(group)


def by_pyarrow(file):
    return pq.read_table(file, filters=pc.is_nan(pc.field("loss")))["step"].to_pylist()


def by_duckdb(source, condition="isnan(loss)"):
    return [step for (step,) in duckdb.sql(f"SELECT step FROM {source} WHERE {condition} ORDER BY step").fetchall()]


def said(steps):
    return "".join(f" {step}" for step in steps)


duckdb.sql("CREATE TABLE memory AS SELECT * FROM rows")
polars_found = polars.scan_parquet("usual.parquet").filter(polars.col("loss").is_nan()).collect()["step"].to_list()
seen = [rows.filter(pc.is_nan(pc.field("loss")))["step"].to_pylist(), by_pyarrow("usual.parquet"),
        by_duckdb("'usual.parquet'"), polars_found]
for name, steps in zip(("isnan(loss): memory", "pyarrow:", "DuckDB:", "polars:"), seen, strict=True):
    print(f"{name}{said(steps)}")
above = by_duckdb("memory", "loss > 5"), by_duckdb("'usual.parquet'", "loss > 5")
print(f"loss > 5 in DuckDB: memory{said(above[0])}, file{said(above[1])}")
without = by_pyarrow("without.parquet"), by_duckdb("'without.parquet'")
print(f"without statistics: pyarrow{said(without[0])}, DuckDB{said(without[1])}")
all_three = [1, 6, 9]
same = seen == [all_three, [1, 9], [], all_three] and without == (all_three, all_three)
raise SystemExit(0 if same and above == ([1, 6, 7, 8, 9], [7, 8, 9]) else "changed")
PY
cd "$folder"
venv/bin/python program.py
