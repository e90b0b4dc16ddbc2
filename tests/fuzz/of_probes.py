"""Probes of the user's own that raise, return the wrong thing, or hold what cannot be stored."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.judge import Command, Kind

_SCRIPT = Path(__file__).parent / "probed.py"
_GOOD = "seen.w_q[..., 0, 0]"
_EXPRESSIONS = st.one_of(
    st.sampled_from(
        (
            "None",
            "0.5",
            "float('nan')",
            "[]",
            "{}",
            "()",
            "object()",
            "lambda: 0",
            "print",
            "b'bytes'",
            "range(3)",
            "torch",
            "1 / 0",
            "exit()",
            "exit('gone')",
            "seen.nothing",
            "seen[0]",
            "int('x')",
            "[][1]",
            "{}['k']",
            "next(iter(()))",
            "(_ for _ in ()).throw(BrokenPipeError)",
            "(_ for _ in ()).throw(Odd())",
            "(_ for _ in ()).throw(GeneratorExit)",
            "(_ for _ in ()).throw(ExceptionGroup('g', [OSError(28)]))",
            "self.again()",
            "bytes(10**15)",
            "torch.zeros(10**9, 10**9)",
            _GOOD,
            f"{_GOOD}.bool()",
            f"{_GOOD}.int()",
            f"{_GOOD}.half()",
            f"{_GOOD} * 1j",
            f"{_GOOD}.to_sparse()",
            f"{_GOOD}.numpy()",
            f"{_GOOD}.to('meta')",
            f"{_GOOD}.requires_grad_()",
            f"{_GOOD}.tolist()",
            f"{_GOOD}[0]",
            f"{_GOOD}[None]",
            f"{_GOOD}.mT[:1]",
            f"{_GOOD} * float('nan')",
            f"{_GOOD}.double() * 1e308 * 10",
            "torch.nn.Parameter(seen.w_q[..., 0, 0])",
            "seen.x",
            "seen.probs",
            "torch.quantize_per_tensor(torch.zeros(2, 2), 1.0, 0, torch.qint8)",
            "seen.q.mul_(0)[..., 0, 0, 0].mean(1)",
            "torch.empty(2, 2, dtype=torch.uint64)",
            "torch.tensor('x')",
            "raising",
            "os.chdir('/')",
            f"os.chdir('..') or {_GOOD}",
            "os.fork()",
            f"os.fork() * 0 + {_GOOD}",
            "os.fork() and {}['k']",
            "os.fork() or exit()",
        )
    ),
    st.integers().map(repr),
    st.text(max_size=6).map(ascii),
    st.lists(st.none() | st.floats(), max_size=3).map(repr),
)
_KEYS = st.one_of(
    st.sampled_from(
        (
            "'a'",
            "'loss'",
            "'step'",
            "'w_q_spectral_norm'",
            "'tied_rows'",
            "'a/b'",
            "None",
            "1",
            "''",
            "'\\ud800'",
            "'a\\nb'",
            "[]",
            "object()",
        )
    ),
    st.text(max_size=4).map(ascii),
)
_MEASURES = st.one_of(
    _EXPRESSIONS,
    st.builds("{{{}: {}}}".format, _KEYS, _EXPRESSIONS),
    st.builds("{{'a': {}}}".format, _EXPRESSIONS),
    st.just(f"{{'a': {_GOOD}}}"),
)
_STATES = st.one_of(
    st.just("{}"),
    _EXPRESSIONS,
    st.builds("{{{}: {}}}".format, _KEYS, _EXPRESSIONS),
    st.builds("{{'a': [{}]}}".format, _EXPRESSIONS),
    st.sampled_from(("round_and_round", "{'a': 10 ** 5000}", "{'a': 'x' * 10 ** 8}", "{'a': '\\ud800'}", "deep")),
)
_CASES = st.tuples(
    _MEASURES,
    _STATES,
    _EXPRESSIONS,
    st.sampled_from(("pass", "pass", "pass", "1 / 0", "exit()", "self.x")),
    st.sampled_from(
        (
            "",
            "",
            "",
            "",
            "import nothing",
            "1 / 0",
            "def",
            "exit(0)",
            "\0",
            "del Own",
            "Own = 3",
            "Own = object",
            "os.chdir('/')",
            "os.fork()",
        )
    ),
    st.sampled_from(("Own", "Own", "Own", "Own", "Nothing", "torch", "Odd", "__name__", "")),
)
_FILE = """
import os
import torch
from flashpoint.lab.probes.attention import Probe

round_and_round = {}
round_and_round["a"] = round_and_round
deep = {}
for _ in range(5000):
    deep = {"a": deep}
raising = type("Raising", (dict,), {"items": lambda self: 1 / 0})()

class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class Own(Probe):
    def __init__(self):
        {init}

    def again(self):
        return self.again()

    def measure(self, seen):
        return {measure}

    def state(self):
        return {state}

    def load_state(self, state):
        {load}

{end}
"""


def lay(tree: Path, case: tuple[Any, ...]) -> Command:
    measure, state, load, init, end, name = case
    parts = {"measure": measure, "state": state, "load": load, "init": init, "end": end}
    text = _FILE
    for part, code in parts.items():
        text = text.replace(f"{{{part}}}", code)
    (tree / "work" / "own.py").write_bytes(text.encode(errors="replace"))
    return Command(_SCRIPT, (f"own.py:{name}",), warm=True)


KIND = Kind("own probes", _CASES, lay, in_ci=14)
