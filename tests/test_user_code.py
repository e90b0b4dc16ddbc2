"""Files of the user's own, which may import others beside them and define classes."""

import pickle
import subprocess
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


def test_a_file_does_not_get_the_number_of_a_stream_that_users_code_closes(tmp_path: Path) -> None:
    """What was printed next went into it."""
    code = (
        "import os, sys\nfrom flashpoint.user_code import undisturbed\n"
        "with undisturbed():\n    os.close(2)\n    os.close(0)\n"
        "file = open('file', 'w')\nprint('line', file=sys.stderr, flush=True)\nassert file.fileno() > 2\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / "file").read_text() == ""
