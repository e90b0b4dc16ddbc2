"""Variants by name: the files of the ``attn`` group, and what a variant is called whose choices are not its file's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashpoint.attention.variant import AttentionVariant
from flashpoint.errors import UserError


def resolved(attn: dict[str, Any], variants_dir: Path) -> AttentionVariant:
    """The variant of composed values.

    Args:
        attn: fields of :class:`AttentionVariant`; ``elsewhere`` may be a variant's name, and takes the formats.
        variants_dir: a YAML file for each name.

    Returns:
        The variant. Where a choice is not that of the file of its name, the name says so: ``flash_fixed beta=2``.

    Raises:
        UserError: ``elsewhere`` names no variant.
        ValueError: a choice is none.
    """
    formats = {key: value for key, value in attn.items() if key.endswith("_bits")}
    if isinstance(attn.get("elsewhere"), str):
        attn = {**attn, "elsewhere": {**formats, **_read(attn["elsewhere"], variants_dir)}}
    name = attn["name"].split(" ")[0]
    variant = AttentionVariant.from_dict({**attn, "name": name})
    if not (variants_dir / f"{name}.yaml").is_file():
        return AttentionVariant.from_dict(attn)
    # Formats and injected errors are in a variant's title already.
    told = {**formats, "delta_error": attn.get("delta_error", {})}
    own, filed = variant.to_dict(), AttentionVariant.from_dict({**_read(name, variants_dir), **told}).to_dict()
    differing = [f"{key}={_told(own[key])}" for key in own if own[key] != filed[key]]
    return AttentionVariant.from_dict({**attn, "name": " ".join([name, *differing])})


def _read(name: str, variants_dir: Path) -> dict[str, Any]:
    import yaml  # the training core is importable without it

    path = variants_dir / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in variants_dir.glob("*.yaml")))
        raise UserError(f"attn.elsewhere={name}: no such variant; choose one of {known}")
    fields: dict[str, Any] = yaml.safe_load(path.read_text())
    return fields


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return str(value["name"])
    return str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value)
