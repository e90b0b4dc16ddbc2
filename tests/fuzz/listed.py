"""``train.py`` beside it with sweeps of at most 6 runs, in place of 10,000."""

import runpy
from pathlib import Path

from hydra_plugins.flashpoint_launcher import product

if __name__ == "__main__":
    product.MOST_RUNS = 6
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
