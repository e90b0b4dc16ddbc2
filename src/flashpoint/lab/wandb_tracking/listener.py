"""The listener that hands a run to Weights & Biases, through a process of its own.

W&B's client waits for its network at many places, at some without a limit. Here the client is in another process, to
which a thread writes. So a step never waits for W&B, and a process that does not end is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal, cast

from flashpoint.errors import notify
from flashpoint.files import content
from flashpoint.lab.config import TrackingConfig
from flashpoint.lab.wandb_tracking.client import FINISH_SECONDS, on_disk
from flashpoint.lab.wandb_tracking.local_paths import without_paths
from flashpoint.listeners import Metrics
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.outcome import Outcome

GRACE_SECONDS = 20.0
"""Time for the client to end beyond ``FINISH_SECONDS``: W&B writes what it holds to the disk every 15 s."""
_LONGEST_TAG = 64
"""Characters that W&B takes."""


def tracking(
    wandb: Literal["online", "offline"], project: str, paths: bool, tell: Callable[[str], None]
) -> WandbListener:
    """Return what tracks somebody's own loop in a project of W&B, and tells lines by ``tell``."""
    return WandbListener(TrackingConfig(wandb=wandb, project=project, paths=paths), tell=tell)


class WandbListener:
    """Tracks one run; made for a mode that is not ``disabled``.

    W&B gets what the metrics file gets, each head's metric under ``layer/2/head/3/NAME`` (from 1), with histograms and
    heat maps over heads, and at the end figures and files. Whatever fails there is told in one line.
    """

    name = "W&B"

    def __init__(
        self,
        config: TrackingConfig,
        finish_seconds: float = FINISH_SECONDS,
        tell: Callable[[str], None] = notify,
    ) -> None:
        self._config, self._finish_seconds, self._tell = config, finish_seconds, tell
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None

    def begun(self, folder: RunFolder, first_step: int) -> None:
        """Start the client, and tell where a run is that it does not upload."""
        hardware = folder.read_manifest().hardware[:_LONGEST_TAG]
        settings = {
            "mode": self._config.wandb,
            "project": self._config.project,
            "entity": self._config.entity,
            "group": self._config.group,
            "tags": (*self._config.tags, hardware),  # by which runs of several machines are told apart
            "name": folder.path.name,
            "dir": str(folder.path),
            "id_file": str(folder.wandb_id),
            "config": self._of_records(folder.read_config().to_dict()),
            "describes_machine": self._config.paths,
            "finish_seconds": self._finish_seconds,
        }
        # The environment of a notebook or another run may name a W&B service, which would not end with this run.
        environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
        if self._config.wandb == "offline":
            environment["WANDB_ERROR_REPORTING"] = "false"  # W&B reports of itself, also where it is offline
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flashpoint.lab.wandb_tracking.client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # a terminal's Ctrl-C is the run's; and the service can be ended with the client
        )
        threading.Thread(target=self._write, args=(self._process,), daemon=True).start()
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        self._messages.put(("begin", settings))
        if self._config.wandb == "offline":
            self._tell(f"W&B: {on_disk(folder.path)}")

    def logged(self, step: int, metrics: Metrics) -> None:
        """Queue the metrics of a step."""
        self._messages.put(("log", (step, dict(metrics))))

    def ended(self, folder: RunFolder, outcome: Outcome) -> None:
        """Hand over the verdict, the report's figures and the run's files; wait until they have arrived, or give up."""
        figures = folder.report.figures
        files = [str(file) for file in (folder.tape, folder.chain, folder.report.page) if file.exists()]
        there = (file for file in (folder.config, folder.manifest) if file.exists())
        records = {file.name: self._of_records(json.loads(content(file))) for file in there}
        summary = self._of_records({**outcome.to_dict(), "outcome": outcome.ending})
        self._messages.put(("end", (summary, list(map(str, figures)), files, records)))
        self._finish()

    def _of_records(self, values: dict[str, Any]) -> dict[str, Any]:
        return values if self._config.paths else cast(dict[str, Any], without_paths(values))

    def failed(self, folder: RunFolder) -> None:
        """Have the client end with what it has: the process may go on to other runs."""
        self._finish()

    def _finish(self) -> None:
        assert self._process is not None
        self._messages.put(("stop", None))
        self._messages.put(None)
        try:
            if status := self._process.wait(self._finish_seconds + GRACE_SECONDS):  # killed: it could not tell
                reason = f"its process ended with {status}"
                self._tell(f"W&B is off for this run ({reason}); the run's files have everything")
        except subprocess.TimeoutExpired:
            limit = self._finish_seconds + GRACE_SECONDS
            self._tell(f"W&B: the upload did not end in {limit:.0f} s; wandb sync uploads the rest later")
        finally:  # after Ctrl-C, too
            _kill(self._process)
        self._reader.join(1)

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        try:
            while (message := self._messages.get()) is not None:
                pickle.dump(message, process.stdin)
                process.stdin.flush()
            process.stdin.close()
        except OSError:  # the client has ended
            pass

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._tell(line.decode(errors="replace").rstrip())


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the client and the service that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
