"""What train.py and the scripts import sooner or later: imported once, by the server that `tests.warm` forks from.

A name that is missing here costs time and nothing else.
"""

# ruff: noqa: F401
import io

import hydra._internal.hydra
import hydra.main
import scipy.stats
import torch._inductor.config  # by torch.use_deterministic_algorithms
from matplotlib.figure import Figure

import flashpoint.report.page
import flashpoint.report.survival
import flashpoint.training.run

# The first figure builds what Matplotlib keeps for all: its list of fonts, its parser of "$10^1$".
figure = Figure(layout="constrained")
figure.subplots().semilogy([1, 10])
figure.savefig(io.BytesIO())
