"""Files that are whole or not there."""

import errno
import io
import json
import lzma
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.errors import UserError, remedy
from flashpoint.files import (
    alone,
    append_whole,
    atomic_write,
    check_target,
    file_sha256,
    is_locked,
    whole_lines,
    write_json,
)
from flashpoint.lab.data.tape import Tape
from flashpoint.lab.evidence.arrow import wrong_chain_column
from flashpoint.lab.evidence.tables import Evidence, Table
from flashpoint.lab.training.checkpoints import verified
from flashpoint.lab.training.snapshots import read_snapshot, snapshot_steps, write_snapshot
from flashpoint.lab.training.tensor_files import Form
from flashpoint.runs.chain import Chain, ChainWriter
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metrics import MetricsFile, read_metrics, steps_logged
from tests.records import call, refusal


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
    assert read_snapshot(tmp_path / "weights", 1, {"a": Form((10,))})["a"].tolist() == [1.0] * 10
    assert len(list((tmp_path / "weights").iterdir())) == 1


def test_a_file_with_a_second_name_is_changed_under_one_alone(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("tape")
    (tmp_path / "other").hardlink_to(tmp_path / "one")
    with alone(tmp_path / "one").open("r+") as file:
        file.write("TAPE")
    assert [(tmp_path / name).read_text() for name in ("one", "other")] == ["TAPE", "tape"]


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


READERS: dict[str, Callable[[Path], object]] = {
    "tape.bin": Tape.read,
    "chain.bin": Chain.read,
    "metrics.jsonl": read_metrics,
    "metrics.jsonl.xz": read_metrics,
    "manifest.json": lambda path: RunFolder(path.parent).read_manifest(),
    "outcome.json": lambda path: RunFolder(path.parent).read_outcome(),
    "localize.json": lambda path: RunFolder(path.parent).read_localized(),
    "localize.jsonl": lambda path: RunFolder(path.parent).read_branches(),
    "nonfinite.jsonl": lambda path: RunFolder(path.parent).read_nonfinite(),
    "layer-01.safetensors": AttentionCall.read,
    "step-000000001.safetensors": lambda path: read_snapshot(path.parent, 1, {}),
    "runs.parquet": lambda path: Evidence(path.parent).rows,
    "chains.parquet": lambda path: Table(path, wrong_chain_column).by_run(),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_in_a_file_s_place_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"{name}: .*a pipe, socket or device, and no file.*; "):
        READERS[name](tmp_path / name)


def test_a_pipe_among_what_is_read_besides(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for read in (file_sha256, lambda path: steps_logged(path, 1), MetricsFile):
        with pytest.raises(OSError, match="and no file"):
            read(pipe)
    assert is_locked(pipe) is None
    os.mkfifo(tmp_path / "step-000000001.json")
    told: list[str] = []
    assert not list(verified(tmp_path, told.append))
    assert len(told) == 1


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"a\n")
    (tmp_path / "link").symlink_to("elsewhere")
    assert list(whole_lines(tmp_path / "link", "")) == [b"a"]


@pytest.mark.parametrize(
    "name", ["config.json", "page", "page.html.json", "link.html", "lost.html", "pipe.html", ".html"]
)
def test_what_takes_the_place_of_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "page.html").touch()
    (tmp_path / "link.html").symlink_to("page.html")
    (tmp_path / "lost.html").symlink_to("nowhere.html")
    os.mkfifo(tmp_path / "pipe.html")
    with pytest.raises(UserError, match=f"--html {tmp_path / name}: .*; give "):
        check_target(tmp_path / name, "--html", ".html", ".htm")


def test_a_folder_named_by_a_tilde_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell expands it where it begins a word: not in ``"runs_dir=~/x"``, nor in ``--out=~/x``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    with pytest.raises(UserError, match=r"--html ~/page\.html: would make a folder named ~; give /home/me/page\.html"):
        check_target(Path("~/page.html"), "--html", ".html")
    with pytest.raises(UserError, match=r"runs_dir=~/x: .*; give /home/me/x"):
        RunFolder.create("~/x", "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["page.html", "new.html", "new.HTM"])
def test_a_new_file_or_one_of_the_same_kind_may_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "page.html").touch()
    check_target(tmp_path / name, "--html", ".html", ".htm")


@pytest.mark.parametrize("suffix", ["", ".xz"])
@pytest.mark.parametrize(
    "content", [b"", b"\n", b"a", b"a\nb", b"\n\na\n", b"a" * 2**21 + b"\n" + b"b" * 2**20 + b"\nc\n", b"\n" * 2**20]
)
def test_lines_are_those_of_the_whole_content(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"lines{suffix}"
    path.write_bytes(lzma.compress(content, preset=0) if suffix else content)
    assert list(whole_lines(path, "")) == content.split(b"\n")[:-1]


@pytest.mark.parametrize("byte", [b"\n", b" "])
def test_a_compressed_file_that_holds_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte: bytes
) -> None:
    monkeypatch.setattr("flashpoint.files._LARGEST_MB", 2)
    path = tmp_path / "lines.xz"
    path.write_bytes(lzma.compress(byte * 2 * 10**6, preset=0))
    assert sum(1 for _ in whole_lines(path, "")) == (2 * 10**6 if byte == b"\n" else 0)
    path.write_bytes(lzma.compress(byte * (2 * 10**6 + 1), preset=0))
    with pytest.raises(UserError, match=r"lines\.xz: holds more than 2 MB; "):
        sum(1 for _ in whole_lines(path, ""))


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "sparse"])
@pytest.mark.parametrize("name", ["trainer_state.json", "run-1.wandb", "claims.yaml", "text", "config.json"])
def test_what_is_no_file_or_too_large_is_told_by_whoever_reads_files_of_others(
    tmp_path: Path, kind: str, name: str
) -> None:
    """Pipes were waited for, and of a sparse file 10 GB were read."""
    path = tmp_path / name
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case _:
            with path.open("wb") as file:
                file.truncate(10 * 2**30)
    read: dict[str, tuple[str | Path, ...]] = {
        "claims.yaml": ("claims", "--file", path),
        "text": ("diagnose", "gpt2", "--text", path),
        "config.json": ("runs", tmp_path),
    }
    assert str(tmp_path) in refusal(call(*map(str, read.get(name, ("runs", tmp_path)))))


def test_a_log_in_utf_16_is_told_how_to_be_read(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss\n1,2.0\n", encoding="utf-16")
    assert "text in UTF-16; convert it with iconv" in refusal(call("runs", str(tmp_path / "log.csv")))


def test_tensors_for_which_there_is_no_memory_are_refused(tmp_path: Path) -> None:
    told = json.dumps({"q": {"dtype": "F32", "shape": [2**28], "data_offsets": [0, 2**30]}}).encode()
    path, before = tmp_path / "layer-01.safetensors", resource.getrlimit(resource.RLIMIT_AS)
    path.write_bytes(len(told).to_bytes(8, "little") + told)
    os.truncate(path, path.stat().st_size + 2**30)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + 2**28, before[1]))
    try:
        with pytest.raises(UserError, match=r"layer-01\.safetensors: .*Cannot allocate memory"):
            AttentionCall.read(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
