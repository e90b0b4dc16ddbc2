"""What ``flashpoint diagnose`` says of the run that the tensors are of, beside them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flashpoint.cli.table import Table, number
from flashpoint.errors import UserError, layer_told, notify
from flashpoint.runs.metric_table import GRAD_NORM, LOSS, W_Q_NORM

if TYPE_CHECKING:
    from flashpoint.runs.configuration import RunConfig
    from flashpoint.runs.folder import RunFolder
    from flashpoint.runs.run import Run

NOT_RECORDED = "In some steps other attentions were not recorded"
"""Begins what a run tells of attentions that its watch left out."""


@dataclass(frozen=True)
class Growth:
    """What W_Q did until the early warning, or of an explosion without one until the onset.

    Attributes:
        warned: whether there was a warning.
        layer, head: that grew most; the layer is None where a capture's layers are others.
        by_head: growth over LOOKBACK steps, by layer and head.
        layers: those with a head that grew as much as a warning takes; none without one.
        words: what is told of it.
        table: the same for those who ask for columns.
    """

    warned: bool
    layer: int | None
    head: int
    by_head: Mapping[tuple[int, int], float]
    layers: frozenset[int]
    words: str
    table: Table


def nonfinite_of_run(path: Path) -> tuple[str, list[Table]]:
    """Return where NaN or infinity came from in the run of a folder or file, as lines before others and as a table.

    Nothing where it did not come, or nobody looked.
    """
    from flashpoint.runs.folder import RunFolder

    folder = (path.parent if path.is_file() else path).resolve()
    try:
        origins = (RunFolder.of_capture(folder) or RunFolder(folder)).read_nonfinite()
    except UserError as error:  # of a file that the diagnosis does not need
        notify(str(error))
        return "", []
    if not origins:
        return "", []
    origins.sort(key=lambda one: not one.lasting)  # the first that lasted first
    columns = ("step", "where", "tensors", "layer", "call", "heads", "parameters", "lasting", "first NaN or infinity")
    rows = [
        [
            one.step, one.where, ", ".join(one.tensors), one.layer, one.call, ", ".join(map(str, one.heads)),
            ", ".join(one.parameters), str(one.lasting).lower(), one.text,
        ]
        for one in origins
    ]  # fmt: skip
    first, *more = [f"step {one.step:,}: {one.text}" for one in origins]
    told = "\n".join([f"The first NaN or infinity: {first}", *(f"Another one, at {one}" for one in more), "\n"])
    return told, [Table(columns, rows, instead=Table((), []))]


class Context(NamedTuple):
    """What a run tells of the tensors of a capture; None and nothing where there is nothing to tell, or no run.

    Attributes:
        growth: what W_Q did before the onset.
        later: which attentions were not recorded, and what came after the tensors.
        bad_loss: which loss before the tensors, or of their step, was no finite number.
    """

    growth: Growth | None = None
    later: str = ""
    bad_loss: str = ""


def context_of_capture(path: Path, capture: int | None, step: int, modules: Mapping[int, str]) -> Context:
    """Return what the run tells of a capture's tensors.

    Args:
        path: of the run, of one of its captures, or of a file in that.
        capture: ``--step``, of which capture of the run the tensors are; None is the last.
        step: of the training, of which the tensors are.
        modules: that called the captured attentions, by layer, as far as they are known.
    """
    from flashpoint.runs.folder import RunFolder
    from flashpoint.runs.run import Run
    from flashpoint.watching.captures import capture_folder, captured_steps

    of_tensors = (path.parent if path.is_file() else capture_folder(path, capture)).resolve()
    folder = RunFolder.of_capture(of_tensors) or RunFolder(path)
    if not (folder.config.is_file() and folder.metrics.is_file()):
        return Context()
    try:
        run = Run.of_folder(folder)
        grown, (onset, failed) = _growth(run, modules), _failed(run)
        not_recorded = " ".join(filter(None, (_not_recorded(run), *_untrained(run))))
        bad = _bad_losses(run)
    except UserError as error:  # of a file that the diagnosis does not need
        notify(str(error))
        return Context()
    captures = captured_steps(folder.path)
    own = next((at for at, one in captures.items() if one.resolve() == of_tensors), math.inf)
    if onset is None and own in bad:  # of one batch; the training went on well
        onset, failed = int(own), _NOT_FINITE
    bad_loss = "" if grown or failed == "exploded" else _bad_loss(folder, bad, step)
    if onset is None:
        return Context(grown, not_recorded, bad_loss)
    if not grown and failed == "exploded" and run.by_head(W_Q_NORM.name) is not None:
        not_recorded = f"{not_recorded} {_too_early()}".strip()
    if step >= onset:
        return Context(grown, not_recorded, bad_loss)
    told = "" if grown else f"After these tensors, which are of step {step:,}, the loss {failed} at step {onset:,}. "
    if later := [at for at in captures if at > own]:
        run_path = folder.path.resolve()
        near = run_path.relative_to(Path.cwd()) if run_path.is_relative_to(Path.cwd()) else run_path
        told += f"The next capture: {shlex.join(['flashpoint', 'diagnose', str(near), '--step', str(later[0])])}."
    return Context(grown, f"{not_recorded} {told}".strip(), bad_loss)


_NOT_FINITE = "was no finite number"


def _bad_losses(run: Run) -> Mapping[int, int]:
    """Return the steps whose loss is no finite number, and of each the first of those in a row with it."""
    import numpy as np

    first: int | None = None
    found = dict[int, int]()
    steps, losses = run.columns.get(LOSS.name, (np.empty(0), np.empty(0)))
    for step, loss in zip(steps, losses, strict=True):
        first = None if math.isfinite(loss) else int(step) if first is None else first
        if first is not None:
            found[int(step)] = first
    return found


def _bad_loss(folder: RunFolder, bad: Mapping[int, int], step: int) -> str:
    """Return which loss was no finite number, of those that were by the step of the tensors, and where its batch is."""
    before = [first for at, first in bad.items() if at <= step]
    if not before:
        return ""
    batch = folder.capture(before[-1]).batch
    kept = f" ({batch.relative_to(folder.path)})" if batch.is_file() else ""
    return (
        f"the loss of step {before[-1]:,} {_NOT_FINITE}, and the attention of step {step:,} is finite: look at the "
        f"loss, and at the labels of its batch{kept}"
    )


def attentions_of_run(path: Path, capture: int | None, layers: Collection[int]) -> tuple[str, dict[int, str]]:
    """Return the names of a watched run's attentions, and of the modules that call them by layer, as far as they are
    known.

    Args:
        path, capture: as of :func:`context_of_capture`.
        layers: of the capture: with more of them than the run's first steps called, modules are not known.
    """
    from flashpoint.runs.folder import RunFolder
    from flashpoint.watching.captures import capture_folder

    folder = RunFolder.of_capture(capture_folder(path, capture).resolve())
    try:
        config = None if folder is None else folder.read_config()
    except UserError as error:  # of a file that the diagnosis does not need
        notify(str(error))
        config = None
    if config is None:
        return "", {}
    modules = _modules(config)
    return config.attn.name, modules if max(layers) <= len(modules) else {}


def _modules(config: RunConfig) -> dict[int, str]:
    from flashpoint.runs.configuration import WatchedShape

    names = config.model.modules if isinstance(config.model, WatchedShape) else ()
    return {layer: name for layer, name in enumerate(names, 1) if name}


def _not_recorded(run: Run) -> str:
    """Return that layers are counted without the attentions that watching left out: their numbers can be others."""
    left_out = run.manifest.not_recorded
    if not left_out:
        return ""
    told = f"{NOT_RECORDED}, and are not judged: {'; '.join(left_out)}."
    return f"{told} Layers are counted without them."


def _untrained(run: Run) -> Iterator[str]:
    """Yield what the run shows of a ``zero_grad`` in the wrong place, and of a W_Q that is not trained."""
    _, norms = run.columns.get(GRAD_NORM.name, (None, None))
    if norms is not None and not norms.any():
        yield (
            "At watched.step gradients were missing or all 0, and nothing is known of them: call it after the backward "
            "pass and before zero_grad, of the model whose parameters are trained."
        )
    steps, of_heads = run.columns.get(W_Q_NORM.name, (None, None))  # [layers, H, steps]
    if steps is not None and of_heads is not None and len(steps) > 1 and (of_heads == of_heads[..., :1]).all():
        yield (
            f"From step {steps[0]:,} to {steps[-1]:,} no W_Q changed its norm: all are frozen, or no update came, as "
            "where a checkpoint alone is measured, or zero_grad stands between the backward pass and optimizer.step."
        )


def _too_early() -> str:
    from flashpoint.early_warning import LOOKBACK

    return (
        f"No early warning could come: when the loss exploded, W_Q had not been measured for {LOOKBACK} steps after "
        "the warm-up. Look at learning rate, warm-up and data first."
    )


def _failed(run: Run) -> tuple[int | None, str]:
    """Return the first step of what made the run's loss useless, and what that was; None without it.

    Of a run that has not ended, or was killed, only a latest loss that is no finite number shows.
    """
    if run.ended:
        return run.onset, "exploded" if run.ending == "exploded" else _NOT_FINITE
    bad = _bad_losses(run)
    last = int(run.columns[LOSS.name][0][-1]) if bad else None
    return (None if last is None else bad.get(last)), _NOT_FINITE


def _growth(run: Run, captured: Mapping[int, str]) -> Growth | None:
    """Return what W_Q did before the onset; None where no warning came, unless the loss exploded.

    Args:
        captured: modules of the captured layers. A run counts layers as its first steps called them; where a loop
            thaws or adds some, a capture counts others.
    """
    from flashpoint.early_warning import LOOKBACK, sentinel_of

    if run.by_head(W_Q_NORM.name) is None:
        return None
    onset = run.onset
    sentinel = sentinel_of(run, onset)
    warning = sentinel.warning
    if warning is not None:
        sentinel = sentinel_of(run, warning.step + 1)
    heads = sentinel.hottest()  # none where the norms are of too few steps
    fastest = warning or (heads[0] if heads and onset is not None and run.ending == "exploded" else None)
    if fastest is None:
        return None
    failed = "" if onset is None else f"the loss {_failed(run)[1]} at step {onset:,}"
    modules = _modules(run.config)
    numbers = {one.layer: _number_of(one.layer, modules, captured) for one in (*heads, fastest)}
    number_of = numbers[fastest.layer]
    if warning:
        name = modules.get(fastest.layer, "")
        told = layer_told(number_of, name) if number_of else name
        note = f"W_Q of {told} grew{failed and f', and {failed}'}."
    else:
        note = (
            f"No early warning came before {failed}: this head had grown most. Most explosions by attention that this "
            "package knows had a warning, but not those with Muon, which lets W_Q grow slowly. With another optimiser, "
            "look at it, at learning rate and data first."
        )
    row = [fastest.step, number_of, fastest.head, number(fastest.norm, ".1f"), number(fastest.growth, ".1f")]
    words = note
    if warning:
        words = f"{note[:-1]}: head {fastest.head} ×{fastest.growth:.1f} in {LOOKBACK} steps, to {fastest.norm:.1f}."
    table = Table(
        ("step", "layer", "head", "W_Q norm", f"growth in {LOOKBACK} steps"), [row], note, instead=Table((), [])
    )
    by_head = {(at, one.head): one.growth for one in heads if (at := numbers[one.layer])}
    grown = frozenset(at for one in sentinel.grown() if (at := numbers[one.layer]))
    return Growth(warning is not None, number_of, fastest.head, by_head, grown, words, table)


def _number_of(layer: int, of_run: Mapping[int, str], captured: Mapping[int, str]) -> int | None:
    """Return the number that a run's layer has in a capture; None where another layer has it, and the module's name is
    not that of one captured layer."""
    name = of_run.get(layer, "")
    if not name or captured.get(layer, name) in ("", name):
        return layer
    places = [place for place, one in captured.items() if one == name]
    return places[0] if len(places) == 1 else None
