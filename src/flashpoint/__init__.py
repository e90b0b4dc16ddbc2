"""Reproduce, replay and localise the BF16 FlashAttention loss explosion in GPT-2 training."""

__version__ = "0.1.0"
