"""Has the calls of attentions come to an interceptor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from flashpoint.watching.call_mode import CallMode
from flashpoint.watching.functions import NamedFunction, places_of, replaced
from flashpoint.watching.interceptor import Interceptor
from flashpoint.watching.interface import intercepting_interface, interface_in_use
from flashpoint.watching.named_calls import intercepting_function


def intercept(interceptor: Interceptor, functions: Sequence[NamedFunction]) -> Callable[[], None]:
    """Have calls of PyTorch's and this package's attention, of Transformers' interface and of named functions come to
    the interceptor, until what is returned is called. Compiled parts of the model run uncompiled meanwhile."""
    with contextlib.ExitStack() as entered:
        entered.callback(interceptor.remove_hooks)
        entered.enter_context(torch.compiler.set_stance("force_eager"))
        for named in functions:
            original, intercepting = getattr(named.owner, named.name), intercepting_function(interceptor, named)
            for module, name in places_of(original):
                entered.enter_context(replaced(module, name, intercepting))
        if (asked := interface_in_use()) is not None:
            by = intercepting_interface(interceptor, asked.get_interface)
            entered.enter_context(replaced(asked, "get_interface", by))
        entered.callback(CallMode(interceptor).insert())
        return entered.pop_all().close
    raise AssertionError("unreachable")
