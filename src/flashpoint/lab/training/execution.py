"""One run from configuration to verdict: settle a plan, prepare the run, execute it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flashpoint.errors import UserError, notify, remedy
from flashpoint.hardware import is_of_full_memory
from flashpoint.lab.config import Config, DataConfig
from flashpoint.lab.training.interrupt import StopRequests
from flashpoint.lab.training.parallel import join, leave
from flashpoint.lab.training.plan import Plan, settle, usable_device
from flashpoint.lab.training.prepared_run import PreparedRun, prepare_run, weights_digest
from flashpoint.lab.training.remarks import (
    tell_of_a_long_compilation,
    tell_of_a_small_corpus,
    tell_of_missing_metrics,
    tell_what_kind_of_run,
)
from flashpoint.lab.training.run_description import describe_run, note_resumption
from flashpoint.lab.training.start import checkpoints_before
from flashpoint.lab.training.trainer import LoopResult, Trainer
from flashpoint.lab.training.writer import RunWriter
from flashpoint.listeners import Listener, Listeners
from flashpoint.numerics.variant import ROUNDING_POINTS
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.manifest import Parent
from flashpoint.runs.outcome import STRICT_PROBES, Outcome

_LONGEST = 100  # characters of the attention in a run's name


def run(config: Config, listeners: Sequence[Listener] = (), data: Callable[[], DataConfig] | None = None) -> Outcome:
    """Train, replay, resume or branch off one run; every process of it calls this.

    Args:
        listeners: hear of the run in the process that keeps its files.
        data: as of :func:`.prepare_run`.

    Raises:
        UserError: data, tape, checkpoints, folder or device are not what the configuration needs, or memory is full.
    """
    existing = RunFolder.open(config.resume, config.runs_dir) if config.resume else None
    ranks, device = join(usable_device(config))
    try:
        with contextlib.ExitStack() as held:
            if existing and ranks.first:
                held.enter_context(existing.locked())
            plan = settle(config, existing, ranks, device)
            tell_what_kind_of_run(plan.config, device)
            prepared = prepare_run(plan, data)
            tell_of_a_small_corpus(prepared.plan.config, len(prepared.tokens.train))
            tell_of_a_long_compilation(prepared.compile_seconds)
            ranks.wait()  # until all have read what the first will now write to
            folder = _folder(plan, existing, held)
            outcome = execute(prepared, folder, Listeners(listeners if ranks.first else ()))
    except (MemoryError, RuntimeError) as error:
        if not is_of_full_memory(error):
            raise
        raise UserError(
            f"the memory of device {device.type} is full; lower train.micro_batch_size, model.context or the model"
        ) from error
    finally:
        leave()
    return outcome


def _folder(plan: Plan, existing: RunFolder | None, held: contextlib.ExitStack) -> RunFolder:
    """Return the folder that this process writes, locked until ``held`` is closed."""
    if not plan.ranks.first:  # the others' files are the first's once more
        return RunFolder(Path(held.enter_context(tempfile.TemporaryDirectory())))
    if existing:
        return existing
    folder = RunFolder.create(plan.config.runs_dir, plan.config.run_name or _run_name(plan.config))
    try:
        held.enter_context(folder.locked())
    except UserError:
        with contextlib.suppress(OSError):
            folder.discard()  # as in execute
        raise
    return folder


def execute(prepared: PreparedRun, folder: RunFolder, listeners: Listeners) -> Outcome:
    """Write who the run is, train, and write its verdict.

    Raises:
        UserError: a file cannot be written.
        KeyboardInterrupt: with how the run goes on.
    """
    goes_on = folder.resume_setting + prepared.plan.config.to_go_on
    try:
        _describe(prepared, folder)
        return _train(prepared, folder, listeners)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"flashpoint train {goes_on} goes on with it") from None
    except OSError as error:
        if not folder.path.is_dir():
            how = "resume=FOLDER goes on with it where it is now"
            raise UserError(f"{folder.path}: moved or deleted while the run wrote it; {how}") from error
        told = f"{error.filename or folder.path}: {error.strerror or error}"
        if not folder.config.is_file():
            with contextlib.suppress(OSError):
                folder.discard()  # or the same command would be refused
            raise UserError(f"{told}; {remedy(error)}, then start the run again") from error
        raise UserError(
            f"{told}; the run stops here, its files so far stay; {remedy(error)}, then {goes_on}"
        ) from error


def _describe(prepared: PreparedRun, folder: RunFolder) -> None:
    """Write configuration and manifest, and for a branch the digest chain up to its first step."""
    start, plan = prepared.start, prepared.plan
    if plan.resumed and plan.ranks.first:
        note_resumption(folder, plan.config, start.step, plan.ranks.world, plan.environment)
        tell_of_missing_metrics(folder, folder.first_step, start.step)
    else:
        parent = Parent(run=str(plan.original.path), from_step=start.step) if plan.original else None
        weights = prepared.header.initial_weights
        model = prepared.optimizer_step.model
        describe_run(folder, plan.config, prepared.tokens, model, weights, plan.environment, parent, prepared.twin)
    if start.chain:
        shutil.copyfile(start.chain, folder.chain)


def _train(prepared: PreparedRun, folder: RunFolder, listeners: Listeners) -> Outcome:
    """Run the loop; write the verdict once all files are closed."""
    plan, stop = prepared.plan, StopRequests("ending after this step; once more to quit at once")
    with listeners.listening(folder, prepared.start.step), RunWriter(prepared, folder, listeners) as files:
        trainer = Trainer(prepared, files, stop_requested=lambda: bool(stop.received))
        started = time.perf_counter()
        with stop:
            result = trainer.run()
            interrupted = _why(stop, trainer) if result.interrupted else None
            outcome = _outcome(trainer, result, files, interrupted, time.perf_counter() - started, folder)
            if outcome.outcome == "nonfinite" and not interrupted and plan.ranks.first:
                outcome = dataclasses.replace(outcome, nonfinite=_place(trainer, folder, outcome, plan.config.runs_dir))
            files.close(outcome)
            listeners.ended(folder, outcome)
    if trainer.failed_probe:
        how = (
            f"mend it, then {folder.resume_setting}{plan.config.to_go_on} goes on"
            if interrupted
            else "it was the last step, the run is whole"
        )
        raise UserError(f"probes.attention={trainer.failed_probe.probe}: {trainer.failed_probe.error}; {how}")
    return outcome


def _why(stop: StopRequests, trainer: Trainer) -> str:
    """Return what ended the run early."""
    if stop.received:
        return stop.received[0].name
    return STRICT_PROBES if trainer.failed_probe else signal.SIGTERM.name  # that another process of the run got


def _place(trainer: Trainer, folder: RunFolder, outcome: Outcome, runs_dir: str) -> str | None:
    """Say, and return, where the first NaN or infinity came from."""
    try:
        where = trainer.what_was_not_finite(
            lambda step: checkpoints_before(folder, step, runs_dir),
            from_initial_weights=folder.first_step == 0,
        )
    except UserError as error:  # of a checkpoint that is not what the run wrote
        notify(str(error))
        where = None
    except (MemoryError, RuntimeError) as error:
        if not is_of_full_memory(error):
            raise
        where = None  # uncompiled, the step takes more memory than it did; the verdict is not to be lost for it
    notify(f"step {outcome.onset_step:,}: {where or 'not finite; the step could not be repeated to see where'}")
    return where


def _run_name(config: Config) -> str:
    # Formats stay out of the name, with a mode as with bits: the title of a run tells them.
    words = [word for word in config.attn.name.split(" ") if word.split("=")[0] not in ROUNDING_POINTS]
    variant = " ".join(words)
    attention = f"{variant} injected" if config.attn.injected else variant
    attention = re.sub(r"[^\w.]+", "-", attention)[:_LONGEST].strip("-")  # what Hydra takes in replay=NAME as it stands
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{attention}_seed{config.seed}"


def _outcome(
    trainer: Trainer, result: LoopResult, files: RunWriter, interrupted: str | None, seconds: float, folder: RunFolder
) -> Outcome:
    weights = weights_digest(trainer.model)
    return Outcome(
        outcome=trainer.detector.verdict,
        step=result.steps,
        onset_step=trainer.detector.onset_step,
        nonfinite=None,
        loss=result.loss,
        val_loss=result.val_loss,
        val_step=result.val_step,
        digest=run_digest(files.chain.digest, weights),
        chain_digest=files.chain.digest,
        weights_digest=weights,
        tape_digest=files.tape.digest,
        tape_steps=files.tape.steps,
        interrupted=interrupted,
        seconds=round(seconds, 3),
        run=str(folder.path),
    )


def run_digest(chain: str, weights: str) -> str:
    """Return the short digest of a whole run: equal if losses, gradient norms, checksums and final weights are."""
    return hashlib.sha256(f"{chain} {weights}".encode()).hexdigest()[:16]
