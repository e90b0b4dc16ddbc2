"""Tile sizes by head size: part of a run's identity, since sums depend on them. Never tuned inside a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Queries and keys per program step, warps and pipeline stages of one kernel."""

    bq: int
    bk: int
    warps: int
    stages: int


# scripts/tune_kernels.py on one NVIDIA H200, triton 3.6.0, 2026-11-21; 16 and 32 as 64.
FORWARD = {16: Tiles(64, 64, 4, 3), 32: Tiles(64, 64, 4, 3), 64: Tiles(64, 64, 4, 3), 128: Tiles(128, 64, 4, 2)}
GRAD_Q = {16: Tiles(64, 64, 4, 2), 32: Tiles(64, 64, 4, 2), 64: Tiles(64, 64, 4, 2), 128: Tiles(128, 64, 8, 3)}
GRAD_KV = {16: Tiles(64, 64, 4, 3), 32: Tiles(64, 64, 4, 3), 64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 2)}
