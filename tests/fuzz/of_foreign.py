"""Runs, captures, logs and tables from somebody else, with code of theirs where a name, a text or tensors belong: what
this command line does not name is not executed."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz.judge import CANARY, Command, Kind
from tests.fuzz.of_no_files import ALONE
from tests.fuzz.recorded import NOTICES, READING, SCRIPT, TRAINING
from tests.fuzz.recorded import lay as laid

_RUN = "runs/original"
_NAMES = ("own.py:Own", "./own.py:Own", "{work}/own.py:Own", "runs/original/own.py:Own", "../work/own.py:Own",
"own:Own",
          "own.py:Own.nested", "{work}/own.pyc:Own", "~/own.py:Own", "file://{work}/own.py:Own", "package/:Own",
          "own.py", "os:system", "ties,own.py:Own")  # fmt: skip
_TEXTS = ("!!python/object/apply:os.system ['touch {canary}']", "${oc.env:HOME}", "$(touch {canary})",
"; touch {canary}",
          "| touch {canary}", "`touch {canary}`", "{{ 1 }}", "__import__('os').system('touch {canary}')",
          "own.py:f", "own:f", "own:f@bthd", "{work}/own.py:f", "{work}/own.py")  # fmt: skip
_TARGETS: tuple[Any, ...] = (
    {"_target_": "os.system", "command": "touch {canary}"},
    {"_target_": "own.Own"},
    [{"_target_": "builtins.exec", "_args_": ["open('{canary}', 'w')"]}],
)
_KEYS = ("attn.kernel", "attn.name", "attn.delta", "model.name", "data.source", "data.path", "data.packages",
"run_name",
         "tracking.project", "tracking.tags", "probes.weights_against", "experiment", "train.precision", "hydra",
         "_target_", "functions", "attention", "probes.run", "defaults", "train.device", "replay",
         "resume")  # fmt: skip
_PICKLED = ("captures/layer-01.safetensors", "captures/batch.pt", "captures/delta.jsonl", "log.csv", "log.txt",
            "trainer_state.json", "events.out.tfevents.1", "run-a.wandb", "claims.yaml", "inputs.safetensors",
            *(f"{_RUN}/{name}" for name in ("metrics.jsonl", "tape.bin", "chain.bin", "config.json", "manifest.json",
              "checkpoints/step-000000012.safetensors", "checkpoints/step-000000012.json", "localize.jsonl")),
            *(f"runs/reference/{name}" for name in ("runs.parquet", "metrics/small.parquet")),
            "data/*/tokenizer.json", "data/*/meta.json", "data/*/train.bin")  # fmt: skip
_BESIDE = ("sitecustomize.py", "conftest.py", "hydra_plugins/own.py", ".env", "numpy.py", "yaml.py", "setup.cfg",
           "configs/train.yaml", "matplotlibrc", "usercustomize.py", "wandb.py", "flashpoint.py")  # fmt: skip
_REPLAYS = (*TRAINING, ("train", "replay=original", "run_name=new", "train.steps=3"),
            ("localize", "original", "--steps", "3"))  # fmt: skip
_CASES = st.one_of(
    st.tuples(st.just("probe"), st.sampled_from(_NAMES), st.just(""), st.sampled_from(_REPLAYS)),
    st.tuples(st.just("text"), st.sampled_from(_KEYS), st.sampled_from((*_TEXTS, *map(json.dumps, _TARGETS))),
              st.one_of(st.sampled_from(READING), st.sampled_from(READING), st.sampled_from(_REPLAYS))),
    st.tuples(st.just("pickle"), st.sampled_from(_PICKLED), st.sampled_from(("pickle", "torch", "numpy", "joblib",
    "zip")),
              st.one_of(st.sampled_from(READING), st.sampled_from(READING), st.sampled_from(READING),
              st.sampled_from(_REPLAYS))),
    st.tuples(st.just("beside"), st.sampled_from(_BESIDE), st.sampled_from(("work", "work/runs/original",
    "work/captures")),
              st.sampled_from(READING)),
    st.tuples(st.just("table"), st.sampled_from(("runs", "metrics/small", "chains/small")),
              st.sampled_from(("arrow.py_extension_type", "pandas", "ARROW:schema")), st.sampled_from(READING)),
)  # fmt: skip


def lay(tree: Path, case: tuple[str, str, Any, tuple[str, ...]]) -> Command:
    what, where, how, verb = case
    work = laid(tree)
    told = {"work": str(work), "canary": str(tree / CANARY)}
    code = _code(tree)
    for folder in (work, work / _RUN, tree / "home", work / "package"):
        folder.mkdir(exist_ok=True)
        (folder / "own.py").write_text(code)
    shutil.copy(work / "own.py", work / "package/__init__.py")
    match what:
        case "probe":
            _set(work / _RUN / "config.json", "probes.attention", where.format(**told).split(","))
        case "text":
            text = how.replace("{canary}", told["canary"]).replace("{work}", told["work"])
            value = json.loads(text) if how.startswith(('{"', "[{")) else text
            _set(work / _RUN / "config.json", where, value)
        case "pickle":
            for path in sorted(work.glob(where)) or [work / where]:
                path.parent.mkdir(exist_ok=True)
                _write_pickle(path, how, told["canary"])
            if where in ALONE:
                verb = ALONE[where][0]
        case "beside":
            path = tree / how / where
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
        case "table":
            _mark(work / f"runs/reference/{where}.parquet", how, told["canary"])
    may = {"train": ("work/runs/new", f"work/{_RUN}/.lock", "work/data"), "archive": ("work/runs/reference",),
           "localize": (f"work/{_RUN}",)}  # fmt: skip
    verb = tuple(word for word in verb if word not in {"own.py:f", "--attention"})
    return Command(SCRIPT, verb, may_write=may.get(verb[0], ()), notices=(*NOTICES, "probes."), warm=True)


def _code(tree: Path) -> str:
    """Return a module that is a probe, an attention and a plug-in, and leaves its mark as soon as it is imported."""
    return (
        f"open({str(tree / CANARY)!r}, 'w').close()\n"
        "import torch\nfrom flashpoint.lab.probes.attention import Probe\n"
        "class Own(Probe):\n    def measure(self, seen):\n        return {}\n"
        "def f(q, k, v, **_):\n    return torch.nn.functional.scaled_dot_product_attention(q, k, v)\n"
    )


def _set(path: Path, key: str, value: Any) -> None:
    values = json.loads(path.read_text())
    *sections, name = key.split(".")
    inside = values
    for section in sections:
        inside = inside.setdefault(section, {})
    inside[name] = value
    path.write_text(json.dumps(values))


class _Touching:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def _write_pickle(path: Path, how: str, canary: str) -> None:
    import numpy as np
    import torch

    path.unlink(missing_ok=True)
    marked = _Touching(canary)
    match how:
        case "torch":
            torch.save({"q": marked}, path)
        case "zip":
            torch.save(marked, path, _use_new_zipfile_serialization=False)
        case "numpy":
            with path.open("wb") as file:
                np.save(file, np.array([marked], object), allow_pickle=True)
        case _:
            path.write_bytes(pickle.dumps(marked, protocol=0 if how == "joblib" else 4))


def _mark(path: Path, how: str, canary: str) -> None:
    """Give a table a type that old versions of Arrow unpickle, or metadata that other readers evaluate."""
    table = pq.read_table(path)
    code = pickle.dumps(_Touching(canary), protocol=0)
    marked = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": code}
    field = table.schema.field(0)
    metadata = {how: code, "pandas": code}
    schema = table.schema.set(0, field.with_metadata(marked)).with_metadata(metadata)
    pq.write_table(pa.table(table.columns, schema=schema), path)


KIND = Kind("foreign runs", _CASES, lay, in_ci=14)
