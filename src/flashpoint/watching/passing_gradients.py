"""Looks for gradients that are not there at ``watched.step``: hooks of parameters may make the optimizer step in the
backward pass, and give them up. Their norms are then taken as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flashpoint.detector import LATEST
from flashpoint.watching.notices import Notices

LATE = "no gradients at watched.step, or zeros alone; call it after the backward pass and before zero_grad"
_INSIDE = (
    "no gradients at watched.step: the backward pass gives them up, as where hooks of parameters make the optimizer "
    "step. From here on their norms are taken as they come, but not those of heads"
)
_ELSEWHERE = (
    "no gradients at watched.step: no backward pass brought the parameters of the watched model any. Watch the model "
    "whose parameters are trained: torch.func.functional_call trains those that it is given"
)


class PassingGradients:
    """Tells once why a loop has no gradients, by the steps that follow, and takes their norms from then on if the
    backward pass gives them up.

    Such a norm stands for the gradient where a norm or a largest magnitude is asked for: NaN or infinity makes it so.
    Of several backward passes of a step it is the largest one.

    Attributes:
        inside: whether the backward pass gives gradients up.
        over: whether there is nothing more to find.
    """

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self.inside = self.over = False
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._steps = 0  # that showed no gradient on its way
        self._asked = False  # whether the end of this backward pass is awaited
        self._gone: bool | None = None

    def of(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return the norms [] of the step's gradients."""
        return [self._norms.get(one) for one in parameters]

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take in the step that has ended, if one was listened to, and listen to the next one."""
        if self._hooks and not self.inside:
            self._judge(parameters)
        self._norms.clear()
        self._gone, self._asked = None, False
        if self.over:
            self.end()
            return
        for one in parameters:
            if one.requires_grad and one.is_leaf and one not in self._hooks:
                self._hooks[one] = one.register_hook(self._taking(one))

    def end(self) -> None:
        """Listen no more; what is not found by now is told as it probably is."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        if not (self.inside or self.over):
            self.over = True
            self._notices.warn(_ELSEWHERE if self._steps else LATE)

    def _judge(self, parameters: Sequence[nn.Parameter]) -> None:
        if any(one.grad is not None and bool(one.grad.any()) for one in parameters):
            self.over = True  # a step without a loss, as of another model in turn
        elif not self._norms:
            self._steps += 1
            self.over = self._steps == LATEST
            if self.over:
                self._notices.warn(_ELSEWHERE)
        elif any(map(bool, self._norms.values())):  # else it had none to give, as a batch without labels
            self.inside = bool(self._gone)
            self.over = not self.inside
            self._notices.warn(_INSIDE if self.inside else LATE)

    def _taking(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        def take(gradient: Tensor) -> None:
            try:
                self._take(parameter, gradient)
            except Exception as error:  # in the loop's backward pass
                self._notices.failed("reading gradients as they come", error)

        return take

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        dense = gradient.coalesce().values() if gradient.is_sparse else gradient
        norm = torch.linalg.vector_norm(dense, dtype=torch.float32 if dense.itemsize < 4 else None)
        known = self._norms.get(parameter)
        self._norms[parameter] = norm if known is None else torch.maximum(known, norm)
        if not (self.inside or self._asked):
            self._asked = True
            torch.autograd.Variable._execution_engine.queue_callback(self._look)

    def _look(self) -> None:
        """See at the end of a backward pass whether most gradients that it brought have gone: a hook may leave the last
        one to the loop."""
        self._asked = False
        gone = [one for one in self._norms if one.grad is None or not bool(one.grad.any())]
        self._gone = 2 * len(gone) > len(self._norms)
