"""The golden value and the reference at FP64 against mpmath with 40 digits, forward and backward, on small cases."""

import mpmath
import pytest
from torch import Tensor

from flashpoint.lab.deviation.arithmetic import EXACT
from flashpoint.lab.deviation.drawn_inputs import DRAWN, drawn
from flashpoint.lab.deviation.emulated import Block, Inputs, baseline, flash

LENGTH, SIZE = 7, 4
Matrix = list[list[mpmath.mpf]]


def rows_of(x: Tensor) -> Matrix:
    return [[mpmath.mpf(value) for value in row] for row in x[0, 0].tolist()]


def product(a: Matrix, b: Matrix) -> Matrix:
    return [
        [mpmath.fsum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a
    ]


def transposed(a: Matrix) -> Matrix:
    return [list(column) for column in zip(*a, strict=True)]


def by_mpmath(inputs: Inputs, causal: bool) -> dict[str, Matrix]:
    """From the definition of softmax attention; dS from the row sum of P∘dP."""
    q, k, v, grad_out = map(rows_of, (inputs.q, inputs.k, inputs.v, inputs.grad_out))
    alpha = 1 / mpmath.sqrt(SIZE)
    scores = product(q, transposed(k))
    weights = [
        [mpmath.exp(alpha * s) if j <= i or not causal else mpmath.mpf(0) for j, s in enumerate(row)]
        for i, row in enumerate(scores)
    ]
    sums = [mpmath.fsum(row) for row in weights]
    p = [[w / total for w in row] for row, total in zip(weights, sums, strict=True)]
    grad_p = product(grad_out, transposed(v))
    delta = [mpmath.fsum(x * y for x, y in zip(a, b, strict=True)) for a, b in zip(p, grad_p, strict=True)]
    grad_s = [[x * (y - d) for x, y in zip(a, b, strict=True)] for a, b, d in zip(p, grad_p, delta, strict=True)]
    scaled = [[alpha * x for x in row] for row in grad_s]
    return {
        "O": product(p, v),
        "L": [[mpmath.log(total)] for total in sums],
        "δ": [[d] for d in delta],
        "dQ": product(scaled, k),
        "dK": product(transposed(scaled), q),
        "dV": product(transposed(p), grad_out),
    }


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", DRAWN)
def test_fp64_is_within_a_few_ulps_of_forty_digits(kind: str, causal: bool) -> None:
    with mpmath.workdps(40):
        inputs = drawn(kind, 1, LENGTH, SIZE)
        expected = by_mpmath(inputs, causal)
        for found in (
            baseline(inputs, EXACT, causal=causal, backward=True),
            flash(inputs, EXACT, Block(2, 3), causal=causal, backward=True),
        ):
            for name, rows in expected.items():
                values = found.values[name][0, 0].reshape(LENGTH, -1).tolist()
                largest = max(abs(x) for row in rows for x in row)
                for own, row in zip(values, rows, strict=True):
                    for x, y in zip(own, row, strict=True):
                        assert abs(mpmath.mpf(x) - y) <= 16 * 2**-53 * max(largest, 1), name
