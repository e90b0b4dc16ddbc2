"""Every variant has a colour of its own."""

from flashpoint.report.colours import colour
from tests.conftest import REPOSITORY


def test_colours_differ_and_a_users_own_variant_is_black() -> None:
    names = [path.stem for path in (REPOSITORY / "configs/attn").glob("*.yaml")]
    assert len({colour(name) for name in [*names, "mine"]}) == len(names) + 1
    assert colour("mine") == "#000000"
