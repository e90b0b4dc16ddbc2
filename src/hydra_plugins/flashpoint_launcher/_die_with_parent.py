"""``python _die_with_parent.py PARENT COMMAND …``: become COMMAND, which gets SIGTERM when the process PARENT dies.

A program of its own, because code that ``subprocess`` runs before a command is not safe beside threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; outlives execve

parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() != int(parent):
    sys.exit("the launcher died")
os.execv(command[0], command)
