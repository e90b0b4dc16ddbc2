"""Links in the place of files and folders that are written: to a file, to nothing, to a folder, and second names."""

import os
import shutil
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.judge import Command, Kind
from tests.fuzz.recorded import NOTICES
from tests.fuzz.recorded import lay as laid

_SCRIPT = Path(__file__).parent / "written.py"
_RESUMED = ("config.json", "manifest.json", "outcome.json", "metrics.jsonl", "tape.bin", "chain.bin", "curves.png",
            "checkpoints", "checkpoints/step-000000012.json", "checkpoints/step-000000012.safetensors",
            "checkpoints/step-000000014.json", "checkpoints/step-000000014.safetensors", ".lock", "wandb_id", "weights",
            ".manifest.json.partial", ".outcome.json.partial", ".metrics.jsonl.partial", ".curves.png.partial",
            "checkpoints/.step-000000014.safetensors.partial", "checkpoints/.step-000000014.json.partial")  # fmt: skip
_REPORT = ("report", "report/report.html", "report/figures", "report/figures/loss.png", "report/.report.html.partial")
_TABLES = ("runs.parquet", "index.csv", ".lock", "metrics", "chains", "metrics/again.parquet", "chains/again.parquet",
           "metrics/small.parquet", "chains/small.parquet", ".runs.parquet.partial")  # fmt: skip
_PAGE = ("watch", "original", "--once", "--html", "page.html")
_FIGURE = ("loss", "original", "whole", "--out", "figure.png")
_WRITES: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (("train", "resume=original", "train.steps=14"), tuple(f"runs/original/{name}" for name in _RESUMED),
     ("runs/original", "data")),
    (("report", "original"), tuple(f"runs/original/{name}" for name in _REPORT), ("runs/original/report",)),
    (("report", "original"), tuple(f"runs/original/{name}" for name in _REPORT), ("runs/original/report",)),
    (("report", "original", "whole"), tuple(f"runs/original/{name.replace('report', 'comparison', 1)}"
                                            for name in _REPORT), ("runs/original/comparison",)),
    (("report", "original", "--out", "mine"), tuple(name.replace("report", "mine", 1) for name in _REPORT), ("mine",)),
    (_PAGE, ("page.html", ".page.html.partial"), ("page.html", ".page.html.partial")),
    (_PAGE, ("page.html", ".page.html.partial"), ("page.html", ".page.html.partial")),
    ((*_PAGE[:-1], "config.json"), ("config.json",), ()),
    ((*_PAGE[:-1], "runs/original/config.json"), ("page.html",), ()),
    ((*_PAGE[:-1], "runs/original/manifest.html"), ("runs/original/manifest.html",), ("runs/original/manifest.html",)),
    (_FIGURE, ("figure.png", ".figure.png.partial"), ("figure.png", ".figure.png.partial")),
    ((*_FIGURE[:-1], "runs/original/tape.bin"), ("figure.png",), ()),
    (("survival", "original", "whole", "--out", "figure.png"), ("figure.png",), ("figure.png", ".figure.png.partial")),
    (("archive", "original", "again"), tuple(f"runs/reference/{name}" for name in _TABLES), ("runs/reference",)),
    (("archive", "small:original", "small", "--remove"), tuple(f"runs/reference/{name}" for name in _TABLES),
     ("runs/reference",)),
)  # fmt: skip
"""Verbs, what they write, and where they may."""
_FORMS = ("to a file", "to a record", "to nothing", "to a folder", *["second name"] * 2, "to itself", "pipe", "folder",
          "to /dev/null", "to /dev/full", "as it is")  # fmt: skip
_BAR = (" ", "100%|")
"""Of a run that goes on, and cannot write at its end."""
_ASKED = [(write, place) for write in _WRITES for place in write[1]]


@st.composite
def _cases(draw: st.DrawFn) -> tuple[tuple[str, ...], list[tuple[str, str]], tuple[str, ...]]:
    """Draw a verb, what stands in one or two of the places where it writes, and where it may."""
    (verb, places, may), place = draw(st.sampled_from(_ASKED))
    put = {place: draw(st.sampled_from(_FORMS))}
    if draw(st.booleans()):
        put[draw(st.sampled_from(places))] = draw(st.sampled_from(_FORMS))
    return verb, list(put.items()), may


def lay(tree: Path, case: tuple[tuple[str, ...], list[tuple[str, str]], tuple[str, ...]]) -> Command:
    verb, put, may = case
    work = laid(tree)
    others = tree / "others"
    (others / "folder").mkdir(parents=True)
    (others / "folder/report.html").write_text("another page")
    shutil.copytree(work / "runs/whole", others / "run")
    for number, (where, form) in enumerate(put):
        if form != "as it is":
            _put(work / where, form, others, str(number))
    places = tuple(f"work/{place}" for place in may)
    return Command(_SCRIPT, verb, may_write=places, notices=(*NOTICES, "no flash_fp32", *_BAR), warm=True)


def _put(path: Path, form: str, others: Path, number: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:  # something else was put there before
        return
    there = path.read_bytes() if path.is_file() else b"what was there"
    file, moved = others / f"file-{number}", others / f"moved-{number}"
    if path.is_dir():
        shutil.move(path, moved)
    path.unlink(missing_ok=True)
    match form:
        case "to a file":  # which is what would be there
            file.write_bytes(there)
            path.symlink_to(file)
        case "to a record":
            path.symlink_to(others / "run/metrics.jsonl")
        case "to nothing":
            path.symlink_to(others / f"new-{number}")
        case "to a folder":
            path.symlink_to(moved if moved.is_dir() else others / "folder")
        case "second name":
            file.write_bytes(there or b"what nobody may change")
            path.hardlink_to(file)
        case "to itself":
            path.symlink_to(path.name)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to(form.removeprefix("to "))


KIND = Kind("links in the place of what is written", _cases(), lay, in_ci=12)
