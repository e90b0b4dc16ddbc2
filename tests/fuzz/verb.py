"""``flashpoint VERB``. A run that would train ends once it is planned, built and has its state."""

import sys
from typing import Any

from flashpoint.cli.main import main
from flashpoint.detector import ExplosionDetector
from flashpoint.lab.cli import endings
from flashpoint.lab.training import execution
from flashpoint.runs.outcome import Outcome


def execute(prepared: Any, folder: Any, _listeners: Any) -> Outcome:
    """In place of the training: what a checkpoint holds is taken over, and nothing is written."""
    if prepared.start.state:
        prepared.optimizer_step.load_state(prepared.start.tensors)
        ExplosionDetector(prepared.plan.config.detector).load_state(prepared.start.state.detector)
        prepared.probes.load_state(prepared.start.tensors, prepared.start.state.probes, "start")
    return Outcome("stable", 0, None, None, 0.0, None, None, "", "", "", "", 0, None, 0.0, str(folder.path))


if __name__ == "__main__":
    if sys.argv[1] == "train":
        execution.execute = execute  # type: ignore[assignment]
        endings.tell_of_run = lambda *_args, **_given: None  # type: ignore[assignment]
    try:
        main()
    except SystemExit as ended:
        if sys.argv[1] != "compare" or ended.code != 1:  # 1: the two differ
            raise
