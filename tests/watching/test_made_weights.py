"""Weights that are more than one matrix: those of adapters, and computed or quantised ones."""

import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.watching.loops import Heads, Pair, Quantised, loop, rotated, spectral_norms


class LoraLayer(nn.Module):
    """What PEFT's has, as far as it is asked: a stand-in, for PEFT is not installed here."""

    def __init__(self, dora: bool) -> None:
        super().__init__()
        self.base_layer = nn.Linear(32, 32).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"mine": nn.Linear(32, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"mine": nn.Linear(4, 32, bias=False)})
        lengths = nn.Module()
        lengths.weight = nn.Parameter(1 + torch.rand(32))
        self.lora_magnitude_vector = nn.ModuleDict({"mine": lengths} if dora else {})
        self.use_dora, self.active_adapters = {"mine": dora}, ["mine"]
        self.lora_variant = {"mine": DoraLinearVariant()} if dora else {}
        self.merged = self.disable_adapters = False

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    def get_delta_weight(self, name: str) -> Tensor:
        return 2 * self.lora_B[name].weight @ self.lora_A[name].weight

    def effective(self) -> Tensor:
        whole = self.base_layer.weight + self.get_delta_weight("mine")
        if not self.use_dora["mine"]:
            return whole
        return self.lora_magnitude_vector["mine"].weight[:, None] * whole / whole.detach().norm(dim=1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.use_dora["mine"]:
            return F.linear(x, self.effective(), self.base_layer.bias)
        added = self.lora_B["mine"](F.dropout(self.lora_A["mine"](x), 0.1))
        return self.base_layer(x) + 2 * added


class DoraLinearVariant:
    """PEFT has a class of this name."""


@pytest.mark.parametrize("dora", [False, True])
def test_what_an_adapter_of_peft_adds_is_counted_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dora: bool
) -> None:
    """Nothing before it has a gradient, so the graph does not show the frozen matrix."""
    monkeypatch.setitem(sys.modules, "peft.tuners.lora.layer", types.SimpleNamespace(LoraLayer=LoraLayer))
    model = Heads(LoraLayer(dora), nn.Linear(32, 32), nn.Linear(32, 32), rotated)
    run = loop(tmp_path, model, steps=2)
    q = model.q
    np.testing.assert_allclose(run.columns["w_q_spectral_norm"][1][0, :, 1], spectral_norms(q.effective()), rtol=1e-2)
    assert not np.allclose(spectral_norms(q.effective()), spectral_norms(q.base_layer.weight), rtol=1e-2)


def test_another_kind_of_adapter_of_peft_is_not_taken_for_a_low_rank_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some route tokens or draw noise."""
    monkeypatch.setitem(sys.modules, "peft.tuners.lora.layer", types.SimpleNamespace(LoraLayer=LoraLayer))
    adapted = [LoraLayer(dora=False) for _ in range(3)]
    for one in adapted:
        one.lora_variant = {"mine": types.SimpleNamespace()}
    run = loop(tmp_path, Heads(*adapted), steps=2)
    assert "w_q_spectral_norm" not in run.columns
    assert "adapter of PEFT that adds no matrix" in capsys.readouterr().err


@pytest.mark.parametrize("made_by", [weight_norm, spectral_norm])
def test_a_weight_that_is_computed_is_told_as_such_and_not_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made_by: Callable[[nn.Module], nn.Module]
) -> None:
    """It was told to be a parameter without a product. Who asks for a weight of spectral_norm changes it."""
    weights = []
    for interval in (1, 100):
        torch.manual_seed(0)
        model = Pair()
        made_by(model.first.qkv)
        loop(tmp_path, model, weights_interval=interval, interval=interval)
        weights.append(model.state_dict())
    assert (
        "q of layer 1 (first) is made by a weight that torch.nn.utils.parametrize computes" in capsys.readouterr().err
    )
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_a_weight_of_a_class_of_its_own_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = Heads(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
    for one in (heads.q, heads.k):
        one.weight = nn.Parameter(Quantised(one.weight.detach()), requires_grad=False)
    loop(tmp_path, nn.Sequential(nn.Linear(32, 32), heads), steps=2)
    told = capsys.readouterr().err
    assert "is made by a weight of a class of its own" in told
    assert "failed" not in told
