"""The loop in this process: what it logs, where it begins and what it ends with."""

import dataclasses
import errno
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint.errors import UserError
from flashpoint.lab.build_config import build_config
from flashpoint.lab.cli.endings import tell_of_run
from flashpoint.lab.config import Config
from flashpoint.lab.replay import replayed_values
from flashpoint.lab.training import plan, run_description, trainer
from flashpoint.lab.training.checkpoints import Checkpoint
from flashpoint.lab.training.execution import run
from flashpoint.lab.training.snapshots import snapshot_steps
from flashpoint.lab.training.step import OptimizerStep
from flashpoint.listeners import Listener, Metrics
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.outcome import Outcome
from flashpoint.runs.subfolders import by_step
from tests.composed import CONFIGS, configured, configured_values
from tests.conftest import TINY
from tests.verdicts import metrics_of


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests' runs have their data, prepared by the first of them."""
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(autouse=True)
def own_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "fix_numerics", lambda *_: None)  # which outlasts the test


class Runs:
    """Runs of the tiny model in a folder."""

    def __init__(self, text_file: Path, data: Path, folder: Path) -> None:
        self._own = (f"data.path={text_file}", f"data.root={data}", f"runs_dir={folder}")
        self.folder = folder

    def config(self, *overrides: str) -> Config:
        return configured(*TINY, *self._own, *overrides)

    def train(self, *overrides: str, listeners: Sequence[Listener] = ()) -> Outcome:
        return run(self.config(*overrides), listeners)


@pytest.fixture
def runs(text_file: Path, prepared: Path, tmp_path: Path) -> Runs:
    return Runs(text_file, prepared, tmp_path / "runs")


class Silent:
    """Hears of a run, and does nothing."""

    name = "silence"

    def begun(self, folder: RunFolder, first_step: int) -> None: ...

    def logged(self, step: int, metrics: Metrics) -> None: ...

    def ended(self, folder: RunFolder, outcome: Outcome) -> None: ...

    def failed(self, folder: RunFolder) -> None: ...


class Clock:
    """Stands still but for what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now, self._monkeypatch = 0.0, monkeypatch
        monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: self._now))

    def takes(self, owner: object, name: str, seconds: float) -> None:
        """Every call takes so long."""
        function = getattr(owner, name)

        def slow(*arguments: Any) -> Any:
            self._now += seconds
            return function(*arguments)

        self._monkeypatch.setattr(owner, name, slow)


@pytest.mark.slow
def test_the_rate_is_that_of_the_steps_wherever_a_validation_falls(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation between two readings made the steps before it count without their time."""
    clock = Clock(monkeypatch)
    clock.takes(OptimizerStep, "__call__", 1.0)
    clock.takes(trainer, "validation_loss", 1000.0)
    runs.train("run_name=timed", "train.log_interval=5", "train.eval_interval=3")
    rates = [line["tokens_per_second"] for line in metrics_of(runs.folder / "timed") if "tokens_per_second" in line]
    assert rates == [4 * 16] * 3  # of four sequences of 16 tokens a step, read after steps 5, 10 and 12


def test_too_few_tokens_to_validate_on_are_refused_before_there_is_a_folder(runs: Runs) -> None:
    """The validation loss was NaN, without a word."""
    told = r"data\.val_fraction=0\.001: \d+ validation tokens hold no sequence of model\.context=64; raise"
    with pytest.raises(UserError, match=told):
        runs.train("data.val_fraction=0.001", "model.context=64")
    assert not runs.folder.exists()


def test_a_branch_lets_go_of_its_checkpoint(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It held the whole of it in host memory to its end."""
    load, loaded, alive = Checkpoint.load_tensors, list[weakref.ref[Tensor]](), list[int]()

    def noted(checkpoint: Checkpoint, *arguments: Any) -> dict[str, Tensor]:
        tensors = load(checkpoint, *arguments)
        # What the model has already it copies; the optimiser of a CPU takes the others as its own.
        loaded.extend(weakref.ref(tensor) for name, tensor in tensors.items() if name.startswith("model/"))
        return tensors

    class Looks(Silent):
        def logged(self, step: int, metrics: Metrics) -> None:
            alive.append(sum(one() is not None for one in loaded))

    runs.train("run_name=original", "checkpoints.interval=6")
    monkeypatch.setattr(Checkpoint, "load_tensors", noted)
    runs.train(f"replay={runs.folder / 'original'}", "from_step=6", listeners=[Looks()])
    assert loaded
    assert alive
    assert not any(alive)


DIVERGES = (
    "train.lr=3", "train.steps=200", "train.grad_clip=0", "detector.window=3", "detector.hold_steps=3",
    "detector.tail_steps=6", "detector.margin=0.5",
)  # fmt: skip
TURNS_NAN = ("train.lr=1e18", "train.grad_clip=0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verdict", "overrides"),
    [("stable", ()), ("exploded", DIVERGES), ("nonfinite", TURNS_NAN)],
)
def test_killed_after_its_last_checkpoint_a_run_ends_as_it_would_have(
    runs: Runs, verdict: str, overrides: Sequence[str]
) -> None:
    """A stable run had no validation loss, and then two in its metrics. One that had exploded went on for another
    reading. One with a NaN did not say any more where it came from.
    """
    settings = ("train.log_interval=6", "checkpoints.interval=6", *overrides)
    whole = runs.train("run_name=killed", *settings)
    assert whole.step % 6 == 0
    assert whole.outcome == verdict
    assert (whole.nonfinite is not None) == (verdict == "nonfinite")
    metrics = metrics_of(runs.folder / "killed")
    (runs.folder / "killed/outcome.json").unlink()
    resumed = runs.train(f"resume={runs.folder / 'killed'}", *settings)
    assert dataclasses.replace(resumed, seconds=whole.seconds).to_dict() == whole.to_dict()
    assert metrics_of(runs.folder / "killed") == metrics


@pytest.mark.slow
def test_a_run_whose_tape_is_damaged_goes_on_from_where_it_is_whole(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused, and had lost its verdict by then."""
    settings = ("train.decay_steps=18", "checkpoints.interval=6")
    whole = runs.train("run_name=whole", "train.steps=18", *settings)
    runs.train("run_name=longer", *settings)
    tape = runs.folder / "longer/tape.bin"
    tape.write_bytes(tape.read_bytes()[:-1])
    longer = runs.train(f"resume={runs.folder / 'longer'}", "train.steps=18", *settings)
    assert f"{tape}: damaged after 11 steps; using a checkpoint before" in capsys.readouterr().err
    assert (longer.digest, longer.tape_digest) == (whole.digest, whole.tape_digest)


class Stops(Silent):
    """A signal arrives as something of a step is logged; the run ends after the next one."""

    def __init__(self, at: int) -> None:
        self._at: int | None = at

    def logged(self, step: int, metrics: Metrics) -> None:
        if step == self._at:
            self._at = None
            signal.raise_signal(signal.SIGTERM)


def test_a_resumed_run_that_is_stopped_keeps_its_last_validation(runs: Runs) -> None:
    """Its verdict had none, although the metrics had."""
    settings = ("train.log_interval=1", "train.eval_interval=6", "checkpoints.interval=100")
    first = runs.train("run_name=stopped", *settings, listeners=[Stops(at=5)])
    again = runs.train(f"resume={runs.folder / 'stopped'}", *settings, listeners=[Stops(at=7)])
    assert (first.step, again.step, again.interrupted) == (7, 9, "SIGTERM")
    assert (first.val_loss, first.val_step) == (again.val_loss, again.val_step)
    assert again.val_step == 6


@pytest.mark.slow
@pytest.mark.parametrize("stops_at", [None, 8])
def test_what_is_written_beside_the_next_step_is_what_would_be_written_before_it(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, stops_at: int | None
) -> None:
    """As on a GPU: also where a run is stopped, at each checkpoint, and in the verdict."""
    settings = ("train.log_interval=3", "checkpoints.interval=4", "train.eval_interval=5")
    outcomes, chains, lines, order = [], [], [], list[str]()
    for beside in (False, True):
        monkeypatch.setattr(trainer, "_computes_beside", lambda _, beside=beside: beside)
        stops = Stops(stops_at) if stops_at is not None else Silent()
        outcomes.append(runs.train(f"run_name={beside}", *settings, listeners=[stops]))
        folder = RunFolder(runs.folder / str(beside))
        chains.append(folder.chain.read_bytes())
        found = [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in metrics_of(folder.path)]
        lines.append(sorted(map(str, found)))
    assert (outcomes[0].digest, outcomes[0].step) == (outcomes[1].digest, outcomes[1].step)
    assert chains[0] == chains[1]
    assert lines[0] == lines[1]

    class Loud(Silent):
        def logged(self, step: int, metrics: Metrics) -> None:
            if "loss" in metrics:
                order.append(f"{step} written")

    step_of = OptimizerStep.__call__
    monkeypatch.setattr(OptimizerStep, "__call__", lambda *given: (order.append("step"), step_of(*given))[1])
    runs.train("run_name=order", *settings, "train.steps=6", "checkpoints.interval=0", listeners=[Loud()])
    written = [f"{step} written" for step in range(6)]
    assert order == [*["step"] * 4, *written[:3], *["step"] * 2, *written[3:]]


@pytest.mark.slow
def test_a_resumed_run_drops_what_it_has_of_later_steps(runs: Runs) -> None:
    """A run that was measured against it took weights of steps that it had not done again; a damaged checkpoint stayed
    in the place of whole ones.
    """
    settings = ("train.log_interval=1", "checkpoints.interval=6", "checkpoints.weights_interval=2")
    stopped = runs.folder / "stopped"
    runs.train("run_name=stopped", *settings)
    (stopped / "outcome.json").unlink()
    (stopped / "checkpoints/step-000000012.safetensors").write_bytes(b"damaged")
    again = runs.train(f"resume={stopped}", *settings, listeners=[Stops(at=7)])
    assert again.step == 9
    assert snapshot_steps(stopped / "weights") == [2, 4, 6, 8]
    assert list(by_step(stopped / "checkpoints", ".json")) == [6, 9]


@pytest.mark.slow
@pytest.mark.parametrize(("at", "overrides"), [(11, (*DIVERGES, "detector.tail_steps=7")), (3, TURNS_NAN)])
def test_stopped_between_its_last_step_and_the_next_reading_a_run_goes_on(
    runs: Runs, at: int, overrides: Sequence[str]
) -> None:
    """It counted as complete, with fewer steps than undisturbed."""
    settings = ("train.log_interval=6", "checkpoints.interval=6", *overrides)
    whole = runs.train("run_name=whole", *settings)
    stopped = runs.train("run_name=stopped", *settings, listeners=[Stops(at)])
    assert (stopped.outcome, stopped.interrupted) == (whole.outcome, "SIGTERM")
    assert at + 2 == stopped.step < whole.step
    resumed = runs.train(f"resume={runs.folder / 'stopped'}", *settings)
    assert dataclasses.replace(resumed, seconds=whole.seconds, run=whole.run).to_dict() == whole.to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["train.z_loss=0.1", "optimizer=muon"])
def test_what_changes_an_update_is_repeated_bit_by_bit_and_gone_on_with(runs: Runs, option: str) -> None:
    settings = ("train.log_interval=1", "checkpoints.interval=4")
    plain = runs.train("run_name=plain", *settings)
    whole = runs.train("run_name=whole", option, *settings)
    losses, with_option = (
        [line["loss"] for line in metrics_of(Path(one.run)) if "loss" in line] for one in (plain, whole)
    )
    assert losses[0] == with_option[0]  # the loss that is logged is the cross-entropy
    assert losses[2] != with_option[2]
    replayed = run(replay_of(runs, "whole", "run_name=replayed"), [])
    assert (replayed.chain_digest, replayed.weights_digest) == (whole.chain_digest, whole.weights_digest)
    runs.train("run_name=stopped", option, *settings, listeners=[Stops(6)])
    resumed = runs.train(f"resume={runs.folder / 'stopped'}", option, *settings)
    assert dataclasses.replace(resumed, seconds=whole.seconds, run=whole.run).to_dict() == whole.to_dict()


def replay_of(runs: Runs, name: str, *overrides: str) -> Config:
    """The configuration of a replay of a run, as the command line makes it."""
    given = [f"replay={runs.folder / name}", f"runs_dir={runs.folder}", *overrides]
    return build_config(replayed_values(configured_values(*given), given), CONFIGS / "attn")


@pytest.mark.slow
def test_a_branch_that_turns_nan_at_once_says_where(runs: Runs) -> None:
    """It had no state of its own from before; the run that it branched off has."""
    runs.train("run_name=original", "checkpoints.interval=6")
    branch, settings = runs.folder / "branch", (*TURNS_NAN, "train.log_interval=6", "checkpoints.interval=6")
    at_once = runs.train(f"replay={runs.folder / 'original'}", "from_step=6", "run_name=branch", *settings)
    assert (at_once.outcome, at_once.onset_step) == ("nonfinite", 7)
    assert at_once.nonfinite
    assert at_once.nonfinite.startswith("O of layer 1, ")
    (branch / "outcome.json").unlink()
    assert runs.train(f"resume={branch}", *settings).nonfinite == at_once.nonfinite
    (branch / "outcome.json").unlink()
    shutil.rmtree(runs.folder / "original")
    assert runs.train(f"resume={branch}", *settings).nonfinite is None


def test_memory_too_small_to_look_at_a_nan_does_not_cost_the_verdict(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ended without one, and so it did each time that it was resumed."""

    def too_much(*_: object) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory")

    known = runs.train("run_name=known", *TURNS_NAN)
    monkeypatch.setattr(trainer, "locate", too_much)
    unknown = runs.train("run_name=unknown", *TURNS_NAN)
    assert unknown.nonfinite is None
    assert (unknown.outcome, unknown.step, unknown.digest) == (known.outcome, known.step, known.digest)
    assert RunFolder(runs.folder / "unknown").read_outcome().outcome == "nonfinite"


def test_a_disk_that_is_full_at_once_leaves_no_folder(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command could not be given again: a run of its name was there, and it could not be resumed."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(run_description, "write_json", full)
        with pytest.raises(UserError, match=r"free space, then start the run again$"):
            runs.train("run_name=early")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "touch", full)
        with pytest.raises(UserError, match=r"early: No space left on device; "):
            runs.train("run_name=early")
    assert runs.train("run_name=early").run == str(runs.folder / "early")


@pytest.mark.slow
def test_a_folder_that_is_moved_under_its_run_is_told_and_the_run_goes_on(runs: Runs) -> None:
    """The message was to start the run again, beside its checkpoints."""
    settings = ("train.log_interval=1", "checkpoints.interval=4")
    whole = runs.train(*settings)

    class Moving(Listener):
        def logged(self, step: int, metrics: Metrics) -> None:
            if step == 9 and "loss" in metrics:
                (runs.folder / "moved").rename(runs.folder / "away")

    with pytest.raises(UserError, match=r"moved: moved or deleted while .*; resume=FOLDER goes on with it where"):
        runs.train("run_name=moved", *settings, listeners=[Moving()])
    assert runs.train(f"resume={runs.folder / 'away'}", *settings).digest == whole.digest


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 3])
def test_metrics_that_were_lost_are_told(runs: Runs, capsys: pytest.CaptureFixture[str], lost: int) -> None:
    """A run went on without a word after its metrics were damaged."""
    runs.train("run_name=original", "checkpoints.interval=6")
    branch = runs.folder / "branch"
    runs.train(f"replay={runs.folder / 'original'}", "from_step=6", "run_name=branch", "checkpoints.interval=6")
    (branch / "outcome.json").unlink()
    lines = (branch / "metrics.jsonl").read_text().splitlines(keepends=True)
    losses = [number for number, line in enumerate(lines) if '"loss"' in line][:lost]
    garbled = ["garbled\n" if number in losses else line for number, line in enumerate(lines)]
    (branch / "metrics.jsonl").write_text("".join(garbled))
    runs.train(f"resume={branch}", "checkpoints.interval=6")
    told = f"{branch / 'metrics.jsonl'}: has no loss of 3 of the 6 steps before; the run goes on without their"
    assert (told in capsys.readouterr().err) == bool(lost)


@pytest.mark.slow
def test_a_replay_is_not_equal_to_a_run_whose_chain_was_cut(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    original = runs.folder / "original"
    runs.train("run_name=original")
    os.truncate(original / "chain.bin", 8 + 24 * 7)
    runs.train(f"replay={original}", "run_name=replayed")
    tell_of_run(RunFolder(runs.folder / "replayed"), [], of_sweep=False)
    told = capsys.readouterr().err
    assert f"{original}: its chain ends at step 7, the run at 12; restore chain.bin" in told
    assert "bit for bit" not in told


def test_a_step_whose_gradient_is_nan_has_no_clip_factor(runs: Runs) -> None:
    runs.train("run_name=nan", "train.lr=1e30", "train.warmup_steps=0")
    steps = [line for line in metrics_of(runs.folder / "nan") if "grad_norm" in line]
    assert [line["clip_factor"] == "nan" for line in steps] == [line["grad_norm"] == "nan" for line in steps]
    assert steps[-1]["grad_norm"] == "nan"


@pytest.mark.slow
def test_fewer_steps_than_are_done_are_refused(runs: Runs) -> None:
    run = runs.folder / "original"
    runs.train("run_name=original", "checkpoints.interval=6")
    (run / "outcome.json").unlink()
    for source in (f"resume={run}", f"replay={run} from_step=12"):
        with pytest.raises(UserError, match=rf"^train\.steps=5: {run} has done 12; give 12 or more$"):
            runs.train(*source.split(), "train.steps=5")
    assert [path.name for path in runs.folder.iterdir()] == ["original"]


def test_a_run_that_fails_closes_its_files_and_tells_who_listens(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may go on, as in a sweep: with open files and a thread that writes."""

    def fails(*_: object) -> float:
        raise ValueError("no idea")

    class Hears(Silent):
        def begun(self, folder: RunFolder, first_step: int) -> None:
            heard.append("begun")

        def ended(self, folder: RunFolder, outcome: Outcome) -> None:
            heard.append("ended")

        def failed(self, folder: RunFolder) -> None:
            heard.append(f"failed with {len(opened_in(folder.path))} open")

    def opened_in(folder: Path) -> list[str]:
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return [link for link in links if link.startswith(str(folder)) and not link.endswith(".lock")]

    heard, threads = list[str](), threading.active_count()
    monkeypatch.setattr(trainer, "validation_loss", fails)
    with pytest.raises(ValueError, match="no idea"):
        runs.train("run_name=fails", "checkpoints.interval=5", listeners=[Hears()])
    assert heard == ["begun", "failed with 0 open"]
    assert threading.active_count() == threads
    assert len(list((runs.folder / "fails/checkpoints").iterdir())) == 2
