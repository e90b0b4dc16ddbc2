"""The halves of the risk score are drawn by a hash of a run's settings, which later keys do not change."""

from hashlib import sha256
from pathlib import Path

import pytest

from flashpoint.cli.run_words import open_run
from tests.records import write_run
from tests.scripts.loaded import script

SCRIPT = script("evidence/risk_score")


@pytest.mark.parametrize(
    "changed",
    [{"model": {"family": "llama"}}, {"optimizer": {"name": "muon"}}, {"train": {"lr": 0.25}}],
)
def test_runs_with_other_settings_are_of_other_settings(tmp_path: Path, changed: dict[str, dict[str, object]]) -> None:
    write_run(tmp_path / "plain", {"name": "flash_bf16"})
    write_run(tmp_path / "other", {"name": "flash_bf16"}, config=changed)
    write_run(tmp_path / "seed", {"name": "sdpa"}, seed=2)
    plain, other, seed = (SCRIPT.setting_of(open_run(str(tmp_path / name))) for name in ("plain", "other", "seed"))
    assert plain == seed != other


def test_a_key_that_is_added_draws_no_other_halves(tmp_path: Path) -> None:
    """Four keys of a Llama did: the documented table came out otherwise. Its hash is of the keys before them."""
    write_run(tmp_path / "plain", {"name": "flash_bf16"})
    setting = SCRIPT.setting_of(open_run(str(tmp_path / "plain")))
    assert sha256(setting.encode()).hexdigest()[:8] == "13fb24d0"  # by the script of 839df77b
