"""``flashpoint watch`` in a process of its own, with shorter pauses between what it shows."""

import sys
import time

from flashpoint.cli.main import main

pause = time.sleep
time.sleep = lambda seconds: pause(min(seconds, 0.1))
main(["watch", *sys.argv[1:]], prog_name="flashpoint")
