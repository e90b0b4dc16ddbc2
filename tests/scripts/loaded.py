"""A script as a module: the folders of ``scripts/`` are no packages."""

import importlib.util
import sys
from typing import Any

from tests.conftest import REPOSITORY


def script(place: str) -> Any:
    """The script of that place in ``scripts/``, without ``.py``."""
    name = place.rpartition("/")[2]
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / f"scripts/{place}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
