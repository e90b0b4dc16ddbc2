"""Reproduce, replay and localise the BF16 FlashAttention loss explosion in GPT-2 training."""

import os

__version__ = "0.1.0"

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
"""PyTorch's OpenMP reads it when it is loaded: how long a thread that waits for another keeps its core. Steps of the
laptop preset a second on two cores, alone and with a second run beside it: 20 and 11 with 1,000; 24 and 4 with 10,000;
25 and less than 1 with 100,000; 14 alone with a thread that sleeps at once."""
