"""One run from configuration to verdict: builds the parts, runs the loop, leaves a run folder."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from typing import Any

import torch

from flashpoint.config import Config
from flashpoint.data.batches import BatchOrder
from flashpoint.data.prepare import prepare
from flashpoint.data.replayed import ReplayedOrder, check_replay
from flashpoint.data.tape import Tape, TapeHeader, TapeWriter
from flashpoint.data.tokens import TokenDataset
from flashpoint.errors import UserError, notify
from flashpoint.model import GPT
from flashpoint.report.curves import draw_curves
from flashpoint.run_folder import RunFolder, read_json, write_json
from flashpoint.tracking import Tracker
from flashpoint.training.chain import Chain, ChainWriter, first_difference
from flashpoint.training.checkpoints import FlightRecorder, capacity
from flashpoint.training.determinism import describe_environment, environment_difference, fix_numerics
from flashpoint.training.digests import run_digest, weights_digest
from flashpoint.training.interrupt import StopRequest
from flashpoint.training.loop import LoopResult, Trainer
from flashpoint.training.outcome import Outcome
from flashpoint.training.start import Start, starting_point
from flashpoint.training.step import state_bytes


def run(config: Config) -> Outcome:
    """Train, replay, resume or branch off one run.

    Raises:
        UserError: data, tape, checkpoints, folder or device are not what the configuration needs.
    """
    if config.from_step is not None and config.replay is None:
        raise UserError(f"from_step={config.from_step} needs replay=RUN: the run to start from")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("WORLD_SIZE is above 1: training on several processes is not supported yet; use one")
    resumed = RunFolder.open(config.resume, config.runs_dir) if config.resume else None
    original = RunFolder.open(config.replay, config.runs_dir) if config.replay and not resumed else None
    recorded = resumed or original
    tape = Tape.read(recorded.tape) if recorded else None
    device = _device(config)
    if device.type == "cpu":
        notify(
            "no GPU: this run shows the whole pipeline on a small model; "
            "the explosion takes thousands of steps of experiment=ignite, which needs one"
        )
    config = _with_defaults(config, device)
    fix_numerics(config.train.threads or 1, config.train.deterministic)
    environment = describe_environment(device, config.model.d_model // config.model.n_head)
    if recorded and (difference := environment_difference(read_json(recorded.manifest)["environment"], environment)):
        notify(difference)
    tokens = prepare(config.data)
    if tokens.vocab_size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} is below the {tokens.vocab_size:,} tokens of "
            f"{tokens.path}: raise it, or choose data.tokenizer=bpe"
        )
    model = GPT(config.model, config.attn, config.seed)
    order = BatchOrder(len(tokens.train), config.model.context, _batch_shape(config), config.seed)
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
        check_replay(tape.header, header, tokens)
    if config.checkpoints.interval:
        capacity(config.checkpoints, state_bytes(model))  # refused before there is a folder
    start = starting_point(config, resumed, original)
    folder = resumed or RunFolder.create(config.runs_dir, config.run_name or _run_name(config))
    try:
        if resumed:
            _note_resumption(folder, config, start.step, environment)
        else:
            _describe(folder, config, tokens, model, header, environment, original, start.step)
        if original and start.step:
            shutil.copyfile(original.chain, folder.chain)
        outcome = _record(config, folder, tokens, model.to(device), order, tape, header, device, start)
    except OSError as error:
        raise UserError(
            f"{folder.path}: {error.strerror or error}; the run stops here, its records so far stay; "
            f"free space, then resume={folder.path}"
        ) from error
    if original and original.chain.is_file():
        _compare_with(original, folder)
    return outcome


def _compare_with(original: RunFolder, folder: RunFolder) -> None:
    """One line: whether the replay computed the original's bits, and if not, since when."""
    try:
        one, other = Chain.read(original.chain), Chain.read(folder.chain)
    except UserError as error:  # this run is done and whole
        notify(str(error))
        return
    if difference := first_difference(one, other):
        notify(f"differs from {original.path} from step {difference.step:,} on, first in its {difference.quantity}")
    else:
        notify(f"equal to {original.path}, bit for bit, over {min(one.steps, other.steps):,} steps")


def _describe(
    folder: RunFolder,
    config: Config,
    tokens: TokenDataset,
    model: GPT,
    header: TapeHeader,
    environment: dict[str, Any],
    original: RunFolder | None,
    first_step: int,
) -> None:
    """What a new run is made of."""
    write_json(folder.config, config.to_dict())
    write_json(
        folder.manifest,
        {
            "started": _now(),
            "hardware": environment["hardware"],
            "environment": environment,
            "data": {"path": str(tokens.path), **tokens.sidecar},
            "initial_weights": header.initial_weights,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "parent": {"run": str(original.path), "from_step": first_step} if original else None,
        },
    )


def _note_resumption(folder: RunFolder, config: Config, step: int, environment: dict[str, Any]) -> None:
    write_json(folder.config, {**config.to_dict(), "resume": None})
    manifest = read_json(folder.manifest)
    resumptions = [*manifest.get("resumed", []), {"time": _now(), "step": step, "environment": environment}]
    write_json(folder.manifest, {**manifest, "resumed": resumptions})
    folder.outcome.unlink(missing_ok=True)


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
) -> Outcome:
    goes_on = folder.tape.exists()
    writer = TapeWriter(folder.tape, header, steps=start.step if goes_on else None)
    if tape and not goes_on:
        for windows in tape.records[: start.step]:
            writer.append(windows)
    chain = ChainWriter(folder.chain, steps=start.step if folder.chain.exists() else None)
    tracker = Tracker(folder, config.tracking, run_config=config.to_dict(), notify=notify, first_step=start.step)
    stop = StopRequest()
    recorder = None
    if config.checkpoints.interval:
        recorder = FlightRecorder(folder.checkpoints, config.checkpoints, state_bytes(model), notify)

    def sync() -> None:
        for record in (writer, chain, tracker):
            record.sync()

    trainer = Trainer(
        config,
        model,
        tokens,
        ReplayedOrder(tape, order) if tape else order,
        writer,
        chain,
        device,
        recorder,
        log=tracker.log,
        sync=sync,
        stop_requested=lambda: stop.signal_name is not None,
    )
    if start.state:
        trainer.load(start.tensors, start.state)
    started = time.perf_counter()
    with stop:
        result = trainer.run()
    writer.close()
    chain.close()
    outcome = _outcome(trainer, result, writer, stop.signal_name, time.perf_counter() - started, folder)
    write_json(folder.outcome, outcome.to_dict())
    tracker.close(outcome.to_dict())
    draw_curves(folder)
    return outcome


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _device(config: Config) -> torch.device:
    available = torch.cuda.is_available()
    if config.train.device == "cuda" and not available:
        raise UserError("train.device=cuda: no CUDA device is visible; use train.device=cpu or auto")
    return torch.device("cuda" if available and config.train.device != "cpu" else "cpu")


def _with_defaults(config: Config, device: torch.device) -> Config:
    """Write out the defaults that depend on the machine, so that a replay elsewhere keeps them."""
    train = config.train
    # With a GPU more threads gain nothing, and runs side by side keep each other waiting.
    threads = 1 if device.type == "cuda" else len(os.sched_getaffinity(0))
    return dataclasses.replace(
        config,
        train=dataclasses.replace(
            train,
            decay_steps=train.decay_steps or train.steps,
            micro_batch_size=train.micro_batch_size or train.batch_size,
            threads=train.threads or threads,
        ),
    )


def _batch_shape(config: Config) -> tuple[int, int, int]:
    return config.train.micro_batches, 1, config.train.micro_batch_size or config.train.batch_size


def _run_name(config: Config) -> str:
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{config.attn.name}_seed{config.seed}"


def _outcome(
    trainer: Trainer,
    result: LoopResult,
    writer: TapeWriter,
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
        digest=run_digest(trainer.chain.digest, weights),
        chain_digest=trainer.chain.digest,
        weights_digest=weights,
        tape_digest=writer.digest,
        tape_steps=writer.steps,
        interrupted=signal_name,
        seconds=round(seconds, 3),
        run=str(folder.path),
    )
