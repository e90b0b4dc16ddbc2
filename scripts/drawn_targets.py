"""What the observed sequences were to predict, and the bias of δ: ``python scripts/drawn_targets.py RUN [RUN …]``

Runs with one digest have the same weights, batches and rounding errors of O; by ``probes.targets`` they observed them
with the data's targets, with targets drawn from the model itself, and with such of its unrounded twin. In nats, N·error
of δ, Fisher's identity (src/flashpoint/probes/targets.py) makes the bias of ``unrounded`` the variance of ``model``.

A row for each digest, of the layer whose error weighs most: the variance over that of ``model``, and the bias over that
of ``model``, with its 95 % interval over the observed steps (Student's t). Then the same by layer, as means over the
digests with their 95 % intervals. Where a digest has no run with ``model``, over the targets' own variance, in italics;
such digests are in no mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError, script_errors
from flashpoint.report.bias import Sums, Window
from flashpoint.report.intervals import mean_and_interval, plus_minus
from flashpoint.report.provenance import provenance
from flashpoint.report.series import RecordedRun

Group = dict[str, Sums]
"""What runs of one digest measured, by their targets."""


def table(runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Markdown.

    Raises:
        UserError: two runs of a digest have the same targets, or a run has not measured the error.
    """
    groups: dict[str, Group] = {}
    labels: dict[str, str] = {}
    for run in runs:
        digest = run.outcome["digest"]
        group = groups.setdefault(digest, {})
        labels.setdefault(digest, _label(run))
        targets = run.config["probes"].get("targets", "data")  # the only ones before there was a choice
        if targets in group:
            raise UserError(f"{run.folder.path}: a second run with targets={targets} of digest {digest}")
        group[targets] = Sums.of(run, Window())
    yield f"| weights and attention | layer | {' | '.join(f'{name}, {targets}' for name, _, targets in COLUMNS)} |"
    yield "|---|---|" + "---|" * len(COLUMNS)
    for digest, group in groups.items():
        yield f"| {labels[digest]} | {' | '.join(_row(group))} |"
    complete = [group for group in groups.values() if "model" in group]
    if len(complete) < 2:
        return
    count = min(len(group["model"].by_step) for group in complete)
    yield ""
    yield f"| all with `model` | {' | '.join(f'layer {layer + 1}' for layer in range(count))} |"
    yield "|---|" + "---|" * count
    for name, measure, targets in COLUMNS:
        members = [group for group in complete if targets in group]
        if len(members) > 1:
            means = [[np.mean(measure(group, targets, layer + 1)) for group in members] for layer in range(count)]
            cells = ["{} ({})".format(*mean_and_interval(values, ".2f")) for values in means]
            yield f"| {name}, {targets} (n = {len(members)}) | {' | '.join(cells)} |"


def _label(run: RecordedRun) -> str:
    return f"`{run.title}`" + (" from step {1:,} of `{0}`".format(*run.origin) if run.origin else "")


def _row(group: Group) -> Iterator[str]:
    reference = group.get("model") or next(iter(group.values()))
    layer = 1 + int(np.argmax([reference.variance_in_nats(at + 1) for at in range(len(reference.by_step))]))
    yield str(layer)
    for name, measure, targets in COLUMNS:
        if targets not in group or (name == "variance" and "model" not in group):
            yield ""
        else:
            cell = plus_minus(measure(group, targets, layer), ".2f")
            yield cell if "model" in group else f"*{cell}*"


def _variance(group: Group, targets: str, layer: int) -> NDArray[np.float64]:
    """[1], over that with ``model``."""
    return np.array([group[targets].variance_in_nats(layer) / group["model"].variance_in_nats(layer)])


def _bias(group: Group, targets: str, layer: int) -> NDArray[np.float64]:
    """[n], by step, over the variance with ``model``, or where that was not measured over its own."""
    return group[targets].bias_in_nats(layer) / group.get("model", group[targets]).variance_in_nats(layer)


COLUMNS = (
    ("variance", _variance, "data"),
    ("variance", _variance, "unrounded"),
    ("bias", _bias, "data"),
    ("bias", _bias, "unrounded"),
    ("bias", _bias, "model"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    arguments = parser.parse_args()
    with script_errors():
        runs = [RecordedRun.open(name) for name in arguments.runs]
        print("\n".join([provenance(runs), "", *table(runs)]))


if __name__ == "__main__":
    main()
