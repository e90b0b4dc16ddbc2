"""What a user of one's own loop loads stays little."""

import sys

import pytest

from tests.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts/proofs"))

import count_modules


@pytest.mark.slow
def test_watch_and_diagnose_load_few_modules() -> None:
    found = {what: modules for what, (modules, _) in count_modules.loaded(REPOSITORY).items()}
    assert found.keys() == count_modules.MOST.keys()
    assert {what for what, modules in found.items() if not 20 < modules <= count_modules.MOST[what]} == set()
