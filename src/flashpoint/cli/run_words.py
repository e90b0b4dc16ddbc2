"""Which runs a word on the command line names."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import filter as matching
from pathlib import Path
from typing import Protocol

from flashpoint.errors import UserError, nearest
from flashpoint.extras import from_lab
from flashpoint.runs.folder import CONFIG_FILE, EVIDENCE, RunFolder, is_run, runs_in, runs_in_folders_of
from flashpoint.runs.run import Run

_LISTED = 12


class KeptRuns(Protocol):
    """Runs that are kept as evidence, as :class:`flashpoint.lab.evidence.tables.Evidence` reads them."""

    root: Path

    @property
    def experiments(self) -> Mapping[str, Mapping[str, Run]]: ...


def open_run(word: str, runs_dir: str | Path = "runs") -> Run:
    """Return the one run that the word names (:func:`select_runs`).

    Raises:
        UserError: it names none, or several.
    """
    runs = select_runs([word], runs_dir)
    if len(runs) > 1:
        raise UserError(f"{word}: names {len(runs)} runs, one is needed; give one of {_listed(r.name for r in runs)}")
    return runs[0]


def select_runs(words: Sequence[str], runs_dir: str | Path = "runs", evidence: KeptRuns | None = None) -> list[Run]:
    """Return the runs that the words name, in the order of the words, those of one word by name.

    A word is a run's folder, a run's name under ``runs_dir``, a folder of runs, or a pattern of the shell for any of
    these (``*``, ``?``, ``[…]``, ``{a,b}``). Or it is a log of another tool, a file or a folder, as ``PATH:NAME`` with
    the column that is its loss (:mod:`flashpoint.logs`). Or it is ``EXPERIMENT:PATTERN`` of the evidence in
    ``runs_dir/reference``. A folder of runs goes before logs, and these before evidence.

    Args:
        evidence: the evidence in ``runs_dir``, for a caller who selects many times: it is read once.

    Raises:
        UserError: a word names no run.
    """
    runs_dir = Path(runs_dir)
    return [run for word in words for run in _named(word, runs_dir, evidence)]


def with_sweeps(word: str) -> list[str]:
    """Return words that name the runs in a folder and those of the sweeps in it; the word itself where it is another.

    The evidence's tables are no sweep.
    """
    folder = Path(word)
    parents = {run.parent for run in runs_in_folders_of(folder)}
    sweeps = sorted(str(path) for path in parents if path.name != EVIDENCE and not is_run(path))
    return [*([word] if not sweeps or runs_in(folder) else []), *sweeps]


def _named(word: str, runs_dir: Path, evidence: KeptRuns | None) -> list[Run]:
    if not word:  # of a shell's variable that is not set; as a path it is the present folder
        raise UserError(f"'': no name; give a run's folder, e.g. {runs_dir}/NAME, or EXPERIMENT:PATTERN")
    for path in (Path(word), runs_dir / word):
        if runs := _at(path):
            return runs
    if runs := _logged(word):
        return runs
    alternatives = expand_braces(word)
    if len(alternatives) > 1:
        return [run for alternative in alternatives for run in _named(alternative, runs_dir, evidence)]
    for pattern in (word, str(runs_dir / word)):
        paths = sorted(glob.glob(pattern))
        for at in (lambda path: _at(Path(path)), _logged):
            if runs := [run for path in paths for run in at(path)]:
                return runs
    if ":" in word:
        tables = evidence or from_lab("evidence.tables:Evidence", f"{word}, of the evidence tables")(
            runs_dir / EVIDENCE
        )
        return _kept(word, tables)
    raise UserError(
        f"{word}: no run there (no {CONFIG_FILE}); give a run's folder, e.g. {runs_dir}/NAME, or EXPERIMENT:PATTERN"
    )


def _at(path: Path) -> list[Run]:
    """Return the run in this folder, or the runs in its folders."""
    return [Run.of_folder(RunFolder(folder)) for folder in ([path] if is_run(path) else runs_in(path))]


def _logged(word: str) -> list[Run]:
    """Return the runs of the logs that the word names."""
    from flashpoint.logs.stored_log import logged_runs  # few ask for one

    return logged_runs(word)


def _kept(word: str, evidence: KeptRuns) -> list[Run]:
    """Return the runs of the evidence; their names are patterns, and so may be that of the experiment."""
    experiment, _, pattern = word.partition(":")
    experiments = matching(evidence.experiments, experiment)
    if not experiments:
        known = evidence.experiments
        none = "none: the tables of the findings are in the checkout of flashpoint, so call it there"
        there = nearest(experiment, known).rstrip() or f"it has {_listed(known) or none}"
        raise UserError(f"{word}: no experiment {experiment} in {evidence.root}; {there}")
    runs = [run for name in experiments for run in evidence.experiments[name].values()]
    found = set(matching((run.name for run in runs), pattern))
    if not found:
        there = _listed(run.name for run in runs)
        raise UserError(f"{word}: no run of {experiment} is named {pattern}; it has {there}")
    return [run for run in runs if run.name in found]


def expand_braces(word: str) -> list[str]:
    """``a{b,c{d,e}}`` is ``ab``, ``acd`` and ``ace``, as in Bash; braces without a comma stay, and so do ranges."""
    for start in (at for at, character in enumerate(word) if character == "{" and word[: at + 2] != "{}"):
        depth, cuts = 0, [start]
        for end in range(start, len(word)):
            if word[end] == "{":
                depth += 1
            elif word[end] == "}" and (depth > 1 or len(cuts) > 1):
                depth -= 1
            elif word[end] == "," and depth == 1:
                cuts.append(end)
            if depth == 0:
                parts = [word[a + 1 : b] for a, b in zip(cuts, [*cuts[1:], end], strict=True)]
                tails = expand_braces(word[end + 1 :])
                return [word[:start] + head + tail for part in parts for head in expand_braces(part) for tail in tails]
    return [word]


def _listed(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return ", ".join(known[:_LISTED]) + more
