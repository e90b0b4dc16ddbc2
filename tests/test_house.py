"""What holds for all modules: no two have one name."""

from collections import defaultdict
from pathlib import Path

from tests.conftest import REPOSITORY


def test_no_two_modules_have_one_name() -> None:
    """The kernels' folder is another: there a file has the stem of what launches it."""
    named = defaultdict[str, list[Path]](list)
    for path in (REPOSITORY / "src").rglob("*.py"):
        if path.stem not in ("__init__", "__main__"):
            named[path.stem].append(path.relative_to(REPOSITORY))
    assert len(named) > 200
    assert not [paths for paths in named.values() if len(paths) > 1]
