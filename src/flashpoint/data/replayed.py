"""The batch order of a replay, and whether a tape may be replayed here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashpoint.data.batches import BatchOrder
from flashpoint.data.tape import Tape, TapeHeader
from flashpoint.data.tokens import TokenDataset
from flashpoint.errors import UserError


@dataclass(frozen=True)
class ReplayedOrder:
    """The tape's batch order, and after its end the order that the original would have continued with."""

    tape: Tape
    beyond: BatchOrder

    def windows(self, step: int) -> NDArray[np.uint32]:
        return self.tape.records[step] if step < self.tape.steps else self.beyond.windows(step)


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
                f"{item.name} differs from the tape's: {current} here, {recorded} on the tape; "
                "replay with the versions that recorded it (manifest.json)"
            )
