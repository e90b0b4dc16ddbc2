"""The digest chain: what every step computed, in 24 bytes, so that two runs compare in a second.

Layout, little-endian: 8 bytes of magic and version, b"FPCHAIN1", then one record per optimiser step. A record has the
FP32 bits of loss and gradient norm, a checksum, and a digest. The checksum is of weights and optimiser state (uint64; 0
where none was taken). The digest is BLAKE2b of the previous digest and the 16 bytes before it. Equal digests mean equal
steps up to there. A record cut short at the end is what a killed run leaves.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.files import alone, append_whole, mapped

MAGIC = b"FPCHAIN1"
_VALUES = struct.Struct("<ffQ")
_RECORD = np.dtype([("loss", "<u4"), ("grad_norm", "<u4"), ("state", "<u8"), ("digest", "V8")])
_FIRST_STEPS = _SPACING = 100
_START = blake2b(MAGIC, digest_size=8).digest()


class ChainWriter:
    """Appends one record a step.

    Args:
        path: of a file to write anew, or with ``steps`` of one to go on from its first ``steps`` records; later ones
            are dropped.

    Raises:
        UserError: the existing file is damaged within those steps or has fewer.
    """

    def __init__(self, path: Path, steps: int | None = None) -> None:
        if steps is None:
            self._file = path.open("wb", buffering=0)
            self._file.write(MAGIC)
            self._digest = _START
            return
        chain = Chain.read(path, until_broken=True)
        if steps > chain.steps:
            raise UserError(f"{path}: holds {chain.steps} steps, {steps} are needed; restore the file")
        self._file = alone(path).open("r+b", buffering=0)
        self._file.truncate(len(MAGIC) + steps * _RECORD.itemsize)
        self._file.seek(0, os.SEEK_END)
        self._digest = chain.digests[steps - 1] if steps else _START

    @property
    def digest(self) -> str:
        """Hex digest of all steps so far."""
        return self._digest.hex()

    def append(self, loss: float, grad_norm: float, state: int = 0) -> None:
        """Fold in the next step.

        Raises:
            OSError: the record could not be written.
        """
        self.append_all([(loss, grad_norm, state)])

    def append_all(self, of_steps: Iterable[tuple[float, float, int]]) -> None:
        """Fold in loss, gradient norm and checksum of the next steps.

        Raises:
            OSError: the records could not be written; then none is.
        """
        digest, records = self._digest, b""
        for step in of_steps:
            values = _VALUES.pack(*step)
            digest = blake2b(digest + values, digest_size=8).digest()
            records += values + digest
        append_whole(self._file, records)
        self._digest = digest

    def sync(self) -> None:
        """Wait until the records are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Chain:
    """A recorded chain, verified when read: the records of all steps, or of some.

    Args:
        records: [n], of the type that the layout above describes.
        at: [n] int64, the steps of the records, rising from 0.
    """

    records: NDArray[np.void]
    at: NDArray[np.int64]

    @property
    def steps(self) -> int:
        """Of the run, up to the last record."""
        return int(self.at[-1]) + 1 if len(self.at) else 0

    @property
    def digests(self) -> list[bytes]:
        """After each recorded step."""
        return [bytes(digest) for digest in self.records["digest"]]

    @property
    def digest(self) -> str:
        """Hex digest of all steps."""
        return (bytes(self.records["digest"][-1]) if len(self.at) else _START).hex()

    @property
    def follows(self) -> NDArray[np.bool_]:
        """[n], whether a record is of the step after that of the record before; the first one's is step 0."""
        return np.diff(self.at, prepend=-1) == 1

    def is_finite(self, steps: int) -> bool:
        """Whether losses and gradient norms of the first so many steps are finite, as far as they are recorded."""
        values = self.records[self.at < steps]
        return all(bool(np.isfinite(values[name].view("<f4")).all()) for name in ("loss", "grad_norm"))

    def milestones(self) -> Chain:
        """Return the records of the first 100 steps, of each hundredth and of the last.

        A digest is one of all steps before. Two runs are as surely equal by these as by all, but a first difference
        among later steps is known to within 100 only.
        """
        kept = (self.at < _FIRST_STEPS) | ((self.at + 1) % _SPACING == 0) | (self.at == self.steps - 1)
        return Chain(self.records[kept], self.at[kept])

    @classmethod
    def of_values(
        cls,
        at: NDArray[np.int64],
        loss: NDArray[np.float32],
        grad_norm: NDArray[np.float32],
        state: NDArray[np.uint64],
        digests: Sequence[bytes | None],
    ) -> Chain:
        """Return the chain of what steps computed.

        Args:
            at: [n], the steps.
            digests: [n]; None follows from the record of the step before.

        Raises:
            ValueError: steps do not rise from 0, or there is no digest after a step that is missing.
        """
        records = np.zeros(len(at), _RECORD)
        records["loss"], records["grad_norm"], records["state"] = loss.view("<u4"), grad_norm.view("<u4"), state
        chain = cls(records, at)
        if not len(at) or at[0] != 0 or (np.diff(at) < 1).any():
            raise ValueError("steps do not rise from 0")
        data, digest, found = records.tobytes(), _START, list[bytes]()
        for number, (follows, given) in enumerate(zip(chain.follows.tolist(), digests, strict=True)):
            if given is None and not follows:
                raise ValueError(f"no digest of step {at[number]}, nor the step before")
            start = number * _RECORD.itemsize
            values = data[start : start + _VALUES.size]
            digest = given or blake2b(digest + values, digest_size=8).digest()
            found.append(digest)
        records["digest"] = np.frombuffer(b"".join(found), _RECORD["digest"])
        return chain

    @classmethod
    def read(cls, path: Path, *, until_broken: bool = False) -> Chain:
        """Read and verify; an incomplete last record is left out.

        Args:
            until_broken: leave out the first broken record and all after it: a power loss can garble an end that was
                not on the disk yet.

        Raises:
            UserError: no chain, or a broken one, with the step at which it breaks.
        """
        try:
            data = mapped(path)
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}; restore it, or give a run that recorded its digest chain"
            ) from error
        if data[: len(MAGIC)] != MAGIC:
            raise UserError(f"{path}: no digest chain of this version; restore it, or give a run that recorded one")
        count = (len(data) - len(MAGIC)) // _RECORD.itemsize
        records = np.frombuffer(data, _RECORD, count=count, offset=len(MAGIC))
        digest = _START
        for step, record in enumerate(records):
            digest = blake2b(digest + record.tobytes()[: _VALUES.size], digest_size=8).digest()
            if digest != bytes(record["digest"]) and until_broken:
                return cls(records[:step].copy(), np.arange(step))
            if digest != bytes(record["digest"]):
                raise UserError(f"{path}: edited or damaged at step {step}; restore the file")
        return cls(records.copy(), np.arange(count))


@dataclass(frozen=True)
class Difference:
    """The first recorded step at which two runs had computed different bits, and what."""

    after: int
    """The last step before of which both have a record; -1 at the start. The difference is of a later one."""
    step: int
    quantity: str
    """Loss, gradient norm, state, or "digest": then it is of a step between, of which one has no record."""
    values: tuple[float | int | str, float | int | str]


def steps_of_both(one: Chain, other: Chain) -> int:
    """Return up to where two chains can be compared: the steps up to the last of which both have a record."""
    return _recorded_by_both(one, other)[0].steps


def first_difference(one: Chain, other: Chain) -> Difference | None:
    """Return the first difference, or None if all steps up to the last that both have are equal.

    Checksums count where both runs have one. Only where a chain lacks steps do digests count: there, a checksum that
    one run alone took is a difference.
    """
    one, other = _recorded_by_both(one, other)
    a, b = one.records, other.records
    differs = {
        "loss": a["loss"] != b["loss"],
        "gradient norm": a["grad_norm"] != b["grad_norm"],
        "state": (a["state"] != b["state"]) & (a["state"] != 0) & (b["state"] != 0),
        "digest": (a["digest"] != b["digest"]) & ~one.follows,
    }
    firsts = {quantity: int(where.argmax()) for quantity, where in differs.items() if where.any()}
    if not firsts:
        return None
    quantity = min(firsts, key=lambda name: firsts[name])
    place, column = firsts[quantity], {"gradient norm": "grad_norm"}.get(quantity, quantity)
    pair = np.array([a[column][place], b[column][place]])
    values = pair if quantity == "state" else pair.view("<f4")
    told = [bytes(digest).hex() for digest in pair] if quantity == "digest" else values.tolist()
    return Difference(int(one.at[place - 1]) if place else -1, int(one.at[place]), quantity, tuple(told))


@dataclass(frozen=True)
class LossDifferences:
    """How far the losses of two runs are apart, nats; ∞ by NaN."""

    largest: float
    largest_at: int
    """The step."""
    last: float
    last_at: int

    @classmethod
    def of(
        cls, steps: NDArray[np.int64], a: NDArray[np.float64], b: NDArray[np.float64], equal: NDArray[np.bool_]
    ) -> LossDifferences:
        """Return how far losses a and b [n] of these steps are apart; 0 where they are ``equal``, as NaN can be."""
        with np.errstate(invalid="ignore"):  # ∞ − ∞
            apart = np.abs(a - b)
        apart[np.isnan(apart)] = np.inf
        apart[equal] = 0.0
        place = int(apart.argmax())
        return cls(float(apart[place]), int(steps[place]), float(apart[-1]), int(steps[-1]))


def loss_differences(one: Chain, other: Chain) -> LossDifferences:
    """Return how far losses are apart at the steps of which both have a record; there is one at least.

    Equal bits are not apart, those of NaN and of an infinity included.
    """
    one, other = _recorded_by_both(one, other)
    a, b = (chain.records["loss"].view("<f4").astype(np.float64) for chain in (one, other))
    return LossDifferences.of(one.at, a, b, one.records["loss"] == other.records["loss"])


def _recorded_by_both(one: Chain, other: Chain) -> tuple[Chain, Chain]:
    at, here, there = np.intersect1d(one.at, other.at, assume_unique=True, return_indices=True)
    return Chain(one.records[here], at), Chain(other.records[there], at)
