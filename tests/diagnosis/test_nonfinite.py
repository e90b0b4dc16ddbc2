"""Where the first NaN was born: which tensor, head and step, and what was given it by another place."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from flashpoint.cli.diagnose_advice import told_first
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.verdict import diagnose
from tests.diagnosis.calls import CLEAN, by_position, call_of, inputs


@pytest.mark.parametrize(("name", "tensor"), [("grad_q", "dQ"), ("grad_k", "dK"), ("grad_v", "dV")])
def test_a_backward_pass_that_makes_nan_is_named_with_its_tensor(name: str, tensor: str) -> None:
    call = call_of(by_position(CLEAN["sdpa"]), inputs(seed=3))
    getattr(call, name)[1, 2, 5:8] = math.nan
    (found,) = diagnose(call).findings
    assert (found.kind, found.layer, found.heads, found.inherited) == ("nonfinite", 2, (3,), False)
    assert found.text.startswith(
        f"{tensor} holds NaN or infinity in 3 rows, the first is row 6 of head 3 in sequence 2"
    )
    others = ", ".join(one for one in ("dQ", "dK", "dV") if one != tensor).replace(", d", " and d")
    assert f"; q, k, v, O, dO, {others} are finite: the backward pass" in found.text
    assert found.text.endswith(f"at step {call.step}")


def test_shared_heads_of_keys_name_the_heads_that_read_them() -> None:
    call = call_of(by_position(CLEAN["no fault"]), inputs(seed=3, heads_kv=2))
    assert call.grad_k is not None
    call.grad_k[0, 1, 0] = math.nan
    (found,) = diagnose(call).findings
    assert (found.kind, found.heads) == ("nonfinite", (3, 4))


def test_nan_that_came_through_another_output_is_not_said_to_be_the_attentions() -> None:
    call = call_of(by_position(CLEAN["sdpa"]), inputs(seed=3))
    assert call.grad_q is not None
    call.grad_q[:] = math.nan
    of_rows = torch.full(call.q.shape[:-1], math.nan)
    (of_logsumexp,) = diagnose(dataclasses.replace(call, grad_logsumexp=of_rows)).findings
    assert of_logsumexp.inherited
    assert of_logsumexp.text.startswith("dL holds NaN")
    (unknown,) = diagnose(dataclasses.replace(call, other_gradients="weights")).findings
    assert "it came through weights, or the backward pass" in unknown.text


def test_a_call_with_a_gradient_of_l_survives_its_file_and_another_attention(tmp_path: Path) -> None:
    """Another attention is called with dO alone."""
    function = by_position(CLEAN["sdpa"])
    call = call_of(function, inputs(seed=3))
    call = dataclasses.replace(call, grad_logsumexp=torch.randn(call.q.shape[:-1]), other_gradients="weights")
    call.write(tmp_path / "layer-02.safetensors")
    found = AttentionCall.read(tmp_path / "layer-02.safetensors")
    assert found.grad_logsumexp is not None
    assert torch.equal(found.grad_logsumexp, call.grad_logsumexp)
    assert found.other_gradients == "weights"
    assert not call_of(function, inputs(seed=3)).other_gradients
    again = diagnose(found, function)
    assert again.findings == ()
    assert again.call.is_of_out_alone


def test_the_layer_that_made_nan_comes_before_those_that_were_given_it() -> None:
    """dQ of layer 2 makes dO of layer 1 NaN."""
    calls = [dataclasses.replace(call_of(by_position(CLEAN["sdpa"]), inputs(seed)), layer=seed) for seed in (1, 2)]
    assert calls[1].grad_q is not None
    calls[0].grad_out[:] = math.nan
    calls[1].grad_q[:] = math.nan
    findings = [finding for call in calls for finding in diagnose(call).findings]
    first, _ = told_first(findings, None)
    assert [(one.layer, one.inherited) for one in first] == [(2, False), (1, True)]
    assert first[1].text.startswith("dO holds NaN")
