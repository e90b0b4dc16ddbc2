"""The tape: the exact batch order of a run on disk, for replay.

Layout, little-endian:

    8 bytes     magic and version, b"FPTAPE01"
    4 bytes     length of the header
    header      JSON (:class:`TapeHeader`)
    8 bytes     digest of everything before it
    records     one per optimiser step: uint32 window numbers [micro-batches, ranks, sequences],
                then an 8-byte digest

A digest is BLAKE2b of the previous digest and the bytes since, so a changed, missing or swapped record breaks
the chain at its step. A record cut short at the end is what a killed run leaves; it is no part of the tape.
At 512 sequences a step that is 2,056 bytes a step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import struct
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.files import alone, append_whole, mapped
from flashpoint.schema import Count, kind_of, understood

MAGIC = b"FPTAPE01"
_DIGEST_BYTES = 8
_MOST_SEQUENCES = 2**24  # of a step, whose record is looked at as a whole
_LONGEST_HEADER = 10_000


@dataclass(frozen=True, kw_only=True)
class TapeHeader:
    """The facts under which the records mean the same sequences and the same initial weights."""

    data_fingerprint: str
    context: Count
    """Tokens a window; window w starts at token w · context."""
    n_windows: Count
    micro_batches: Count
    ranks: Count
    sequences: Count
    """Per micro-batch and rank."""
    seed: int
    """The seed of the batch order; the initial weights are told by their digest."""
    initial_weights: str
    """Digest of the initial weights."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(micro-batches, ranks, sequences) of a record."""
        return self.micro_batches, self.ranks, self.sequences


_HEADER = kind_of(TapeHeader, required=[field.name for field in dataclasses.fields(TapeHeader)], closed=True)


class TapeWriter:
    """Appends one record a step. Each record reaches the operating system whole before the step runs.

    Args:
        path: of a new file, or with ``steps`` of a tape with this header, to go on from its first ``steps`` records;
            later ones are dropped.

    Raises:
        UserError: the existing tape is damaged within those steps, of another header, or shorter.
    """

    def __init__(self, path: Path, header: TapeHeader, steps: int | None = None) -> None:
        text = json.dumps(dataclasses.asdict(header), sort_keys=True).encode()
        head = MAGIC + struct.pack("<I", len(text)) + text
        self._shape = header.shape
        self._digest = _chain(b"", head)
        self.steps = steps or 0
        if steps is None:
            self._file = path.open("xb", buffering=0)
            append_whole(self._file, head + self._digest)
            return
        tape = Tape.read(path, until_broken=True)
        if tape.header != header or tape.steps < steps:
            raise UserError(f"{path}: another run's tape, or fewer than {steps:,} steps of it; restore the file")
        self._file = alone(path).open("r+b", buffering=0)
        end = len(head) + _DIGEST_BYTES + steps * _record_bytes(header)
        self._file.truncate(end)
        self._file.seek(end - _DIGEST_BYTES)
        self._digest = self._file.read(_DIGEST_BYTES)

    @property
    def digest(self) -> str:
        """Hex digest of the tape so far."""
        return self._digest.hex()

    def append(self, windows: NDArray[np.uint32]) -> None:
        """Record the windows [micro-batches, ranks, sequences] of the next step.

        Raises:
            OSError: the record could not be written.
        """
        assert windows.shape == self._shape, f"{windows.shape}, the tape has {self._shape}"
        record = windows.astype("<u4").tobytes()
        digest = _chain(self._digest, record)
        append_whole(self._file, record + digest)
        self._digest = digest
        self.steps += 1

    def sync(self) -> None:
        """Wait until the records are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Tape:
    """A recorded tape, verified when read."""

    path: Path
    header: TapeHeader
    records: NDArray[np.uint32]
    """Window numbers [steps, micro-batches, ranks, sequences]."""
    digest: str
    """BLAKE2b chain over all entries of the file."""

    @property
    def steps(self) -> int:
        return len(self.records)

    def shared_among(self, shape: tuple[int, int, int]) -> Tape:
        """Return the same sequences in the same order, dealt to other (micro-batches, ranks, sequences)."""
        micro_batches, ranks, sequences = shape
        header = dataclasses.replace(self.header, micro_batches=micro_batches, ranks=ranks, sequences=sequences)
        return dataclasses.replace(self, header=header, records=self.records.reshape(-1, *shape))

    @classmethod
    def read(cls, path: Path, *, until_broken: bool = False) -> Tape:
        """Read and verify a tape; an incomplete last record is left out.

        Args:
            until_broken: leave out the first broken record and all after it: a power loss can garble an end that was
                not on the disk yet.

        Raises:
            UserError: no tape, another version, or a broken digest, with the step at which it breaks.
        """
        try:
            data = mapped(path)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; a replay needs the run's tape") from error
        header, digest, start = _read_head(path, data)
        size = _record_bytes(header)
        steps = (len(data) - start) // size
        for step in range(steps):
            record = data[start + step * size : start + (step + 1) * size]
            digest = _chain(digest, record[:-_DIGEST_BYTES])
            if digest != record[-_DIGEST_BYTES:] and until_broken:
                steps, digest = step, data[start + step * size - _DIGEST_BYTES : start + step * size]
                break
            if digest != record[-_DIGEST_BYTES:]:
                raise UserError(f"{path}: edited or damaged at step {step}; restore the file or replay another run")
        body = np.frombuffer(data, np.uint8, count=steps * size, offset=start).reshape(steps, size)
        # A copy, also of one record alone: who goes on with the tape cuts the file that is mapped here.
        records = body[:, :-_DIGEST_BYTES].copy().view("<u4").reshape(steps, *header.shape)
        if records.size and int(records.max()) >= header.n_windows:
            raise UserError(f"{path}: points past the data's {header.n_windows:,} windows; restore the file")
        return cls(path, header, records, digest.hex())


def _record_bytes(header: TapeHeader) -> int:
    return 4 * math.prod(header.shape) + _DIGEST_BYTES


def _read_head(path: Path, data: bytes | mmap.mmap) -> tuple[TapeHeader, bytes, int]:
    fixed = len(MAGIC) + 4
    if len(data) < fixed:
        raise UserError(f"{path}: {len(data)} bytes, cut short within the header; restore the file")
    if data[: len(MAGIC)] != MAGIC:
        version = data[: len(MAGIC)]
        raise UserError(
            f"{path}: no tape of this version (starts with {version!r}, expected {MAGIC!r}); restore the file"
        )
    length = struct.unpack_from("<I", data, len(MAGIC))[0]
    if length > _LONGEST_HEADER:
        raise UserError(f"{path}: a header of {length:,} bytes; restore the file or replay another run")
    end = fixed + length
    digest = data[end : end + _DIGEST_BYTES]
    if len(digest) < _DIGEST_BYTES:
        raise UserError(f"{path}: {len(data)} bytes, cut short within the header; restore the file")
    if digest != _chain(b"", data[:end]):
        raise UserError(f"{path}: header edited or damaged; restore the file or replay another run")
    header = TapeHeader(**dict(understood(data[fixed:end], _HEADER, f"{path}: header")))
    if math.prod(header.shape) > _MOST_SEQUENCES:
        raise UserError(f"{path}: header: {math.prod(header.shape):,} sequences a step; restore the file")
    return header, digest, end + _DIGEST_BYTES


def _chain(previous: bytes, data: bytes) -> bytes:
    return blake2b(previous + data, digest_size=_DIGEST_BYTES).digest()
