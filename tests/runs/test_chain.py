"""The digest chain on disk, hand-computed; where it says two runs part; what damage it names."""

import struct
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch

from flashpoint.errors import UserError
from flashpoint.lab.training.step import state_checksum
from flashpoint.runs.chain import (
    Chain,
    ChainWriter,
    Difference,
    LossDifferences,
    first_difference,
    loss_differences,
    steps_of_both,
)

STEPS = [(2.5, 0.5, 0), (2.25, 0.75, 2**64 - 1), (float("nan"), float("inf"), 7)]


def write(path: Path, steps: list[tuple[float, float, int]]) -> str:
    writer = ChainWriter(path)
    for step in steps:
        writer.append(*step)
    writer.sync()
    writer.close()
    return writer.digest


def test_the_file_is_what_its_description_says(tmp_path: Path) -> None:
    expected, digest = b"FPCHAIN1", blake2b(b"FPCHAIN1", digest_size=8).digest()
    for loss, norm, state in STEPS:
        values = struct.pack("<ffQ", loss, norm, state)
        digest = blake2b(digest + values, digest_size=8).digest()
        expected += values + digest
    assert write(tmp_path / "chain", STEPS) == digest.hex()
    assert (tmp_path / "chain").read_bytes() == expected


def test_going_on_from_a_step_drops_what_came_after(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", STEPS)
    write(tmp_path / "again", [*STEPS[:1], (9.0, 9.0, 9), (8.0, 8.0, 8)])
    with (tmp_path / "again").open("ab") as file:
        file.write(b"half a record")
    writer = ChainWriter(tmp_path / "again", steps=1)
    for step in STEPS[1:]:
        writer.append(*step)
    writer.close()
    assert writer.digest == whole
    assert (tmp_path / "again").read_bytes() == (tmp_path / "whole").read_bytes()
    with pytest.raises(UserError, match="holds 3 steps, 4 are needed"):
        ChainWriter(tmp_path / "again", steps=4)


def test_a_chain_without_its_first_bytes_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "lost").write_bytes(b"")  # what a power loss leaves of one that was not on the disk yet
    assert write(tmp_path / "lost", STEPS) == write(tmp_path / "whole", STEPS)
    assert (tmp_path / "lost").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("byte", [0, 8, 12, 20, 31, 40, 79])
def test_every_changed_byte_is_found(tmp_path: Path, byte: int) -> None:
    write(tmp_path / "chain", STEPS)
    data = bytearray((tmp_path / "chain").read_bytes())
    data[byte] ^= 1
    (tmp_path / "chain").write_bytes(data)
    expected = "no digest chain" if byte < 8 else f"edited or damaged at step {(byte - 8) // 24}"
    with pytest.raises(UserError, match=expected):
        Chain.read(tmp_path / "chain")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (STEPS, None),
        (STEPS[:2], None),
        ([(2.5, 0.5, 5), *STEPS[1:]], None),  # a checksum that only one run took
        ([STEPS[0], (2.25, 0.75, 1), STEPS[2]], Difference(0, 1, "state", (2**64 - 1, 1))),
        ([STEPS[0], (2.25, 1.0, 1), STEPS[2]], Difference(0, 1, "gradient norm", (0.75, 1.0))),
        ([(-2.5, 1.0, 0), *STEPS[1:]], Difference(-1, 0, "loss", (2.5, -2.5))),
        ([(0.0, 0.5, 0)], Difference(-1, 0, "loss", (2.5, 0.0))),
    ],
)
def test_the_first_difference_and_its_quantity(tmp_path: Path, changed: list, expected: Difference | None) -> None:
    write(tmp_path / "one", STEPS)
    write(tmp_path / "other", changed)
    assert first_difference(Chain.read(tmp_path / "one"), Chain.read(tmp_path / "other")) == expected


def test_how_far_losses_are_apart(tmp_path: Path) -> None:
    for name, losses in (("one", (1.0, 3.0, 2.0, 9.0)), ("other", (1.0, 0.5, 2.25)), ("nan", (1.0, float("nan")))):
        write(tmp_path / name, [(loss, 0.5, 0) for loss in losses])
    one, other, nan = (Chain.read(tmp_path / name) for name in ("one", "other", "nan"))
    assert loss_differences(one, other) == LossDifferences(2.5, 1, 0.25, 2)
    assert loss_differences(one, nan) == LossDifferences(float("inf"), 1, float("inf"), 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_losses_of_equal_bits_are_not_apart_and_an_infinity_is_from_all_others(tmp_path: Path, value: float) -> None:
    for name, losses in (("one", (3.0, value)), ("same", (2.5, value)), ("other", (3.0, 2.0))):
        write(tmp_path / name, [(loss, 0.5, 0) for loss in losses])
    one, same, other = (Chain.read(tmp_path / name) for name in ("one", "same", "other"))
    assert loss_differences(one, same) == LossDifferences(0.5, 0, 0.0, 1)
    assert loss_differences(one, other) == LossDifferences(float("inf"), 1, float("inf"), 1)


def long_chain(path: Path, steps: int, changed_at: int | None = None, checksums: bool = True) -> Chain:
    """A chain with a checksum at each hundredth step; the loss of one step can be another."""
    losses = [5 - step / 1000 + (step == changed_at) for step in range(steps)]
    sums = [step + 1 if checksums and step % 100 == 99 else 0 for step in range(steps)]
    write(path, [(loss, 0.5, state) for loss, state in zip(losses, sums, strict=True)])
    return Chain.read(path)


def test_milestones_are_the_first_hundred_steps_each_hundredth_and_the_last(tmp_path: Path) -> None:
    whole = long_chain(tmp_path / "chain", 351)
    few = whole.milestones()
    assert few.at.tolist() == [*range(100), 199, 299, 350]
    assert few.digests == [whole.digests[step] for step in few.at]
    assert (few.steps, few.digest) == (351, whole.digest)
    assert few.milestones().at.tolist() == few.at.tolist()
    assert long_chain(tmp_path / "short", 3).milestones().at.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("changed_at", "expected"),
    [
        (None, None),
        (40, Difference(39, 40, "loss", (float(np.float32(4.96)), float(np.float32(5.96))))),
        (299, Difference(199, 299, "loss", (float(np.float32(4.701)), float(np.float32(5.701))))),
    ],
)
def test_milestones_say_where_two_runs_part(tmp_path: Path, changed_at: int | None, expected: Difference) -> None:
    one, other = long_chain(tmp_path / "one", 351), long_chain(tmp_path / "other", 400, changed_at)
    assert steps_of_both(one.milestones(), other) == steps_of_both(other, one.milestones()) == 351
    assert first_difference(one.milestones(), other) == expected
    assert first_difference(one.milestones(), other.milestones()) == expected
    assert steps_of_both(one.milestones(), other.milestones()) == 300


def test_a_difference_between_milestones_is_one_of_digests(tmp_path: Path) -> None:
    one, other = long_chain(tmp_path / "one", 351), long_chain(tmp_path / "other", 351, changed_at=250)
    assert first_difference(one, other) == Difference(249, 250, "loss", (4.75, 5.75))
    digests = one.digests[299].hex(), other.digests[299].hex()
    assert first_difference(one.milestones(), other) == Difference(199, 299, "digest", digests)
    assert loss_differences(one.milestones(), other) == LossDifferences(0.0, 0, 0.0, 350)


def test_a_checksum_of_one_run_alone_is_a_difference_of_digests_only(tmp_path: Path) -> None:
    one, other = long_chain(tmp_path / "one", 351), long_chain(tmp_path / "other", 351, checksums=False)
    assert first_difference(one, other) is None
    found = first_difference(one.milestones(), other)
    assert found
    assert (found.after, found.step, found.quantity) == (99, 199, "digest")


def test_the_checksum_is_that_of_the_bits() -> None:
    tensors = [torch.tensor([1.0, -0.0]), torch.tensor([[2.0]])]
    bits = [[0x3F800000, -(2**31)], [0x40000000]]
    sums = [sum(x + x * x for x in values) * odd for values, odd in zip(bits, (1, 3), strict=True)]
    assert int(state_checksum(tensors)) % 2**64 == sum(sums) % 2**64
    assert state_checksum(tensors) != state_checksum(tensors[::-1])
    assert state_checksum([torch.tensor([1.0, 0.0]), tensors[1]]) != state_checksum(tensors)
