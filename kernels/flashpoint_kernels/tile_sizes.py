"""Tile sizes by chip and head size: part of a run's identity, since sums depend on them. Never tuned inside a run.

A chip is named by what its code is compiled for: ``sm_90`` is NVIDIA's compute capability 9.0, ``gfx942`` an AMD MI300.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TileSizes:
    """Queries and keys per program step, warps, pipeline stages and the cap on registers a thread of one kernel.

    In ``grad_q`` a block of queries is whole blocks of keys: those before the diagonal are not masked.
    """

    bq: int
    bk: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True)
class Tiles:
    """The tile sizes of the three kernels for one head size."""

    forward: TileSizes
    grad_q: TileSizes
    grad_kv: TileSizes
    """dK and dV read rows that dQ wrote in whole blocks: their blocks of queries are not longer."""


# scripts/kernels/tune_kernels.py on one NVIDIA H200, triton 3.6.0, 2026-11-21; 16 and 32 as 64.
_SMALL = Tiles(TileSizes(64, 64, 4, 3, 128), TileSizes(64, 64, 4, 2, 128), TileSizes(32, 64, 4, 3))
HOPPER = {
    **dict.fromkeys((16, 32, 64), _SMALL),
    128: Tiles(TileSizes(64, 64, 4, 3), TileSizes(64, 64, 4, 2), TileSizes(64, 64, 4, 2)),
}
# Not tuned: the largest with which no variant takes more than 64 KiB of shared memory, and few spill registers, on
# chips that read tiles through pointers or have no wgmma (scripts/kernels/compile_kernels.py).
_CAUTIOUS = Tiles(TileSizes(64, 32, 4, 2), TileSizes(64, 32, 4, 2), TileSizes(32, 64, 4, 2))
FALLBACK = {
    **dict.fromkeys((16, 32, 64), _CAUTIOUS),
    128: Tiles(TileSizes(32, 32, 4, 2), TileSizes(32, 32, 4, 2), TileSizes(32, 32, 4, 2)),
}
TABLES = {"sm_90": HOPPER, "sm_100": HOPPER, "sm_103": HOPPER}
"""Head size to tiles, by chip; tuned on the first. The others have as much shared memory and tensor cores that take
64 rows. All chips that are not here take :data:`FALLBACK`."""

# Of the candidates the fastest on one NVIDIA H200, triton 3.6.0, 2026-11-29 (docs/measurements.md).
WARP_GROUPS = {
    128: Tiles(TileSizes(128, 128, 4, 2, 168), TileSizes(128, 64, 4, 3, 168), TileSizes(64, 128, 4, 2, 168)),
}
"""Head size to tiles of :mod:`flashpoint_kernels.hopper`. Warps are those of one group; a thread may have more
registers where those that copy give theirs back."""

GROUP_BYTES = 24 << 20
"""Bytes of K and V whose heads run side by side: they stay in L2 while every block of queries reads them."""


def tiles_of(chip: str | None, head_size: int) -> Tiles:
    """Return the tile sizes of a head size that :data:`FALLBACK` has; the interpreter, whose chip is None, takes
    Hopper's."""
    return TABLES.get(chip or "sm_90", FALLBACK)[head_size]


def tile_sizes_of(chip: str | None, head_size: int, by_warp_groups: bool = False) -> dict[str, Any]:
    """Return :func:`tiles_of`, or those of :data:`WARP_GROUPS`, as plain values; empty where the kernels do not take
    the size.

    The keys are those that manifests have.
    """
    if head_size not in FALLBACK:
        return {}
    return asdict(WARP_GROUPS[head_size] if by_warp_groups else tiles_of(chip, head_size))
