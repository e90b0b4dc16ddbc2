"""What is left in δ, for every attention on the same Q, K, V and dO: against P∘dP of the same P, and against FP64.

    python scripts/evidence/measure_delta.py            # drawn inputs: normal, tied, sink, one-signed V, large scores
    python scripts/evidence/measure_delta.py runs/RUN   # of a run's last checkpoint, layer by layer
    python scripts/evidence/measure_delta.py runs/RUN --bits 1 2 3 --attn flash_fp32 flash_exact_rowsum

On a CPU by the PyTorch attention. Bias and noise (root mean square) of δ are in units of |dO||O|, the bias with a 95 %
interval as if the rows were independent. What the first pair of columns holds is what the attention leaves of
Σⱼ dSᵢⱼ = 0: the roundings of Ō and O, and that of P̄ where δ is of O. The second pair holds the rounding of S, too. The
errors of dQ and dK are relative to FP64. Of a run the attentions take its mantissa bits, and dO is that of its own O:
a bias that curvature makes shows in those attentions alone that have the run's forward pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flashpoint.cli.table import Cell, Table, show
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.form import Form
from flashpoint.errors import UserError, exit_in_one_line
from flashpoint.files import CONFIGS
from flashpoint.lab.trained_calls import calls_of_run
from flashpoint.numerics import reference
from flashpoint.numerics.deltas import SavedForBackward, deltas_of
from flashpoint.numerics.key_blocks import Inputs
from flashpoint.numerics.named import variant_named, variant_names
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.runs.folder import RunFolder
from flashpoint.watching.captures import read_calls

SPLIT = ("flash_delta_split", "flash_fixed")
"""Attentions whose residual has the bits that the command line names."""
SEQUENCES, LENGTH, SIZE = 16, 256, 64
"""Of the drawn inputs."""
Golden = dict[str, Tensor]
"""δ, |dO||O|, dQ and dK [N, H, …] float64."""


def drawn() -> dict[str, AttentionCall]:
    """Return calls of one head of every kind of stress."""
    calls = {}
    for seed, kind in enumerate(("normal", "tied", "sink", "one-signed V", "large scores")):
        generator = torch.Generator().manual_seed(seed)
        q, k, v, grad_out = (torch.randn(SEQUENCES, 1, LENGTH, SIZE, generator=generator) for _ in range(4))
        if kind == "tied":
            k = k[:, :, torch.arange(LENGTH) // 4]
        elif kind == "sink":
            q, k[:, :, 0] = q + 0.5, 2.0
        elif kind == "one-signed V":
            v = -v.abs() - 1
        elif kind == "large scores":  # up to some 500
            q, k = q * 11, k * 11
        calls[kind] = AttentionCall(
            q.bfloat16(), k.bfloat16(), v.bfloat16(), grad_out.bfloat16(), Form(True, SIZE**-0.5), 1, 0, kind
        )
    return calls


def of_path(path: Path, sequences: int | None) -> tuple[dict[str, AttentionCall], AttentionVariant | None]:
    """Return the calls of a run of this package with its attention, or captured ones."""
    found: list[AttentionCall]
    own = None
    if RunFolder(path).tape.is_file():
        found, own = calls_of_run(RunFolder(path), None, sequences, torch.device("cpu"))
    else:
        found = read_calls(path)
    for call in found:
        plain = call.form.is_plain and call.form.sink is None
        if not (plain and call.form.is_causal) or abs(call.form.scale * call.q.shape[-1] ** 0.5 - 1) > 1e-6:
            raise UserError(f"{path}: only causal attention with α = 1/√d is measured")
    return {f"{path.name} L{call.layer}": call for call in found}, own


def golden(call: AttentionCall) -> Golden:
    """Compute the call in FP64."""
    found = [exact(call, sequence) for sequence in range(len(call.q))]
    out = torch.stack([one.out for one in found])
    return {
        "delta": (call.grad_out.double() * out).sum(-1),
        "bound": torch.stack([one.bound for one in found]),
        "grad_q": torch.stack([one.grad_q for one in found]),
        "grad_k": torch.stack([one.grad_k for one in found]),
    }


def measured(variant: AttentionVariant, call: AttentionCall, true: Golden) -> list[Cell]:
    """Return bias and noise of δ in both units, and the errors of dQ and dK."""
    k, v = (x.repeat_interleave(call.groups, 1) for x in (call.k, call.v))
    heads = call.q.shape[1]
    noise_key = NoiseKey(torch.zeros(2, dtype=torch.int64), 1, torch.arange(heads), heads, len(call.q))
    saved = reference.flash_fwd(call.q, k, v, variant, noise_key)
    grad_q, grad_k, _ = reference.flash_bwd(call.grad_out, call.q, k, v, *saved, variant, noise_key)
    inputs = Inputs.of(call.q, saved[3] if variant.center_keys else k, v, variant, noise_key)
    backward = SavedForBackward(inputs, call.grad_out.float(), *saved[:3])
    delta = deltas_of(backward).of_k.double()
    products, mass = backward.row_sums()
    cells = []
    for error in (delta - (products / mass).double(), delta - true["delta"]):
        bias, noise = error.sum() / true["bound"].sum(), (error.square().sum() / true["bound"].square().sum()).sqrt()
        half = 1.96 * error.std() * error.numel() ** 0.5 / true["bound"].sum()
        cells.append(Cell({"bias": bias.item(), "half": half.item()}, f"{bias:+.1e} ± {half:.0e}"))
        cells.append(Cell(noise.item(), f"{noise:.1e}"))
    for found, name in ((grad_q, "grad_q"), (grad_k, "grad_k")):
        error = (found.double() - true[name]).norm() / true[name].norm()
        cells.append(Cell(error.item(), f"{error:.2e}"))
    return cells


def chosen(names: Sequence[str], bits: Sequence[int], formats: AttentionVariant | None) -> Iterator[AttentionVariant]:
    """Yield the attentions, in a run's formats, those of :data:`SPLIT` once for each number of bits."""
    for name in names or variant_names(CONFIGS / "attn"):
        variant = variant_named(name, CONFIGS / "attn")
        if variant.kernel == "sdpa":
            continue
        variant = variant if formats is None else variant.in_formats_of(formats)
        if name not in SPLIT or not bits:
            yield variant
            continue
        for number in bits:
            yield dataclasses.replace(variant, name=f"{name} {number} bit{'s'[: number > 1]}", out_residual_bits=number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", type=Path, metavar="RUN|CAPTURE", help="default: drawn inputs")
    parser.add_argument("--attn", nargs="+", default=[], metavar="NAME", help="default: all of configs/attn")
    parser.add_argument("--bits", nargs="+", type=int, default=[], help=f"residual bits of {' and '.join(SPLIT)}")
    parser.add_argument("--sequences", type=int, help="of a run; default: as many as have 32,768 tokens")
    arguments = parser.parse_args()
    rows = []
    with exit_in_one_line(ValueError):
        sources = [of_path(path, arguments.sequences) for path in arguments.paths] or [(drawn(), None)]
        for calls, own in sources:
            for inputs, call in calls.items():
                true = golden(call)
                for variant in chosen(arguments.attn, arguments.bits, own):
                    rows.append([inputs, f"`{variant.name}`", *measured(variant, call, true)])
    columns = ["inputs", "attention", "bias, P∘dP", "noise, P∘dP", "bias, FP64", "noise, FP64", "dQ", "dK"]
    show(
        Table(columns, rows),
        "markdown",
        f"PyTorch attention on a CPU, torch {torch.__version__}, {datetime.date.today()}",
    )


if __name__ == "__main__":
    main()
