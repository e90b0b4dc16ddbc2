"""The same as ``flashpoint train``: ``python train.py --help``."""

import sys

from flashpoint.cli.process import end_with
from flashpoint.cli.train import main

if __name__ == "__main__":
    end_with(lambda: main(sys.argv[1:]))
