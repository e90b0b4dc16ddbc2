"""Tables as text: what each format does with values that need care."""

import csv
import io
import json

import pytest

from flashpoint.cli.table import Cell, Table, show, with_columns
from flashpoint.errors import UserError

TABLE = Table(
    ("name", "steps", "share", "95 % interval"),
    [
        [Cell("a|b", "`a|b`"), 12_345, float("nan"), Cell({"low": 0.25, "high": None}, "25 to")],
        [Cell("c", "`c`"), None, 0.5, None],
    ],
    "A note.",
)


def shown(capsys: pytest.CaptureFixture[str], form: str) -> str:
    show([TABLE, Table(("x",), [])], form, "A heading.")
    return capsys.readouterr().out


def test_markdown_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "markdown")
    assert text.startswith("A heading.\n\n| name ")
    lines = text.splitlines()
    cells = [[cell.strip() for cell in line.replace("\\|", "/").split("|")] for line in lines[4:6]]
    assert cells == [["", "`a/b`", "12,345", "nan", "25 to", ""], ["", "`c`", "", "0.5", "", ""]]
    assert lines[7] == "A note."
    assert lines[-2].startswith("| x")


def test_csv_has_values_and_a_column_for_each_part(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = shown(capsys, "csv").split("\n\n")
    assert list(csv.reader(io.StringIO(first))) == [
        ["name", "steps", "share", "95 % interval low", "95 % interval high"],
        ["a|b", "12345", "nan", "0.25", ""],
        ["c", "", "0.5", "", ""],
    ]
    assert second == "x\n"


def test_json_has_values(capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.loads(shown(capsys, "json"), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert whole["heading"] == "A heading."
    assert whole["tables"][0] == {
        "rows": [
            {"name": "a|b", "steps": 12_345, "share": "nan", "95 % interval": {"low": 0.25, "high": None}},
            {"name": "c", "steps": None, "share": 0.5, "95 % interval": None},
        ],
        "note": "A note.",
    }
    assert whole["tables"][1] == {"rows": [], "note": ""}


def test_columns_are_chosen_by_name_or_by_how_they_begin() -> None:
    tables = [Table(("n", "name", "95 % interval"), [[1, "a", 2]], "note"), Table(("x",), [[3]])]
    (table,) = with_columns(tables, ["95", "n"])
    assert (table.columns, table.rows, table.note) == (["95 % interval", "n"], [[2, 1]], "note")
    (table,) = with_columns(tables, ["na"])
    assert table.columns == ["name"]
    with pytest.raises(UserError, match="no such column; there are n, name, 95 % interval, x"):
        with_columns(tables, ["n", "value"])
