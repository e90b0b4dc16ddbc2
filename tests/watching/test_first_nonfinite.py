"""Where the first NaN or infinity of a loop came from: step, pass, layer, head and tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

import flashpoint
from flashpoint.cli.main import main
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.outcome import NonfiniteOrigin
from tests.watching.loops import Quantised

HEADS, FAILS = 4, 3
ATTEND = [f"{__name__}:attend"]


class Poison(torch.autograd.Function):
    """Makes a place NaN, or infinite, in one pass: of all heads [B, H, T, d], or of one."""

    place = ""
    head: int | None = None
    value = math.nan

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: str) -> Tensor:
        ctx.place = place
        return Poison.of(x, f"forward {place}")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Poison.of(grad, f"backward {ctx.place}"), None

    @staticmethod
    def of(x: Tensor, place: str) -> Tensor:
        x = x.clone()
        if place == Poison.place:
            (x if Poison.head is None else x[:, Poison.head - 1])[-1] = Poison.value  # of the last sequence alone
        return x


def poison(x: Tensor, place: str) -> Tensor:
    found: Tensor = Poison.apply(x, place)
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, layer: int) -> Tensor:
    q, k, v = (poison(x, f"{name} {layer}") for name, x in (("q", q), ("k", k), ("v", v)))
    return poison(F.scaled_dot_product_attention(q, k, v, is_causal=is_causal), f"O {layer}")


def line_by_line(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, layer: int) -> Tensor:
    """Scores in the format of q."""
    scores = (q @ k.mT).masked_fill(torch.ones(q.shape[-2], q.shape[-2]).triu(1).bool(), -math.inf)
    return (scores * q.shape[-1] ** -0.5).softmax(-1) @ v


def with_empty_row(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, layer: int) -> Tensor:
    return attend(q, k, v, is_causal, layer).masked_fill(torch.arange(12)[:, None] == 11, math.nan)


class Block(nn.Module):
    def __init__(self, layer: int, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.attention = layer, attention
        self.qkv, self.out, self.mlp = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, 8)).permute(2, 0, 3, 1, 4)
        attended = self.attention(q, k, v, True, self.layer)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return poison(x + self.mlp(x).tanh(), f"MLP {self.layer}")


class Model(nn.Module):
    def __init__(self, *attentions: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block(layer, one) for layer, one in enumerate(attentions, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = poison(self.embedding(x), "embedding")
        for block in self.blocks:
            x = block(x)
        return x


def by_name(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, layer: int) -> Tensor:
    return attend(q, k, v, is_causal, layer)


def train(
    runs: Path,
    place: str = "",
    *,
    model: nn.Module | None = None,
    head: int | None = None,
    value: float = math.nan,
    steps: int = 6,
    batch: Callable[[int], Tensor] = lambda _: torch.randn(20, 12, 32),
    change: Callable[[nn.Module, int], object] = lambda *_: None,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x).square().mean(),
    scaler: torch.amp.GradScaler | None = None,
    clip: bool = False,
    skip: Callable[[Tensor], bool] = lambda _: False,
    watch_after: str = "backward",
    set_to_none: bool = True,
    **options: Any,
) -> list[NonfiniteOrigin]:
    """Train; from step FAILS on a place is not finite. ``change`` is called after an optimizer step.

    ``watch_after`` names what ``watched.step`` is called after.
    """
    torch.manual_seed(0)
    model = Model(by_name, by_name) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"functions": ATTEND, "log_interval": 2, "sequences": 1, **options}
    Poison.head, Poison.value = head, value
    try:
        with flashpoint.watch(model, runs_dir=runs, name="own", **options) as watched:
            for step in range(steps):
                Poison.place = place if step == FAILS else ""
                x = batch(step)
                loss = loss_of(model, x)
                (loss if scaler is None else scaler.scale(loss)).backward()
                if watch_after == "backward":
                    watched.step(loss, x)
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if scaler is None and not skip(loss):
                    optimizer.step()
                elif scaler is not None:
                    scaler.step(optimizer)
                    scaler.update()
                change(model, step)
                if watch_after == "optimizer":
                    watched.step(loss, x)
                optimizer.zero_grad(set_to_none)
                if watch_after == "zero_grad":
                    watched.step(loss, x)
    finally:
        Poison.place = ""
    return RunFolder(runs / "own").read_nonfinite()


def place_of(origin: NonfiniteOrigin) -> tuple[object, ...]:
    return origin.step, origin.where, origin.tensors, origin.layer, origin.heads


def diagnosed(run: Path) -> list[dict[str, Any]]:
    """Return the rows of all tables of ``flashpoint diagnose``."""
    result = CliRunner().invoke(main, ["diagnose", str(run), "--format", "json"])
    assert result.exit_code == 0, result.output
    return [row for table in json.loads(result.stdout)["tables"] for row in table["rows"]]


ALL = (1, 2, 3, 4)
IN_ATTENTION = [
    ("forward embedding", None, "forward", ("q", "k", "v"), 1, ALL),
    ("forward MLP 1", None, "forward", ("q", "k", "v"), 2, ALL),
    ("forward O 2", 2, "forward", ("O",), 2, (2,)),
    ("forward O 1", None, "forward", ("O",), 1, ALL),
    ("backward MLP 2", None, "backward", ("dO",), 2, ALL),
    ("backward MLP 1", None, "backward", ("dO",), 1, ALL),
    ("backward q 2", 3, "backward", ("dQ",), 2, (3,)),
    ("backward k 1", None, "backward", ("dK",), 1, ALL),
    ("backward v 2", 1, "backward", ("dV",), 2, (1,)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "head", "where", "tensors", "layer", "heads"), IN_ATTENTION)
def test_an_observed_step_names_layer_head_and_tensor(
    tmp_path: Path, place: str, head: int | None, where: str, tensors: tuple[str, ...], layer: int, heads: object
) -> None:
    """Of the last of 20 sequences, where a capture has 16."""
    (origin,) = train(tmp_path, place, head=head, interval=4)
    assert place_of(origin) == (FAILS, where, tensors, layer, heads)
    assert origin.lasting
    row = diagnosed(tmp_path / "own")[0]
    assert (row["step"], row["where"], row["tensors"]) == (FAILS, where, ", ".join(tensors))
    assert (row["layer"], row["lasting"]) == (layer, "true")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "head", "where", "tensors", "layer", "heads"),
    [
        ("forward O 2", 2, "forward", ("loss",), None, ()),
        ("forward embedding", None, "forward", ("loss",), None, ()),
        ("backward MLP 1", None, "backward", ("gradients",), None, ()),
        ("backward q 2", 3, "backward", ("dQ",), 2, (3,)),
        ("backward q 1", None, "backward", ("dQ",), 1, ALL),
        ("backward k 2", 1, "backward", ("dK",), 2, (1,)),
        ("backward v 1", None, "backward", ("dV",), 1, ()),
    ],
)
def test_a_step_that_is_not_observed_names_the_pass_and_what_gradients_show(
    tmp_path: Path, place: str, head: int | None, where: str, tensors: tuple[str, ...], layer: int | None, heads: object
) -> None:
    (origin,) = train(tmp_path, place, head=head)
    assert place_of(origin) == (FAILS, where, tensors, layer, heads)
    assert origin.lasting


@pytest.mark.slow
@pytest.mark.parametrize("interval", [4, 500])
@pytest.mark.parametrize(("place", "value"), [("forward O 2", math.nan), ("backward q 2", math.nan), ("", 0.0)])
def test_a_watch_after_the_optimizer_blames_what_one_before_it_does(
    tmp_path: Path, place: str, value: float, interval: int
) -> None:
    """Where no place is poisoned, the optimizer step makes a weight NaN."""

    def change(model: nn.Module, step: int) -> None:
        if step == FAILS and not place:
            with torch.no_grad():
                model.get_parameter("blocks.1.qkv.weight")[72] = math.nan

    def origins(watch_after: str) -> list[NonfiniteOrigin]:
        return train(tmp_path / watch_after, place, change=change, interval=interval, watch_after=watch_after)

    (origin,) = origins("optimizer")
    assert [origin] == origins("backward")


@pytest.mark.slow
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("interval", [4, 500])
def test_a_watch_after_zero_grad_accuses_no_optimizer(tmp_path: Path, interval: int, set_to_none: bool) -> None:
    (origin,) = train(
        tmp_path, "backward q 2", head=3, interval=interval, watch_after="zero_grad", set_to_none=set_to_none
    )
    if interval == 4:  # the step is observed
        assert place_of(origin) == (FAILS, "backward", ("dQ",), 2, (3,))
    else:
        assert (origin.step, origin.layer) == (FAILS, None)
        assert "The backward pass or the optimizer step made them so" in origin.text
    assert "gradients were missing or all 0" in origin.text
    assert "gradients were finite" not in origin.text


@pytest.mark.slow
def test_the_same_place_in_steps_in_a_row_is_told_once_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its loss is NaN, and its gradients are those of a number: an update changes nothing of it."""

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss + math.nan if x.shape[1] == 11 else loss

    origin, other = train(
        tmp_path, "backward MLP 2", batch=lambda step: torch.randn(20, 12 - (step in (1, 2)), 32), steps=8,
        loss_of=loss_of, interval=500,
    )  # fmt: skip
    assert (origin.step, origin.where, origin.lasting) == (1, "forward", False)
    assert (other.step, other.lasting) == (FAILS, True)
    told = capsys.readouterr().err
    assert told.count("the loss is nan, and the weights were finite") == 1
    assert "in 1 step: 2" in told


def test_an_optimizer_step_in_the_backward_pass_hides_no_nan_gradient(tmp_path: Path) -> None:
    model = Model(by_name, by_name)

    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= 0.01 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    (origin,) = train(tmp_path, "backward MLP 1", model=model, interval=500)
    assert place_of(origin) == (FAILS, "backward", ("gradients",), None, ())
    made = {name for name, one in model.named_parameters() if bool(one.isnan().any())}
    assert set(origin.parameters) <= made
    assert "blocks.1.qkv.weight" not in origin.parameters
    assert "its gradients were not finite" in origin.text


def test_a_first_step_that_makes_weights_nan_counts_after_the_optimizer(tmp_path: Path) -> None:
    def change(model: nn.Module, step: int) -> None:
        if step == 0:
            with torch.no_grad():
                model.get_parameter("blocks.1.qkv.weight")[72] = math.nan

    (origin,) = train(tmp_path, change=change, watch_after="optimizer")
    assert place_of(origin) == (0, "optimizer", ("weights",), None, ())


@pytest.mark.parametrize("watch_after", ["optimizer", "zero_grad"])
def test_a_parameter_that_holds_a_mask_is_no_origin_after_the_optimizer(tmp_path: Path, watch_after: str) -> None:
    model = Model(by_name, by_name)
    model.closed = nn.Parameter(torch.full((3,), -math.inf), requires_grad=False)
    assert not train(tmp_path, model=model, watch_after=watch_after)


@pytest.mark.slow
def test_gradients_name_the_parameters_between_which_it_came(tmp_path: Path) -> None:
    (origin,) = train(tmp_path, "backward MLP 1")
    assert origin.parameters[0] == "embedding.weight"
    assert origin.parameters[-1] == "blocks.0.mlp.bias"
    (everywhere,) = train(tmp_path / "two", "backward MLP 2")
    assert len(everywhere.parameters) == 8
    assert " (14 of 14) " in everywhere.text


@pytest.mark.slow
@pytest.mark.parametrize("interval", [4, 500])
def test_a_batch_with_nan_is_named(tmp_path: Path, interval: int) -> None:
    def batch(step: int) -> Tensor:
        x = torch.randn(20, 12, 32)
        x[19, 3, 2] = math.nan if step == FAILS else 0.0
        return x

    (origin,) = train(tmp_path, batch=batch, interval=interval)
    assert place_of(origin) == (FAILS, "batch", ("batch",), None, ())


@pytest.mark.slow
@pytest.mark.parametrize("interval", [4, 500])
def test_weights_that_the_optimizer_made_nan_are_told_so(tmp_path: Path, interval: int) -> None:
    def change(model: nn.Module, step: int) -> None:
        if step == FAILS:
            with torch.no_grad():
                # Of v: scores of NaN can leave O 0 in PyTorch's attention on a CPU, where keys fill no vector of it.
                model.get_parameter("blocks.1.qkv.weight")[72] = math.nan

    (origin,) = train(tmp_path, change=change, interval=interval)
    assert place_of(origin) == (FAILS, "optimizer", ("weights",), None, ())
    assert origin.parameters == ("blocks.1.qkv.weight",)
    outcome = RunFolder(tmp_path / "own").read_outcome()
    assert (outcome.onset_step, outcome.nonfinite) == (FAILS + 1, origin.text)


@pytest.mark.slow
@pytest.mark.parametrize("interval", [4, 500])
def test_an_infinite_gradient_makes_weights_nan_through_clipping(tmp_path: Path, interval: int) -> None:
    class Overflows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Model(by_name, by_name), nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * poison(self.last, "last")

    (origin,) = train(tmp_path, "backward last", value=math.inf, model=Overflows(), clip=True, interval=interval)
    assert place_of(origin) == (FAILS, "backward", ("gradients",), None, ())
    assert origin.parameters == ("last",)
    assert " held infinity, " in origin.text
    assert " last held NaN: " in origin.text


def test_scores_that_overflow_in_fp16_are_found(tmp_path: Path) -> None:
    def half(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, layer: int) -> Tensor:
        size = 300.0 if layer == 2 and half.step == FAILS else 1.0  # type: ignore[attr-defined]
        return line_by_line((q * size).half(), (k * size).half(), v.half(), is_causal, layer).float()

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        half.step += 1  # type: ignore[attr-defined]
        return model(x).square().mean()

    half.step = -1  # type: ignore[attr-defined]
    options = {"functions": [f"{__name__}:line_by_line"], "interval": 4}
    (origin,) = train(tmp_path, model=Model(half, half), loss_of=loss_of, **options)
    assert place_of(origin)[:4] == (FAILS, "forward", ("O",), 2)
    assert "in FP16" in origin.text
    found = {row["layer"]: row["finding"] for row in diagnosed(tmp_path / "own") if "what shows it" in row}
    assert found[2] == "fp16_overflow"


@pytest.mark.slow
def test_gradients_that_a_scaler_skips_are_no_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=100)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(x).float().square().mean()

    origins = train(tmp_path, scaler=scaler, loss_of=loss_of, steps=12, interval=4)
    skipped = round(24 - math.log2(scaler.get_scale()))
    assert skipped > 1
    assert origins == []
    assert not (tmp_path / "own/nonfinite.jsonl").exists()
    told = capsys.readouterr().err
    assert told.count("as where a GradScaler") == 1
    assert f"gradients of {skipped} steps held NaN or infinity" in told


@pytest.mark.slow
@pytest.mark.parametrize(("fails_at", "reads"), [(FAILS, 5), (FAILS, 100), (5, 3)])
def test_a_nan_gradient_between_two_reads_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fails_at: int, reads: int
) -> None:
    """Loss and weights stay finite, since the loop skips the update: no verdict and no gradient norm shows it."""
    monkeypatch.setattr(f"{__name__}.FAILS", fails_at)
    options = {"skip": lambda _: bool(Poison.place), "log_interval": reads, "interval": 100}
    origins = train(tmp_path, "backward q 2", head=3, steps=6, **options)
    assert origins == []
    told = [line for line in capsys.readouterr().err.splitlines() if "NaN" in line]
    assert len(told) == 1
    assert f"step {fails_at}: gradients alone held NaN" in told[0]
    assert "W_Q of layer 2, head 3 held NaN" in told[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "where", "tensors", "heads"),
    [("forward O 2", "forward", ("O",), ()), ("backward k 2", "backward", ("dK",), ())],
)
def test_a_call_that_is_left_out_is_named_by_its_number(
    tmp_path: Path, place: str, where: str, tensors: tuple[str, ...], heads: object
) -> None:
    """Cross-attention, whose keys are fewer than its queries, of three dimensions."""

    def cross(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, layer: int) -> Tensor:
        few = (x.flatten(0, 1) for x in (q, k[:, :, :5], v[:, :, :5]))
        return attend(*few, False, layer).unflatten(0, q.shape[:2])

    (origin,) = train(tmp_path, place, model=Model(by_name, cross, by_name), interval=4)
    assert place_of(origin) == (FAILS, where, tensors, None, heads)
    assert origin.call == 2
    assert "not judged" in origin.text


def test_a_run_of_which_no_attention_is_recorded_is_diagnosed_by_its_origin(tmp_path: Path) -> None:
    def unseen(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, layer: int) -> Tensor:
        q = poison(q, f"inner {layer}")
        return line_by_line(q, k, v, is_causal, layer)

    (origin,) = train(tmp_path, "backward inner 1", head=2, model=Model(unseen, unseen), functions=[], interval=4)
    assert place_of(origin) == (FAILS, "backward", ("gradients",), None, ())
    (row,) = diagnosed(tmp_path / "own")
    assert (row["step"], row["where"], row["tensors"]) == (FAILS, "backward", "gradients")


def test_rows_that_a_mask_empties_are_no_origin(tmp_path: Path) -> None:
    """Their O is NaN in every step, and no loss takes them."""

    last = torch.arange(12)[:, None] == 11

    def emptied(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, layer: int) -> Tensor:
        return with_empty_row(q, k, v, is_causal, layer).masked_fill(last, 0.0)

    options = {"model": Model(emptied, emptied), "functions": [f"{__name__}:with_empty_row"], "interval": 4}
    (origin,) = train(tmp_path, "backward MLP 1", **options)
    assert (origin.step, origin.where, origin.tensors, origin.call) == (FAILS, "backward", ("dO",), 1)


@pytest.mark.slow
def test_a_nan_that_goes_is_told_beside_the_one_that_stays(tmp_path: Path) -> None:
    def batch(step: int) -> Tensor:
        return torch.full((20, 12, 32), math.nan) if step == 1 else torch.randn(20, 12, 32)

    def skip(loss: Tensor) -> bool:
        return not loss.isfinite() and not Poison.place

    first, second = train(tmp_path, "forward O 1", batch=batch, skip=skip)
    assert (first.step, first.where, first.lasting) == (1, "batch", False)
    assert (second.step, second.where, second.lasting) == (FAILS, "forward", True)
    assert [row["step"] for row in diagnosed(tmp_path / "own") if "lasting" in row] == [FAILS, 1]
    assert RunFolder(tmp_path / "own").read_outcome().nonfinite == second.text


def test_weights_that_were_nan_before_the_first_step_are_told_so(tmp_path: Path) -> None:
    model = Model(by_name, by_name)
    nn.init.constant_(model.embedding.bias, math.nan)
    (origin,) = train(tmp_path, model=model)
    assert place_of(origin) == (0, "start", ("weights",), None, ())
    assert origin.parameters == ("embedding.bias",)


def test_a_parameter_that_holds_a_mask_is_no_origin(tmp_path: Path) -> None:
    model = Model(by_name, by_name)
    model.mask = nn.Parameter(torch.full((3, 3), -math.inf), requires_grad=False)
    assert train(tmp_path, model=model) == []
    (origin,) = train(tmp_path / "two", "backward q 2", head=3, model=model)
    assert place_of(origin) == (FAILS, "backward", ("dQ",), 2, (3,))


def test_the_last_step_of_a_loop_counts(tmp_path: Path) -> None:
    (origin,) = train(tmp_path, "backward q 2", head=3, steps=FAILS + 1)
    assert place_of(origin) == (FAILS, "backward", ("dQ",), 2, (3,))
    assert origin.lasting


def test_quantised_weights_leave_the_look_at_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(attend, attend)
    model.quantised = nn.Parameter(Quantised(torch.ones(3)), requires_grad=False)
    (origin,) = train(tmp_path, "backward k 2", model=model)
    assert (origin.step, origin.where, origin.tensors) == (FAILS, "backward", ("dK",))
    assert "failed" not in capsys.readouterr().err


def test_quantised_weights_that_are_trained_are_not_compared_with_those_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packages train them with optimizers of their own."""
    model = Model(attend, attend)
    model.quantised = nn.Parameter(Quantised(torch.ones(3)))

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        model.quantised.grad = torch.zeros(3)
        return model(x).square().mean()

    assert train(tmp_path, model=model, loss_of=loss_of, skip=lambda _: True) == []
    assert "failed" not in capsys.readouterr().err


def test_a_mask_that_holds_nan_may_have_made_it(tmp_path: Path) -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, layer: int) -> Tensor:
        bias = torch.zeros(12, 12)
        bias[3, 2] = torch.nan if Poison.place and layer == 2 else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    (origin,) = train(tmp_path, "mask", model=Model(masked, masked), functions=[], interval=1)
    assert (origin.step, origin.tensors) == (FAILS, ("O",))
    assert "the attention made it, or its mask or bias holds NaN" in origin.text
