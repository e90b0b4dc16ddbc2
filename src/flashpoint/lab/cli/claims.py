"""``flashpoint claims``: what was claimed about the failure, and what the evidence says to each claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click

from flashpoint.cli.run_words import select_runs
from flashpoint.cli.selection import answered, format_option, provenance
from flashpoint.cli.table import Cell, Table, code, share, share_interval, show
from flashpoint.errors import UserError
from flashpoint.lab.analysis.claims_file import (
    Claim,
    Criterion,
    Deviates,
    Differs,
    EmulatedSetting,
    Explodes,
    Holds,
    Interval,
    Layer,
    Onset,
    read_claims,
)
from flashpoint.lab.analysis.expectations_file import Outcome
from flashpoint.lab.analysis.quantities import QUANTITIES
from flashpoint.lab.analysis.verdicts import Finding, Verdict, judge
from flashpoint.lab.cli.expectations import EXPECTED, expectations_table
from flashpoint.lab.cli.interval_cells import lasting_cell
from flashpoint.lab.evidence.tables import Evidence
from flashpoint.runs.folder import EVIDENCE
from flashpoint.runs.run import Run

RUNS = Path("runs")
FILE = RUNS / EVIDENCE / "claims.yaml"
SOURCES = {"paper": "Qiu & Yao", "golden": "Golden et al.", "ours": "flashpoint"}
"""Sources as the file has them → as tables have them."""

OURS = {Verdict.REPLICATES: "supported", Verdict.FAILS: "not supported"}
"""What our own claims are called instead: only what others have shown can replicate."""

_COLUMNS = (
    "id",
    "claim",
    "source",
    "scale",
    "criterion",
    "pre-registered",
    "n",
    "value",
    "95 % interval",
    "lasting",
    "alone",
    "verdict",
)


def verdict_of(claim: Claim, finding: Finding) -> str:
    """Return the verdict in words, those of its source."""
    return OURS.get(finding.verdict, finding.verdict.value) if claim.source == "ours" else finding.verdict.value


def preregistered(claim: Claim) -> str | None:
    """Return whether the criterion was committed before the runs; None for a claim without one."""
    if claim.criterion is None:
        return None
    match claim.preregistered:
        case bool() as before:
            return "yes" if before else "no"
        case told:
            return told


def table(found: Sequence[tuple[Claim, Finding]], others: Sequence[tuple[Claim, Finding]] = ()) -> Table:
    """Return a row for each claim found, in the order of the file, and a line with the number of each verdict, which
    counts the other claims, too."""
    rows = [
        [
            code(claim.id),
            claim.claim,
            ", ".join(filter(None, (SOURCES[claim.source], claim.where))),
            claim.scale,
            criterion(claim),
            preregistered(claim),
            Cell(finding.n, f"{finding.n or ''}"),
            value(claim, finding),
            interval(claim, finding),
            lasting_cell(finding.lasting) if finding.lasting else None,
            alone(finding),
            verdict_of(claim, finding),
        ]
        for claim, finding in found
    ]
    every = [*found, *others]
    chosen = f" {len(found)} of them are shown." if others else ""
    theirs = _counted("others' claims", [one for one in every if one[0].source != "ours"])
    ours = _counted("our claims", [one for one in every if one[0].source == "ours"])
    return Table(_COLUMNS, rows, f"{theirs}{ours}{chosen}".strip())


def _counted(whose: str, found: Sequence[tuple[Claim, Finding]]) -> str:
    """Return a sentence with the number of each verdict; nothing of no claims."""
    verdicts = Counter(verdict_of(*one) for one in found)
    told = ", ".join(f"{verdict} {count}" for verdict, count in verdicts.most_common())
    return f" Of {len(found)} of {whose}: {told}." if found else ""


def criterion(claim: Claim) -> str | None:
    """Return the criterion in words; None for a claim without one."""
    told = None
    match claim.criterion:
        case Explodes(steps=steps):
            told = "most explode" if steps is None else f"most explode within {steps:,} steps"
        case Holds(steps=steps, against=against):
            alone = f", and only {', '.join(against)} explode" if against else ""
            told = f"most hold for {steps:,} steps{alone}"
        case Onset(kind=kind):
            told = f"most explode {kind}, paired by seed"
        case Layer(layer=layer):
            told = f"most explosions have their largest W_Q in layer {layer}"
        case Interval() as asked:
            after = "" if asked.step is None else f" after {asked.step:,} steps"
            told = f"{QUANTITIES[asked.quantity].told}{after}: {_bounds(asked)}"
        case Deviates() as asked:
            told = f"largest deviation of O from FP64, flash over baseline: {_bounds(asked)}"
        case Differs() as asked:
            settings = f"at {_setting(asked.of, asked.over)}, over that at {_setting(asked.over, asked.of)}"
            told = f"largest difference of O between flash and baseline {settings}: {_bounds(asked)}"
    return told


def _setting(one: EmulatedSetting, other: EmulatedSetting) -> str:
    """Return what a setting has that the other has not."""
    tiles = (one.rows, one.keys) != (other.rows, other.keys)
    parts = [
        one.precision.upper() if one.precision != other.precision else "",
        f"T {one.length:,}" if one.length != other.length else "",
        f"B_r × B_c {one.rows} × {one.keys}" if tiles else "",
    ]
    return ", ".join(filter(None, parts))


def _bounds(asked: Interval | Deviates | Differs) -> str:
    bounds = {"above": asked.above, "below": asked.below}
    return " and ".join(f"{name} {bound:g}" for name, bound in bounds.items() if bound is not None)


def _form(asked: Criterion | None) -> str | None:
    """Return the format of a mean; None for a criterion that counts."""
    match asked:
        case Interval(quantity=quantity):
            return QUANTITIES[quantity].form
        case Deviates() | Differs():
            return ".2f"
    return None


def value(claim: Claim, finding: Finding) -> Cell | None:
    """Return the value: a count with the runs left out, or a mean."""
    left_out = f", {finding.left_out} left out" if finding.left_out else ""
    if finding.count is not None:
        counted = share(finding.count, finding.n)
        return Cell({**counted.value, "left out": finding.left_out}, f"{counted.text}{left_out}")
    form = _form(claim.criterion)
    return None if finding.value is None or form is None else Cell(finding.value, f"{finding.value:{form}}{left_out}")


def interval(claim: Claim, finding: Finding) -> Cell | None:
    """Return the 95 % interval, in percent of a count or in the unit of a mean; None where there is none."""
    if finding.low is None or finding.high is None:
        return None
    if finding.count is not None:
        return share_interval(finding.count, finding.n)
    form = _form(claim.criterion)
    assert form is not None
    return Cell({"low": finding.low, "high": finding.high}, f"{finding.low:{form}} to {finding.high:{form}}")


def alone(finding: Finding) -> Cell | None:
    """Return in how many pairs only the control exploded, in how many only the run, and the p; None where there are no
    pairs."""
    if (found := finding.alone) is None:
        return None
    value = {"control": found.control, "run": found.run, "p": found.p}
    return Cell(value, f"{found.control} and {found.run}, p {found.p:.2g}")


class Runs:
    """The runs that words name. The evidence is read once for all of them."""

    def __init__(self) -> None:
        self.all: dict[str, Run] = {}
        """Every run named so far, by where it is."""
        self._evidence = Evidence(RUNS / EVIDENCE)

    def judge(self, claim: Claim) -> Finding:
        """Judge a claim. Raises UserError with the key at fault."""
        runs = self._named("runs", claim.runs or ())
        against = self._named("criterion.against", claim.against if runs else ())
        try:
            return judge(claim, runs, against)
        except UserError as error:
            raise UserError(f"runs: {error}") from error

    def _named(self, key: str, words: Sequence[str]) -> list[Run]:
        try:
            runs = {run.where: run for run in select_runs(words, RUNS, self._evidence)}  # each once
            for run in runs.values():
                _ = run.config, run.manifest, run.outcome
        except (UserError, OSError) as error:
            raise UserError(f"{key}: {error}; name runs that are there, or none") from error
        self.all |= runs
        return list(runs.values())


CHOICES = (*dict.fromkeys((*map(str, Verdict), *OURS.values(), *get_args(Outcome))),)
"""Verdicts of claims, and of expectations."""


@click.command("claims")
@click.option("--source", type=click.Choice(list(SOURCES)), help="Whose claims: Qiu & Yao's, Golden et al.'s, or ours.")
@click.option("--short", is_flag=True, help="Only the claims marked with short: true; the count of verdicts is of all.")
@click.option(
    "--text", "words", multiple=True, metavar="WORD", help="Only those that hold this text; repeat for all of several."
)
@click.option(
    "--verdict",
    "verdicts",
    multiple=True,
    type=click.Choice(CHOICES),
    help="Only those with this verdict, or one of several.",
)
@click.option(
    "--expected", is_flag=True, help="What was expected before its runs, and what came, in the place of claims."
)
@click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.yaml",
    help=f"The file of claims, or of expectations.  [default: {FILE}, or {EXPECTED}]",
)
@format_option
def command(
    source: str | None,
    short: bool,
    words: tuple[str, ...],
    verdicts: tuple[str, ...],
    expected: bool,
    path: Path | None,
    form: str,
) -> None:
    """Print what was claimed about the explosion, and what the evidence says to each claim.

    The file holds the claims, their runs and their criteria. Values, intervals and verdicts are computed from the runs.
    A verdict is of the scale in its row, and of no other.

    A share replicates where its 95 % interval (Clopper-Pearson) lies above one half, and does not where it lies below.
    That runs hold needs their controls, too. "alone" counts the pairs of a seed in which only the control exploded, and
    those in which only the run did, with the p of McNemar's exact test. Where the control holds too it is undecided.
    Lasting: of the runs that exploded, those with a lasting rise, as in survival.
    A mean replicates where its 95 % interval (Student's t) lies within the bounds, and does not where it lies outside.
    Everything else is undecided. A claim without the runs that it needs is not tested. Our own claims are supported, or
    not supported.

    A criterion is pre-registered where it was committed before its runs.
    """
    if expected:
        if source or short:
            raise UserError("--expected: expectations have no source and no short table; drop --source and --short")
        show(expectations_table(path or EXPECTED, words, verdicts), form)
        return
    path = path or FILE
    claims = [claim for claim in read_claims(path) if source in (None, claim.source) and _holds(claim, words)]
    shown = [claim for claim in claims if claim.short or not short]
    if not shown:
        raise UserError(f"{path}: no such claims; drop --source, --short or --text")
    runs = Runs()

    def judged(claim: Claim) -> Finding:
        try:
            return runs.judge(claim)
        except UserError as error:
            raise UserError(f"{path}: {claim.id}: {error}") from error

    found = answered(shown, judged)
    heading = provenance(list(runs.all.values())) if runs.all else "no runs"
    others = answered([claim for claim in claims if claim not in shown], judged)
    if verdicts:
        others += [one for one in found if verdict_of(*one) not in verdicts]
        found = [one for one in found if verdict_of(*one) in verdicts]
    if not found:
        raise UserError(f"{path}: none of these {len(others)} claims has that verdict; drop --verdict")
    show(table(found, others), form, heading)


def _holds(claim: Claim, words: Sequence[str]) -> bool:
    text = " ".join(filter(None, (claim.id, claim.claim, claim.where, claim.scale, *(claim.runs or ())))).casefold()
    return all(word.casefold() in text for word in words)
