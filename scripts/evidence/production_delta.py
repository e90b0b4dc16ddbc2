"""The error of δ of production attentions, each on the same weights and batches with a forward pass of its own.

    python scripts/evidence/production_delta.py runs/RUN --steps 4000 2000 --out delta.jsonl \
        --attentions sdpa_flash sdpa_cudnn sdpa_cudnn,fp16_inside=true flex flash_fixed
    python scripts/evidence/production_delta.py --table delta.jsonl...      # the table of docs/findings

The model runs forward and backward with each attention, so that dO is that of its own O. Then the kernel is called anew
on the recorded Q, K, V and dO, with a feature of K that is 1 where Q and V are 0: dQ of it is α·Σⱼ dSᵢⱼ, which is −α
times the error of δ. Shifts stand in front of that call. One line of JSON a run, step, attention and layer. It stops
after ``--minutes``, and goes on where the file ends.

``jax_cudnn`` and ``jax_xla`` are ``jax.nn.dot_product_attention`` by that implementation, and ``FILE.py:FUNCTION`` is
a function of your own, which takes q, k, v [B, H, T, 128], is_causal and scale. The model runs with PyTorch's attention
then, so that dO is that of another O.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import lzma
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from torch.utils import dlpack

from flashpoint.cli.run_words import open_run
from flashpoint.cli.table import ALL, Table, show, with_columns
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.measure_table import ROW_SUMS
from flashpoint.diagnosis.measures import relative
from flashpoint.diagnosis.other_attention import function_of_layer, users_function
from flashpoint.diagnosis.probe import Function
from flashpoint.diagnosis.result_measures import of_grad_q
from flashpoint.diagnosis.roundings import RoundedOut, of_delta
from flashpoint.errors import UserError, command_errors
from flashpoint.files import CONFIGS
from flashpoint.hardware import hardware_name
from flashpoint.lab.analysis.intervals import mean_interval
from flashpoint.lab.trained_calls import batches_of_run
from flashpoint.numerics.named import variant_named
from flashpoint.numerics.production import PRODUCTION
from flashpoint.numerics.stabilizers import center
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.runs.folder import RunFolder

WIDE = 128
"""Features of a head in the call that reads row sums: what every kernel takes, beyond the model's 64."""
RECORDED_BY = {"jax_cudnn": "sdpa_cudnn", "jax_xla": "sdpa"}
"""Attentions of JAX, and the variant with which the model runs in their place."""
FOLLOWED = 16
"""Sequences on which the slope of δ's error on the rounding of O is measured: the reference is slow."""


def attention_of(word: str) -> AttentionVariant:
    """Return the variant of ``NAME`` or ``NAME,key=value,…``."""
    name, *choices = word.split(",")
    variant = variant_named(name, CONFIGS / "attn")
    changes = {key: yaml.safe_load(value) for key, value in (choice.split("=") for choice in choices)}
    return dataclasses.replace(variant, name=word, **changes)


class OfJax(torch.autograd.Function):
    """``jax.nn.dot_product_attention`` of PyTorch's tensors, which both libraries read in place."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, implementation: str
    ) -> Tensor:
        import jax

        attend = partial(jax.nn.dot_product_attention, scale=scale, is_causal=is_causal, implementation=implementation)
        out, ctx.pull_back = jax.vjp(attend, *map(_to_jax, (q, k, v)))
        return _to_torch(out)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        return (*map(_to_torch, ctx.pull_back(_to_jax(grad_out))), None, None, None)


def _to_jax(x: Tensor) -> Any:
    """Return [B, T, H, d] of [B, H, T, d]."""
    import jax

    return jax.dlpack.from_dlpack(x.detach().transpose(1, 2).contiguous())


def _to_torch(x: Any) -> Tensor:
    return dlpack.from_dlpack(x.block_until_ready()).transpose(1, 2)


def of_jax(word: str) -> Function:
    """Return an attention of JAX.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec("jax") is None:
        raise UserError(f"{word}: needs jax; pip install jax, on a GPU 'jax[cuda13]'")
    implementation = word.removeprefix("jax_")

    def function(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
        out: Tensor = OfJax.apply(q, k, v, is_causal, scale, implementation)
        return out

    return function


def recorded_and_other(word: str) -> tuple[AttentionVariant, Function | None]:
    """Return the variant with which the model runs, and what is called anew if it is no variant.

    Raises:
        UserError: the word names no attention, or one that is not installed.
    """
    if ".py:" in word:
        return attention_of("sdpa"), users_function(word)
    if word in RECORDED_BY:
        return attention_of(RECORDED_BY[word]), of_jax(word)
    return attention_of(word), None


def kernel_of(variant: AttentionVariant, layer: int) -> Function:
    """Return what computes a layer behind the shifts, as a function."""
    return function_of_layer(dataclasses.replace(variant, shift_keys="none", shift_values="none"), layer)


def behind_shifts(call: AttentionCall, variant: AttentionVariant) -> AttentionCall:
    """Return the call as the kernel gets it."""
    k, v = call.k, call.v
    if variant.shift_keys != "none":
        k = (k.float() - center(k, variant.shift_keys)).to(k.dtype)
    if variant.shift_values != "none":
        v = (v.float() - center(v, variant.shift_values)).to(v.dtype)
    return dataclasses.replace(call, k=k, v=v)


def with_row_sums(function: Function, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return O [N, H, T, d] of a call that is widened, and Σⱼ dSᵢⱼ / α [N, H, T] float64."""
    d = call.q.shape[-1]
    q, k, v, grad_out = (F.pad(x, (0, WIDE - d)) for x in (call.q, call.k, call.v, call.grad_out))
    k[..., d] = 1.0
    q.requires_grad_()
    with torch.enable_grad():
        out = function(q, k, v, call.form.is_causal, call.form.scale)
    (grad_q,) = torch.autograd.grad(out, q, grad_out.to(out.dtype))
    return out.detach()[..., :d], grad_q[..., d].double() / call.form.scale


def measured(
    call: AttentionCall, variant: AttentionVariant, follow: int, other: Function | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield measures [H] of each sequence of a call of one layer.

    Args:
        variant: which made the call.
        follow: how many of the sequences say whether δ follows O.
        other: what is called anew, if it is not the variant.
    """
    call = behind_shifts(call, variant)
    out, row_sums = with_row_sums(other or kernel_of(variant, call.layer), call)
    assert call.out is not None
    assert call.grad_q is not None
    for n in range(len(call.q)):
        true = exact(call, n)
        error = -row_sums[n]
        found = relative(ROW_SUMS, error, true.bound)
        if other is None and variant.shift_keys == "none" and variant.shift_values == "none":
            found["along_mean_key"] = of_grad_q(call.grad_q[n].double(), true)["along_mean_key"]
        if n < follow:
            none = torch.zeros_like(error)
            of_outs = {"follows_out": out} if other else {"follows_out": out, "follows_narrow_out": call.out}
            for name, of in of_outs.items():
                slopes = of_delta(RoundedOut(call, of, n), error, none, true)
                found[name] = slopes["delta_follows_out"]
        yield found


def measure(run: Path, step: int, word: str, sequences: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each layer."""
    variant, other = recorded_and_other(word)
    batches, _ = batches_of_run(RunFolder(run), step, sequences, device, variant)
    layers: dict[int, list[dict[str, Tensor]]] = {}
    at = step
    for calls in batches:
        for call in calls:
            of_layer = layers.setdefault(call.layer, [])
            at = call.step
            of_layer += measured(call, variant, max(0, FOLLOWED - len(of_layer)), other)
    if (found := min(map(len, layers.values()))) < sequences:
        raise UserError(
            f"{found} sequences follow that step, not {sequences}; train longer, or give --sequences {found}"
        )
    package = "torch" if variant.kernel == "flash" else PRODUCTION[variant.kernel].package
    package = "jax" if word in RECORDED_BY else package
    corpus = open_run(str(run)).manifest.data.fingerprint
    return [
        {
            "run": run.name, "corpus": corpus, "step": at, "attention": word, "layer": layer, "sequences": len(of),
            "hardware": hardware_name(device), "torch": torch.__version__,
            "package": package, "version": version(package), "cudnn": torch.backends.cudnn.version(), **summary(of),
        }
        for layer, of in sorted(layers.items())
    ]  # fmt: skip


def summary(of: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Return, over the sequences of a layer, of all heads together and of each head [H].

    ``bias``: Σ ε / Σ |dO||O|. ``z``: the mean of Σ ε of a sequence, in its standard errors. ``noise``: (Σ ε² /
    Σ (|dO||O|)²)^½.
    """
    sums, bounds = (torch.stack([one[f"row_sum_{part}"] for one in of]) for part in ("sum", "bound"))
    noises = torch.stack([one["row_sum_noise"] for one in of])

    def of_heads(sums: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        total = bounds.sum(0)
        bias = sums.sum(0) / total
        left = (sums - bias * bounds).square().sum(0) * len(sums) / (len(sums) - 1)
        return bias, bias / (left.sqrt() / total)

    bias, z = of_heads(sums.sum(1), bounds.sum(1))
    head_bias, head_z = of_heads(sums, bounds)
    weights = bounds / bounds.square().sum().sqrt()
    noise = (noises * weights).square().sum().sqrt()
    by_head = (noises * bounds / bounds.square().sum(0).sqrt()).square().sum(0).sqrt()
    result: dict[str, Any] = {
        "bias": bias.item(), "z": z.item(), "noise": noise.item(), "bias_over_noise2": (bias / noise.square()).item(),
        "head_bias": head_bias.tolist(), "head_z": head_z.tolist(), "head_noise": by_head.tolist(),
    }  # fmt: skip
    for name in ("follows_out", "follows_narrow_out", "along_mean_key"):
        if held := [one[name] for one in of if name in one]:
            result[name] = torch.stack(held).nanmean(0).tolist()
    return result


def table(paths: Sequence[Path], step: int, layer: int) -> Table:
    """Return a row for each attention: means over runs, with 95 % intervals, of one layer at one step.

    "version" is that of the package that calls the kernel, and cuDNN's own beside PyTorch's. A kernel of flashpoint has
    PyTorch's.
    """
    rows = [json.loads(line) for path in paths for line in _text(path).splitlines()]
    rows = [row for row in rows if row["step"] == step and row["layer"] == layer]
    found = []
    for word in dict.fromkeys(row["attention"] for row in rows):
        of = [row for row in rows if row["attention"] == word]

        def mean(name: str, of: list[dict[str, Any]] = of) -> list[float]:
            return [float(np.mean(row[name])) for row in of if name in row]

        biased = sum(row["z"] > 0 for row in of)
        cells = [
            f"`{word}`",
            ", ".join(dict.fromkeys(map(_version, of))),
            ", ".join(map(str, sorted({row["sequences"] for row in of}))),
            f"{biased} of {len(of)}",
            f"{sum(mean('z')) / len(of) ** 0.5:.1f}",
        ]
        for name in ("noise", "bias", "bias_over_noise2", "follows_out", "follows_narrow_out", "along_mean_key"):
            values = mean(name)
            if not values:
                cells.append("")
                continue
            middle, half = mean_interval(values)
            between = "" if half is None else f" ({middle - half:.2g} to {middle + half:.2g})"
            cells.append(f"{middle:.2g}{between}")
        found.append(cells)
    columns = [
        "attention", "version", "sequences", "bias > 0", "Σz/√n", "noise", "bias", "bias / noise²", "follows O",
        "follows O of 64 features", "along the mean key",
    ]  # fmt: skip
    return Table(columns, found)


def _version(row: dict[str, Any]) -> str:
    package = f"{row['package']} {row['version']}"
    if not row["attention"].startswith("sdpa_cudnn"):
        return package
    major, rest = divmod(row["cudnn"], 10_000)
    return f"{package}, cuDNN {major}.{rest // 100}.{rest % 100}"


def _text(path: Path) -> str:
    return lzma.open(path, "rt").read() if path.suffix == ".xz" else path.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN|FILE", help="a run's folder; with --table an --out")
    parser.add_argument(
        "--attentions", nargs="+", default=[*PRODUCTION], metavar="NAME[,key=value]|FILE.py:FUNCTION",
        help="variants of configs/attn, or a function of yours (default: every library's)",
    )  # fmt: skip
    parser.add_argument("--steps", nargs="+", type=int, default=[4000], help="of checkpoints (default: 4000)")
    parser.add_argument("--sequences", type=int, default=256, help="to measure on, after that step (default: 256)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no measurement after these")
    parser.add_argument(
        "--out", type=Path, default=Path("production_delta.jsonl"), help="to add to (default: production_delta.jsonl)"
    )
    parser.add_argument("--table", action="store_true", help="print the table of such files")
    parser.add_argument("--layer", type=int, default=2, help="with --table (default: 2)")
    parser.add_argument(
        "--columns", default=ALL, metavar="NAME,…", help="with --table: those to show, by how they begin"
    )
    arguments = parser.parse_args()
    with command_errors():
        if arguments.table:
            for step in arguments.steps:
                found = table(arguments.paths, step, arguments.layer)
                show(with_columns([found], arguments.columns.split(",")), "markdown")
            return
        if failed := _measure_missing(arguments):
            raise UserError(f"not measured: {', '.join(failed)}; the lines above say why")


def _measure_missing(arguments: argparse.Namespace) -> list[str]:
    """Measure what the file does not have, and return what failed."""
    until = time.monotonic() + arguments.minutes * 60
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    done = {(row["asked"], row["attention"], row["run"]) for row in map(json.loads, lines)}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failed: list[str] = []
    for step, word, run in product(arguments.steps, arguments.attentions, arguments.paths):
        if (step, word, run.name) in done or time.monotonic() > until:
            continue
        started, named = time.monotonic(), f"{run.name} {step} {word}"
        try:
            rows = measure(run, step, word, arguments.sequences, device)
        except Exception as error:  # one kernel that does not run must not cost the others
            failed.append(named)
            told = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            print(f"{named}: {told}", file=sys.stderr, flush=True)
            continue
        with arguments.out.open("a") as file:
            file.writelines(json.dumps({"asked": step, **row}) + "\n" for row in rows)
        print(f"{named}: {time.monotonic() - started:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    main()
