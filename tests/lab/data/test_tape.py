"""The tape refuses what is not exactly what was recorded."""

import dataclasses
import struct
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from flashpoint.errors import UserError
from flashpoint.lab.data.tape import Tape, TapeHeader, TapeWriter

HEADER = TapeHeader(
    data_fingerprint="f" * 64,
    context=16,
    n_windows=1000,
    micro_batches=2,
    ranks=1,
    sequences=3,
    seed=7,
    initial_weights="0" * 64,
)


def record(path: Path, steps: int, header: TapeHeader = HEADER) -> np.ndarray:
    windows = np.random.default_rng(0).integers(0, header.n_windows, (steps, *header.shape)).astype(np.uint32)
    writer = TapeWriter(path, header)
    for step in windows:
        writer.append(step)
    writer.close()
    return windows


def header_size(path: Path) -> int:
    return 12 + struct.unpack("<I", path.read_bytes()[8:12])[0] + 8


def test_what_is_written_is_read(tmp_path: Path) -> None:
    windows = record(tmp_path / "tape", steps=5)
    tape = Tape.read(tmp_path / "tape")
    assert tape.header == HEADER
    np.testing.assert_array_equal(tape.records, windows)


@pytest.mark.parametrize("steps", [1, 2])
def test_what_was_read_stays_while_the_tape_is_written_anew(tmp_path: Path, steps: int) -> None:
    """A run killed after one step, without a checkpoint, went on with windows 0: its only record lay in the file."""
    windows = record(tmp_path / "tape", steps)
    tape = Tape.read(tmp_path / "tape")
    TapeWriter(tmp_path / "tape", HEADER, 0).append(windows[0] + 1)
    np.testing.assert_array_equal(tape.records, windows)


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    """Offsets and digests recomputed by hand from the bytes."""
    windows = record(tmp_path / "tape", steps=2)
    data = (tmp_path / "tape").read_bytes()
    start = header_size(tmp_path / "tape")
    digest = blake2b(data[: start - 8], digest_size=8).digest()
    assert data[:8] == b"FPTAPE01"
    assert data[start - 8 : start] == digest
    for step in range(2):
        at = start + step * (6 * 4 + 8)
        body = data[at : at + 24]
        assert struct.unpack("<6I", body) == tuple(windows[step].ravel())
        digest = blake2b(digest + body, digest_size=8).digest()
        assert data[at + 24 : at + 32] == digest
    assert Tape.read(tmp_path / "tape").digest == digest.hex()


def test_ten_thousand_steps_of_512_sequences_take_at_most_25_megabytes(tmp_path: Path) -> None:
    header = TapeHeader(**{**HEADER.__dict__, "micro_batches": 16, "sequences": 32})
    record(tmp_path / "tape", steps=10, header=header)
    start = header_size(tmp_path / "tape")
    per_step = ((tmp_path / "tape").stat().st_size - start) / 10
    assert start + 10_000 * per_step <= 25e6


def test_a_flipped_bit_is_refused_at_its_step(tmp_path: Path) -> None:
    path = tmp_path / "tape"
    record(path, steps=4)
    good = path.read_bytes()
    start = header_size(path)
    for offset in range(start, len(good)):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 4]) + good[offset + 1 :])
        with pytest.raises(UserError, match=f"damaged at step {(offset - start) // 32};"):
            Tape.read(path)


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tape"
    record(path, steps=1)
    good = path.read_bytes()
    for offset in range(header_size(path)):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 4]) + good[offset + 1 :])
        with pytest.raises(UserError, match=r"version|header"):
            Tape.read(path)


def test_swapped_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tape"
    record(path, steps=3)
    data, start = path.read_bytes(), header_size(path)
    first, second, rest = data[start : start + 32], data[start + 32 : start + 64], data[start + 64 :]
    path.write_bytes(data[:start] + second + first + rest)
    with pytest.raises(UserError, match="step 0"):
        Tape.read(path)


def test_a_record_cut_short_is_no_part_of_the_tape(tmp_path: Path) -> None:
    path = tmp_path / "tape"
    windows = record(path, steps=3)
    good = path.read_bytes()
    for cut in range(1, 32):
        path.write_bytes(good[:-cut])
        np.testing.assert_array_equal(Tape.read(path).records, windows[:2])


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [((2, 2**23, 1), False), ((1, 2**24, 2), True), ((2**40, 2**40, 1), True), ((2**62, 2**62, 2**62), True)],
)
def test_a_header_of_more_sequences_than_any_step_has_is_refused(
    tmp_path: Path, shape: tuple[int, int, int], wrong: bool
) -> None:
    """Their product went around to 0, by which a size was divided."""
    micro_batches, ranks, sequences = shape
    path = tmp_path / "tape"
    TapeWriter(path, dataclasses.replace(HEADER, micro_batches=micro_batches, ranks=ranks, sequences=sequences)).close()
    if wrong:
        with pytest.raises(UserError, match=r"header: .* sequences a step; restore"):
            Tape.read(path)
    else:
        assert Tape.read(path).steps == 0


def test_a_header_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tape"
    record(path, steps=1)
    good = path.read_bytes()
    for length in range(header_size(path)):
        path.write_bytes(good[:length])
        with pytest.raises(UserError, match="cut short"):
            Tape.read(path)


def test_an_existing_tape_is_never_overwritten(tmp_path: Path) -> None:
    record(tmp_path / "tape", steps=1)
    before = (tmp_path / "tape").read_bytes()
    with pytest.raises(FileExistsError):
        TapeWriter(tmp_path / "tape", HEADER)
    assert (tmp_path / "tape").read_bytes() == before


def test_a_window_past_the_data_is_refused(tmp_path: Path) -> None:
    writer = TapeWriter(tmp_path / "tape", HEADER)
    writer.append(np.full(HEADER.shape, HEADER.n_windows, np.uint32))
    writer.close()
    with pytest.raises(UserError, match="past the data's 1,000 windows"):
        Tape.read(tmp_path / "tape")


def test_a_missing_tape_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Tape.read(tmp_path / "none")
    assert "\n" not in str(caught.value)
    assert "none" in str(caught.value)
