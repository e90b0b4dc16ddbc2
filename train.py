"""The same as ``flashpoint train``: ``python train.py --help``."""

import sys

from flashpoint.cli.process import quick_end

if __name__ == "__main__":
    with quick_end():
        from flashpoint.lab.cli.train import main

        main(sys.argv[1:])
