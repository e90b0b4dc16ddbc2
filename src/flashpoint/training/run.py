"""One run from configuration to verdict: builds the parts, runs the loop, leaves a run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import torch

from flashpoint.config import Config
from flashpoint.data.batches import BatchOrder
from flashpoint.data.prepare import prepare
from flashpoint.data.replayed import ReplayedOrder, check_replay
from flashpoint.data.tape import Tape, TapeHeader
from flashpoint.data.tokens import TokenDataset
from flashpoint.errors import UserError, notify
from flashpoint.model import GPT
from flashpoint.probes.observer import Observer
from flashpoint.run_folder import RunFolder, read_json
from flashpoint.training.chain import Chain, first_difference
from flashpoint.training.checkpoints import capacity
from flashpoint.training.determinism import describe_environment, environment_difference, fix_numerics
from flashpoint.training.digests import run_digest, weights_digest
from flashpoint.training.interrupt import StopRequest, surely_interrupted
from flashpoint.training.loop import LoopResult, Trainer
from flashpoint.training.manifest import describe_run, note_resumption
from flashpoint.training.outcome import Outcome
from flashpoint.training.parallel import Ranks, join, leave
from flashpoint.training.records import Records
from flashpoint.training.start import Start, starting_point
from flashpoint.training.step import state_bytes

MANY_PASSES = 20
"""With 18 passes the default experiment explodes as with 2, with 117 late or not at all (docs/evidence/settings.md)."""


def run(config: Config) -> Outcome:
    """Train, replay, resume or branch off one run; every process of it calls this.

    Raises:
        UserError: data, tape, checkpoints, folder or device are not what the configuration needs.
    """
    if config.from_step is not None and config.replay is None:
        raise UserError(f"from_step={config.from_step} needs replay=RUN: the run to start from")
    existing = RunFolder.open(config.resume, config.runs_dir) if config.resume else None
    ranks, device = join(_device(config))
    try:
        with contextlib.ExitStack() as held:
            if existing and ranks.first:
                held.enter_context(existing.locked())
            return _run(config, existing, ranks, device, held)
    finally:
        leave()


def _run(
    config: Config, existing: RunFolder | None, ranks: Ranks, device: torch.device, held: contextlib.ExitStack
) -> Outcome:
    resumed = existing if existing and existing.begun else None
    if existing and not resumed:
        notify(f"{existing.path}: stopped before its first step; starting it again")
    original = RunFolder.open(config.replay, config.runs_dir) if config.replay and not resumed else None
    recorded = resumed or original
    tape = _tape(config, recorded, ranks, goes_on=bool(resumed)) if recorded else None
    if original and tape and config.from_step is not None and config.from_step > tape.steps:
        raise UserError(f"from_step={config.from_step}: {original.path} has {tape.steps:,} steps; give one of them")
    _tell_what_kind_of_run(config, device)
    config = _with_defaults(config, device, ranks.world, tape)
    fix_numerics(config.train.threads or 1, config.train.deterministic)
    environment = describe_environment(device, config)
    if recorded and (difference := environment_difference(read_json(recorded.manifest)["environment"], environment)):
        notify(difference)
    tokens = _tokens(config)
    _tell_of_a_small_corpus(config, len(tokens.train))
    model = GPT(config.model, config.attn, config.seed)
    order = BatchOrder(len(tokens.train), config.model.context, _batch_shape(config, ranks.world), config.seed)
    header = TapeHeader(
        data_fingerprint=tokens.fingerprint,
        context=config.model.context,
        n_windows=order.n_windows,
        micro_batches=order.shape[0],
        ranks=order.shape[1],
        sequences=order.shape[2],
        seed=config.seed,
        initial_weights=weights_digest(model),
    )
    if tape:
        if tape.header.ranks != ranks.world:
            tape = tape.shared_among(header.shape)
        check_replay(tape.header, header, tokens)
    if config.checkpoints.interval:
        capacity(config.checkpoints, state_bytes(model))  # refused before there is a folder
    model.to(device)  # where it may not fit
    observer = Observer(config.probes, model, config.train, device, notify) if ranks.first else None
    start = starting_point(config, resumed, original)
    ranks.wait()  # until all have read what the first will now write to
    folder = _folder(config, existing, ranks, held)
    try:
        if resumed and ranks.first:
            note_resumption(folder, config, start.step, ranks.world, environment)
        else:
            parent = {"run": str(original.path), "from_step": start.step} if original else None
            describe_run(folder, config, tokens, model, header.initial_weights, environment, parent)
        if start.chain:
            shutil.copyfile(start.chain, folder.chain)
        outcome = _record(config, folder, tokens, model, order, tape, header, device, start, observer, ranks)
    except OSError as error:
        raise UserError(
            f"{folder.path}: {error.strerror or error}; the run stops here, its records so far stay; "
            f"free space, then resume={folder.path}"
        ) from error
    if original and original.chain.is_file():
        _compare_with(original, folder, start.step)
    return outcome


def _folder(config: Config, existing: RunFolder | None, ranks: Ranks, held: contextlib.ExitStack) -> RunFolder:
    """Where this process writes, and nobody else until ``held`` is closed."""
    if not ranks.first:  # the others' records are the first's once more
        return RunFolder(Path(held.enter_context(tempfile.TemporaryDirectory())))
    if existing:
        return existing
    folder = RunFolder.create(config.runs_dir, config.run_name or _run_name(config))
    held.enter_context(folder.locked())
    return folder


def _tell_what_kind_of_run(config: Config, device: torch.device) -> None:
    if device.type == "cpu":
        notify(
            "no GPU: a small model, which explodes where Ō is rounded to few bits (experiment=laptop); "
            "BF16's own explosion takes thousands of steps of experiment=ignite, which needs one"
        )
    if config.attn.title != config.attn.name:
        notify(f"attention: {config.attn.title}")
    if config.attn.delta_error.kind != "none" and config.attn.delta_error.size == 0:
        notify("attn.delta_error.size=0: nothing is injected; give the size")
    if config.attn.injected:
        notify(f"{config.attn.name} injected: δ takes errors on purpose; the run shows what they do, not rounding")


def _tell_of_a_small_corpus(config: Config, tokens: int) -> None:
    train = config.train
    passes = train.steps * train.batch_size * config.model.context / tokens
    if passes > MANY_PASSES:
        notify(
            f"the corpus has {tokens:,} tokens, which train.steps={train.steps} go over {passes:.0f} times: known by "
            "heart, it may explode late or not at all; a larger one comes with more installed packages, or data=text"
        )


def _tape(config: Config, recorded: RunFolder, ranks: Ranks, *, goes_on: bool) -> Tape:
    tape = Tape.read(recorded.tape, until_broken=goes_on)
    if tape.header.ranks != ranks.world:
        counts = f"{tape.path}: recorded by {tape.header.ranks} processes, here are {ranks.world}"
        if not config.allow_world_size_change:
            raise UserError(
                f"{counts}; start as many (torchrun), or take the same batches and other bits with "
                "allow_world_size_change=true"
            )
        notify(f"{counts}: the same global batches in the same order; sums have another order, so bits may differ")
    return tape


def _tokens(config: Config) -> TokenDataset:
    """The data; of several processes one prepares them, the others wait for its lock: a collective would time out."""
    with surely_interrupted():
        tokens = prepare(config.data)
    if tokens.vocab_size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} is below the {tokens.vocab_size:,} tokens of "
            f"{tokens.path}: raise it, or choose data.tokenizer=bpe"
        )
    return tokens


def _compare_with(original: RunFolder, folder: RunFolder, since: int) -> None:
    """One line: whether the replay computed the original's bits, and if not, since when."""
    try:
        one, other = Chain.read(original.chain), Chain.read(folder.chain)
    except UserError as error:  # this run is done and whole
        notify(str(error))
        return
    if difference := first_difference(one, other):
        notify(f"differs from {original.path} from step {difference.step:,} on, first in its {difference.quantity}")
    else:
        start = f" from step {since:,} on" if since else ""
        notify(f"equal to {original.path}, bit for bit, over {min(one.steps, other.steps) - since:,} steps{start}")


def _record(
    config: Config,
    folder: RunFolder,
    tokens: TokenDataset,
    model: GPT,
    order: BatchOrder,
    tape: Tape | None,
    header: TapeHeader,
    device: torch.device,
    start: Start,
    observer: Observer | None,
    ranks: Ranks,
) -> Outcome:
    stop = StopRequest()
    records = Records(config, folder, header, tape, start.step, ranks, state_bytes(model))
    trainer = Trainer(
        config,
        model,
        tokens,
        ReplayedOrder(tape, order) if tape else order,
        records,
        observer,
        device,
        ranks,
        stop_requested=lambda: stop.signal_name is not None,
    )
    if start.state:
        trainer.load(start.tensors, start.state)
    started = time.perf_counter()
    with stop:
        result = trainer.run()
        signal_name = stop.signal_name if result.interrupted else None
        outcome = _outcome(trainer, result, records, signal_name, time.perf_counter() - started, folder)
        records.close(outcome)
    return outcome


def _device(config: Config) -> torch.device:
    available = torch.cuda.is_available()
    if config.train.device == "cuda" and not available:
        raise UserError("train.device=cuda: no CUDA device is visible; use train.device=cpu or auto")
    return torch.device("cuda" if available and config.train.device != "cpu" else "cpu")


def _with_defaults(config: Config, device: torch.device, world: int, tape: Tape | None) -> Config:
    """Write out the defaults that depend on the machine, so that a replay elsewhere keeps them."""
    train = config.train
    share = max(1, train.batch_size // world)
    micro_batch_size = train.micro_batch_size or share
    if tape and tape.header.ranks != world:  # the recorded size was for another number of processes
        micro_batch_size = min(micro_batch_size, share)
    if train.batch_size % (micro_batch_size * world):
        raise UserError(
            f"train.batch_size={train.batch_size} is no multiple of {world} processes times "
            f"train.micro_batch_size={micro_batch_size}: change one of them"
        )
    # With a GPU more threads gain nothing, and runs side by side keep each other waiting.
    threads = 1 if device.type == "cuda" else len(os.sched_getaffinity(0))
    return dataclasses.replace(
        config,
        train=dataclasses.replace(
            train,
            decay_steps=train.decay_steps or train.steps,
            micro_batch_size=micro_batch_size,
            threads=train.threads or threads,
        ),
    )


def _batch_shape(config: Config, world: int) -> tuple[int, int, int]:
    sequences = config.train.micro_batch_size or config.train.batch_size
    return config.train.micro_batches // world, world, sequences


def _run_name(config: Config) -> str:
    attention = f"{config.attn.name} injected" if config.attn.injected else config.attn.name
    attention = re.sub(r"[^\w.]+", "-", attention).strip("-")  # what Hydra takes in replay=NAME as it stands
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{attention}_seed{config.seed}"


def _outcome(
    trainer: Trainer,
    result: LoopResult,
    records: Records,
    signal_name: str | None,
    seconds: float,
    folder: RunFolder,
) -> Outcome:
    weights = weights_digest(trainer.model)
    return Outcome(
        outcome=trainer.detector.verdict,
        step=result.steps,
        onset_step=trainer.detector.onset_step,
        loss=result.loss,
        val_loss=result.val_loss,
        val_step=result.val_step,
        digest=run_digest(records.chain.digest, weights),
        chain_digest=records.chain.digest,
        weights_digest=weights,
        tape_digest=records.tape.digest,
        tape_steps=records.tape.steps,
        interrupted=signal_name,
        seconds=round(seconds, 3),
        run=str(folder.path),
    )
