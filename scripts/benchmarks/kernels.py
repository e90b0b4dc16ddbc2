"""TFLOP/s and memory of every attention: this package's variants, PyTorch's, and packages where installed.

Causal attention in BF16. A pass is timed by replays of a CUDA graph, so that the host adds nothing. A CPU computes it
with the PyTorch attention, to see that it runs. FLOPs are counted
as FlashAttention counts them: with B sequences, H heads, T tokens and d features a head, 4·B·H·T²·d / 2 forward, and
2.5 times as many backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import BACKENDS, FLEX, Attention, backend, compiled, installed
from benchmarks.rounds import ROUNDS, Timed, Times, block, interleaved, quartiles
from benchmarks.shapes import AttentionShape, composed, overrides_of
from benchmarks.shown import Report, heading
from flashpoint.cli.table import Cell, Table
from flashpoint.errors import notify
from flashpoint.files import CONFIGS
from flashpoint.hardware import cores
from flashpoint.numerics.dispatch import attention
from flashpoint.numerics.named import variant_names
from flashpoint.numerics.outside_delta import CORRECTED
from flashpoint.numerics.variant import AttentionVariant

CONTROL = "flash_fp32"
"""The variant that the others' additional time is told against."""
AGAIN = f"{CONTROL} again"
"""The control once more, with tensors of its own: the time that it takes beyond the control is noise."""
BACKWARD_WORK = 2.5
"""FLOPs of a backward pass over those of a forward pass."""
PASSES = {"forward": 1.0, "backward": BACKWARD_WORK}
_CALLS = 10
"""Of a pass in a CUDA graph, or fewer that take this long: a long one needs no others to hide what a launch costs."""
_GRAPH_SECONDS = 5e-3
_PROCESSES = 16
"""That compile at a time at most: each takes a context of the GPU."""


@dataclass(frozen=True)
class Measured:
    """One attention at one shape."""

    times: dict[str, Times]
    """By pass."""
    peak: float | None
    """MiB of a GPU's memory beyond Q, K and V."""


def measure(
    device: torch.device, shapes: Sequence[AttentionShape], attentions: Sequence[str], seconds: float, out: Path | None
) -> None:
    """Print and write the table.

    Args:
        attentions: ``NAME[,KEY=VALUE…]`` to measure beside the control and what is not this package's; none are all
            variants that have kernels.
        seconds: of each pass of each attention at each shape.
        out: folder for the files.

    Raises:
        UserError: one of the attentions is no variant.
    """
    variants = chosen(attentions)
    if device.type == "cuda":
        compile_side_by_side(variants, shapes)
    attentions_of, missing = candidates(variants, device)
    what = (
        f"causal attention in BF16 in {ROUNDS} rounds, medians (quartiles); shapes are batch × heads × context × "
        f"features; ratios are to PyTorch's fastest backend, percentages are time beyond {CONTROL}; those of "
        f"`{AGAIN}`, the same a second time, are noise"
    )
    report = Report("kernels", heading(device, what), out)
    for shape in shapes:
        try:
            measured, failures = _at(shape, attentions_of, seconds, device)
        except Exception as error:
            measured, failures = {}, [f"Not measured at {_named(shape)}: {_short(error)}."]
        report.add(kernels_table(shape, measured, [*missing, *failures]))
        missing = []  # told once


def chosen(attentions: Sequence[str]) -> list[AttentionVariant]:
    """Return the variants to measure, the control among them; all that have kernels if ``attentions`` are none.

    Another library's kernel is among them where its δ is corrected; as it is it is measured anyway.

    Args:
        attentions: ``NAME[,KEY=VALUE…]`` each; settings beside those of the attention have no effect.

    Raises:
        UserError: one of the attentions is no variant.
    """
    names = [CONTROL, *attentions] if attentions else variant_names(CONFIGS / "attn")
    variants = {variant.name: variant for variant in (composed(overrides_of(name)).attn for name in names)}
    return [variant for variant in variants.values() if variant.kernel == "flash" or _is_corrected(variant)]


def _is_corrected(variant: AttentionVariant) -> bool:
    return variant.kernel in CORRECTED and variant.delta != "out"


def candidates(variants: Sequence[AttentionVariant], device: torch.device) -> tuple[dict[str, Attention], list[str]]:
    """Return every attention to time, by name, and a line for each that is not installed."""
    of_packages, missing = installed()
    found = {
        **{name: backend(kind) for name, kind in BACKENDS.items()},
        **of_packages,
        **{variant.name: _ours(variant, device) for variant in variants},
        AGAIN: _ours(next(variant for variant in variants if variant.name == CONTROL), device),
    }
    return found, missing


def compile_side_by_side(variants: Sequence[AttentionVariant], shapes: Sequence[AttentionShape]) -> None:
    """Fill Triton's cache with the kernels of the variants, in several processes: one after another takes minutes."""
    work = [(variant, shape) for shape in shapes for variant in variants]
    processes = min(cores(), _PROCESSES, len(work))
    notify(f"compiling {len(variants)} variants at {len(shapes)} shapes in {processes} processes")
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:  # CUDA does not survive a fork
        try:
            list(pool.map(_compile, work))
        except BrokenProcessPool:
            notify("a process that compiled has ended; what is missing is compiled where it is measured")


def kernels_table(shape: AttentionShape, measured: Mapping[str, Measured], failures: Sequence[str]) -> Table:
    """Return the table of one shape.

    Args:
        failures: a line for each attention that was not measured.
    """
    B, H, T, d = shape
    flops = 4 * B * H * T * T * d / 2
    control = measured.get(CONTROL)
    rows: list[list[object]] = []
    for name, result in measured.items():
        row: list[object] = [_named(shape), Cell(name, f"`{name}`")]
        for way, work in PASSES.items():
            times, best = result.times[way], _best(measured, way)
            row.append(quartiles(work * flops / times / 1e12, ".0f"))
            row.append(quartiles(best / times, ".2f") if best is not None else None)
            row.append(quartiles(times / control.times[way] - 1, "+.1%") if control else None)
        row.append(quartiles(_both(result) / _both(control) - 1, "+.1%") if control else None)
        rows.append([*row, None if result.peak is None else Cell(round(result.peak, 1), f"{result.peak:,.0f}")])
    of_passes = [f"{way}, {what}" for way in PASSES for what in ("TFLOP/s", "ratio", "beyond")]
    return Table(["shape", "attention", *of_passes, "both, beyond", "MiB"], rows, " ".join(failures))


def _best(measured: Mapping[str, Measured], way: str) -> Times | None:
    """Return the times of the backend of PyTorch that is fastest in a pass."""
    backends = [result.times[way] for name, result in measured.items() if name.startswith("sdpa_")]
    return min(backends, key=lambda times: sorted(times)[len(times) // 2], default=None)


def _both(result: Measured) -> Times:
    return result.times["forward"] + result.times["backward"]


def _at(
    shape: AttentionShape, attentions: Mapping[str, Attention], seconds: float, device: torch.device
) -> tuple[dict[str, Measured], list[str]]:
    """Return what was measured at a shape, and a line for each attention that is not available."""
    failures: list[str] = []
    peaks: dict[str, float | None] = {}
    passes: dict[str, dict[str, Timed]] = {}
    on_gpu = device.type == "cuda"
    # A graph holds only work of its own stream.
    with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext():
        inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]
        for name, run in attentions.items():
            try:
                peaks[name], passes[name] = _passes(run, inputs)
            except Exception as error:  # of a shape, a chip or another library
                failures.append(f"Not available at {_named(shape)}: {name} ({_short(error)}).")
                notify(failures[-1])
        timed = {f"{way} {name}": seconds_of for name, both in passes.items() for way, seconds_of in both.items()}
        times = interleaved(timed, seconds)
    measured = {name: Measured({way: times[f"{way} {name}"] for way in PASSES}, peaks[name]) for name in passes}
    del passes, timed
    if on_gpu:
        torch.cuda.empty_cache()
    return measured, failures


class CallGraph:
    """A CUDA graph of a few calls.

    Args:
        call: holds the tensors that the graph reads, for as long as this object lives.
        pool: of the graph's memory.
    """

    def __init__(self, call: Callable[[], object], pool: Any) -> None:
        self._call = call  # each capture gives freed memory back to the driver, and a graph would read it
        call()
        self._calls = max(1, min(_CALLS, int(_GRAPH_SECONDS / _elapsed(call))))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=torch.cuda.current_stream()):
            for _ in range(self._calls):
                call()

    def seconds(self, calls: int) -> float:
        """Return the seconds of ``calls`` calls; it takes as many graphs as hold them, after one that is not timed."""
        replays = -(-calls // self._calls)
        self._graph.replay()

        def replayed() -> None:
            for _ in range(replays):
                self._graph.replay()

        return _elapsed(replayed) * calls / (replays * self._calls)


def _elapsed(work: Callable[[], object]) -> float:
    """Return the seconds that the GPU takes for what is launched."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _passes(run: Attention, inputs: Sequence[Tensor]) -> tuple[float | None, dict[str, Timed]]:
    """Return the peak memory of both passes beyond the inputs, MiB, and what times each."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    first = run(q, k, v)  # which compiles, and makes masks
    torch.autograd.grad(first, (q, k, v), torch.zeros_like(first))
    del first
    on_gpu = q.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    out = run(q, k, v)
    grad_out = torch.randn_like(out)

    def forward() -> object:
        return run(q, k, v)

    def backward() -> object:
        return torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)

    backward()
    if not on_gpu:
        return None, {"forward": _launched(forward, q.device), "backward": _launched(backward, q.device)}
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    pool = torch.cuda.graph_pool_handle()  # of both passes, of which nobody reads the results
    return peak, {"forward": CallGraph(forward, pool).seconds, "backward": CallGraph(backward, pool).seconds}


def _launched(call: Callable[[], object], device: torch.device) -> Timed:
    return lambda calls: block(call, calls, device)


def _ours(variant: AttentionVariant, device: torch.device) -> Attention:
    seed_and_step = torch.zeros(2, dtype=torch.int64, device=device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, variant, layer=1, seed_and_step=seed_and_step)

    return compiled(FLEX, run) if variant.kernel == FLEX else run  # uncompiled, FlexAttention is another one


def _compile(work: tuple[AttentionVariant, AttentionShape]) -> None:
    """Run both passes of a variant at a shape: whether a number divides by 16 is part of what Triton compiles for.

    What fails here fails again where it is measured, and is told there.
    """
    variant, shape = work
    with contextlib.suppress(Exception):
        q, k, v = (torch.zeros(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        out = _ours(variant, torch.device("cuda"))(q, k, v)
        out.backward(torch.zeros_like(out))
        torch.cuda.synchronize()


def _named(shape: AttentionShape) -> str:
    return "×".join(map(str, shape))


def _short(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:80]
