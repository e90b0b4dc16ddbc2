"""The numbers behind figures, as files beside them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_data(folder: Path, name: str, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write the columns, of strings or numbers or None, as ``name.csv`` and ``name.parquet``.

    Raises:
        OSError: the folder cannot be written.
    """
    import pyarrow as pa

    from flashpoint.lab.evidence.arrow import write_parquet

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *zip(*columns.values(), strict=True)])
    table = pa.table(dict(columns))
    words = [field.name for field in table.schema if pa.types.is_string(field.type)]
    write_parquet(folder / f"{name}.parquet", table.schema, [table], words)
