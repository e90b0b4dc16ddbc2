"""The tokens and the batch order of a replay, and whether a tape may be replayed here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.data.batches import BatchOrder
from flashpoint.lab.data.tape import Tape, TapeHeader
from flashpoint.lab.data.tokens import TokenDataset, open_tokens


@dataclass(frozen=True)
class ReplayedOrder:
    """The tape's batch order, and after its end the order that the original would have continued with."""

    tape: Tape
    beyond: BatchOrder

    def windows(self, step: int) -> NDArray[np.uint32]:
        return self.tape.records[step] if step < self.tape.steps else self.beyond.windows(step)


def recorded_tokens(places: Iterable[Path], taped: TapeHeader) -> TokenDataset | None:
    """Return the tokens of a tape from the first of these folders that has them; None where none does.

    The text that they were prepared from may be another one by now, or gone.

    Raises:
        UserError: a folder is damaged.
    """
    found = (open_tokens(place) for place in places if place.is_dir())
    return next((tokens for tokens in found if tokens.fingerprint == taped.data_fingerprint), None)


def check_replay(taped: TapeHeader, here: TapeHeader, tokens: TokenDataset) -> None:
    """Refuse a replay whose batches or initial weights would differ from the tape's.

    Raises:
        UserError: naming the first field that differs.
    """
    if taped.data_fingerprint != here.data_fingerprint:
        raise UserError(
            f"data differ from the tape's: fingerprint {here.data_fingerprint} in {tokens.path}, "
            f"{taped.data_fingerprint} on the tape; restore the tape's data or start a new run"
        )
    for item in dataclasses.fields(TapeHeader):
        recorded, current = getattr(taped, item.name), getattr(here, item.name)
        if recorded != current:
            raise UserError(
                f"{item.name} differs from the tape's: {current} here, {recorded} on the tape; restore the tape if it "
                "is another run's, or replay with the versions that recorded it, which its manifest tells"
            )
