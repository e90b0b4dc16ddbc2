"""Run every command of README.md and docs/guide.md in an empty folder: ``python scripts/docs/run_documents.py``.

README's commands run as written. The guide's do, but for their length: trainings end after ``--steps``, sweeps take
``--seeds`` seeds, and ``--jobs`` readers share the page's sections. Capitals stand for what earlier commands made: RUN
for the first run of a section, or else of the page. Fenced blocks of Python and YAML become the files that their first
line names. The table says what every command ended with; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from flashpoint.cli.table import Table, show

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = {
    "git clone": "the address is the reader's",
    "python train.py -m": "sixteen trainings",
    "pytest": "the suite is run by itself",
    "pip install": "what an installation needs differs",
    "source ": "nothing to run",
    "launcher=slurm": "needs Slurm",
    "localize": "needs an explosion",
    "openwebtext": "needs a network",
    "experiment=gpt2_124m": "needs an hour",
    "tokenizer=gpt2": "needs a network once",
    "hardware=h200": "needs two kinds of GPU",
}
WAIT_SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="length of the guide's trainings")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of the guide's sweeps")
    parser.add_argument("--jobs", type=int, default=1, help="readers of the guide, side by side")
    parser.add_argument("--page", choices=("README.md", "docs/guide.md"), help="this page only")
    parser.add_argument("--keep", type=Path, help="a folder to work in that stays; data prepared there is used")
    arguments = parser.parse_args()
    folder = arguments.keep or Path(tempfile.mkdtemp())
    pages = [arguments.page] if arguments.page else ["README.md", "docs/guide.md"]
    readers = [Reader(folder, arguments.steps, arguments.seeds)]
    readers += [readers[0].beside(folder / f"reader-{number}") for number in range(1, arguments.jobs)]
    try:
        rows = [row for page in pages for row in _rows(readers if page != "README.md" else readers[:1], ROOT / page)]
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)
    show(Table(("page", "command", "ended", "seconds"), rows), "markdown")
    sys.exit(any(row[2] == "failed" for row in rows))


def _rows(readers: Sequence[Reader], page: Path) -> Iterator[list[str]]:
    """Return what :meth:`Reader.follow` does, of readers that share the page."""
    with ThreadPoolExecutor(len(readers)) as pool:
        shares = [pool.submit(reader.follow, page, job, len(readers)) for job, reader in enumerate(readers)]
        for share in shares:
            yield from share.result()


class Reader:
    """Someone who types what a page says.

    Args:
        folder: where they are; it need not have anything in it.
        steps: length of the trainings of pages other than README.md.
        seeds: of sweeps on such pages.
    """

    def __init__(self, folder: Path, steps: int, seeds: int) -> None:
        self._folder, self._steps, self._seeds = folder, steps, seeds
        self._runs: list[str] = []
        self._runs_before_section = 0
        self._page: list[str] = []
        programs = folder / ".programs"
        programs.mkdir(parents=True, exist_ok=True)
        for name, module in (("flashpoint", "flashpoint"), ("torchrun", "torch.distributed.run")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
            program.chmod(0o755)
        self._environment = os.environ | {"PATH": f"{programs.resolve()}:{os.environ['PATH']}"}
        shutil.copy(ROOT / "train.py", folder)
        shutil.copytree(ROOT / "runs/reference", folder / "runs/reference", dirs_exist_ok=True)

    def beside(self, folder: Path) -> Reader:
        """Return another reader, in a folder of their own but for the data."""
        other = Reader(folder, self._steps, self._seeds)
        (self._folder / "data").mkdir(exist_ok=True)
        if not (folder / "data").exists():
            (folder / "data").symlink_to((self._folder / "data").resolve())
        return other

    def follow(self, page: Path, job: int, jobs: int) -> list[list[str]]:
        """Return the page, command, ending and seconds of each command.

        Args:
            job: of ``jobs``; it reads every ``jobs``-th section from this one on.
        """
        rows: list[list[str]] = []
        commands = list(_commands(page, self._folder))
        self._runs, self._page = [], [command for _, command in commands]
        whole = page.name == "README.md"
        last = -1
        for section, command in commands:
            if section % jobs != job:
                continue
            if section != last:
                last, self._runs_before_section = section, len(self._runs)
            after_installation = command.split("&&")[-1].strip()
            reason = next((reason for part, reason in NOT_RUN.items() if part in after_installation), None)
            if "torchrun" in command and torch.cuda.device_count() == 1:
                reason = "needs two GPUs, or none"
            started = time.perf_counter()
            ended = f"not run: {reason}" if reason else self._type(after_installation, whole)
            seconds = "" if reason else f"{time.perf_counter() - started:.1f}"
            print(f"{page.name}: {command}: {ended} {seconds}", file=sys.stderr, flush=True)
            rows.append([page.name, f"`{command}`".replace("|", "\\|"), ended, seconds])
        return rows

    def _type(self, command: str, whole: bool) -> str:
        command = self._filled(command.removeprefix(".venv/bin/"))
        trains = command.startswith(("flashpoint train", "torchrun"))
        if trains and not whole:
            command = self._shortened(command)
        beside = self._begin("beside") if command == "flashpoint watch runs" else None
        result = subprocess.run(
            command, shell=True, cwd=self._folder, env=self._environment, capture_output=True, text=True, check=False
        )
        if beside:
            beside.wait(WAIT_SECONDS)
        if result.returncode:
            print(result.stderr[-2000:], file=sys.stderr)
            return "failed"
        if trains and (ended := re.findall(r"^outcome=(\w+).* run=(\S+)", result.stdout, re.M)):
            self._runs.append(ended[-1][1])
            return str(ended[-1][0])
        return "done"

    def _filled(self, command: str) -> str:
        if "resume=RUN" in command:
            return command.replace("RUN", self._interrupted())
        if "FOLDER" in command or "FILE_OR" in command:
            self._write_texts()
        if "FILE.safetensors" in command:
            tensors = {name: torch.randn(2, 2, 64, 32) for name in ("q", "k", "v", "grad_out")}
            save_file(tensors, self._folder / "FILE.safetensors")
        # What a section needs of one that another reader has is made by the page's own command.
        if "RUN" in command and not self._runs:
            self._type(next(one for one in self._page if one.startswith("flashpoint train ")), whole=False)
        if "runs/SWEEP" in command and not (self._folder / "runs/sweep").exists():
            self._type(next(one for one in self._page if "sweep=SWEEP" in one), whole=False)
        of_section = self._runs[self._runs_before_section :]
        run, other = ([*of_section, *self._runs][0], self._runs[-1]) if self._runs else ("", "")
        steps = [int(path.stem.split("-")[-1]) for path in (self._folder / run / "checkpoints").glob("*") if run]
        words = {"FILE_OR_FOLDER": "texts", "FOLDER": "texts", "RUN": run, "OTHER": other, "SWEEP": "sweep",
                 "STEP": str(min(steps, default=0)), " …": ""}  # fmt: skip
        command = re.sub("|".join(words), lambda match: words[match[0]], command)
        return re.sub(r"--at \d+", f"--at {self._steps}", command)  # the shortened trainings end there

    def _shortened(self, command: str) -> str:
        command = command.replace("seed=range(8)", f"seed=range({self._seeds})")
        if "train.steps=" in command:
            return re.sub(r"train\.steps=\d+", f"train.steps={2 * self._steps}", command)
        return command if "resume=" in command else f"{command} train.steps={self._steps}"

    def _begin(self, name: str) -> subprocess.Popen[str]:
        """Return a training that has done its first steps."""
        command = ["flashpoint", "train", "attn=flash_bf16", f"train.steps={self._steps}", f"run_name={name}"]
        process = subprocess.Popen(
            command, cwd=self._folder, env=self._environment, stderr=subprocess.DEVNULL, text=True
        )
        until = time.monotonic() + WAIT_SECONDS
        while process.poll() is None and time.monotonic() < until:
            metrics = self._folder / "runs" / name / "metrics.jsonl"
            if metrics.is_file() and metrics.stat().st_size:
                break
            time.sleep(0.1)
        return process

    def _interrupted(self) -> str:
        process = self._begin("interrupted")
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_SECONDS)
        return "runs/interrupted"

    def _write_texts(self) -> None:
        texts = self._folder / "texts"
        texts.mkdir(exist_ok=True)
        for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            (texts / f"{module.stem}.txt").write_text(module.read_text(encoding="utf-8", errors="ignore"))


def _commands(page: Path, folder: Path) -> Iterator[tuple[int, str]]:
    """Return the commands of a page, each with its section, from 0; files that it shows are written on the way."""
    section, fenced = -1, None  # what stands before the first heading has no commands
    for line in page.read_text(encoding="utf-8").splitlines():
        if fenced is None and line.startswith("```"):
            fenced = [line[3:]]
        elif fenced is not None and line == "```":
            language, *lines = fenced
            fenced = None
            if language == "bash":
                yield from ((section, line) for line in lines if line)
            elif lines and (named := re.fullmatch(r"# (\S+\.\w+)", lines[0])):
                (folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
                (folder / named[1]).write_text("\n".join(lines) + "\n")
        elif fenced is not None:
            fenced.append(line)
        elif re.match(r"    (flashpoint|torchrun|pip|python) ", line):
            yield section, re.sub(r"\s+#.*", "", line.strip())
        elif line.startswith("## "):
            section += 1


if __name__ == "__main__":
    main()
