"""Runs of somebody else's whose records name other places, and whose files are links out of their folder."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.judge import CANARY, Command, Kind
from tests.fuzz.recorded import READING, TRAINING, command
from tests.fuzz.recorded import lay as laid

_RUN = "runs/original"
_CODE = ("theirs.py:Theirs", "../theirs.py:Theirs", "./theirs.py:Nothing", "theirs:Theirs")
_PLACES = ("../evil", "~/evil", "/proc/self/evil", "evil", "../work/../evil", "")
_SAID = st.one_of(
    st.tuples(st.just("probes.attention"), st.lists(st.sampled_from((*_CODE, "ties")), min_size=1, max_size=3)),
    st.tuples(
        st.sampled_from(("data.root", "data.path", "runs_dir", "run_name", "replay", "probes.weights_against")),
        st.sampled_from(_PLACES),
    ),
    st.tuples(st.just("attn.name"), st.sampled_from(("../evil", "theirs.py:Theirs", "\x1b]0;evil\x07", "<script>"))),
    st.tuples(st.just("tracking.wandb"), st.just("online")),
    st.tuples(st.just("tracking.entity"), st.just("somebody")),
    st.tuples(st.just("trust"), st.just(True)),
)
_LINKS = st.sampled_from(
    (
        "metrics.jsonl", "checkpoints", "report", "report/figures", "report/report.html", "comparison", "curves.png",
        "localize.jsonl", "localize.json", "localize.json.partial", ".lock", ".localize.lock", "branches", "chain.bin",
        "manifest.json", "captures", "weights", "wandb_id",
    )
)  # fmt: skip
_FOLDERS = ("checkpoints", "report", "report/figures", "comparison", "branches", "captures", "weights")
_WRITING = (
    ("report", "original"),
    ("report", "original", "whole"),
    *(verb for verb in READING if verb[0] == "localize"),
)
_CASES = st.tuples(
    st.lists(_SAID, max_size=3),
    st.lists(_LINKS, max_size=2),
    st.booleans(),
    st.one_of(*map(st.sampled_from, (TRAINING, _WRITING, READING))),
)
_MAY = {"report": (f"work/{_RUN}/report", f"work/{_RUN}/comparison", f"work/{_RUN}/curves.png",
                   "work/runs/whole/comparison")}  # fmt: skip
"""The last where the first run cannot be read."""


def lay(tree: Path, case: tuple[Any, ...]) -> Command:
    said, links, holds, verb = case
    work = laid(tree)
    for folder in (tree, work):
        (folder / "theirs.py").write_text(f"open({str(tree / CANARY)!r}, 'w').close()\n\nclass Theirs:\n    pass\n")
    config = work / _RUN / "config.json"
    values = json.loads(config.read_text())
    for key, value in said:
        section, _, last = key.rpartition(".")
        (values[section] if section else values)[last] = value
    config.write_text(json.dumps(values))
    for number, name in enumerate(links):
        link, mine = work / _RUN / name, tree / f"mine-{number}"
        link.parent.mkdir(exist_ok=True)
        if name in _FOLDERS:
            shutil.copytree(link, mine, symlinks=True) if link.is_dir() else mine.mkdir()
            (mine / "step-000000003.json").write_text("mine")
            (mine / "loss.png").write_text("mine")
            shutil.rmtree(link, ignore_errors=True)
        elif holds:  # or else it names nothing
            mine.write_bytes(link.read_bytes() if link.is_file() else b"mine")
        link.unlink(missing_ok=True)
        if not link.exists():
            link.symlink_to(mine)
    asked = command(verb)
    may, notices = _MAY.get(verb[0], asked.may_write), (*asked.notices, "tracking.")
    return replace(asked, may_write=may, notices=notices)


KIND = Kind("places and links of foreign runs", _CASES, lay, in_ci=14)
