"""Attention calls of a run of the trainer, whose steps are repeated for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from flashpoint.diagnosis.call import AttentionCall, joined
from flashpoint.diagnosis.form import Form
from flashpoint.errors import UserError, notify
from flashpoint.lab.build_config import changed
from flashpoint.lab.config import Config, DataConfig
from flashpoint.lab.data.batches import gather_windows
from flashpoint.lab.data.tape import Tape
from flashpoint.lab.probes.instrumented import InstrumentedPass
from flashpoint.lab.stored_config import config_to_repeat
from flashpoint.lab.training.checkpoints import verified
from flashpoint.lab.training.parallel import Ranks
from flashpoint.lab.training.plan import settle
from flashpoint.lab.training.prepared_run import prepare_run
from flashpoint.lab.training.step import OptimizerStep
from flashpoint.numerics.production import PRODUCTION
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.runs.folder import RunFolder

TOKENS_AT_ONCE = 32_768
"""Tokens of a run that are held at once, and that it is diagnosed on without a word: the bias of δ is small."""


def calls_of_run(
    folder: RunFolder, step: int | None, sequences: int | None, device: torch.device
) -> tuple[list[AttentionCall], AttentionVariant]:
    """Return the calls of :func:`batches_of_run` at once, one for each layer."""
    batches, attention = batches_of_run(folder, step, sequences, device)
    return [joined(layer) for layer in zip(*batches, strict=True)], attention


def batches_of_run(
    folder: RunFolder,
    step: int | None,
    sequences: int | None,
    device: torch.device,
    attention: AttentionVariant | None = None,
) -> tuple[Iterator[list[AttentionCall]], AttentionVariant]:
    """Run forward and backward with the weights of a run of this package.

    The weights are those of its newest checkpoint up to a step, or else the initial ones. Calls tell which, as their
    ``step``.

    Args:
        step: None is the last one, or the onset of an explosion.
        sequences: of the step's batch and of those that follow; None is as many as have 32,768 tokens.
        attention: in the place of the run's own.

    Returns:
        For each 32,768 tokens a call of each layer, and the attention.

    Raises:
        UserError: the tape or the data are missing, or the run has no such step.
    """
    tape = Tape.read(folder.tape, until_broken=True)
    onset = folder.read_outcome().onset_step if folder.outcome.is_file() else None
    last = tape.steps - 1 if onset is None else min(tape.steps - 1, onset)
    if step is not None and not 0 <= step < tape.steps:
        raise UserError(f"--step {step}: {folder.path} has steps 0 to {tape.steps - 1:,}")
    wanted_step = last if step is None else step
    newest = next((one.step for one in verified(folder.checkpoints, notify, up_to=wanted_step)), 0)
    if wanted_step and not newest:
        notify(f"{folder.path}: no checkpoint up to step {wanted_step:,}; its initial weights are taken")
    config = _replaying(folder, newest, attention)
    plan = settle(config, None, Ranks(), device)
    prepared = prepare_run(plan)
    if prepared.start.step:
        prepared.optimizer_step.load_state(prepared.start.take_tensors())
    length, batch_size = config.model.context, config.train.batch_size
    at_once = -(-TOKENS_AT_ONCE // length)
    wanted = sequences or at_once
    steps = range(prepared.start.step, min(tape.steps, prepared.start.step + -(-wanted // batch_size)))
    windows = np.concatenate([prepared.order.windows(at)[:, 0].reshape(-1) for at in steps])[:wanted]

    def batches() -> Iterator[list[AttentionCall]]:
        for start in range(0, len(windows), at_once):
            batch = gather_windows(prepared.tokens.train, windows[start : start + at_once], length).to(device)
            micro = batch.split(config.train.sequences)
            found = [_calls(prepared.optimizer_step, config, some, prepared.start.step) for some in micro]
            yield [joined(layer) for layer in zip(*found, strict=True)]

    return batches(), config.attn


def _calls(step: OptimizerStep, config: Config, sequences: torch.Tensor, number: int) -> list[AttentionCall]:
    """Return the call of each layer on sequences [N, T + 1], with dO as their part of a step's loss."""
    device, precision = sequences.device, config.train.precision
    observe = InstrumentedPass(step.model, sequences, config.train.batch_size, device, "data", precision)
    seen = observe(sequences, step.seed_and_step)
    return [
        AttentionCall(
            q=seen.q[at],
            k=seen.k[at],
            v=seen.v[at],
            grad_out=seen.grad_out[at].to(seen.out.dtype),
            out=seen.out[at],
            grad_q=seen.grad_q[at],
            form=Form(is_causal=True, scale=seen.scale, softcap=config.model.score_cap or 0.0),
            layer=at + 1,
            step=number,
            attention=config.attn.name,
        )
        for at in range(config.model.n_layer)
    ]


def _replaying(folder: RunFolder, step: int, attention: AttentionVariant | None) -> Config:
    changes: dict[str, object] = {"probes.attention": (), "probes.weights_against": None, "checkpoints.interval": 0}
    changes |= {"train.compile": False, "train.device": "auto", "train.threads": None}
    if attention is not None:
        deterministic = attention.kernel == "flash" or PRODUCTION[attention.kernel].deterministic
        changes |= {"attn": attention.to_dict(), "train.deterministic": deterministic}
    changes |= {"replay": str(folder.path), "from_step": step, "resume": None, "data.root": DataConfig.root}
    return changed(config_to_repeat(folder.config), changes)
