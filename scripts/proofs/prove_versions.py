"""Whether flashpoint works with the Pythons and the least and the newest dependencies that pyproject.toml admits.

    python scripts/proofs/prove_versions.py FOLDER 3.11:least 3.11:newest 3.12:newest 3.14:newest …

An environment is a Python, which uv finds or fetches, and a set of versions: ``least`` is the lowest release of every
dependency that can stand beside the others, ``newest`` the highest. uv installs the light package and then each extra,
in one new environment. After each, commands run on the CPU: those of README.md, shortened, a watched loop and its
diagnosis; training, replay, sweep and pages of the laboratory; the linters and the tests that need a package of
``dev``. A failure ends none of the others. The environment is deleted at the end. FOLDER keeps its log and what was
found, so that several calls make one table. An environment takes some 6 GB, since PyPI's PyTorch brings CUDA.

GPT-2's tokeniser needs a download. It is tried where TIKTOKEN_CACHE_DIR names a folder that has its two files. The
status is 1 where something failed.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
STAGES = {"light": [], "lab": ["lab", "logs"], "dev": ["dev"]}
"""The extras that are installed, one stage after the other in one environment."""
_SECONDS = 1800  # of one command
_TRAIN = "flashpoint train train.device=cpu train.threads=1 data.max_bytes=1_000_000"
_REPLAY = "flashpoint train train.device=cpu train.threads=1 replay=first"
_WATCHED = f"python {REPOSITORY}/examples/plain_pytorch.py epochs=1"
_EVENTS = """
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter("events") as writer:
    for step in range(40):
        writer.add_scalar("loss", 2.0, step)
"""
_PARQUET = """
from datasets import Dataset
Dataset.from_dict({"text": ["All that glisters is not gold. " * 99] * 999}).to_parquet("text.parquet")
"""
_TESTS = (
    "tests/numerics/test_rounding.py tests/numerics/test_worked_example.py tests/fuzz/test_extremes.py "
    "tests/watching/test_models_of_transformers.py tests/hydra_plugins"
)
COMMANDS: dict[str, list[str | list[str]]] = {
    "light": [
        "flashpoint --help",
        _WATCHED,
        f"{_WATCHED} attention=flash_exact_rowsum name=drop-in",
        "flashpoint diagnose runs/plain",
        "flashpoint runs runs/plain",
        "flashpoint watch --once runs/plain",
    ],
    "lab": [
        "flashpoint --help",
        f"{_TRAIN} attn=flash_bf16 train.steps=40 run_name=first tracking=offline",
        f"{_REPLAY} run_name=again",
        "flashpoint compare first again",
        f"{_REPLAY} attn=flash_fixed run_name=fixed",
        "flashpoint report first fixed --out page",
        "flashpoint runs runs/first/wandb/latest-run",
        f"{_TRAIN} -m attn=flash_bf16,flash_fixed seed=range(2) train.steps=4",
        f"{_WATCHED} name=watched",
        "flashpoint diagnose watched",
        "flashpoint report watched",
        ["python", "-c", _EVENTS],
        "flashpoint runs events",
        ["python", "-c", _PARQUET],
        f"{_TRAIN} data=text data.path=text.parquet train.steps=4",
    ],
    "dev": [
        "ruff check --no-cache .",
        "ruff format --no-cache --check .",
        "mypy --cache-dir PLACE/mypy",
        "lint-imports --no-cache",
        "cog -v",
        "pre-commit --version",
        f"pytest -p no:cacheprovider -n 2 {_TESTS}",
    ],
}
"""What runs after each installation: ``dev`` in the repository, the others in a folder of their own."""
if "TIKTOKEN_CACHE_DIR" in os.environ:
    _GPT2 = "data.tokenizer=gpt2 model.vocab_size=50257"
    COMMANDS["lab"].append(f"{_TRAIN} data=text data.path=text.parquet {_GPT2} train.steps=1")


def declared() -> list[str]:
    """Return the packages that pyproject.toml names, once each, the light package's first."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    names = [re.split(r"[\[<>=]", line)[0] for line in lines]
    return list(dict.fromkeys(name for name in names if name != "flashpoint"))


def _failure(command: list[str], folder: Path, environment: Mapping[str, str], log: Path) -> str | None:
    """Run a command, append what it printed to ``log``, and return the line that tells why it failed, if it did."""
    print("+", *command, flush=True)
    try:
        ended = subprocess.run(
            command, cwd=folder, env=environment, timeout=_SECONDS, text=True, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end after {_SECONDS} s"
    with log.open("a") as file:
        print("+", *command, file=file)
        print(ended.stdout, "status", ended.returncode, file=file)
    if ended.returncode == 0:
        return None
    lines = [line.strip() for line in ended.stdout.splitlines() if line.strip()] or [f"status {ended.returncode}"]
    return next((line for line in lines if re.match(r"([\w.]*(Error|error)|ERROR|FAILED)\b", line)), lines[-1])


def prove(folder: Path, python: str, chosen: str) -> dict[str, Any]:
    """Install and run all stages in one new environment; return what failed in each, and the versions."""
    place = folder / f"{Path(python).name}-{chosen}"
    log = folder / f"{place.name}.log"
    shutil.rmtree(place, ignore_errors=True)
    (place / "work").mkdir(parents=True)
    log.unlink(missing_ok=True)
    subprocess.run(["uv", "venv", "--quiet", "--seed", "--python", python, place / "venv"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{place / 'venv/bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(place / "venv")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    failed: dict[str, list[str]] = {}
    versions: dict[str, list[str]] = {}
    for stage, extras in STAGES.items():
        resolution = "lowest-direct" if chosen == "least" else "highest"
        options = ["--quiet", "--upgrade", "--resolution", resolution, *(f"--extra={extra}" for extra in extras)]
        installs = [["uv", "pip", "install", *options, "--requirements", "pyproject.toml"],
                    ["uv", "pip", "install", "--quiet", "--no-deps", "."]]  # fmt: skip
        failed[stage] = []
        for command in [*installs, *COMMANDS[stage]]:
            words = command.replace("PLACE", str(place)).split() if isinstance(command, str) else command
            inside = stage == "dev" or command in installs
            told = _failure(words, REPOSITORY if inside else place / "work", environment, log)
            if told:
                failed[stage].append(f"{' '.join(words[:2])}: {told}".replace(f"{REPOSITORY}/", ""))
            if told and command in installs:
                break
        for name, version in _installed(environment):
            if name in declared() and version not in versions.setdefault(name, []):
                versions[name].append(version)
    exact = subprocess.run(["python", "--version"], env=environment, capture_output=True, text=True, check=True)
    shutil.rmtree(place)
    return {
        "python": exact.stdout.split()[-1], "set": chosen, "failed": failed, "versions": versions,
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def _installed(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    command = ["uv", "pip", "list", "--format=json"]
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [(item["name"].lower().replace("_", "-"), item["version"]) for item in json.loads(listed.stdout)]


def tables(found: list[dict[str, Any]]) -> str:
    """Return Markdown: what works in each environment, and the versions of each package there."""
    lines = [f"| Python | set | {' | '.join(STAGES)} | date |", "|---|---|" + "---|" * (len(STAGES) + 1)]
    for one in found:
        cells = ["; ".join(one["failed"][stage]) or "ok" for stage in STAGES]
        lines.append(f"| {one['python']} | {one['set']} | {' | '.join(cells)} | {one['date']} |")
    lines += ["", "| package | " + " | ".join(f"{one['python']} {one['set']}" for one in found) + " |"]
    lines.append("|---|" + "---|" * len(found))
    for name in declared():
        lines.append(f"| {name} | " + " | ".join(", ".join(one["versions"].get(name, [])) for one in found) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    if len(arguments) < 2 or not all(re.fullmatch(r".+:(least|newest)", one) for one in arguments[1:]):
        print(__doc__)
        return 2
    folder = Path(arguments[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for one in arguments[1:]:
        python, chosen = one.rsplit(":", 1)
        found = prove(folder, python, chosen)
        (folder / f"{Path(python).name}-{chosen}.json").write_text(json.dumps(found, indent=1))
    every = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    print(tables(every))
    return int(any(any(one["failed"].values()) for one in every))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
