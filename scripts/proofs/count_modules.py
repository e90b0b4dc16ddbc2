"""What a user of one's own loop loads and installs: modules, lines, dependencies, seconds.

    python scripts/proofs/count_modules.py [TREE]

Each figure is of a process that imports TREE's sources, by default this checkout's, with the packages of this Python. A
second checkout of an earlier commit gives the figures before. The status is 1 where more modules are loaded than
:data:`MOST`.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from flashpoint.cli.table import Table, show

MOST = {"watch": 46, "diagnose": 60}
"""Modules of this package that may be loaded."""
_LOOP = """
import sys, torch, flashpoint
from torch import nn
import torch.nn.functional as F

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

torch.manual_seed(0)
model = Attention()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with flashpoint.watch(model, runs_dir=sys.argv[1], name=f"watched{sys.argv[2]}") as watched:
    for step in range(int(sys.argv[2])):
        if step:
            watched.capture(sequences=0)
        batch = torch.randn(4, 16, 32)
        loss = model(batch).square().mean()
        loss.backward()
        watched.step(loss, batch)
        optimizer.step(), optimizer.zero_grad()
"""
_DIAGNOSIS = """
import contextlib, io, sys
from flashpoint.cli.main import main

with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["diagnose", sys.argv[1], "--device", "cpu"])
"""
_LOADED = """
import json, pathlib, sys
loaded = [module for name, module in sys.modules.items() if name.split(".")[0] in ("flashpoint", "flashpoint_kernels")]
files = [file for module in loaded if (file := getattr(module, "__file__", None))]
print(json.dumps([len(loaded), sum(len(pathlib.Path(file).read_text().splitlines()) for file in files)]))
"""
_BOTH = """
import os, sys, torch

folder, watching, diagnosing = sys.argv[1:]
sys.argv = ["", folder, "1"]
if not os.fork():
    exec(watching)
    sys.exit()
if os.wait()[1]:
    sys.exit(1)
sys.argv = ["", f"{folder}/watched2"]
exec(diagnosing)
"""
"""Two processes that import PyTorch once."""


def main() -> int:
    tree = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2]).resolve()
    sources = [path for part in ("src", "kernels") for path in sorted((tree / part).rglob("*.py"))]
    lines = [len(path.read_text().splitlines()) for path in sources]
    found = loaded(tree)
    watched, diagnosed = found["watch"], found["diagnose"]
    untyped = sum(len(re.findall(r"\bdict\[str, Any\]", path.read_text())) for path in sources)
    rows: list[list[object]] = [
        ["modules", len(sources)],
        ["lines", sum(lines)],
        ["median lines of a file", statistics.median(line for line in lines if line)],
        ["modules loaded by watch and one step", watched[0]],
        ["their lines", watched[1]],
        ["modules loaded by diagnose of a capture", diagnosed[0]],
        ["their lines", diagnosed[1]],
        *([f"dependencies, {extra}", count] for extra, count in _dependencies(tree).items()),
        ["seconds of import flashpoint", round(_seconds(tree), 3)],
        ["uses of dict[str, Any]", untyped],
    ]
    show(Table(("what", "figure"), rows, f"{tree.name}, Python {sys.version.split()[0]}"), "markdown")
    return int(any(modules > MOST[what] for what, (modules, _) in found.items()))


def loaded(tree: Path) -> dict[str, tuple[int, int]]:
    """Return how many modules of this package a watched step and a diagnosis of a capture load, and their lines."""
    watching = f"{_LOOP}{_LOADED}sys.argv[2] = '2'{_LOOP}"  # the second has a capture
    with tempfile.TemporaryDirectory() as folder:
        lines = _run(tree, _BOTH, folder, watching, f"{_DIAGNOSIS}{_LOADED}").splitlines()
    watched, diagnosed = (json.loads(line) for line in lines if line.startswith("["))
    return {"watch": tuple(watched), "diagnose": tuple(diagnosed)}


def _run(tree: Path, code: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}:{tree / 'kernels'}", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=True).stdout


def _dependencies(tree: Path) -> dict[str, int]:
    """Return how many packages the installation and each extra name; an extra's are counted with what it contains."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    extras = {"none": project["dependencies"], **project.get("optional-dependencies", {})}

    def names(extra: str) -> set[str]:
        own = {match[0] for one in extras[extra] if (match := re.match(r"[\w-]+", one))} - {"flashpoint"}
        inner = [match[1] for one in extras[extra] if (match := re.match(r"flashpoint\[(\w+)\]", one))]
        return own.union(names("none"), *map(names, inner)) if extra != "none" else own

    return {extra: len(names(extra)) for extra in extras}


def _seconds(tree: Path) -> float:
    code = "import time; began = time.perf_counter(); import flashpoint; print(time.perf_counter() - began)"
    return statistics.median(float(_run(tree, code)) for _ in range(7))


if __name__ == "__main__":
    sys.exit(main())
