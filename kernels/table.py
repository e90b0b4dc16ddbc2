"""Tile sizes by head size: part of a run's identity, since sums depend on them. Never tuned inside a run."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Tiles:
    """Queries and keys per program step, warps, pipeline stages and the cap on registers a thread of one kernel."""

    bq: int
    bk: int
    warps: int
    stages: int
    registers: int | None = None


# dK and dV read rows that dQ wrote in whole blocks: their blocks of queries are not longer.
# Bytes of K and V whose heads run side by side: they stay in L2 while every block of queries reads them.
GROUP_BYTES = 24 << 20

# scripts/tune_kernels.py on one NVIDIA H200, triton 3.6.0, 2026-11-21; 16 and 32 as 64.
_FORWARD = Tiles(64, 64, 4, 3, 128)
_GRAD_Q = Tiles(64, 64, 4, 2, 128)
_GRAD_KV = Tiles(32, 64, 4, 3)
FORWARD = {16: _FORWARD, 32: _FORWARD, 64: _FORWARD, 128: Tiles(64, 64, 4, 3)}
GRAD_Q = {16: _GRAD_Q, 32: _GRAD_Q, 64: _GRAD_Q, 128: Tiles(64, 64, 4, 2)}
GRAD_KV = {16: _GRAD_KV, 32: _GRAD_KV, 64: _GRAD_KV, 128: Tiles(64, 64, 4, 2)}


def tiles_of(size: int) -> dict[str, Any]:
    """The table's row for a head size, as plain values; empty where the kernels do not take the size."""
    tables = {"forward": FORWARD, "grad_q": GRAD_Q, "grad_kv": GRAD_KV}
    return {name: asdict(table[size]) for name, table in tables.items() if size in table}
