"""``flashpoint VERB``. A run that would train ends once it is planned, built and has its state, and tells which."""

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flashpoint.cli.main import main
from flashpoint.cli.process import own_streams
from flashpoint.detector import ExplosionDetector
from flashpoint.lab.cli import endings
from flashpoint.lab.training import execution
from flashpoint.runs.outcome import Outcome


def execute(prepared: Any, folder: Any, _listeners: Any) -> Outcome:
    """In place of the training: what a checkpoint holds is taken over, and nothing is written."""
    if prepared.start.state:
        print(f"began {prepared.start.step} {digest(prepared.start.tensors)}")
        prepared.optimizer_step.load_state(prepared.start.tensors)
        ExplosionDetector(prepared.plan.config.detector).load_state(prepared.start.state.detector)
        prepared.probes.load_state(prepared.start.tensors, prepared.start.state.probes, "start")
    return Outcome("stable", 0, None, None, 0.0, None, None, "", "", "", "", 0, None, 0.0, str(folder.path))


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of names, dtypes, shapes and bits of weights and moments."""
    told = hashlib.sha256()
    for name in sorted(name for name in tensors if not name.startswith("probes/")):
        told.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        told.update(tensors[name].contiguous().numpy().tobytes())
    return told.hexdigest()[:16]


def run() -> None:
    """Run what the command line asks for, with the streams of a process of its own."""
    own_streams()
    if sys.argv[1] == "train":
        execution.execute = execute  # type: ignore[assignment]
        endings.tell_of_run = lambda *_args, **_given: None  # type: ignore[assignment]
    try:
        main()
    except SystemExit as ended:
        if sys.argv[1] != "compare" or ended.code != 1:  # 1: the two differ
            raise


if __name__ == "__main__":
    run()
