"""Attentions of models of Transformers that are more than causal: each is recorded, and nothing is found in it."""

from pathlib import Path
from typing import Any

import pytest

from flashpoint.diagnosis.verdict import diagnose
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from tests.watching.loops import loop
from tests.watching.models import MODELS, ONLY_EAGER, built

pytest.importorskip("transformers")

CASES = [(name, way) for name in MODELS for way in ("eager", "sdpa") if way == "eager" or name not in ONLY_EAGER]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), CASES)
def test_each_attention_is_recorded_and_nothing_is_found_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, way: str
) -> None:
    _, _, batch, told = MODELS[name]
    model = built(name, way)

    def step(model: Any, _number: int, watched: Watch) -> None:
        watched.capture(sequences=0)
        loss = model(**batch()).loss
        loss.backward()
        watched.step(loss)

    run = loop(tmp_path, model, step, steps=2)
    assert run.manifest.not_recorded == (), capsys.readouterr().err
    calls = read_calls(tmp_path / "own")
    found = [{*call.form.tensors, *(["softcap"] if call.form.softcap else [])} for call in calls]
    assert found == told
    for call in calls:
        assert [one.text for one in diagnose(call).findings] == []
