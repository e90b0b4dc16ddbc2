"""``scripts/evidence/pending.py``: jobs on GPUs of their own, as far as the time goes, and on from there."""

import errno
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from flashpoint.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts/evidence"))

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


def test_what_is_packed_is_what_jobs_have_written_without_weights(tmp_path: Path) -> None:
    run, again = "mkdir -p runs/$NAME/run/checkpoints runs/$NAME/captures", "mkdir runs/$NAME-again"
    files = "touch runs/$NAME/run/{outcome.json,step-1.pt} runs/$NAME/{run/checkpoints,captures}/a runs/$NAME-again/b"
    assert pending.run([job("one", run, again, files), job("two", "echo b")], gpus=2, seconds=60) == []
    pending.pack([job("one"), job("three")], tmp_path / "packed.tar.xz")
    with tarfile.open(tmp_path / "packed.tar.xz") as packed:
        names = {one.name for one in packed if one.isfile()}
    assert names == {"runs/.pending/one.log", "runs/one/run/outcome.json", "runs/one-again/b"}


def test_commands_are_those_of_this_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert pending.run([job("one", "python -c 'import sys; print(sys.prefix)'")], gpus=1, seconds=60) == []
    assert printed("one") == [sys.prefix]


def test_gpus_are_of_those_that_the_caller_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    show = "echo $CUDA_VISIBLE_DEVICES"
    assert pending.run([job("one", show), job("both", show, gpus=2)], gpus=2, seconds=60) == []
    assert printed("one") in (["3"], ["GPU-5"])
    assert sorted(printed("both")[0].split(",")) == ["3", "GPU-5"]


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_job_that_waits_for_gpus_is_not_overtaken(gpus: int) -> None:
    waiting = [job("waits", "x", gpus=gpus), job("later", "x")]
    assert pending.startable(waiting, 1, [job("first", "x")], 60) is None
    assert pending.startable(waiting, 2, [], 60) is waiting[0]


def test_no_job_runs_beside_one_that_takes_no_gpu() -> None:
    assert pending.startable([job("later", "x")], 1, [job("none", "x", gpus=0)], 60) is None


def test_a_command_that_has_changed_is_run_again_and_so_are_those_after_it() -> None:
    assert pending.run([job("one", "echo a", "echo b")], gpus=1, seconds=60) == []
    assert pending.run([job("one", "echo a", "echo c", "echo b")], gpus=1, seconds=60) == []
    assert printed("one") == ["a", "b", "c", "b"]


def test_a_damaged_record_of_what_has_ended_is_told_in_one_line() -> None:
    one = job("one", "true")
    for damaged in ("garbled", "{}", '{"ended well": 1}'):
        Path("runs/.pending").mkdir(parents=True, exist_ok=True)
        Path("runs/.pending/one.json").write_text(damaged)
        with pytest.raises(UserError, match=r"one\.json: damaged; delete it, and one begins anew$"):
            one.done()


def test_what_a_command_leaves_behind_leaves_the_gpu() -> None:
    assert pending.run([job("one", "sleep 600 & echo $!")], gpus=1, seconds=60) == []
    stat = Path(f"/proc/{printed('one')[0]}/stat")
    until = time.monotonic() + 60
    while stat.exists() and stat.read_text().split(")")[1].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


def test_an_error_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that was full when progress was written left the other jobs on their GPUs."""

    def full(_path: Path, _value: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pending, "write_json", full)
    jobs = [job("endless", "echo $$; touch begun; sleep 600"), job("short", "until [ -f begun ]; do sleep 0.05; done")]
    with pytest.raises(OSError, match="No space left"):
        pending.run(jobs, gpus=2, seconds=60)
    with pytest.raises(ProcessLookupError):
        os.killpg(int(printed("endless")[0]), 0)


def test_a_second_call_is_refused_and_so_is_one_beside_a_job_that_outlived_the_first() -> None:
    process = endless()
    with pytest.raises(UserError, match="at work"):
        pending.run([job("other", "echo no")], gpus=1, seconds=60)
    process.kill()
    process.communicate()
    with pytest.raises(UserError, match="at work"):
        pending.run([job("other", "echo no")], gpus=1, seconds=60)
    os.killpg(int(printed("endless")[0]), signal.SIGKILL)
    assert not Path("runs/.pending/other.log").exists()


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
    count = "trap 'echo $n >left; exit 1' TERM; n=$(cat left || echo 0); until [ $n = 20 ]; do sleep 0.1; ((++n)); done"
    jobs = [job("counts", count, "cat left", minutes=60, resumes=True), job("whole", "echo no", minutes=60)]
    assert pending.run(jobs, gpus=2, seconds=1) == []
    assert 0 < int(Path("left").read_text()) < 20
    assert not Path("runs/.pending/whole.log").exists()
    assert pending.run(jobs[:1], gpus=2, seconds=60) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_call_leaves_no_process_behind(number: signal.Signals) -> None:
    process = endless()
    process.send_signal(number)
    assert process.communicate(timeout=120)[0].splitlines() == ["begun: endless", "stopped: endless"]
    assert process.returncode == 128 + number
    with pytest.raises(ProcessLookupError):
        os.killpg(int(printed("endless")[0]), 0)


def endless() -> subprocess.Popen[str]:
    """Return a call whose one job has begun and does not end; its log has the number of its process group."""
    Path("jobs.yaml").write_text(
        "[{name: endless, shows: a test, gpus: 0, minutes: 0.1, commands: ['echo $$; sleep 600 & wait']}]"
    )
    command = [sys.executable, str(REPOSITORY / "scripts/evidence/pending.py"), "--jobs", "jobs.yaml"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    log, until = Path("runs/.pending/endless.log"), time.monotonic() + 120
    while not (log.exists() and printed("endless")):
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("[{name: a b, shows: x, gpus: 1, minutes: 1, commands: [x]}]", [], "name"),
        ("[{name: a, shows: x, gpus: 1, minutes: 1, commands: []}]", [], "commands"),
        ("[{name: a, shows: x, gpus: 1, minutes: 1, commands: [x], more: 1}]", [], "more"),
        (
            f"[{', '.join(['{name: a, shows: x, gpus: 0, minutes: 1, commands: [x]}'] * 2)}]",
            [],
            "2 jobs have this name",
        ),
        ("[{name: a, shows: x, gpus: 99, minutes: 1, commands: [x]}]", [], "99 GPUs"),
        ("[{name: a, shows: x, gpus: 0, minutes: 1, commands: [x]}]", ["b"], "b: no such job"),
        ("[]", ["--minutes", "nan"], "--minutes nan: give more than 0"),
        ("[]", ["--minutes", "-1"], "--minutes -1: give more than 0"),
    ],
)
def test_bad_input_is_told_and_nothing_is_begun(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    arguments: list[str],
    said: str,
) -> None:
    Path("jobs.yaml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["pending.py", "--jobs", "jobs.yaml", *arguments])
    with pytest.raises(SystemExit) as ended:
        pending.main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert said in told
    assert not list(Path("runs").glob("**/*.log"))


def test_jobs_run_in_the_order_in_which_they_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("jobs.yaml").write_text(
        "\n".join(f"- {{name: {name}, shows: x, gpus: 0, minutes: 1, commands: ['true']}}" for name in "abc")
    )
    monkeypatch.setattr(sys, "argv", ["pending.py", "--jobs", "jobs.yaml", "c", "a"])
    pending.main()
    assert [line for line in capsys.readouterr().out.splitlines() if "begun" in line] == ["begun: c", "begun: a"]


def test_the_commands_that_are_checked_in_are_bash() -> None:
    for one in pending.read(pending.LIST):
        for command in one.commands:
            subprocess.run(["bash", "-n", "-c", command], check=True)
