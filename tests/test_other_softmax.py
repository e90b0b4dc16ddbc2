"""Options by which an attention is another softmax: whoever is handed one refuses it, or leaves the call out."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashpoint.other_softmax import ADDED, BY_POSITION, CAPS, other_softmax
from flashpoint.watching.interception import intercepting_interface
from flashpoint.watching.interceptor import Interceptor

GIVEN: dict[str, Any] = dict.fromkeys(CAPS, 0.1) | {name: torch.ones(2) for name in ADDED}
GIVEN |= {"score_mod": lambda score, *_: 2 * score, BY_POSITION: torch.randn(1, 2, 8, 8)}


def interfaced(q: Tensor, options: dict[str, Any]) -> Interceptor:
    """What is seen of a model of Transformers that asks an attention for these options, which passes over them."""
    interceptor = Interceptor(sequences=1)

    def attend(_module: Any, q: Tensor, k: Tensor, v: Tensor, _mask: None, **_: Any) -> tuple[Tensor, None]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None

    get_interface = intercepting_interface(interceptor, lambda *_: attend)
    get_interface(None, "mine", attend)(nn.Module(), q, q, q, None, **options)
    return interceptor


@pytest.mark.slow
@pytest.mark.parametrize("name", GIVEN)
def test_each_is_refused_and_left_out_wherever_it_is_given(name: str) -> None:
    from flashpoint.huggingface import attention_forward

    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    options = {name: GIVEN[name]}
    with pytest.raises(ValueError, match=f"flash_fp32: takes no {name}"):
        attention_forward(nn.Module(), q, q, q, None, variant="flash_fp32", **options)
    seen = interfaced(q, options)
    assert (len(seen.calls), len(seen.calls.missed), seen.calls.failed) == (0, 1, set())


@pytest.mark.parametrize("given", [{}, dict.fromkeys(GIVEN), dict.fromkeys(CAPS, 0.0), {"scale": 2.0, "bias": 1}])
def test_what_is_not_given_changes_nothing(given: dict[str, Any]) -> None:
    assert other_softmax(given) is None
    seen = interfaced(torch.randn(1, 2, 8, 16, requires_grad=True), given)
    assert (len(seen.calls), seen.calls.missed, seen.calls.failed) == (1, {}, set())


def test_a_bias_by_position_is_for_pytorch_to_add_where_no_gradient_is_wanted() -> None:
    from flashpoint.huggingface import attention_forward

    q = torch.randn(1, 2, 8, 16)
    bias = torch.randn(1, 2, 8, 8)
    with torch.no_grad():
        out, _ = attention_forward(
            nn.Module(), q, q, q, None, is_causal=False, variant="flash_fp32", **{BY_POSITION: bias}
        )
    torch.testing.assert_close(out.transpose(1, 2), ((q @ q.mT) / 4 + bias).softmax(-1) @ q)
