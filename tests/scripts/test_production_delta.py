"""``scripts/evidence/production_delta.py`` on a captured call: whether δ of an attention follows the rounding of O."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.form import Form
from flashpoint.errors import UserError
from tests.numerics.oracle import exact_attention
from tests.numerics.test_reference_fp64 import normal
from tests.scripts.loaded import script

SCRIPT = script("evidence/production_delta")


def call() -> AttentionCall:
    """Of values with a mean, so that O is rounded by more than dS is."""
    q, k, v, grad_out = normal(128, 16)
    tensors = [x.bfloat16() for x in (q, k, v + 2.0, grad_out)]
    exact = exact_attention(*tensors)
    out, grad_q = exact["out"].bfloat16(), exact["grad_q"].bfloat16()
    return AttentionCall(*tensors, Form(True, 0.25), 1, 0, "own", out, grad_q)


def slope(name: str) -> float:
    variant, other = SCRIPT.recorded_and_other(name)
    of = [one["follows_out"] for one in SCRIPT.measured(call(), variant, 16, other)]
    return float(torch.stack(of).mean())


@pytest.mark.parametrize(("name", "wanted"), [("sdpa_flash", 1.0), ("sdpa_math", 0.0), ("flash_fixed", 0.0)])
def test_delta_follows_the_rounding_of_o_where_it_is_of_that_o(name: str, wanted: float) -> None:
    assert slope(name) == pytest.approx(wanted, abs=0.05)


@pytest.mark.parametrize(("backend", "wanted"), [("FLASH_ATTENTION", 1.0), ("MATH", 0.0)])
def test_a_function_of_the_users_is_measured(tmp_path: Path, backend: str, wanted: float) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
        "from torch.nn.functional import scaled_dot_product_attention\n"
        "def attend(q, k, v, is_causal):\n"
        f"    with sdpa_kernel(SDPBackend.{backend}):\n"
        "        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)\n"
    )
    assert slope(f"{own}:attend") == pytest.approx(wanted, abs=0.05)


def test_what_is_not_measured_is_told_and_changes_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "delta.jsonl"
    given = ["production_delta.py", str(tmp_path / "nosuch"), "--attentions", "sdpa_math", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as ended:
        SCRIPT.main()
    assert ended.value.code == 2
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("nosuch 4000 sdpa_math: ")
    assert last == "error: not measured: nosuch 4000 sdpa_math; the lines above say why"
    assert not out.exists()


def test_jax_without_cudnn_makes_its_delta_of_p_and_dp() -> None:
    """JAX differentiates its softmax, whose δ is rowsum(P∘dP)."""
    pytest.importorskip("jax")
    assert slope("jax_xla") == pytest.approx(0.0, abs=0.05)


def test_what_jax_returns_are_its_own_gradients() -> None:
    pytest.importorskip("jax")
    given = call()
    q, k, v = (x.clone().requires_grad_() for x in (given.q, given.k, given.v))
    out = SCRIPT.of_jax("jax_xla")(q, k, v, True, given.form.scale)
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), given.grad_out)]
    wanted = exact_attention(given.q, given.k, given.v, given.grad_out, scale=given.form.scale)
    for one, name in zip(found, ("out", "grad_q", "grad_k", "grad_v"), strict=True):
        assert float((one.double() - wanted[name]).norm() / wanted[name].norm()) < 2**-6


def test_jax_that_is_not_installed_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"jax_cudnn: needs jax; pip install jax, .*jax\[cuda13\]"):
        SCRIPT.of_jax("jax_cudnn")
