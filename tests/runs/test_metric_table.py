"""The vocabulary of metrics is what runs write."""

from pathlib import Path

import pytest

from flashpoint.cli.run_words import open_run
from flashpoint.diagnosis.measure_table import MEASURES
from flashpoint.lab.probes.runner import BUILT_IN
from flashpoint.runs.metric_table import GRAD_Q_ALONG_MEAN_KEY, MAX_LOGIT, MEMORY, METRICS, WEIGHTS_LARGEST
from tests.conftest import Command
from tests.verdicts import outcome_of

OF_OTHERS = (MEMORY, GRAD_Q_ALONG_MEAN_KEY, MAX_LOGIT)
"""A GPU has the first; the others are of a watch."""


@pytest.mark.slow
def test_a_run_with_all_probes_writes_what_the_table_has(train: Command, tmp_path: Path) -> None:
    outcome_of(
        train("checkpoints.weights_interval=10", "run_name=twin", "attn=standard", "probes.attention_interval=0")
    )
    probes = f"probes.attention=[{','.join(BUILT_IN)}]"
    outcome_of(train("attn=flash_bf16", probes, "probes.weights_against=twin", "run_name=all"))
    written = open_run("all", tmp_path / "runs").columns
    expected = {name: metric for name, metric in METRICS.items() if metric not in OF_OTHERS}
    assert {name.partition("/")[0] for name in written} == set(expected)
    axes = {"head": 3, "run": 1, "tensor": 1}
    for name, (_, values) in written.items():
        assert values.ndim == axes[METRICS[name.partition("/")[0]].per], name
    assert f"{WEIGHTS_LARGEST.name}/all" in written


def test_a_metric_has_one_row_with_what_readers_need() -> None:
    for name, row in {**METRICS, **MEASURES}.items():
        assert row.name == name
        assert row.label, name
        assert row.sentence.endswith("."), name
        assert row.sentence.count(". ") == 0, f"{name}: one sentence"
    assert not [measure for measure in MEASURES.values() if measure.logged_as not in (None, *METRICS.values())]
