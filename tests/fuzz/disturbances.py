"""What the kinds share that disturb a watched loop, or a training: how a case is laid, and what it may not lose."""

import dataclasses
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.conftest import TINY
from tests.fuzz.disturbed import STEPS
from tests.fuzz.judge import Command, World, run
from tests.fuzz.recorded import NOTICES, base
from tests.fuzz.recorded import lay as laid

_SCRIPT = Path(__file__).parent / "disturbed.py"
_PROBE = """
import __main__
from flashpoint.lab.probes.attention import Probe


class Own(Probe):
    step = -1

    def measure(self, seen):
        Own.step += 1
        __main__.happen(Own.step)
        return {}
"""
_SETTINGS = ("train", *TINY, "train.steps=4", "probes.attention_interval=1", "probes.attention=[own.py:Own]",
             "checkpoints.interval=2", "run_name=mine")  # fmt: skip


def disturbances(names: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Draw what happens, and to what; one in eight is a training of ``flashpoint train``."""
    events = st.lists(st.tuples(st.integers(0, STEPS - 1), st.sampled_from(names)), min_size=1, max_size=3)
    return st.tuples(st.sampled_from((*["loop"] * 7, "train")), events)


def lay(tree: Path, case: tuple[str, list[tuple[int, str]]], world: World | None = None, **more: Any) -> Command:
    """A loop or a training in ``work``."""
    what, events = case
    (tree / "case.json").write_text(json.dumps(events))
    arguments: tuple[str, ...] = (what,)
    if what == "train":
        (laid(tree) / "own.py").write_text(_PROBE)
        arguments = (what, *_SETTINGS, f"data.path={base()}/work/words.txt")
    return Command(
        _SCRIPT, arguments, may_write=("work/runs/mine", "work/data", "trained"), notices=NOTICES, warm=True,
        world=world or World(),
        lost=_lost, seconds=40, **more,
    )  # fmt: skip


@cache
def _undisturbed(what: str) -> str:
    """Return the digest of a loop or a training to which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        (tree / "work").mkdir()
        (tree / "home").mkdir()
        ending = run(dataclasses.replace(lay(tree, (what, [])), lost=None), tree)
        assert ending.status == 0, ending.err
        (found,) = _digests(tree, what)
        return found


def _digests(tree: Path, what: str) -> set[str]:
    """Return what it ends in; a child of a loop that goes on has its own."""
    if what == "train":
        return {json.loads((tree / "work/runs/mine/outcome.json").read_text())["digest"]}
    return set((tree / "trained").read_text().split())


def _lost(tree: Path, _out: str) -> str | None:
    """Return what a run has lost: its bits, its verdict, or a step of its metrics."""
    what = "train" if (tree / "work/own.py").exists() else "loop"
    folder = tree / "work/runs/mine"
    last = {"train": folder / "checkpoints/step-000000004.json", "loop": tree / "trained"}[what]
    if missing := next((file for file in (folder / "outcome.json", last) if not file.is_file()), None):
        return f"no {missing.name}"
    verdict = json.loads((folder / "outcome.json").read_text())["outcome"]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if '"loss"' in line]
    if verdict != "stable" or steps != list(range(STEPS if what == "loop" else 4)):
        return f"{verdict}, losses of steps {steps}"
    digests, undisturbed = _digests(tree, what), _undisturbed(what)
    return None if digests == {undisturbed} else f"{digests}, undisturbed {undisturbed}"
