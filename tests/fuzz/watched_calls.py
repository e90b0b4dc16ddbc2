"""Has a tiny model make a drawn call, alone and watched, and judges what the watch recorded of it.

It ends well if the training keeps its bits and the call is recorded and right, or refused with a reason. Right is what
the capture's form makes of q, k and v in FP64, as PyTorch's autograd makes it in FP64 of the call as it was drawn; and
that a diagnosis of the capture finds nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashpoint
from flashpoint.cli.run_words import open_run
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.form import CLOSED, Form
from flashpoint.diagnosis.verdict import diagnose
from flashpoint.errors import UserError
from flashpoint.watching.captures import read_calls
from tests.fuzz.drawn_calls import Case

FAULTS = ("traceback", "changed bits", "silent", "told of failing", "other tensors", "other form", "false finding")
_FUNCTIONS = {"named": [f"{__name__}:by_head"], "named@bthd": [f"{__name__}:by_token@bthd"]}
_ROUNDINGS = {"coarse_rounding", "rounded_denominator"}
"""Findings that are so where a function rounds scores and weights."""
_FAR = 1e-7
"""Relative, of FP64 against FP64; biases that a call has two of are added in FP32."""


@dataclass(frozen=True)
class Ending:
    """How a call ended.

    Attributes:
        kind: "recorded", "refused", or one of :data:`FAULTS`.
        why: the reason of a refusal, without its numbers, or what is wrong.
    """

    kind: str
    why: str = ""


@dataclass
class _Seen:
    """What a training showed."""

    loss: Tensor
    gradients: list[Tensor | None]
    generator: Tensor
    tensors: dict[str, Tensor]
    before: Tensor
    """The state of the generator before the call."""

    def same(self, other: _Seen) -> bool:
        """Whether all bits are the same."""
        mine, others = ([one.loss, one.generator, *one.gradients] for one in (self, other))
        return all(
            a is b if a is None or b is None else torch.equal(_bits(a), _bits(b))
            for a, b in zip(mine, others, strict=True)
        )


def ending(case: Case, folder: Path) -> Ending:
    """Train a step alone and watched, and judge."""
    try:
        alone = _trained(case, None)
    except RuntimeError as error:  # PyTorch's attention does not take each form that it documents
        return Ending("not taken", _without_numbers(str(error)))
    return _ending_of_watched(case, folder, alone)


def _ending_of_watched(case: Case, folder: Path, alone: _Seen) -> Ending:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            watched = _trained(case, folder)
    except Exception:
        return Ending("traceback", traceback.format_exc())
    if not alone.same(watched):
        return Ending("changed bits")
    if "failed" in told.getvalue() or "Traceback" in told.getvalue():
        return Ending("told of failing", told.getvalue())
    run = open_run("own", folder)
    reasons = run.manifest.not_recorded
    if reasons:
        return Ending("refused", "; ".join(map(_without_numbers, reasons)))
    try:
        (call,) = read_calls(folder / "own")
    except UserError as error:
        return Ending("silent", str(error))
    return _judged(case, call, alone)


def directly(case: Case) -> Ending:
    """Diagnose a call as it was drawn: no watch reads its form, and none leaves it out."""
    if case.odd:
        return Ending("refused", "no such call in a capture")
    try:
        alone = _trained(case, None)
    except RuntimeError as error:
        return Ending("not taken", _without_numbers(str(error)))
    kept = _kept(case, alone) if case.draws else None
    form = Form(False, case.scale, case.softcap, case.added, None, case.sink, case.draws, kept)
    tensors: dict[str, Any] = {name: x for name, x in alone.tensors.items() if name != "kept"}
    return _diagnosed(case, AttentionCall(**tensors, form=form, layer=1, step=0, attention=case.way))


def _judged(case: Case, call: AttentionCall, alone: _Seen) -> Ending:
    if case.odd == "3-D":  # of [T, H, d] what is recorded is one sequence
        case = dataclasses.replace(case, sequences=1, added=case.added[:1])
        alone = dataclasses.replace(alone, tensors={name: x[None] for name, x in alone.tensors.items()})
    for name, x in alone.tensors.items():
        if name == "kept":
            continue
        found = getattr(call, name)
        if found is None or not torch.equal(_bits(found), _bits(x)):
            return Ending("other tensors", name)
    if not alone.tensors["out"].isfinite().all():
        kinds = {one.kind for one in diagnose(call).findings}
        return (
            Ending("recorded", "O is not finite") if kinds == {"nonfinite"} else Ending("other form", f"NaN: {kinds}")
        )
    expected = by_autograd(case, alone, call.form)
    for n in range(case.sequences):
        true = exact(call, n)
        for name, x in expected.items():
            found = getattr(true, name)
            wanted, size = x[n], float(x.norm()) + _natural(case, alone, name)
            if found.shape != wanted.shape:
                found = found.unflatten(0, (len(wanted), -1)).sum(1)
            error = float((found - wanted).norm()) / size
            if not error <= _FAR:
                return Ending("other form", f"{name} of sequence {n} errs by {error:.1e}; {call.form.described}")
    return _diagnosed(case, call)


def _diagnosed(case: Case, call: AttentionCall) -> Ending:
    found = diagnose(call).findings
    if case.rounded and found and {one.kind for one in found} <= _ROUNDINGS:
        return Ending("recorded", "its roundings are named")
    if found:
        return Ending("false finding", "; ".join(f"{one.kind}: {one.text}" for one in found))
    return Ending("recorded")


def by_autograd(case: Case, alone: _Seen, form: Form) -> dict[str, Tensor]:
    """Return O and gradients by PyTorch's autograd in FP64, of the call as it was drawn.

    A row all of whose keys are closed by finite numbers has weights. O shows them, and may show a form that closes
    less. Where the form that was recorded has no weights there, neither has this.
    """
    q, k, v = (alone.tensors[name].double().requires_grad_() for name in "qkv")
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhqd,nhkd->nhqk", q, keys) * case.scale
    if case.softcap:
        scores = (scores / case.softcap).tanh() * case.softcap
    added = case.added.expand(scores.shape)
    empty = (added <= CLOSED).all(-1, keepdim=True)
    closed = form.empty_rows(tuple(scores.shape), scores.device)
    empty &= (added == -math.inf).all(-1, keepdim=True) | (False if closed is None else closed[..., None])
    scores = torch.where(empty, 0.0, scores + added)
    if case.sink is not None:
        sinks = case.sink.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.where(empty, 0.0, scores.softmax(-1)[..., : keys.shape[2]])
    if case.draws:
        weights = weights * _kept(case, alone) / (1 - case.draws)
    out = torch.einsum("nhqk,nhkv->nhqv", weights, values)
    grads = torch.autograd.grad(out, (q, k, v), alone.tensors["grad_out"].double())
    return dict(zip(("out", "grad_q", "grad_k", "grad_v"), (out.detach(), *grads), strict=True))


def _kept(case: Case, alone: _Seen) -> Tensor:
    """Return which weights dropout kept: of PyTorch's attention, those that it keeps of equal ones."""
    if case.way != "sdpa":
        return alone.tensors["kept"]
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(alone.before)
        nothing = torch.zeros(*case.shape[:2], max(case.queries, case.keys), case.keys, dtype=case.dtype)
        eye = torch.eye(case.keys, dtype=case.dtype).expand(*case.shape[:2], -1, -1)
        equal = F.scaled_dot_product_attention(
            nothing[:, :, : case.queries], nothing[:, :, : case.keys], eye, dropout_p=case.draws
        )
        return equal != 0


def _natural(case: Case, alone: _Seen, name: str) -> float:
    """Return 1e-3 of the size that O or a gradient would have if nothing cancelled: rounding is of this size."""
    norms = {of: float(x.double().norm()) for of, x in alone.tensors.items()}
    if name == "out":
        return 1e-3 * norms["v"]
    if name == "grad_v":
        return 1e-3 * norms["grad_out"]
    return 1e-3 * case.scale * norms["grad_out"] * norms["v"] * norms["k" if name == "grad_q" else "q"]


def by_head(q: Tensor, k: Tensor, v: Tensor, **_told: Any) -> Tensor:
    """Stands in for a user's attention of [B, H, T, d]: it does what the case says."""
    case = Model.case
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    dtype = q.dtype if case.rounded else torch.float32
    q, k, v = (x.to(dtype) for x in (q, k, v))
    scores = q @ k.mT * case.scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores + case.added.to(dtype)[(0,) * (4 - q.dim())]
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0).float()
    if case.sink is not None:
        scores = torch.cat((scores, case.sink.float()[:, None, None].expand_as(scores[..., :1])), -1)
    weights = scores.softmax(-1)[..., : k.shape[-2]].masked_fill(empty, 0.0).to(dtype)
    dropped = F.dropout(weights, case.draws)
    Model.kept = (dropped != 0) | (weights == 0)
    return (dropped @ v).to(case.dtype)


def by_token(q: Tensor, k: Tensor, v: Tensor, **told: Any) -> Tensor:
    """Stands in for a user's attention of [B, T, H, d]."""
    return _by_head(*(x.transpose(-2, -3) for x in (q, k, v)), **told).transpose(-2, -3)


_by_head = by_head
"""By a name that nobody intercepts."""


def through_interface(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **told: Any
) -> tuple[Tensor, None]:
    """Stands in for an attention of Transformers."""
    return _by_head(query, key, value, **told).transpose(-2, -3).contiguous(), None


@functools.cache
def interfaces() -> Any:
    """Transformers' attentions, with one more: it takes a second to import, and few calls go through it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("fuzzed", through_interface)
    return ALL_ATTENTION_FUNCTIONS


class Model(nn.Module):
    """One attention, which is given what a case says."""

    case: Case
    kept: Tensor

    def __init__(self, case: Case) -> None:
        super().__init__()
        type(self).case = case
        if case.way == "interface":
            interfaces()  # before a watch begins
        torch.manual_seed(case.number)
        widths = (case.heads * case.size, case.heads_kv * case.size, case.heads_kv * case.values)
        self.q, self.k, self.v = (nn.Linear(8, width, dtype=case.dtype) for width in widths)
        self.gain = nn.Parameter(torch.ones((), dtype=case.dtype))
        self.seen: dict[str, Tensor] = {}
        self.before = torch.get_rng_state()

    def forward(self, x: Tensor) -> Tensor:
        case = self.case
        q, k, v = self.q(x[:, : case.queries]) * case.factor, self.k(x[:, : case.keys]), self.v(x[:, : case.keys])
        if case.layout == "packed" and case.queries == case.keys:
            q, k, v = torch.cat((q, k, v), -1).split([q.shape[-1], k.shape[-1], v.shape[-1]], -1)
        given = {}
        for name, y in (("q", q), ("k", k), ("v", v)):
            z = y.unflatten(-1, (case.heads if name == "q" else case.heads_kv, -1)).transpose(1, 2)
            if case.layout == "by head":
                z = z.contiguous()
            elif case.layout == "strided":
                z = z.repeat_interleave(2, -1)[..., ::2]
            if case.odd == "3-D":
                z = z[0]
            elif case.odd == "one sequence of keys" and name != "q":
                z = z[:1]
            given[name] = z.detach() if case.odd in ("frozen", f"frozen {name}") else z
        self.seen = dict(given)
        self.before = torch.get_rng_state()
        with torch.set_grad_enabled(case.odd != "no gradients"):
            out = self.attended(*given.values())
        self.seen["out"] = out
        return out * self.gain

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return O [B, H, T_q, d_v]."""
        options = dict(self.case.options)
        if self.case.way == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, **options)
        if self.case.way == "interface":
            function = interfaces().get_interface("fuzzed", through_interface)
            out: Tensor = function(self, q, k, v, options.pop("attention_mask"), **options)[0]
            return out.transpose(-2, -3)
        if self.case.way == "named":
            return by_head(q, k, v, **options)
        return by_token(*(x.transpose(-2, -3) for x in (q, k, v)), **options).transpose(-2, -3)


def _trained(case: Case, folder: Path | None) -> _Seen:
    """Train a step, watched if there is a folder for it."""
    model = Model(case)
    x = torch.randn(case.sequences, max(case.queries, case.keys), 8).to(case.dtype)
    if folder is None:
        seen = _stepped(case, model, x, read=True)
        _stepped(case, model, x, read=False)
        return seen
    with flashpoint.watch(
        model,
        runs_dir=folder,
        name="own",
        interval=1,
        weights_interval=1,
        log_interval=2,
        functions=_FUNCTIONS.get(case.way, ()),
    ) as watched:
        watched.capture(sequences=0)
        seen = _stepped(case, model, x, read=False)
        watched.step(seen.loss, x)
        watched.step(_stepped(case, model, x, read=False).loss, x)  # which is when a refusal is told
    return seen


def _stepped(case: Case, model: Model, x: Tensor, *, read: bool) -> _Seen:
    out = model(x)
    wanted = torch.randn(out.shape, generator=torch.Generator().manual_seed(case.number)).to(case.dtype)
    if case.quiet and wanted.dim() == 4:
        closed = case.lone if case.sink is None else torch.zeros(case.shape[:3], dtype=torch.bool)
        wanted = wanted.masked_fill(closed[..., None], 0.0)
    loss = (out.float() * wanted.float()).sum()
    handed = dict(model.seen)
    needed = {name: y for name, y in handed.items() if y.requires_grad}
    out_has_graph = handed["out"].requires_grad
    found = torch.autograd.grad(loss, list(needed.values()), retain_graph=True) if read and out_has_graph else ()
    tensors = {name: y.detach().clone() for name, y in handed.items()}
    tensors |= {f"grad_{name}": y for name, y in zip(needed, found, strict=False)}
    if case.draws and case.way != "sdpa":
        tensors["kept"] = model.kept.clone()
    loss.backward()
    gradients = [one.grad for one in model.parameters()]
    return _Seen(loss.detach(), gradients, torch.get_rng_state(), tensors, model.before)


def _bits(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, 1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _without_numbers(reason: str) -> str:
    """Return a reason without the function's name, shapes and numbers."""
    told = re.sub(r"^\S+?attention: |^fuzzed: |^\S+:by_\w+: ", "", reason)
    return re.sub(r"\d[\d,.e+-]*", "#", re.sub(r"\[[\d, ]*\]", "[…]", told))
