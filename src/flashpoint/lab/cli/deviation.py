"""``flashpoint deviation``: how far attentions are from each other and from FP64, on the same inputs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from flashpoint.cli.selection import device_named, format_option
from flashpoint.errors import UserError, notify
from flashpoint.lab.cli.deviation_options import count, each, format_of, tile, unit
from flashpoint.lab.cli.shared_options import figures_option, refuse_given
from flashpoint.lab.deviation.defaults import HEAD_SIZE, LENGTH, SEEDS

if TYPE_CHECKING:
    import torch

    from flashpoint.lab.deviation.emulated import Block
    from flashpoint.lab.deviation.formats import Format
    from flashpoint.lab.deviation.statistics import Unit
    from flashpoint.lab.deviation.sweep import Given, Sweep

T = TypeVar("T")

QUANTITIES = {"O": "O", "L": "L", "δ": "δ", "delta": "δ", "dQ": "dQ", "dK": "dK", "dV": "dV"}
"""Words of ``--of``, and the quantities they name."""
EMULATED = ("flash", "baseline")
"""Engines whose every operation is rounded; those that are compared where nobody names others."""
_OF_DRAWN = ("seeds", "lengths", "head_sizes")
_OF_CAPTURED = ("steps", "layers", "sequences")
_WITH_PRESET = {"preset", "folder", "where", "form"}
"""Parameters of the command by which kinds of inputs and presets differ."""


@click.command("deviation")
@click.argument("words", nargs=-1, metavar="[ENGINE]...")
@click.option(
    "--precision",
    "precisions",
    callback=each(format_of, ""),
    default="bf16",
    show_default=True,
    metavar="FORMAT,...",
    help="fp64, fp32, tf32, fp16, bf16, e4m3, e5m2, or m1 to m52 for so many mantissa bits with 8 exponent bits. "
    "Too large numbers become infinite, in e4m3 NaN.",
)
@click.option(
    "--accumulate",
    "sums",
    callback=each(str, ""),
    metavar="FORMAT|same|within,...",
    help="Of sums, and of m, ℓ, L, δ, Ō and gradients between blocks. same: the precision. within: FP32 within an "
    "operation, the precision for the rest, as PyTorch's own operations. Never coarser than the precision.  "
    "[default: fp32, as on GPUs]",
)
@click.option(
    "--length",
    "lengths",
    callback=each(count, "numbers of tokens, e.g. 128,256"),
    metavar="T,...",
    help=f"Tokens.  [default: {LENGTH}]",
)
@click.option(
    "--head-size",
    "head_sizes",
    callback=each(count, "numbers of features, e.g. 64,128"),
    metavar="D,...",
    help="Features of a head. flash and baseline round α = 1/√d as well, which is exact at 16, 64 and 256.  "
    f"[default: {HEAD_SIZE}]",
)
@click.option(
    "--block",
    "blocks",
    callback=each(tile, "B_r x B_c, queries and keys of a tile, e.g. 64x64,128x32"),
    metavar="RxC,...",
    help="Tiles of flash: B_r queries by B_c keys.  [default: 64x64]",
)
@click.option("--causal/--no-causal", default=None, help="Whether a query sees no later key.  [default: causal]")
@click.option("--seeds", type=click.IntRange(1), metavar="N", help=f"Inputs, seeds 0 to N − 1.  [default: {SEEDS}]")
@click.option(
    "--inputs",
    "kind",
    default="normal",
    show_default=True,
    metavar="normal|sink|tied|RUN|CAPTURE",
    help="sink: every query scores the first key about 8 nats. tied: keys come in equal pairs. RUN: Q, K, V and dO of "
    "a run of flashpoint train. CAPTURE: those that flashpoint.watch wrote, or a .safetensors file with q, k, v and "
    "grad_out [B, H, T, d], whose B are the independent inputs.",
)
@click.option(
    "--step",
    "steps",
    callback=each(int, "steps, e.g. 500,1500"),
    metavar="S,...",
    help="Of a RUN, whose last checkpoint before S is taken, or of a watched run's captures.  [default: the last]",
)
@click.option("--layer", "layers", type=click.IntRange(1), multiple=True, help="Of a RUN or CAPTURE.  [default: all]")
@click.option(
    "--sequences", type=click.IntRange(1), help=f"Of a RUN or CAPTURE.  [default: {SEEDS} of a RUN, else all]"
)
@click.option(
    "--of",
    "quantities",
    callback=each(QUANTITIES.__getitem__, "some of O, L, δ (or delta), dQ, dK, dV"),
    default="O,L,δ,dQ,dK,dV",
    show_default=True,
    metavar="NAME,...",
    help="Quantities. With O and L alone there is no backward pass.",
)
@click.option(
    "--unit",
    "units",
    callback=each(unit, "some of absolute, relative, ulps"),
    default="absolute",
    show_default=True,
    metavar="UNIT,...",
    help="absolute; relative to the golden value's root mean square; ulps of the precision at each golden element, or "
    "at that root mean square where the element is smaller.",
)
@click.option(
    "--preset",
    type=click.Choice(["cpu", "gpu"]),
    help="The microbenchmark of arXiv 2405.02803, figures 3 to 6, from FP8 to FP64: at most a minute on a CPU; on a "
    "GPU with kernels and up to 16,384 tokens.",
)
@figures_option("what was swept")
@click.option("--device", "where", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@format_option
@click.pass_context
def command(
    context: click.Context,
    words: tuple[str, ...],
    precisions: list[Format],
    sums: list[str] | None,
    lengths: list[int] | None,
    head_sizes: list[int] | None,
    blocks: list[Block] | None,
    causal: bool | None,
    seeds: int | None,
    kind: str,
    steps: list[int] | None,
    layers: tuple[int, ...],
    sequences: int | None,
    quantities: list[str],
    units: list[Unit],
    preset: str | None,
    folder: Path | None,
    where: str,
    form: str,
) -> None:
    """Print how far attentions are from each other and from FP64, on the same Q, K, V and dO.

    ENGINE... are flash and baseline unless named. Each is compared with the last one and with the golden value:
    baseline attention in FP64 on the inputs as rounded to the precision. flash and baseline are emulated, with every
    operation rounded to nearest even in --precision. The others compute in tensors of the precision. They are a variant
    of configs/attn (flash_bf16, released), on a GPU by its kernels; sdpa:math, sdpa:flash, sdpa:efficient, sdpa:cudnn,
    or sdpa:all for each that is available. FILE.py:FUNCTION takes q, k, v and is_causal and returns O.

    A row has the size of one difference over all elements of all inputs. A second table has each engine's distance from
    the golden value over that of the last one. What all rows have in common is told beneath. --columns all adds it as
    columns, and quantiles, and the signed mean with an interval over the inputs. A rescaling is a rise of a row's
    maximum after its first block of keys. All intervals are 95 % (Student's t).
    """
    from flashpoint.cli.table import show
    from flashpoint.lab.cli.deviation_tables import tables
    from flashpoint.lab.deviation.presets import PRESETS
    from flashpoint.lab.deviation.sweep import Sweep, measure

    device = _device(where, preset)
    parts: list[tuple[str, Sweep, Iterable[Given]]]
    if preset:
        refuse_given(context, f"--preset {preset}", set(context.params) - _WITH_PRESET)
        parts = [(part.name, part.sweep, part.given()) for part in PRESETS[preset]]
        told = "standard normal inputs; causal"
    else:
        engines = words or EMULATED
        _check_emulated(engines, blocks, sums)
        given, told = _given(context, kind, lengths, head_sizes, seeds, steps, layers, sequences, causal, device)
        sweep = Sweep(
            engines=engines,
            precisions=tuple(precisions),
            sums=tuple(sums or ["fp32"]),
            blocks=tuple(blocks or ()),
            quantities=tuple(quantities),
            units=tuple(units),
        )
        parts = [("", sweep, given)]
    heading = _provenance(device, told, [sweep for _, sweep, _ in parts])
    found = {}
    for name, sweep, given in parts:
        start = time.perf_counter()
        found[name] = list(measure(sweep, given, device))
        if preset:
            notify(f"{name}: {time.perf_counter() - start:.0f} s")
        if not found[name]:
            raise UserError(f"--of {','.join(sweep.quantities)}: {', '.join(sweep.engines)} tell none of these")
    show([table for of_part in found.values() for table in tables(of_part)], form, heading)
    if folder:
        from flashpoint.lab.report.deviation_figures import write_figures

        notify(f"figures: {', '.join(map(str, write_figures(found, heading, folder)))}")


def _check_emulated(engines: Sequence[str], blocks: list[Block] | None, sums: list[str] | None) -> None:
    if blocks and "flash" not in engines:
        raise click.UsageError("--block: only of the engine flash")
    if sums and not set(EMULATED) & set(engines):
        raise click.UsageError("--accumulate: only of the engines flash and baseline")


def _given(
    context: click.Context,
    kind: str,
    lengths: list[int] | None,
    head_sizes: list[int] | None,
    seeds: int | None,
    steps: list[int] | None,
    layers: tuple[int, ...],
    sequences: int | None,
    causal: bool | None,
    device: torch.device,
) -> tuple[Iterable[Given], str]:
    """Return the inputs, and what a line says of them."""
    from flashpoint.lab.deviation.drawn_inputs import DRAWN
    from flashpoint.lab.deviation.sweep import drawn_inputs

    if kind in DRAWN:
        refuse_given(context, f"--inputs {kind}", _OF_CAPTURED)
        inputs, masked = seeds or SEEDS, causal is not False
        told = f"{kind} inputs, seeds 0 to {inputs - 1}; {'causal' if masked else 'not causal'}"
        return drawn_inputs(kind, lengths or [LENGTH], head_sizes or [HEAD_SIZE], inputs, causal=masked), told
    from flashpoint.lab.cli.deviation_inputs import captured_inputs, captured_path

    path = captured_path(kind)
    refuse_given(context, f"--inputs {kind}", _OF_DRAWN)
    found = captured_inputs(path, steps or (), layers, sequences, causal, device)
    sequences, heads, length, _ = found[0].inputs.q.shape
    masks = "causal" if all(one.causal for one in found) else "not causal"
    return found, f"{kind}: {sequences} sequences of {length:,} tokens, {heads} heads; {masks}"


def _device(where: str, preset: str | None) -> torch.device:
    """Return the device; with ``auto`` that of the preset, or a GPU where there is one."""
    if where == "auto" and preset:
        return device_named({"cpu": "cpu", "gpu": "cuda"}[preset], "--preset gpu", "--preset cpu")
    return device_named(where)


def _provenance(device: torch.device, told: str, sweeps: Sequence[Sweep]) -> str:
    """Return a line with hardware, PyTorch's version, inputs, which engines are emulated, and the day."""
    from datetime import UTC, datetime

    import torch

    from flashpoint.hardware import hardware_name

    engines = dict.fromkeys(engine for sweep in sweeps for engine in sweep.engines if engine in EMULATED)
    emulation = f"; emulated: {', '.join(engines)}" if engines else ""
    return f"{hardware_name(device)}, torch {torch.__version__}; {told}{emulation}; {datetime.now(UTC).date()}"
