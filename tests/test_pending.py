"""``scripts/pending.py``: jobs on GPUs of their own, as far as the time goes, and on from there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import pending  # noqa: E402


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def job(name: str, *commands: str, gpus: int = 1, minutes: float = 0.01, resumes: bool = False) -> pending.Job:
    return pending.Job(name, "a test", gpus, minutes, list(commands), resumes)


def printed(name: str) -> list[str]:
    """Return what the commands of a job have printed."""
    return [line for line in Path(f"runs/.pending/{name}.log").read_text().splitlines() if not line.startswith("$ ")]


def test_jobs_run_beside_each_other_on_gpus_of_their_own() -> None:
    wait = "echo $CUDA_VISIBLE_DEVICES; touch $NAME; until [ -f one ] && [ -f two ]; do sleep 0.05; done"
    jobs = [job("one", wait), job("two", wait), job("both", "echo $CUDA_VISIBLE_DEVICES", gpus=2)]
    assert pending.run(jobs, gpus=2, seconds=60) == []
    assert sorted(printed("one") + printed("two")) == ["0", "1"]
    assert sorted(printed("both")[0].split(",")) == ["0", "1"]


def test_the_next_call_begins_with_the_command_that_failed() -> None:
    jobs = [job("first", "echo once", "[ -f mended ]; echo then"), job("second", "echo beside it")]
    assert pending.run(jobs, gpus=1, seconds=60) == ["first"]
    assert printed("second") == ["beside it"]
    Path("mended").touch()
    assert pending.run(jobs, gpus=1, seconds=60) == []
    assert printed("first") == ["once", "then"]
    assert pending.run(jobs, gpus=1, seconds=60) == []
    assert printed("first") == ["once", "then"]


def test_what_goes_beyond_the_time_is_ended_and_goes_on_if_it_resumes() -> None:
    count = "trap 'echo $n >left; exit 1' TERM; n=$(cat left || echo 0); until [ $n = 8 ]; do sleep 0.1; ((++n)); done"
    jobs = [job("counts", count, "cat left", minutes=60, resumes=True), job("whole", "echo no", minutes=60)]
    assert pending.run(jobs, gpus=2, seconds=0.5) == []
    assert 0 < int(Path("left").read_text()) < 8
    assert not Path("runs/.pending/whole.log").exists()
    assert pending.run(jobs[:1], gpus=2, seconds=60) == []


def test_an_interrupted_call_leaves_no_process_behind() -> None:
    Path("jobs.yaml").write_text(
        "[{name: endless, shows: a test, gpus: 0, minutes: 0.1, commands: ['echo $$; sleep 600 & wait']}]"
    )
    command = [sys.executable, str(REPOSITORY / "scripts/pending.py"), "--jobs", "jobs.yaml"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    log, until = Path("runs/.pending/endless.log"), time.monotonic() + 60
    while not (log.exists() and printed("endless")):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0].splitlines() == ["begun: endless", "stopped: endless"]
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.killpg(int(printed("endless")[0]), 0)


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("[{name: a b, shows: x, gpus: 1, minutes: 1, commands: [x]}]", [], "name"),
        ("[{name: a, shows: x, gpus: 1, minutes: 1, commands: []}]", [], "commands"),
        ("[{name: a, shows: x, gpus: 1, minutes: 1, commands: [x], more: 1}]", [], "more"),
        ("[{name: a, shows: x, gpus: 99, minutes: 1, commands: [x]}]", [], "99 GPUs"),
        ("[{name: a, shows: x, gpus: 0, minutes: 1, commands: [x]}]", ["b"], "b: no such job"),
    ],
)
def test_bad_input_is_told_and_nothing_is_begun(text: str, arguments: list[str], said: str) -> None:
    Path("jobs.yaml").write_text(text)
    command = [sys.executable, str(REPOSITORY / "scripts/pending.py"), "--jobs", "jobs.yaml", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert not list(Path("runs").glob("**/*.log"))


def test_the_list_that_is_checked_in_can_be_read() -> None:
    jobs = pending.read(pending.LIST)
    assert len({one.name for one in jobs}) == len(jobs)
