"""Hydra beside Python 3.14, whose argparse reads the help of an option as soon as it is added."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def help_as_text() -> Iterator[None]:
    """Let argparse take Hydra's help of ``--shell-completion``, an object that becomes text when it is printed.

    Without it Hydra 1.3.8 ends on Python 3.14 with "badly formed help string".
    """
    former = argparse.HelpFormatter._get_help_string

    def text(self: argparse.HelpFormatter, action: argparse.Action) -> str | None:
        help_string = former(self, action)
        return None if help_string is None else str(help_string)

    argparse.HelpFormatter._get_help_string = text  # type: ignore[method-assign]
    try:
        yield
    finally:
        argparse.HelpFormatter._get_help_string = former  # type: ignore[method-assign]
