"""Put what commands print into README.md and docs/: ``python scripts/refresh_docs.py [--check] [PAGE …]``.

Pages name the commands in comments that `cog <https://cog.readthedocs.io>`_ reads (``pip install -e '.[dev]'``); after
each stand the command and what it printed, a table as a table and the rest as a block::

    <!-- [[[cog shell("python scripts/recovery.py runs/reference/tail-h200/*") ]]] -->
    <!-- [[[end]]] -->

``--check`` changes nothing: it prints what would change, and ends with status 5 if anything would.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

from cogapp import Cog

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shell(command: str) -> None:
    """Print a Bash command, run in the repository's root, and what it printed, as Markdown.

    Raises:
        SystemExit: the command failed; what it said has gone to stderr.
    """
    printed = _one_of_ours(command) if command.startswith("python ") and "|" not in command else _bash(command)
    if "\n|---" in printed:
        print(f"```console\n$ {command}\n```\n\n{printed.rstrip()}\n")
    else:
        print(f"```console\n$ {command}\n{printed.rstrip()}\n```")


def _bash(command: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "LC_ALL": "C.UTF-8"}  # the locale sorts what * finds
    bash = ["bash", "-o", "pipefail", "-c", command]
    result = subprocess.run(bash, check=False, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    if result.returncode:
        sys.exit(f"error: status {result.returncode} of {command}")
    return result.stdout.decode()


def _one_of_ours(command: str) -> str:
    """The same of one Python script, in this process: its imports take longer than its work."""
    _, *argv = _bash(f"printf '%s\\0' {command}").split("\0")[:-1]
    printed = io.StringIO()
    with contextlib.chdir(ROOT), mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(printed):
        runpy.run_path(argv[0], run_name="__main__")
    return printed.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES, metavar="PAGE", help="default: all")
    parser.add_argument("--check", action="store_true", help="print what would change")
    arguments = parser.parse_args()
    mode = ["--check", "--diff"] if arguments.check else ["-r"]
    ours = ["-I", str(Path(__file__).parent), "-p", "from refresh_docs import shell", "-P", "--verbosity=1"]
    status: int = Cog().main(["cog", *mode, *ours, *map(str, arguments.pages)])
    return status


if __name__ == "__main__":
    sys.exit(main())
