"""Metrics: always a local file, and Weights & Biases where it works."""

from __future__ import annotations

import gzip
import json
import math
import os
import textwrap
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashpoint import wandb_service
from flashpoint.config import TrackingConfig
from flashpoint.errors import UserError
from flashpoint.media import HeadMedia
from flashpoint.run_folder import RunFolder

_INIT_TIMEOUT_SECONDS = 30


class Tracker:
    """Takes the metrics of a run.

    ``metrics.jsonl`` gets one JSON object per call of :meth:`log`, flushed to the operating system. W&B gets the
    same; whatever fails there is told in one line, and the run goes on without it.

    Args:
        run_config: what W&B shows as the run's configuration.
        notify: takes the lines for the person at the terminal.
        first_step: of a run that goes on: what its file says of this step and later ones is dropped.

    Raises:
        OSError: the local file cannot be written, here and from :meth:`log`.
    """

    def __init__(
        self,
        run: RunFolder,
        config: TrackingConfig,
        *,
        run_config: Mapping[str, Any],
        notify: Callable[[str], None],
        first_step: int = 0,
    ) -> None:
        if run.metrics.exists():
            _drop_steps_from(run.metrics, first_step)
        self._file = run.metrics.open("a", buffering=1)
        self._notify = notify
        self._wandb: Any = None
        self._service: wandb_service.WandbService | None = None
        self._media = HeadMedia()
        mode = _wandb_mode(config, notify)
        if mode != "disabled":
            self._guarded(lambda: self._start(run, config, run_config, mode))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step (from 0). The steps of one metric never go back; those of different ones may."""
        line = {"step": step, **{name: _to_json(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(line) + "\n")
        if self._wandb is not None:
            self._guarded(lambda: self._wandb.log({"step": step, **metrics, **self._media.of(step, metrics)}))

    def sync(self) -> None:
        """Wait until the metrics are on the disk."""
        os.fsync(self._file.fileno())

    @property
    def active(self) -> bool:
        """Whether W&B takes a record, too."""
        return self._wandb is not None

    def close(self, summary: Mapping[str, Any], pictures: Sequence[Path] = (), files: Sequence[Path] = ()) -> None:
        """End the record, whatever W&B does, in 160 s at most (:mod:`flashpoint.wandb_service`).

        Args:
            summary: becomes the W&B run's.
            pictures: PNG files to show there, under their names.
            files: go into an artifact of the run.
        """
        self._file.close()
        if self._wandb is not None:
            self._guarded(lambda: self._finish(summary, pictures, files))
        elif self._service is not None:  # what failed may have something to upload
            self._service.end(wandb_service.FINISH_TIMEOUT_SECONDS + wandb_service.GRACE_SECONDS)

    def _start(self, run: RunFolder, config: TrackingConfig, run_config: Mapping[str, Any], mode: str) -> None:
        import wandb

        self._service = wandb_service.WandbService()
        self._wandb = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            name=run.path.name,
            dir=run.path,
            config=dict(run_config),
            settings=wandb.Settings(
                silent=True,
                console="off",
                reinit="create_new",  # one that failed before is not this one
                init_timeout=_INIT_TIMEOUT_SECONDS,
                finish_timeout=wandb_service.FINISH_TIMEOUT_SECONDS,
                finish_timeout_raises=True,
            ),
        )
        self._wandb.define_metric("step")
        self._wandb.define_metric("*", step_metric="step")

    def _finish(self, summary: Mapping[str, Any], pictures: Sequence[Path], files: Sequence[Path]) -> None:
        assert self._service is not None
        with self._service:
            try:
                self._upload(summary, pictures, files)
            except Exception:  # where the network is gone an artifact raises; the rest is kept for wandb sync
                self._wandb.finish()
                raise
            self._wandb.finish()

    def _upload(self, summary: Mapping[str, Any], pictures: Sequence[Path], files: Sequence[Path]) -> None:
        import wandb

        self._wandb.summary.update(dict(summary))
        if pictures:
            self._wandb.log({f"figures/{path.stem}": wandb.Image(str(path)) for path in pictures})
        if files:
            artifact = wandb.Artifact(f"records-{self._wandb.id}", type="records")
            for path in files:
                artifact.add_file(str(path))
            self._wandb.log_artifact(artifact)

    def _guarded(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # nothing that happens inside W&B may end a run
            self._wandb = None
            reason = textwrap.shorten(str(error), 200)
            self._notify(f"W&B is off for this run ({type(error).__name__}: {reason}); metrics.jsonl has everything")


def metric_lines(path: Path) -> list[bytes]:
    """Lines of a metrics file, gzipped or not. A last one cut short, as a killed run leaves it, is left out.

    Raises:
        UserError: the file is missing, or its compression is damaged.
    """
    try:
        content = path.read_bytes()
        *lines, _unfinished = (gzip.decompress(content) if path.suffix == ".gz" else content).split(b"\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged ({error}); restore the file") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a run that has metrics") from error
    return lines


def read_metrics(path: Path) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Columns of a metrics file.

    Returns:
        name → (steps [n] int64, values [n] float64) of :func:`metric_lines`.

    Raises:
        UserError: the file is missing or a line is damaged, with its number.
    """
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for number, line in enumerate(metric_lines(path), 1):
        try:
            record = json.loads(line)
            step = record.pop("step")
            if type(step) is not int or not 0 <= step < 2**63:
                raise ValueError("no number of a step")
            for name, value in record.items():
                steps, values = columns.setdefault(name, ([], []))
                steps.append(step)
                values.append(float(value))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}:{number}: damaged line; restore the file") from error
    return {name: (np.array(steps), np.array(values)) for name, (steps, values) in columns.items()}


def _drop_steps_from(path: Path, step: int) -> None:
    *lines, _unfinished = path.read_text(errors="replace").split("\n")
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(f"{line}\n" for line in lines if _is_before(line, step)))
    partial.replace(path)


def _is_before(line: str, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] < step)
    except ValueError:  # garbled by a power loss: later than anything that a checkpoint counts on
        return False


def _to_json(value: float) -> float | str:
    """JSON has no NaN and no infinities: those are strings, which ``float`` reads back."""
    return value if math.isfinite(value) else str(value)


def _wandb_mode(config: TrackingConfig, notify: Callable[[str], None]) -> str:
    """``online`` only with a stored login: without one W&B would prompt, or raise."""
    wanted: str = config.wandb
    if wanted == "auto":
        chosen = os.environ.get("WANDB_MODE", "")
        if chosen not in ("online", "offline", "dryrun", "disabled"):
            return "online" if _has_login() else "offline"
        wanted = "offline" if chosen == "dryrun" else chosen
    if wanted == "online" and not _has_login():
        notify("tracking.wandb=online: no W&B login is stored; logging offline (wandb login, then wandb sync)")
        return "offline"
    return wanted


def _has_login() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        import wandb
        from wandb.sdk.lib.wbauth import read_netrc_auth  # its own look-up: hosts and files change with its versions

        return read_netrc_auth(host=wandb.Settings().base_url) is not None
    except Exception:  # whatever is wrong with the login, or with W&B: then there is none
        return False
