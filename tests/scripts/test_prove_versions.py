"""The table of Pythons and versions names every declared package, and the line that tells a failure."""

import sys
import tomllib

from packaging.requirements import Requirement

from tests.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts/proofs"))

import prove_versions


def test_every_declared_package_is_in_the_table_and_has_a_lower_bound() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    requirements = [one for one in map(Requirement, lines) if one.name != "flashpoint"]
    assert set(prove_versions.declared()) == {one.name for one in requirements}
    assert [one for one in requirements if ">=" not in {part.operator for part in one.specifier}] == []


def test_what_failed_stands_in_its_stage() -> None:
    failed = {"light": [], "lab": ["flashpoint report: ValueError: no"], "dev": []}
    told = {"python": "3.14.1", "set": "least", "date": "2026-11-29"}
    one = {**told, "failed": failed, "versions": {"torch": ["1", "2"]}}
    lines = prove_versions.tables([one]).splitlines()
    assert "| 3.14.1 | least | ok | flashpoint report: ValueError: no | ok | 2026-11-29 |" in lines
    assert "| torch | 1, 2 |" in lines
