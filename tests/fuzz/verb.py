"""``flashpoint VERB``. A run that would train ends once it is planned, built and has its state, and tells which."""

import functools
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra.types import RunMode
from omegaconf import OmegaConf
from torch import Tensor

from flashpoint.cli.main import main
from flashpoint.cli.process import own_streams
from flashpoint.detector import ExplosionDetector
from flashpoint.lab.cli import endings, train
from flashpoint.lab.training import execution
from flashpoint.runs.outcome import Outcome

COMPOSED = "composed.json"
"""Beside the working folder: what Hydra composes of some command lines, by these."""


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


def quickly(arguments: Sequence[str]) -> None:
    """Train what was composed before: no file of a run has a part in that, and it is most of a case's time."""
    path, key = Path("..", COMPOSED), " ".join(arguments)
    composed = json.loads(path.read_text()) if path.exists() else {}
    if key in composed:
        task = SimpleNamespace(task=list(arguments))
        runtime = SimpleNamespace(choices={"hydra/launcher": "sequential"})
        told = SimpleNamespace(overrides=task, mode=RunMode.RUN, runtime=runtime)
        train.HydraConfig = SimpleNamespace(get=lambda: told)  # type: ignore[assignment,misc]
        inside: Any = train.train
        train.train = functools.partial(inside.__wrapped__, OmegaConf.create(composed[key]))


def run() -> None:
    """Run what the command line asks for, with the streams of a process of its own."""
    own_streams()
    if sys.argv[1:2] == ["train"]:
        quickly(sys.argv[2:])
        execution.execute = execute  # type: ignore[assignment]
        endings.tell_of_run = lambda *_args, **_given: None  # type: ignore[assignment]
    try:
        main()
    except SystemExit as ended:
        if sys.argv[1:2] != ["compare"] or ended.code != 1:  # 1: the two differ
            raise


if __name__ == "__main__":
    run()
