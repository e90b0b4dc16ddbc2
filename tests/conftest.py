"""Fixtures shared by all tests: a small text, and runs of a model that trains in a second."""

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.unraisableexception import gc_collect_iterations_key

from flashpoint.runs.folder import RunFolder
from tests import warm

REPOSITORY = Path(__file__).parent.parent
TINY = (
    "experiment=laptop",
    "data=text",
    "data.vocab_size=300",
    "data.val_fraction=0.1",
    "model.n_layer=2",
    "model.n_head=2",
    "model.d_model=32",
    "model.context=16",
    "model.vocab_size=320",
    "train.steps=12",
    "train.warmup_steps=2",
    "train.batch_size=4",
    "train.log_interval=5",
    "train.eval_interval=6",
    "train.checksum_interval=4",
    "train.eval_sequences=8",
    "train.threads=1",
    "probes.weights_interval=4",
    "probes.attention_interval=5",
    "tracking=disabled",
)

TRAINING = frozenset({"recorded", "train"})
"""Fixtures that run ``train.py``: tests that use one are marked ``lab``."""

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Variables of a locale without other characters, which Python reads as it starts: not in a fork."""

_SENTENCE = "the loss of a model falls until one head of the second layer explodes in low precision"
_WORDS = _SENTENCE.split()
SOME_TEXT = " ".join(_WORDS[(i * i + i // 7) % len(_WORDS)] for i in range(12_000))
"""About 60 kB of English-like text with structure to learn."""

Command = Callable[..., subprocess.CompletedProcess[str]]


def pytest_configure(config: pytest.Config) -> None:
    """Not as this file is imported: the process that hands out tests to workers does without PyTorch."""
    for ignored in (signal.SIGINT, signal.SIGHUP):  # where nohup or & began the tests; programs would inherit it
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, signal.default_int_handler)
    config.stash[gc_collect_iterations_key] = 1  # at the end five times nothing but the first finds garbage
    os.fsync = lambda fd: None  # no test cuts the power; to wait for the disk takes longer than most tests
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        gc.disable()  # imports and collection make a million objects that stay; until pytest_collection_finish
        import torch

        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Half of the tests to each worker in their order, which builds what a file's tests share; then work is stolen.

    Other schedulers may be asked for with ``--dist``.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what was imported and collected out of every later garbage collection."""
    if any("forked_wandb" in getattr(item, "fixturenames", ()) for item in session.items):
        warm.import_also("tests.lab.wandb_tracking.imported")
    if "triton.runtime.interpreter" in sys.modules:  # some test of the kernels is among them
        from tests import interpreter

        interpreter.work_once()
    gc.freeze()
    gc.set_threshold(700, 10, 50)  # a look at all that is there takes a tenth of a second
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}  # parameters that have a fixture's name
        if TRAINING & set(getattr(item, "fixturenames", ())) - set(given):
            item.add_marker(pytest.mark.lab)
    # Minutes are not to begin when all others have ended. Files whose tests fork come next, for one worker as far as it
    # goes: the server that they fork from takes three seconds to import.
    forking = {one.path for one in items if one.get_closest_marker("lab") or hasattr(getattr(one, "module", 0), "warm")}
    items.sort(key=lambda item: (item.path.name != "test_laptop.py", item.path not in forking))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # its keywords have the folders, too, of which a checkout may be one
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of :data:`SOME_TEXT`."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(SOME_TEXT)
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """An empty run folder."""
    return RunFolder.create(tmp_path / "runs", "tracked")


@pytest.fixture
def flex_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's own formulas, which it keeps for debugging; it refuses gradients on a CPU."""
    from torch.nn.attention import flex_attention as library

    from flashpoint.numerics import production

    monkeypatch.setattr(library, "_validate_device", lambda *_: None)
    monkeypatch.setattr(production, "_compiled_flex", lambda: library.flex_attention)


@pytest.fixture
def warned_soon(monkeypatch: pytest.MonkeyPatch) -> int:
    """W_Q is warned of where it doubles within so many steps: a watch would have to train for 500 before it warns."""
    monkeypatch.setattr("flashpoint.early_warning.LOOKBACK", 160)
    return 160


@pytest.fixture
def logging_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra sets logging up for a run, and with it disables the loggers that are there, for all later tests."""
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("flashpoint")]:
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process finds no W&B settings and no way to a login."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)


@pytest.fixture
def forked_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's client is a fork with W&B imported, which takes most of a client's time; so is what :mod:`.warm` runs."""
    from flashpoint.lab.wandb_tracking import listener

    forks = SimpleNamespace(**{name: getattr(subprocess, name) for name in subprocess.__all__})
    forks.Popen = warm.Piped
    monkeypatch.setattr(listener, "subprocess", forks)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A working folder in which ``runs/original`` has been recorded; what tests add there has names of its own."""
    folder = tmp_path_factory.mktemp("recorded")
    command = train_command("run_name=original", tiny=True, text_file=text_file)
    warm.run(command, cwd=folder, env=environment(), timeout=120).check_returncode()
    return folder


@pytest.fixture
def train(tmp_path: Path, text_file: Path) -> Command:
    """``train.py`` in a process of its own that begins with the imports done, in ``tmp_path``, on the tiny model."""

    def command(*arguments: str, tiny: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"cwd": tmp_path, "env": environment(), "timeout": 120, **options}
        return warm.run(train_command(*arguments, tiny=tiny, text_file=text_file), **options)

    return command


def train_command(*arguments: str, tiny: bool, text_file: Path) -> list[str]:
    """Of a run that W&B does not track, if nothing else is said: its client takes four times as long as such a run."""
    preset = [*TINY, f"data.path={text_file}"] if tiny else []
    if not tiny and any(argument.startswith("replay=") for argument in arguments):
        preset += [] if any("tracking" in argument for argument in arguments) else ["tracking=disabled"]
    return [sys.executable, str(REPOSITORY / "train.py"), *preset, *arguments]


def environment() -> dict[str, str]:
    """This process's, with the sources on the path and no way to a W&B login."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    sources = [str(REPOSITORY / "src"), str(REPOSITORY / "kernels")]
    path = os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def wait_until(condition: Callable[[], object], process: warm.Process | subprocess.Popen[str]) -> None:
    """Fails if ``process`` ends before, or takes two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
