#!/usr/bin/env bash
# orbax-checkpoint 0.12.8 and pytorch-ignite 0.5.5: beside one evaluation that is NaN the best checkpoint is lost.
#
# A manager that keeps the best checkpoints is to hold the last good one when a training fails. So one may expect an
# evaluation of NaN to rank last, or to be refused. Orbax sorts the checkpoints by their metric. NaN is neither smaller
# nor larger than a number, so that it stays behind the numbers before it, as if it were better: the good checkpoints
# are deleted, and best_step() names one that is NaN, or a worse one. Ignite compares each new score with the lowest
# that it keeps: where this is NaN, no later one is better, and no checkpoint is saved any more. Nothing warns.
#
# Seen with orbax-checkpoint 0.12.8, pytorch-ignite 0.5.5, torch 2.13.0 and Python 3.11, 2026-11-30. Two checkpoints are
# kept, of steps from 0, and the best is that of the smallest loss. The steps that are left:
#
#   losses 3 2 1 4: orbax 1 2, best 2; ignite 1 2
#   losses 3 2 1 nan nan: orbax 3 4, best 4; ignite 1 2
#   losses 1 nan 2 3: orbax 2 3, best 2; ignite 0 1
#   losses 3 nan 2 1: orbax 2 3, best 3; ignite 1 2
#   losses nan 3 2 1: orbax 2 3, best 3; ignite 0 1
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet orbax-checkpoint==0.12.8 pytorch-ignite==0.5.5 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import logging
import math
import pathlib
import sys
import tempfile

import numpy as np
import orbax.checkpoint as ocp
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver

logging.disable(logging.CRITICAL)
HOME = sys.argv[1]


def orbax(losses):
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min", enable_async_checkpointing=False
    )
    with ocp.CheckpointManager(tempfile.mkdtemp(dir=HOME), options=options) as manager:
        for step, loss in enumerate(losses):
            manager.save(step, args=ocp.args.StandardSave({"weight": np.ones(1)}), metrics={"loss": loss})
        return list(manager.all_steps()), manager.best_step()


def ignite(losses):
    folder = tempfile.mkdtemp(dir=HOME)
    training = Engine(lambda engine, batch: None)
    checkpoint = Checkpoint(
        {"model": torch.nn.Linear(1, 1)}, DiskSaver(folder), n_saved=2, filename_pattern="{global_step}.pt",
        score_function=lambda engine: -losses[engine.state.epoch - 1],
        global_step_transform=lambda engine, _: engine.state.epoch - 1,
    )
    training.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
    training.run([0], max_epochs=len(losses))
    return sorted(int(file.stem) for file in pathlib.Path(folder).iterdir())


nan = math.nan
seen = []
for losses in ((3, 2, 1, 4), (3, 2, 1, nan, nan), (1, nan, 2, 3), (3, nan, 2, 1), (nan, 3, 2, 1)):
    kept, best = orbax([float(loss) for loss in losses])
    saved = ignite(losses)
    print("losses", *losses, end=": ")
    print("orbax", *kept, end=f", best {best}; ignite ")
    print(*saved, flush=True)
    seen.append((kept, best, saved))
expected = [([1, 2], 2, [1, 2]), ([3, 4], 4, [1, 2]), ([2, 3], 2, [0, 1]), ([2, 3], 3, [1, 2]), ([2, 3], 3, [0, 1])]
raise SystemExit(0 if seen == expected else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py" "$folder"
