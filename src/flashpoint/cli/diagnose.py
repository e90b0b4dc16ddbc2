"""``flashpoint diagnose``: what an attention does wrong, by layer and head."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

from flashpoint.cli.diagnose_run import Context, attentions_of_run, context_of_capture, nonfinite_of_run
from flashpoint.cli.diagnose_tables import delta_heading, delta_tables, heading, tables
from flashpoint.cli.selection import device_named, format_option
from flashpoint.cli.table import show
from flashpoint.errors import UserError, notify
from flashpoint.runs.folder import RunFolder


@click.command("diagnose")
@click.argument("what", metavar="CAPTURE|RUN|MODEL")
@click.option(
    "--attention",
    metavar="ENGINE",
    help="Call this attention anew, and ask it for row sums and weights: sdpa:math, sdpa:flash, sdpa:efficient, "
    "sdpa:cudnn, flex, flash_attn, fa4, xformers, a variant of configs/attn, or FILE.py:FUNCTION, which takes q, k, v, "
    "is_causal and scale; one without a scale gets a q that is scaled and rounded. all: a table of the first eight; a "
    "line says why one does not run. Default: a RUN's own; of a CAPTURE or MODEL the results as they were recorded.",
)
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="For a MODEL to read.")
@click.option("--tokens", type=click.IntRange(2), default=1024, show_default=True, help="Of a sequence of the text.")
@click.option(
    "--sequences",
    type=click.IntRange(1),
    help="How many to read, of a RUN's batches or of the text. The bias of δ is judged by all of them, everything else "
    "by the first 16, of a RUN by as many as have 32,768 tokens.  [default: 256 on a GPU; on a CPU those]",
)
@click.option("--step", type=click.IntRange(0), help="Of a RUN, or of a watched run's captures. Default: the last.")
@click.option("--layer", "layers", type=click.IntRange(1), multiple=True, help="Only this layer; repeatable.")
@click.option("--function", "functions", multiple=True, metavar="MODULE:NAME", help="A MODEL's own attention.")
@click.option("--device", "where", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@format_option
def command(
    what: str, attention: str | None, text: Path | None, layers: tuple[int, ...], where: str, form: str, **reading: Any
) -> None:
    """Say what is wrong with an attention, by layer and head, with the figures that show it.

    CAPTURE is the folder of a watched run, one of its captures, or a .safetensors file with q, k, v and grad_out. Of a
    capture whose tensors you have deleted the bias of δ is left. RUN
    is a run of flashpoint train: the step after its last checkpoint before the onset is repeated, or without one the
    first step. MODEL is a causal language model of Transformers, a folder or a name, which reads --text.

    Everything is compared with attention in FP64 on the same Q, K, V and dO. δ is the row term of the softmax's
    gradient. Its bias and noise are in |dO||O|. "Standard errors" is the bias over its standard error. "Nats" is the
    sum of δ's error over the tokens, in the loss. "Follows O" is 1 where δ takes the rounding of O.
    """
    from flashpoint.cli.diagnose_inputs import delta_of, inputs_of, place
    from flashpoint.watching.captures import NoTensors

    if text is None and (later := RunFolder(place(what)).later_of_its_name):
        notify(f"{what}: a later run of that name is {later}")
    nonfinite, origins = nonfinite_of_run(place(what)) if text is None else ("", [])
    if samples := delta_of(what, attention, text, layers, **reading):
        last = max(max(sample.steps) for sample in samples.values())
        attentions, modules = attentions_of_run(place(what), reading["step"], samples)
        context = context_of_capture(place(what), reading["step"], last, modules)
        told, found = delta_tables(samples, context.later, context.growth, attentions, modules)
        show([*origins, *found], form, f"{nonfinite}{told}\n\n{delta_heading(samples)}")
        return
    device = device_named(where)
    if attention == "all":
        from flashpoint.cli.diagnose_backends import backends

        inputs = inputs_of(what, None, text, device, **reading).of_layers(layers)
        told, table = backends(inputs, device)
        show(table, form, told)
        return
    try:
        inputs = inputs_of(what, attention, text, device, **reading).of_layers(layers)
    except NoTensors as error:
        if not origins:
            raise
        show(origins, form, f"{nonfinite}{error}")
        return
    try:
        with _errors_in_one_line(attention):
            diagnoses = inputs.diagnoses(device)
    except ValueError as error:
        raise UserError(f"{what}: {error}; --attention names what computes it") from error
    modules = {call.layer: call.module for call in (one.call for one in diagnoses)}
    step = diagnoses[0].call.step
    context = Context() if text else context_of_capture(place(what), reading["step"], step, modules)
    told, found = tables(diagnoses, inputs.more, attention, context.later, context.growth, context.bad_loss)
    mode_left = f". {inputs.anew.mode_left}" if inputs.anew and inputs.anew.mode_left else ""
    show([*origins, *found], form, f"{nonfinite}{told}\n\n{heading(diagnoses, attention, inputs.weights)}{mode_left}")


def _errors_in_one_line(attention: str | None) -> contextlib.AbstractContextManager[None]:
    """Return what tells an error of the user's own attention in one line; of another attention errors stay as they
    are."""
    if attention is None or ".py:" not in attention:
        return contextlib.nullcontext()
    from flashpoint.user_code import errors_in_one_line

    return errors_in_one_line(attention)
