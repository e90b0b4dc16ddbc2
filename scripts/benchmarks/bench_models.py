"""What a watch records of models of Transformers, whether it changes their losses, and what it costs each of them.

    OMP_NUM_THREADS=1 python scripts/benchmarks/bench_models.py                 # this checkout
    OMP_NUM_THREADS=1 python scripts/benchmarks/bench_models.py CHECKOUT        # and what another one records

The models are small, with random weights, in FP32 on a CPU: so the share of a step that a watch takes is far above that
of a real model. Each trains twice from the same weights on the same batches, without a watch and with one, in rounds;
which comes first changes from round to round. Attention is observed every 8 steps, not every 500. Calls made are
counted by hooks of the model's innermost modules of attention.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import flashpoint
from benchmarks.checkouts import commit_of, variables_of
from benchmarks.rounds import quartiles
from benchmarks.shown import heading
from flashpoint.cli.table import Table, show
from tests.watching.models import MODELS, ONLY_EAGER, built

_HERE = Path(__file__).parents[2]
SHOWN = ("gemma 2", "gemma 3", "gpt-oss", "mistral", "deepseek", "t5", "whisper", "bert, padded")
STEPS, INTERVAL = 40, 8
_WARM = 2
"""First steps of a training, which are not timed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="others that are asked what they record"
    )
    parser.add_argument("--rounds", type=int, default=4, help=f"of {STEPS} steps each; default: %(default)s")
    parser.add_argument("--record", action="store_true", help="print what is recorded, as JSON, and end")
    given = parser.parse_args()
    if given.record:
        print(json.dumps({name: recorded(name) for name in SHOWN}))
        return
    checkouts = [_HERE, *(folder.resolve() for folder in given.checkouts)]
    what = {folder: _recorded_by(folder) for folder in checkouts}
    rows: list[list[Any]] = []
    costs: list[list[Any]] = []
    for name in SHOWN:
        told = [what[folder][name] for folder in checkouts]
        rows.append([name, *(f"{one['recorded']} of {one['made']}" for one in told), *(one["why"] for one in told[1:])])
        costs.append(_cost(name, given.rounds))
    commits = [commit_of(folder) for folder in checkouts]
    titles = (*(f"calls recorded at {it}" for it in commits), *(f"left out at {it}" for it in commits[1:]))
    calls = Table(("model", *titles), rows)
    columns = (
        "model", "losses equal, all bits", "ms a step unwatched", "watched, not observed", "steps of each",
        "observed", "steps",
    )  # fmt: skip
    note = f"Medians (quartiles). An observation comes every {INTERVAL} steps here, by default every 500."
    about = "a machine that others use, too"
    show([calls, Table(columns, costs, note=note)], "markdown", heading(torch.device("cpu"), about))


def recorded(name: str) -> dict[str, Any]:
    """Return how many calls a step makes, how many a capture holds, and why others are left out."""
    model = built(name, _way(name))
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1

    hooks = [module.register_forward_hook(count) for module in _attentions(model)]
    with tempfile.TemporaryDirectory() as folder, _quiet():
        with flashpoint.watch(model, runs_dir=folder, name="one") as watched:
            _train(name, model, watched, steps=1)
            for hook in hooks:
                hook.remove()
            watched.capture()
            _train(name, model, watched, steps=2)
        kept = {file.name for file in Path(folder, "one").glob("captures/*/layer-*.safetensors")}
        why = json.loads(Path(folder, "one", "manifest.json").read_text())["not_recorded"]
    return {"made": made, "recorded": len(kept), "why": "; ".join(why)}


def _attentions(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules that are named attention and hold none that is."""
    for module in model.modules():
        inside = (one for one in module.modules() if one is not module)
        if "Attention" in type(module).__name__ and not any("Attention" in type(one).__name__ for one in inside):
            yield module


def _cost(name: str, rounds: int) -> list[Any]:
    """Train without and with a watch, and return the cells of a row."""
    seconds: dict[bool, list[list[float]]] = {False: [], True: []}
    equal = True
    for number in range(rounds):
        losses = {}
        for watching in (False, True) if number % 2 else (True, False):
            model = built(name, _way(name))
            with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
                stack.enter_context(_quiet())
                watched = watching and stack.enter_context(flashpoint.watch(model, runs_dir=folder, interval=INTERVAL))
                losses[watching], times = _train(name, model, watched, STEPS)
            seconds[watching].append(times)
        equal &= losses[False] == losses[True]
    without, with_watch = (1000 * np.array(seconds[watching])[:, _WARM:] for watching in (False, True))
    observes = np.arange(_WARM, STEPS) % INTERVAL == 0
    between, observed = with_watch[:, ~observes].ravel(), with_watch[:, observes].ravel()
    without = without[:, ~observes].ravel()
    return [
        name, "yes" if equal else "no", quartiles(without, ".1f"), quartiles(between, ".1f"), between.size,
        quartiles(observed, ".1f"), observed.size,
    ]  # fmt: skip


def _train(name: str, model: Any, watched: Any, steps: int) -> tuple[list[float], list[float]]:
    """Return the losses and seconds of so many steps, on the batches of seed 1."""
    torch.manual_seed(1)
    batch = MODELS[name][2]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses, seconds = [], []
    for _ in range(steps):
        given = batch()
        begun = time.perf_counter()
        loss = model(**given).loss
        loss.backward()
        if watched:
            watched.step(loss, given)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
        losses.append(loss.item())
    return losses, seconds


def _way(name: str) -> str:
    return "eager" if name in ONLY_EAGER else "sdpa"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("flashpoint")
    level = logger.level
    logger.setLevel("ERROR")
    yield
    logger.setLevel(level)


def _recorded_by(checkout: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--record"]
    ended = subprocess.run(command, env=variables_of(checkout), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


if __name__ == "__main__":
    main()
