"""Candidates for the kernels of ``flash_fixed`` on Hopper beside those of today, on one GPU.

    python scripts/benchmarks/candidates.py --out FOLDER
    python scripts/benchmarks/candidates.py --only fwd-turns dq-64    # today's are always there

Each candidate takes the place of one kernel: the forward pass, δ and dQ, dK and dV, or the
whole backward pass. First each runs in a process of
its own, which is killed if it hangs, and is compared with FP64. Then those that came through take turns in replays of
CUDA graphs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.hopper import launches
from benchmarks.kernels import BACKWARD_WORK, CallGraph
from benchmarks.rounds import Times, interleaved, quartiles
from benchmarks.shapes import AttentionShape
from benchmarks.shown import Report, heading
from flashpoint.cli.table import Cell, Table
from flashpoint.errors import UserError, exit_in_one_line, notify
from flashpoint.files import CONFIGS
from flashpoint.numerics import launch
from flashpoint.numerics.compile_time import compile_time_choices
from flashpoint.numerics.deltas import whole_saved_out
from flashpoint.numerics.named import variant_named
from flashpoint.numerics.variant import AttentionVariant
from flashpoint_kernels.choices import Choices
from flashpoint_kernels.tile_sizes import TileSizes, tiles_of

SHAPES: list[AttentionShape] = [(8, 16, 4096, 128), (8, 16, 4096, 64), (32, 12, 1024, 64)]
COMPARED: AttentionShape = (4, 12, 1040, 0)
"""Compared with FP64, with 64 and 128 features: more blocks than an H200 runs at once, the last of each head cut
short."""
VARIANT = variant_named("flash_fixed", CONFIGS / "attn")
WORK = {"forward": 1.0, "dQ": 1.5, "dK, dV": 2.0, "backward": BACKWARD_WORK}
"""FLOPs of a kernel over those of a forward pass: dQ and dK, dV each compute S and dP."""
TODAY = {"forward": "today-fwd", "dQ": "today-dq", "dK, dV": "today-dkdv", "backward": "today-bwd"}
SECONDS = 0.3
_LIMIT = 240
"""Seconds of a process that compares."""
_SIDE_BY_SIDE = 8

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Inputs:
    """What the kernels take: tensors [B, H, T, d], what today's kernels make of them, and L and δ as candidates do."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    saved: tuple[Tensor, Tensor, Tensor]
    """O, L and the residual of O."""
    rows: Tensor
    drift: Tensor
    deltas: Tensor
    context: dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """One kernel.

    Args:
        kind: which of :data:`WORK`.
        run: O, L and the residual of O; dQ; dK and dV; or all three gradients.
        sizes: features of a head that it takes.
    """

    kind: str
    run: Callable[[Inputs], Outputs]
    sizes: tuple[int, ...] = (64, 128)


def today(
    kind: str, tiles: TileSizes | None = None, folded: bool = False, sizes: tuple[int, ...] = (64, 128)
) -> Candidate:
    """Return the kernel of today, with other tiles or with α in the factor of the exponential.

    Args:
        folded: S stays without α where that is no power of two; one multiplication an element less.
    """
    variant = dataclasses.replace(VARIANT, name=f"{kind} {tiles} {folded}", block_k=tiles.bk if tiles else 64)

    def run(of: Inputs) -> Outputs:
        with ExitStack() as changed:
            if tiles:
                field = {"forward": "forward", "dQ": "grad_q", "dK, dV": "grad_kv"}[kind]
                table = dataclasses.replace(tiles_of("sm_90", of.q.shape[-1]), **{field: tiles})
                changed.enter_context(patch.object(launch, "tiles_of", lambda *_: table))
            if folded:
                changed.enter_context(patch.object(launch, "compile_time_choices", _folded))
            if kind == "forward":
                return launch.flash_fwd(of.q, of.k, of.v, variant, **of.context)[:3]
            if kind == "dQ":
                return launch.flash_bwd_dq(of.grad_out, of.q, of.k, of.v, *of.saved, variant, **of.context)[:1]
            if kind == "backward":
                nothing = of.q.new_empty(0)  # no keys are centred
                return launch.flash_bwd(of.grad_out, of.q, of.k, of.v, *of.saved, nothing, variant, **of.context)
            return launch.flash_bwd_dkdv(of.grad_out, of.q, of.k, of.v, of.rows, of.drift, variant, **of.context)

    return Candidate(kind, run, sizes)


def _folded(variant: AttentionVariant, layer: int, scale: float, *rest: Any) -> Choices:
    return dataclasses.replace(compile_time_choices(variant, layer, scale, *rest), prescale=1.0, unit=scale)


def forward(bq: int = 128, sizes: tuple[int, ...] = (64, 128), **choices: bool) -> Candidate:
    """Return the forward pass with warps of three roles; FUSED, TURNS and persistent are its choices."""
    chosen = {"FUSED": False, "TURNS": bq == 128, "persistent": True, **choices}

    def run(of: Inputs) -> Outputs:
        stages = 2 if of.q.shape[-1] == 128 else 3
        return tuple(launches.forward(of.q, of.k, of.v, bq=bq, stages=stages, **chosen))

    return Candidate("forward", run, sizes)


def grad_q(bk: int, stages: int, persistent: bool = True, sizes: tuple[int, ...] = (64, 128)) -> Candidate:
    """Return δ and dQ with warps of three roles."""

    def run(of: Inputs) -> Outputs:
        rows = launches.row_deltas(of.grad_out, *of.saved)
        found = launches.grad_q(of.grad_out, of.q, of.k, of.v, rows, bk=bk, stages=stages, persistent=persistent)
        return (found,)

    return Candidate("dQ", run, sizes)


def grad_kv(stages: int, persistent: bool = True) -> Candidate:
    """Return dK and dV with warps of three roles."""

    def run(of: Inputs) -> Outputs:
        return launches.grad_kv(of.grad_out, of.q, of.k, of.v, of.deltas, stages=stages, persistent=persistent)

    return Candidate("dK, dV", run)


def one_pass(persistent: bool = True) -> Candidate:
    """Return the backward pass in one kernel, between one for δ and one that rounds dQ."""

    def run(of: Inputs) -> Outputs:
        rows = launches.row_deltas(of.grad_out, *of.saved)
        return launches.all_grads(of.grad_out, of.q, of.k, of.v, rows, stages=2, persistent=persistent)

    return Candidate("backward", run)


CANDIDATES: dict[str, Candidate] = {
    **{name: today(kind) for kind, name in TODAY.items()},
    "fwd-128x64-8-2": today("forward", TileSizes(128, 64, 8, 2)),
    "fwd-128x64-8-3": today("forward", TileSizes(128, 64, 8, 3)),
    "fwd-128x128-8-2": today("forward", TileSizes(128, 128, 8, 2)),
    "fwd-folded": today("forward", folded=True, sizes=(128,)),
    "fwd-128x64-8-3-folded": today("forward", TileSizes(128, 64, 8, 3), folded=True, sizes=(128,)),
    "fwd-turns": forward(),
    "fwd-turns-fused": forward(FUSED=True),
    "fwd-no-turns": forward(TURNS=False),
    "fwd-turns-a-block": forward(persistent=False),
    "fwd-3-groups": forward(192, sizes=(64,)),
    "dq-128x64-8-2": today("dQ", TileSizes(128, 64, 8, 2)),
    "dq-128x64-8-3": today("dQ", TileSizes(128, 64, 8, 3)),
    "dq-folded": today("dQ", folded=True, sizes=(128,)),
    "dq-groups-64-2": grad_q(64, 2),
    "dq-groups-64-3": grad_q(64, 3),
    "dq-groups-128-2": grad_q(128, 2, sizes=(64,)),
    "dq-groups-64-2-a-block": grad_q(64, 2, persistent=False),
    "dkdv-64x128-8-2": today("dK, dV", TileSizes(64, 128, 8, 2)),
    "dkdv-32x128-8-3": today("dK, dV", TileSizes(32, 128, 8, 3)),
    "dkdv-folded": today("dK, dV", folded=True, sizes=(128,)),
    "dkdv-groups-2": grad_kv(2),
    "dkdv-groups-2-a-block": grad_kv(2, persistent=False),
    "bwd-one-pass": one_pass(),
    "bwd-one-pass-a-block": one_pass(persistent=False),
}
"""By name; of today's kernels with other tiles it says queries × keys, warps and stages."""


def inputs(shape: AttentionShape, device: str | torch.device) -> Inputs:
    """Return random tensors, and what today's kernels make of them."""
    random = torch.Generator(device).manual_seed(0)
    q, k, v, grad_out = (torch.randn(shape, device=device, generator=random, dtype=torch.bfloat16) for _ in range(4))
    context: dict[str, Any] = {"layer": 1, "seed_and_step": torch.zeros(2, dtype=torch.int64, device=device)}
    saved = launch.flash_fwd(q, k, v, VARIANT, **context)[:3]
    _, rows, drift = launch.flash_bwd_dq(grad_out, q, k, v, *saved, VARIANT, **context)
    return Inputs(q, k, v, grad_out, saved, rows, drift, launches.row_deltas(grad_out, *saved), context)


def errors(name: str) -> dict[int, float]:
    """Return, by features of a head, how far a candidate is from FP64: the largest of its outputs' RMS errors over
    those of today's."""
    found = {}
    kind = CANDIDATES[name].kind
    for size in CANDIDATES[name].sizes:
        of = inputs((*COMPARED[:3], size), "cuda")
        mine, todays = (_compared(CANDIDATES[one], of) for one in (name, TODAY[kind]))
        ratios = [
            float((one - true).square().mean().sqrt() / (other - true).square().mean().sqrt())
            for one, other, true in zip(mine, todays, _exact(of)[kind], strict=True)
        ]
        found[size] = max(ratios, key=lambda ratio: math.inf if math.isnan(ratio) else ratio)
    return found


def _compared(candidate: Candidate, of: Inputs) -> list[Tensor]:
    """Return the outputs that FP64 has, too."""
    outputs = candidate.run(of)
    if candidate.kind == "forward":
        out, logsumexp, residual = outputs
        outputs = out, logsumexp, whole_saved_out(out, residual, VARIANT)
    return [x.double() for x in outputs]


def _exact(of: Inputs) -> dict[str, Outputs]:
    """Return what FP64 makes of the inputs, from the definition."""
    q, k, v = (x.double().requires_grad_() for x in (of.q, of.k, of.v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
    out = scores.softmax(-1) @ v
    grads = torch.autograd.grad(out, (q, k, v), of.grad_out.double())
    out = out.detach()
    return {
        "forward": (out, scores.detach().logsumexp(-1), out),
        "dQ": grads[:1],
        "dK, dV": grads[1:],
        "backward": grads,
    }


def checked(names: Iterable[str]) -> dict[str, dict[int, float] | str]:
    """Return :func:`errors` of each candidate, or the last line of what went wrong."""

    def one(name: str) -> dict[int, float] | str:
        command = [sys.executable, __file__, "--errors-of", name]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False)
        except subprocess.TimeoutExpired:
            return f"hung for {_LIMIT} s"
        if told.returncode:
            return (told.stderr.strip().splitlines() or [f"exit status {told.returncode}"])[-1]
        return {int(size): ratio for size, ratio in json.loads(told.stdout.splitlines()[-1]).items()}

    names = list(names)
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def equal_bits(mine: Outputs, todays: Outputs) -> float:
    """Return the share of elements that are equal."""
    equal = sum(int((one == other).sum()) for one, other in zip(mine, todays, strict=True))
    return equal / sum(x.numel() for x in mine)


def measure(shape: AttentionShape, found: Mapping[str, dict[int, float]], seconds: float) -> Table:
    """Time all candidates of a shape and return the table.

    Args:
        found: :func:`errors` of each.
    """
    of = inputs(shape, "cuda")
    names = [name for name in found if shape[-1] in CANDIDATES[name].sizes]
    same = {}
    for name in names:
        todays = CANDIDATES[TODAY[CANDIDATES[name].kind]].run(of)
        same[name] = equal_bits(CANDIDATES[name].run(of), todays)
    with torch.cuda.stream(torch.cuda.Stream()):
        pool = torch.cuda.graph_pool_handle()
        graphs = {name: CallGraph(partial(CANDIDATES[name].run, of), pool) for name in names}
        times = interleaved({name: graph.seconds for name, graph in graphs.items()}, seconds)
    B, H, T, d = shape
    flops = 4 * B * H * T * T * d / 2
    rows: list[list[object]] = []
    for name in names:
        kind = CANDIDATES[name].kind
        rate = quartiles(WORK[kind] * flops / times[name] / 1e12, ".0f")
        faster = quartiles(times[TODAY[kind]] / times[name], ".2f")
        error, equal = found[name][d], same[name]
        cells = Cell(round(error, 3), f"{error:.2f}"), Cell(equal, f"{equal:.1%}")
        rows.append(["×".join(map(str, shape)), kind, Cell(name, f"`{name}`"), rate, faster, *cells])
    columns = ["shape", "kernel", "candidate", "TFLOP/s", "rate, of today's", "error, of today's", "equal bits"]
    return Table(columns, rows, _fastest(names, times, flops))


def _fastest(names: Iterable[str], times: Mapping[str, Times], flops: float) -> str:
    """Return the line of the fastest of each kind, and the rate of the backward pass that they make."""
    best: dict[str, str] = {}
    for name in sorted(names, key=lambda name: float(np.median(times[name])), reverse=True):
        best[CANDIDATES[name].kind] = name
    both = BACKWARD_WORK * flops / (times[best["dQ"]] + times[best["dK, dV"]]) / 1e12
    return (
        f"Fastest: {', '.join(best.values())}; dQ with dK, dV {quartiles(both, '.0f').text} TFLOP/s of {BACKWARD_WORK}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CANDIDATES), choices=CANDIDATES, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="N", help="of each kernel at each shape")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the table here as text and as CSV")
    parser.add_argument("--errors-of", choices=CANDIDATES, metavar="NAME", help="print the errors of one alone")
    with exit_in_one_line():
        run(parser.parse_args())


def run(arguments: argparse.Namespace) -> None:
    """Measure what the arguments ask for.

    Raises:
        UserError: this machine does not allow it.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise UserError("the candidates are for Hopper; no H100 or H200 is visible")
    if arguments.errors_of:
        print(json.dumps(errors(arguments.errors_of)))
        return
    device = torch.device("cuda", torch.cuda.current_device())
    found = checked(dict.fromkeys([*TODAY.values(), *arguments.only]))
    for name, failure in found.items():
        if isinstance(failure, str):
            notify(f"{name}: {failure}")
    right = {name: ratios for name, ratios in found.items() if not isinstance(ratios, str)}
    what = "FLOPs as executed; medians (quartiles); rate and RMS error from FP64 over those of today's kernel"
    report = Report("candidates", heading(device, what), arguments.out)
    for shape in SHAPES:
        report.add(measure(shape, right, arguments.seconds))


if __name__ == "__main__":
    main()
