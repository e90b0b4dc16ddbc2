"""Records that earlier versions wrote, brought to the shape that today's version reads.

This is the one place that knows keys of records by text, and that fills what an older record does not have. It takes
plain JSON before it is checked: what is damaged passes through, and the record that is made of it refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

UNSEEN = "unknown"
"""The name of an attention that no step has shown."""

Json = dict[str, Any]
"""A JSON object."""


def manifest(values: Json) -> Json:
    """Return ``manifest.json`` with every key of today.

    A run that nobody resumed, whose probes did not fail, or that no watch made, leaves the keys of these out. Runs of
    the first versions have no ``parent``, no ``twin`` and fewer versions in ``environment``.
    """
    values = {
        **dict.fromkeys(("parent", "twin")),
        **{"resumed": [], "probes_off": [], "watched": False, "first_step": 0, "not_recorded": []},
        **values,
    }
    _change(values, "environment", _environment)
    _change(values, "data", lambda data: {"path": None, "fingerprint": None, **data})
    if isinstance(resumed := values["resumed"], list):
        values["resumed"] = [_resumption(one) if isinstance(one, dict) else one for one in resumed]
    return values


def _environment(values: Json) -> Json:
    versions = (
        "flashpoint",
        "commit",
        "source",
        "python",
        "cuda",
        "triton",
        "tiles",
        "sdpa",
        "production",
        "numpy",
        "platform",
    )
    return {**dict.fromkeys((*versions, "hardware", "command")), **values}


def _resumption(values: Json) -> Json:
    values = dict(values)
    _change(values, "environment", _environment)
    return values


def config(values: Json) -> Json:
    """Return ``config.json`` of a run of the trainer with every section, name and shape of today.

    Single settings that are younger than the run are left out: their defaults stand with :class:`.Config`.
    """
    values = {"optimizer": {}, **config_as_kept(values)}
    _change(values, "attn", _attention)
    _change(values, "probes", _probes)
    _change(values, "tracking", _tracking)
    return values


def config_as_kept(values: Json) -> Json:
    """Return ``config.json`` as the evidence tables keep it: with all sections, and today's name of its attention."""
    values = {"probes": {}, "checkpoints": {}, **values}
    _change(values, "attn", _named_as_today)
    return values


def unknown_keys(text: bytes, known: Mapping[str, Any]) -> list[str]:
    """Return the settings of ``config.json`` that this version does not know, ``train.later``; ``attn`` refuses them.

    Args:
        known: those that it knows, as a configuration has them.
    """
    values = config(json.loads(text))
    sections = {name: section for name, section in known.items() if isinstance(section, dict) and name != "attn"}
    inside = [f"{name}.{key}" for name, section in sections.items() for key in values[name] if key not in section]
    return [*inside, *(name for name in values if name not in known)]


def _named_as_today(attn: Json) -> Json:
    """Return an attention with today's name.

    ``flash_fixed`` was Algorithm 1, then Algorithm 1 with exact row sums, before it became a δ of O in two parts. What
    is called so today has that δ, or its name tells another one, as ``flash_fixed delta=p_dp`` does.
    """
    if not isinstance(attn.get("name"), str):
        return attn
    name, space, differing = attn["name"].partition(" ")
    if name == "flash_fp32_delta_split":
        name = "flash_fixed"
    elif name == "flash_fixed" and attn.get("delta") != "out_fp32" and "delta=" not in differing:
        name = "flash_fixed_paper" + (" exact_row_sum=True" if attn.get("exact_row_sum") else "")
    return {**attn, "name": f"{name}{space}{differing}"}


REMOVED_CHOICES = {"fused_exponent": False}
"""Choices of an attention that no recorded run made, each with the value that every run has. Another is refused."""


def _attention(attn: Json) -> Json:
    """Return an attention with the choices of today, whose roundings have a mode and bits.

    The first versions stored the mode alone, and then the bits in a key of their own, such as ``scores_bits``.
    """
    from flashpoint.numerics.variant import ROUNDING_POINTS  # a loop that is watched does without

    attn = {
        name: value for name, value in attn.items() if name not in REMOVED_CHOICES or value != REMOVED_CHOICES[name]
    }
    for point in ROUNDING_POINTS:
        bits = attn.pop(f"{point}_bits", None)
        if isinstance(mode := attn.get(point), str):
            attn[point] = {"mode": mode}
        if bits is not None and isinstance(rounding := attn.setdefault(point, {}), dict):
            attn[point] = {**rounding, "bits": bits}
    _change(attn, "elsewhere", _attention)
    return attn


def _probes(values: Json) -> Json:
    """Return the probes' settings with today's names: the weights' were of W_Q alone."""
    values = dict(values)
    if (interval := values.pop("w_q_interval", None)) is not None:
        values.setdefault("weights_interval", interval)
    return values


def _tracking(values: Json) -> Json:
    """Return how a run is tracked. ``auto`` uploaded where a login was stored, which is done no more unasked."""
    return {**values, "wandb": "offline"} if values.get("wandb") == "auto" else values


def watched_config(values: Json) -> Json:
    """Return ``config.json`` of somebody's own loop with every key that is read of one.

    The first versions stored defaults of this package beside what they knew, and a model's shape before they had seen
    it. Those say nothing of the loop. They did not name the modules that call attentions.
    """
    values = {"attn": {}, "model": None, **values}
    _change(values, "attn", lambda attn: {"name": UNSEEN, **attn})
    _change(values, "train", lambda train: {"steps": None, "warmup_steps": 0, **train})
    _change(values, "model", lambda model: {"modules": [], **model})
    if isinstance(attn := values["attn"], dict) and attn["name"] == UNSEEN:
        values["model"] = None
    return values


def outcome(values: Json) -> Json:
    """Return ``outcome.json`` with every key of today.

    The first versions have no digest chain, and did not say where a NaN came from. They validated at the end, unless
    they were interrupted.
    """
    at_end = None if values.get("interrupted") else values.get("step")
    return {"nonfinite": None, "val_step": at_end, "chain_digest": None, **values}


def branch(values: Json) -> Json:
    """Return a line of ``localize.jsonl`` with every key of today: the first versions did not time a branch."""
    return {"seconds": 0.0, **values}


def call(values: Json, head_size: int) -> Json:
    """Return the metadata of a captured call with every key of today.

    Whoever writes tensors without metadata has taken a causal call with α = 1/√d. The first versions of captures had no
    identities, and did not say which layers were captured at once, which module had called, nor whether other outputs
    had gradients. A call with a soft cap or with dropout was not recorded.
    """
    told = {"is_causal": True, "scale": max(1, head_size) ** -0.5, "layer": 1, "step": 0, "attention": UNSEEN}
    told |= {"softcap": 0.0, "dropout": 0.0}
    return {**told, "identities": [], "together": [], "other_gradients": "", "module": "", **values}


def delta_line(values: Json) -> Json:
    """Return a line of ``delta.jsonl`` with every key of today: the first versions had no identities."""
    return {"identities": None, **values}


def sidecar(values: Json) -> Json:
    """Return ``meta.json`` of prepared tokens with every key that is read: a tokeniser that no file holds has no
    digest."""
    values = dict(values)
    _change(values, "tokenizer", lambda tokenizer: {"sha256": None, **tokenizer})
    return values


def sweep(values: Json) -> Json:
    """Return ``.sweep.json`` with every key of today: the first sweeps did not keep the settings of each run."""
    return {"runs": {}, **values}


def loop_state(values: Json) -> Json:
    """Return the state of a training loop, in a checkpoint, with every key of today: the first versions kept no
    validation, and a process without probes keeps nothing of them."""
    values = {"val_loss": None, "val_step": None, **values}
    _change(values, "probes", lambda probes: {"attention": {}, "sentinel": None, **probes})
    return values


def _change(values: Json, key: str, migrate: Any) -> None:
    """Bring an object inside to the shape of today."""
    if isinstance(inside := values.get(key), dict):
        values[key] = migrate(inside)
