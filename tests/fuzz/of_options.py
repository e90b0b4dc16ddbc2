"""Options: one to four overrides or flags of ``flashpoint train``, most of them bad."""

import os
from pathlib import Path

from hypothesis import strategies as st

from flashpoint.lab.build_config import keys
from tests.fuzz.judge import Command, Kind

_SCRIPT = Path(__file__).with_name("train.py")
_GROUPS = (
    "attn", "model", "data", "optimizer", "tracking", "experiment", "hydra/launcher", "hydra/sweeper",
    "hydra/job_logging",
)  # fmt: skip
_OF_ATTENTION = (
    "scores", "scores.mode", "scores.bits", "out.bits", "name", "kernel", "shift", "beta", "max_shift",
    "tie_tolerance", "gamma",
    "block_k", "layers", "heads", "elsewhere", "delta", "delta_error", "delta_error.kind", "delta_error.size",
    "delta_error.layers", "delta_error.trajectory", "delta_error.interval", "denominator_floor", "normalizer",
)  # fmt: skip
_OF_HYDRA = (
    "hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.chdir", "hydra.mode",
    "hydra.job.name", "hydra.launcher.sweep", "hydra.launcher.runs_per_gpu", "hydra.searchpath", "hydra.verbose",
    "hydra.launcher", "hydra.callbacks", "hydra", "hydra.job.config.override_dirname.kv_sep", "hydra.job.env_set",
)  # fmt: skip
KEYS = (*(key.name for key in keys()), *(f"attn.{name}" for name in _OF_ATTENTION), "attn")
_FOLDERS = ("runs_dir", "hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir")
_SECTIONS = ("model", "data", "optimizer", "train", "detector", "probes", "checkpoints", "tracking", "attn")

_NUMBERS = st.one_of(
    st.sampled_from((0, -1, 1, 2, 3, 7, 64, 257, 65536, 2**31, 2**32, 2**63, 2**64, 10**12, 10**30, -(10**18))),
    st.integers(-(10**20), 10**20),
)
_REALS = st.one_of(
    st.sampled_from(("nan", "inf", "-inf", ".nan", "1e300", "1e-300", "-0.0", "0.5", "1e400", "5e-324", "1.5")),
    st.floats(allow_nan=True, allow_infinity=True).map(str),
)
_PATHS = st.sampled_from(
    (
        ".", "..", "../x", "a/b", "/", "/dev/null", "/dev/full", "/proc/self", "~", "-x", "--x", "reference", "old",
        "file", "runs", "runs/old", "x" * 300, "a" * 5000, ".hidden", "NUL", "'a b'", "'a\\tb'", "é", "名前", "😀",
        "$HOME", "${runs_dir}", "${oc.env:HOME}", "${oc.env:NONE}", "../../evil", "old/..", "a//b", "a/", " ", "' '",
    )
)  # fmt: skip
_WORDS = st.one_of(
    st.sampled_from(
        (
            "", "null", "true", "false", "'null'", "''", '""', "[]", "{}", "[1,2]", "[a,a]", "{a: 1}", "[[1],[2]]",
            "[null]", "{steps: 3}", "{mode: nearest}", "???", "'???'", "${seed}", "${nothing}", "${train.steps}",
            "${attn}", "${", "[", "]", "{", "}", "'", '"', ",", ":", "a,b", "1,2", "range(0)", "range(3)", "glob(*)",
            "choice()", "interval(0,1)", "[ties,ties]", "[nothing]", "[x.py:A]", "laptop", "ignite", "gpt2_124m",
            "flash_bf16", "flash_fixed", "sdpa", "cpu", "cuda", "auto", "text", "gpt2", "fp16", "bf16", "online",
            "1_000", "0x10", "1.0", "=", "a=b", "\\", "%", "#", "!!python/object:x", "&a", "*a",
        )
    ),
    st.text(max_size=20),
)  # fmt: skip
_VALUES = st.one_of(_NUMBERS.map(str), _REALS, _PATHS, _WORDS)


def _set(key: str, value: str) -> str:
    return f"{key}={value}"


_OVERRIDES = st.one_of(
    st.builds(_set, st.sampled_from(KEYS), _VALUES),
    st.builds(_set, st.sampled_from(KEYS), _VALUES),
    st.builds(_set, st.sampled_from(_GROUPS), _VALUES),
    st.builds(_set, st.sampled_from(_OF_HYDRA), _VALUES),
    st.builds("{}{}".format, st.sampled_from(("~", "+", "++", "~+")), st.sampled_from((*KEYS, *_GROUPS, *_SECTIONS))),
    st.builds(
        "{}{}={}".format,
        st.sampled_from(("~", "+", "++")),
        st.sampled_from((*KEYS, *_GROUPS, *_SECTIONS, "new", "train.new")),
        _VALUES,
    ),
    st.builds(_set, st.sampled_from(("run_name", "runs_dir", "data.root", "attn.name", "replay", "resume")), _PATHS),
    st.builds(
        _set, st.sampled_from(("seed", "train.lr", "attn", "model", "run_name")), st.sampled_from(("1,2", "a,b"))
    ),
    st.text(min_size=1, max_size=12).filter(lambda text: not text.startswith("-")),
)
_FLAGS = st.one_of(
    st.sampled_from(
        (
            ("-m",), ("-m",), ("-m",), ("-c", "job"), ("-c", "nothing"), ("-c",), ("-cn", "nothing"), ("-cn",),
            ("-cd", "nothing"), ("-cd", "file"), ("-cd", "."), ("-cp", "x"), ("-p", "x"), ("--nothing",), ("-x",),
            ("--resolve",), ("--package", "_global_"), ("--hydra-help",), ("--info", "nothing"), ("--info", "all"),
            ("--experimental-rerun", "nothing"), ("--run",), ("--shell-completion",), ("--",),
        )
    )
)  # fmt: skip


@st.composite
def _cases(draw: st.DrawFn) -> tuple[str, ...]:
    """Arguments that an operating system can pass."""
    arguments = draw(st.lists(_OVERRIDES, min_size=1, max_size=3))
    if draw(st.integers(0, 3)) == 0:
        arguments += draw(_FLAGS)
    if draw(st.booleans()):
        arguments = ["experiment=laptop", "tracking=disabled", *arguments]
    return tuple(argument.replace("\0", "") for argument in arguments)


def lay(tree: Path, arguments: tuple[str, ...]) -> Command:
    work = tree / "work"
    (work / "file").write_text("text")
    for name in ("old", "reference"):
        (work / "runs" / name).mkdir(parents=True)
    (work / "runs/old/config.json").write_text("{}")
    return Command(_SCRIPT, arguments, may_write=_named(arguments), notices=("failed: ",))


def _named(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """What may be written: ``runs``, and the folders that options name."""
    options = (argument.lstrip("+").partition("=") for argument in arguments)
    folders = [value.strip("'\"") for key, _, value in options if key in _FOLDERS]
    return ("work/runs", *(os.path.normpath(f"work/{folder}") for folder in folders if folder))


KIND = Kind("options", st.deferred(_cases), lay, in_ci=24)
