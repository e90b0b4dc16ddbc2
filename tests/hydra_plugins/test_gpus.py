"""A sweep as processes: a queue over devices, runs that fail alone, clean ends, and going on with what is missing.

Where the launcher alone is at stake a stand-in of ``train.py`` runs, which costs no import of PyTorch.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import submitit
from omegaconf import DictConfig, OmegaConf

from flashpoint.errors import UserError
from hydra_plugins.flashpoint_launcher._sweep import Sweep
from hydra_plugins.flashpoint_launcher.gpus import GpusLauncher
from hydra_plugins.flashpoint_launcher.slurm import SlurmLauncher
from tests import warm
from tests.composed import composed_hardware
from tests.conftest import REPOSITORY, SOME_TEXT, TINY, Command, environment, wait_until
from tests.test_hardware import Driver

SWEEP = (
    "hydra/launcher=gpus",
    "hydra.launcher.sweep=s",
    "hydra.launcher.runs_per_gpu=2",
    "train.threads=1",
    "train.steps=4",
    "-m",
)

# Its folder, a verdict, a clean end on SIGTERM; it runs while there is a file called hold, and dies of one called die.
TRAIN = """
import json, os, signal, sys, time
from pathlib import Path

given = {key: value.strip("'") for key, value in (argument.split("=", 1) for argument in sys.argv[1:])}
folder = Path(given["resume"]) if "resume" in given else Path(given["runs_dir"], given["run_name"])
folder.mkdir(exist_ok="resume" in given)
stopped = []
if Path("die").exists():
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
with (folder / "config.json").open("a") as file:  # a line for every start
    print(json.dumps({"given": given, "environment": dict(os.environ)}), file=file, flush=True)
while Path("hold").exists() and not stopped:
    time.sleep(0.01)
texts = dict.fromkeys(("digest", "chain_digest", "weights_digest", "tape_digest", "run"), "")
numbers = dict.fromkeys(("step", "loss", "tape_steps", "seconds"), 0)
nothing = dict.fromkeys(("onset_step", "nonfinite", "val_loss", "val_step"))
ended = {"outcome": "stable", "interrupted": "SIGTERM" if stopped else None}
(folder / "partial").write_text(json.dumps({**texts, **numbers, **nothing, **ended}))
(folder / "partial").replace(folder / "outcome.json")
sys.stdout.buffer.write(b"\\xff\\noutcome=stable of " + folder.name.encode() + b"\\n")
sys.exit(128 + signal.SIGTERM if stopped else 0)
"""
# train.py, whose runs are forks of the launcher: it has imported what takes nearly all of a short run's time.
FORKING = f"""
import multiprocessing, os, runpy, signal
from types import SimpleNamespace
from hydra.core.global_hydra import GlobalHydra
from hydra_plugins.flashpoint_launcher import _processes
from tests.warm import run_as_main

class Forked:
    def __init__(self, command, *, env, stdout, **_):
        run = command[command.index("-P") + 1 :]
        self._process = multiprocessing.get_context("fork").Process(target=begin, args=(run, env, stdout.name))
        self._process.start()

    def poll(self):
        return self._process.exitcode

def begin(run, env, log):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    GlobalHydra.instance().clear()
    run_as_main(run, os.getcwd(), env, {{}}, log, log)

_processes.subprocess = SimpleNamespace(Popen=Forked, DEVNULL=None)
runpy.run_path({str(REPOSITORY / "train.py")!r}, run_name="__main__")
"""
# The launcher in a process of its own, to be killed.
LAUNCHER = """
from tests.hydra_plugins.test_gpus import launch
launch([[f"seed={seed}"] for seed in range(3)], runs_per_gpu=2)
"""


def context() -> Any:
    """Hydra's, which composes no more than the hardware."""

    def load(_: object, overrides: Sequence[str]) -> DictConfig:
        return OmegaConf.create({"hardware": composed_hardware(*overrides)})

    return SimpleNamespace(config_loader=SimpleNamespace(load_sweep_config=load))


def launch(jobs: Sequence[Sequence[str]], runs_per_gpu: int = 1, sweep: str = "s") -> None:
    """A sweep of runs of the stand-in, in the working folder."""
    sys.argv[0] = "stand_in.py"
    launcher = GpusLauncher(sweep, runs_per_gpu)
    sources = [{"provider": "main", "path": "configs"}, {"provider": "command-line", "path": "mine"}]
    own_files = {"runtime": {"config_sources": sources}, "job": {"config_name": "mine"}, "searchpath": ["a b"]}
    config = OmegaConf.create({"runs_dir": "runs", "hardware": {"gpu": None}, "hydra": own_files})
    launcher.setup(hydra_context=context(), task_function=print, config=config)
    launcher.launch(jobs, 0)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sweep's folder, below a working folder with the stand-in."""
    (tmp_path / "stand_in.py").write_text(TRAIN)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "runs/s"


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def starts(run: Path) -> list[dict[str, dict[str, str]]]:
    return [json.loads(line) for line in (run / "config.json").read_text().splitlines()]


def at_work(sweep: Path) -> str | None:
    """What another launcher is told while one, or a run that outlived it, is at work."""
    try:
        with Sweep(sweep).claimed([], []):
            return None
    except UserError as error:
        return str(error)


def interrupted(sweep: Path) -> dict[str, str | None]:
    return {path.parent.name: json.loads(path.read_text())["interrupted"] for path in sweep.glob("*/outcome.json")}


@pytest.mark.slow
def test_a_failed_run_stops_no_other_and_the_same_command_runs_what_is_missing(text_file: Path, tmp_path: Path) -> None:
    """Of the launcher's own processes ``test_runs_find_the_users_own_files`` has some that train."""
    (tmp_path / "forking.py").write_text(FORKING)
    settings = ("attn.elsewhere=flash_fp32", "attn.layers=[9],[1]", *SWEEP)  # the model has two layers
    command = [sys.executable, "forking.py", *TINY, f"data.path={text_file}", *settings]

    def sweep_once() -> "subprocess.CompletedProcess[str]":
        return warm.run(command, cwd=tmp_path, env=environment(), timeout=120)

    first = sweep_once()
    assert first.returncode == 2
    (line,) = [line for line in first.stderr.splitlines() if line.startswith("error: ")]
    assert line == (
        "error: 1 of 2 runs failed (attn.layers--9-); correct the values that were refused, and then the command with "
        "hydra.launcher.sweep=s runs what is missing"
    )
    assert "refused: attn.layers--9-: attn.layers=[9]: the model has layers 1 to 2" in first.stderr
    sweep = tmp_path / "runs/s"
    assert "Traceback" not in (sweep / ".logs/attn.layers--9-.log").read_text()
    (run,) = (path for path in sweep.iterdir() if path.name[0] != ".")  # what runs/SWEEP/* finds
    assert first.stdout.startswith("outcome=stable step=4 ")
    assert json.loads((run / "config.json").read_text())["tracking"]["group"] == "s"

    outcome = json.loads((run / "outcome.json").read_text())
    (run / "outcome.json").write_text(json.dumps({**outcome, "interrupted": "SIGINT"}))
    assert sweep_once().stdout == first.stdout
    assert interrupted(sweep) == {run.name: None}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("found_by", [("hydra.searchpath=[mine]",), ("--config-dir", "mine", "-cn", "longer")])
def test_runs_find_the_users_own_files(train: Command, tmp_path: Path, found_by: Sequence[str]) -> None:
    """They were refused, or took another configuration than the one that was named."""
    (tmp_path / "mine/attn").mkdir(parents=True)
    (tmp_path / "mine/attn/own.yaml").write_text("name: own\nbeta: 3.0\n")
    (tmp_path / "mine/longer.yaml").write_text("defaults: [train, _self_]\ntrain: {eval_sequences: 6}\n")
    (tmp_path / "words.txt").write_text(SOME_TEXT)
    given = [argument for argument in TINY if not argument.startswith("train.eval_sequences")]
    result = train(*found_by, *given, "data.path=words.txt", *SWEEP, "attn=own", tiny=False)
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("runs/s/*/config.json")
    config = json.loads(path.read_text())
    assert (config["attn"]["name"], config["attn"]["beta"]) == ("own", 3.0)
    assert config["train"]["eval_sequences"] == (6 if "-cn" in found_by else 64)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_runs_end_cleanly_with_their_launcher(stand_in: Path, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "hold").touch()
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    process = warm.Process([sys.executable, "launcher.py"], cwd=tmp_path, env=environment())
    try:
        wait_until(lambda: len(list(stand_in.glob("*/config.json"))) == 2, process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.send_signal(signal.SIGKILL)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        eventually(lambda: len(interrupted(stand_in)) == 2)
    else:
        assert process.returncode == 128 + number
        assert "the same command with hydra.launcher.sweep=s " in stderr.splitlines()[-1]
        assert stderr.count("stopped: seed-") == 2
        assert stderr.count(": outcome=stable of seed-") == 2  # how far each came, in its own words
        assert "2/2" not in stderr  # of the bar: what was stopped is not done
    assert interrupted(stand_in) == {"seed-0": "SIGTERM", "seed-1": "SIGTERM"}

    (tmp_path / "hold").unlink()
    eventually(lambda: at_work(stand_in) is None)
    launch([[f"seed={seed}"] for seed in range(3)])
    assert interrupted(stand_in) == {"seed-0": None, "seed-1": None, "seed-2": None}
    assert [set(start["given"]) for start in starts(stand_in / "seed-0")][1:] == [{"resume"}]
    assert len(starts(stand_in / "seed-2")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_a_second_launcher_of_a_sweep_is_refused_until_the_last_run_of_the_first_has_ended(
    stand_in: Path, tmp_path: Path, killed: bool
) -> None:
    """Two at once trained every run twice, the second as NAME-2, or took a run from under the other."""
    (tmp_path / "hold").touch()
    (tmp_path / "stand_in.py").write_text(TRAIN.replace("signal.SIGTERM, lambda", "signal.SIGUSR1, lambda"))
    (tmp_path / "deaf.py").write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + LAUNCHER)
    process = warm.Process([sys.executable, "deaf.py"], cwd=tmp_path, env=environment())
    try:
        wait_until(lambda: len(list(stand_in.glob("*/config.json"))) == 2, process)
        if killed:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=120)
        told = at_work(stand_in) or ""
        assert told.startswith(f"{stand_in}: another launcher, or a run of one that was killed, is at work")
        (tmp_path / "hold").unlink()
        eventually(lambda: at_work(stand_in) is None)
    finally:
        process.send_signal(signal.SIGKILL)
    assert sorted(path.name for path in stand_in.glob("[!.]*")) == [
        f"seed-{seed}" for seed in range(2 if killed else 3)
    ]


def test_every_run_ends_completed_or_failed(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stand_in / ".logs/seed-0.log").mkdir(parents=True)  # where its log would be
    with pytest.raises(UserError, match=r"1 of 2 runs failed \(seed-0\)"):
        launch([["seed=0"], ["seed=1"]])
    out, err = capsys.readouterr()
    assert "failed: seed-0: [Errno 21] Is a directory" in err
    assert "outcome=stable of seed-1" in out
    Path("die").touch()
    with pytest.raises(UserError, match=r"1 of 2 runs failed \(seed-2\)"):
        launch([["seed=1"], ["seed=2"]])
    assert f"failed: seed-2: ended by SIGKILL ({Path('runs/s/.logs/seed-2.log')})" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"runs_per_gpu=0: give 1 or more"):
        launch([["seed=0"]], runs_per_gpu=0)


def test_runs_killed_as_they_began_keep_their_names(stand_in: Path) -> None:
    stand_in.mkdir(parents=True)
    (stand_in / ".sweep.json").write_text('{"shared": []}')
    for folder, file in {"seed-0": ".lock", "seed-1": "config.json"}.items():
        (stand_in / folder).mkdir(parents=True)
        (stand_in / folder / file).touch()
    launch([["seed=0"], ["seed=1"]])
    new, resumed = (starts(stand_in / f"seed-{seed}")[0]["given"] for seed in range(2))
    assert "run_name" in new
    assert "resume" in resumed
    assert new["--config-dir"] == new["--config-name"] == "mine"  # the user's own YAML files
    assert new["hydra.searchpath"] == "['a b']"


def test_a_sweep_goes_on_only_with_the_settings_that_it_began_with(
    stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Sweep(stand_in).claimed(["train.steps=-4"], []):  # of which every run was refused
        pass
    launch([["seed=0", "train.steps=4"], ["seed=1", "train.steps=4"]])
    launch([[f"seed={seed}", "train.steps=4"] for seed in range(3)])  # more runs of the same
    assert capsys.readouterr().out.count("done before: runs/s/seed-") == 2
    assert [len(starts(stand_in / f"seed-{seed}")) for seed in range(3)] == [1, 1, 1]
    with pytest.raises(UserError, match=r"runs/s: .*then: train\.steps=4; now: train\.steps=8"):
        launch([["seed=0", "train.steps=8"], ["seed=3", "train.steps=8"]])
    assert sorted(interrupted(stand_in)) == ["seed-0", "seed-1", "seed-2"]


@pytest.mark.slow
def test_a_run_of_other_settings_under_the_same_name_is_not_taken_for_this_one(stand_in: Path) -> None:
    """Of a text in a/b the run of a text a-b was "done before"."""
    launch([["data.path=a-b"], ["data.path=c"]])
    with pytest.raises(UserError, match=r"data\.path-a-b: begun with other settings \(then: .*=a-b; now: .*=a/b\); "):
        launch([["data.path=a/b"], ["data.path=c"]])
    launch([["data.path=c"], ["data.path=d"]])
    launch([["data.path=d"], ["data.path=a-b"]])
    assert [len(starts(run)) for run in stand_in.glob("data*")] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_names_hold_what_differs_and_tell_runs_apart() -> None:
    jobs = [["experiment=ignite", "attn=flash_bf16", "seed=0"], ["experiment=ignite", "attn=flash_fp32", "seed=0"]]
    assert names_of("names", jobs) == ["flash_bf16", "flash_fp32"]
    assert names_of("one", [["seed=0"]]) == ["run"]
    assert names_of("signs", [["train.lr=1e-3"], ["train.lr=1e+3"]]) == ["train.lr-1e-3", "train.lr-1e+3"]
    for sweep, values in {"alike": ["a/b", "a-b"], "long": ["a" * 300 + "b", "a" * 300 + "c"]}.items():
        names = names_of(sweep, [[f"data.path={value}"] for value in values])
        assert len(set(names)) == 2
        assert max(map(len, names)) < 200  # bytes of a file's name: 255
        assert names[::-1] == names_of(f"{sweep}, reversed", [[f"data.path={value}"] for value in reversed(values)])
    with pytest.raises(UserError, match="seed=0: more than once"):
        launch([["attn=a", "seed=0"], ["attn=a", "seed=0"], ["attn=a", "seed=1"]])


def names_of(sweep: str, job_overrides: Sequence[Sequence[str]]) -> list[str]:
    """Folders that a sweep makes, in the order of its runs."""
    launch(job_overrides, sweep=sweep)
    folders = [path for path in Path("runs", sweep).iterdir() if path.name[0] != "."]
    given = {tuple(_own(starts(folder)[0]["given"])): folder.name for folder in folders}
    return [given[tuple(overrides)] for overrides in job_overrides]


def _own(given: dict[str, str]) -> list[str]:
    """Without what the launcher adds."""
    added = (
        "--config-dir",
        "--config-name",
        "hydra.searchpath",
        "tracking.group",
        "train.threads",
        "runs_dir",
        "run_name",
    )
    return [f"{key}={value}" for key, value in given.items() if key not in added]


def test_runs_take_one_gpu_after_the_other(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5,-1")
    launch([["seed=0", "train.device=auto"], ["seed=1"], ["seed=2"], ["seed=3"]], runs_per_gpu=2)
    (first,), (second,), (third,), _ = (starts(stand_in / run) for run in sorted(interrupted(stand_in)))
    assert [run["environment"]["CUDA_VISIBLE_DEVICES"] for run in (second, third)] == ["5", "3"]
    assert first["given"]["train.device"] == "auto"  # the user's choice
    assert second["given"]["train.device"] == "cuda"  # or a run without its GPU would take the CPU
    assert "train.threads" not in second["given"]
    assert second["environment"]["TORCHINDUCTOR_COMPILE_THREADS"] == "4"


@pytest.mark.slow
def test_runs_wait_for_the_gpu_that_they_are_to_have(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")  # an H200 and an A100
    launch([["hardware=h200", "seed=0"], ["hardware=h200", "seed=1"], ["hardware=a100", "seed=0"]])
    (first,), (second,), (third,) = (starts(stand_in / run) for run in sorted(interrupted(stand_in)))
    assert first["given"]["hardware"] == "a100"
    assert [run["environment"]["CUDA_VISIBLE_DEVICES"] for run in (first, second, third)] == ["5", "3", "3"]
    for wanted in ("hardware=b200", "++hardware.gpu=B200"):
        with pytest.raises(UserError, match=r"hardware\.gpu=B200: here is NVIDIA A100-SXM4-80GB, NVIDIA H200; leave"):
            launch([["hardware=h200"], [wanted]], sweep="elsewhere")
    assert not (stand_in.parent / "elsewhere").exists()


def test_a_sweep_over_hardware_is_an_array_for_each(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_SWEEP", "sweep_then")
    submitted: list[dict[str, Any]] = []

    class Executor:
        def __init__(self, **_: object) -> None: ...

        def update_parameters(self, **parameters: object) -> None:
            submitted.append(parameters)

        def map_array(self, _: object, *arguments: Sequence[Any]) -> list[SimpleNamespace]:
            return [SimpleNamespace(results=lambda own=own: [own]) for own in arguments[0]]

    monkeypatch.setattr(submitit, "AutoExecutor", Executor)
    launcher: Any = SlurmLauncher(submitit_folder="logs", gpus_per_node=1, partition="long")
    config = OmegaConf.create({"hardware": {"gres": None}, "hydra": {"sweep": {"dir": str(stand_in / "sweep")}}})
    launcher.setup(hydra_context=context(), task_function=print, config=config)
    jobs = [["hardware=h200", "seed=0"], ["hardware=a100", "seed=0"], ["hardware=h200", "seed=1"]]
    assert launcher.launch(jobs, 0) == jobs
    asked = {parameters["slurm_gres"]: parameters for parameters in submitted}
    assert sorted(asked) == ["gpu:a100:1", "gpu:h200:1"]
    assert all(one["gpus_per_node"] is None and one["slurm_partition"] == "long" for one in submitted)


@pytest.mark.parametrize(
    ("override", "threads"), [("seed=1", "4"), ("train.threads=3", "3"), ("replay=runs/original", None)]
)
def test_runs_share_the_cores_without_a_gpu(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, override: str, threads: str | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    launch([[override]], runs_per_gpu=4)
    (start,) = starts(stand_in / "run")
    assert start["given"].get("train.threads") == threads
    assert "train.device" not in start["given"]
