"""``scripts/faults/localized_faults.py``: a driving fault is named, and a refusal counts only for want of growth."""

import sys
from pathlib import Path

import pytest

from flashpoint.errors import UserError
from tests.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts/faults"))
import localized_faults


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_biased_delta_is_named_in_its_head(tmp_path: Path) -> None:
    assert localized_faults.trial("delta_bias", 2, tmp_path) == "named"


@pytest.mark.slow
def test_a_refusal_for_another_reason_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localized_faults, "SIZES", {**localized_faults.SIZES, "steps": "6"})  # fewer than a branch's
    with pytest.raises(UserError, match="no checkpoint lies 30 steps before"):
        localized_faults.trial("none", 1, tmp_path)
