"""Options of ``flashpoint deviation`` that take several words with commas between them, and what one may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from flashpoint.lab.deviation.emulated import Block
    from flashpoint.lab.deviation.formats import Format
    from flashpoint.lab.deviation.statistics import Unit

T = TypeVar("T")


def each(parse: Callable[[str], T], wanted: str) -> Callable[..., list[T] | None]:
    """Return a callback that parses words with commas between them, each once."""

    def callback(_context: click.Context, _option: click.Parameter, value: str | None) -> list[T] | None:
        if value is None:
            return None
        found: dict[T, None] = {}
        for word in map(str.strip, value.split(",")):
            if not word:
                raise click.BadParameter(f"{value!r}: a word is empty; give words with one comma between two")
            try:
                found[parse(word)] = None
            except (ValueError, KeyError):
                raise click.BadParameter(f"{word}: give {wanted}") from None
        return list(found)

    return callback


def count(word: str) -> int:
    """Return a number from 1 on."""
    if not 1 <= int(word) < 1 << 31:
        raise ValueError
    return int(word)


def tile(word: str) -> Block:
    """Return the tile of ``B_rxB_c``."""
    from flashpoint.lab.deviation.emulated import Block

    rows, keys = word.split("x")
    return Block(count(rows), count(keys))


def format_of(word: str) -> Format:
    """Return the format of that name."""
    from flashpoint.lab.deviation.formats import format_named

    return format_named(word)


def unit(word: str) -> Unit:
    """Return the unit of that name."""
    from flashpoint.lab.deviation.statistics import UNITS

    return {str(unit): unit for unit in UNITS}[word]
