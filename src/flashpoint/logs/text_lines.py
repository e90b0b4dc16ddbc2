"""Plain logs: lines that have a step and numbers with names, as ``step 100: loss 2.31``, or JSON objects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashpoint.logs.column_names import plain_name
from flashpoint.logs.numerals import has_decimal_comma, number_with
from flashpoint.logs.record import Record, number_of, step_of

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,]*\d)|\d{1,3}(?:\.\d{3})+,\d+(?![\d.,]*\d)|"
    r"\d+,\d+(?:[eE][-+]?\d+)?(?![\d.,]*\d)|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|(?:nan|inf(?:inity)?)\b)"
)
"""With thousands apart by commas, by dots, with a decimal comma, or with a decimal dot."""
_WORD = r"[A-Za-z_][\w./-]*"
_NAMED = re.compile(
    rf"({_WORD}(?: {_WORD}){{0,3}})[\"']?(?:\s*[:=]\s*|\s+)[\[\"']?({_NUMBER})(?![\w.])?", re.IGNORECASE
)
"""A name of up to four words, and the number behind it."""
_STEPS = frozenset(("step", "steps", "iter", "iteration", "it", "update", "updates", "num updates"))
"""How the plain name of a step ends."""


def read_text_lines(path: Path) -> Record:
    """Return a row for each line that has a step and another number. Other lines are passed over, and so is a last line
    without its end."""
    *lines, unfinished = path.read_bytes().decode(errors="replace").splitlines(keepends=True) or [""]
    remarks = []
    if unfinished.endswith(("\n", "\r")):
        lines.append(unfinished)
    elif unfinished:
        remarks.append("its last line has no end, and is left out")
    found = [one for line in lines if (one := list(_named(_COLOUR.sub("", line))))]
    spelled = [value for one in found for _, value in one if isinstance(value, str)]
    comma = any("," in value for value in spelled) and has_decimal_comma(spelled, unless_told=False)
    if comma:
        remarks.append("its numbers have decimal commas")
    rows = []
    for one in found:
        step, numbers = None, dict[str, float]()
        for name, value in one:
            number = number_with(value, decimal_comma=comma) if isinstance(value, str) else number_of(value)
            if step is None and _is_step(name):
                step = step_of(number)
            elif number is not None:
                numbers.setdefault(name, number)
        if step is not None and numbers:
            rows.append((step, numbers))
    return Record("text", rows, remarks)


def _named(line: str) -> Iterator[tuple[str, Any]]:
    """Return the names and values of a line, of a JSON object or of running text."""
    if line.lstrip().startswith("{"):
        try:
            yield from json.loads(line).items()
        except (ValueError, RecursionError):
            pass
        else:
            return
    for match in _NAMED.finditer(line):
        yield match[1], match[2]


def _is_step(name: str) -> bool:
    plain = plain_name(name)
    return plain in _STEPS or plain.rpartition(" ")[2] in _STEPS
