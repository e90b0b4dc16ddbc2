"""How a log spells its numbers: with a dot or a comma before the decimals, and with or without thousands apart."""

from __future__ import annotations

import re
from collections.abc import Iterable

from flashpoint.logs.record import number_of

_NUMERAL = re.compile(r"[-+]?([\d.,]*\d)([eE][-+]?\d+)?")
_APART = re.compile(r"(?<=\d)[ '’\u00a0\u2009\u202f](?=\d{3}(?!\d))")
"""Blanks and apostrophes between thousands."""
_BY_COMMA, _BY_DOT = (re.compile(rf"[-+]?\d{{1,3}}(?:{mark}\d{{3}})+(?!\d).*") for mark in (",", r"\."))


def has_decimal_comma(cells: Iterable[str], *, unless_told: bool) -> bool:
    """Return whether more numbers have a decimal comma for certain than a decimal dot; what is given where none tells.

    1,234 and 1.234 tell nothing. 2,31 and 0,123 and 1.234,5 have decimal commas.
    """
    told = sum(map(_decimal_mark, cells))
    return told > 0 if told else unless_told


def number_with(cell: str, *, decimal_comma: bool) -> float | None:
    """Return a cell as a number; None of others, and where it is spelled otherwise."""
    plain = _APART.sub("", cell.strip())
    if decimal_comma:
        plain = (plain.replace(".", "") if _BY_DOT.fullmatch(plain) else plain).replace(",", ".")
    elif _BY_COMMA.fullmatch(plain):
        plain = plain.replace(",", "")
    return number_of(plain)


def _decimal_mark(cell: str) -> int:
    """Return 1 where a number has a decimal comma, −1 where it has a decimal dot, and 0 where that is not certain."""
    if "," not in cell and "." not in cell:
        return 0
    if (match := _NUMERAL.fullmatch(_APART.sub("", cell.strip()))) is None:
        return 0
    digits, exponent = match[1], match[2]
    commas, dots = digits.count(","), digits.count(".")
    if commas and dots:
        return 1 if digits.rfind(",") > digits.rfind(".") else -1
    mark = 1 if commas else -1
    if commas + dots > 1:
        return -mark  # thousands
    before, _, behind = digits.partition("," if commas else ".")
    return mark if exponent or len(behind) != 3 or len(before) > 3 or before.strip("0") == "" else 0
