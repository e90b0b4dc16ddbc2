"""A name of a metric stands in the tables of metrics alone."""

import ast
from collections.abc import Iterator

from flashpoint.diagnosis.measure_table import MEASURES
from flashpoint.runs.metric_table import METRICS
from tests.conftest import REPOSITORY

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


def test_no_other_module_spells_a_name() -> None:
    names = (METRICS.keys() | MEASURES.keys()) - OTHER_MEANINGS.keys()
    spelled = [f"{path}:{line} {text}" for path, line, text in _texts() if path not in TABLES and text in names]
    assert not spelled, "name it by the table: " + "; ".join(spelled)


def test_no_module_makes_names_of_parts() -> None:
    """A piece of text that ends several names, or begins them, is no part of another one's f-string."""
    names = [name for name in METRICS.keys() | MEASURES.keys() if name not in OTHER_MEANINGS]
    ends = {name[at:] for name in names for at in range(1, len(name)) if name[at] == "_"}
    made = [f"{path}:{line} {text}" for path, line, text in _pieces() if path not in TABLES and text in ends]
    assert not made, "give the name a row: " + "; ".join(made)


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCES.rglob("*.py")):
        yield path.relative_to(SOURCES).as_posix(), ast.parse(path.read_text())


def _texts() -> Iterator[tuple[str, int, str]]:
    """Return the module, line and value of each string."""
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path, node.lineno, node.value


def _pieces() -> Iterator[tuple[str, int, str]]:
    """Return the module, line and value of each piece of an f-string that follows a value in it."""
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                for before, piece in zip(node.values, node.values[1:], strict=False):
                    if isinstance(before, ast.FormattedValue) and isinstance(piece, ast.Constant):
                        yield path, node.lineno, str(piece.value)
