"""Put what commands print into README.md and docs/: ``python scripts/docs/refresh_docs.py [--check] [PAGE …]``.

Pages name the commands in comments that `cog <https://cog.readthedocs.io>`_ reads (``pip install -e '.[dev]'``); after
each stand the command and what it printed, a table or a list as Markdown and the rest as a block::

    <!-- [[[cog shell("flashpoint runs tail-h200:* --show recovery") ]]] -->
    <!-- [[[end]]] -->

``--check`` changes nothing: it prints what would change, and ends with status 5 if anything would.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from cogapp import Cog

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OURS = re.compile(r"flashpoint ([^|;&]*?)(?: \| ([^;&]+))?")
"""One verb, and perhaps a pipe that takes what it prints."""


def shell(command: str) -> None:
    """Print a Bash command, run in the repository's root, and what it printed, as Markdown.

    Raises:
        SystemExit: the command failed; what it said has gone to stderr.
    """
    if ours := OURS.fullmatch(command):
        printed = _in_this_process(ours[1])
        if ours[2]:
            printed = _bash(ours[2], printed)
    else:
        printed = _bash(command)
    if re.search(r"^(\|[:-]|- \*\*)", printed, re.MULTILINE):
        print(f"```console\n$ {command}\n```\n\n{printed.rstrip()}\n")
    else:
        print(f"```console\n$ {command}\n{printed.rstrip()}\n```")


def _bash(command: str, given: str = "") -> str:
    python = shlex.quote(sys.executable)
    ours = f'python() {{ {python} "$@"; }}; flashpoint() {{ {python} -m flashpoint "$@"; }}'
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}  # the locale sorts what * finds
    bash = ["bash", "-o", "pipefail", "-c", f"{ours}\n{command}"]
    result = subprocess.run(bash, check=False, cwd=ROOT, env=environment, input=given.encode(), stdout=subprocess.PIPE)
    if result.returncode:
        sys.exit(f"error: status {result.returncode} of {command}")
    return result.stdout.decode()


def _in_this_process(arguments: str) -> str:
    """Return what a verb prints: its imports take longer than its work."""
    from flashpoint.cli.main import main as flashpoint

    words = _bash(f"printf '%s\\0' {arguments}").split("\0")[:-1]
    printed = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(printed):
        try:
            flashpoint(words, prog_name="flashpoint")
        except SystemExit as ended:
            if ended.code:
                raise
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
