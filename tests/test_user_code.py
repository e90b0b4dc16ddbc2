"""Files of the user's own, which may import others beside them and define classes."""

import pickle
import sys
from pathlib import Path

import pytest

from flashpoint.errors import UserError
from flashpoint.user_code import load


def test_a_file_imports_what_lies_beside_it_and_its_classes_can_be_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "flashpoint_test_model.py").write_text("LAYERS = 3\n")
    (tmp_path / "training.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from flashpoint_test_model import LAYERS\n"
        "@dataclass\nclass Shape:\n    layers: int = LAYERS\n"
    )
    shape = load(f"{tmp_path}/training.py:Shape", "--function")
    assert pickle.loads(pickle.dumps(shape())) == shape()
    assert shape().layers == 3
    with pytest.raises(UserError, match=r"training\.py has no Shap; did you mean Shape\? it has Shape$"):
        load(f"{tmp_path}/training.py:Shap", "--function")
