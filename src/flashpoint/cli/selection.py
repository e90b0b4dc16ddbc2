"""What verbs share: the runs that words name, and the format of tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flashpoint.cli.table import ALL, COLUMNS, FORMATS
from flashpoint.errors import UserError, nearest, one_line

if TYPE_CHECKING:
    import torch

    from flashpoint.lab.analysis.paired import Losses
    from flashpoint.lab.analysis.survival import Lifetimes
    from flashpoint.runs.run import Run

T = TypeVar("T")
A = TypeVar("A")

BAD_RUNS = "flashpoint.bad_runs"
"""A key of click's context: whether a run was left out, so that the command ends with status 2."""

CONTROL = "flash_fp32"
"""The attention that others are compared with where nobody names one."""

_TOLD = 5
_FIGURES = (".png", ".pdf", ".svg")
"""How the names of figures end."""

runs_argument = click.argument("words", nargs=-1, required=True, metavar="RUN...")


def format_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--format``, given as ``form``, and ``--columns``, which :func:`flashpoint.cli.table.show` looks up."""
    form = click.option(
        "--format", "form", type=click.Choice(FORMATS), default="markdown", show_default=True,
        help="What tables look like.",
    )  # fmt: skip
    columns = click.option(
        "--columns", metavar="NAME,...", expose_value=False, callback=_keep_columns,
        help="Show only columns that have these names, or else begin so, of the tables that have the first one. "
        "all: every column.",
    )  # fmt: skip
    return form(columns(command))


def _keep_columns(context: click.Context, _: click.Parameter, names: str | None) -> None:
    if names is None:
        return
    context.meta[COLUMNS] = [name.strip() for name in names.split(",")]
    if not all(context.meta[COLUMNS]):
        raise click.BadParameter(
            f"{names!r}: a name is empty; give names of columns with commas between them, or {ALL}"
        )


def figure_option(what: str) -> Callable[[Any], Any]:
    """``--out FILE.png``, into which ``what`` is drawn."""
    kind = click.Path(dir_okay=False, path_type=Path)
    told = f"Draw {what} into this file."
    return click.option("--out", type=kind, callback=_drawable, metavar="FILE.png", help=told)


def _drawable(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    if path and path.suffix.lower() not in _FIGURES:
        raise click.BadParameter(f"{path}: give a name that ends in one of {', '.join(_FIGURES)}")
    return path


def figures_option(what: str) -> Callable[[Any], Any]:
    """``--figures FOLDER``, into which figures of ``what`` are written, with their data."""
    return click.option(
        "--figures",
        "folder",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
        help=f"Write figures of {what} into this folder, and their data beside them as CSV and Parquet.",
    )


def chosen(words: Sequence[str]) -> list[Run]:
    """Return the runs that the words name, each once. A word that names none is told on stderr.

    Raises:
        UserError: no run is left.
    """
    from flashpoint.runs.select import select_runs

    once: dict[object, Run] = {}
    for _, runs in answered(words, lambda word: select_runs([word])):
        for run in runs:
            once.setdefault(run.folder.path.resolve() if run.folder else run.where, run)
    return list(once.values())


def ended(words: Sequence[str], *, metrics: bool = False) -> list[Run]:
    """:func:`chosen`, without runs whose files cannot be read. Those are told on stderr.

    Args:
        metrics: whether the question is to the metrics, too.

    Raises:
        UserError: no run is left.
    """

    def read(run: Run) -> object:
        return run.config, run.manifest, run.outcome, run.columns if metrics else None

    return [run for run, _ in answered(chosen(words), read)]


def answered(asked: Sequence[T], question: Callable[[T], A]) -> list[tuple[T, A]]:
    """Return each of those asked with its answer. One that has none is told on stderr and left out; the command then
    ends with status 2.

    Raises:
        UserError: none has an answer.
    """
    answers, errors = [], []
    for one in asked:
        try:
            answers.append((one, question(one)))
        except (UserError, OSError) as error:
            errors.append(error)
    if errors and not answers:
        *others, last = errors
        tell(others)
        raise last
    tell(errors)
    return answers


def tell(errors: Sequence[Exception]) -> None:
    """The first errors in a line each on stderr, and how many more there are; the command then ends with status 2."""
    for error in errors[:_TOLD]:
        print(f"error: {one_line(error)}", file=sys.stderr)
    if len(errors) > _TOLD:
        print(f"error: {len(errors) - _TOLD} more runs or words could not be used", file=sys.stderr)
    if errors:
        click.get_current_context().meta[BAD_RUNS] = True


def control_option(what: str) -> Callable[[Any], Any]:
    """``--control ATTENTION``; absent is :data:`CONTROL`."""
    return click.option("--control", metavar="ATTENTION", help=f"The attention to {what}.  [default: {CONTROL}]")


def attention_names(groups: Iterable[Lifetimes | Losses]) -> list[str]:
    """Return what a control can be called: the variants of the groups, and their labels."""
    return list(dict.fromkeys(name for group in groups for name in (group.variant, group.label)))


def refuse_unknown_control(asked: str | None, groups: Iterable[Lifetimes | Losses]) -> None:
    """Refuse a control that is asked for and not among the groups; the default one need not be."""
    if asked and asked not in (known := attention_names(groups)):
        raise UserError(f"--control {asked}: {nearest(asked, known)}these runs have {', '.join(known)}")


def tell_of_texts(compared: Iterable[Sequence[Run]], what: str) -> None:
    """Tell on stderr of runs of several texts among those that are counted or compared with one another.

    Args:
        what: what then depends on the text.
    """
    from flashpoint.lab.analysis.survival import pooled_corpora

    if corpora := pooled_corpora(compared):
        told = f"rows are counted or compared over {len(corpora)} texts (corpus {', '.join(corpora)})"
        print(f"{told}, and the {what} depends on the text; name runs of one text", file=sys.stderr)


def device_named(where: str, told: str = "--device cuda", instead: str = "--device cpu or auto") -> torch.device:
    """Return the device that ``auto``, ``cpu`` or ``cuda`` names; ``auto`` is a GPU where there is one.

    Args:
        told: the option that asks for a GPU.
        instead: what to give where there is none.

    Raises:
        UserError: ``cuda``, and there is none.
    """
    import torch

    available = torch.cuda.is_available()
    if where == "cuda" and not available:
        raise UserError(f"{told}: no CUDA device is visible; use {instead}")
    return torch.device("cuda" if available and where != "cpu" else "cpu")
