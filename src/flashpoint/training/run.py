"""One run from configuration to verdict: builds the parts, runs the loop, leaves a run folder."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flashpoint.config import Config
from flashpoint.data.batches import BatchOrder
from flashpoint.data.prepare import prepare
from flashpoint.data.tape import Tape, TapeHeader, TapeWriter
from flashpoint.data.tokens import TokenDataset
from flashpoint.errors import UserError
from flashpoint.model import GPT
from flashpoint.report.curves import draw_curves
from flashpoint.run_folder import RunFolder, read_json, write_json
from flashpoint.tracking import Tracker
from flashpoint.training.chain import ChainWriter
from flashpoint.training.determinism import describe_environment, environment_difference, make_deterministic
from flashpoint.training.digests import run_digest, weights_digest
from flashpoint.training.loop import LoopResult, Trainer


@dataclass(frozen=True)
class Outcome:
    """A run's verdict: the last line on stdout and ``outcome.json``."""

    outcome: str
    step: int
    """Optimiser steps done."""
    onset_step: int | None
    loss: float
    """Last training loss, nats."""
    val_loss: float | None
    digest: str
    chain_digest: str
    weights_digest: str
    tape_digest: str
    tape_steps: int
    interrupted: str | None
    """Name of the signal that ended the run early."""
    seconds: float
    """Wall-clock time of the loop."""
    run: str

    def line(self) -> str:
        onset = "none" if self.onset_step is None else self.onset_step
        return (
            f"outcome={self.outcome} step={self.step} onset={onset} loss={self.loss:.4f} "
            f"digest={self.digest} run={self.run}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; a loss that JSON has no number for is a string."""
        values = dataclasses.asdict(self)
        for name in ("loss", "val_loss"):
            if values[name] is not None and not math.isfinite(values[name]):
                values[name] = str(values[name])
        return values


def run(config: Config) -> Outcome:
    """Train, or replay, one run.

    Raises:
        UserError: data, tape, folder or device are not what the configuration needs.
    """
    if config.resume is not None or config.from_step is not None:
        raise UserError("resume and from_step need checkpoints, which runs do not keep yet; use replay=RUN")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("WORLD_SIZE is above 1: training on several processes is not supported yet; use one")
    original = RunFolder.open(config.replay, config.runs_dir) if config.replay else None
    tape = Tape.read(original.tape) if original else None
    device = _device(config)
    if device.type == "cpu":
        notify(
            "no GPU: this run shows the whole pipeline on a small model; "
            "the explosion takes thousands of steps of experiment=ignite, which needs one"
        )
    config = _with_defaults(config, device)
    make_deterministic(config.train.threads or 1)
    environment = describe_environment(device)
    if original and (difference := environment_difference(read_json(original.manifest)["environment"], environment)):
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
        _check_replay(tape.header, header, tokens)
    folder = RunFolder.create(config.runs_dir, config.run_name or _run_name(config))
    try:
        return _record(config, folder, tokens, model.to(device), order, tape, header, environment, device)
    except OSError as error:
        raise UserError(
            f"{folder.path}: {error.strerror or error}; the run stops here, its records so far stay; "
            "free space or choose another runs_dir, then replay it"
        ) from error


def _record(
    config: Config,
    folder: RunFolder,
    tokens: TokenDataset,
    model: GPT,
    order: BatchOrder,
    tape: Tape | None,
    header: TapeHeader,
    environment: dict[str, Any],
    device: torch.device,
) -> Outcome:
    write_json(folder.config, config.to_dict())
    write_json(
        folder.manifest,
        {
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "hardware": environment["hardware"],
            "environment": environment,
            "data": {"path": str(tokens.path), **tokens.sidecar},
            "initial_weights": header.initial_weights,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        },
    )
    writer = TapeWriter(folder.tape, header)
    chain = ChainWriter(folder.chain)
    tracker = Tracker(folder, config.tracking, run_config=config.to_dict(), notify=notify)
    stop = _StopRequest()
    trainer = Trainer(
        config,
        model,
        tokens,
        _ReplayedOrder(tape, order) if tape else order,
        writer,
        chain,
        device,
        log=tracker.log,
        stop_requested=lambda: stop.signal_name is not None,
    )
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


def notify(line: str) -> None:
    """One line for the person at the terminal; stdout is kept for the outcome."""
    print(line, file=sys.stderr, flush=True)


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


def _check_replay(taped: TapeHeader, here: TapeHeader, tokens: TokenDataset) -> None:
    if taped.data_fingerprint != here.data_fingerprint:
        raise UserError(
            f"data differ from the tape's: fingerprint {here.data_fingerprint} in {tokens.path}, "
            f"{taped.data_fingerprint} on the tape; restore the tape's data or start a new run"
        )
    for field in dataclasses.fields(TapeHeader):
        recorded, current = getattr(taped, field.name), getattr(here, field.name)
        if recorded != current:
            raise UserError(
                f"{field.name} differs from the tape's: {current} here, {recorded} on the tape; "
                "replay with the versions that recorded it (manifest.json)"
            )


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


@dataclass(frozen=True)
class _ReplayedOrder:
    """The tape's order, and past its end the order that the original would have gone on with."""

    tape: Tape
    beyond: BatchOrder

    def windows(self, step: int) -> NDArray[np.uint32]:
        return self.tape.records[step] if step < self.tape.steps else self.beyond.windows(step)


class _StopRequest:
    """Turns the first SIGINT or SIGTERM into a clean end; a second one ends the process at once."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._request)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        signal.signal(number, self._previous[number])
        notify(f"{self.signal_name}: ending after this step; once more to quit at once")
