"""The digest chain: what every step computed, in 24 bytes, so that two runs compare in a second.

Layout, little-endian: 8 bytes of magic and version, b"FPCHAIN1", then one record per optimiser step: the FP32 bits of
loss and gradient norm, a checksum of weights and optimiser state (uint64; 0 where none was taken), and a digest,
BLAKE2b of the previous digest and the 16 bytes before it. Equal digests mean equal steps up to there. A record cut
short at the end is what a killed run leaves.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError

MAGIC = b"FPCHAIN1"
_VALUES = struct.Struct("<ffQ")
_RECORD = np.dtype([("loss", "<u4"), ("grad_norm", "<u4"), ("state", "<u8"), ("digest", "V8")])
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
        self._file = path.open("r+b", buffering=0)
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
        values = _VALUES.pack(loss, grad_norm, state)
        self._digest = blake2b(self._digest + values, digest_size=8).digest()
        self._file.write(values + self._digest)

    def sync(self) -> None:
        """Wait until the records are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Chain:
    """A recorded chain, verified when read."""

    records: NDArray[np.void]

    @property
    def steps(self) -> int:
        return len(self.records)

    @property
    def digests(self) -> list[bytes]:
        """After each step."""
        return [bytes(digest) for digest in self.records["digest"]]

    @property
    def digest(self) -> str:
        """Hex digest of all steps."""
        return (bytes(self.records["digest"][-1]) if self.steps else _START).hex()

    @classmethod
    def of_values(cls, loss: NDArray[np.float32], grad_norm: NDArray[np.float32], state: NDArray[np.uint64]) -> Chain:
        """Return the chain of what [steps] steps computed."""
        records = np.zeros(len(loss), _RECORD)
        records["loss"], records["grad_norm"], records["state"] = loss.view("<u4"), grad_norm.view("<u4"), state
        data, digest, digests = records.tobytes(), _START, list[bytes]()
        for at in range(0, len(data), _RECORD.itemsize):
            digest = blake2b(digest + data[at : at + _VALUES.size], digest_size=8).digest()
            digests.append(digest)
        records["digest"] = np.frombuffer(b"".join(digests), _RECORD["digest"])
        return cls(records)

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
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; give a run that recorded its digest chain") from error
        if data[: len(MAGIC)] != MAGIC:
            raise UserError(f"{path}: no digest chain of this version; give a run that recorded one")
        count = (len(data) - len(MAGIC)) // _RECORD.itemsize
        records = np.frombuffer(data, _RECORD, count=count, offset=len(MAGIC))
        digest = _START
        for step, record in enumerate(records):
            digest = blake2b(digest + record.tobytes()[: _VALUES.size], digest_size=8).digest()
            if digest != bytes(record["digest"]) and until_broken:
                return cls(records[:step])
            if digest != bytes(record["digest"]):
                raise UserError(f"{path}: edited or damaged at step {step}; restore the file")
        return cls(records)


@dataclass(frozen=True)
class Difference:
    """The first step at which two runs computed different bits, and what."""

    step: int
    quantity: str
    values: tuple[float | int, float | int]


def first_difference(one: Chain, other: Chain) -> Difference | None:
    """Return the first difference, or None if all common steps are equal. Checksums count where both runs have one."""
    steps = min(one.steps, other.steps)
    a, b = one.records[:steps], other.records[:steps]
    differs = {
        "loss": a["loss"] != b["loss"],
        "gradient norm": a["grad_norm"] != b["grad_norm"],
        "state": (a["state"] != b["state"]) & (a["state"] != 0) & (b["state"] != 0),
    }
    firsts = {quantity: int(where.argmax()) for quantity, where in differs.items() if where.any()}
    if not firsts:
        return None
    quantity = min(firsts, key=lambda name: firsts[name])
    step, column = firsts[quantity], {"gradient norm": "grad_norm"}.get(quantity, quantity)
    pair = np.array([a[column][step], b[column][step]])
    return Difference(step, quantity, tuple((pair if quantity == "state" else pair.view("<f4")).tolist()))


def loss_differences(one: Chain, other: Chain) -> tuple[float, int, float]:
    """Return how far the losses of two runs are apart, nats: the largest difference, its step, and the last one; ∞ by
    NaN."""
    steps = min(one.steps, other.steps)
    a, b = (chain.records["loss"][:steps].view("<f4").astype(np.float64) for chain in (one, other))
    apart = np.where(a == b, 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf))
    return float(apart.max()), int(apart.argmax()), float(apart[-1])
