"""The kind of ``config.json`` of a run of the trainer: the keys of :class:`.Config`, as all versions stored them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, WrapValidator

from flashpoint.lab.config import Config
from flashpoint.numerics.choices import DeltaError, Rounding
from flashpoint.numerics.variant import REMOVED_CHOICES, ROUNDING_POINTS, AttentionVariant
from flashpoint.runs.configuration import attention_of
from flashpoint.schema import Kind, kind_of

_ALWAYS = {
    "model": "n_layer n_head d_model context vocab_size",
    "data": "source path text_field tokenizer vocab_size max_bytes val_fraction workers root",
    "train": "steps decay_steps lr min_lr_ratio warmup_steps batch_size micro_batch_size beta1 beta2 eps weight_decay "
    "grad_clip log_interval eval_interval eval_sequences device threads compile cuda_graph",
    "detector": "window margin hold_steps tail_steps",
    "tracking": "wandb project entity group tags",
}
"""Keys that the first version had. Every run has them; a key that is younger than a run has its default there."""


def _with_mode(value: object) -> object:
    """Return a rounding of today: runs of earlier versions store its mode alone."""
    return {"mode": value} if isinstance(value, str) else value


def _attention_kind() -> type[Kind]:
    rounding: Any = Annotated[kind_of(Rounding, closed=True), BeforeValidator(_with_mode)]
    error = kind_of(DeltaError, instead={"trajectory": list[list[float]] | None}, closed=True)
    return kind_of(
        AttentionVariant,
        required=["name"],
        instead={**dict.fromkeys(ROUNDING_POINTS, rounding), "delta_error": error, "elsewhere": dict[str, Any] | None},
        more={**{f"{point}_bits": int | None for point in ROUNDING_POINTS}, **dict.fromkeys(REMOVED_CHOICES, bool)},
        closed=True,  # an attention with a choice that is not known here is another one
    )


def _whole(value: Any, check: Callable[[Any], Any]) -> Any:
    """Check types and then ranges, of ``elsewhere``, too."""
    checked = check(value)
    if checked.elsewhere is not None:
        check(checked.elsewhere)
    attention_of({"attn": value})
    return checked


def _config_kind() -> type[Kind]:
    plain = typing.get_type_hints(Config)
    sections: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        if field.name != "attn" and dataclasses.is_dataclass(section := plain[field.name]):
            always = _ALWAYS.get(field.name, "").split()
            sections[field.name] = kind_of(typing.cast(type, section), always)
    sections["attn"] = Annotated[_attention_kind(), WrapValidator(_whole)]
    return kind_of(Config, required=["seed", "attn", *_ALWAYS], instead=sections)


CONFIG = _config_kind()
"""The kind of ``config.json``."""
