"""What a planned run is made of: data, model, batch order, probes, and where its steps begin."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from flashpoint.cli.process import without_collection
from flashpoint.errors import UserError, notify
from flashpoint.lab.config import Config, DataConfig
from flashpoint.lab.data.batches import BatchOrder
from flashpoint.lab.data.prepare import prepare, preparing
from flashpoint.lab.data.replayed_batches import ReplayedOrder, check_replay, recorded_tokens
from flashpoint.lab.data.tape import TapeHeader
from flashpoint.lab.data.tokens import TokenDataset
from flashpoint.lab.model import GPT
from flashpoint.lab.probes.runner import ProbeRunner
from flashpoint.lab.training.chip import refusing_too_large
from flashpoint.lab.training.interrupt import surely_interrupted
from flashpoint.lab.training.plan import Plan
from flashpoint.lab.training.run_size import RunSize, capacity
from flashpoint.lab.training.snapshots import Twin
from flashpoint.lab.training.start import Start, starting_point
from flashpoint.lab.training.step import OptimizerStep


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Everything that a run needs before it has a folder.

    Attributes:
        plan: as settled, but with the source of the text that could be had, and the tape dealt to as many processes as
            here.
        optimizer_step: trains the model, which is on the plan's device.
        order: which windows a step trains on.
        header: of the tape that this run writes.
        probes: None in all processes but the first.
        twin: the run to measure the weights against; None without one, and in all processes but the first.
        compile_seconds: that compilation took.
    """

    plan: Plan
    tokens: TokenDataset
    optimizer_step: OptimizerStep
    order: BatchOrder | ReplayedOrder
    header: TapeHeader
    probes: ProbeRunner | None
    twin: Twin | None
    start: Start
    compile_seconds: float


def prepare_run(plan: Plan, data: Callable[[], DataConfig] | None = None) -> PreparedRun:
    """Prepare the data, make the model, and check them against the tape.

    Args:
        data: what :func:`.preparing` yielded, where another process has begun to prepare them; None where none has.

    Raises:
        UserError: data, tape, checkpoints or probes are not what the configuration needs, or a kernel does not fit the
            GPU.
    """
    config, ranks = plan.config, plan.ranks
    recorded = _recorded_tokens(plan)
    begun = (lambda: config.data) if recorded else data
    # Batches of its own may be of another text.
    prepared = preparing(config.data, fallback=plan.tape is None, beside=config.train.compiles(plan.device.type))
    with surely_interrupted(), contextlib.nullcontext(begun) if begun else prepared as settled_data:
        # surely: a compiler's callbacks can drop Ctrl-C
        optimizer_step, compile_seconds = _compiled_step(plan)
        config = dataclasses.replace(config, data=settled_data())
    tokens, model = recorded or prepare(config.data), optimizer_step.model
    _check_vocabulary(config, tokens)
    shape = config.train.micro_batches // ranks.world, ranks.world, config.train.sequences
    order = BatchOrder(len(tokens.train), config.model.context, shape, _order_seed(config))
    _check_validation(config, tokens)
    header = _tape_header(config, tokens, order, model)
    tape = plan.tape
    if tape:
        if tape.header.ranks != ranks.world:
            tape = tape.shared_among(header.shape)
        check_replay(tape.header, header, tokens)
    probes = ProbeRunner(config.probes, model, config.train, plan.device, notify) if ranks.first else None
    trained_on = ReplayedOrder(tape, order) if tape else order
    return PreparedRun(
        plan=dataclasses.replace(plan, config=config, tape=tape),
        tokens=tokens,
        optimizer_step=optimizer_step,
        order=trained_on,
        header=header,
        probes=probes,
        twin=Twin(config, header, trained_on) if config.probes.weights_against and ranks.first else None,
        start=starting_point(
            config, optimizer_step.forms(), plan.resumed, plan.original, plan.tape.steps if plan.tape else None
        ),
        compile_seconds=compile_seconds,
    )


def _compiled_step(plan: Plan) -> tuple[OptimizerStep, float]:
    """Make the model on the plan's device and compile what a step compiles; return the seconds of that, too."""
    config = plan.config
    model = GPT(config.model, config.attn, config.seed, config.train.z_loss)
    if config.checkpoints.interval:
        needed = RunSize.of_config(config, plan.device.type, plan.ranks.world)
        capacity(config.checkpoints, needed.state_bytes)  # refused before there is a folder
    model.to(plan.device)  # where it may not fit
    optimizer_step = OptimizerStep(model, config, plan.device, plan.ranks)
    started = time.perf_counter()
    with refusing_too_large(config.attn, plan.device), without_collection():
        optimizer_step.warm_up()
    return optimizer_step, time.perf_counter() - started


def _recorded_tokens(plan: Plan) -> TokenDataset | None:
    """Return the tokens of the run that goes on or is repeated, if they lie in this run's folder of data or where that
    run had them."""
    source = plan.resumed or plan.original
    if source is None or plan.tape is None or (path := source.read_manifest().data.path) is None:
        return None
    places = dict.fromkeys((Path(plan.config.data.root, Path(path).name), Path(path)))
    return recorded_tokens(places, plan.tape.header)


def _check_vocabulary(config: Config, tokens: TokenDataset) -> None:
    if tokens.vocab_size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} is below the {tokens.vocab_size:,} tokens of "
            f"{tokens.path}: raise it, or choose data.tokenizer=bpe"
        )


def _check_validation(config: Config, tokens: TokenDataset) -> None:
    """Refuse to validate on nothing: as few tokens as of one sequence would give a loss of NaN."""
    if len(tokens.val) <= config.model.context:
        raise UserError(
            f"data.val_fraction={config.data.val_fraction}: {len(tokens.val):,} validation tokens hold no sequence of "
            f"model.context={config.model.context}; raise data.val_fraction, or take more data or a shorter context"
        )


def _order_seed(config: Config) -> int:
    return config.seed if config.train.order_seed is None else config.train.order_seed


def _tape_header(config: Config, tokens: TokenDataset, order: BatchOrder, model: GPT) -> TapeHeader:
    micro_batches, ranks, sequences = order.shape
    return TapeHeader(
        data_fingerprint=tokens.fingerprint,
        context=config.model.context,
        n_windows=order.n_windows,
        micro_batches=micro_batches,
        ranks=ranks,
        sequences=sequences,
        seed=_order_seed(config),
        initial_weights=weights_digest(model),
    )


@torch.no_grad()
def weights_digest(model: nn.Module) -> str:
    """Return SHA-256 over names, shapes and bytes of all parameters, in order of names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        # A copy: one number is contiguous with any stride, and view takes not any.
        one = parameter.detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(one.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
