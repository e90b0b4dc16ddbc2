"""Bad input ends in one line, whatever it is. ``python scripts/faults/fuzz.py`` tries more of it."""

from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.judge import Command, Ending, explore, kind_of, names_of_kinds, told


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", names_of_kinds())
def test_bad_input_ends_in_one_line_and_writes_nothing_out_of_place(name: str, tmp_path: Path) -> None:
    kind = kind_of(name)

    def judged(case: Any, command: Command, ending: Ending) -> None:
        assert not ending.faults(command), told(case, command, ending)

    explore(kind, kind.in_ci, tmp_path, judged)
