"""Calls of attention: where functions are called that a user names, and what a call is given and gives."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor

from flashpoint.errors import UserError

_WITHOUT_ATTENTION = {"mpmath", "numpy", "scipy", "sympy"}
"""Packages that import no attention, and have a third of the names in a process."""
_NAMES = (("q", "query"), ("k", "key"), ("v", "value"))


class NoMask:
    """An argument of a named function that holds no mask, whatever it is."""


@dataclass(frozen=True)
class NamedFunction:
    """A function to intercept, as an attribute of its module: ``MODULE:NAME``, ``flash_attn:flash_attn_func@bthd``.

    It is called by a name in its or another module, with q, k, v first: [B, H, T, d], or after ``@bthd`` [B, T, H, d],
    also of sequences in a row [T, H, d].
    """

    word: str
    owner: Any
    name: str
    by_token: bool

    @classmethod
    def of(cls, word: str) -> NamedFunction:
        """Find the function that a word names.

        Raises:
            UserError: it is not there.
        """
        path, _, layout = str(word).partition("@")
        module, _, name = path.partition(":")
        if layout not in ("", "bthd") or not (module and name):
            raise UserError(f"functions={word}: give MODULE:NAME, or MODULE:NAME@bthd for [B, T, H, d]")
        try:
            owner = _module(module)
        except (ImportError, TypeError) as error:  # the latter of a relative name
            raise UserError(f"functions={word}: {error}; give MODULE:NAME of an installed module") from error
        found = getattr(owner, name, None)
        if not callable(found) or isinstance(found, type):
            raise UserError(f"functions={word}: {module} has no function {name}")
        return cls(path, owner, name, bool(layout))


def _module(name: str) -> ModuleType:
    """Return a module. Of the script that runs it is the one that runs: importing it again would train a second time,
    and make functions that nobody calls."""
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script and name not in sys.modules and not name.startswith("."):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(script):
            return main
    return importlib.import_module(name)


def places_of(function: Callable[..., Any]) -> list[tuple[Any, str]]:
    """Return the modules that have a function, with its name there: ``from MODULE import NAME`` makes such places."""
    names = [name for name in list(sys.modules) if name.partition(".")[0] not in _WITHOUT_ATTENTION]
    modules = [module for name in names if isinstance(module := sys.modules.get(name), ModuleType)]
    # To look for it in each module first is the faster search: there are thousands of them.
    having = [module for module in modules for value in list(vars(module).values()) if value is function]
    return [
        (module, name)
        for module in dict.fromkeys(having)
        for name, value in list(vars(module).items())
        if value is function
    ]


_ended: list[tuple[Any, str, Any, Any]] = []
"""Replacements whose blocks have ended below others: owner, name, what was put there, and what it took the place of."""


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """In the block, have something in the place of an attribute. Blocks may end in any order: one that ends below
    another leaves that one in its place, until it ends, too."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        _ended.append((owner, name, new, old))
        while below := [one for one in _ended if one[0] is owner and one[1] == name and one[2] is getattr(owner, name)]:
            _ended.remove(below[-1])
            setattr(owner, name, below[-1][3])


def arguments_of(function: Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, as far as its signature tells them; those of ``*more`` by number."""
    try:
        bound = inspect.signature(function).bind(*positional, **named)
    except (TypeError, ValueError):
        return dict(named)
    bound.apply_defaults()
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            given |= {f"{name}[{number}]": one for number, one in enumerate(value)}
        elif kind is not inspect.Parameter.VAR_KEYWORD:
            given[name] = value
    return {**given, **named}


def queries_keys_values(given: Mapping[str, Any], positional: Sequence[Any]) -> list[Tensor] | None:
    """Return q, k and v of a call; None where neither its names nor its first arguments tell them.

    Args:
        given: its arguments by name.
        positional: those that may be q, k and v, in this order.
    """
    arguments = dict(enumerate(positional)) | dict(given)
    places = where_queries_keys_values(arguments)
    return None if places is None else [arguments[at] for at in places]


def where_queries_keys_values(arguments: Mapping[int | str, Any]) -> list[int | str] | None:
    """Return where q, k and v are among a call's arguments, by name or number: all by their names, or else those that
    come first by their numbers. None where they are not tensors."""
    by_name: list[Any] = [next((name for name in names if name in arguments), names[0]) for names in _NAMES]
    by_number = [at if at in arguments else name for at, name in enumerate(by_name)]
    for places in (by_name, by_number):
        if all(isinstance(arguments.get(at), Tensor) for at in places):
            return places
    return None


def output_of(result: Any) -> Tensor | None:
    """Return O of what an attention returns: a tensor, or a tuple or list that begins with it; None of anything else"""
    first = result[0] if isinstance(result, tuple | list) and result else result
    return first if isinstance(first, Tensor) else None


@dataclass(frozen=True, slots=True)
class SeenCall:
    """What a call was given and gave, of the sequences that are kept, by which its form is read.

    Attributes:
        q, k, v, out: [N, H, T_q, d], [N, H_kv, T_k, d], [N, H_kv, T_k, d_v] and [N, H, T_q, d_v], without their graph.
        batch: B, of which the first N are kept.
        dropped: of each ``F.dropout`` inside the call the shape of what it was given, p, and what it kept.
        generator: the state of the CPU's generator before the call, where it may draw from it what it drops.
        read: what :meth:`once` has made, which layers share.
        measured: of this call's tensors, by :func:`.agreeing`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    batch: int
    dropped: Sequence[tuple[tuple[int, ...], float, Tensor]]
    generator: Tensor | None
    read: dict[Any, Any]
    measured: dict[Any, Any] = field(init=False, default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the scores, (N, H, T_q, T_k)."""
        return (*self.q.shape[:3], self.k.shape[2])

    def once(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function makes of its arguments; of tensors and values that an earlier layer's call had, what
        it made then."""
        key = (make, *((id(x), x.is_inference() or x._version) if isinstance(x, Tensor) else x for x in arguments))
        if key not in self.read:
            # The arguments live on: another tensor is not to have the place of one of them.
            self.read[key] = make(*arguments), arguments
        return self.read[key][0]
