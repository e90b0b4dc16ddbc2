"""The same as ``flashpoint train``: ``python train.py --help``."""

import sys

from flashpoint.cli.train import main

if __name__ == "__main__":
    main(sys.argv[1:])
