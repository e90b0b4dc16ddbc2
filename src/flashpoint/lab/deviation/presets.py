"""The microbenchmark of Golden et al. (arXiv 2405.02803, figures 3 to 6): small for a CPU, full for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashpoint.lab.deviation.defaults import HEAD_SIZE, LENGTH, SEEDS
from flashpoint.lab.deviation.emulated import Block
from flashpoint.lab.deviation.formats import BF16, E4M3, E5M2, FP16, FP32, FP64, TF32
from flashpoint.lab.deviation.sweep import Given, Sweep, drawn_inputs


@dataclass(frozen=True)
class Part:
    """A sweep on standard normal inputs, with a causal mask."""

    name: str
    """Of its figures."""
    sweep: Sweep
    lengths: tuple[int, ...] = (LENGTH,)
    head_sizes: tuple[int, ...] = (HEAD_SIZE,)
    seeds: int = SEEDS

    def given(self) -> Iterator[Given]:
        """Draw its inputs, when it is their turn."""
        return drawn_inputs("normal", self.lengths, self.head_sizes, self.seeds, causal=True)


_EVERY_FORMAT = (E5M2, E4M3, BF16, FP16, TF32, FP32, FP64)
_FORWARD, _BOTH = ("O",), ("O", "dQ")
_SUMS = ("fp32", "within")
_BLOCKS = tuple(Block(rows, keys) for rows, keys in ((16, 16), (64, 16), (16, 64), (64, 64), (128, 128), (256, 256)))
_KERNELS = ("flash_bf16", "flash_fp32", "released", "sdpa:all")
_LONG = tuple(1 << exponent for exponent in range(9, 15))

PRESETS: dict[str, tuple[Part, ...]] = {
    "cpu": (
        Part("precision", Sweep(precisions=_EVERY_FORMAT, sums=_SUMS, quantities=_BOTH)),
        Part("length", Sweep(precisions=(BF16,), sums=_SUMS), lengths=(64, 128, 256, 512, 1024)),
        Part("block", Sweep(precisions=(BF16,), sums=_SUMS, blocks=(*_BLOCKS, Block(512, 512))), lengths=(512,)),
    ),
    "gpu": (
        Part("precision", Sweep(precisions=_EVERY_FORMAT, sums=_SUMS, quantities=_BOTH), lengths=(1024,)),
        Part("length", Sweep(precisions=(BF16,), sums=_SUMS), lengths=_LONG, seeds=4),
        Part("block", Sweep(precisions=(BF16,), sums=_SUMS, blocks=(*_BLOCKS, Block(2048, 2048))), lengths=(2048,)),
        Part(
            "kernels",
            Sweep(engines=(*_KERNELS, "baseline"), precisions=(BF16,), quantities=_BOTH),
            lengths=(2048,),
        ),
        # The reference, which the others are compared with, is one that holds no [T, T], too.
        Part(
            "kernels_length",
            Sweep(engines=("flash_bf16", "flash_fp32"), precisions=(BF16,), quantities=_BOTH),
            lengths=_LONG,
            seeds=4,
        ),
    ),
}
"""By name; ``gpu`` needs a CUDA device. 60 s on one core of a CPU, and two minutes on a GPU, are what they may take."""
