"""Files that are whole or not there."""

import errno
import io
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashpoint.errors import remedy
from flashpoint.files import append_whole, atomic_write, write_json
from flashpoint.lab.training.snapshots import read_snapshot, snapshot_steps, write_snapshot
from flashpoint.runs.chain import Chain, ChainWriter


@pytest.fixture
def small_files() -> Iterator[None]:
    """The operating system lets no file grow past 4 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("durable", [True, False])
def test_a_block_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"

    def interrupted() -> None:
        with atomic_write(path, durable=durable) as partial:
            partial.write_text("new")
            raise KeyboardInterrupt

    (tmp_path / ".file.partial").write_text("what a kill left")
    with atomic_write(path, durable=durable) as partial:
        assert not partial.exists()
        partial.write_text("old")
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("small_files")
def test_tensors_for_which_there_is_no_room_are_an_error_of_the_system(tmp_path: Path) -> None:
    """Safetensors has an error of its own, which ended a run in a traceback."""
    write_snapshot(tmp_path / "weights", 1, {"a": torch.ones(10)})
    with pytest.raises(OSError, match="File too large") as raised:
        write_snapshot(tmp_path / "weights", 2, {"a": torch.ones(10_000)})
    assert raised.value.errno == errno.EFBIG
    assert remedy(raised.value) == "free space"
    assert snapshot_steps(tmp_path / "weights") == [1]
    assert read_snapshot(tmp_path / "weights", 1)["a"].tolist() == [1.0] * 10
    assert len(list((tmp_path / "weights").iterdir())) == 1


def test_a_file_that_takes_a_part_at_a_time_gets_all(tmp_path: Path) -> None:
    class Slow(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:3])

    with Slow(tmp_path / "file", "w") as file:
        append_whole(file, b"one record")
    assert (tmp_path / "file").read_bytes() == b"one record"


def test_a_record_for_which_there_is_no_room_leaves_the_chain_as_it_was(tmp_path: Path) -> None:
    """The system takes a part of the record without a word. Once there is room again the chain goes on."""
    writer, before = ChainWriter(tmp_path / "chain"), resource.getrlimit(resource.RLIMIT_FSIZE)
    writer.append(2.0, 1.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.append(3.0, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "chain").stat().st_size == 8 + 24
    writer.append(4.0, 1.0)
    assert Chain.read(tmp_path / "chain").records["loss"].view("<f4").tolist() == [2.0, 4.0]


@pytest.mark.usefixtures("small_files")
def test_json_for_which_there_is_no_room_leaves_what_was_there(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(OSError, match="File too large") as raised:
        write_json(tmp_path / "a.json", {"a": "long" * 2000})
    assert raised.value.filename == str(tmp_path / "a.json")  # which the system does not say of a file that is open
    assert (tmp_path / "a.json").read_text() == '{\n  "a": 1\n}\n'
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]
