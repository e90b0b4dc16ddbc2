"""Children of a watched loop, or of a probe: they end in every way, or go on beside the process that began the run."""

from pathlib import Path
from typing import Any

from tests.fuzz import disturbances
from tests.fuzz.disturbed import CHILDREN, PLACES
from tests.fuzz.judge import Command, Kind


def lay(tree: Path, case: tuple[str, Any]) -> Command:
    return disturbances.lay(tree, case)


KIND = Kind("forks", disturbances.disturbances((*CHILDREN, *CHILDREN, *PLACES[:1], "nothing")), lay, in_ci=12)
