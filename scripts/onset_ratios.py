"""Onset against the same seed's onset in another experiment: ``python scripts/onset_ratios.py RUN … --control RUN …``

A row for each attention and setting, a column for each seed: how many times the control's steps a run took to explode,
or, with ``>``, held for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from flashpoint.errors import UserError, script_errors
from flashpoint.report.provenance import provenance
from flashpoint.report.series import RecordedRun
from flashpoint.report.survival import grouped


def table(runs: Sequence[RecordedRun], controls: Sequence[RecordedRun]) -> Iterator[str]:
    """Markdown.

    Raises:
        UserError: a control did not explode, a run's seed has none, or two of a row, or two controls, have one seed.
    """
    onsets: dict[int, int] = {}
    for control in controls:
        if control.failed_at is None:
            raise UserError(f"{control.folder.path}: {control.verdict}, no onset to compare with; leave it out")
        if (seed := control.config["seed"]) in onsets:
            raise UserError(f"{control.folder.path}: a second control of seed {seed}; name one of each")
        onsets[seed] = control.failed_at
    groups = {
        f"{label} {setting}".strip(): _by_seed(members, onsets) for (setting, label), members in grouped(runs).items()
    }
    seeds = sorted({seed for ratios in groups.values() for seed in ratios})
    yield f"| experiment | {' | '.join(f'seed {seed}' for seed in seeds)} |"
    yield "|---|" + "---|" * len(seeds)
    for label, ratios in groups.items():
        yield f"| `{label}` | {' | '.join(ratios.get(seed, '') for seed in seeds)} |"


def _by_seed(runs: Sequence[RecordedRun], onsets: dict[int, int]) -> dict[int, str]:
    ratios: dict[int, str] = {}
    for run in runs:
        seed = run.config["seed"]
        if seed in ratios:
            raise UserError(f"{run.folder.path}: a second run of seed {seed} in its row; leave one of them out")
        if seed not in onsets:
            raise UserError(f"{run.folder.path}: no control of seed {seed}; add one, or leave the run out")
        steps, held = (run.outcome["step"], ">") if run.failed_at is None else (run.failed_at, "")
        ratios[seed] = f"{held}{steps / onsets[seed]:.2f}"
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--control", nargs="+", required=True, metavar="RUN", help="runs to compare with, one a seed")
    arguments = parser.parse_args()
    with script_errors():
        runs, controls = ([RecordedRun.open(name) for name in names] for names in (arguments.runs, arguments.control))
        print("\n".join([provenance([*runs, *controls]), "", *table(runs, controls)]))


if __name__ == "__main__":
    main()
