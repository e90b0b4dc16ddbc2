"""Forward and backward TFLOP/s of every variant and of PyTorch's backends on one GPU: a table, and a CSV.

``python scripts/bench_kernels.py [--csv FILE] [--attention NAME …]``. Causal attention, BF16; medians and quartiles
over replays of a CUDA graph; FLOPs as FlashAttention counts them: 4·B·H·T²·d / 2 forward, 2.5 times that backward.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashpoint.numerics.dispatch import attention
from flashpoint.numerics.variant import AttentionVariant

SHAPES = [(32, 12, 1024, 64), (64, 4, 512, 64), (8, 16, 4096, 64), (8, 16, 4096, 128)]  # B, H, T, d
BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "naive_bf16": SDPBackend.MATH,
}
CALLS, WARM_UPS, REPLAYS = 10, 5, 30
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def candidates() -> dict[str, Attention]:
    """Return every attention to time, by name."""
    seed_and_step = torch.zeros(2, dtype=torch.int64, device="cuda")

    def backend(kind: SDPBackend) -> Attention:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(kind):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return run

    def ours(variant: AttentionVariant) -> Attention:
        return lambda q, k, v: attention(q, k, v, variant, layer=1, seed_and_step=seed_and_step)

    files = sorted((Path(__file__).parent.parent / "configs/attn").glob("*.yaml"))
    variants = [AttentionVariant.from_dict(yaml.safe_load(path.read_text())) for path in files]
    kernels = [variant for variant in variants if variant.kernel == "flash"]
    return {
        **{name: backend(kind) for name, kind in BACKENDS.items()},
        **{variant.name: ours(variant) for variant in kernels},
    }


def time_attention(run: Attention, shape: tuple[int, int, int, int]) -> dict[str, float]:
    """Return TFLOP/s forward and backward, with quartiles, and peak memory in MiB beyond the inputs."""
    B, H, T, d = shape
    flops = 2 * B * H * T * T * d
    with torch.cuda.stream(torch.cuda.Stream()):  # a graph holds only work of its own stream
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = run(q, k, v)
        grad_out = torch.randn_like(out)
        out.backward(grad_out, retain_graph=True)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        forward = milliseconds(lambda: run(q, k, v))
        backward = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True))
    rates: dict[str, float] = {}
    for name, times, work in (("forward", forward, flops), ("backward", backward, 2.5 * flops)):
        slow, median, fast = work / np.percentile(times, [75, 50, 25]) / 1e9
        rates |= {f"{name}_tflops": median, f"{name}_low": slow, f"{name}_high": fast}
    return {**rates, "peak_mib": peak}


def milliseconds(call: Callable[[], object]) -> list[float]:
    """Return the time of one call in each of several replays of a CUDA graph that holds a few: the host adds
    nothing."""
    call()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(WARM_UPS + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return times[WARM_UPS:]


def extra_time(result: dict[str, float], control: dict[str, float]) -> dict[str, float]:
    """Return the time beyond the control's, as a share of it, of either pass and of both."""
    times = [{"forward": 1 / x["forward_tflops"], "backward": 2.5 / x["backward_tflops"]} for x in (result, control)]
    for passes in times:
        passes["both"] = passes["forward"] + passes["backward"]
    return {f"{way}_extra": times[0][way] / times[1][way] - 1 for way in times[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--csv", type=Path, help="also write the table here")
    parser.add_argument("--attention", nargs="+", metavar="NAME", help="only these beside flash_fp32 and the backends")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no CUDA device is visible; the benchmark needs one", file=sys.stderr)
        sys.exit(2)
    timed = candidates()
    if arguments.attention:
        if unknown := set(arguments.attention) - set(timed):
            print(f"error: --attention: no {', '.join(sorted(unknown))}; choose of {', '.join(timed)}", file=sys.stderr)
            sys.exit(2)
        timed = {name: timed[name] for name in timed if name in {*BACKENDS, "flash_fp32", *arguments.attention}}
    rows: list[dict[str, Any]] = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
          f"{datetime.date.today()}; ratios are to the best SDPA backend, "
          "percentages are time beyond flash_fp32")  # fmt: skip
    for shape in SHAPES:
        results: dict[str, dict[str, float]] = {}
        for name, run in timed.items():
            try:
                results[name] = time_attention(run, shape)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                print(f"{shape} {name}: not available ({str(error).splitlines()[0][:80]})")
        best = {
            way: max(result[f"{way}_tflops"] for name, result in results.items() if name.startswith("sdpa_"))
            for way in ("forward", "backward")
        }
        for name, result in results.items():
            ratios = {f"{way}_ratio": result[f"{way}_tflops"] / best[way] for way in best}
            ratios |= extra_time(result, results["flash_fp32"])
            rows.append({"shape": "×".join(map(str, shape)), "name": name, **result, **ratios})
            print("{shape:16} {name:18} forward {forward_tflops:5.0f} ({forward_ratio:4.2f}, {forward_extra:+4.0%}) "
                  "backward {backward_tflops:5.0f} ({backward_ratio:4.2f}, {backward_extra:+4.0%}) TFLOP/s, "
                  "both {both_extra:+4.0%}, {peak_mib:7.0f} MiB".format(**rows[-1]), flush=True)  # fmt: skip
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(
                {name: round(x, 3) if isinstance(x, float) else x for name, x in row.items()} for row in rows
            )


if __name__ == "__main__":
    main()
