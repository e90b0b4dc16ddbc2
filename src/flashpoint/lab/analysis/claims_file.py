"""The file of claims: what was claimed about the failure, and how each claim is put to the test.

A claim names its runs and a criterion, and no result. :mod:`flashpoint.lab.analysis.verdicts` judges a claim.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from flashpoint.lab.analysis.listed import read_listed
from flashpoint.lab.deviation.defaults import LENGTH, TILE
from flashpoint.schema import CHECKED, Count

Id = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
"""A name of small letters, digits and hyphens."""
Words = Annotated[tuple[str, ...], Field(min_length=1)]
"""Runs as the command line names them, e.g. ``ignite-h200:flash_bf16_seed*``."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Explodes:
    """Most runs explode."""

    kind: Literal["explodes"]
    steps: Count | None = None
    """The steps within which they explode. A stable run of fewer steps does not count. None counts every run over the
    steps it had."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Holds:
    """Runs do not explode within a number of steps, and their controls do."""

    kind: Literal["holds"]
    steps: Count
    """The common horizon. A stable run of fewer steps does not count."""
    against: Words | None = None
    """The controls, one a seed. None: the claim can be refuted, and not borne out."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Onset:
    """Most runs explode earlier, or later, than the run of the same seed elsewhere."""

    kind: Literal["earlier", "later"]
    against: Words
    """The runs to compare with, one a seed. Each has exploded."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Layer:
    """Most explosions have their largest W_Q in one layer."""

    kind: Literal["layer"]
    layer: Count
    """The layer, from 1."""


QuantityName = Literal[
    "bias_over_variance",
    "bias_exponent",
    "bias_random_over_nearest",
    "bias_unrounded_targets",
    "bias_model_targets",
    "validation_loss",
    "weights_distance",
    "sign_agreement",
    "feature_sign_agreement",
    "feature_v_sign",
    "effective_rank",
    "token_similarity",
    "step_similarity",
    "ties_on_sinks",
    "tied_out_error_bias",
    "untied_out_error_bias",
    "one_sided_tied_out_error_bias",
    "weights_growth",
    "w_q_layer_2",
]
COMPARED = ("validation_loss", "weights_distance")
"""Quantities of a run against another one, after a number of steps."""
AT_ANY_STEP = ("w_q_layer_2",)
"""Quantities of a run against another one, that take no number of steps."""


def _check_bounds(above: float | None, below: float | None) -> None:
    if above is None and below is None:
        raise ValueError("above: missing; give above, below or both")
    if above is not None and below is not None and above >= below:
        raise ValueError(f"above: {above} is not less than below: {below}; raise below")


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Interval:
    """The 95 % interval of a mean lies within bounds."""

    kind: Literal["interval"]
    quantity: QuantityName
    """The quantity: a key of :data:`QUANTITIES`."""
    above: float | None = None
    """The lower bound, in the unit of the quantity."""
    below: float | None = None
    """The upper bound, in the unit of the quantity."""
    step: Count | None = None
    """Optimiser steps after which a quantity of :data:`COMPARED` is taken. Other quantities take none."""
    against: Words | None = None
    """Runs to compare with, one a seed. Other quantities take none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_bounds(self.above, self.below)
        taken = {"step": COMPARED, "against": (*COMPARED, *AT_ANY_STEP)}
        for name, value in {"step": self.step, "against": self.against}.items():
            if self.quantity in taken[name] and value is None:
                raise ValueError(f"{name}: missing; {self.quantity} needs it")
            if self.quantity not in taken[name] and value is not None:
                raise ValueError(f"{name}: {self.quantity} takes none; drop it")
        return self


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Deviates:
    """The largest deviation of O from FP64 in BF16, of flash over that of baseline attention, lies within bounds.

    Both are emulated on the same drawn inputs (:mod:`flashpoint.lab.deviation`), so that the claim needs no runs.
    """

    kind: Literal["deviates"]
    sums: Literal["fp32", "within"] = "fp32"
    """Sums in FP32, or kept in BF16 (:mod:`flashpoint.lab.deviation.arithmetic`)."""
    causal: bool = True
    """Whether later keys are masked."""
    above: float
    """The lower bound of the mean ratio."""
    below: float
    """Its upper bound."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_bounds(self.above, self.below)
        return self


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class EmulatedSetting:
    """Where flash and baseline attention are compared: heads of 64 features, tiles of ``rows`` queries × ``keys``."""

    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    length: Count = LENGTH
    rows: Count = TILE
    keys: Count = TILE


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Differs:
    """The largest difference of O between flash and baseline attention, in one setting over another, is bounded.

    Both are emulated on drawn inputs (:mod:`flashpoint.lab.deviation`), so that the claim needs no runs.
    """

    kind: Literal["differs"]
    sums: Literal["fp32", "within"] = "fp32"
    """Sums in FP32, or kept in the precision (:mod:`flashpoint.lab.deviation.arithmetic`)."""
    causal: bool = True
    """Whether later keys are masked."""
    of: EmulatedSetting
    """The setting of the numerator."""
    over: EmulatedSetting
    """The setting of the denominator."""
    above: float | None = None
    """The lower bound of the mean ratio."""
    below: float | None = None
    """Its upper bound."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_bounds(self.above, self.below)
        return self


KINDS = ("explodes", "holds", "earlier", "later", "layer", "interval", "deviates", "differs")
"""Kinds of criteria."""
Criterion = Annotated[Explodes | Holds | Onset | Layer | Interval | Deviates | Differs, Field(discriminator="kind")]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Claim:
    """One claim, and how it is put to the test."""

    id: Id
    """No other claim has it."""
    source: Literal["paper", "golden", "ours"]
    """Who claims it: Qiu & Yao (arXiv 2510.04212), Golden et al. (arXiv 2405.02803), or flashpoint."""
    where: str | None = None
    """The section of the source."""
    claim: Annotated[str, Field(min_length=1)]
    """One plain sentence."""
    scale: str | None = None
    """The setting of the test, and how it differs from the source's. Needed where there is one."""
    runs: Words | None = None
    """The runs. None: not tested, unless the criterion needs none."""
    criterion: Criterion | None = None
    """When the claim replicates. Needed with ``runs``; without the runs that it needs it says what a test will ask."""
    preregistered: bool | Literal["in part"] = False
    """Whether the criterion was committed before the runs: true, false, or in part, e.g. after some of the runs."""
    short: bool = False
    """Whether the short table has the claim."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        computed = isinstance(self.criterion, Deviates | Differs)
        if computed and self.runs:
            raise ValueError("runs: a criterion that is computed needs none; drop them")
        for name in ("criterion", "scale"):
            if (self.runs or computed) and not getattr(self, name):
                raise ValueError(f"{name}: missing; a claim that is tested needs it")
        return self

    @property
    def against(self) -> tuple[str, ...]:
        """The runs that the criterion compares with; empty where it compares with none."""
        return getattr(self.criterion, "against", None) or ()


def read_claims(path: Path) -> list[Claim]:
    """Read and check a file of claims.

    Raises:
        UserError: as :func:`.read_listed`.
    """
    return read_listed(path, "claims", Claim, KINDS)
