"""One call of an attention in training: its inputs, its outputs and the gradients that went through it.

A sequence has an *identity*, a word that it shares with its repetitions alone. A loop over few data repeats sequences,
and a repetition is no further evidence. A sequence has the empty word where nobody knows whether it came before.

Shapes: N sequences, H heads, H_kv heads of keys and values, T_q queries, T_k keys, d features per head of queries and
keys, d_v of values. Elsewhere T and d stand for both where nothing depends on which.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from flashpoint.diagnosis.form import TENSORS, Form, joined_forms
from flashpoint.errors import UserError, notify
from flashpoint.files import atomic_write, open_tensors
from flashpoint.runs import migrations
from flashpoint.schema import Kind, Step, understood

_METADATA = "flashpoint"
"""Key of a file's metadata under which it says of the call, as JSON, what no tensor does."""
_NEEDED = ("q", "k", "v", "grad_out")
_OPTIONAL = ("out", "grad_q", "grad_k", "grad_v")
_OF_ROWS = "grad_logsumexp"
"""Name of the one optional tensor that has no features, [N, H, T_q]."""
_OF_FORM = ("is_causal", "scale", "softcap", "dropout")
"""What the metadata says of a call's form."""
_DTYPES = {"bfloat16", "float16", "float32", "float64"}
_SHORT, _FEW_ELEMENTS = 64, 1 << 17
"""Tokens of sequences that are measured together, and scores of theirs that are held at a time: of fewer, an operation
starts for longer than it computes. Of longer sequences each may be computed in other tiles."""


WITH_FP16_INSIDE = " with FP16 inside"
"""Is behind the name of an attention that :func:`flashpoint.stabilize` has changed."""


class CallRecord(Kind):
    """What the metadata of a file says of the call; each field as of :class:`AttentionCall` and its :class:`.Form`."""

    is_causal: bool
    scale: Annotated[float, Field(gt=0)]
    softcap: Annotated[float, Field(ge=0)]
    dropout: Annotated[float, Field(ge=0, lt=1)]
    layer: Annotated[int, Field(ge=1, lt=2**31)]
    step: Step
    attention: str
    identities: tuple[str, ...]
    together: tuple[Annotated[int, Field(ge=1, lt=2**31)], ...]
    other_gradients: str
    module: str


@dataclass(frozen=True)
class AttentionCall:
    """What a layer's attention took and gave.

    Attributes:
        q: [N, H, T_q, d], floating point.
        k: [N, H_kv, T_k, d].
        v: [N, H_kv, T_k, d_v].
        grad_out: dO [N, H, T_q, d_v].
        form: what else it was told.
        layer: from 1.
        step: of the training, from 0.
        attention: what computed it, as a name that people read.
        out: O [N, H, T_q, d_v] as the attention returned it; None where nobody kept it.
        grad_q, grad_k, grad_v: as it returned them, of their inputs' shapes; None where nobody kept them.
        identities: of the sequences [N], equal for those that are repetitions; empty where the tensors alone tell.
        together: layers that were captured at once, this one among them; empty where nobody says.
        grad_logsumexp: what came to L [N, H, T_q], nats, which the attention returned beside O, where a loss used it;
            None where none did. Gradients of q and k are of both.
        other_gradients: names of other outputs that a loss used: gradients of q, k and v are of O and these; empty
            where there are none.
        module: name in the model of the module that called it; empty where nobody says.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    form: Form
    layer: int
    step: int
    attention: str
    out: Tensor | None = None
    grad_q: Tensor | None = None
    grad_k: Tensor | None = None
    grad_v: Tensor | None = None
    identities: tuple[str, ...] = ()
    together: tuple[int, ...] = ()
    grad_logsumexp: Tensor | None = None
    other_gradients: str = ""
    module: str = ""

    def write(self, path: Path) -> None:
        """Write a .safetensors file that ``flashpoint diagnose`` and ``flashpoint deviation --inputs`` read.

        Raises:
            OSError: it cannot be written.
        """
        from safetensors.torch import save_file

        tensors = {name: getattr(self, name) for name in (*_NEEDED, *_OPTIONAL, _OF_ROWS)} | self.form.tensors
        kept = {name: x.detach().contiguous().cpu() for name, x in tensors.items() if x is not None}
        told = {name: getattr(self.form if name in _OF_FORM else self, name) for name in CallRecord.model_fields}
        with atomic_write(path, durable=False) as partial:  # a training loop waits for it
            save_file(kept, partial, metadata={_METADATA: json.dumps(told)})

    @classmethod
    def read(cls, path: Path) -> AttentionCall:
        """Read what :meth:`write` wrote, or any .safetensors file with q, k, v and grad_out.

        Without metadata the call is causal, α is 1/√d, and layer and step are 1 and 0.

        Raises:
            UserError: the file is none, or lacks a tensor, or has one of another shape.
        """
        from safetensors import SafetensorError

        try:
            with open_tensors(path) as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
                metadata = file.metadata() or {}
            head_size = tensors["q"].shape[-1] if "q" in tensors and tensors["q"].ndim else 1
            migration = partial(migrations.call, head_size=head_size)
            text = metadata.get(_METADATA, "{}")
            record = understood(text, CallRecord, f"{path}: metadata", "write it anew", migration)
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; give a capture, a run, or a .safetensors file") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(
                f"{path}: no .safetensors file: {error}; write q, k, v and grad_out with safetensors.torch.save_file; "
                "of a checkpoint of weights docs/watching.md, A checkpoint alone, makes them"
            ) from error
        if missing := [name for name in _NEEDED if name not in tensors]:
            has = ", ".join(tensors) or "none"
            raise UserError(f"{path}: no tensor {', '.join(missing)}; it needs {', '.join(_NEEDED)}, and has {has}")
        known = (*_NEEDED, *_OPTIONAL, _OF_ROWS, *TENSORS)
        if unknown := [name for name in tensors if name not in known]:
            notify(f"{path}: {', '.join(unknown)} not read; names of tensors are {', '.join(known)}")
        held: dict[str, Any] = {name: tensors.get(name) for name in (*_NEEDED, *_OPTIONAL, _OF_ROWS)}
        told = dict(record)
        form: dict[str, Any] = {name: told.pop(name) for name in _OF_FORM}
        form |= {name: tensors.get(name) for name in TENSORS}
        call = cls(**held, **told, form=Form(**form))
        call._check(path)
        return call

    def _check(self, path: Path) -> None:
        tensors = {name: x for name in (*_NEEDED, *_OPTIONAL) if (x := getattr(self, name)) is not None}
        if not fit_together({name: x.shape for name, x in tensors.items()}):
            told = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
            needed = (
                "q needs [N, H, T_q, d], k [N, H_kv, T_k, d], v [N, H_kv, T_k, d_v], out and grad_out [N, H, T_q, d_v]"
            )
            raise UserError(f"{path}: {told}; {needed}")
        if self.grad_logsumexp is not None and self.grad_logsumexp.shape != self.q.shape[:-1]:
            shape = list(self.grad_logsumexp.shape)
            raise UserError(f"{path}: {_OF_ROWS} {shape}, q {list(self.q.shape)}; it needs [N, H, T_q]")
        if problem := self.form.problem((*self.q.shape[:3], self.k.shape[2])):
            raise UserError(f"{path}: {problem}")
        if len(self.identities) not in (0, len(self.q)):
            raise UserError(f"{path}: {len(self.identities)} identities of {len(self.q)} sequences; write it anew")
        dtypes = {name: str(x.dtype).removeprefix("torch.") for name, x in tensors.items()}
        if not set(dtypes.values()) <= _DTYPES or len({dtypes[name] for name in ("q", "k", "v")}) > 1:
            told = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
            raise UserError(
                f"{path}: {told}; q, k and v need one dtype, and all of them one of {', '.join(sorted(_DTYPES))}"
            )

    @property
    def is_of_out_alone(self) -> bool:
        """Whether gradients of q, k and v came through O alone."""
        return self.grad_logsumexp is None and not self.other_gradients

    @property
    def is_bf16(self) -> bool:
        """Whether q, k and v are of BF16, as the model gave them."""
        return self.q.dtype == torch.bfloat16

    @property
    def has_fp16_inside(self) -> bool:
        """Whether :func:`flashpoint.stabilize` had changed the attention."""
        return self.attention.endswith(WITH_FP16_INSIDE)

    @property
    def groups(self) -> int:
        """Heads that share one head of keys and values."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def at_a_time(self) -> int:
        """How many sequences are measured at a time, as one with all of their heads; 1 of long ones."""
        heads, queries, keys = *self.q.shape[1:3], self.k.shape[2]
        return max(1, _FEW_ELEMENTS // (heads * queries * keys)) if max(queries, keys) <= _SHORT else 1

    def of_heads(self, keys: slice) -> AttentionCall:
        """Return the call of some heads of keys and values, with the queries' heads that share them."""
        queries = slice(keys.start * self.groups, keys.stop * self.groups)
        sliced = {
            name: x[:, queries if name in ("q", "grad_out", "out", "grad_q") else keys]
            for name in (*_NEEDED, *_OPTIONAL)
            if (x := getattr(self, name)) is not None
        }
        of_rows = None if self.grad_logsumexp is None else self.grad_logsumexp[:, queries]
        return dataclasses.replace(self, **sliced, form=self.form.of_heads(queries), grad_logsumexp=of_rows)

    def as_one_sequence(self, some: slice) -> AttentionCall:
        """Return the call of some sequences with all of their heads as heads of one, which has no identity."""
        held = {name: getattr(self, name) for name in (*_NEEDED, *_OPTIONAL, _OF_ROWS)}
        held = {name: heads_of(x, some) for name, x in held.items() if x is not None}
        form = self.form.as_one_sequence(some, self.q.shape[:2])
        return dataclasses.replace(self, **held, form=form, identities=())

    def to(self, device: torch.device) -> AttentionCall:
        """Return the call with its tensors on a device."""
        moved = {name: getattr(self, name) for name in (*_NEEDED, *_OPTIONAL, _OF_ROWS)}
        held = {name: x.to(device) for name, x in moved.items() if x is not None}
        return dataclasses.replace(self, **held, form=self.form.to(device))


def fit_together(shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return whether tensors of a call, by the names of :class:`AttentionCall`, have its shapes. q, k, v are there."""
    q, k, v = (list(shapes[name]) for name in ("q", "k", "v"))
    if {len(q), len(k), len(v)} != {4} or 0 in (*q, *k, *v) or q[1] % k[1]:
        return False
    if q[0] != k[0] or q[3] != k[3] or k[:3] != v[:3]:
        return False
    out = [*q[:3], v[3]]
    needed = {"q": q, "grad_q": q, "k": k, "grad_k": k, "v": v, "grad_v": v, "out": out, "grad_out": out}
    return all(list(shape) == needed[name] for name, shape in shapes.items())


def heads_of(x: Tensor, some: slice) -> Tensor:
    """Return all heads of some sequences of [N, H, …] as those of one, [1, H of each, …]."""
    return x[some].flatten(0, 1)[None]


def joined(calls: Sequence[AttentionCall]) -> AttentionCall:
    """Return calls of one layer, on other sequences each, as one."""
    first = calls[0]
    names = [name for name in (*_NEEDED, *_OPTIONAL, _OF_ROWS) if getattr(first, name) is not None]
    held: dict[str, Any] = {name: torch.cat([getattr(call, name) for call in calls]) for name in names}
    held["form"] = joined_forms([call.form for call in calls], [len(call.q) for call in calls])
    known = all(call.identities for call in calls)
    held["identities"] = tuple(one for call in calls for one in call.identities) if known else ()
    return dataclasses.replace(first, **held)


def digests(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """Return a digest of each of the rows [N] that tensors [N, …] have together: of their bytes. Without any, none."""
    return tuple(_digest(rows) for rows in zip(*(x.detach().cpu() for x in tensors), strict=True))


def identities_of(call: AttentionCall) -> tuple[str, ...]:
    """Return the identities of a call's sequences [N]: its own, or else digests of Q, K and V of the first head.

    Such a digest is another one as soon as the weights have moved.
    """
    return call.identities or digests([x[:, 0] for x in (call.q, call.k, call.v)])


def by_identity(identities: Sequence[str]) -> list[list[int]]:
    """Return the places of each different sequence, in the order in which the sequences came first."""
    places: dict[str | int, list[int]] = {}
    for place, one in enumerate(identities):
        places.setdefault(one or place, []).append(place)
    return list(places.values())


def averaged(values: Tensor, identities: Sequence[str]) -> Tensor:
    """Return values [S, H] of sequences as those of the different ones, each the mean over its repetitions. NaN is left
    out where another repetition has a value."""
    different = by_identity(identities)
    if len(different) == len(values):
        return values
    return torch.stack([values[places].nanmean(0) for places in different])


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for one in tensors:  # a copy, as a tensor of one number is contiguous with any stride
        digest.update(one.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
