"""Time tile sizes of each kernel on one GPU and print the fastest: what ``kernels/table.py`` is written from.

``python scripts/tune_kernels.py [SIZE …]``. One kernel at a time, the others as the table has them, with
``flash_bf16``; each choice with registers as the compiler likes and, for 4 warps, capped at 128, which lets four
programs share an SM.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable

import torch
import triton

from flashpoint.attention import launch
from flashpoint.attention.variant import AttentionVariant
from flashpoint.kernels import table
from flashpoint.kernels.table import Tiles

SHAPES = {64: (32, 12, 1024, 64), 128: (8, 16, 4096, 128)}  # B, H, T, d
_BY_ROWS = [
    Tiles(bq, bk, warps, stages)
    for bq, bk, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3))
    if bk <= bq
]
CHOICES = {
    "FORWARD": _BY_ROWS,
    "GRAD_Q": _BY_ROWS,
    "GRAD_KV": [Tiles(bq, bk, w, s) for bq, bk, w, s in itertools.product((32, 64), (64, 128), (4, 8), (2, 3))],
}
VARIANT = AttentionVariant(scores="nearest", out_unnormalized="nearest")


def passes(shape: tuple[int, int, int, int]) -> tuple[Callable[[], object], Callable[[], object]]:
    """The forward and the backward pass on random tensors."""
    q, k, v, grad_out = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    groups = VARIANT.groups(1, shape[1])
    seed_and_step = torch.zeros(2, dtype=torch.int64, device="cuda")
    saved = launch.flash_forward(q, k, v, groups, seed_and_step, 1)
    return (
        lambda: launch.flash_forward(q, k, v, groups, seed_and_step, 1),
        lambda: launch.flash_backward(grad_out, q, k, v, *saved, groups, seed_and_step, 1),
    )


def with_caps(choices: list[Tiles]) -> list[Tiles]:
    """Each choice as it is and, for programs of 4 warps, with at most 128 registers a thread."""
    capped = [dataclasses.replace(tiles, registers=128) for tiles in choices if tiles.warps == 4]
    return list(dict.fromkeys([*choices, *capped]))


def main() -> None:
    if not torch.cuda.is_available():
        print("error: no CUDA device is visible; tuning needs one", file=sys.stderr)
        sys.exit(2)
    for size in map(int, sys.argv[1:] or SHAPES):
        shape = SHAPES[size]
        forward, backward = passes(shape)
        for name, choices in CHOICES.items():
            tiles_by_size: dict[int, Tiles] = getattr(table, name)
            times: dict[Tiles, float] = {}
            for tiles in with_caps([tiles_by_size[size], *choices]):
                tiles_by_size[size] = tiles
                try:
                    times[tiles] = triton.testing.do_bench(
                        forward if name == "FORWARD" else backward, warmup=10, rep=40, return_mode="median"
                    )
                except triton.runtime.errors.OutOfResources:
                    continue
            tiles_by_size[size] = min(times, key=lambda tiles: times[tiles])
            for tiles, milliseconds in sorted(times.items(), key=lambda item: item[1])[:4]:
                print(f"{name} d={size} {tiles}: {milliseconds:.3f} ms for the pass", flush=True)


if __name__ == "__main__":
    main()
