"""The only place, with :mod:`flashpoint.runs.subfolders`, that knows file names inside a run."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from flashpoint.errors import UserError
from flashpoint.files import is_locked, refuse_unexpanded, whole_lines, write_json
from flashpoint.runs import migrations
from flashpoint.runs.manifest import Manifest, Origin, ProbeOff, Resumption
from flashpoint.runs.outcome import NonfiniteOrigin, Outcome, read_outcome
from flashpoint.runs.subfolders import CaptureFolder, ReportFolder, as_kept, packed
from flashpoint.schema import RESTORE, append_to, read_record, understood

if TYPE_CHECKING:  # a loop that is watched writes neither, and does without
    from flashpoint.runs.configuration import RunConfig
    from flashpoint.runs.localized import KeptBranch, Localized

_READER_SECONDS = 0.2
"""For which a run's lock is waited for: a reader that looks whether the run is under way holds it for a moment."""
EVIDENCE = "reference"
"""Folder of the evidence tables under ``runs_dir``."""


CONFIG_FILE, CHAIN_FILE = "config.json", "chain.bin"
"""Names that messages tell."""
_CAPTURES = "captures"


def sweep_lock(folder: Path) -> Path:
    """Return the file that the launcher of a sweep into this folder holds locked until the last run has ended, and with
    ``hydra/launcher=gpus`` the runs, too. Jobs of ``hydra/launcher=slurm`` hold none."""
    return folder / ".logs" / ".lock"


def is_run(path: Path) -> bool:
    """Whether a folder is a run's: a run writes its configuration first. A checkpoint of Transformers' Trainer has a
    file of that name, too, and its own log beside it."""
    return (path / CONFIG_FILE).is_file() and not (path / "trainer_state.json").is_file()


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder, by name."""
    return sorted(filter(is_run, (config.parent for config in folder.glob(f"*/{CONFIG_FILE}"))))


def runs_in_folders_of(folder: Path) -> list[Path]:
    """Return the folders of runs in the folders of a folder, by name."""
    return sorted(filter(is_run, (config.parent for config in folder.glob(f"*/*/{CONFIG_FILE}"))))


@dataclass(frozen=True)
class RunFolder:
    """A run on disk. Training writes it; everything after reads it."""

    path: Path

    @property
    def resume_setting(self) -> str:
        """The setting with which ``flashpoint train`` goes on with it, as a shell takes it."""
        return shlex.quote(f"resume={self.path}")

    @property
    def replay_setting(self) -> str:
        """The setting with which ``flashpoint train`` repeats it, or branches off, as a shell takes it."""
        return shlex.quote(f"replay={self.path}")

    @property
    def config(self) -> Path:
        """The resolved configuration, JSON."""
        return self.path / CONFIG_FILE

    @property
    def manifest(self) -> Path:
        """Environment, data and initial weights, JSON."""
        return self.path / "manifest.json"

    @property
    def tape(self) -> Path:
        """The batch order (:mod:`flashpoint.lab.data.tape`)."""
        return self.path / "tape.bin"

    @property
    def chain(self) -> Path:
        """What every step computed (:mod:`flashpoint.runs.chain`)."""
        return self.path / CHAIN_FILE

    @property
    def metrics(self) -> Path:
        """The metrics file (:mod:`flashpoint.runs.metrics`); compressed where the run is kept as evidence."""
        return as_kept(self._metrics)

    @property
    def packed_metrics(self) -> Path:
        """The thinned metrics of a run that is kept as evidence in a folder."""
        return packed(self._metrics)

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of full checkpoints (:mod:`flashpoint.lab.training.checkpoints`)."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Folder of snapshots of the weights alone (:mod:`flashpoint.lab.training.snapshots`)."""
        return self.path / "weights"

    @property
    def captures(self) -> Path:
        """Folder of captured attention calls, a folder for each step (:class:`.CaptureFolder`)."""
        return self.path / _CAPTURES

    def capture(self, step: int) -> CaptureFolder:
        """Return the capture of a step."""
        return CaptureFolder(self.captures / f"step-{step:07}")

    @classmethod
    def of_capture(cls, capture: Path) -> RunFolder | None:
        """Return the run that a capture's folder is of; None where it lies elsewhere."""
        return cls(capture.parents[1]) if capture.parent.name == _CAPTURES else None

    @property
    def batches(self) -> Path:
        """Step and fingerprint of the batch of each step of somebody's own loop, CSV."""
        return self.path / "batches.csv"

    @property
    def nonfinite(self) -> Path:
        """Where NaN or infinity came from in somebody's own loop, a JSON line each (:class:`.NonfiniteOrigin`)."""
        return self.path / "nonfinite.jsonl"

    @property
    def branches(self) -> Path:
        """Folder of the branches that a localisation trains; it is gone afterwards."""
        return self.path / "branches"

    @property
    def branch_log(self) -> Path:
        """Branches that a localisation has trained, a JSON line each (:mod:`flashpoint.lab.localize.branches`)."""
        return self.path / "localize.jsonl"

    @property
    def localized(self) -> Path:
        """What the last localisation answered, JSON."""
        return self.path / "localize.json"

    @property
    def outcome(self) -> Path:
        """The verdict, JSON; absent while the run goes on or if it was killed."""
        return self.path / "outcome.json"

    @property
    def wandb_id(self) -> Path:
        """The run's id at Weights & Biases, by which a resumed run goes on there; text."""
        return self.path / "wandb_id"

    @property
    def figure(self) -> Path:
        """Loss, gradient norm and W_Q norms over steps, PNG."""
        return self.path / "curves.png"

    @property
    def report(self) -> ReportFolder:
        """The page of this run."""
        return ReportFolder(self.path / "report")

    @property
    def comparison(self) -> ReportFolder:
        """The page of this run and others."""
        return ReportFolder(self.path / "comparison")

    @property
    def watched(self) -> bool:
        """Whether somebody's own loop made the run (:func:`flashpoint.watch`)."""
        return self.manifest.exists() and self.read_manifest().watched

    def read_config(self) -> RunConfig:
        """Return what :attr:`config` holds: the :class:`~flashpoint.lab.config.Config` of a run of the trainer, or the
        :class:`~flashpoint.runs.configuration.WatchedConfig` of somebody's own loop.

        Raises:
            UserError: it is missing, or holds something else; this and the following.
        """
        if self.watched:
            from flashpoint.runs.configuration import WatchedConfig

            return WatchedConfig.read(self.config)
        from flashpoint.extras import from_lab

        read: Callable[[Path], RunConfig]
        read = from_lab("stored_config:read_config", f"{self.path}, a run of flashpoint train")
        return read(self.config)

    def read_manifest(self) -> Manifest:
        """Return what :attr:`manifest` holds."""
        return read_record(self.manifest, Manifest, migrations.manifest)

    def note_resumption(self, resumption: Resumption) -> None:
        """Add to :attr:`manifest` that the run goes on."""
        append_to(self.manifest, "resumed", resumption, Manifest, migrations.manifest)

    def note_probe_off(self, probe: ProbeOff) -> None:
        """Add to :attr:`manifest` that a probe was switched off."""
        append_to(self.manifest, "probes_off", probe, Manifest, migrations.manifest)

    @property
    def origin(self) -> Origin | None:
        """The run that this one replays, and the step of it at which this one began; None where it replays none."""
        return self.read_manifest().origin

    @property
    def first_step(self) -> int:
        """The step at which the run began (:attr:`.Manifest.began_at`)."""
        return self.read_manifest().began_at

    def read_outcome(self) -> Outcome:
        """Return what :attr:`outcome` holds."""
        if not self.outcome.exists():
            how = (
                "the loop that made it alone goes on with it"
                if self.watched
                else f"{self.resume_setting} goes on with it if it was cut short"
            )
            shows = shlex.join(["flashpoint", "watch", str(self.path)])
            raise UserError(f"{self.outcome}: missing; the run has not ended, {how}; {shows} shows it")
        return read_outcome(self.outcome)

    def read_nonfinite(self) -> list[NonfiniteOrigin]:
        """Return what :attr:`nonfinite` holds; a line cut short at its end is left out."""
        if not self.nonfinite.exists():
            return []
        lines = enumerate(whole_lines(self.nonfinite, RESTORE), 1)
        return [understood(line, NonfiniteOrigin, f"{self.nonfinite}:{number}") for number, line in lines]

    def read_branches(self) -> list[KeptBranch]:
        """Return what :attr:`branch_log` holds; a line cut short at its end is left out."""
        if not self.branch_log.exists():
            return []
        from flashpoint.runs.localized import KeptBranch

        anew = "delete it, and branches are trained anew"
        found = [
            understood(line, KeptBranch, f"{self.branch_log}:{number}", anew, migrations.branch)
            for number, line in enumerate(whole_lines(self.branch_log, anew), 1)
        ]
        if len({one.shape for one in found}) > 1:
            raise UserError(f"{self.branch_log}: norms of models with other layers or heads; {anew}")
        return found

    def append_branch(self, branch: KeptBranch) -> None:
        """Add a line to :attr:`branch_log`, in place of one cut short at its end."""
        with self.branch_log.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps(branch.model_dump(), ensure_ascii=False).encode() + b"\n")

    def read_localized(self) -> Localized:
        """Return what :attr:`localized` holds."""
        from flashpoint.runs.localized import Localized

        return read_record(self.localized, Localized, remedy="delete it, or localise the run again")

    def write_localized(self, found: Localized) -> None:
        """Write :attr:`localized`."""
        write_json(self.localized, found.model_dump())

    @property
    def begun(self) -> bool:
        """Whether a step may have run: the tape is written before the first one, the metrics after it."""
        return any(file.is_file() and file.stat().st_size > 0 for file in (self.tape, self.metrics))

    @classmethod
    def create(cls, runs_dir: str | Path, name: str) -> RunFolder:
        """Make a new folder; an existing one is never written to, the name gets a number instead.

        Raises:
            UserError: the folder cannot be made.
        """
        refuse_unexpanded(runs_dir, f"runs_dir={runs_dir}")
        for attempt in range(1, 1000):
            path = Path(runs_dir) / (name if attempt == 1 else f"{name}-{attempt}")
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                if not Path(runs_dir).is_dir():
                    raise UserError(f"runs_dir={runs_dir} is a file: choose another runs_dir") from None
            except OSError as error:
                raise UserError(f"{path}: {error.strerror}; choose a writable runs_dir") from error
        raise UserError(f"runs_dir={runs_dir} holds 999 runs named {name}: choose another run_name")

    @property
    def later_of_its_name(self) -> Path | None:
        """The newest run that :meth:`create` gave this one's name with a number, after this one began."""

        if not is_run(self.path):
            return None

        def begun(path: Path) -> float:
            return RunFolder(path).config.stat().st_mtime

        numbered = re.compile(rf"{re.escape(self.path.name)}-\d+")
        named = [path for path in runs_in(self.path.parent) if numbered.fullmatch(path.name)]
        newest = max(named, key=begun, default=self.path)
        return newest if begun(newest) > begun(self.path) else None

    def discard(self) -> None:
        """Remove the folder of a run that ended while it was made: a new one could not have its name.

        Raises:
            OSError: there is more in it than a run without its configuration leaves.
        """
        if self.path.exists() and not self.config.exists():
            for leftover in self.path.glob(".*"):
                leftover.unlink()
            self.path.rmdir()

    @classmethod
    def open(cls, run: str | Path, runs_dir: str | Path = "runs") -> RunFolder:
        """Return an existing run, by path or by its name under ``runs_dir``.

        Raises:
            UserError: no run is there.
        """
        for path in (Path(run), Path(runs_dir) / run):
            if is_run(path):
                return cls(path)
        tables = "; a run of the evidence tables has no tape and no checkpoints" if ":" in str(run) else ""
        raise UserError(f"{run}: no run there (no {CONFIG_FILE}){tables}; give a run's folder, e.g. {runs_dir}/NAME")

    @property
    def under_way(self) -> bool:
        """Whether a process trains the run now. Of somebody's own loop, and where no locks are seen, it is not known:
        False."""
        return is_locked(self._lock) is True

    @property
    def let_go(self) -> bool:
        """Whether a process has trained the run and none is seen that does. Of somebody's own loop it is not known:
        False. Some file systems show a lock to the machine alone that holds it."""
        return is_locked(self._lock) is False

    @property
    def _lock(self) -> Path:
        return self.path / ".lock"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that writes the run, in the block; one that dies gives it up.

        Raises:
            UserError: another process writes the run, the folder takes no lock, or holds a link.
        """
        with self._exclusive(self._lock, "another process runs it"):
            yield

    @contextlib.contextmanager
    def localizing(self) -> Iterator[None]:
        """Be the only process that trains branches of the run, in the block.

        Raises:
            UserError: another process does, the folder takes no lock, or holds a link.
        """
        with self._exclusive(self.path / ".localize.lock", "another process localises it"):
            yield

    @contextlib.contextmanager
    def _exclusive(self, path: Path, told: str) -> Iterator[None]:
        lock = FileLock(path, timeout=_READER_SECONDS)
        try:
            if link := next((one for one in self.path.iterdir() if one.is_symlink()), None):
                how = "put what it names in its place, or delete it"
                raise UserError(f"{link}: a link, and a run writes in its own folder alone; {how}")
            if path.is_file() and path.stat().st_size:  # FileLock before 4 would empty it, whatever else it is called
                raise UserError(f"{path}: holds something, as no lock does; move it out of the run")
            if not path.exists():  # FileLock would take a folder that holds no file for one that is locked
                path.touch()
            lock.acquire()
        except Timeout:
            raise UserError(f"{self.path}: {told}; wait until it ends, or stop it first") from None
        except (OSError, NotImplementedError) as error:  # the latter on a file system without locks
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{self.path}: {reason}; choose a writable runs_dir that has locks") from error
        try:
            yield
        finally:
            lock.release()
