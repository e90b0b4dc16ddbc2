"""Sweeps: lists, ranges and globs, most of them far too long to be listed; they are counted, and refused at once.

At most 6 runs are taken, for each of which Hydra composes a configuration.
"""

from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.judge import Command, Kind, World

_SCRIPT = Path(__file__).with_name("listed.py")
_NUMBERS = st.one_of(
    st.sampled_from(("0", "1", "-1", "2", "3", "0.1", "1e-9", "1e9", "1e300", "1000000000000", "inf", "-inf", "nan",
    "0.0",
                     "10000", "10001", "9223372036854775808", "1e-320", "x", "", "'3'", "null")),
    st.integers(-(10**15), 10**15).map(str),
)  # fmt: skip
_RANGES = st.lists(_NUMBERS, min_size=0, max_size=4).map(lambda numbers: f"range({','.join(numbers)})")
_LISTS = st.one_of(
    st.integers(1, 20_000).map(lambda n: ",".join(map(str, range(n)))),
    st.sampled_from((3, 500, 9_999)).map(lambda n: f"choice({','.join(map(str, range(n)))})"),
    st.sampled_from((1, 2, 9_999)).map(lambda n: ",".join(["1"] * n)),
    st.sampled_from(("1,", ",", "choice()", "choice(1)", "choice(range(3))", "glob(*)", "glob([*])",
    "glob(*,exclude=*)",
                     "interval(0,1)", "interval(1,0)", "int(range(0,2.5))", "float(range(3))", "str(range(3))", "1,[2]",
                     "[1,2],[3]", "{a:1},{a:2}", "range(range(3))", "sort(glob(*))", "tag(a,range(3))",
                     "extend_list(1)",
                     "bool(range(2))", "range(0,3),range(0,3)", "${seed},2", "[" * 2000)),
)  # fmt: skip
_VALUES = st.one_of(
    _RANGES,
    _RANGES,
    _LISTS,
    st.sampled_from(("1", "2,3", "range(3)", "shuffle(range(1,4))", "choice(5,6)")),
    st.builds("{}({})".format, st.sampled_from(("shuffle", "sort", "tag", "int", "float", "str")), st.one_of(_RANGES,
    _LISTS)),
    st.builds("sort({},reverse={})".format, _RANGES, st.sampled_from(("true", "1", "x"))),
    st.builds("{}({},start=0,stop={})".format, st.just("range"), st.just("0"), _NUMBERS),
)  # fmt: skip
_KEYS = st.sampled_from(("seed", "train.lr", "train.steps", "attn", "attn.beta", "run_name", "attn.layers", "model",
                         "data.path", "+new", "hydra.job.name", "hydra.verbose"))  # fmt: skip
_CASES = st.tuples(
    st.lists(st.builds("{}={}".format, _KEYS, _VALUES), min_size=1, max_size=3),
    st.sampled_from((("-m",), ("-m",), ("-m",), (), ("hydra.mode=MULTIRUN",))),
    st.sampled_from((None, "seed", "train.lr")),
)


def lay(tree: Path, case: tuple[list[str], tuple[str, ...], str | None]) -> Command:
    overrides, flags, swept = case
    more = (f"++hydra.sweeper.params.{swept}='range(0,1000000000000)'",) if swept else ()
    arguments = tuple(override[: 2**16] for override in (*overrides, *more))
    (tree / "work/runs").mkdir()
    return Command(
        _SCRIPT,
        ("experiment=laptop", "tracking=disabled", *flags, *arguments),
        may_write=("work/runs",),
        notices=("failed: ", "run "),
        world=World(memory_mib=1500),
    )


KIND = Kind("lists of sweeps", _CASES, lay, in_ci=10)
