"""Whether each kind of fuzz sees a fault: ``python scripts/faults/planted_in_readers.py``, a table on stdout.

A fault is planted in a copy of the sources, as a guard that is taken away. The kind of fuzz (:mod:`tests.fuzz`) that is
meant to see it runs there until a case ends badly.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from flashpoint.cli.table import Table, show
from tests.fuzz.judge import REPOSITORY, Command, Ending, explore, kind_of


@dataclass(frozen=True)
class Planted:
    """A fault."""

    name: str
    kind: str
    """``tests/fuzz/of_KIND.py``."""
    edits: tuple[tuple[str, str, str], ...]
    """File under ``src/``, a text that stands in it once, and what takes its place."""


_LINK_IN_A_RUN = "if link := next((one for one in self.path.iterdir() if one.is_symlink()), None):"
_LINK_FOR_A_PAGE = "if link := next((place for place in (report.path, figures) if place.is_symlink()), None):"
_DROPPED = "with suppress(Exception):\n"
FAULTS = (
    Planted("tensors of any form are loaded", "checkpoints",
            (("flashpoint/lab/training/tensor_files.py", "if wrong := _wrong(told, forms, beside):",
              "if wrong := None:"),)),
    Planted("code that a record names runs", "foreign",
            (("flashpoint/lab/cli/unnamed.py", "if word not in named]", "if False]"),)),
    Planted("a page is written behind a link", "foreign_runs",
            (("flashpoint/lab/report/page.py", _LINK_FOR_A_PAGE, "if link := None:"),)),
    Planted("a child records, too", "forks",
            (("flashpoint/watching/recording.py", "if os.getpid() != self._process and", "if False and"),)),
    Planted("characters of another encoding raise", "languages",
            (("flashpoint/cli/process.py", 'errors="backslashreplace")\n    sys', 'errors="strict")\n    sys'),)),
    Planted("a run with a link in it goes on", "links",
            (("flashpoint/runs/folder.py", _LINK_IN_A_RUN, "if link := None:"),)),
    Planted("a tape is changed under its other name", "links",
            (("flashpoint/lab/data/tape.py", "self._file = alone(path)", "self._file = path"),)),
    Planted("a range is listed before it is counted", "lists",
            (("hydra_plugins/flashpoint_launcher/product.py", "if count > MOST_RUNS:", "if False:"),)),
    Planted("a pipe is opened", "no_files",
            (("flashpoint/files.py", "if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):", "if False:"),)),
    Planted("a line that cannot be printed raises", "loops",
            (("flashpoint/errors.py", _DROPPED, "if True:\n"),
             ("flashpoint/watching/notices.py", _DROPPED, "if True:\n"))),
    Planted("what xz holds has no limit", "bombs",
            (("flashpoint/files.py", "if size > _LARGEST_MB * 10**6:", "if False:"),)),
    Planted("a record has no limit", "bombs",
            (("flashpoint/files.py", "if regular(path).stat().st_size > most_mb * 10**6:", "if False:"),)),
    Planted("a table has no limit", "bombs",
            (("flashpoint/lab/evidence/tables.py", "if size > _LARGEST_BYTES:", "if False:"),)),
    Planted("a run's folder is relative", "folders",
            (("flashpoint/watching/watched_run.py", "made.path.absolute()", "made.path"),)),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="after which a fault counts as unseen")
    parser.add_argument("--kind", help="only faults that this one is to see")
    parser.add_argument("--until", help=argparse.SUPPRESS)  # in the copy
    options = parser.parse_args()
    if options.until:
        until_seen(options.until, options.cases)
        return
    rows = []
    for fault in FAULTS:
        if options.kind in (None, fault.kind):
            case, how = seen(fault, options.cases)
            rows.append((fault.name, kind_of(fault.kind).name, how, case))
            print(*rows[-1], sep="; ", file=sys.stderr, flush=True)
    show(Table(("planted", "seen by", "as", "at case"), rows), "markdown")
    sys.exit(any(case is None for *_, case in rows))


def seen(fault: Planted, cases: int) -> tuple[int | None, str]:
    """Plant a fault in a copy, and return the first case that ended badly there, and how; None where none did."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("src", "kernels", "configs", "tests", "scripts", "examples"):
            shutil.copytree(REPOSITORY / name, copy / name)
        shutil.copy(REPOSITORY / "train.py", copy)
        for name, old, new in fault.edits:
            file = copy / "src" / name
            before, found, after = file.read_text().partition(old)
            assert found, f"{name}: no {old}"
            assert old not in after, f"{name}: {old} stands there twice"
            file.write_text(before + new + after)
        script = copy / Path(__file__).relative_to(REPOSITORY)
        command = [sys.executable, str(script), "--until", fault.kind, "--cases", str(cases)]
        paths = os.pathsep.join((str(copy / "src"), str(copy / "kernels")))
        told = subprocess.check_output(command, cwd=copy, env={**os.environ, "PYTHONPATH": paths})
        case, faults = json.loads(told.splitlines()[-1])
        return case, ", ".join(faults)


def until_seen(kind: str, cases: int) -> None:
    """Print the number of the first case that ends badly, and its faults."""
    tried = 0

    def judged(_case: Any, command: Command, ending: Ending) -> None:
        nonlocal tried
        tried += 1
        if faults := ending.faults(command):
            print(json.dumps((tried, faults)), flush=True)
            os._exit(0)  # an error would have Hypothesis shrink the case

    with tempfile.TemporaryDirectory() as folder:
        explore(kind_of(kind), cases, Path(folder), judged)
    print(json.dumps((None, [])))


if __name__ == "__main__":
    main()
