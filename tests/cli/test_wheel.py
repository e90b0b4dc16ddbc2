"""What is installed is enough: a wheel, in a folder of its own, trains from an empty folder."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, TINY, environment

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the package, its command in ``bin``."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", str(REPOSITORY), "-w", folder], check=True, timeout=300)
    (wheel,) = folder.glob("flashpoint-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "installed", wheel], check=True, timeout=300)
    assert not any(name.startswith(("tests/", "scripts/")) for name in zipfile.ZipFile(wheel).namelist())
    return folder / "installed"


def test_a_wheel_trains_from_an_empty_folder(installed: Path, tmp_path: Path, text_file: Path) -> None:
    def flashpoint(*arguments: str) -> "subprocess.CompletedProcess[str]":
        # Not from the checkout: its sources are on the path of the tests, and perhaps of the interpreter.
        command = [sys.executable, "-P", str(installed / "bin/flashpoint"), *arguments]
        variables = {**environment(), "PYTHONPATH": str(installed)}
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)

    sweep = ("-m", "hydra/launcher=gpus", "hydra.launcher.sweep=s", *TINY, f"data.path={text_file}", "seed=1")
    swept = flashpoint("train", *sweep)
    assert swept.returncode == 0, swept.stderr
    listed = flashpoint("runs", "runs/s", "--format", "csv").stdout.splitlines()
    assert len(listed) == 2
    assert listed[1].startswith("run,stable,12,,")
