"""Tile sizes by head size: part of a run's identity, since sums depend on them. Never tuned inside a run."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TileSizes:
    """Queries and keys per program step, warps, pipeline stages and the cap on registers a thread of one kernel."""

    bq: int
    bk: int
    warps: int
    stages: int
    registers: int | None = None


# scripts/tune_kernels.py on one NVIDIA H200, triton 3.6.0, 2026-11-21; 16 and 32 as 64.
# dK and dV read rows that dQ wrote in whole blocks: their blocks of queries are not longer.
_FWD = TileSizes(64, 64, 4, 3, 128)
_BWD_DQ = TileSizes(64, 64, 4, 2, 128)
_BWD_DKDV = TileSizes(32, 64, 4, 3)
FLASH_FWD = {16: _FWD, 32: _FWD, 64: _FWD, 128: TileSizes(64, 64, 4, 3)}
FLASH_BWD_DQ = {16: _BWD_DQ, 32: _BWD_DQ, 64: _BWD_DQ, 128: TileSizes(64, 64, 4, 2)}
FLASH_BWD_DKDV = {16: _BWD_DKDV, 32: _BWD_DKDV, 64: _BWD_DKDV, 128: TileSizes(64, 64, 4, 2)}

GROUP_BYTES = 24 << 20
"""Bytes of K and V whose heads run side by side: they stay in L2 while every block of queries reads them."""


def tile_sizes_of(size: int) -> dict[str, Any]:
    """Return what the kernels take for a head size, as plain values; empty where they do not take the size.

    The keys are those that manifests have.
    """
    tables = {"forward": FLASH_FWD, "grad_q": FLASH_BWD_DQ, "grad_kv": FLASH_BWD_DKDV}
    return {name: asdict(table[size]) for name, table in tables.items() if size in table}
