"""Variants by name: the files of the ``attn`` group, and names for variants that differ from their file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from flashpoint.errors import UserError, nearest
from flashpoint.numerics.variant import ROUNDING_POINTS, AttentionVariant


def resolved(attn: dict[str, Any], variants_dir: Path) -> AttentionVariant:
    """Return the variant of composed values.

    Args:
        attn: fields of :class:`AttentionVariant`; ``elsewhere`` may be a variant's name, and takes the formats.
        variants_dir: a YAML file for each name.

    Returns:
        The variant. Where a choice is not that of the file of its name, the name says so: ``flash_fixed beta=2``.

    Raises:
        UserError: ``elsewhere`` names no variant.
        ValueError: a choice is none.
    """
    elsewhere = attn.get("elsewhere")
    if isinstance(elsewhere, str):
        everywhere = AttentionVariant.from_dict({**attn, "layers": None, "heads": None, "elsewhere": None})
        attn = {
            **attn,
            "elsewhere": variant_named(elsewhere, variants_dir, "attn.elsewhere=").in_formats_of(everywhere).to_dict(),
        }
    return named_by_choices(AttentionVariant.from_dict(attn), variants_dir)


def named_by_choices(variant: AttentionVariant, variants_dir: Path) -> AttentionVariant:
    """Return a variant whose name tells the choices that are not those of the file of its name; the same one where
    there is no such file."""
    name = variant.name.split(" ")[0]
    if name not in variant_names(variants_dir):
        return variant
    own, filed = _told(variant), _told(variant_named(name, variants_dir))
    differing = [f"{key}={value}" for key, value in own.items() if value != filed[key]]
    return dataclasses.replace(variant, name=" ".join([name, *differing]))


def variant_named(name: str, variants_dir: Path, key: str = "") -> AttentionVariant:
    """Read the variant of a file of ``variants_dir``.

    Raises:
        UserError: naming ``key`` and the variants there are: this is none.
    """
    import yaml  # the training core is importable without it

    known = variant_names(variants_dir)
    if name not in known:
        told = nearest(name, known).rstrip() or f"choose one of {', '.join(known)}"
        raise UserError(f"{key}{name}: no such variant; {told}")
    return AttentionVariant.from_dict(yaml.safe_load((variants_dir / f"{name}.yaml").read_text(encoding="utf-8")))


def variant_names(variants_dir: Path) -> list[str]:
    """Return the names of all variants, in order; one of another folder, ``../x``, is none of them."""
    return sorted(path.stem for path in variants_dir.glob("*.yaml"))


def _told(variant: AttentionVariant) -> dict[str, str]:
    """Return the choices as a name shows them. A variant's title already shows formats and injected errors."""
    choices = {name: value for name, value in variant.to_dict().items() if name not in ("name", "delta_error")}
    choices |= {point: choices[point]["mode"] for point in ROUNDING_POINTS}
    if variant.elsewhere:
        choices["elsewhere"] = variant.elsewhere.name
    return {
        name: str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value)
        for name, value in choices.items()
    }
