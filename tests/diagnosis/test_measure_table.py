"""The vocabulary of measures is what a diagnosis computes."""

import dataclasses

import torch

from flashpoint.diagnosis.measure_table import MEASURES, SOURCES
from flashpoint.diagnosis.measures import Results, over_sequences
from flashpoint.diagnosis.probe import probe
from flashpoint.diagnosis.verdict import measured
from tests.diagnosis.calls import CLEAN, by_position, call_of, inputs


def test_a_diagnosis_computes_what_the_table_has() -> None:
    function = by_position(CLEAN["sdpa"])
    call = call_of(function, [x.half() for x in inputs(0, sequences=2)])  # of FP16 gradients have measures of their own
    call = dataclasses.replace(call, form=dataclasses.replace(call.form, softcap=50.0))  # and of a soft cap
    found = measured(call, Results.kept(call), probe(function, call))
    assert set(found) == set(MEASURES)
    assert set(over_sequences(found)) == set(MEASURES)


def test_sequences_pool_as_the_table_says() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, torch.nan], [8.0, 4.0]], dtype=torch.float64)
    errors = {name for source in SOURCES for name in source.names}
    expected = {"mean": [4.0, torch.nan], "mean where known": [4.0, 3.0], "largest": [8.0, torch.nan]}
    for name, measure in MEASURES.items():
        if name not in errors:
            wanted = torch.tensor(expected[measure.pooled], dtype=torch.float64)
            torch.testing.assert_close(over_sequences({name: values})[name], wanted, equal_nan=True)
