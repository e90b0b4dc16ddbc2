"""Which choices of a variant have an effect: what tells two attentions apart, whatever they are called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from flashpoint.numerics.delta_rules import RULES
from flashpoint.numerics.variant import ROUNDING_POINTS, AttentionVariant


@lru_cache(maxsize=1024)  # many runs, few attentions
def effective_choices(variant: AttentionVariant) -> Mapping[str, Any]:
    """Return the choices that have an effect, without the name, as flat keys.

    A rounding point has its mode under its name and, where it rounds, its bits under ``scores.bits``; the parts of
    ``delta_error`` are ``delta_error.kind`` and so on.
    """
    choices: dict[str, Any] = {}
    for name, value in variant.to_dict().items():
        if name in ROUNDING_POINTS:
            choices[name] = value["mode"]
            if value["mode"] != "none":
                choices[f"{name}.bits"] = value["bits"]
        elif name == "delta_error":
            choices |= {f"delta_error.{part}": of_part for part, of_part in value.items()}
            if value["trajectory"] is not None:  # too long to be told
                told = hashlib.sha256(json.dumps(value["trajectory"]).encode()).hexdigest()[:8]
                choices["delta_error.trajectory"] = told
        else:
            choices[name] = value
    silent = _silent(variant)
    return {name: value for name, value in choices.items() if name not in silent}


def _silent(variant: AttentionVariant) -> set[str]:
    """Return the fields that have no effect beside the others."""
    silent = {"name"}
    if variant.out_unnormalized.mode == "none":
        silent.add("out_unnormalized_when")
    if variant.denominator.mode == "none":
        silent.add("out_divisor")
    if variant.delta_error.trajectory is None:
        silent.add("delta_error.interval")
    if variant.shift != "offset":
        silent.add("shift_offset")
    if variant.shift != "dynamic_max":
        silent |= {"beta", "gamma", "tie_tolerance", "max_shift"}
    if not variant.exact_row_sum:
        silent.add("exact_row_sum_passes")
    elif variant.exact_row_sum_passes == 2:
        silent |= {"delta", *RULES[variant.delta].choices}
    for name, rule in RULES.items():
        if name != variant.delta:
            silent.update(rule.choices)
    return silent
