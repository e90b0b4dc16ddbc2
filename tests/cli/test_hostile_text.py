"""Text of somebody else's records, files and folders: in a terminal it is shown as it stands, on a page it is text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashpoint.errors import UserError
from flashpoint.lab.report import page as page_module
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.run import Run
from tests.records import call, write_run

TERMINAL = "\x1b]0;title\x07\x9b31m\u202e\u2066\r\nnext\x7f"
"""Sets a terminal's title and colour, turns the direction of what follows, and begins a line."""
PAGE = "<script>alert(1)</script>'\"><img src=x onerror=alert(1)>"
NAME = "\x1b]0;t\x07\x9b31m\u202e<script>"
RECORDS = ("config", "manifest", "outcome")


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys and indices of every string in a record, and of every None, which may be one."""
    if isinstance(value, dict | list):
        for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inside, (*place, key))
    elif value is None or isinstance(value, str):
        yield place


def put(record: Any, place: tuple[Any, ...], value: object) -> Any:
    *holders, last = place
    holder = record
    for key in holders:
        holder = holder[key]
    before, holder[last] = holder[last], value
    return before


def fill(run: Path, text: str) -> int:
    """Write the text wherever a record takes it; return at how many places."""
    filled = 0
    for name in RECORDS:
        file = run / f"{name}.json"
        record = json.loads(file.read_text())
        for place in list(places(record)):
            before = put(record, place, text)
            file.write_text(json.dumps(record))
            try:
                getattr(Run.of_folder(RunFolder(run)), name)
                filled += 1
            except UserError:
                put(record, place, before)
        file.write_text(json.dumps(record))
    return filled


def hostile(folder: Path, text: str, *, seed: int = 1) -> Path:
    """A run whose every text is this one, under a name of the kind."""
    environment = {"torch": "2", "flashpoint": "1", "commit": "c", "platform": "p", "command": ["train"]}
    manifest = {"environment": environment, "probes_off": [{"probe": "p", "step": 3, "error": "e"}]}
    metrics = [{"step": step, "loss": 3.0, "grad_norm": 1.0} for step in range(0, 1000, 10)]
    write_run(folder, {"name": "own"}, seed=seed, val_loss=2.0, manifest=manifest, metrics=metrics)
    assert fill(folder, text) > 10
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    for seed, name in ((1, NAME), (2, f"{NAME} too")):
        hostile(folder / name, TERMINAL, seed=seed)
    (folder / f"{NAME}.csv").write_text("step,loss\n0,1.0\n1,nan\n")
    return folder


VERBS = [
    *(f"runs FOLDER --show {what}" for what in ("outcomes", "rates", "hottest", "recovery", "warnings", "overhead")),
    *(f"runs FOLDER --format {form}" for form in ("list", "csv", "json")),
    "runs LOG",
    "runs FOLDER --columns x\x1b",
    "survival FOLDER",
    "loss FOLDER",
    "series RUN loss",
    "series LOG loss",
    "series RUN nothing",
    "compare RUN OTHER",
    "diagnose RUN",
    "diagnose \x1b]0;t\x07",
    "watch FOLDER --once",
    "watch RUN --once",
    "watch LOG --once",
    "report RUN --out OUT",
]


@pytest.mark.parametrize("command", VERBS)
def test_no_verb_sends_a_terminal_what_is_not_printable(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(page_module, "_images", lambda _: {})  # not what is asked here
    words = {"FOLDER": runs, "RUN": runs / NAME, "OTHER": runs / f"{NAME} too", "LOG": runs / f"{NAME}.csv"}
    verb, *arguments = command.split()
    result = call(verb, *({**words, "OUT": tmp_path / NAME}.get(one, one) for one in arguments))
    shown = result.stdout + result.stderr
    assert shown
    assert {one for one in shown if not one.isprintable()} <= {"\n"}
    if command.endswith("json"):  # a program gets what the record holds
        (table,) = json.loads(result.stdout)["tables"]
        assert {row["run"] for row in table["rows"]} == {NAME, f"{NAME} too"}


def test_a_page_takes_no_text_for_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every text that a record may hold."""
    monkeypatch.setattr(page_module, "_images", lambda _: {})
    folder = RunFolder(hostile(tmp_path / "<script>", PAGE))
    folder.localized.write_text(
        json.dumps({"heading": PAGE, "columns": [PAGE, PAGE, PAGE], "rows": [[PAGE, PAGE, PAGE]]})
    )
    shown = page_module.page([Run.of_folder(folder)])
    assert "<script" not in shown
    assert "<img" not in shown
    assert shown.count("&lt;script&gt;") >= 8  # title, attention, digest, hardware, folder, and what localize found


def test_a_page_has_no_control_characters(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "_images", lambda _: {})
    shown = page_module.page([Run.of_folder(RunFolder(runs / NAME))])
    assert {one for one in shown if not one.isprintable()} <= {"\n"}
