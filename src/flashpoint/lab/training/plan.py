"""What a run is to do, settled before anything is built or written."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from flashpoint.errors import UserError, notify
from flashpoint.hardware import cores, refuse_without_gpu
from flashpoint.lab.config import Config
from flashpoint.lab.data.tape import Tape
from flashpoint.lab.training.chip import refuse_chip_without_kernels
from flashpoint.lab.training.determinism import (
    describe_environment,
    environment_difference,
    fix_numerics,
    source_difference,
)
from flashpoint.lab.training.parallel import Ranks
from flashpoint.numerics.production import refuse_missing
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.manifest import Environment


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run of one process.

    Attributes:
        config: with the defaults written out that depend on the machine.
        resumed: the run that goes on; None also where it was stopped before its first step.
        original: the run that this one replays or branches off.
        tape: of one of the two; None of a run with batches of its own.
        environment: versions and hardware, for the manifest.
    """

    config: Config
    device: torch.device
    ranks: Ranks
    resumed: RunFolder | None
    original: RunFolder | None
    tape: Tape | None
    environment: Environment


def settle(config: Config, existing: RunFolder | None, ranks: Ranks, device: torch.device) -> Plan:
    """Settle what a run is to do, and fix this process's numerics for it.

    Args:
        existing: the folder that ``config.resume`` names.

    Raises:
        UserError: the run to replay or resume is not there, or contradicts the configuration or the processes; or the
            GPU cannot run the attention's kernels.
    """
    refuse_chip_without_kernels(config.attn, device)
    for attention in filter(None, (config.attn, config.attn.elsewhere)):
        if attention.kernel != "flash":
            refuse_missing(attention.kernel, device, config.train.deterministic, attention.name)
    resumed = existing if existing and existing.begun else None
    if existing and not resumed:
        notify(f"{existing.path}: stopped before its first step; starting it again")
    original = RunFolder.open(config.replay, config.runs_dir) if config.replay and not resumed else None
    tape = _tape(config, resumed, original, ranks)
    config = _with_machine_defaults(config, device, ranks.world, tape)
    fix_numerics(config.train.threads or 1, config.train.deterministic, config.train.precision)
    environment = describe_environment(device, config)
    source = resumed or original
    if source and (difference := environment_difference(source.read_manifest().environment, environment)):
        notify(difference)
    if resumed and (difference := source_difference(resumed.read_manifest().environment, environment)):
        notify(f"{resumed.path}: {difference}")
    return Plan(
        config=config, device=device, ranks=ranks, resumed=resumed, original=original, tape=tape,
        environment=environment,
    )  # fmt: skip


def usable_device(config: Config) -> torch.device:
    """Return the device that the run computes on.

    Raises:
        UserError: CUDA is asked for, and there is none.
    """
    on_gpu = torch.cuda.is_available() and config.train.device != "cpu"
    if not on_gpu:
        refuse_without_gpu(config.train.device, config.train.precision)
    return torch.device("cuda" if on_gpu else "cpu")


def _tape(config: Config, resumed: RunFolder | None, original: RunFolder | None, ranks: Ranks) -> Tape | None:
    """Return the tape to repeat, checked against the number of processes and the step to start from."""
    source = resumed or original
    if source is None:
        return None
    tape = Tape.read(source.tape, until_broken=resumed is not None)
    if tape.header.ranks != ranks.world:
        counts = f"{tape.path}: recorded by {tape.header.ranks} processes, here are {ranks.world}"
        if not config.allow_world_size_change:
            raise UserError(
                f"{counts}; start as many (torchrun), or take the same batches and other bits with "
                "allow_world_size_change=true"
            )
        notify(f"{counts}: the same global batches in the same order; sums have another order, so bits may differ")
    if original and config.from_step is not None and config.from_step > tape.steps:
        raise UserError(f"from_step={config.from_step}: {original.path} has {tape.steps:,} steps; give one of them")
    return tape


def _with_machine_defaults(config: Config, device: torch.device, world: int, tape: Tape | None) -> Config:
    """Write out the defaults that depend on the machine, so that a replay elsewhere keeps them."""
    train = config.train
    share = max(1, train.batch_size // world)
    micro_batch_size = train.micro_batch_size or share
    if tape and tape.header.ranks != world:  # the original's size was for another number of processes
        micro_batch_size = min(micro_batch_size, share)
    if train.batch_size % (micro_batch_size * world):
        raise UserError(
            f"train.batch_size={train.batch_size} is no multiple of {world} processes times "
            f"train.micro_batch_size={micro_batch_size}: change one of them"
        )
    probes = config.probes
    if probes.sequences > share:
        if probes.attention_interval and probes.attention:
            notify(f"probes.sequences={probes.sequences}: a step has {share} here; the probes observe {share}")
        probes = dataclasses.replace(probes, sequences=share)
    # With a GPU more threads gain nothing, and runs side by side keep each other waiting.
    threads = 1 if device.type == "cuda" else cores()
    return dataclasses.replace(
        config,
        probes=probes,
        train=dataclasses.replace(
            train,
            decay_steps=train.decay_steps or train.steps,
            micro_batch_size=micro_batch_size,
            threads=train.threads or threads,
        ),
    )
