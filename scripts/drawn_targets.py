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
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.report.bias import Sums, Window
from flashpoint.report.intervals import mean_interval
from flashpoint.report.series import RecordedRun
from flashpoint.run_folder import RunFolder

TARGETS = ("data", "unrounded", "model")


def table(runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Markdown.

    Raises:
        UserError: two runs of a digest have the same targets, or a run has not measured the error.
    """
    groups: dict[str, dict[str, Sums]] = {}
    names: dict[str, str] = {}
    for run in runs:
        group = groups.setdefault(run.outcome["digest"], {})
        names.setdefault(run.outcome["digest"], _told(run))
        targets = run.config["probes"].get("targets", "data")  # the only ones before there was a choice
        if targets in group:
            raise UserError(f"{run.folder.path}: a second run with targets={targets} of digest {run.outcome['digest']}")
        group[targets] = Sums.of(run, Window())
    columns = [f"variance, {targets}" for targets in TARGETS[:2]] + [f"bias, {targets}" for targets in TARGETS]
    yield f"| weights and attention | layer | {' | '.join(columns)} |"
    yield "|---|---|" + "---|" * len(columns)
    for digest, group in groups.items():
        yield f"| {names[digest]} | {' | '.join(_row(group))} |"
    whole = [group for group in groups.values() if "model" in group]
    if len(whole) < 2:
        return
    count = min(len(group["model"].by_step) for group in whole)
    yield ""
    yield f"| all with `model` | {' | '.join(f'layer {layer + 1}' for layer in range(count))} |"
    yield "|---|" + "---|" * count
    for name, targets in zip(columns, (*TARGETS[:2], *TARGETS), strict=True):
        having = [group for group in whole if targets in group]
        if len(having) > 1:
            of = _variance if name.startswith("variance") else _bias
            values = np.array([[of(group, targets, layer + 1) for group in having] for layer in range(count)])
            yield f"| {name} (n = {len(having)}) | {' | '.join(_interval(row) for row in values)} |"


def _told(run: RecordedRun) -> str:
    parent = run.manifest.get("parent")
    return f"`{run.title}`" + (f" from step {parent['from_step']:,} of `{parent['run']}`" if parent else "")


def _row(group: dict[str, Sums]) -> Iterator[str]:
    reference = group.get("model") or next(iter(group.values()))
    layer = 1 + int(np.argmax([reference.variance_in_nats(at + 1) for at in range(len(reference.by_step))]))
    yield str(layer)
    for targets in TARGETS[:2]:
        yield f"{_variance(group, targets, layer):.2f}" if targets in group and "model" in group else ""
    for targets in TARGETS:
        if targets not in group:
            yield ""
            continue
        over = group.get("model", group[targets])
        mean, half = mean_interval(group[targets].bias_in_nats(layer) / over.variance_in_nats(layer))
        told = f"{mean:.2f}" + ("" if half is None else f" ± {half:.2f}")
        yield told if "model" in group else f"*{told}*"


def _variance(group: dict[str, Sums], targets: str, layer: int) -> float:
    return group[targets].variance_in_nats(layer) / group["model"].variance_in_nats(layer)


def _bias(group: dict[str, Sums], targets: str, layer: int) -> float:
    return float(group[targets].bias_in_nats(layer).mean()) / group["model"].variance_in_nats(layer)


def _interval(values: NDArray[np.float64]) -> str:
    mean, half = mean_interval(values)
    return f"{mean:.2f}" + ("" if half is None else f" ({mean - half:.2f} to {mean + half:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    arguments = parser.parse_args()
    try:
        print("\n".join(table([RecordedRun(RunFolder.open(name)) for name in arguments.runs])))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
