"""What verbs share: the runs that words name, where these were made, and the format of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flashpoint.cli.table import ALL, COLUMNS, FORMATS
from flashpoint.errors import UserError, one_line, tell

if TYPE_CHECKING:
    import torch

    from flashpoint.runs.run import Run

T = TypeVar("T")
A = TypeVar("A")

BAD_RUNS = "flashpoint.bad_runs"
"""A key of click's context: whether a run was left out, so that the command ends with status 2."""

_TOLD = 5
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


def named_runs(words: Sequence[str]) -> list[Run]:
    """Return the runs that the words name, each once. A word that names none is told on stderr.

    Raises:
        UserError: no run is left.
    """
    from flashpoint.cli.run_words import select_runs

    once: dict[object, Run] = {}
    for _, runs in answered(words, lambda word: select_runs([word])):
        for run in runs:
            once.setdefault(run.folder.path.resolve() if run.folder else run.where, run)
    return list(once.values())


def ended_runs(words: Sequence[str], *, metrics: bool = False) -> list[Run]:
    """:func:`named_runs`, without runs whose files cannot be read. Those are told on stderr.

    Args:
        metrics: whether the question is to the metrics, too.

    Raises:
        UserError: no run is left.
    """

    def read(run: Run) -> object:
        return run.config, run.manifest, run.outcome, run.columns if metrics else None

    return [run for run, _ in answered(named_runs(words), read)]


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
        tell_errors(others)
        raise last
    tell_errors(errors)
    return answers


def tell_errors(errors: Sequence[Exception]) -> None:
    """The first errors in a line each on stderr, and how many more there are; the command then ends with status 2."""
    for error in errors[:_TOLD]:
        tell(f"error: {one_line(error)}")
    if len(errors) > _TOLD:
        tell(f"error: {len(errors) - _TOLD} more runs or words could not be used")
    if errors:
        click.get_current_context().meta[BAD_RUNS] = True


def some_were_left_out() -> bool:
    """Return whether a run or word that was asked for could not be used."""
    return BAD_RUNS in click.get_current_context().meta


def device_named(where: str, option: str = "--device cuda", alternative: str = "--device cpu or auto") -> torch.device:
    """Return the device that ``auto``, ``cpu`` or ``cuda`` names; ``auto`` is a GPU where there is one.

    Args:
        option: what asks for a GPU.
        alternative: what to give where there is none.

    Raises:
        UserError: ``cuda``, and there is none.
    """
    import torch

    available = torch.cuda.is_available()
    if where == "cuda" and not available:
        raise UserError(f"{option}: no CUDA device is visible; use {alternative}")
    return torch.device("cuda" if available and where != "cpu" else "cpu")


def provenance(runs: Sequence[Run]) -> str:
    """Return one line with the hardware, PyTorch versions, corpora, seeds and days of the runs. Corpora and seeds are
    left out of runs of other loops, which do not tell them. A log tells nothing: of logs alone it is empty."""
    from flashpoint.logs.stored_log import is_logged

    runs = [run for run in runs if not is_logged(run)]
    if not runs:
        return ""
    hardware = {run.manifest.place for run in runs}
    own = [run for run in runs if not run.watched]
    data = {(run.manifest.data.fingerprint or "unknown")[:8] for run in own}
    days = sorted({run.manifest.day for run in runs})
    between = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    seeds = {run.seed for run in own}
    what = f"corpus {', '.join(sorted(data))}; seed{'s' * (len(seeds) > 1)} {ranges(seeds)}; " if own else ""
    return f"{'; '.join(sorted(hardware))}; {what}{between}"


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as people do: ``0, 2 to 4`` for 0, 2, 3 and 4."""
    known = sorted(set(numbers))
    gaps = [(before, after) for before, after in pairwise(known) if after > before + 1]
    starts, ends = [known[0], *(after for _, after in gaps)], [*(before for before, _ in gaps), known[-1]]
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))
