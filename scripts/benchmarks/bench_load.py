"""What long lists of runs, long runs, large texts and many files cost: CPU seconds, memory, and how both grow.

    python scripts/benchmarks/bench_load.py                        # small sizes, a few minutes
    python scripts/benchmarks/bench_load.py --full survival report # to the largest sizes, of these loads alone
    python scripts/benchmarks/bench_load.py OTHER_CHECKOUT         # beside another checkout, on the same inputs

The inputs are made in a temporary folder. Each call is a process of its own, on one core and with one thread. The
exponent p is that of seconds ∝ sizeᵖ, by least squares over the sizes, of the seconds beyond those of a size of 1,
which are mostly imports. A row has none where the larger inputs take hardly longer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.checkouts import commit_of, variables_of
from flashpoint.cli.table import Table, number, show
from flashpoint.lab.config import Config
from flashpoint.runs.metric_table import METRICS

_HERE = Path(__file__).parents[2]
_MB = 10**6
_VARIANTS = ("flash_bf16", "flash_fp32", "sdpa", "flash_exact_rowsum", "flash_fixed", "flash_stochastic")
_OF_HEADS = [name for name, metric in METRICS.items() if metric.per == "head"]
_FLASHPOINT = "from flashpoint.__main__ import run; run()"
_PREPARE = """
import sys
from flashpoint.lab.config import DataConfig
from flashpoint.lab.data.prepare import prepare
path, root, most = sys.argv[1:]
options = {"max_bytes": int(most)} if most else {}
if __name__ == "__main__":
    prepare(DataConfig(source="text", path=path, root=root, workers=1, vocab_size=512, val_fraction=0.1, **options))
"""
_READ = """
import sys
from pathlib import Path
from flashpoint.runs.metrics import read_metrics
read_metrics(Path(sys.argv[1]))
"""


@dataclass(frozen=True)
class Load:
    """One question that is asked of ever larger inputs."""

    name: str
    unit: str
    """Of the sizes."""
    sizes: Sequence[int]
    """Each twice the one before."""
    full: int
    """The largest size of the long form."""
    make: Callable[[Path, int], None]
    """Makes the input of a size in an empty folder."""
    code: str
    """Of the process that is measured; it has the folder as its working directory."""
    arguments: Sequence[str]


def _runs(folder: Path, count: int, lines: int, points: int) -> None:
    """Make runs of few attentions and many seeds: each second one exploded.

    Args:
        lines: of each one's metrics.
        points: lines with every metric of heads, of two layers of four heads.
    """
    drawn = random.Random(0)
    config = Config().to_dict()
    for index in range(count):
        run, variant, steps = folder / "runs" / f"{index:05}", _VARIANTS[index % len(_VARIANTS)], 8000
        onset = drawn.randrange(1000, 2000) if index % 4 < 2 else None
        run.mkdir(parents=True)
        records = {
            "config": {**config, "attn": {"name": variant}, "seed": index // len(_VARIANTS)},
            "manifest": {"hardware": "a CPU", "environment": {"torch": "2.11"}, "started": "2026-11-21T",
                         "data": {"fingerprint": "0" * 64}, "initial_weights": "w", "parameters": 1000},
            "outcome": {"outcome": "exploded" if onset else "stable", "step": steps, "onset_step": onset, "loss": 2.5,
                        "nonfinite": None, "val_loss": 5.0, "val_step": steps, "digest": "d", "chain_digest": "c",
                        "weights_digest": "w", "tape_digest": "t", "tape_steps": steps, "interrupted": None,
                        "seconds": 1.0, "run": run.name},
        }  # fmt: skip
        for name, record in records.items():
            (run / f"{name}.json").write_text(json.dumps(record))
        with (run / "metrics.jsonl").open("w") as file:
            for line in _lines(lines, steps // lines, max(1, lines // points) if points else 0):
                file.write(line)


def _lines(count: int, spacing: int, every: int) -> Iterator[str]:
    """Yield lines of a metrics file; each ``every``-th has all metrics of heads, none with 0."""
    drawn = np.random.default_rng(0)
    losses, norms = 3 + 0.1 * drawn.standard_normal(count), np.exp(drawn.standard_normal(count))
    heads = np.ones((len(_OF_HEADS), 2, 4))
    for index in range(count):
        line: dict[str, Any] = {"step": index * spacing, "loss": losses[index], "grad_norm": norms[index], "lr": 1e-3,
                                "update_norm": norms[index] / 100, "clip_factor": 1.0}  # fmt: skip
        if every and index % every == 0:
            line["val_loss"] = losses[index]
            heads += drawn.random((len(_OF_HEADS), 2, 4)) / 10
            line |= dict(zip(_OF_HEADS, heads.tolist(), strict=True))
        yield json.dumps(line) + "\n"


def _few_metrics(folder: Path, count: int) -> None:
    _runs(folder, count, lines=20, points=0)


def _all_metrics(folder: Path, count: int) -> None:
    _runs(folder, count, lines=2000, points=100)


def _metrics(folder: Path, count: int) -> None:
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(_lines(count, 1, 0))


def _text(folder: Path, megabytes: int) -> None:
    line = "The loss of this run rose at step 5,563, and its gradient norm had risen before; see façade no. 7.\n"
    with (folder / "text.txt").open("w", encoding="utf-8") as file:
        for _ in range(megabytes):
            file.write(line * (_MB // len(line.encode())))


def _files(folder: Path, count: int) -> None:
    drawn = random.Random(0)
    (folder / "texts").mkdir()
    for index in range(count):
        words = " ".join(f"word{drawn.randrange(5000)}" for _ in range(200))
        (folder / f"texts/{index:06}.txt").write_text(f"File {index}. {words}\n")


LOADS = (
    Load("survival", "runs", (125, 250, 500), 2000, _few_metrics, _FLASHPOINT, ("survival", "runs")),
    Load("report", "runs", (2, 4, 8), 64, _all_metrics, _FLASHPOINT, ("report", "runs", "--out", "page")),
    Load("metrics", "lines", (25_000, 50_000, 100_000), 1_000_000, _metrics, _READ, ("metrics.jsonl",)),
    Load("data.max_bytes, 8 MB", "MB", (16, 32, 64), 1024, _text, _PREPARE, ("text.txt", "data", str(8 * _MB))),
    Load("text files", "files", (313, 625, 1250), 5000, _files, _PREPARE, ("texts", "data", "")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="LOAD|FOLDER", help="loads by their first word; other checkouts")
    parser.add_argument("--full", action="store_true", help="go on to the largest sizes: half an hour a checkout")
    given = parser.parse_args()
    names = {load.name.split()[0].rstrip(","): load for load in LOADS}
    loads = [names[word] for word in given.words if word in names] or list(LOADS)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # processes that are started have it, too
    checkouts = [*(Path(word).resolve() for word in given.words if word not in names), _HERE]
    rows = [row for load in loads for row in _rows(load, checkouts, full=given.full)]
    columns = ("load", "size", *(f"{commit_of(at)}{what}" for at in checkouts for what in (", s", ", MB", ", p")))
    heading = f"{_processor()}, one core and thread, Python {platform.python_version()}, {date.today()}"
    show(Table(columns, rows), "markdown", heading)


def _rows(load: Load, checkouts: Sequence[Path], *, full: bool) -> list[list[Any]]:
    """Return a row for each size; of each checkout CPU seconds and peak memory, and in the last row the exponent."""
    sizes = [*load.sizes]
    while full and sizes[-1] < load.full:
        sizes.append(min(2 * sizes[-1], load.full))
    costs = {size: [cost(load, size, at) for at in checkouts] for size in (1, *sizes)}
    rows: list[list[Any]] = []
    for size in (1, *sizes):
        cells: list[Any] = []
        for index, (seconds, memory) in enumerate(costs[size]):
            p = exponent({one: costs[one][index][0] - costs[1][index][0] for one in sizes})
            cells += [number(seconds, ".1f"), number(memory, ".0f"), number(p if size == sizes[-1] else None, ".1f")]
        rows.append([load.name, f"{size:,} {load.unit}", *cells])
    return rows


def exponent(seconds: dict[int, float]) -> float | None:
    """Return p of seconds ∝ sizeᵖ over the sizes that take a tenth of a second; None where fewer than two do."""
    told = {size: of_size for size, of_size in seconds.items() if of_size > 0.1}
    if len(told) < 2 or max(told) != max(seconds):
        return None
    return float(np.polyfit(np.log([*told]), np.log([*told.values()]), 1)[0])


def cost(load: Load, size: int, checkout: Path) -> tuple[float, float]:
    """Return CPU seconds of a call, the system's and its processes' among them, and the peak memory of the largest
    process, MB."""
    variables = {**variables_of(checkout), "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "COLUMNS": "999"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load.make(folder, size)
        (folder / "code.py").write_text(load.code)
        with subprocess.Popen(
            [sys.executable, "code.py", *load.arguments], cwd=folder, env=variables,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stderr
            told = process.stderr.read()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{load.name}, {size:,} {load.unit}: {told.decode()}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / _MB


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
