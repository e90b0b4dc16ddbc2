"""Which planted faults branches can localise: those that make W_Q grow.

    python scripts/faults/localized_faults.py             # 2 trials of each kind
    python scripts/faults/localized_faults.py --seeds 1

The loop of examples/nanogpt.py (2 layers of 4 heads) trains 40 steps with a fault in one head of both layers. Then
``flashpoint localize`` branches off its checkpoints, 30 steps a branch, one start. It names heads, or says that W_Q
does not outgrow its twin's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples import nanogpt
from flashpoint.cli.table import Table, show
from flashpoint.diagnosis.faults import KINDS
from flashpoint.diagnosis.probe import Function
from flashpoint.lab.localize.branches import Branches
from flashpoint.lab.localize.engine import engine
from flashpoint.lab.localize.growth import NoGrowthError
from flashpoint.lab.localize.own_loop import OwnLoop
from flashpoint.lab.localize.questions import answers
from flashpoint.runs.folder import RunFolder

SIZES = {"layers": "2", "heads": "4", "width": "64", "context": "64", "batch": "4", "lr": "3e-3", "steps": "40",
         "keep": "5"}  # fmt: skip


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """The attention of the trial, by the name that the interceptor wraps."""
    return _planted(q, k, v, is_causal, q.shape[-1] ** -0.5)


_planted: Function = engine("sdpa")


def trial(kind: str, head: int, folder: Path) -> str:
    """Return ``named``, ``another``, or ``no growth``; the head counts from 1."""
    global _planted  # noqa: PLW0603 - what the wrapped function of this module calls
    file = folder / f"{kind}_{head}.py"
    file.write_text(
        "from flashpoint.diagnosis.faults import Fault, faulty_attention\n"
        f"attend = faulty_attention(Fault({kind!r}, head={head - 1}, size=1.0))\n"
    )
    attention = f"{file}:attend"
    _planted = engine(attention)
    with contextlib.redirect_stderr(io.StringIO()):
        nanogpt.train(
            lambda q, k, v, is_causal: attend(q, k, v, is_causal),  # noqa: PLW0108 - by name, each time
            **SIZES, runs=str(folder), name=file.stem, functions=f"{__name__}:attend",
        )  # fmt: skip
    run = RunFolder(folder / file.stem)
    loop = OwnLoop.of(run, f"{nanogpt.__file__}:step", str(run.path / "step-*.pt"), attention)
    try:
        with Branches(loop, run, 30, None) as branches:
            *_, stand = answers(branches, 1)
    except NoGrowthError:
        return "no growth"
    named = {
        int(one)
        for verdict in [answer.verdict for answer in stand if answer.question == "heads"]
        if ": sufficient" in verdict
        for one in re.findall(r"\d+", verdict.split(" of ")[0])
    }
    return "named" if named == {head} else "another"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="trials of each kind, another head each")
    seeds = parser.parse_args().seeds
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            found = [trial(kind, 1 + (seed + KINDS.index(kind)) % 4, Path(folder)) for seed in range(seeds)]
            rows.append([kind, seeds, *(f"{found.count(one)} of {seeds}" for one in ("named", "no growth", "another"))])
    columns = ("fault", "trials", "the head is named", "W_Q does not outgrow the twin's", "another is named")
    show(Table(columns, rows, f"CPU, torch {torch.__version__}. {date.today()}."), "markdown")


if __name__ == "__main__":
    main()
