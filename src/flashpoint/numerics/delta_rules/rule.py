"""What a rule of δ says: how δ is made, what the forward pass saves for it, and what a variant with it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # every verb reads the rules, and none is to wait for PyTorch
    from torch import Tensor

SavedOut = Literal["none", "unrounded", "redrawn"]
"""The O that the forward pass saves for δ, of the same P̄ as the O that it returns. ``unrounded``: with Ō, ℓ and O
unrounded. ``redrawn``: with other random bits in every stochastic rounding of Ō and O."""


class BackwardInputs(Protocol):
    """What δ can be made of. The backward pass has it, and so has a probe that looks at δ.

    Shapes: tokens T, features d per head, any leading dimensions. All is float32.
    """

    @property
    def grad_out(self) -> Tensor:
        """dO [..., T, d]."""

    @property
    def out(self) -> Tensor:
        """O [..., T, d] as the forward pass returned it."""

    @property
    def saved_out(self) -> Tensor:
        """The O [..., T, d] that the rule has the forward pass save."""

    def row_sums(self) -> tuple[Tensor, Tensor]:
        """Return Σ_j P_ij·dP_ij and Σ_j P_ij, [..., T] each. It takes a pass over the keys."""


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """One rule of δ."""

    delta: Callable[[BackwardInputs], Tensor]
    """Return δ [..., T], before exact row sums and injected errors: the attention's own, and what probes see."""
    saved_out: SavedOut = "none"
    constraints: tuple[Callable[..., None], ...] = ()
    """What a variant with this rule cannot be, as in :mod:`flashpoint.numerics.contradictions`."""
    choices: tuple[str, ...] = ()
    """Choices of a variant that this rule alone reads. With another rule they are None."""
