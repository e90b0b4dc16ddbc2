"""The two emulated attentions to the bit, against loops over scalars that ml_dtypes and NumPy round."""

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

from flashpoint.lab.deviation.arithmetic import arithmetic
from flashpoint.lab.deviation.emulated import Block, Inputs, baseline, flash
from flashpoint.lab.deviation.formats import format_named

T, D, ROWS, KEYS = 7, 3, 2, 3
Round = Callable[[float], float]
Matrix = list[list[float]]


def rounding(kind: type) -> Round:
    return lambda x: float(np.float64(x).astype(kind))


OF = {"bf16": rounding(ml_dtypes.bfloat16), "fp16": rounding(np.float16), "fp32": rounding(np.float32)}


class Loops:
    """One head, one scalar at a time. ``r`` rounds to the precision, ``s`` in sums, ``keep`` what lasts."""

    def __init__(self, inputs: Inputs, causal: bool, r: Round, s: Round, keep: Round) -> None:
        self.q, self.k, self.v, self.g = (x[0, 0].tolist() for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out))
        self.causal, self.r, self.s, self.keep = causal, r, s, keep
        self.alpha = r(D**-0.5)
        self.S = [[r(self.alpha * r(self.dot(q, k))) for k in self.k] for q in self.q]

    def dot(self, a: list[float], b: list[float]) -> float:
        total = 0.0
        for x, y in zip(a, b, strict=True):
            total = self.s(total + x * y)
        return total

    def exp(self, x: float) -> float:
        return self.r(math.exp(self.r(x)))

    def seen(self, i: int) -> int:
        return i + 1 if self.causal else T

    def column(self, matrix: Matrix, f: int, keys: range = range(T)) -> list[float]:
        return [matrix[j][f] for j in keys]

    def baseline(self) -> dict[str, object]:
        r, keep = self.r, self.keep
        P, L, delta, dS = np.zeros((T, T)), [], [], np.zeros((T, T))
        for i in range(T):
            n = self.seen(i)
            m = max(self.S[i][:n])
            unnormalized = [self.exp(score - m) for score in self.S[i][:n]]
            mass = keep(self.dot(unnormalized, [1.0] * n))
            P[i, :n] = [r(p / mass) for p in unnormalized]
            L.append(keep(m + keep(math.log(mass))))
            dP = [r(self.dot(self.g[i], v)) for v in self.v]
            delta.append(keep(self.dot(P[i].tolist(), dP)))
            dS[i] = [r(p * r(x - delta[i])) for p, x in zip(P[i], dP, strict=True)]

        def product(a: np.ndarray, b: Matrix, factor: float = 1.0) -> Matrix:
            return [[r(factor * r(self.dot(row.tolist(), self.column(b, f)))) for f in range(D)] for row in a]

        return {
            "O": product(P, self.v), "L": L, "δ": delta, "dV": product(P.T, self.g),
            "dQ": product(dS, self.k, self.alpha), "dK": product(dS.T, self.q, self.alpha),
        }  # fmt: skip

    def flash(self) -> dict[str, object]:
        r, keep = self.r, self.keep
        outs, L = np.zeros((T, D)), []
        for i in range(T):
            m, mass, out = -math.inf, 0.0, [0.0] * D
            for start in range(0, T, KEYS):
                keys = range(start, min(start + KEYS, T))
                hidden = [j >= self.seen(i) for j in keys]
                if all(hidden):
                    continue
                new = max([m, *(self.S[i][j] for j in keys if j < self.seen(i))])
                p = [0.0 if hide else self.exp(self.S[i][j] - new) for j, hide in zip(keys, hidden, strict=True)]
                added = [keep(self.dot(p, self.column(self.v, f, keys))) for f in range(D)]
                of_block = keep(self.dot(p, [1.0] * len(keys)))
                if start:
                    factor = self.exp(m - new)
                    mass = keep(keep(mass * factor) + of_block)
                    out = [keep(keep(x * factor) + y) for x, y in zip(out, added, strict=True)]
                else:
                    mass, out = of_block, added
                m = new
            outs[i] = [r(x / mass) for x in out]
            L.append(keep(m + keep(math.log(mass))))
        delta = [keep(self.dot(self.g[i], outs[i].tolist())) for i in range(T)]
        dQ, dK, dV = (np.zeros((T, D)) for _ in range(3))
        for top in range(0, T, ROWS):
            rows = range(top, min(top + ROWS, T))
            for start in range(0, rows.stop if self.causal else T, KEYS):
                keys = range(start, min(start + KEYS, rows.stop if self.causal else T))
                P = {(i, j): self.exp(self.S[i][j] - L[i]) if j < self.seen(i) else 0.0 for i in rows for j in keys}
                dS = {(i, j): r(p * r(r(self.dot(self.g[i], self.v[j])) - delta[i])) for (i, j), p in P.items()}
                for f in range(D):
                    for i in rows:
                        dQ[i, f] = keep(
                            dQ[i, f] + keep(self.dot([dS[i, j] for j in keys], self.column(self.k, f, keys)))
                        )
                    for j in keys:
                        dK[j, f] = keep(
                            dK[j, f] + keep(self.dot([dS[i, j] for i in rows], self.column(self.q, f, rows)))
                        )
                        dV[j, f] = keep(
                            dV[j, f] + keep(self.dot([P[i, j] for i in rows], self.column(self.g, f, rows)))
                        )
        scaled = [[[r(self.alpha * r(x)) for x in row] for row in matrix.tolist()] for matrix in (dQ, dK)]
        dv = [[r(x) for x in row] for row in dV.tolist()]
        return {"O": outs.tolist(), "L": L, "δ": delta, "dQ": scaled[0], "dK": scaled[1], "dV": dv}


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("accumulate", ["fp32", "same", "within"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_both_attentions_equal_loops_over_scalars(precision: str, accumulate: str, causal: bool) -> None:
    compute = arithmetic(format_named(precision), accumulate)
    generator = torch.Generator().manual_seed(3)
    tensors = (torch.randn(1, 1, T, D, generator=generator, dtype=torch.float64) for _ in range(4))
    inputs = Inputs(*(compute.round(x) for x in tensors))
    low, fp32 = OF[precision], OF["fp32"]
    sums, lasting = {"fp32": (fp32, fp32), "same": (low, low), "within": (fp32, low)}[accumulate]
    loops = Loops(inputs, causal, low, sums, lasting)
    for found, expected in (
        (baseline(inputs, compute, causal=causal, backward=True), loops.baseline()),
        (flash(inputs, compute, Block(ROWS, KEYS), causal=causal, backward=True), loops.flash()),
    ):
        for name, value in expected.items():
            assert found.values[name][0, 0].tolist() == value, name
