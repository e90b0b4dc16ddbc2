"""Preparation gives the same bytes however it came about, and never something half written."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from flashpoint.lab.data import prepare as preparation
from flashpoint.lab.data.prepare import prepare
from flashpoint.lab.data.shards import Job
from flashpoint.lab.data.tokenizer import Tokenizer, train_bpe
from flashpoint.lab.data.tokens import TokenDataset, open_tokens
from tests.conftest import environment
from tests.lab.data.texts import DOCUMENTS, assert_refused, bytes_of, config, decoded, write_jsonl


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "text")


def test_tokens_decode_to_the_documents_in_order(jsonl: Path, tmp_path: Path) -> None:
    dataset = prepare(config(jsonl, tmp_path / "data"))
    assert decoded(dataset) == DOCUMENTS
    assert len(dataset.val) == round(0.1 * (len(dataset.train) + len(dataset.val)))


def test_text_that_changes_while_it_is_prepared_is_refused(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens were a mixture that no text gives again, under the name of the old one."""
    settings, join = config(jsonl, tmp_path / "data"), preparation._join

    def grown(*given: Any) -> Any:
        with (jsonl / "0.jsonl").open("a") as file:
            file.write('{"text": "more"}\n')
        return join(*given)

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_join", grown)
        assert_refused(settings, f"data.path={jsonl}: changed while it was prepared; run again")
    assert [path.suffix for path in (tmp_path / "data").iterdir()] == [".lock"]
    assert prepare(settings).description()["documents"] == 301


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_preparing_again_gives_the_same_bytes_with_any_number_of_workers(
    jsonl: Path, tmp_path: Path, workers: int
) -> None:
    first = prepare(config(jsonl, tmp_path / "a"))
    again = prepare(config(jsonl, tmp_path / "b", workers=workers))
    assert bytes_of(first.path) == bytes_of(again.path)


def test_prepared_data_are_not_prepared_again(jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(config(jsonl, tmp_path / "data"))
    monkeypatch.setattr(preparation, "source_shards", lambda _: pytest.fail("read the source again"))
    assert prepare(config(jsonl, tmp_path / "data")).fingerprint == first.fingerprint


def test_a_changed_file_is_a_new_preparation(jsonl: Path, tmp_path: Path) -> None:
    first = prepare(config(jsonl, tmp_path / "data"))
    (jsonl / "0.jsonl").write_text(json.dumps({"text": "something else " * 50}) + "\n")
    second = prepare(config(jsonl, tmp_path / "data"))
    assert first.path != second.path
    assert open_tokens(first.path).fingerprint == first.fingerprint


@pytest.mark.parametrize("stage", ["second shard", "tokenizer", "joining", "sidecar"])
def test_an_interrupted_preparation_is_not_trusted_and_ends_the_same(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    whole = prepare(config(jsonl, tmp_path / "whole"))

    class PowerLoss(BaseException):
        pass

    with monkeypatch.context() as patch:
        if stage == "second shard":
            run, calls = Job.run, []

            def second_fails(job: Job, tokenizer: Tokenizer) -> dict:
                calls.append(job)
                if len(calls) == 2:
                    raise PowerLoss
                return run(job, tokenizer)

            patch.setattr(Job, "run", second_fails)
        else:
            written = {"tokenizer": "tokenizer.json.record", "joining": "train.bin", "sidecar": "meta.json"}[stage]
            fail_at_writing(written, PowerLoss, patch)
        with pytest.raises(PowerLoss):
            prepare(config(jsonl, tmp_path / "broken"))
    assert not [path for path in (tmp_path / "broken").iterdir() if not path.name.startswith(".")]
    assert bytes_of(prepare(config(jsonl, tmp_path / "broken")).path) == bytes_of(whole.path)


def fail_at_writing(name: str, error: type[BaseException], patch: pytest.MonkeyPatch) -> None:
    """From here on ``error`` comes as a file is opened to be written, that of this name or what is to be renamed."""
    opened = Path.open

    def open_or_fail(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if name in path.name and "w" in mode:
            raise error
        return opened(path, mode, *arguments, **options)

    patch.setattr(Path, "open", open_or_fail)


def interrupted_before_joining(jsonl: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that an interruption leaves when all shards are finished."""
    with monkeypatch.context() as patch:
        fail_at_writing("train.bin", KeyboardInterrupt, patch)
        with pytest.raises(KeyboardInterrupt):
            prepare(config(jsonl, root))
    (partial,) = root.glob(".*.partial")
    return partial


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the shards that are tokenised from here on."""
    run, numbers = Job.run, []

    def counted(job: Job, tokenizer: Tokenizer) -> dict:
        numbers.append(job.number)
        return run(job, tokenizer)

    monkeypatch.setattr(Job, "run", counted)
    return numbers


def test_finished_shards_are_kept_and_damaged_ones_are_not(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenized: list[int]
) -> None:
    whole = prepare(config(jsonl, tmp_path / "whole"))
    partial = interrupted_before_joining(jsonl, tmp_path / "broken", monkeypatch)
    (damaged,) = partial.glob("shard-000001-*.bin")
    damaged.write_bytes(damaged.read_bytes()[:-2])
    (record,) = partial.glob("shard-000002-*.json")
    record.write_text("{")
    tokenized.clear()
    assert bytes_of(prepare(config(jsonl, tmp_path / "broken")).path) == bytes_of(whole.path)
    assert tokenized == [1, 2]


@pytest.mark.parametrize("damage", ["empty", "of other text"])
def test_a_tokenizer_that_is_not_this_corpus_s_is_trained_again(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    whole = prepare(config(jsonl, tmp_path / "whole"))
    partial = interrupted_before_joining(jsonl, tmp_path / "broken", monkeypatch)
    if damage == "empty":
        (partial / "tokenizer.json").write_text("")
    else:
        train_bpe(["xyz " * 100], 300, partial / "tokenizer.json")
    assert bytes_of(prepare(config(jsonl, tmp_path / "broken")).path) == bytes_of(whole.path)


def test_leftovers_of_a_killed_process_never_reach_the_prepared_folder(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = interrupted_before_joining(jsonl, tmp_path / "data", monkeypatch)
    for name in (".shard-000000.json.partial", ".shard-000001-abc.bin.123", "shard-000099-abc.bin", "other"):
        (partial / name).write_text("half")
    dataset = prepare(config(jsonl, tmp_path / "data"))
    assert {path.name for path in dataset.path.iterdir()} == {"meta.json", "tokenizer.json", "train.bin", "val.bin"}
    assert not list((tmp_path / "data").glob(".*.partial"))


SCRIPT = (
    "import sys; from pathlib import Path; from flashpoint.lab.config import DataConfig;"
    "from flashpoint.lab.data.prepare import prepare;"
    "print(prepare(DataConfig(source='text', path=sys.argv[1], root=sys.argv[2], vocab_size=300, val_fraction=0.1,"
    "workers=int(sys.argv[3]))).fingerprint)"
)


def preparing(jsonl: Path, root: Path, workers: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(jsonl), str(root), str(workers)]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve files that take a second or so, so that there is a middle to be killed in."""
    folder = tmp_path_factory.mktemp("large")
    for part in range(12):
        (folder / f"{part:02}.txt").write_text("".join(f"{part * n % 9973} {DOCUMENTS[n % 300]}" for n in range(700)))
    return folder


@pytest.fixture(scope="module")
def whole(large: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """``large``, prepared without an interruption."""
    return prepare(config(large, tmp_path_factory.mktemp("whole")))


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [pid for pid in map(int, children) if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the workers in /proc")
@pytest.mark.parametrize(("pattern", "workers"), [("tokenizer.json", 1), ("shard-*.bin", 2), ("train.bin", 1)])
def test_killed_in_the_middle_the_next_preparation_ends_the_same(
    large: Path, whole: TokenDataset, tmp_path: Path, pattern: str, workers: int
) -> None:
    root = tmp_path / "killed"
    process = preparing(large, root, workers)
    wait_until(lambda: list(root.glob(f".*.partial/{pattern}")))
    orphans = workers_of(process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not [path for path in root.iterdir() if not path.name.startswith(".")]
    assert bytes_of(prepare(config(large, root)).path) == bytes_of(whole.path)
    wait_until(lambda: not any(map(is_running, orphans)))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the workers in /proc")
def test_a_killed_worker_ends_the_preparation_in_one_line(large: Path, tmp_path: Path) -> None:
    process = preparing(large, tmp_path / "data", workers=2)
    wait_until(lambda: workers_of(process))
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    last = stderr.splitlines()[-1]
    assert process.returncode == 1
    assert last.startswith("flashpoint.errors.UserError: data.workers=2: a tokenising process died")


def test_a_worker_killed_while_the_next_one_starts_ends_the_preparation_in_one_line(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = SpawnProcess.start, []

    def start_after_a_death(process: SpawnProcess) -> None:
        if started:
            started[0].kill()
            started[0].join()
            time.sleep(0.5)  # for the pool to notice
        start(process)
        started.append(process)

    monkeypatch.setattr(SpawnProcess, "start", start_after_a_death)
    assert_refused(config(jsonl, tmp_path / "data", workers=2), "data.workers=2", "a tokenising process died")


@pytest.mark.parametrize(
    "error", [ValueError("bad value(s) in fds_to_keep"), OSError("handle is closed"), BrokenPipeError(errno.EPIPE, "")]
)
def test_pipes_that_a_dead_worker_closed_under_the_next_one_end_the_preparation_in_one_line(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def start(_process: SpawnProcess) -> None:
        raise error

    monkeypatch.setattr(SpawnProcess, "start", start)
    assert_refused(config(jsonl, tmp_path / "data", workers=2), "data.workers=2", "a tokenising process died")


def test_a_refused_process_is_told_as_the_system_tells_it(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_process: SpawnProcess) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(SpawnProcess, "start", start)
    assert_refused(config(jsonl, tmp_path / "data", workers=2), "Resource temporarily unavailable")


@pytest.mark.slow
def test_two_processes_prepare_the_same_data_once(large: Path, whole: TokenDataset, tmp_path: Path) -> None:
    processes = [preparing(large, tmp_path / "data") for _ in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert results[0][0] == results[1][0] == f"{whole.fingerprint}\n"
    assert sum("tokenising" in stderr for _, stderr in results) == 1  # the other one waited


@pytest.mark.slow
def test_a_full_disk_is_told_in_one_line(large: Path, whole: TokenDataset, tmp_path: Path) -> None:
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); {SCRIPT}"
    command = [sys.executable, "-c", limited, str(large), str(tmp_path / "data"), "1"]
    process = subprocess.run(command, env=environment(), capture_output=True, text=True)
    last = process.stderr.splitlines()[-1]
    assert last.startswith("flashpoint.errors.UserError: ")
    assert str(tmp_path / "data") in last
    assert last.endswith("free space or choose another data.root")
    assert bytes_of(prepare(config(large, tmp_path / "data")).path) == bytes_of(whole.path)


def test_an_unwritable_root_is_refused(jsonl: Path) -> None:
    assert_refused(config(jsonl, Path("/proc/data")), "/proc/data", "choose a data.root that can be written")


def test_a_root_that_cannot_be_looked_into_is_refused(jsonl: Path) -> None:
    """The system refuses to look, here for the name's length, as it does in the home of another user."""
    assert_refused(config(jsonl, Path(300 * "a")), ": File name too long; choose a data.root that can be written")
