"""Print metrics of a run side by side: ``python scripts/series.py RUN NAME [NAME …]``, a row a step at which all are.

Names are those of the metrics file, e.g. ``loss`` or ``layer/2/head/1/w_q_spectral_norm``; ``--head 2/1`` puts
``layer/2/head/1/`` before those without a slash. The heading is their last part, and where two of them would be alike
the layer and head too: ``2/1/w_q_spectral_norm``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import numpy as np

from flashpoint.errors import UserError, script_errors
from flashpoint.run_folder import RunFolder
from flashpoint.tracking import read_metrics


def table(run: RunFolder, names: list[str], every: int) -> list[str]:
    """A heading and a line for every ``every``-th step that has all metrics, and the last."""
    columns = read_metrics(run.metrics)
    for name in names:
        if name not in columns:
            raise UserError(f"{run.metrics}: {_missing(name, columns)}")
    common = columns[names[0]][0]
    for name in names[1:]:
        common = np.intersect1d(common, columns[name][0])
    chosen = [step for step in common if (step + 1) % every == 0 or step == common[-1]]
    headings = _headings(names)
    width = max(11, *map(len, headings))
    lines = [" ".join(["   step", *(f"{heading:>{width}}" for heading in headings)])]
    for step in chosen:
        values = (columns[name][1][np.searchsorted(columns[name][0], step)] for name in names)
        lines.append(" ".join([f"{step:7,}", *(f"{value:{width}.4g}" for value in values)]))
    return lines


def _missing(name: str, columns: Iterable[str]) -> str:
    """What there is instead: the head's own metrics, heads that have one of this name, or names without a head."""
    prefix, _, own = name.rpartition("/")
    heads = [column.rpartition("/")[0] for column in columns if column.rpartition("/")[2] == own and "/" in column]
    if heads:
        have = ", ".join(head.replace("layer/", "").replace("head/", "") for head in heads)
        return f"no metric {name}; {own} is of a head, give --head one of {have}"
    known = sorted({column.rpartition("/")[2] for column in columns if not prefix or column.startswith(f"{prefix}/")})
    return f"no metric {name}; it has {', '.join(known)}"


def _headings(names: list[str]) -> list[str]:
    ends = [name.rsplit("/", 1)[-1] for name in names]
    if len(set(ends)) == len(ends):
        return ends
    return [name.replace("layer/", "").replace("head/", "") for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--head", metavar="LAYER/HEAD", help="of the names without a slash")
    parser.add_argument("--every", type=int, default=1, help="steps between rows (default: all there are)")
    arguments = parser.parse_args()
    layer, _, head = (arguments.head or "").partition("/")
    prefix = f"layer/{layer}/head/{head}/" if arguments.head else ""
    names = [name if "/" in name else prefix + name for name in arguments.names]
    with script_errors():
        print("\n".join(table(RunFolder.open(arguments.run), names, arguments.every)))


if __name__ == "__main__":
    main()
