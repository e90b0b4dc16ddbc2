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
from flashpoint.cli.selection import format_option
from flashpoint.cli.table import Cell, Table, show
from flashpoint.errors import UserError

if TYPE_CHECKING:
    import torch

    from flashpoint.diagnosis.call import AttentionCall
    from flashpoint.diagnosis.probe import Function
    from flashpoint.diagnosis.verdict import Diagnosis
    from flashpoint.numerics.variant import AttentionVariant

_COLUMNS = {
    "δ bias": (("row_sum_bias", "grad_delta_bias", "delta_bias"), "+.1e"),
    "δ noise": (("row_sum_noise", "grad_delta_noise", "delta_noise"), ".1e"),
    "follows O": (("delta_follows_out",), ".2f"),
    "O error": (("out_error",), ".1e"),
    "dQ error": (("grad_q_error",), ".1e"),
    "along mean key": (("along_mean_key",), ".0%"),
    "dead rows": (("dead_rows",), ".1%"),
    "ties": (("tied_rows",), ".1%"),
    "largest score": (("score_max",), ".3g"),
    "offset": (("score_offset",), ".2g"),
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
    help="Of a RUN's batches or of the text.  [default: 16, of a RUN as many as have 32,768 tokens]",
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

    CAPTURE is what flashpoint.watch wrote, or a .safetensors file with q, k, v and grad_out. RUN is a run of flashpoint
    train: the step after its last checkpoint before the onset is repeated. MODEL is a causal language model of
    Transformers, a folder or a name, which reads --text.

    Everything is compared with attention in FP64 on the same Q, K, V and dO. δ is the row term of the softmax's
    gradient. Its bias and noise are in |dO||O|; "follows O" is 1 where δ takes the rounding of O.
    """
    from flashpoint.diagnosis.verdict import diagnose

    device = _device(where)
    asked = _asked(what, attention, text, tokens, sequences, step, functions, device)
    chosen = [one for one in asked if not layers or one.call.layer in layers]
    if not chosen:
        known = ", ".join(str(one.call.layer) for one in asked)
        raise UserError(f"--layer {', '.join(map(str, layers))}: {what} has layers {known}")
    try:
        with user_code.told(attention) if attention and ".py:" in attention else contextlib.nullcontext():
            diagnoses = [diagnose(one.call.to(device), one.function, one.declared) for one in chosen]
    except ValueError as error:
        raise UserError(f"{what}: {error}; --attention names it") from error
    show(_tables(diagnoses), form, _heading(diagnoses, attention))


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
) -> list[_Asked]:
    from flashpoint.diagnosis.sources import calls_of_model, calls_of_run, function_of_layer, read_calls
    from flashpoint.runs.folder import RunFolder

    variant = _variant(attention)
    path = next((path for path in (Path(what), Path("runs") / what) if path.exists()), None)
    if text is not None:
        calls = calls_of_model(what, text.read_text(), sequences or 16, tokens, device, functions)
    elif path is None:
        raise UserError(f"{what}: no capture and no run; a model of Transformers needs --text FILE")
    elif RunFolder(path).tape.is_file():
        calls, own = calls_of_run(RunFolder(path), step, sequences, device)
        variant = own if attention is None else variant
    else:
        calls = read_calls(path, step)
    if variant is not None:
        return [_Asked(call, function_of_layer(variant, call.layer), _declared(variant, call)) for call in calls]
    function = None if attention is None else _engine(attention, device)
    return [_Asked(call, function) for call in calls]


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


def _engine(word: str, device: torch.device) -> Function:
    """Return an attention that is no variant, for any number of heads of keys."""
    from flashpoint.deviation.engines import Called, engines_named

    engine = engines_named([word], [], device)[0]
    if not isinstance(engine, Called):
        raise UserError(f"--attention {word}: an emulation; give a variant, sdpa:BACKEND, or FILE.py:FUNCTION")

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return engine.call(q, k, v, is_causal, scale)[0]

    return function


def _device(where: str) -> torch.device:
    import torch

    available = torch.cuda.is_available()
    if where == "cuda" and not available:
        raise UserError("--device cuda: no CUDA device is visible; use --device cpu or auto")
    return torch.device("cuda" if available and where != "cpu" else "cpu")


def _heading(diagnoses: Sequence[Diagnosis], attention: str | None) -> str:
    call = diagnoses[0].call
    sequences, heads, length, size = call.q.shape
    recorded = ", ".join(dict.fromkeys(diagnosis.call.attention for diagnosis in diagnoses))
    name = f"{attention} on what {recorded} was given" if attention else recorded
    how = "called anew" if diagnoses[0].probed else "as recorded"
    return (
        f"{name}, {how}: step {call.step:,}, {len(diagnoses)} layers of {heads} heads, "
        f"{sequences} sequences of {length:,} tokens, d {size}"
    )


def _tables(diagnoses: Sequence[Diagnosis]) -> list[Table]:
    findings = [finding for diagnosis in diagnoses for finding in diagnosis.findings]
    rows = [[one.layer, ", ".join(map(str, one.heads)), one.kind, one.text] for one in findings]
    verdict = Table(("layer", "heads", "finding", "what shows it"), rows, _advice({one.kind for one in findings}))
    heads = [(diagnosis, head) for diagnosis in diagnoses for head in range(diagnosis.call.q.shape[1])]
    cells = [[_cell(of, names, head, form) for names, form in _COLUMNS.values()] for of, head in heads]
    named = [[of.call.layer, head + 1, *some] for (of, head), some in zip(heads, cells, strict=True)]
    measures = Table(("layer", "head", *_COLUMNS), named, "" if rows else "Nothing found.")
    return [verdict, measures] if rows else [measures]


def _cell(diagnosis: Diagnosis, names: Sequence[str], head: int, form: str) -> Cell:
    found = next((diagnosis.measures[name] for name in names if name in diagnosis.measures), None)
    return Cell(None, "") if found is None else number(float(found[:, head].mean()), form)


def _advice(kinds: set[str]) -> str:
    if "delta_bias" in kinds or "rounded_head" in kinds:
        return (
            "flashpoint.attention(q, k, v, variant='flash_exact_rowsum') takes δ from the row sums of P∘dP: "
            "docs/own_run.md has the attentions that hold, and what they cost."
        )
    return ""
