"""Bad input ends in one line, whatever it is. ``python scripts/fuzz.py`` tries more of it."""

from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.judge import Command, Ending, Kind, explore, kinds, told


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.name)
def test_bad_input_ends_in_one_line_and_writes_nothing_out_of_place(kind: Kind, tmp_path: Path) -> None:
    def judged(case: Any, command: Command, ending: Ending) -> None:
        assert not ending.faults(command), told(case, command, ending)

    explore(kind, kind.in_ci, tmp_path, judged)
