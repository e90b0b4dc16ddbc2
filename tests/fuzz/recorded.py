"""A working folder with recorded runs, made once, and the verbs that read them."""

import dataclasses
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from hypothesis import strategies as st

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.delta_bias import delta_sample
from flashpoint.diagnosis.form import Form
from flashpoint.lab.cli.composition import composed_values
from flashpoint.watching import delta_collection
from tests.conftest import SOME_TEXT, TINY
from tests.fuzz.judge import Command, run
from tests.fuzz.verb import COMPOSED

SCRIPT = Path(__file__).parent / "verb.py"
QUESTIONS = ("outcomes", "rates", "hottest", "recovery", "warnings", "overhead")
ROWS = ("head", "layer", "attention", "weights", "targets", "time")
READING = (
    *(("runs", "original", "whole", "--show", question) for question in QUESTIONS),
    ("runs", "small:*", "whole"),
    ("survival", "original", "small:*", "--severity", "--control", "flash_bf16"),
    ("survival", "original", "stopped", "--by", "train.lr"),
    ("survival", "original", "--paired", "small:original"),
    ("loss", "original", "small:*"),
    ("series", "original", "loss", "grad_norm"),
    ("series", "small:original", "w_q_spectral_norm", "--head", "1/1"),
    ("series", "original", "whole", "--departures", "w_q_spectral_norm"),
    *(("delta", "original", "whole", "--by", kind) for kind in ROWS),
    ("delta", "small:original", "--by", "layer", "--metric", "score_max"),
    ("weights", "original", "whole"),
    ("compare", "original", "small:original"),
    ("watch", "original", "--once"),
    ("archive", "original", "again"),
    ("claims", "--file", "claims.yaml"),
    ("localize", "original", "--steps", "10"),
    ("diagnose", "captures"),
)
TRAINING = (
    ("train", "resume=original", "train.steps=18"),
    ("train", "resume=original", "train.steps=18", "checkpoints.interval=3"),
    ("train", "replay=original", "run_name=new"),
    ("train", "replay=original", "from_step=7", "attn=flash_fp32", "run_name=new"),
)
VERBS = st.one_of(st.sampled_from(READING), st.sampled_from(TRAINING))
NOTICES = (
    "no GPU",
    "attention: ",
    "not the tape's",
    "differs from",
    "runs/",
    "from_step=",
    "error: ",
    "tokenising",
)
CLAIMS = """
version: 1
claims:
  - {id: one, source: ours, claim: It holds., scale: small, runs: [original], criterion: {kind: holds, steps: 5}}
"""


@cache
def base() -> Path:
    """A tree whose ``work`` holds a text, its tokens, three runs, the first of them also in the evidence tables."""
    tree = Path(tempfile.mkdtemp(prefix="flashpoint-fuzz-"))
    work = tree / "work"
    for name in ("work", "home"):
        (tree / name).mkdir()
    (work / "words.txt").write_text(SOME_TEXT)
    (work / "claims.yaml").write_text(CLAIMS)
    train = Path(__file__).parents[2] / "train.py"
    # An absolute path, so that the copies find the tokens that were made of it.
    settings = (
        f"data.path={work}/words.txt",
        "checkpoints.interval=6",
        "probes.attention_interval=3",
        "attn=flash_bf16",
    )
    for script, *arguments in (
        (train, *TINY, *settings, "run_name=original"),
        (train, *TINY, *settings, "run_name=whole", "seed=1"),
        (SCRIPT, "archive", "original", "small"),
    ):
        ending = run(Command(script, tuple(map(str, arguments)), warm=True, seconds=120), tree)
        assert ending.status == 0, ending.err
    shutil.copytree(work / "runs/original", work / "runs/stopped")
    (work / "runs/stopped/outcome.json").unlink()
    q, k, v, grad_out = (torch.randn(2, 2, 32, 16, generator=torch.Generator().manual_seed(at)) for at in range(4))
    (work / "captures").mkdir()
    captured = AttentionCall(q, k, v, grad_out, Form(True, 0.25), 1, 0, "mine")
    captured.write(work / "captures/layer-01.safetensors")
    sample = delta_sample(dataclasses.replace(captured, out=v, grad_q=q))
    delta_collection.append(work / "captures/delta.jsonl", 1, {1: sample})
    branch = {"key": "k", "outcome": "stable", "norms": [[1.0, 2.0], [3.0, 4.0]]}
    (work / "runs/original/localize.jsonl").write_text(json.dumps(branch) + "\n")
    composed = {" ".join(overrides): composed_values(overrides) for _, *overrides in TRAINING}
    (tree / COMPOSED).write_text(json.dumps(composed))
    return tree


def lay(tree: Path) -> Path:
    """Copy it; return the working folder."""
    shutil.copytree(base() / "work", tree / "work", dirs_exist_ok=True)
    shutil.copy(base() / COMPOSED, tree)
    return tree / "work"


def command(verb: tuple[str, ...]) -> Command:
    """What may change: the lock of a run that would go on, the folder of a new one, and tables that take one."""
    may = {"train": ("work/runs/original/.lock", "work/runs/new", "work/data"), "archive": ("work/runs/reference",)}
    return Command(SCRIPT, verb, may_write=may.get(verb[0], ()), notices=NOTICES, warm=True)
