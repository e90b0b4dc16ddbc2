"""YAML of the user's own: one to three files in a folder that ``--config-dir`` names, of which one is chosen."""

from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from tests.fuzz.judge import Command, Kind
from tests.fuzz.of_options import KEYS

_SCRIPT = Path(__file__).with_name("train.py")
_SECTIONS = (
    "attn", "model", "data", "optimizer", "train", "detector", "probes", "checkpoints", "tracking", "hydra", "defaults",
)  # fmt: skip
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=12),
    st.sampled_from((
        "nearest", "flash_fp32", "${name}", "${nothing}", "${oc.env:HOME}", "???", "../../evil", "laptop", "_self_",
        "x", "b", "../x", "override /model: ignite", "x@_here_", "", "null", "no", "1e3", "2024-01-01", "!!int x",
    )),
)  # fmt: skip
_NAMES = st.one_of(
    st.sampled_from([key.rpartition(".")[2] for key in KEYS]),
    st.sampled_from(_SECTIONS),
    st.sampled_from(("name", "scores", "mode", "bits", "beta", "layers", "heads", "elsewhere", "delta_error", "run")),
    st.text(max_size=8),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inside: st.one_of(st.lists(inside, max_size=3), st.dictionaries(_NAMES, inside, max_size=3)),
    max_leaves=8,
)
_DEFAULTS = st.lists(
    st.one_of(
        _VALUES,
        st.sampled_from(("x", "b", "_self_", "nothing", "/attn/x", "../attn/x", "flash_bf16", "laptop")),
        st.dictionaries(
            st.sampled_from(("override /model", "override /attn", "/attn@_global_", "optional x", "/data")),
            st.one_of(st.sampled_from(("laptop", "x", "nothing", "flash_fp32", "text", "null")), _VALUES),
            max_size=2,
        ),
    ),
    max_size=3,
)  # fmt: skip
_BAD_TEXTS = st.sampled_from(
    (
        b"", b"\xff\xfe", b"name: \xff", b"\x00", b"\xef\xbb\xbfname: x", b"name: [1\n  - :", b"{" * 400, b"[" * 5000,
        b"name: x\nname: y", b"name: x\n\tbeta: 3", b"--- \nname: x\n---\nname: y", b"&a name: *a", b"a: &a {b: *a}",
        b"a: &a [*a]", b"? {a: 1}\n: x", b"? [a]\n: x", b"<<: {name: x}", b"<<: *x", b"- x\n- y", b"3", b"null",
        b"name: !!python/object/apply:os.system [touch ../evil]", b"name: !!binary x", b"name: !nothing x", b"%YAML 9",
        b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
        b"d: &d [*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e]",
        b"# @package nothing\nname: x", b"# @package _global_.a.b\nname: x", b"# @package\nname: x", b"#" * 300_000,
        b"# @package _global_\nhydra: {callbacks: {x: {_target_: os.mkdir, path: ../evil}}}",
        b"# @package hydra.callbacks.x\n_target_: os.mkdir\npath: ../evil",
        b"# @package _global_\n<<: {hydra: {launcher: {_target_: os.mkdir, path: ../evil}}}",
        b"defaults: [/attn/x@hydra.callbacks.x]\n_target_: os.mkdir\npath: ../evil",
        b"name: x\n" + b"beta: 3\n" * 2, b"1: 2", b"true: 2", b"null: 2", b"1.5: 2", b"name: |\n  a\n  b", b"'name': x",
    )
)  # fmt: skip
_MAPPINGS = st.dictionaries(_NAMES, _VALUES, max_size=4)


def _written(values: Any, header: str) -> bytes:
    return (header + yaml.safe_dump(values, allow_unicode=True)).encode(errors="replace")


_CONTENTS = st.one_of(
    _BAD_TEXTS,
    st.binary(max_size=40),
    st.text(max_size=40).map(lambda text: text.encode(errors="replace")),
    st.builds(_written, _MAPPINGS, st.sampled_from(("", "", "# @package _global_\n"))),
    st.builds(
        lambda values, defaults, header: _written({"defaults": defaults, **values}, header),
        _MAPPINGS,
        st.one_of(_DEFAULTS, _VALUES),
        st.sampled_from(("", "# @package _global_\n")),
    ),
    st.builds(
        lambda section, values: _written({section: values}, "# @package _global_\n"),
        st.sampled_from((*_SECTIONS, "seed", "run_name", "runs_dir")),
        st.one_of(_MAPPINGS, _VALUES),
    ),
)
_CASES = st.tuples(
    st.sampled_from(("attn", "experiment", "model", "data", "optimizer", "tracking", "hydra/launcher", "primary")),
    _CONTENTS,
    st.one_of(st.none(), st.none(), _CONTENTS),
    st.sampled_from(("file", "file", "file", "file", "file", "folder", "unreadable", "dangling", "to itself")),
)


def lay(tree: Path, case: tuple[str, bytes, bytes | None, str]) -> Command:
    """``x.yaml`` of a group, and ``b.yaml`` beside it, which it may name."""
    group, content, beside, form = case
    folder = tree / "mine" / ("" if group == "primary" else group)
    folder.mkdir(parents=True)
    path = folder / "x.yaml"
    match form:
        case "folder":
            path.mkdir()
        case "dangling":
            path.symlink_to("nothing")
        case "to itself":
            path.symlink_to("x.yaml")
        case _:
            path.write_bytes(content)
            path.chmod(0 if form == "unreadable" else 0o644)
    if beside is not None:
        (folder / "b.yaml").write_bytes(beside)
    chosen = ("-cn", "x") if group == "primary" else (f"{group}=x",)
    overrides, flags = (chosen, ()) if group != "primary" else ((), chosen)
    base = () if group in ("experiment", "primary") else ("experiment=laptop",)
    arguments = (*base, "tracking.wandb=disabled", *overrides, "--config-dir", "../mine", *flags)
    by_code = ("evil",) if group == "hydra/launcher" else ()  # a launcher that a command line chooses is code
    return Command(_SCRIPT, arguments, may_write=("work/runs", *by_code))


KIND = Kind("YAML of the user's own", _CASES, lay, in_ci=18)
