"""What is measured at which size: shapes of an attention, and configurations of a training."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashpoint.errors import UserError
from flashpoint.files import CONFIGS
from flashpoint.lab.build_config import build_config
from flashpoint.lab.cli.composition import composed_values
from flashpoint.lab.cli.refusals import refusal
from flashpoint.lab.config import Config
from flashpoint_kernels.codes import HEAD_SIZES

AttentionShape = tuple[int, int, int, int]
"""B sequences, H heads, T tokens, d features of a head."""
ATTENTION_SHAPES: dict[str, list[AttentionShape]] = {
    "cuda": [(32, 12, 1024, 64), (64, 4, 512, 64), (8, 16, 4096, 64), (8, 16, 4096, 128)],
    "cpu": [(1, 2, 64, 16)],
}


@dataclass(frozen=True)
class TrainingShape:
    """A model and its batch."""

    name: str
    """As on the command line."""
    overrides: tuple[str, ...]
    """Settings that compose it."""


def attention_shape(word: str) -> AttentionShape | None:
    """Return the shape that ``32x12x1024x64`` means, None if the word has another form.

    Raises:
        UserError: the kernels have no such heads.
    """
    if not re.fullmatch(r"[1-9]\d*([x×][1-9]\d*){3}", word):
        return None
    B, H, T, d = map(int, re.split("[x×]", word))
    if d not in HEAD_SIZES:
        raise UserError(f"--shape {word}: heads of {d} features; the kernels have {', '.join(map(str, HEAD_SIZES))}")
    return B, H, T, d


def training_shape(word: str) -> TrainingShape:
    """Return what ``EXPERIMENT[:SEQUENCES[/MICRO]]`` means: sequences a step, and sequences of a micro-batch.

    Raises:
        UserError: the word has another form.
    """
    if not (parts := re.fullmatch(r"(\w+)(?::(\d+)(?:/(\d+))?)?", word)):
        raise UserError(f"--shape {word}: give EXPERIMENT[:SEQUENCES[/MICRO]], or BxHxTxd of an attention")
    experiment, sequences, micro = parts.groups()
    overrides = [f"experiment={experiment}"]
    overrides += [f"train.batch_size={sequences}"] if sequences else []
    overrides += [f"train.micro_batch_size={micro}"] if micro else []
    return TrainingShape(word, tuple(overrides))


def configured(shape: TrainingShape, attention: str) -> Config:
    """Return the configuration of a training as ``flashpoint train`` composes it.

    Args:
        attention: ``NAME[,KEY=VALUE…]``: a variant, and settings beside it.

    Raises:
        UserError: there is no such experiment, variant or setting.
    """
    return composed([*shape.overrides, *overrides_of(attention)])


def overrides_of(attention: str) -> list[str]:
    """Return the settings that ``NAME[,KEY=VALUE…]`` means."""
    name, *settings = attention.split(",")
    return [f"attn={name}", *settings]


def composed(overrides: list[str]) -> Config:
    """Return the configuration that settings compose.

    Raises:
        UserError: one of them is none.
    """
    try:
        values = composed_values(overrides)
        del values["hardware"], values["help"]  # no part of a run
        return build_config(values, CONFIGS / "attn")
    except Exception as error:
        raise refusal(error) from error
