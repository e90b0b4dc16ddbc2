"""Time tile sizes of each kernel on one GPU and print the fastest: what its table of tiles is written from.

``python scripts/kernels/tune_kernels.py [SIZE …]``. One kernel at a time, the others as the table has them, with
``flash_bf16``; each choice with registers as the compiler likes and, for 4 warps, capped at 128, which lets four
programs share an SM.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton

from flashpoint.hardware import chip_of
from flashpoint.numerics import launch
from flashpoint.numerics.choices import NEAREST
from flashpoint.numerics.variant import AttentionVariant
from flashpoint_kernels import tile_sizes
from flashpoint_kernels.tile_sizes import TileSizes

SHAPES = {64: (32, 12, 1024, 64), 128: (8, 16, 4096, 128)}  # B, H, T, d
_BY_ROWS = [
    TileSizes(bq, bk, warps, stages)
    for bq, bk, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3))
    if bk <= bq
]
CHOICES = {
    "forward": _BY_ROWS,
    "grad_q": _BY_ROWS,
    "grad_kv": [TileSizes(bq, bk, w, s) for bq, bk, w, s in itertools.product((32, 64), (64, 128), (4, 8), (2, 3))],
}
VARIANT = AttentionVariant(scores=NEAREST, out_unnormalized=NEAREST)


def passes(shape: tuple[int, int, int, int]) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the forward and the backward pass on random tensors."""
    q, k, v, grad_out = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    context: dict[str, Any] = {"layer": 1, "seed_and_step": torch.zeros(2, dtype=torch.int64, device="cuda")}
    saved = launch.flash_fwd(q, k, v, VARIANT, **context)
    return (
        lambda: launch.flash_fwd(q, k, v, VARIANT, **context),
        lambda: launch.flash_bwd(grad_out, q, k, v, *saved, VARIANT, **context),
    )


def with_caps(choices: list[TileSizes]) -> list[TileSizes]:
    """Return each choice as it is and, for programs of 4 warps, with at most 128 registers a thread."""
    capped = [dataclasses.replace(sizes, registers=128) for sizes in choices if sizes.warps == 4]
    return list(dict.fromkeys([*choices, *capped]))


def main() -> None:
    if not torch.cuda.is_available():
        print("error: no CUDA device is visible; tuning needs one", file=sys.stderr)
        sys.exit(2)
    chip = str(chip_of(torch.device("cuda", torch.cuda.current_device())))
    table = tile_sizes.TABLES[chip] = dict(tile_sizes.TABLES.get(chip, tile_sizes.FALLBACK))
    for size in map(int, sys.argv[1:] or SHAPES):
        shape = SHAPES[size]
        forward, backward = passes(shape)
        for kernel, choices in CHOICES.items():
            so_far = table[size]
            times: dict[TileSizes, float] = {}
            for sizes in with_caps([getattr(so_far, kernel), *choices]):
                table[size] = dataclasses.replace(so_far, **{kernel: sizes})
                launch._plan.cache_clear()  # it keeps the tiles of the first call
                try:
                    times[sizes] = triton.testing.do_bench(
                        forward if kernel == "forward" else backward, warmup=10, rep=40, return_mode="median"
                    )
                except triton.runtime.errors.OutOfResources:
                    continue
            table[size] = dataclasses.replace(so_far, **{kernel: min(times, key=lambda sizes: times[sizes])})
            for sizes, milliseconds in sorted(times.items(), key=lambda item: item[1])[:4]:
                print(f"{chip} {kernel} d={size} {sizes}: {milliseconds:.3f} ms for the pass", flush=True)


if __name__ == "__main__":
    main()
