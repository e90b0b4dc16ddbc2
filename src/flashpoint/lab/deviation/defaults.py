"""The inputs that attentions are compared on where nobody asks for others; known without PyTorch, for ``--help``."""

LENGTH, HEAD_SIZE, SEEDS = 256, 64, 8
"""Tokens, features of a head, and independent inputs of one head."""
TILE = 64
"""Queries, and keys, of a tile of flash."""
