"""What train.py and the verbs import and build sooner or later: once, in the server that `tests.warm` forks from.

What is missing here costs time and nothing else.
"""

# ruff: noqa: F401
import atexit
import gc
import io
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import hydra.main
import pyarrow.compute
import pyarrow.parquet
import rich.live
import scipy.stats
import tokenizers.implementations
import torch._dynamo.utils
import torch._inductor.config  # by torch.use_deterministic_algorithms
from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra  # noqa: TID251
from matplotlib.figure import Figure

import flashpoint.cli.diagnose
import flashpoint.cli.runs
import flashpoint.diagnosis.verdict
import flashpoint.lab.analysis.lifetimes
import flashpoint.lab.cli.claims
import flashpoint.lab.cli.delta
import flashpoint.lab.cli.deviation
import flashpoint.lab.cli.loss
import flashpoint.lab.cli.series
import flashpoint.lab.cli.survival
import flashpoint.lab.deviation.engines
import flashpoint.lab.report.page
import flashpoint.lab.report.terminal_curves
import flashpoint.lab.training.execution
from flashpoint.lab.cli.composition import store_schema

# The first composition finds Hydra's plugins and fills its parser's caches.
store_schema()
with initialize_config_dir(str(Path(__file__).parent.parent / "configs"), version_base="1.3"):
    compose("train", ["experiment=laptop", "train.steps=1", "data.path=a/b", "+tracking.tags=[a]", "hydra.sweep.dir=a"])

# Hydra composes all of it once more to look for hydra.mode, which only the command line or files of the user's can set.
_look_for_mode = Hydra.get_mode


def _mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """None is what Hydra finds where nobody has set it."""
    asked = any(argument.startswith("-") or "hydra" in argument for argument in sys.argv[1:])
    return _look_for_mode(self, config_name, overrides) if asked else None


Hydra.get_mode = _mode  # type: ignore[method-assign]

# The first figure builds what Matplotlib keeps for all: its list of fonts, its parser of "$10^1$".
figure = Figure(layout="constrained")
figure.subplots().semilogy([1, 10])
figure.savefig(io.BytesIO())

# Two thirds of a figure's time make room for its labels. Nobody sees the figures of these runs; tests/report/ has room.
Figure.set_layout_engine = lambda *_, **__: None  # type: ignore[method-assign]

os.fsync = lambda fd: None  # as in tests/conftest.py

# What was imported here ends with the server. At the end of each fork PyTorch would take its operators back one by one.
for registered in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    registered.atexit = False
atexit.unregister(torch._dynamo.utils.dump_compile_times)

# A collection in a fork would look at everything imported here, and so copy its pages.
gc.collect()
gc.freeze()
# The end of a fork (flashpoint.cli.process) would look through all of it for files that are open.
gc.unfreeze = lambda: None
