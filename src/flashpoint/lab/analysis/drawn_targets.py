"""The bias of δ by what the observed sequences were to predict.

Runs with one digest have the same weights, batches and rounding errors of O. By ``probes.targets`` they observed them
with the data's targets, with targets drawn from the model, and with targets drawn from its unrounded twin. In nats,
N·error of δ, Fisher's identity (:mod:`flashpoint.lab.probes.targets`) makes the bias of ``unrounded`` the variance of
``model``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.analysis.bias import Sums, Window
from flashpoint.lab.stored_config import trained_config
from flashpoint.runs.run import Run

MEASURES = (
    ("variance", "data"),
    ("variance", "unrounded"),
    ("bias", "data"),
    ("bias", "unrounded"),
    ("bias", "model"),
)
"""Which quantity, with which targets."""


@dataclass(frozen=True)
class Group:
    """Runs with one digest: they differ in the observed targets alone."""

    first: Run
    by_targets: dict[str, Sums] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether a run has the model's targets, over whose variance the others are."""
        return "model" in self.by_targets

    @property
    def layers(self) -> int:
        return len(self._reference.by_step)

    @property
    def heaviest_layer(self) -> int:
        """The layer with the largest error; layers count from 1."""
        variances = [self._reference.variance_in_nats(layer + 1) for layer in range(self.layers)]
        return 1 + int(np.argmax(variances))

    def measure(self, name: str, targets: str, layer: int) -> NDArray[np.float64] | None:
        """Return the variance [1] over that with the model's targets, or the bias [n], by step, over the same variance.

        Without a run with the model's targets the bias is over its own variance. None where it was not measured.
        """
        if targets not in self.by_targets or (name == "variance" and not self.complete):
            return None
        own = self.by_targets[targets]
        variance = self.by_targets.get("model", own).variance_in_nats(layer)
        if name == "variance":
            return np.array([own.variance_in_nats(layer) / variance])
        return own.bias_in_nats(layer) / variance

    @property
    def _reference(self) -> Sums:
        return self.by_targets.get("model") or next(iter(self.by_targets.values()))


def by_digest(runs: Sequence[Run]) -> list[Group]:
    """Group runs by digest.

    Raises:
        UserError: two of a group share targets; or one has not measured the error, or has none in a layer.
    """
    groups: dict[str, Group] = {}
    for run in runs:
        digest = run.outcome.digest
        group = groups.setdefault(digest, Group(run))
        targets = trained_config(run).probes.targets
        if targets in group.by_targets:
            raise UserError(f"{run.where}: a second run with targets={targets} of digest {digest}")
        sums = group.by_targets[targets] = Sums.of(run, Window())
        if exact := [layer + 1 for layer in range(len(sums.by_step)) if not sums.variance_in_nats(layer + 1)]:
            told = f"layer {exact[0]}: δ takes no part of the error of O there"
            raise UserError(f"{run.where}: {told}; leave the run out")
    return list(groups.values())
