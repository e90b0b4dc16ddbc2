"""``read_metrics`` reads blocks of lines at once, and finds in them what a reader by line finds, damage as well."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint import files
from flashpoint.errors import UserError
from flashpoint.runs.metric_table import OF_THE_RUN
from flashpoint.runs.metrics import read_metrics

Lines = list[bytes]
Found = dict[str, tuple[list[int], list[Any]]]


def by_line(lines: Lines) -> Found | int:
    """Return steps and values of each metric; of a damaged file the number of the first line that is."""
    found: Found = {}
    for number, line in enumerate(lines, 1):
        try:
            metrics = json.loads(line)
            step = metrics.pop("step")
            assert type(step) is int
            assert 0 <= step < 2**63
            for name, value in renamed(metrics).items():
                numbers = plain(value)
                before = found.setdefault(name, ([], []))
                assert not (isinstance(numbers, list) and name in OF_THE_RUN)
                if before[0]:
                    assert np.shape(numbers) == np.shape(before[1][-1])
                    assert step >= before[0][-1]
                before[0].append(step)
                before[1].append(numbers)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, OverflowError, RecursionError):
            return number
    return found


def renamed(metrics: dict[str, Any]) -> dict[str, Any]:
    heads: dict[str, dict[tuple[int, int], Any]] = {}
    for name in [name for name in metrics if re.fullmatch("layer/[^/]*/head/[^/]*/[^/]*", name)]:
        _, layer, _, head, own = name.split("/")
        heads.setdefault(own, {})[int(layer), int(head)] = metrics.pop(name)
    for name, values in heads.items():
        layers, count = (range(1, max(numbers) + 1) for numbers in zip(*values, strict=True))
        assert set(values) == {(layer, head) for layer in layers for head in count}
        metrics[name] = [[values[layer, head] for head in count] for layer in layers]
    return metrics


def plain(value: Any) -> Any:
    if isinstance(value, list):
        assert value
        assert value[0]
        assert len({len(layer) for layer in value}) == 1
        assert all(type(layer) is list for layer in value)
        return [[plain_number(number) for number in layer] for layer in value]
    return plain_number(value)


def plain_number(value: Any) -> float:
    assert type(value) in (int, float) or value in ("nan", "inf", "-inf")
    return float(value)


NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, -0.0, 3, "nan", "inf", "-inf", 5e-324, 2**70]),
)
HEADS = st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=2, max_size=2)
METRICS = st.fixed_dictionaries(
    {"loss": NUMBERS},
    optional={
        "val_loss": NUMBERS,
        "w_q_spectral_norm": HEADS,
        "a name": NUMBERS,
        "weights_largest/all": NUMBERS,
        "layer/1/head/1/old": NUMBERS,
    },
)
WRONG = st.sampled_from(
    [
        b"", b" ", b"{}", b"3", b"null", b"[", b"]}", b'{"step": 9', b"\xff\xfe", b"\xef\xbb\xbf",
        b'{"step": 9, "b": {}}',
        b'{"step": 9, "b": [[1.0]', b'{"step": 9, "b": [[NaN, 1]]}', b'{"step": true, "loss": 1}', b'{"loss": 1}',
        b'{"step": 9}, {"step": 9}', b'{"step": 9, "loss": Infinity}', b' {"step": 9, "loss": 1.0} ',
        b'{"step": 9, "loss": 1.0}\r', b'{"step": 9, "loss": "1.0"}', b'{"step": 9, "loss": [[1.0]]}',
        b'{"step": 9, "loss": false}', b'{"step": 9, "a": "x', b'y"}', b'{"step": 9, "loss": 1' + b"0" * 400 + b"}",
        b'{"step": 9, "w_q_spectral_norm": [[1, 2, 3], [4, 5]]}', b'{"step": 9, "w_q_spectral_norm": [[], []]}',
        b'{"step": 9, "w_q_spectral_norm": [1, 2]}', b'{"step": 9, "\xc3\xa9\\ud800": 1}', b'{"step": 9, "loss": 01}',
        b'{"step": 9, "a name": [[1]]}', b'{"step": 9223372036854775808, "loss": 1}',
        b'{"step": 0, "loss": 1, "loss": 2}',
    ]
)  # fmt: skip


@st.composite
def whole(draw: st.DrawFn) -> Lines:
    """Lines as a run writes them, with steps that rise."""
    drawn = draw(st.lists(METRICS, max_size=12))
    return [json.dumps({"step": 2 * index, **metrics}).encode() for index, metrics in enumerate(drawn)]


@st.composite
def damaged(draw: st.DrawFn) -> Lines:
    """Some of whose lines are other ones, cut, in another order, or with other bytes."""
    lines = draw(whole())
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(lines)))
        match draw(st.sampled_from(["more", "cut", "byte", "swap"])):
            case "more":
                lines.insert(at, draw(WRONG))
            case "cut" if at < len(lines):
                here = draw(st.integers(0, len(lines[at])))
                lines[at : at + 1] = [lines[at][:here], lines[at][here:]]
            case "byte" if at < len(lines):
                here = draw(st.integers(0, len(lines[at])))
                byte = draw(st.sampled_from([*(bytes([one]) for one in b'{}[],"\\0N\0\xe9'), b""]))
                lines[at] = lines[at][:here] + byte + lines[at][here + 1 :]
            case "swap" if at < len(lines):
                lines.append(lines.pop(at))
    return lines


def agree(path: Path, lines: Lines, chunk: int) -> None:
    path.write_bytes(b"".join(line + b"\n" for line in lines) + b'{"step": 1')
    expected = by_line(lines)
    with mock.patch.object(files, "_CHUNK", chunk):
        if isinstance(expected, int):
            with pytest.raises(UserError) as raised:
                read_metrics(path)
            assert str(raised.value).startswith(f"{path}:{expected}: damaged line (")
            return
        columns = read_metrics(path)
    assert list(columns) == list(expected)
    for name, (steps, values) in columns.items():
        assert (steps.dtype, values.dtype) == (np.int64, np.float64)
        assert steps.tolist() == expected[name][0]
        np.testing.assert_array_equal(np.moveaxis(values, -1, 0), np.array(expected[name][1]))
        assert np.array_equal(np.signbit(np.moveaxis(values, -1, 0)), np.signbit(np.array(expected[name][1])))


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [whole, damaged])
@pytest.mark.parametrize("examples", [80, pytest.param(5000, marks=pytest.mark.exhaustive)])
def test_blocks_are_read_as_lines_are(tmp_path: Path, drawn: Callable[[], st.SearchStrategy], examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(drawn(), st.sampled_from([1, 40, 300, 2**20]))
    def check(lines: Lines, chunk: int) -> None:
        agree(tmp_path / "metrics.jsonl", lines, chunk)

    check()


def test_lines_that_make_an_object_together_are_damaged_each(tmp_path: Path) -> None:
    """Joined by commas they would be two objects, as many as the lines are."""
    first, second = b'{"step": 1, "a": [[1.0]', b'[2.0]]}, {"step": 2, "loss": 1.0}'
    for lines in ([first, second], [b'{"step": 1, "a": [{"b": 1}', b'{"c": 2}]}', b'{"step": 3}, {"step": 4}']):
        agree(tmp_path / "metrics.jsonl", lines, 2**20)


def test_metrics_that_are_logged_together_share_their_steps(tmp_path: Path) -> None:
    """Of a run of a million steps they would take as much memory as the values."""
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": 1.0, "lr": 1.0}}\n' for n in range(50)))
    with mock.patch.object(files, "_CHUNK", 100):
        columns = read_metrics(tmp_path / "metrics.jsonl")
    assert columns["loss"][0] is columns["lr"][0]
    assert columns["loss"][0].tolist() == list(range(50))
