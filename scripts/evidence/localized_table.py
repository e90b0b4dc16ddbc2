"""What localisations answered, side by side: a column for each run, a row for each question.

    python scripts/evidence/localized_table.py runs/reference/localize-h200.txt [--questions layers,choice]

Reads what ``flashpoint localize`` printed. Where several files have a run, the first file counts. A share is that of
the growth of W_Q in the run; of a layer or head alone, that of its own growth. "?": the answer is undecided, because
the interval includes one half. "of 2": so many starts, where that is fewer than the run has. "one weighs": one start
has more than three quarters of the weight.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from flashpoint.cli.table import Table, show
from flashpoint.errors import UserError, command_errors

_RUN = re.compile(
    r"(?:(\S+): )?\w+(?:, (seed \d+))?, exploded at ([\d,]+); (\d+) branches, .* in ([\d.]+ min); (.+); (.+)"
)
_SHARE = re.compile(r"(-?[\d.]+(?: ± [\d.]+)?) of (its own|the) growth, \d+ of (\d+) starts")
_FIRST = ("exploded at", "branches", "took", "starts", "growth by start", "chance, at most")
_LAYERS = ("layers named", "these layers alone", "without these layers")
_HEADS = ("heads named", "these heads alone", "without these heads")
_LAST = ("what is named, alone, explodes at", "without these layers, explodes at")
Answers = dict[str, str]


def part(name: str) -> str:
    """Return a short name: L2, L3H1, and L2H2,3 of several heads of a layer."""
    found = re.findall(r"(?:heads? ([\d, ]+) of )?layers? ([\d, ]+)", name)
    parts = (f"L{layers.strip()}{heads and 'H' + heads}" for heads, layers in found)
    return " ".join(name.replace(", ", ",") for name in parts)


def share(verdict: str, evidence: str, starts: int) -> tuple[str, bool]:
    """Return a share as the table has it, and whether it is that of the part's own growth."""
    found = _SHARE.match(evidence)
    if found is None:
        raise UserError(f"{evidence}: no share; give what `flashpoint localize` of this version printed")
    told = f"{found[1]} ?" if "undecided" in verdict else found[1]
    fewer = f", of {found[3]}" if int(found[3]) < starts else ""
    return f"{told}{fewer}{', one weighs' if '% of the weight' in evidence else ''}", found[2] == "its own"


def answer(answers: Answers, starts: int, question: str, verdict: str, evidence: str) -> None:
    """Put a row of what was printed into its place."""
    if question == "onset":
        step = re.search(r"explodes at ([\d,]+)", verdict)
        answers[_LAST["without" in verdict]] = step[1] if step else "no"
        return
    told, own = share(verdict, evidence, starts)
    subject = re.sub(r":.*| alone| together| in its place", "", verdict)
    if question == "choice":
        key = re.sub(r": .*", "", verdict)
    elif own:
        key = f"{part(subject)} alone, of its own"
    else:
        named, alone, without = _LAYERS if question == "layers" else _HEADS
        key = without if "necessary" in verdict else alone
        answers[named] = part(subject)
    if key in answers:
        raise UserError(
            f"{verdict}: a second answer to one question, as earlier rules gave; leave it out by --questions"
        )
    answers[key] = told


def localized(path: Path, questions: list[str]) -> dict[str, tuple[Answers, str, str]]:
    """Return by run its answers, the machine and the day."""
    found: dict[str, tuple[Answers, str, str]] = {}
    answers: Answers = {}
    starts = 0
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if run := _RUN.match(line):
            answers = dict(zip(_FIRST, run.groups()[2:5], strict=False))
            found[run[2] or run[1]] = answers, run[6], run[7]
        elif cells[0] == "criterion":
            starts = cells[1].partition(" from ")[2].count(", ") + 1
            answers["starts"] = str(starts)
            if growth := re.findall(r"growth (×[\d.]+)", cells[2]):
                answers["growth by start"] = " ".join(growth)
                chance = re.findall(r"chance ×([\d.]+)", cells[2])
                answers["chance, at most"] = f"×{max(chance, key=float)}"
        elif cells[0] in questions:
            answer(answers, starts, *cells)
    return found


def order(runs: list[Answers]) -> list[str]:
    """Return the rows: layers and the parts alone before what was found of them, choices in the order of the files."""
    keys = list(dict.fromkeys(key for answers in runs for key in answers))
    alone = sorted(key for key in keys if key.endswith("of its own"))
    layers, heads = ([key for key in alone if ("H" in key) == head] for head in (False, True))
    placed = [*_FIRST, *layers, *_LAYERS, *heads, *_HEADS]
    choices = [key for key in keys if key not in placed and key not in _LAST]
    return [key for key in (*placed, *choices, *_LAST) if key in keys]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="LOCALIZE.txt")
    parser.add_argument("--questions", default="layers,heads,choice,onset", help="of these; default: %(default)s")
    with command_errors():
        arguments = parser.parse_args()
        runs: dict[str, tuple[Answers, str, str]] = {}
        for path in arguments.files:
            runs = runs | {
                run: answers_of_run
                for run, answers_of_run in localized(path, arguments.questions.split(",")).items()
                if run not in runs
            }
        answers = [found for found, _, _ in runs.values()]
        rows = [[key, *(found.get(key, "") for found in answers)] for key in order(answers)]
        machines = "; ".join(dict.fromkeys(f"{machine}; {day}" for _, machine, day in runs.values()))
        show(Table(["", *runs], rows), "markdown", machines)


if __name__ == "__main__":
    main()
