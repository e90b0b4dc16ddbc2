"""Which column of a log is the loss of a step, and which are the other metrics that every run has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from flashpoint.errors import UserError, nearest
from flashpoint.runs.metric_table import GRAD_NORM, LEARNING_RATE, LOSS, VALIDATION_LOSS

_LOSSES = frozenset(
    ("loss", "train loss", "training loss", "loss train", "loss training", "lm loss", "train lm loss", "loss step",
     "train loss step", "training loss step", "train loss loss")
)  # fmt: skip
"""Plain names that say a step's training loss."""
_OTHERS = {
    GRAD_NORM.name: (
        "grad norm", "gradient norm", "train grad norm", "train gradient norm", "global grad norm", "total grad norm",
        "grad norm total", "grad 2.0 norm total", "train gnorm", "gnorm", "gradnorm", "train grad 2.0 norm total",
        "optim total grad norm", "norm",
    ),
    LEARNING_RATE.name: ("lr", "learning rate", "train lr", "train learning rate"),
    VALIDATION_LOSS.name: (
        "val loss", "eval loss", "valid loss", "validation loss", "loss val", "loss eval", "loss valid",
        "loss validation", "val loss epoch",
    ),
}  # fmt: skip
"""Plain names of what every run may have, by the metric's name; the earlier ones are preferred."""
_NO_TRAINING = frozenset(("val", "valid", "validation", "eval", "evaluation", "test", "dev", "scale", "epoch"))
"""Words of a name that has ``loss`` in it and is not a step's training loss."""
_FEW = 0.1
"""Of the values of the column that has most: one with fewer is a summary, as a mean at the end of a run."""


@lru_cache(10_000)
def plain_name(name: str) -> str:
    """Return a name in small letters, its words apart by blanks, without the run that W&B's page puts before it."""
    return " ".join(re.split(r"[\s_/\\|-]+", name.rpartition(" - ")[2].strip().lower())).strip()


def is_loss(name: str) -> bool:
    """Whether a name says by itself that it is a step's training loss."""
    return plain_name(name) in _LOSSES


def metric_columns(where: str, counts: Mapping[str, int], asked: str | None) -> dict[str, str]:
    """Return the columns of a log by the names of metrics: the loss of a step, and those of the others that are there.

    Args:
        where: what messages call the log.
        counts: how many values each column has, in the order of the log.
        asked: the column that somebody says is the loss; None where the names are to tell.

    Raises:
        UserError: no column is the loss, or several may be.
    """
    plain = {name: plain_name(name) for name in counts}
    found = {LOSS.name: asked if asked else _loss(where, plain, counts)}
    if asked and asked not in counts:
        raise UserError(f"{where}: no column {asked}; {nearest(asked, counts)}it has {_listed(counts)}")
    for metric, spelled in _OTHERS.items():
        known = [name for one in spelled for name in counts if plain[name] == one]
        if known:
            found[metric] = known[0]
    return found


def _loss(where: str, plain: Mapping[str, str], counts: Mapping[str, int]) -> str:
    named = [name for name in counts if is_loss(name)]
    if not named:
        words = {name: frozenset(plain[name].split()) for name in counts}
        named = [name for name in counts if "loss" in words[name] and not words[name] & _NO_TRAINING]
    most = max((counts[name] for name in named), default=0)
    candidates = [name for name in named if counts[name] >= _FEW * most]
    if not candidates:
        there = f"it has {_listed(counts)}; {where}:NAME says which is the loss" if counts else "it has no numbers"
        raise UserError(f"{where}: no column is called a training loss; {there}")
    if len(candidates) > 1:
        raise UserError(
            f"{where}: {' or '.join(candidates)} may be the loss; say which, e.g. '{where}:{candidates[0]}'"
        )
    return candidates[0]


def _listed(names: Mapping[str, int]) -> str:
    known = list(names)
    return ", ".join(known[:12]) + (f" and {len(known) - 12} more" if len(known) > 12 else "")
