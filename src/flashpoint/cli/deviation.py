"""``flashpoint deviation``: how far attentions are from each other and from FP64, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flashpoint.cli.selection import format_option
from flashpoint.errors import UserError

if TYPE_CHECKING:
    import torch

    from flashpoint.deviation.emulated import Block, Inputs
    from flashpoint.deviation.formats import Format
    from flashpoint.deviation.pairs import Pair
    from flashpoint.deviation.statistics import Unit

T = TypeVar("T")

LENGTH, HEAD_SIZE, SEEDS = 256, 64, 8
QUANTITIES = {"O": "O", "L": "L", "δ": "δ", "delta": "δ", "dQ": "dQ", "dK": "dK", "dV": "dV"}
"""Words of ``--of``, and the quantities they name."""


def _each(parse: Callable[[str], T], wanted: str) -> Callable[..., list[T] | None]:
    """Return a callback that parses words with commas between them, each once."""

    def callback(_context: click.Context, _option: click.Parameter, value: str | None) -> list[T] | None:
        if value is None:
            return None
        found: dict[T, None] = {}
        for word in value.split(","):
            try:
                found[parse(word.strip())] = None
            except (ValueError, KeyError):
                raise click.BadParameter(f"{word}: give {wanted}") from None
        return list(found)

    return callback


def _count(word: str) -> int:
    if not 1 <= int(word) < 1 << 31:
        raise ValueError
    return int(word)


def _tile(word: str) -> Block:
    from flashpoint.deviation.emulated import Block

    rows, keys = word.split("x")
    return Block(_count(rows), _count(keys))


def _format(word: str) -> Format:
    from flashpoint.deviation.formats import format_named

    return format_named(word)


def _unit(word: str) -> Unit:
    from flashpoint.deviation.statistics import UNITS

    return {str(unit): unit for unit in UNITS}[word]


def _of_sram(size: int, precision: Format, head_size: int) -> Block:
    """Return the block of FlashAttention (Dao et al., arXiv 2205.14135, Algorithm 1) for so many bytes of SRAM."""
    from flashpoint.deviation.emulated import Block

    elements = size // precision.bytes
    if not elements:
        raise UserError(f"--sram {size}: holds no number of {precision.name}, which takes {precision.bytes} bytes")
    keys = -(-elements // (4 * head_size))
    return Block(min(keys, head_size), keys)


@click.command("deviation")
@click.argument("words", nargs=-1, metavar="[ENGINE]...")
@click.option(
    "--precision",
    "precisions",
    callback=_each(_format, ""),
    default="bf16",
    show_default=True,
    metavar="FORMAT,...",
    help="fp64, fp32, tf32, fp16, bf16, e4m3, e5m2, or m1 to m52 for so many mantissa bits with 8 exponent bits.",
)
@click.option(
    "--accumulate",
    metavar="FORMAT|same|within",
    help="Of sums, and of m, ℓ, L, δ, Ō and gradients between blocks. same: the precision. within: FP32 within an "
    "operation, the precision for the rest, as PyTorch's own operations.  [default: fp32, as on GPUs]",
)
@click.option(
    "--length",
    "lengths",
    callback=_each(_count, "numbers of tokens, e.g. 128,256"),
    metavar="T,...",
    help=f"Tokens.  [default: {LENGTH}]",
)
@click.option("--head-size", type=click.IntRange(1), metavar="D", help=f"Features of a head.  [default: {HEAD_SIZE}]")
@click.option(
    "--block",
    "blocks",
    callback=_each(_tile, "B_r x B_c, queries and keys of a tile, e.g. 64x64,128x32"),
    metavar="RxC,...",
    help="Tiles of flash: B_r queries by B_c keys.  [default: 64x64]",
)
@click.option(
    "--sram",
    "srams",
    callback=_each(_count, "bytes, e.g. 65536"),
    metavar="BYTES,...",
    help="In place of --block: B_c = ⌈M/4d⌉ and B_r = min(B_c, d), where M are the numbers of the precision in BYTES.",
)
@click.option("--causal/--no-causal", default=True, show_default=True, help="Whether a query sees no later key.")
@click.option("--seeds", type=click.IntRange(1), metavar="N", help=f"Inputs, seeds 0 to N − 1.  [default: {SEEDS}]")
@click.option(
    "--inputs",
    "kind",
    default="normal",
    show_default=True,
    metavar="normal|sink|tied|FILE.safetensors",
    help="sink: every query scores the first key about 8 nats. tied: keys come in equal pairs. FILE: q, k, v and "
    "grad_out [B, H, T, d], whose B are the independent inputs.",
)
@click.option(
    "--of",
    "quantities",
    callback=_each(QUANTITIES.__getitem__, "some of O, L, δ (or delta), dQ, dK, dV"),
    default="O,L,δ,dQ,dK,dV",
    show_default=True,
    metavar="NAME,...",
    help="Quantities. With O and L alone there is no backward pass.",
)
@click.option(
    "--unit",
    "units",
    callback=_each(_unit, "some of absolute, relative, ulps"),
    default="absolute",
    show_default=True,
    metavar="UNIT,...",
    help="absolute; relative to the golden value's root mean square; ulps of the precision at each golden element, or "
    "at that root mean square where the element is smaller.",
)
@click.option("--device", "where", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@format_option
def command(
    words: tuple[str, ...],
    precisions: list[Format],
    accumulate: str | None,
    lengths: list[int] | None,
    head_size: int | None,
    blocks: list[Block] | None,
    srams: list[int] | None,
    causal: bool,
    seeds: int | None,
    kind: str,
    quantities: list[str],
    units: list[Unit],
    where: str,
    form: str,
) -> None:
    """Print how far attentions are from each other and from FP64, on the same Q, K, V and dO.

    ENGINE... are flash and baseline unless named. Each is compared with the last one and with the golden value:
    baseline attention in FP64 on the inputs as rounded to the precision. flash and baseline are emulated, with every
    operation rounded to nearest even in --precision. The others compute in tensors of the precision: a variant of
    configs/attn (flash_bf16, released), on a GPU by its kernels; sdpa:math, sdpa:flash, sdpa:efficient, sdpa:cudnn, or
    sdpa:all for each that is available; FILE.py:FUNCTION, which takes q, k, v and is_causal and returns O.

    A row has the size of one difference over all elements of all inputs, and its signed mean with an interval over the
    inputs. A rescaling is a rise of a row's maximum after its first block of keys. A second table has each engine's
    distance from the golden value over that of the last one. All intervals are 95 % (Student's t).
    """
    from flashpoint.cli.deviation_tables import tables
    from flashpoint.cli.table import show
    from flashpoint.deviation.arithmetic import arithmetic
    from flashpoint.deviation.engines import engines_named
    from flashpoint.deviation.pairs import pairs

    if blocks and srams:
        raise click.UsageError("--sram: takes no --block")
    device = _device(where)
    engines = engines_named(words or ("flash", "baseline"), precisions, device)
    if (blocks or srams) and not any(engine.tiled for engine in engines):
        raise click.UsageError("--block and --sram: only of the engine flash")
    if accumulate and not any(engine.emulated for engine in engines):
        raise click.UsageError("--accumulate: only of the engines flash and baseline")
    all_inputs, told = _inputs(kind, seeds, lengths, head_size)

    def compared() -> Iterator[Pair]:
        for precision in precisions:
            compute = arithmetic(precision, accumulate or "fp32")
            for inputs in all_inputs:
                size = inputs.q.shape[-1]
                tiles = [_of_sram(sram, precision, size) for sram in srams or ()] or blocks or [_tile("64x64")]
                here = type(inputs)(*(x.to(device) for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out)))
                yield from pairs(engines, here, compute, tiles, causal=causal, quantities=quantities)

    found = tables(compared(), units, engines[-1].name)
    if not found[0].rows:
        raise UserError(f"--of {','.join(quantities)}: {', '.join(one.name for one in engines)} tell none of these")
    show(found, form, _provenance(device, told, causal, accumulate if any(one.emulated for one in engines) else ""))


def _device(where: str) -> torch.device:
    import torch

    available = torch.cuda.is_available()
    if where == "cuda" and not available:
        raise UserError("--device cuda: no CUDA device is visible; use --device cpu or auto")
    return torch.device("cuda" if available and where != "cpu" else "cpu")


def _inputs(kind: str, seeds: int | None, lengths: list[int] | None, head_size: int | None) -> tuple[list[Inputs], str]:
    """Return inputs, one for each length, and what a line says of them."""
    from flashpoint.deviation.inputs import DRAWN, drawn, read

    if kind in DRAWN:
        count, size = seeds or SEEDS, head_size or HEAD_SIZE
        found = [drawn(kind, count, length, size) for length in lengths or [LENGTH]]
        return found, f"{kind} inputs, head size {size}, seeds 0 to {count - 1}"
    inputs = read(Path(kind))
    given: dict[str, Any] = {"--seeds": seeds, "--length": lengths, "--head-size": head_size}
    if unused := [name for name, value in given.items() if value is not None]:
        raise click.UsageError(f"--inputs {kind}: a file takes no {' and no '.join(unused)}")
    count, heads, _, size = inputs.q.shape
    return [inputs], f"{kind}: B {count}, H {heads}, head size {size}"


def _provenance(device: torch.device, inputs: str, causal: bool, accumulate: str | None) -> str:
    """Return a line with hardware, PyTorch's version, inputs, the sums of emulated engines, and the day."""
    from datetime import UTC, datetime

    import torch

    from flashpoint.training.determinism import hardware_name

    sums = "" if accumulate == "" else f"; sums in {accumulate or 'fp32'}"
    mask = "causal" if causal else "not causal"
    day = datetime.now(UTC).date()
    return f"{hardware_name(device)}, torch {torch.__version__}; {inputs}; {mask}{sums}; {day}"
