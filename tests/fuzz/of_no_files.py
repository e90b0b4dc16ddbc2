"""What is no file in the place of one that is read: pipes, sockets, devices, folders, links to these and to nothing."""

import json
import os
import shutil
import socket
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.judge import Command, Kind
from tests.fuzz.recorded import READING, TRAINING, command
from tests.fuzz.recorded import lay as laid

_FORMS = (
    "pipe", "socket", "folder", "full folder",
    *(f"link to {what}" for what in ("a pipe", "nothing", "itself", "a folder")),
    *(f"link to /dev/{name}" for name in ("zero", "full", "null", "random", "stdin", "stdout", "tty")),
    "link to /proc/self/mem",
)  # fmt: skip
_OF_A_RUN = ("config.json", "manifest.json", "outcome.json", "metrics.jsonl", "metrics.jsonl.xz", "tape.bin",
             "chain.bin", "localize.jsonl", "localize.json", "checkpoints", "weights", "captures", "nonfinite.jsonl",
             "batches.csv", "report", "curves.png", ".lock", "branches", "wandb_id")  # fmt: skip
_OF_CHECKPOINTS = tuple(f"checkpoints/step-0000000{step}" for step in ("06.json", "12.json", "06.safetensors",
                                                                       "12.safetensors", "13.json"))  # fmt: skip
_TABLES = ("runs.parquet", "index.csv", "metrics", "metrics/small.parquet", "chains", "chains/small.parquet", ".lock",
           "small", "small/original")  # fmt: skip
_TOKENS = ("data/*/meta.json", "data/*/train.bin", "data/*/val.bin", "data/*/tokenizer.json", "words.txt", "data/*")
_PLACES = (
    *(f"runs/{run}/{name}" for run in ("original", "stopped") for name in (*_OF_A_RUN, *_OF_CHECKPOINTS)),
    *(f"runs/reference/{name}" for name in _TABLES),
    *_TOKENS,
    "runs/another",
)
_OF_TEXTS = (
    "train",
    "experiment=laptop",
    "tracking=disabled",
    "run_name=new",
    "data=text",
    "data.path=texts",
    "data.workers=1",
)
ALONE = {
    "claims.yaml": (("claims", "--file", "claims.yaml"),),
    "captures/layer-01.safetensors": (("diagnose", "captures"), ("diagnose", "captures/layer-01.safetensors")),
    "captures/delta.jsonl": (("diagnose", "captures"),),
    "captures/batch.pt": (("diagnose", "captures"),),
    "captures/layer-02.safetensors": (("diagnose", "captures"),),
    "log.csv": (("runs", "log.csv"), ("series", "log.csv", "loss"), ("watch", "log.csv", "--once")),
    "log.txt": (("runs", "log.txt"), ("watch", "log.txt", "--once")),
    "trainer_state.json": (("runs", "trainer_state.json"), ("watch", "trainer_state.json", "--once")),
    "events.out.tfevents.1": (("runs", "events.out.tfevents.1"), ("runs", ".")),
    "run-a.wandb": (("runs", "run-a.wandb"),),
    "own.py": (("diagnose", "captures", "--attention", "own.py:f"), ("deviation", "own.py:f", "--length", "16"),
               ("train", "replay=original", "run_name=new", "probes.attention=[own.py:Own]")),
    "mine.yaml": (("train", "replay=original", "run_name=new", "--config-dir", ".", "attn=mine"),),
    "texts/b.txt": (_OF_TEXTS,),
    "texts/b.jsonl": (_OF_TEXTS,),
    "texts/b.parquet": (_OF_TEXTS,),
    "inputs.safetensors": (("deviation", "flash", "--inputs", "inputs.safetensors"),),
}  # fmt: skip
"""Files that some verbs alone read."""
READERS = tuple(verb for verb in READING if verb[0] not in ("archive", "diagnose"))
"""A tenth of the verbs train, as they cost the most."""
ARCHIVE = ("archive", "original", "again")
OF_RUNS = tuple(f"runs/original/{name}" for name in ("config.json", "manifest.json", "outcome.json", "metrics.jsonl",
                                                     "metrics.jsonl.xz", "localize.jsonl", "chain.bin"))  # fmt: skip
"""Files that most verbs read."""
OF_TRAINING = ("tape.bin", "chain.bin", "config.json", "manifest.json", *_OF_CHECKPOINTS)
"""Those of a run that is resumed or replayed."""
OF_TABLES = (*(verb for verb in READERS if any(word.startswith("small") for word in verb)), ARCHIVE)
"""Verbs that read the evidence tables."""
_VERBS = st.one_of(*[st.sampled_from(READERS)] * 9, st.sampled_from((*TRAINING, ARCHIVE)))
_OF_ONE = [(place, verb) for place, verbs in ALONE.items() for verb in verbs]
_READ = st.one_of(
    st.tuples(st.sampled_from(_PLACES), _VERBS),
    st.tuples(st.sampled_from(OF_RUNS), st.sampled_from(READERS)),
    st.tuples(st.sampled_from([*(f"runs/original/{name}" for name in OF_TRAINING), *_TOKENS]),
              st.sampled_from(TRAINING)),
    st.tuples(st.sampled_from([f"runs/reference/{name}" for name in _TABLES]), st.sampled_from(OF_TABLES)),
    st.sampled_from(_OF_ONE),
)  # fmt: skip
"""A file and a verb: any two, and more often two of which the verb reads the file."""
_CASES = st.tuples(_READ, st.sampled_from(_FORMS))


def lay(tree: Path, case: tuple[tuple[str, tuple[str, ...]], str]) -> Command:
    (where, verb), form = case
    work = laid(tree)
    (work / "texts").mkdir()
    (work / "texts/a.txt").write_text("word and word " * 300)
    (work / "log.csv").write_text("step,loss\n" + "".join(f"{step},{5 - step / 99}\n" for step in range(99)))
    (work / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": 2.0}]}))
    paths = sorted(work.glob(where)) or [work / where]
    for path in paths:
        put(path, form, tree)
    return command(verb)


def put(path: Path, form: str, tree: Path) -> None:
    """Put what is no file in the place of one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    match form:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            _bind(path)
        case "folder" | "full folder":
            path.mkdir()
            if form == "full folder":
                (path / "file").write_text("text")
        case "link to a pipe":
            if not (tree / "pipe").exists():  # of the first of several paths
                os.mkfifo(tree / "pipe")
            path.symlink_to(tree / "pipe")
        case "link to a folder":
            (tree / "folder").mkdir(exist_ok=True)
            path.symlink_to(tree / "folder")
        case "link to nothing":
            path.symlink_to(tree / "nothing")
        case "link to itself":
            path.symlink_to(path.name)
        case _:
            path.symlink_to(form.removeprefix("link to "))


def _bind(path: Path) -> None:
    """A socket's address has 107 bytes at most."""
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


KIND = Kind("no file in a file's place", _CASES, lay, in_ci=16)
