"""Tables as text: what each format does with values that need care."""

import csv
import io
import json

import click
import pytest
from click.testing import CliRunner

from flashpoint.cli.selection import format_option
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


def test_a_list_has_an_item_for_each_row_and_leaves_out_what_has_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    heading, items, note = shown(capsys, "list").rstrip("\n").split("\n\n")
    assert (heading, note) == ("A heading.", "A note.")
    assert items.splitlines() == [
        "- **`a|b`** *steps* 12,345; *share* nan; *95 % interval* 25 to",
        "- **`c`** *share* 0.5",
    ]


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
    with pytest.raises(UserError, match="no such column; give all, or some of n, name, 95 % interval, x"):
        with_columns(tables, ["n", "value"])
    assert with_columns(tables, ["all"]) == tables


FURTHER = Table(("name", "value", "extra"), [["a", 1, 2]], "note", ["extra"])


@click.command()
@format_option
def command(form: str) -> None:
    show([FURTHER, Table(("x",), [[3]])], form)


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_people_see_further_columns_if_they_ask_and_programs_always_do() -> None:
    brief = printed().splitlines()
    assert brief[0].split("|")[1:-1] == [" name   ", "   value "]
    assert [line for line in brief if "extra" in line] == ["Not shown: extra; --columns all shows them."]
    assert "extra" in printed("--columns", "all").splitlines()[0]
    assert "|   x |" in printed("--columns", "all")
    assert printed("--columns", "extra").splitlines()[0] == "|   extra |"
    assert "Not shown" not in printed("--columns", "all") + printed("--columns", "extra")
    for form in ("csv", "json"):
        assert "extra" in printed("--format", form)
        assert printed("--format", form) == printed("--format", form, "--columns", "all")


@pytest.mark.parametrize("names", ["", "name,", ",name"])
def test_an_empty_name_is_no_column(names: str) -> None:
    result = CliRunner().invoke(command, ["--columns", names])
    assert result.exit_code == 2
    assert "a name is empty" in result.stderr
