"""The same as ``flashpoint train``: ``python train.py --help``."""

import sys

from flashpoint.cli.process import own_process

if __name__ == "__main__":
    with own_process():
        from flashpoint.lab.cli.train import main

        main(sys.argv[1:])
