"""What holds a training in front of the attention that its model has, whoever made the kernel.

Shapes: B sequences, H heads, H_kv heads of keys and values, T tokens, d features per head.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias

from flashpoint.errors import UserError, notify
from flashpoint.numerics.layout import is_eager
from flashpoint.numerics.stabilizers import in_fp16, largest_of
from flashpoint.watching.functions import NamedFunction, output_of, places_of, replaced, where_queries_keys_values
from flashpoint.watching.graph import next_node, reaches_others
from flashpoint.watching.interception import interface_in_use
from flashpoint.watching.left_out import is_transformed
from flashpoint_kernels.codes import CALL

_SDPA = [F.scaled_dot_product_attention]  # in a list: what is replaced are the attributes of modules
_THEMSELVES = ("sdpa", "eager")
"""Names of Transformers' interface that are not replaced: the one calls PyTorch's attention, the other computes it."""
_AT_ONCE = 3 * 64
"""Tensors of eager mode that are counted by one sum."""
_open: list[Stabilized] = []
"""What the block in which this process is counts, if it is in one."""


class _Count:
    """Counts calls on each device, and of three tensors a call what their largest magnitudes tell. The host does not
    wait.

    Args:
        judge: takes the magnitudes [calls, 3], and returns what counts of each call: bool [calls, …].
    """

    def __init__(self, judge: Callable[[Tensor], Tensor]) -> None:
        self._judge = judge
        self._counted: dict[torch.device, Tensor] = {}
        self._largest: dict[torch.device, list[Tensor]] = {}  # not counted yet

    def begin_on(self, device: torch.device) -> None:
        if device not in self._counted and device.type != "meta":  # which has no numbers
            self._counted[device], self._largest[device] = torch.zeros((), dtype=torch.int64, device=device), []
            torch._dynamo.mark_static_address(self._counted[device])  # a CUDA graph may then add to it

    @property
    def judged(self) -> int:
        """What counts of the tensors; the host waits for it."""
        return self._whole() % CALL

    @property
    def calls(self) -> int:
        """Calls; the host waits for it."""
        return self._whole() // CALL

    def _whole(self) -> int:
        for device, largest in self._largest.items():
            if largest:
                self._add_kept(device, largest)
        return sum(int(counted) for counted in self._counted.values())

    def counted_on(self, device: torch.device) -> Tensor | None:
        """Return what is counted on a device, [] int64: CALL times the calls, and what counts."""
        return self._counted.get(device)

    def add(self, *tensors: Tensor) -> None:
        device = tensors[0].device
        if device not in self._counted:
            return
        with torch.no_grad():
            if torch.compiler.is_compiling():
                self._add(device, _largest_by_rows(tensors))
                return
            largest = [largest_of(x) for x in tensors]
            if not is_eager(*tensors):  # a CUDA graph fills tensors of its own anew in each replay
                self._add(device, torch.stack(largest))
                return
            kept = self._largest[device]
            kept += largest
            if len(kept) >= _AT_ONCE:
                self._add_kept(device, kept)

    def _add_kept(self, device: torch.device, largest: list[Tensor]) -> None:
        self._largest[device] = []
        with torch.no_grad(), torch.autocast(device.type, enabled=False):  # to BF16 it stacks no FP16
            self._add(device, torch.stack(largest))

    def _add(self, device: torch.device, largest: Tensor) -> None:
        of_calls = largest.view(-1, 3)
        self._counted[device].add_(self._judge(of_calls).sum() + CALL * len(of_calls))


def _exceeds(largest: Tensor) -> Tensor:
    """Judge q, k and v. With dynamic=True a compiler loses a float that is a global inside of a checkpoint."""
    return largest > torch.finfo(torch.float16).max


def _overflows(largest: Tensor) -> Tensor:
    """Judge dQ, dK and dV: with an infinite dO, or NaN in P, dV is not finite either."""
    finite = largest.isfinite()
    return finite[:, 2] & ~finite[:, :2].all(1)


class Stabilized:
    """What :func:`stabilize` did so far. The host waits for what is read.

    Attributes:
        open: whether the block has not ended. What has kept an attention of the block has the usual one afterwards.
        names: of the attentions that were computed in FP16; of compiled ones, if they were compiled in the block.
        announced: names of which a line has told, as of a block that began before.
        looked_at: names of functions of which it is known that they learn nothing but their arguments.
    """

    def __init__(self, announced: set[str]) -> None:
        self.announced = announced
        self._beyond = _Count(_exceeds)
        self._overflowed = _Count(_overflows)
        self.open = True
        self.names, self.looked_at = set[str](), set[str]()

    def count_on(self, devices: Iterable[torch.device]) -> None:
        """Count on these devices, too."""
        for device in devices:
            self._beyond.begin_on(device)
            self._overflowed.begin_on(device)

    @property
    def clamped(self) -> int:
        """The tensors q, k and v that held a number beyond 65,504, which took that number.

        A call that activation checkpointing repeats may count twice.
        """
        return self._beyond.judged

    @property
    def overflowed(self) -> int:
        """The backward passes of attentions in which dQ or dK became infinite or NaN, and dV did not."""
        return self._overflowed.judged

    @property
    def called(self) -> bool:
        """Whether an attention was computed in FP16. A model that an earlier block compiled gives no name."""
        return bool(self.names) or self._beyond.calls > 0

    def count(self, *tensors: Tensor) -> None:
        """Count q, k and v."""
        self._beyond.add(*tensors)

    def count_gradients(self, *tensors: Tensor) -> None:
        """Count dQ, dK and dV as the kernel returned them."""
        self._overflowed.add(*tensors)

    def counted_on(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return what calls add to that are counted by kernels of their own."""
        beyond, overflowed = self._beyond.counted_on(device), self._overflowed.counted_on(device)
        return None if beyond is None or overflowed is None else (beyond, overflowed)


def _largest_by_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Return max|x| of each tensor. A compiler takes the rows' along where it casts, and reads the tensors once."""
    rows = [x.abs().amax(-1).flatten().float() for x in tensors]  # autocast to BF16 stacks no FP16
    if all(row.shape == rows[0].shape for row in rows):  # a set has a compiler take each for a constant
        return torch.stack(rows).amax(1)
    return torch.stack([row.amax() for row in rows])


class _Block(contextlib.AbstractContextManager[Stabilized]):
    """A block of :func:`stabilize`, which may begin again after its end; it tells where nobody begins it."""

    def __init__(self, begin: Callable[[], contextlib.AbstractContextManager[Stabilized]]) -> None:
        self._begin, self._began = begin, False
        self._inside: list[contextlib.AbstractContextManager[Stabilized]] = []

    def __enter__(self) -> Stabilized:
        self._began = True
        inside = self._begin()
        block = inside.__enter__()
        self._inside.append(inside)
        return block

    def __exit__(self, *error: Any) -> bool | None:
        return self._inside.pop().__exit__(*error)

    def __del__(self) -> None:
        if not self._began:
            notify("stabilize: nothing has FP16 inside before a block begins: with flashpoint.stabilize(model):")


def stabilize(model: nn.Module, *, functions: Sequence[str] = ()) -> contextlib.AbstractContextManager[Stabilized]:
    """In the block, compute attentions of BF16 with FP16 inside, by the kernels that the model has::

        with flashpoint.stabilize(model):
            train(model)

    FP16 rounds O, of which the backward pass makes δ, to 10 mantissa bits, where BF16 has 7. q, k and v are cast to
    FP16 and O back. dO is scaled by a power of two, and the gradients back. The forward *and* the backward pass belong
    into the block. A compiled model compiles anew at its beginning and after its end.

    Calls of PyTorch's ``scaled_dot_product_attention``, those of Transformers' interface and of ``functions`` are
    computed so, in all models of this process; a line tells of the first call of each. Others, and calls in FP32 or
    FP16, stay as they are. So does a function that the model keeps in an attribute of its own. A block inside another
    one belongs to it, which counts and tells for both.

    Args:
        model: on whose devices is counted what does not fit FP16: q, k and v, and dQ and dK. At the end a line each
            tells of it.
        functions: more attentions, ``MODULE:NAME`` each, called as an attribute of a module with q, k, v first, or by
            name. Of [B, H, T, d], or after ``@bthd`` of [B, T, H, d], also of sequences in a row [T, H, d]. What else
            they learn has to be an argument, too; an eager call of another one raises ValueError.

    Returns:
        The block, which yields what counts so far. It may begin again after its end, and counts anew.

    Raises:
        ValueError: a function is not there.
        TypeError: ``model`` is none, or ``functions`` no list.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}: give the model, a torch.nn.Module")
    if isinstance(functions, str) or not isinstance(functions, Sequence):
        raise TypeError(f"functions={functions!r}: give a list of MODULE:NAME")
    try:
        named = [NamedFunction.of(word) for word in functions]
    except UserError as error:
        raise ValueError(str(error)) from None
    return _Block(functools.partial(_stabilized, model, named, set[str]()))


@contextlib.contextmanager
def _stabilized(model: nn.Module, named: Sequence[NamedFunction], announced: set[str]) -> Iterator[Stabilized]:
    outer = bool(_open)
    block = _open[0] if outer else Stabilized(announced)
    block.count_on(x.device for x in (*model.parameters(), *model.buffers()))
    with contextlib.ExitStack() as entered:
        inside = _sdpa(block)
        for module, name in _users_places(_SDPA[0]):
            entered.enter_context(replaced(module, name, inside))
        for one in named:
            original = getattr(one.owner, one.name)
            inside = functools.wraps(original)(_function(block, original, one.word, -3 if one.by_token else -2))
            for module, name in places_of(original):
                entered.enter_context(replaced(module, name, inside))
        if (asked := interface_in_use()) is not None:
            entered.enter_context(replaced(asked, "get_interface", _interface(block, asked.get_interface)))
        if outer:
            yield block
            return
        _open.append(block)
        try:
            yield block
        finally:
            block.open = False
            _open.remove(block)
            _tell(block, model)


def center_keys(k: Tensor, dim: int = -2) -> Tensor:
    """Return K less its mean over the tokens: softmax does not see one vector a head, and scores become smaller.

    With rotary positions call it after the rotation. The mean has its gradient, which makes the gradients of a head's
    keys sum to 0. Exact arithmetic sees nothing of the shift, so it carries nothing from later tokens to earlier ones.

    Args:
        k: [B, H_kv, T, d], or of another layout.
        dim: the dimension of tokens.

    Returns:
        Of the same shape and dtype; the mean is computed in FP32, of FP64 in FP64.

    Raises:
        TypeError: ``k`` is no tensor of floating point.
    """
    if not (isinstance(k, Tensor) and k.is_floating_point()):
        raise TypeError(f"k is {k.dtype if isinstance(k, Tensor) else type(k).__name__}: give keys of floating point")
    exact = k if k.dtype == torch.float64 else k.float()
    return (exact - exact.mean(dim, keepdim=True)).to(k.dtype)


def _users_places(function: Callable[..., Any]) -> list[tuple[Any, str]]:
    """Return where users' calls find PyTorch's attention: its own module of functions, and those that import it.

    PyTorch's compiler and this package know the function by what it is.
    """
    return [
        (module, name)
        for module, name in places_of(function)
        if module is F or module.__name__.partition(".")[0] not in ("torch", "flashpoint")
    ]


def _dtype_of(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype | None:
    """Return the dtype of O where the attention is to be computed in FP16: BF16, by the inputs or by autocast."""
    if q.is_nested or k.is_nested or v.is_nested:
        return None
    if not torch.compiler.is_compiling():
        for x in (q, k, v):
            if is_transformed(x) or x.numel() == 0:
                return None
    dtypes = q.dtype, k.dtype, v.dtype
    if not q.is_meta and torch.is_autocast_enabled(q.device.type) and torch.float64 not in dtypes:  # which it leaves
        return torch.bfloat16 if torch.get_autocast_dtype(q.device.type) == torch.bfloat16 else None
    return torch.bfloat16 if dtypes == (torch.bfloat16,) * 3 else None


def _sdpa(block: Stabilized) -> Callable[..., Tensor]:
    (original,) = _SDPA

    @functools.wraps(original)
    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *more: Any, **options: Any
    ) -> Tensor:
        dtype = _dtype_of(query, key, value)
        # It holds no numbers, and knows PyTorch's attention by being what F has now: this function.
        of_causal_bias = isinstance(attn_mask, CausalBias)
        call: Callable[..., Tensor] = CausalBias._dispatch if of_causal_bias else original
        if dtype is None or not block.open:
            return call(query, key, value, attn_mask, *more, **options)
        _note("scaled_dot_product_attention")
        biases = () if attn_mask is None or of_causal_bias or attn_mask.dtype == torch.bool else (attn_mask,)

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = attn_mask) -> Tensor:
            return call(q, k, v, mask, *more, **options)

        out: Tensor = in_fp16(attend, query, key, value, *biases, dtype=dtype, counts=block)
        return out

    return scaled_dot_product_attention


def _function(block: Stabilized, original: Callable[..., Any], name: str, tokens: int) -> Callable[..., Any]:
    def inside(*given: Any, **options: Any) -> Any:
        arguments = dict(enumerate(given)) | options
        qkv = where_queries_keys_values(arguments) if block.open else None
        dtype = None if qkv is None else _dtype_of(*(arguments[at] for at in qkv))
        if qkv is None or dtype is None:
            return original(*given, **options)
        query = arguments[qkv[0]]
        autocast = not query.is_meta and torch.is_autocast_enabled(query.device.type)
        _note(name, torch.compiler.is_compiling() and autocast)
        beside = [at for at, x in arguments.items() if at not in qkv and isinstance(x, Tensor)]
        biases = [at for at in beside if _is_bias(arguments[at])]
        learned = [at for at in beside if at not in biases and arguments[at].requires_grad]

        def attend(*inner: Tensor) -> Any:
            new = arguments | dict(zip([*qkv, *biases, *learned], inner, strict=True))
            looks = not torch.compiler.is_compiling() and name not in block.looked_at
            since = next_node() if looks else 0
            result = original(*(new[at] for at in range(len(given))), **{option: new[option] for option in options})
            if looks and (out := output_of(result)) is not None and out.requires_grad:
                if reaches_others(out, inner, since):
                    raise ValueError(
                        f"stabilize: {name} learns tensors that are none of its arguments, whose gradients FP16 inside "
                        "would scale: give them to it as arguments"
                    )
                block.looked_at.add(name)
            return result

        return in_fp16(
            attend,
            *(arguments[at] for at in [*qkv, *biases]),
            learned=[arguments[at] for at in learned],
            dtype=dtype,
            tokens=tokens,
            counts=block,
        )

    return inside


def _is_bias(x: Tensor) -> bool:
    """Whether an argument is added to scores: it is to have their dtype, or the weights would not have that of V."""
    return x.dtype == torch.bfloat16 and x.dim() > 1


def _interface(block: Stabilized, original: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(interface: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(interface, name, default)
        if name in _THEMSELVES or name.startswith("point:"):
            return function

        def called(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *more: Any, **options: Any) -> Any:
            of_module = functools.partial(function, module)
            inside = _function(block, of_module, f"{name} of Transformers", -3)  # its O is [B, T, H, d]
            return inside(q, k, v, *more, **options)

        return called

    return get_interface


@torch.compiler.assume_constant_result
def _note(name: str, in_forward_alone: bool = False) -> None:
    """Note, and tell once, that an attention is computed in FP16; of a compiled one, when it is compiled.

    Args:
        in_forward_alone: whether its backward pass is compiled under autocast, too, as PyTorch does with that of a
            forward pass under autocast: it casts the operands of products to BF16, if no kernel makes them.
    """
    (block,) = _open  # no compiler takes it as a constant argument
    block.names.add(name)
    if name not in block.announced:
        block.announced.add(name)
        alone = "; compiled under autocast, it has BF16 in its backward pass, unless a kernel computes that"
        notify(f"stabilize: {name} has FP16 inside{alone * in_forward_alone}")


def _tell(block: Stabilized, model: nn.Module) -> None:
    if sys.exc_info()[0] is not None:
        return
    if not block.called:
        configurations = (getattr(module, "config", None) for module in model.modules())
        eager = any(getattr(one, "_attn_implementation", None) == "eager" for one in configurations)
        notify(
            "stabilize: no attention in BF16 was called that it knows. "
            + "Load the model of Transformers with another attn_implementation than eager, as 'sdpa'. " * eager
            + "Turn autocast to BF16 on, call PyTorch's scaled_dot_product_attention as an attribute of its module, "
            "or name another as functions=['MODULE:NAME']"
        )
    if clamped := block.clamped:
        notify(f"stabilize: {clamped:,} of the tensors q, k and v held numbers beyond 65,504, and were clamped to it")
    if overflowed := block.overflowed:
        notify(
            f"stabilize: {overflowed:,} backward pass{'es' * (overflowed > 1)} of attentions made dQ or dK infinite, "
            "as FP16 does where k or q are large; normalise q and k, or train without stabilize"
        )
