"""Languages: Python without UTF-8, outputs of other encodings, and names and texts in any script."""

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.judge import Command, Kind, World
from tests.fuzz.of_no_files import ALONE, READERS
from tests.fuzz.recorded import NOTICES, SCRIPT, TRAINING
from tests.fuzz.recorded import lay as laid

_LANGUAGES = st.sampled_from(("C", "C", "C", "C.UTF-8"))
_ENCODINGS = st.sampled_from((None, None, "ascii", "latin-1", "cp1252", "utf-8", "koi8-r"))
_TEXTS = st.one_of(
    st.sampled_from(
        ("é", "名前", "😀", "Ω", "ß", "שלום", "a\u0301", "\u202ex", "x\u200b", "ı", "\udce9", "\ufeffx", "–")
    ),
    st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cc", "Cs")), min_size=1, max_size=6),
)
_WHERE = st.sampled_from(("run", "attention", "manifest", "metric", "claim", "log", "yaml", "words", "branch", "none"))
_VERBS = st.one_of(*[st.sampled_from((*READERS, ("claims", "--file", "claims.yaml"), ("runs", "log.csv")))] * 9,
                   st.sampled_from((*TRAINING, *ALONE["mine.yaml"], ("train", "--help"), ("train",
                   "help=all"))))  # fmt: skip
_CASES = st.tuples(_LANGUAGES, _ENCODINGS, _WHERE, _TEXTS, _VERBS)


def lay(tree: Path, case: tuple[str, str | None, str, str, tuple[str, ...]]) -> Command:
    language, encoding, where, text, verb = case
    work = laid(tree)
    run = work / "runs/original"
    bytes_ = text.encode(errors="surrogateescape")
    told = json.dumps(text.encode(errors="replace").decode())
    (work / "log.csv").write_text("step,loss\n" + "".join(f"{step},{5 - step / 99}\n" for step in range(99)))
    may: tuple[str, ...] = ("work/runs/original/.lock", "work/runs/new", "work/data")
    match where:
        case "run":
            named = run.parent / bytes_.decode(errors="surrogateescape")
            if not named.exists():
                run.rename(named)
                verb = tuple(named.name if word == "original" else word for word in verb)
                may = (*may, f"work/runs/{bytes_.decode(errors='backslashreplace')}")
        case "attention" | "manifest":
            file, keys = {"attention": ("config.json", ("attn", "name")), "manifest": ("manifest.json", ("hardware",))}[
                where
            ]
            _set(run / file, keys, json.loads(told))
        case "metric":
            (run / "metrics.jsonl").open("ab").write(b'{"step": 99, %s: 1.5}\n' % told.encode())
        case "claim":
            (work / "claims.yaml").write_bytes((work / "claims.yaml").read_bytes().replace(b"It holds.", bytes_))
        case "log":
            (work / "log.csv").write_bytes(b"step,loss,%s\n1,2,3\n2,3,%s\n" % (bytes_, bytes_))
        case "yaml":
            (work / "attn").mkdir()
            (work / "attn/mine.yaml").write_bytes(b"name: %s\n" % told.encode())
        case "words":
            (work / "words.txt").write_bytes(b"%s and more words " % bytes_ * 300)
        case "branch":
            line = f'{{"key": {told}, "outcome": "stable", "norms": [[1.0]]}}\n'
            (run / "localize.jsonl").write_text(line)
    world = World(language=language, encoding=encoding)
    return Command(SCRIPT, verb, may_write=may, notices=NOTICES, warm=True, world=world)


def _set(path: Path, keys: tuple[str, ...], value: Any) -> None:
    values = json.loads(path.read_text())
    inside = values
    for key in keys[:-1]:
        inside = inside[key]
    inside[keys[-1]] = value
    path.write_text(json.dumps(values))


KIND = Kind("languages", _CASES, lay, in_ci=12)
