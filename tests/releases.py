"""What old releases of PyTorch cannot do: marks that skip the tests that ask it of them."""

import pytest
import torch

_BEFORE_2_7 = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7)


def _fails_in_2_6(reason: str) -> pytest.MarkDecorator:
    """Skip in PyTorch 2.6, where the failure was seen. Later releases run the test."""
    return pytest.mark.skipif(_BEFORE_2_7, reason=f"PyTorch 2.6: {reason}")


traces_attention = _fails_in_2_6("it cannot trace a variant; a compiled model breaks its graph at the attention")
traces_flex = _fails_in_2_6("tracing ends with 'OutputGraph' object has no attribute 'distributed_state'")
shards_on_cpu = _fails_in_2_6("fully_shard ends on a CPU with 'Stream' object has no attribute 'record_event'")
compiles_grouped_heads_to_bits_of_eager = _fails_in_2_6(
    "it traces the backward pass under the forward pass's autocast; grouped attention's FP32 products become BF16"
)
