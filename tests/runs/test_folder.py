"""A run folder has one writer at a time."""

import os
from pathlib import Path

import pytest

from flashpoint.errors import UserError
from flashpoint.runs.folder import RunFolder


def test_a_run_is_written_by_one_at_a_time(run: RunFolder) -> None:
    with run.locked(), pytest.raises(UserError, match=f"{run.path}: another process runs it; wait"), run.locked():
        pass
    with run.locked():
        pass


def test_a_folder_that_takes_no_lock_is_one_line() -> None:
    folder = RunFolder(Path("/proc/self/fdinfo"))
    with pytest.raises(UserError, match=r"/proc/self/fdinfo: .+; choose a writable runs_dir"), folder.locked():
        pass


def test_evidence_in_tables_is_no_folder_to_replay() -> None:
    told = r"ignite-h200:flash_bf16_seed-0: no run there \(no config.json\); a run of the evidence tables has no tape"
    with pytest.raises(UserError, match=told):
        RunFolder.open("ignite-h200:flash_bf16_seed-0")


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "localize.jsonl"])
def test_a_run_with_a_link_in_it_is_written_by_nobody(run: RunFolder, tmp_path: Path, name: str) -> None:
    """A run of somebody else's that went on wrote into, or deleted, what a link named."""
    (run.path / name).symlink_to(tmp_path / "mine")
    for alone in (run.locked, run.localizing):
        with pytest.raises(UserError, match=rf"{name}: a link, and a run writes in its own folder alone"), alone():
            pass
    assert [one.name for one in run.path.iterdir()] == [name]


def test_a_lock_under_a_second_name_is_not_changed(run: RunFolder, tmp_path: Path) -> None:
    lock, mine = run.path / ".lock", tmp_path / "mine"
    lock.touch()
    mine.hardlink_to(lock)
    os.utime(mine, (1, 1))
    with run.locked():
        pass
    assert mine.stat().st_mtime == 1
    mine.write_text("what is no lock")
    with pytest.raises(UserError, match=f"{lock}: holds something"), run.locked():
        pass
    assert mine.read_text() == "what is no lock"


def test_the_newest_run_of_a_name_is_found_from_older_ones(tmp_path: Path) -> None:
    """A loop that is watched again has another folder, and the command that was typed before reads the first one."""
    for hour, name in enumerate(["mine", "mine", "mine", "mine-other", "other"]):
        folder = RunFolder.create(tmp_path, name)
        folder.config.write_text("{}")
        os.utime(folder.config, (hour * 3600, hour * 3600))
    assert RunFolder(tmp_path / "mine").later_of_its_name == tmp_path / "mine-3"
    assert RunFolder(tmp_path / "mine-3").later_of_its_name is None
    assert RunFolder(tmp_path / "other").later_of_its_name is None
    assert RunFolder(tmp_path / "nowhere").later_of_its_name is None
    os.utime(tmp_path / "mine" / "config.json", (9 * 3600, 9 * 3600))  # deleted, and made anew
    assert RunFolder(tmp_path / "mine").later_of_its_name is None
