"""Options that several verbs of the laboratory take: the control, files of figures, and which were given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from flashpoint.errors import UserError, nearest, tell
from flashpoint.files import check_target, refuse_unexpanded

if TYPE_CHECKING:
    from flashpoint.lab.analysis.lifetimes import Lifetimes
    from flashpoint.lab.analysis.paired import Losses
    from flashpoint.runs.run import Run

CONTROL = "flash_fp32"
"""The attention that others are compared with where nobody names one."""

_FIGURES = (".png", ".pdf", ".svg")
"""How the names of figures end."""


def figure_option(what: str) -> Callable[[Any], Any]:
    """``--out FILE.png``, into which ``what`` is drawn."""
    kind = click.Path(dir_okay=False, path_type=Path)
    told = f"Draw {what} into this file."
    return click.option("--out", type=kind, callback=_drawable, metavar="FILE.png", help=told)


def _drawable(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    if path and path.suffix.lower() not in _FIGURES:
        raise click.BadParameter(f"{path}: give a name that ends in one of {', '.join(_FIGURES)}")
    if path:
        check_target(path, "--out", *_FIGURES)
    return path


def own_folder(_context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a folder to write in that is a link, or begins with ``~``."""
    if path:
        told = f"{option.opts[0]} {path}"
        refuse_unexpanded(path, told)
        if path.is_symlink():
            raise UserError(f"{told}: a link to another folder; name the folder itself")
    return path


def figures_option(what: str) -> Callable[[Any], Any]:
    """``--figures FOLDER``, into which figures of ``what`` are written, with their data."""
    return click.option(
        "--figures",
        "folder",
        type=click.Path(file_okay=False, path_type=Path),
        callback=own_folder,
        metavar="FOLDER",
        help=f"Write figures of {what} into this folder, and their data beside them as CSV and Parquet.",
    )


def control_option(what: str) -> Callable[[Any], Any]:
    """``--control ATTENTION``; absent is :data:`CONTROL`."""
    return click.option("--control", metavar="ATTENTION", help=f"The attention to {what}.  [default: {CONTROL}]")


def control_among(asked: str | None, runs: Sequence[Run]) -> str:
    """Return the control: ``asked``, or where no run has it the only attention that begins with that word.

    On a CPU ``flash_bf16`` is ``flash_bf16 scores=none out_unnormalized=none``.
    """
    names = {run.variant for run in runs}
    alike = [name for name in names if asked == name.split(maxsplit=1)[0]]
    return alike[0] if asked not in names and len(alike) == 1 else asked or CONTROL


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
    from flashpoint.lab.analysis.lifetimes import pooled_corpora

    if corpora := pooled_corpora(compared):
        told = f"rows are counted or compared over {len(corpora)} texts (corpus {', '.join(corpora)})"
        tell(f"{told}, and the {what} depends on the text; name runs of one text")


def refuse_given(context: click.Context, told: str, names: Iterable[str]) -> None:
    """Refuse parameters that have no effect beside others.

    Args:
        told: those others, as they were given.
        names: the parameters' names in the command's function.

    Raises:
        click.UsageError: some were given, in whatever value; it tells which.
    """
    words = {one.name: _word(one) for one in context.command.params}
    given = [word for name, word in words.items() if name in set(names) and _was_given(context, name)]
    if given:
        raise click.UsageError(f"{told}: takes no {' and no '.join(given)}")


def _word(one: click.Parameter) -> str:
    return one.opts[0] if isinstance(one, click.Option) else one.human_readable_name.strip("[].")


def _was_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE
