"""Plain logs: lines that have a step and numbers with names, as ``step 100: loss 2.31``, or JSON
objects, also in one array.

If no line has a step, those with a loss are counted: progress bars and the Trainer's own lines tell the epoch alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
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
    rf"({_WORD}(?: {_WORD}){{0,3}})[\"']?(?:\s*[:=]\s*|\s+)(?:tensor\(|np\.float\d+\(|[\[\"'])?({_NUMBER})(?![\w.])?",
    re.IGNORECASE,
)
"""A name of up to four words, and the number behind it, also as PyTorch and NumPy print one."""
_LLM_C = re.compile(r"s:\d+ t[re]l:")
"""How llm.c begins a line of its ``main.log``, and below, what its names mean."""
_LLM_C_NAMES = {"s": "step", "trl": "train loss", "tel": "val loss", "norm": "grad norm"}
_STEPS = frozenset(("step", "steps", "iter", "iteration", "it", "update", "updates", "num updates"))
"""How the plain name of a step ends."""


def read_text_lines(path: Path) -> Record:
    """Return a row for each line that has a step and another number. Other lines are passed over, and so is a last line
    without its end. A name that somewhere has a fraction is no step: ``update`` can be a part of an epoch."""
    text = path.read_bytes().decode(errors="replace")
    found, remarks = _objects(text), list[str]()
    if found is None:
        *lines, unfinished = text.splitlines(keepends=True) or [""]
        if unfinished.endswith(("\n", "\r")):
            lines.append(unfinished)
        elif unfinished:
            remarks.append("its last line has no end, and is left out")
        found = [one for line in lines if (one := list(_named(_COLOUR.sub("", line))))]
    spelled = [value for one in found for _, value in one if isinstance(value, str)]
    comma = any("," in value for value in spelled) and has_decimal_comma(spelled, unless_told=False)
    if comma:
        remarks.append("its numbers have decimal commas")
    lines_numbers = [
        [(name, number_with(value, decimal_comma=comma) if isinstance(value, str) else number_of(value))
         for name, value in one]
        for one in found
    ]  # fmt: skip
    parts = {name for one in lines_numbers for name, number in one if number is not None and number % 1 > 0}
    rows = []
    for one in lines_numbers:
        step, numbers = None, dict[str, float]()
        for name, number in one:
            if step is None and _is_step(name):
                step = None if name in parts else step_of(number)
            elif number is not None:
                numbers.setdefault(name, number)
        if step is not None and numbers:
            rows.append((step, numbers))
    if not rows:
        rows = list(enumerate(dict(named) for one in lines_numbers if (named := _with_a_loss(one))))
        remarks += ["no line has a step, so those with a loss are counted"] if rows else []
    return Record("text", rows, remarks)


def _objects(text: str) -> list[list[tuple[str, Any]]] | None:
    """Return names and values of each object in an array of JSON; None of other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        return [_flat(one) for one in json.loads(text)]
    except (ValueError, AttributeError, RecursionError):
        return None


def _with_a_loss(named: list[tuple[str, float | None]]) -> list[tuple[str, float]]:
    """Return the numbers of a line, the first of each name first; none if no name has the word loss."""
    numbers = [(name, number) for name, number in reversed(named) if number is not None]
    return numbers if any("loss" in plain_name(name).split() for name, _ in numbers) else []


def _named(line: str) -> Iterator[tuple[str, Any]]:
    """Return the names and values of a line, of a JSON object or of running text."""
    if line.lstrip().startswith("{"):
        try:
            yield from _flat(json.loads(line))
        except (ValueError, RecursionError):
            pass
        else:
            return
    names = _LLM_C_NAMES if _LLM_C.match(line) else {}
    for match in _NAMED.finditer(line):
        yield names.get(match[1], match[1]), match[2]


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Return names and values of an object, and of objects in it with the outer name before theirs."""
    found = list[tuple[str, Any]]()
    for name, value in values.items():
        found += _flat(value, f"{before}{name}/") if isinstance(value, dict) else [(f"{before}{name}", value)]
    return found


def _is_step(name: str) -> bool:
    plain = plain_name(name)
    return plain in _STEPS or plain.rpartition(" ")[2] in _STEPS
