"""The largest |score| of each head at an interval, and the line that warns of it."""

import dataclasses
import gc
import itertools
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flashpoint.diagnosis.form import Form
from flashpoint.runs.metric_table import MAX_LOGIT
from flashpoint.runs.run import Run
from flashpoint.watching import logged_metrics
from flashpoint.watching.events import AttentionCalled
from flashpoint.watching.logged_metrics import max_logits
from flashpoint.watching.loop import Watch
from tests.watching.loops import Block, Pair, loop, plain

COUNT, HEADS, OF_KEYS, QUERIES, KEYS, SIZE = 3, 4, 2, 7, 9, 5


def oracle(q: Tensor, k: Tensor, form: Form) -> Tensor:
    """[H], pair by pair of the definition, float64."""
    shape = (COUNT, HEADS, QUERIES, KEYS)
    bias = torch.zeros(shape) if form.bias is None else form.bias.expand(shape)
    mask = torch.ones(shape) if form.mask is None else form.mask.expand(shape)
    largest = [0.0] * HEADS
    for n, h, i, j in itertools.product(*map(range, shape)):
        score = form.scale * float(q[n, h, i].double() @ k[n, h // (HEADS // OF_KEYS), j].double())
        if form.softcap:
            score = form.softcap * math.tanh(score / form.softcap)
        added = float(bias[n, h, i, j])
        if not (form.is_causal and j > i) and added > -65_504 and mask[n, h, i, j]:
            largest[h] = max(largest[h], abs(score + added))
    return torch.tensor(largest, dtype=torch.float64)


MASK = torch.rand(COUNT, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.4
BIAS = torch.randn(1, HEADS, 1, KEYS, generator=torch.Generator().manual_seed(2)).masked_fill(
    torch.arange(KEYS) == 3, -torch.inf
)
FORMS = {
    "causal": Form(True, 0.4),
    "full": Form(False, 0.4),
    "capped": Form(True, 3.0, softcap=2.0),
    "masked": Form(False, 0.4, mask=MASK),
    "biased": Form(True, 0.4, bias=BIAS),
}


@pytest.mark.parametrize("block", [1 << 24, 40, 1])
@pytest.mark.parametrize("name", FORMS)
def test_it_is_the_largest_score_of_the_keys_that_a_query_sees(
    monkeypatch: pytest.MonkeyPatch, name: str, block: int
) -> None:
    """However few scores are held at once."""
    monkeypatch.setattr(logged_metrics, "_BLOCK", block)
    torch.manual_seed(0)
    q, k = torch.randn(COUNT, HEADS, QUERIES, SIZE), torch.randn(COUNT, OF_KEYS, KEYS, SIZE)
    form = FORMS[name]
    expected = oracle(q, k, form)
    torch.testing.assert_close(max_logits(q, k, form).double(), expected, rtol=1e-5, atol=0)


def test_a_key_that_a_bias_leaves_no_weight_is_not_seen() -> None:
    """As far ones beside ALiBi, and those that Swin closes by -100: scores are as small as ever."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(COUNT, heads, 12, SIZE, generator=generator) for heads in (HEADS, OF_KEYS))
    distance = (torch.arange(12)[:, None] - torch.arange(12)).clamp_min(0).float()
    near = Form(True, 0.4, mask=(distance < 2)[None, None])
    alibi, swin = -90 * distance * (distance > 1), torch.where(distance < 2, 0.0, -100.0)
    for bias in (alibi, swin):
        torch.testing.assert_close(max_logits(q, k, Form(True, 0.4, bias=bias[None, None])), max_logits(q, k, near))
    grown = Form(True, 0.4, bias=torch.full((1, 1, 12, 12), 200.0))  # of all keys: no row is without one
    assert (max_logits(q, k, grown) > 200).all()


def test_nan_and_infinity_are_told_as_they_are() -> None:
    q, k = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    q[0, 0, 2] = torch.nan
    k[0, 1, 1] = torch.inf
    first, second = max_logits(q, k, Form(True, 1.0)).tolist()
    assert np.isnan(first)
    assert second == np.inf


def logged(run: Run) -> tuple[list[int], NDArray[np.float64]]:
    """Return the steps, and [layers, H, steps]."""
    found = run.by_head(MAX_LOGIT.name)
    assert found is not None
    return found[0].tolist(), found[1]


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_it_is_logged_at_its_interval_of_all_sequences_of_the_first_pass(tmp_path: Path, autocast: bool) -> None:
    expected = {}

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        batches = torch.randn(2, 6, 12, 32)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            first = batches[0]
            for layer, block in enumerate((model.first, model.second)):
                qkv = block.qkv(first).detach().unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
                scores = (qkv[0].double() @ qkv[1].double().mT * 8**-0.5).tril().abs()
                expected[layer, number] = scores.amax((0, 2, 3))
                first = block(first).detach()
            losses = [model(batch).square().mean() for batch in batches]
        for loss in losses:
            loss.backward()
        watched.step(sum(losses), batches)

    run = loop(tmp_path, step=step, steps=7, logits_interval=3, interval=2, sequences=2)
    steps, found = logged(run)
    assert steps == [2, 5]
    for at, number in enumerate(steps):
        for layer in (0, 1):
            np.testing.assert_allclose(found[layer, :, at], expected[layer, number].numpy(), rtol=1e-5)


def test_it_changes_no_bit_of_a_training_and_keeps_what_else_is_logged(tmp_path: Path) -> None:
    weights, columns = [], []
    for interval in (None, 1):
        torch.manual_seed(0)
        model = Pair()
        run = loop(tmp_path / str(interval), model, steps=6, logits_interval=interval, interval=3)
        weights.append([one.detach().clone() for one in model.parameters()])
        columns.append(dict(run.columns))
    assert all(map(torch.equal, *weights))
    assert columns[0].keys() == {name for name in columns[1] if name != MAX_LOGIT.name}
    assert MAX_LOGIT.name not in columns[0]


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    taken: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: taken.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flashpoint.watch")
    logger.addHandler(handler)
    yield taken
    logger.removeHandler(handler)


def test_the_first_score_above_the_bound_is_told_once(tmp_path: Path, warnings: list[str]) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 3:
            with torch.no_grad():
                model.second.qkv.weight[8:16] *= 30  # queries of the second head
        plain(model, number, watched)

    run = loop(tmp_path, step=step, steps=8, logits_interval=2, max_logit=20)
    steps, found = logged(run)
    (line,) = [line for line in warnings if "|score|" in line]
    at = steps.index(3)
    assert found[:, :, :at].max() < 20
    assert f"step 3: the largest |score| is {found[1, 1, at]:.4g} nats, in layer 2 (second), head 2: " in line
    assert "more than max_logit=20. " in line


def test_layers_of_different_heads_are_judged_and_not_logged(tmp_path: Path, warnings: list[str]) -> None:
    class Halves(Block):
        def forward(self, x: Tensor, _: Tensor | None = None) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            return x + nn.functional.scaled_dot_product_attention(q * 100, k, v).transpose(1, 2).flatten(2)

    model = Pair()
    model.second = Halves()
    run = loop(tmp_path, model, logits_interval=1, max_logit=5)
    assert MAX_LOGIT.name not in run.columns
    assert sum("in layer 2 (second)" in line for line in warnings) == 1
    assert sum("are judged there, and not logged" in line for line in warnings) == 1


def test_a_model_without_attention_measures_nothing(tmp_path: Path, warnings: list[str]) -> None:
    run = loop(tmp_path, nn.Linear(32, 32), steps=4, logits_interval=1, interval=500)
    assert MAX_LOGIT.name not in run.columns
    assert len([line for line in warnings if "no attention was recorded" in line]) == 1


def test_frozen_forms_stay_as_they_are() -> None:
    """The scores are made in place; a bias or a mask of the call is not."""
    form = dataclasses.replace(FORMS["biased"], mask=MASK)
    before = [x.clone() for x in form.tensors.values()]
    max_logits(torch.randn(COUNT, HEADS, QUERIES, SIZE), torch.randn(COUNT, OF_KEYS, KEYS, SIZE), form)
    assert all(map(torch.equal, before, form.tensors.values()))


@pytest.mark.slow
def test_calls_of_later_micro_batches_are_not_held(tmp_path: Path) -> None:
    """A step of many would hold q and k of all of them."""
    held: list[int] = []

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        loss = torch.zeros(())
        for _ in range(3):
            loss = model(torch.randn(3, 12, 32)).square().mean()
            loss.backward()
        held.append(sum(type(one) is AttentionCalled for one in gc.get_objects()))  # no proxy is asked
        watched.step(loss)

    loop(tmp_path, step=step, logits_interval=1, interval=500)
    assert held[1:] == [2] * 3  # of the two layers


def test_beside_a_mask_the_observed_sequences_alone_are_measured(tmp_path: Path) -> None:
    """The masks of the others are not kept."""
    expected: list[Tensor] = []

    class Padded(Block):
        def forward(self, x: Tensor, _: Tensor | None = None) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            seen = (torch.arange(12) < torch.tensor([5, 9, 12])[:, None])[:, None, None].expand(3, 1, 12, 12)
            scores = (q.detach() @ k.detach().mT * 8**-0.5).masked_fill(~seen, 0.0).abs()
            expected.append(scores[:2].amax((0, 2, 3)))
            return x + nn.functional.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)

    run = loop(tmp_path, Padded(), steps=3, sequences=2, logits_interval=1, interval=500)
    steps, found = logged(run)
    assert steps == [0, 1, 2]
    np.testing.assert_allclose(found[0].T, torch.stack(expected).numpy(), rtol=1e-5)
