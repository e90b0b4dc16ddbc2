"""Which code made a run."""

import hashlib
from pathlib import Path

from flashpoint.training.determinism import source_digest


def test_the_source_is_all_python_files_and_their_places(tmp_path: Path) -> None:
    package, elsewhere = tmp_path / "package", tmp_path / "elsewhere"
    (package / "inside").mkdir(parents=True)
    elsewhere.mkdir()
    (package / "b.py").write_bytes(b"xy")
    (package / "inside/a.py").write_bytes(b"")
    (elsewhere / "k.py").write_bytes(b"z")
    (package / "linked").symlink_to(elsewhere)  # as src/flashpoint/kernels is in a checkout
    (package / "b.pyc").write_bytes(b"no source")
    by_hand = b"b.py\x002\x00xy" + b"inside/a.py\x000\x00" + b"linked/k.py\x001\x00z"
    assert source_digest(package) == hashlib.sha256(by_hand).hexdigest()
