"""A name of a metric stands in the tables of metrics alone, and one of a file in RunFolder."""

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from flashpoint.diagnosis.measure_table import MEASURES
from flashpoint.runs.metric_table import METRICS
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow  # to read all modules, which the tests share

SOURCES = REPOSITORY / "src"
TABLES = {"flashpoint/runs/metric_table.py", "flashpoint/diagnosis/measure_table.py"}
OTHER_MEANINGS = {
    "loss": "a verb, a panel, a field of chains, outcomes and checkpoints",
    "grad_norm": "a field of chains",
    "val_loss": "a field of outcomes and checkpoints",
    "lr": "a key of the configuration",
    "nonfinite": "a verdict, and a finding",
    "dead_rows": "a finding",
    "delta_bias": "a finding, and a fault put in on purpose",
    "feature_sign_agreement": "a quantity of claims",
    "token_similarity": "a quantity of claims",
    "step_similarity": "a quantity of claims",
    "tied_out_error_bias": "a quantity of claims",
    "untied_out_error_bias": "a quantity of claims",
    "one_sided_tied_out_error_bias": "a quantity of claims",
}
"""Names that are words of something else, too."""
FOLDERS = {"flashpoint/runs/folder.py", "flashpoint/runs/subfolders.py"}
FILES = (
    "config.json", "manifest.json", "outcome.json", "tape.bin", "chain.bin", "metrics.jsonl", "batches.csv",
    "localize.json", "curves.png", "report.html", "delta.jsonl", "batch.pt", "layer-*", "step-*.",
)  # fmt: skip
"""Of a run, as docs/reference.md lists them."""
SUBFOLDERS = {"checkpoints", "weights", "captures", "branches", "report", "comparison", "figures", "wandb_id"}


def test_no_other_module_spells_a_name() -> None:
    """Neither alone nor in a message."""
    names = re.compile(rf"\b({'|'.join((METRICS.keys() | MEASURES.keys()) - OTHER_MEANINGS.keys())})\b")
    spelled = [
        f"{path}:{line} {text}"
        for path, line, text in _texts()
        if path not in TABLES and (found := names.search(text)) and ("_" in found[0] or found[0] == text)
    ]
    assert not spelled, "name it by the table: " + "; ".join(spelled)


def test_no_module_makes_names_of_parts() -> None:
    """A piece of text that ends several names, or begins them, is no part of another one's f-string."""
    names = [name for name in METRICS.keys() | MEASURES.keys() if name not in OTHER_MEANINGS]
    ends = {name[at:] for name in names for at in range(1, len(name)) if name[at] == "_"}
    made = [f"{path}:{line} {text}" for path, line, text in _pieces() if path not in TABLES and text in ends]
    assert not made, "give the name a row: " + "; ".join(made)


def test_run_folder_alone_knows_file_names() -> None:
    """Not in a path, a pattern or a message of another module."""
    names = re.compile("|".join(re.escape(name) for name in FILES))
    spelled = [f"{path}:{line} {text!r}" for path, line, text in _texts() if path not in FOLDERS and names.search(text)]
    assert not spelled, "ask RunFolder: " + "; ".join(spelled)


def test_run_folder_alone_knows_its_folders() -> None:
    joined = [f"{path}:{line} {text}" for path, line, text in _joined() if path not in FOLDERS and text in SUBFOLDERS]
    assert not joined, "ask RunFolder: " + "; ".join(joined)


@functools.cache
def _modules() -> list[tuple[str, list[ast.AST]]]:
    """Return each module, and what it is made of."""
    paths = sorted(SOURCES.rglob("*.py"))
    return [(path.relative_to(SOURCES).as_posix(), list(ast.walk(ast.parse(path.read_text())))) for path in paths]


def _texts() -> Iterator[tuple[str, int, str]]:
    """Return the module, line and value of each string that is not for readers of the source."""
    for path, nodes in _modules():
        prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                yield path, node.lineno, node.value


def _pieces() -> Iterator[tuple[str, int, str]]:
    """Return the module, line and value of each piece of an f-string that follows a value in it."""
    for path, nodes in _modules():
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                for before, piece in zip(node.values, node.values[1:], strict=False):
                    if isinstance(before, ast.FormattedValue) and isinstance(piece, ast.Constant):
                        yield path, node.lineno, str(piece.value)


def _joined() -> Iterator[tuple[str, int, str]]:
    """Return the module, line and value of each string that a path is joined with."""
    for path, nodes in _modules():
        for node in nodes:
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
                yield path, node.lineno, str(node.right.value)
