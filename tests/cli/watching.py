"""``flashpoint watch`` in a process of its own, with shorter pauses between what it shows."""

import sys

from flashpoint.cli import watch
from flashpoint.cli.main import main

watch._TERMINAL_SECONDS = watch._PAGE_SECONDS = 0.3
main(["watch", *sys.argv[1:]], prog_name="flashpoint")
