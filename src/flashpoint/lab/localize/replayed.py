"""Branches of runs of ``flashpoint train``: checkpoints and tape are at hand, and an attention is a variant."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flashpoint.errors import UserError
from flashpoint.lab.build_config import changed
from flashpoint.lab.config import Config, DataConfig
from flashpoint.lab.localize.subject import Cells, Trained, as_options, selection
from flashpoint.lab.stored_config import config_to_repeat
from flashpoint.lab.training.execution import run as train
from flashpoint.numerics.choices import NEAREST, UNROUNDED, DeltaError
from flashpoint.numerics.effective import effective_choices
from flashpoint.numerics.variant import ROUNDING_POINTS, AttentionVariant
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metric_table import W_Q_NORM
from flashpoint.runs.run import Run
from flashpoint.runs.subfolders import SIDECAR, TENSORS, by_step, log_of_branch

REMEDIES: dict[str, dict[str, Any]] = {
    **{f"{symbol} is not rounded": {point: UNROUNDED} for point, symbol in ROUNDING_POINTS.items()},
    "δ of an unrounded O": {"delta": "out_fp32", "out_residual_bits": None},
    "δ = rowsum(P∘dP)": {"delta": "p_dp", "out_residual_bits": None},
    "one block of keys": {"block_k": None},
    "m is the row maximum": {"shift": "rowmax"},
    "keys centred in dQ": {"center_grad_q": True},
}
"""Changes of one choice, by what they do. One that changes nothing in a variant is not asked."""


@dataclass(frozen=True)
class ReplayedRun:
    """A :class:`~flashpoint.lab.localize.subject.Subject`."""

    folder: RunFolder

    @cached_property
    def run(self) -> Run:
        return Run.of_folder(self.folder)

    @cached_property
    def checkpoints(self) -> list[int]:
        weights = by_step(self.folder.checkpoints, TENSORS)
        saved = [step for step in by_step(self.folder.checkpoints, SIDECAR) if step in weights]
        origin = self.run.origin
        return [0, *saved] if origin is None or origin[1] == 0 else saved  # from its beginning, too

    @property
    def whole(self) -> AttentionVariant:
        return self.run.attention

    @property
    def twin(self) -> AttentionVariant:
        return exact(self.whole)

    @property
    def second_twin(self) -> AttentionVariant:
        return rounded_otherwise(self.twin)

    @property
    def divisible(self) -> bool:
        return self.whole.elsewhere is None and self.whole.kernel == "flash"

    def only_in(self, cells: Cells) -> AttentionVariant:
        return only_in(self.whole, self.twin, cells)

    def changes(self) -> Iterator[tuple[str, AttentionVariant]]:
        for name, change in REMEDIES.items() if self.whole.kernel == "flash" else ():  # another one has no choices
            try:
                changed = dataclasses.replace(self.whole, name=f"{self.whole.name}, {name}", **change)
            except ValueError:  # another choice needs this one
                continue
            if effective_choices(changed) != effective_choices(self.whole):
                yield name, changed

    def describe(self, attention: AttentionVariant) -> str:
        return attention.name

    def identity(self, attention: AttentionVariant, start: int) -> str:
        return json.dumps({**attention.to_dict(), "name": ""}, sort_keys=True)

    def train(self, attention: AttentionVariant, start: int, steps: int, folder: Path) -> Trained:
        with log_of_branch(folder).open("w", encoding="utf-8") as log, contextlib.redirect_stderr(log):
            outcome = train(_branching(self.folder, attention, start, steps, folder))
        if outcome.interrupted:  # what ended the branch ends the localisation: half a branch says nothing
            signal.raise_signal(signal.Signals[outcome.interrupted])
            raise KeyboardInterrupt  # where the signal is ignored
        branch = RunFolder(Path(outcome.run))
        if (began := branch.first_step) != start:
            raise UserError(
                f"{self.folder.checkpoints}: the checkpoint of step {start:,} is damaged, and a branch began at "
                f"{began:,}; delete that checkpoint"
            )
        norms = Run.of_folder(branch).measured_by_head(W_Q_NORM.name)[1][..., -1]
        return Trained(outcome.outcome, outcome.onset_step, norms.tolist())


def exact(variant: AttentionVariant) -> AttentionVariant:
    """Return a variant with exact row sums and no injected error, everywhere; of PyTorch's kernel this package's."""
    elsewhere = variant.elsewhere and exact(variant.elsewhere)
    return dataclasses.replace(
        variant, name=f"{variant.name} exact_row_sum=true", kernel="flash", exact_row_sum=True, exact_row_sum_passes=2,
        delta_error=DeltaError(), elsewhere=elsewhere,
    )  # fmt: skip


def rounded_otherwise(variant: AttentionVariant) -> AttentionVariant:
    """Return a variant with P̄ rounded to BF16 where it is not, and not rounded where it is, everywhere.

    O differs by about a rounding of its own. δ of exact row sums is of the P before this rounding.
    """
    probs = NEAREST if variant.probs.mode == "none" else UNROUNDED
    elsewhere = variant.elsewhere and rounded_otherwise(variant.elsewhere)
    return dataclasses.replace(
        variant, name=f"{variant.name} probs.mode={probs.mode}", probs=probs, elsewhere=elsewhere
    )  # fmt: skip


def only_in(variant: AttentionVariant, elsewhere: AttentionVariant, cells: Cells) -> AttentionVariant:
    """Return a variant in some heads of some layers, and another one elsewhere."""
    layers, heads = selection(cells)
    error = variant.delta_error
    if error.layers is not None:
        erring = tuple(layer for layer in error.layers if layer in layers)
        error = dataclasses.replace(error, layers=erring) if erring else DeltaError()
    return dataclasses.replace(
        variant, name=f"{variant.name} {as_options(layers, heads)}", layers=layers, heads=heads, elsewhere=elsewhere,
        delta_error=error,
    )  # fmt: skip


def _branching(run: RunFolder, variant: AttentionVariant, start: int, steps: int, folder: Path) -> Config:
    end = start + steps
    changes: dict[str, object] = {"probes.attention": (), "probes.weights_against": None}
    changes |= {"probes.weights_interval": steps, "checkpoints.interval": 0, "checkpoints.weights_interval": 0}
    changes["detector.tail_steps"] = steps  # measured at their end
    changes |= {"train.steps": end, "train.eval_interval": end, "train.eval_sequences": 1}
    changes |= {"attn": variant.to_dict(), "resume": None, "data.root": DataConfig.root}
    changes |= {"run_name": folder.name, "runs_dir": str(folder.parent)}
    return changed(config_to_repeat(run.config), {**changes, "replay": str(run.path), "from_step": start})
