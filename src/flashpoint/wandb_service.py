"""The process behind W&B's client, bounded: a run ends when it ends, whatever the network does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from typing import Any

FINISH_TIMEOUT_SECONDS = 120.0
"""Then the rest of the upload is given up; ``wandb sync --include-online`` brings all but the artifact later."""
GRACE_SECONDS = 20.0
"""For W&B's service to end after that; it brings what it holds to the disk every 15 s."""


class WandbService:
    """W&B's service process, from which all comes that W&B waits for, at times without end.

    W&B's own limit, ``finish_timeout``, does not hold for all of an artifact. The service first asks the server for its
    features, before the limit begins, and last uploads the list of the files, which the limit does not break off. Where
    the network dies in one of the two, it tries again for many minutes.

    A context manager around the end of a run: the service ends with the block, and before where the block takes more
    than ``FINISH_TIMEOUT_SECONDS + GRACE_SECONDS``, so that whatever waits for it raises. The next run gets a
    service of its own.

    Raises:
        TimeoutError: the block took too long; instead of its own error.
    """

    def __init__(self) -> None:
        import wandb

        os.environ.pop("WANDB_SERVICE", None)  # another process's, which could not be ended
        self._hooks = sys.exit, sys.excepthook  # every service puts others on top
        service: Any = wandb.setup().ensure_service()._proc  # no public way to it
        service.join = self._join  # for W&B's own end at Python's, which has no limit: a run that failed goes there
        self._process: subprocess.Popen[bytes] = service._process
        self._ending, self._late = threading.Lock(), False
        self._timer = threading.Timer(FINISH_TIMEOUT_SECONDS + GRACE_SECONDS, self._give_up)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        self._timer.cancel()
        self.end(GRACE_SECONDS)
        if self._late and isinstance(error, Exception):
            raise TimeoutError("the upload did not end") from error

    def end(self, seconds: float) -> None:
        """Let the service end, and kill it after ``seconds``."""
        with self._ending:
            teardown = threading.Thread(target=_teardown, daemon=True)
            teardown.start()
            try:
                teardown.join(seconds)
            finally:  # after Ctrl-C, too
                self._process.kill()
            teardown.join(1)  # before the next run logs in
            sys.exit, sys.excepthook = self._hooks

    def _give_up(self) -> None:
        self._late = True
        self.end(GRACE_SECONDS)

    def _join(self) -> int:
        try:
            return self._process.wait(FINISH_TIMEOUT_SECONDS + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _teardown() -> None:
    import wandb

    with contextlib.suppress(Exception, SystemExit):  # it exits with the status of the service
        wandb.teardown()
