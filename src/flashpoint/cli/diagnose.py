"""``flashpoint diagnose``: what an attention does wrong, by layer and head."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashpoint import user_code
from flashpoint.cli.cells import number
from flashpoint.cli.selection import device_named, format_option
from flashpoint.cli.table import Cell, Table, show
from flashpoint.errors import UserError, notify

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from flashpoint.diagnosis.call import AttentionCall
    from flashpoint.diagnosis.probe import Function
    from flashpoint.diagnosis.verdict import Diagnosis
    from flashpoint.numerics.variant import AttentionVariant

_BIAS = ("δ bias", "standard errors", "δ error, nats", "δ noise")
_COLUMNS = {
    "follows O": ("delta_follows_out", ".2f"),
    "O error": ("out_error", ".1e"),
    "dQ error": ("grad_q_error", ".1e"),
    "along mean key": ("along_mean_key", ".0%"),
    "dead rows": ("dead_rows", ".1%"),
    "ties": ("tied_rows", ".1%"),
    "largest score": ("score_max", ".3g"),
    "offset": ("score_offset", ".2g"),
}


@click.command("diagnose")
@click.argument("what", metavar="CAPTURE|RUN|MODEL")
@click.option(
    "--attention",
    metavar="ENGINE",
    help="Call this attention anew, and ask it for row sums and weights: a variant of configs/attn, sdpa:flash or "
    "another backend, or FILE.py:FUNCTION, which takes q, k, v and is_causal. Default: a RUN's own; of a CAPTURE or "
    "MODEL the results as they were recorded.",
)
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="For a MODEL to read.")
@click.option("--tokens", type=click.IntRange(2), default=1024, show_default=True, help="Of a sequence of the text.")
@click.option(
    "--sequences",
    type=click.IntRange(1),
    help="How many to read, of a RUN's batches or of the text.  [default: 16, of a RUN as many as have 32,768 tokens]",
)
@click.option("--step", type=click.IntRange(0), help="Of a RUN, or of a watched run's captures. Default: the last.")
@click.option("--layer", "layers", type=click.IntRange(1), multiple=True, help="Only this layer; repeatable.")
@click.option("--function", "functions", multiple=True, metavar="MODULE:NAME", help="A MODEL's own attention.")
@click.option("--device", "where", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@format_option
def command(
    what: str,
    attention: str | None,
    text: Path | None,
    tokens: int,
    sequences: int | None,
    step: int | None,
    layers: tuple[int, ...],
    functions: tuple[str, ...],
    where: str,
    form: str,
) -> None:
    """Say what is wrong with an attention, by layer and head, with the figures that show it.

    CAPTURE is the folder of a watched run, one of its captures, or a .safetensors file with q, k, v and grad_out. RUN
    is a run of flashpoint train: the step after its last checkpoint before the onset is repeated, or without one the
    first step. MODEL is a causal language model of Transformers, a folder or a name, which reads --text.

    Everything is compared with attention in FP64 on the same Q, K, V and dO. δ is the row term of the softmax's
    gradient. Its bias and noise are in |dO||O|. "Standard errors" is the bias over its standard error. "Nats" is the
    sum of δ's error over the tokens, in the loss. "Follows O" is 1 where δ takes the rounding of O.
    """
    from flashpoint.diagnosis.verdict import diagnose

    device = device_named(where)
    asked, weights = _asked(what, attention, text, tokens, sequences, step, functions, device)
    chosen = [one for one in asked if not layers or one.call.layer in layers]
    if not chosen:
        known = ", ".join(str(one.call.layer) for one in asked)
        raise UserError(f"--layer {', '.join(map(str, layers))}: {what} has layers {known}")
    try:
        with user_code.told(attention) if attention and ".py:" in attention else contextlib.nullcontext():
            diagnoses = [diagnose(one.call.to(device), one.function, one.declared) for one in chosen]
    except ValueError as error:
        raise UserError(f"{what}: {error}; --attention names it") from error
    show([*([] if text else _growth(what)), *_tables(diagnoses)], form, _heading(diagnoses, attention, weights))


@dataclass(frozen=True)
class _Asked:
    """A call, what computes it anew, and what that says that it rounds."""

    call: AttentionCall
    function: Function | None = None
    declared: AttentionVariant | None = None


def _asked(
    what: str,
    attention: str | None,
    text: Path | None,
    tokens: int,
    sequences: int | None,
    step: int | None,
    functions: Sequence[str],
    device: torch.device,
) -> tuple[list[_Asked], str]:
    """Return the calls to diagnose, and of which weights they are."""
    from flashpoint.capture.sources import (
        calls_of_model,
        calls_of_run,
        function_named,
        function_of_layer,
        read_calls,
    )
    from flashpoint.runs.folder import RunFolder

    variant = _variant(attention)
    path = _place(what)
    if text is not None:
        calls, weights = calls_of_model(what, text.read_text(), sequences or 16, tokens, device, functions), what
    elif not path.exists():
        raise UserError(f"{what}: no capture and no run; a model of Transformers needs --text FILE")
    elif RunFolder(path).tape.is_file():
        calls, own = calls_of_run(RunFolder(path), step, sequences, device)
        variant = own if attention is None else variant
        after = calls[0].step
        weights = f"weights after {after:,} steps" if after else "initial weights"
    else:
        calls = read_calls(path, step)
        weights = f"step {calls[0].step:,}"
    if variant is not None:
        of_layer = [(function_of_layer(variant, call.layer), _declared(variant, call)) for call in calls]
        return [_Asked(call, *some) for call, some in zip(calls, of_layer, strict=True)], weights
    function = None if attention is None else function_named(attention)
    return [_Asked(call, function) for call in calls], weights


def _place(what: str) -> Path:
    return Path(what) if Path(what).exists() else Path("runs", what)


def _variant(attention: str | None) -> AttentionVariant | None:
    """Return the variant of that name, if it is one of ``configs/attn``."""
    from flashpoint.files import CONFIGS
    from flashpoint.numerics.named import variant_named

    variants = CONFIGS / "attn"
    if attention is None or not (variants / f"{attention}.yaml").is_file():
        return None
    return variant_named(attention, variants)


def _declared(variant: AttentionVariant, call: AttentionCall) -> AttentionVariant | None:
    """Return what all heads of the call's layer compute; None where they differ, or PyTorch's kernel does."""
    groups = variant.groups(call.layer, call.q.shape[1])
    return groups[0][0] if len(groups) == 1 and groups[0][0].kernel == "flash" else None


def _heading(diagnoses: Sequence[Diagnosis], attention: str | None, weights: str) -> str:
    call = diagnoses[0].call
    sequences, heads, length, size = call.q.shape
    recorded = ", ".join(dict.fromkeys(diagnosis.call.attention for diagnosis in diagnoses))
    name = f"{attention} on what {recorded} was given" if attention else recorded
    how = "called anew" if diagnoses[0].probed else "as recorded"
    return (
        f"{name}, {how}: {weights}, {_count(len(diagnoses), 'layer')} of {_count(heads, 'head')}, "
        f"{_count(sequences, 'sequence')} of {length:,} tokens, d {size}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _growth(what: str) -> list[Table]:
    """Return what W_Q did before the onset of the run that the tensors are of, where it gave an early warning."""
    from flashpoint.analysis.early_warning import warning_of
    from flashpoint.probes.sentinel import LOOKBACK
    from flashpoint.runs.folder import RunFolder
    from flashpoint.runs.recorded import Run

    path = _place(what).resolve()
    capture = path.parent if path.is_file() else path
    folder = RunFolder(capture.parents[1] if capture.parent.name == "captures" else path)
    if not (folder.config.is_file() and folder.metrics.is_file()):
        return []
    try:
        run = Run.of_folder(folder)
        warning = None if run.by_head("w_q_spectral_norm") is None else warning_of(run)
        onset = run.onset
    except UserError as error:  # of a file that the diagnosis does not need
        notify(str(error))
        return []
    if warning is None or (onset is not None and warning.step >= onset):
        return []
    row = [warning.step, warning.layer, warning.head, number(warning.norm, ".1f"), number(warning.growth, ".1f")]
    ended = "" if onset is None else f", and the loss exploded at step {onset:,}"
    note = (
        f"W_Q of layer {warning.layer} grew{ended}. The explosions that this package knows begin so, and the attention "
        "can be the cause where nothing is found below: docs/own_run.md, A real explosion."
    )
    return [Table(("step", "layer", "head", "W_Q norm", f"growth in {LOOKBACK} steps"), [row], note)]


def _tables(diagnoses: Sequence[Diagnosis]) -> list[Table]:
    findings = [finding for diagnosis in diagnoses for finding in diagnosis.findings]
    rows = [[one.layer, ", ".join(map(str, one.heads)), one.kind, one.text] for one in findings]
    verdict = Table(("layer", "heads", "finding", "what shows it"), rows, _advice({one.kind for one in findings}))
    measured = [[diagnosis.call.layer, *row] for diagnosis in diagnoses for row in _measures(diagnosis)]
    unseen = _unseen(diagnoses)
    note = unseen
    if not rows:
        note = f"Nothing found. {unseen} {_TO_BE_SURE}" if unseen else "Nothing found."
    measures = Table(("layer", "head", *_BIAS, *_COLUMNS), measured, note)
    return [verdict, measures] if rows else [measures]


def _measures(diagnosis: Diagnosis) -> list[list[Cell | int]]:
    """Return a row for each head."""
    from flashpoint.diagnosis.bias import DeltaBias

    of, bias = diagnosis.measures, DeltaBias.of(diagnosis.measures)
    columns: list[tuple[Tensor | None, str]] = [(None, "")] * len(_BIAS)
    if bias is not None:
        sure = bias.mean / bias.error.clamp_min(1e-300) if bias.sequences > 1 else None
        columns = [(bias.mean, "+.1e"), (sure, "+.1f"), (bias.nats, "+.1e"), (bias.noise, ".1e")]
    columns += [(of[name].mean(0) if name in of else None, form) for name, form in _COLUMNS.values()]
    return [
        [head + 1, *(number(None if values is None else float(values[head]), form) for values, form in columns)]
        for head in range(diagnosis.call.q.shape[1])
    ]


def _unseen(diagnoses: Sequence[Diagnosis]) -> str:
    """Return how small a bias of δ could have been overlooked, if errors of that size have ignited runs."""
    from flashpoint.diagnosis.bias import IGNITED, DeltaBias

    biases = [bias for diagnosis in diagnoses if (bias := DeltaBias.of(diagnosis.measures)) is not None]
    smallest = max((float(bias.smallest.max()) for bias in biases if bias.sequences > 1), default=0.0)
    ignites = min(IGNITED)
    if smallest <= ignites:
        return ""
    return (
        f"In some heads a bias of δ below {smallest:.0e} would not show on {biases[0].sequences} sequences; in a "
        f"model of 7 M parameters a constant one of {ignites:.0e} in layer 2 made {IGNITED[ignites]} runs explode. "
        "More sequences give a sharper answer."
    )


_TO_BE_SURE = (
    "To be sure, train twice on the same batches from a checkpoint before the explosion, with this attention and with "
    "flash_unrounded_out: if only the first explodes, the attention had a part in it."
)


def _advice(kinds: set[str]) -> str:
    """Return what to do next about findings of these kinds."""
    if kinds & {"delta_bias", "rounded_head"}:
        return (
            "flashpoint.attention(q, k, v, variant='flash_unrounded_out') takes δ from an O that is not rounded: "
            "docs/own_run.md has the attentions that hold, and what they cost."
        )
    if "fp16_overflow" in kinds:
        return "FP16 ends at 65,504: train in BF16."
    if kinds:
        return "The attention computes something wrong: --attention flash_fp32 tells whether another kernel does, too."
    return ""
