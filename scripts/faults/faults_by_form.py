"""How far attentions of each form are from FP64, and how many planted faults a diagnosis names in them.

    python scripts/faults/faults_by_form.py            # 3 seeds of each fault in each form
    python scripts/faults/faults_by_form.py --seeds 1  # a quick look

Each form (soft cap, biases, masks, sinks, dropout, cross-attention) has one call of 6 random sequences a trial: BF16, 4
heads of 32 features that share 2 of keys, T 96. The fault is in one head and one block that a seed draws. Diagnosed is
what the call recorded: a fault of weights, of L or of one row counts as named where rows or gradients of that head are
said to be off. FP16's overflow is planted where no soft cap hides it. Chance intervals are 95 % (Wilson).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch
from scipy.stats import binomtest
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from flashpoint.cli.table import Table, show
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.faults import BY_TENSORS, KINDS, Fault, faulty_attention
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.measure_table import GRAD_K, GRAD_Q, GRAD_V, OUT_ERROR
from flashpoint.diagnosis.measures import over_sequences
from flashpoint.diagnosis.verdict import diagnose
from tests.diagnosis.forms import FORMS, call_in, written_out

_ERRORS = (OUT_ERROR, GRAD_Q.error, GRAD_K.error, GRAD_V.error)
_FACTOR, _OVERFLOWING = 2.0, 5e3
"""Of q: scores of some nats, and QKᵀ that reaches beyond FP16's 65,504."""


def recorded(call: AttentionCall, attention: Callable[[Tensor, Tensor, Tensor, Form], Tensor]) -> AttentionCall:
    """Return the call with the results of an attention."""
    q, k, v = (x.clone().requires_grad_() for x in (call.q, call.k, call.v))
    out = attention(q, k, v, call.form)
    grad_q, grad_k, grad_v = torch.autograd.grad(out, (q, k, v), call.grad_out)
    return dataclasses.replace(call, out=out.detach(), grad_q=grad_q, grad_k=grad_k, grad_v=grad_v)


def planted(fault: Fault) -> Callable[[Tensor, Tensor, Tensor, Form], Tensor]:
    """Return the attention with a fault, which takes a form."""
    attention = faulty_attention(fault)
    return lambda q, k, v, form: attention(q, k, v, form=form)


def by_definition(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
    """Return O of the definition in FP32, rounded to the inputs' dtype."""
    return written_out(q.float(), k.float(), v.float(), form).to(q.dtype)


def trial(name: str, kind: str, seed: int) -> bool:
    """Return whether a fault was named right."""
    draw = torch.Generator().manual_seed(1000 * seed + KINDS.index(kind))
    head, block = (int(torch.randint(n, (), generator=draw)) for n in (4, 3))
    call = call_in(name, seed, _OVERFLOWING if kind == "fp16_overflow" else _FACTOR)
    block = max(1, block) if call.q.shape[2] == 96 else 1
    found = diagnose(recorded(call, planted(Fault(kind, head=head, block=block, seed=seed)))).findings
    if kind == "none":
        return not found
    return {head for one in found for head in one.heads} == {head + 1} and all(
        one.kind in BY_TENSORS[kind] for one in found
    )


def errors(name: str, seed: int) -> list[object]:
    """Return the errors of an attention of the form that rounds as FlashAttention does, then of FP32's, worst head."""
    cells: list[object] = []
    for attention in (planted(Fault("none")), by_definition):
        measures = over_sequences(diagnose(recorded(call_in(name, seed, _FACTOR), attention)).measures)
        cells += [f"{float(measures[one.name].nan_to_num(0.0).max()):.1e}" for one in _ERRORS]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="trials of each kind in each form")
    parser.add_argument("--first", type=int, default=100, help="seed of the first")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    named, far = _named(seeds), [[name, *errors(name, seeds[0])] for name in FORMS]
    what = ("O", "dQ", "dK", "dV")
    columns = ("form", *(f"{error}, {how}" for how in ("FlashAttention's roundings", "FP32") for error in what))
    told = f"CPU, torch {torch.__version__}; seeds from {arguments.first} on. {date.today()}."
    show(Table(columns, far, f"Relative errors against FP64, of the worst head. {told}"), "markdown")
    show(named, "markdown")


def _named(seeds: Sequence[int]) -> Table:
    rows: list[list[object]] = []
    right, count = 0, 0
    for name, form in FORMS.items():
        cells: list[object] = [name]
        for kind in KINDS:
            if kind == "fp16_overflow" and form.softcap:
                cells.append("")
                continue
            of_kind = sum(trial(name, kind, seed) for seed in seeds)
            cells.append(f"{of_kind} of {len(seeds)}")
            if kind != "none":
                right, count = right + of_kind, count + len(seeds)
        rows.append(cells)
    interval = binomtest(right, count).proportion_ci(method="wilson")
    note = f"Named: {right} of {count} faults ({100 * interval.low:.0f} to {100 * interval.high:.0f} %). "
    note += 'Under "none" is how many calls without a fault had no finding.'
    return Table(("form", *KINDS), rows, note)


if __name__ == "__main__":
    main()
