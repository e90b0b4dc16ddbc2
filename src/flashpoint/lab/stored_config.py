"""Reading ``config.json`` of a run of the trainer: the keys of :class:`.Config`, as all versions stored them."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import WrapValidator

from flashpoint.errors import UserError
from flashpoint.lab.config import Config
from flashpoint.numerics.choices import DeltaError, Rounding
from flashpoint.numerics.contradictions import OF_ANY_KERNEL
from flashpoint.numerics.variant import ROUNDING_POINTS, AttentionVariant
from flashpoint.runs import migrations
from flashpoint.runs.run import Run
from flashpoint.schema import Kind, kind_of, read_record, understood

S = TypeVar("S")

_ALWAYS = {
    "model": "n_layer n_head d_model context vocab_size",
    "data": "source path text_field tokenizer vocab_size max_bytes val_fraction workers root",
    "train": "steps decay_steps lr min_lr_ratio warmup_steps batch_size micro_batch_size beta1 beta2 eps weight_decay "
    "grad_clip log_interval eval_interval eval_sequences device threads compile cuda_graph",
    "detector": "window margin hold_steps tail_steps",
    "tracking": "wandb project entity group tags",
}
"""Keys that the first version had. Every run has them; a key that is younger than a run has its default there."""


_SECTIONS = {
    name: cast(type, hint)
    for name, hint in typing.get_type_hints(Config).items()
    if name != "attn" and dataclasses.is_dataclass(hint)
}


def _attention_kind() -> type[Kind]:
    rounding: Any = kind_of(Rounding, closed=True)
    error = kind_of(DeltaError, instead={"trajectory": list[list[float]] | None}, closed=True)
    return kind_of(
        AttentionVariant,
        required=["name"],
        instead={**dict.fromkeys(ROUNDING_POINTS, rounding), "delta_error": error, "elsewhere": dict[str, Any] | None},
        closed=True,  # an attention with a choice that is not known here is another one
    )


def _whole(value: Any, check: Callable[[Any], Any]) -> Any:
    """Check types and then ranges, of ``elsewhere``, too; return the attention."""
    checked = check(value)
    if checked.elsewhere is not None:
        check(checked.elsewhere)
    return _attention(json.dumps(value, sort_keys=True))


@lru_cache(maxsize=1024)  # many runs, few attentions
def _attention(text: str) -> AttentionVariant:
    return AttentionVariant.from_dict(_that_were_read(json.loads(text)))


def _that_were_read(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the choices that had an effect: a kernel of another library once took any, and read none of its own."""
    if isinstance(fields.get("elsewhere"), dict):
        fields = {**fields, "elsewhere": _that_were_read(fields["elsewhere"])}
    if fields.get("kernel", "flash") == "flash":
        return fields
    bits = {point: {"bits": fields[point]["bits"]} for point in ROUNDING_POINTS if "bits" in fields.get(point, ())}
    return {name: value for name, value in fields.items() if name in OF_ANY_KERNEL} | bits


def _config_kind() -> type[Kind]:
    sections: dict[str, Any] = {name: kind_of(cls, _ALWAYS.get(name, "").split()) for name, cls in _SECTIONS.items()}
    sections["attn"] = Annotated[_attention_kind(), WrapValidator(_whole)]
    return kind_of(Config, required=["seed", "attn", *_ALWAYS], instead=sections)


_CONFIG = _config_kind()


def read_config(path: Path) -> Config:
    """Return the settings of a run of the trainer; one that is younger than the run has its default.

    Raises:
        UserError: the file is missing, or holds something else.
    """
    return _as_stored(Config, read_record(path, _CONFIG, migrations.config))


def config_of(text: str, where: str, remedy: str) -> Config:
    """Return the settings that the text of a ``config.json`` holds, as :func:`read_config`.

    Args:
        where: what messages begin with.

    Raises:
        UserError: it holds something else.
    """
    return _as_stored(Config, understood(text, _CONFIG, where, remedy, migrations.config))


def config_to_repeat(path: Path) -> Config:
    """Return the settings of a run that is to be repeated: one that this version does not know could not be.

    Raises:
        UserError: there is such a setting; and as of :func:`read_config`.
    """
    config = read_config(path)
    unknown = migrations.unknown_keys(path.read_bytes(), config.to_dict())
    if unknown:
        raise UserError(f"{unknown[0]}: no such key; flashpoint train help=all lists them")
    return config


def trained_config(run: Run) -> Config:
    """Return all settings of a run of the trainer.

    Raises:
        UserError: it is of somebody's own loop, which tells few.
    """
    if not isinstance(run.config, Config):
        raise UserError(f"{run.where}: its loop did not tell its settings; leave the run out")
    return run.config


def _as_stored(cls: type[S], stored: Kind) -> S:
    """Return a configuration, or a section of one, with the values that were stored.

    Relations between values are not asked: a later version may refuse what an earlier one has trained.
    """
    made = object.__new__(cls)
    for field in dataclasses.fields(cast(Any, cls)):
        if field.name not in stored.model_fields_set:
            value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        else:
            value = getattr(stored, field.name)
        if isinstance(value, Kind):
            value = _as_stored(_SECTIONS[field.name], value)
        object.__setattr__(made, field.name, tuple(value) if isinstance(value, list) else value)
    return made
