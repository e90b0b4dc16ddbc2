"""Does the error of δ keep its sign before the explosion? ``python scripts/delta_bias.py RUN [RUN …]``

For each head of the hottest layer, or of those of ``--layers``: Σ (δ_lp − δ_hp) over all observed steps up to
``--until`` (default: 1,000 steps before the onset, or the end), in units of its own standard error, were the errors of
all tokens independent with mean zero; and the share of observed steps at which the sum over tokens was positive, with
its 95 % Clopper–Pearson interval. Then, where it was measured, the bias and the root mean square of the error in the
unit of ``attn.delta_error.size``, the bias as a mean over the observed steps with its 95 % interval (Student's t).

``--by layer`` prints a row for each run: the same Σ over all heads of a layer in its standard errors, z, in bold that
of the hottest layer; and of that one bias, noise, bias over noise², and in nats of the loss summed over the step's N
tokens: the sensitivity N·|dO_i|·|O_i|, root mean square, and the mean of N·error over its mean square with its 95 %
interval over the steps, of which drawn_targets.py says what theory makes it. Then, of several runs, Σz/√n, and by layer
the last three as means over the runs with their 95 % intervals.

``--by attention`` prints a row for each attention: bias and noise in that unit, means over steps, heads and layers
(all, or those of ``--layers``), and the bias over the square of the noise, with 95 % intervals over the runs.

``--since`` leaves out earlier steps, ``--last N`` all but the last N before ``--until``, and ``--of row_sum`` takes the
error against the exact row sum, which that of P̄ is part of; its Σ is not recorded.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError, script_errors
from flashpoint.report.bias import Relative, Sums, Window
from flashpoint.report.intervals import clopper_pearson, mean_and_interval, plus_minus
from flashpoint.report.provenance import provenance
from flashpoint.report.series import RecordedRun


def by_head(run: RecordedRun, of: str, layers: Sequence[int] | None, window: Window) -> Iterator[str]:
    """A line for each head of these layers, or of the hottest."""
    sums = Sums.of(run, window) if of == "delta_error" else None
    relative = Relative.of(run, of, window) if of == "row_sum" or run.by_head(f"{of}_relative_bias") else None
    _, values = run.measured_by_head("delta_error_sum" if sums else "row_sum_relative_bias")
    L, H, _ = values.shape
    for layer, head in product(_known(run, layers or [run.hottest_layer], L), range(H)):
        told = [_summed(sums, layer, head)] if sums else []
        if relative and relative.biases.shape[-1] > 1:
            biases, noises = relative.biases[layer - 1, head], relative.noises[layer - 1, head]
            told.append(f"bias {plus_minus(biases, '+.1e')}, noise {np.sqrt(np.square(noises).mean()):.1e}")
        yield f"{run.name:24} L{layer}H{head + 1}  {'; '.join(told)}"


def _summed(sums: Sums, layer: int, head: int) -> str:
    heads = slice(head, head + 1)
    errors = sums.by_step[layer - 1, head]
    positive = int((errors > 0).sum())
    low, high = clopper_pearson(positive, len(errors))
    total, expected = sums.total(layer, heads), sums.expected(layer, heads)
    in_errors = f"= {total / expected:+5.2f} standard errors, " if expected else ""
    return (
        f"Σ {total:+.2e} {in_errors}"
        f"positive at {positive} of {len(errors)} observed steps ({100 * low:.0f} to {100 * high:.0f} %)"
    )


def by_layer(runs: Sequence[RecordedRun], window: Window) -> Iterator[str]:
    """Markdown, a row a run; of several runs four more, of all."""
    count = max(run.measured_by_head("delta_error_sum")[1].shape[0] for run in runs)
    ratios, *others = (np.full((len(runs), count), np.nan) for _ in range(4))
    columns = ["bias", "noise", "bias / noise²", "sensitivity", "bias / variance"]
    yield f"| run | verdict | {' | '.join([*(f'layer {layer + 1}' for layer in range(count)), *columns])} |"
    yield "|---|---|" + "---|" * (count + len(columns))
    for number, run in enumerate(runs):
        sums, relative = Sums.of(run, window), Relative.of(run, "delta_error", window)
        cells = [""] * count
        for layer in range(1, len(sums.by_step) + 1):
            if expected := sums.expected(layer):  # none, where δ takes no part of O's error
                ratios[number, layer - 1] = ratio = sums.total(layer) / expected
                one = relative.layers([layer])
                values = (
                    one.bias / one.variance,
                    sums.sensitivity(relative, layer),
                    sums.bias_over_variance(layer).mean(),
                )
                for table, value in zip(others, values, strict=True):
                    table[number, layer - 1] = value
                cells[layer - 1] = f"**{ratio:+.1f}**" if layer == run.hottest_layer else f"{ratio:+.1f}"
        cells += _of_layer(sums, relative, run.hottest_layer)
        yield f"| `{run.name}` | {run.verdict} | {' | '.join(cells)} |"
    if len(runs) > 1:
        rest = " |" * len(columns)
        together = [f"{column.sum() / len(column) ** 0.5:+.1f}" if len(column) else "" for column in _measured(ratios)]
        yield f"| all | Σz/√n | {' | '.join(together)} |{rest}"
        for name, form, table in zip(columns[2:], (".1f", ".1f", ".2f"), others, strict=True):
            means = [
                "{} ({})".format(*mean_and_interval(column, form)) if len(column) > 1 else ""
                for column in _measured(table)
            ]
            yield f"| all | {name} | {' | '.join(means)} |{rest}"


def _of_layer(sums: Sums, relative: Relative, layer: int) -> list[str]:
    one = relative.layers([layer])
    cells = [plus_minus(one.biases.mean((0, 1)), "+.1e"), f"{one.variance**0.5:.1e}"]
    if not one.variance:
        return [*cells, "", "", ""]
    in_nats = plus_minus(sums.bias_over_variance(layer), ".2f")
    return [*cells, f"{one.bias / one.variance:.1f}", f"{sums.sensitivity(relative, layer):.1f}", in_nats]


def _measured(table: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    return [column[~np.isnan(column)] for column in table.T]


def by_attention(runs: Sequence[RecordedRun], of: str, layers: Sequence[int] | None, window: Window) -> Iterator[str]:
    """Markdown, a row an attention; of these layers, or of all."""
    yield "| attention | runs | bias | 95 % interval | noise | bias / noise² | 95 % interval |"
    yield "|---|---|---|---|---|---|---|"
    groups: dict[str, list[Relative]] = {}
    for run in runs:
        relative = Relative.of(run, of, window)
        if layers:
            relative = relative.layers(_known(run, layers, len(relative.biases)))
        groups.setdefault(run.title, []).append(relative)
    for title, members in groups.items():
        biases, variances = (np.array([getattr(member, name) for member in members]) for name in ("bias", "variance"))
        cells = [f"`{title}`", str(len(members)), *mean_and_interval(biases, "+.1e"), f"{variances.mean() ** 0.5:.1e}"]
        cells += mean_and_interval(biases / variances, ".2f") if variances.all() else ["", ""]
        yield f"| {' | '.join(cells)} |"


def _known(run: RecordedRun, layers: Sequence[int], count: int) -> Sequence[int]:
    if unknown := [layer for layer in layers if not 1 <= layer <= count]:
        raise UserError(f"{run.folder.path}: --layers {unknown[0]}: it has layers 1 to {count}")
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    Window.add_options(parser)
    parser.add_argument("--layers", nargs="+", type=int, metavar="LAYER", help="default: the hottest; by attention all")
    parser.add_argument("--by", choices=("head", "layer", "attention"), default="head", help="what has a line each")
    parser.add_argument("--of", choices=("delta_error", "row_sum"), default="delta_error", help="which error")
    arguments = parser.parse_args()
    with script_errors():
        runs = [RecordedRun.open(name) for name in arguments.runs]
        window = Window.of_options(arguments)
        if arguments.by == "layer":
            if arguments.of == "row_sum":
                raise UserError("--by layer --of row_sum: the Σ of that error is not recorded; take --by attention")
            if arguments.layers:
                raise UserError("--by layer --layers: it prints all layers; drop --layers")
            lines = by_layer(runs, window)
        elif arguments.by == "attention":
            lines = by_attention(runs, arguments.of, arguments.layers, window)
        else:
            lines = (line for run in runs for line in by_head(run, arguments.of, arguments.layers, window))
        heading = [] if arguments.by == "head" else [provenance(runs), ""]
        print("\n".join([*heading, *lines]))


if __name__ == "__main__":
    main()
