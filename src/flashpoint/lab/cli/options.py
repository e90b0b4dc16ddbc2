"""Which of a command's options were given."""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.core import ParameterSource


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
