"""The last lines of a run and of a sweep: how it ended, where to look, and what to type next.

They are for people and go to stderr. Programs read the line ``outcome=…``, which is the last on stdout.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path

from flashpoint.early_warning import GROWTH, LEAST_LEAD, LOOKBACK, HeadGrowth, sentinel_of, warning_of
from flashpoint.errors import UserError, notify
from flashpoint.lab.build_config import keys
from flashpoint.lab.stored_config import trained_config
from flashpoint.numerics.effective import effective_choices
from flashpoint.runs.chain import first_difference
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.run import Run
from flashpoint.schema import EXPERIMENT

FIX = "flash_fixed"
"""The attention with which a run that exploded is to be replayed."""
_ONE_RUNS = ("seed", "run_name")
"""Keys that another run of the same settings has for itself."""


def tell_of_run(folder: RunFolder, given: Sequence[str], *, of_sweep: bool) -> None:
    """Tell how a run ended, which heads grew, the page that was written, and the next command.

    Args:
        given: the overrides of its command line.
        of_sweep: whether more runs follow: the next command is then the sweep's.
    """
    try:
        for line in _lines(Run.of_folder(folder), given, of_sweep=of_sweep):
            notify(line)
    except UserError as error:  # this run is done and whole
        notify(str(error))


def tell_of_sweep(folder: Path, paths: Sequence[Path]) -> None:
    """Tell how the runs of a sweep ended, by attention, and the command that draws them on one page.

    Args:
        folder: of the sweep.
        paths: of its runs; those that have not ended are passed over.
    """
    from flashpoint.cli.table import text_of
    from flashpoint.lab.analysis.lifetimes import by_variant, grouped
    from flashpoint.lab.cli.shared_options import CONTROL
    from flashpoint.lab.cli.survival_tables import by_attention

    runs = [run for path in paths if (run := Run.of_folder(RunFolder(path))).ended]
    if not runs:
        return
    try:
        notify(f"\n{text_of(by_attention(by_variant(grouped(runs)), CONTROL, {}))}\n")
    except UserError as error:  # of a run that was there before, and is damaged
        notify(str(error))
    notify(f"next: {shlex.join(['flashpoint', 'report', str(folder)])}")


def _lines(run: Run, given: Sequence[str], *, of_sweep: bool) -> Iterator[str]:
    original, changed = _original(run), False
    if original:
        line, changed = _beside(run, original)
        yield line
    if not changed:
        yield f"{_attention(run)} {run.outcome.in_words}"
    if run.w_q_norms and (line := _growth(run)):
        yield line
    assert run.folder is not None
    if run.folder.report.page.is_file():
        yield f"page: {run.folder.report.page}"
    if not of_sweep and not run.outcome.interrupted:
        yield f"next: {shlex.join(_next(run, original, given, changed=changed))}"


def _original(run: Run) -> Run | None:
    """Return the run that this one replays or branches off, if it is still there, with what it computed."""
    if run.origin:
        with contextlib.suppress(UserError):
            original = Run.of_folder(RunFolder.open(run.origin.run))
            return original if original.folder and original.folder.chain.is_file() else None
    return None


def _beside(run: Run, original: Run) -> tuple[str, bool]:
    """Return one line on a replay beside its original, and whether the two differ by their settings: then it says how
    both ended, else whether they computed the same bits."""
    assert run.origin is not None
    since, one, other = run.origin.step, original.whole_chain, run.chain
    difference = first_difference(one, other)
    if difference is None:
        start = f" from step {since:,} on" if since else ""
        steps = min(one.steps, other.steps) - since
        return f"equal to {original.where}, bit for bit, over {steps:,} steps{start}", False
    hardware = original.manifest.hardware
    place = f"; {original.where} was made on {hardware}" if hardware != run.manifest.hardware else ""
    if not _differ(run, original):
        quantity = difference.quantity
        return f"differs from {original.where} from step {difference.step:,} on, first in its {quantity}{place}", False
    same = f"weights after {since:,} steps" if since else "initial weights"
    how = original.outcome.in_words if original.ended else "did not end"
    for name_of in (_attention, attrgetter("title"), attrgetter("where")):  # the first that tells them apart
        if name_of(original) != name_of(run):
            break
    return f"same batches and {same}: {name_of(original)} {how}, {name_of(run)} {run.outcome.in_words}{place}", True


def _attention(run: Run) -> str:
    """Return the attention's file in ``configs/attn/``, without what a command line or a preset has changed."""
    return run.attention.name.split()[0]


def _differ(run: Run, original: Run) -> bool:
    """Return whether attention or settings of the experiment are others: then other bits are what was asked for."""
    here, there = trained_config(run), trained_config(original)
    if effective_choices(here.attn) != effective_choices(there.attn):
        return True
    settings = [attrgetter(key.name) for key in keys() if EXPERIMENT in key.marks]
    return any(setting(here) != setting(there) for setting in settings)


def _growth(run: Run) -> str:
    """Return which heads grew before the onset and whether that was foretold; of a run that held a warning alone."""
    warning = warning_of(run)
    if run.onset is None:
        if warning is None:
            return ""
        head = f"layer {warning.layer}, head {warning.head}"
        return f"the early warning came at {warning.step:,}, of {head}; no explosion followed"
    lead = f"the early warning did not come before step {run.onset:,}"
    if warning and warning.step < run.onset:
        before = run.onset - warning.step
        only = "only " if before < LEAST_LEAD else ""
        lead = f"the early warning came at {warning.step:,}, {only}{before:,} steps before"
    layer, largest = run.hottest_head
    if grown := _grown(run, run.onset, layer):
        heads = " and ".join(f"head {one.head} (×{one.growth:.1f}, to {one.norm:.1f})" for one in grown)
        return f"W_Q of layer {layer} grew in {LOOKBACK} steps: {heads}; {lead}"
    return f"W_Q is largest in layer {layer}, head {largest}: {run.hottest_norms.max():.1f}; {lead}"


def _grown(run: Run, onset: int, layer: int) -> list[HeadGrowth]:
    """Return the heads of a layer that grew by the onset as the early warning takes it, those that grew most first.

    Of a head whose norm is below half of the layer's largest nothing is said. The warning's comparison with the median
    of all heads is no measure here: of a model of four heads two that grow make it.
    """
    heads = [head for head in sentinel_of(run, before=onset + 1).hottest() if head.layer == layer]
    largest = max((head.norm for head in heads), default=0.0)
    return [head for head in heads if head.norm >= largest / 2 and head.growth >= GROWTH]


def _next(run: Run, original: Run | None, given: Sequence[str], *, changed: bool) -> list[str]:
    if original and (changed or run.failed_at is None):
        return ["flashpoint", "report", original.where, run.where]
    if run.failed_at is None:
        named = {one: one.lstrip("+").split("=")[0] for one in given}
        if {"resume", "replay"} & {*named.values()}:  # which take no other seed
            return ["flashpoint", "report", run.where]
        settings = [one for one in given if named[one] not in _ONE_RUNS]
        return ["flashpoint", "train", *settings, f"seed={run.seed + 1}"]
    config = trained_config(run)
    if _attention(run) == FIX or config.train.precision != "bf16" or config.model.score_cap:  # which FIX does not take
        return ["flashpoint", "diagnose", run.where]
    return ["flashpoint", "train", f"replay={run.where}", f"attn={FIX}"]
