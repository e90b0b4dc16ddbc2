"""After a capture the steps that follow are measured for the error of δ, until there are enough sequences."""

import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

from flashpoint.cli.main import main
from flashpoint.diagnosis.delta_bias import IGNITED, DeltaBias, delta_sample
from flashpoint.diagnosis.faults import Fault, faulty_attention
from flashpoint.diagnosis.measure_table import SEQUENCES
from flashpoint.diagnosis.verdict import diagnose
from flashpoint.errors import UserError
from flashpoint.watching.captures import read_calls, read_samples
from flashpoint.watching.loop import Watch
from tests.watching.loops import Pair, capturing, loop


def lines(capture: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (capture / "delta.jsonl").read_text().splitlines()]


def steps_of(capture: Path) -> list[int]:
    return list(dict.fromkeys(line["step"] for line in lines(capture)))


def test_steps_are_measured_until_there_are_enough_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        busy.append(watched.busy)
        capturing(1, 7)(model, number, watched)

    busy: list[bool] = []
    loop(tmp_path, step=step, steps=9, interval=500)
    assert busy == [False, False, True, True, True, False, False, False, False]
    folder = tmp_path / "own/captures/step-0000001"
    assert steps_of(folder) == [2, 3, 4]  # of 3 sequences each
    told = capsys.readouterr().err
    assert f"step 4: δ of 2 layers was measured on 9 sequences, of steps 2 to 4; flashpoint diagnose {folder}" in told
    assert sorted(path.name for path in folder.iterdir()) == [
        "batch.pt", "delta.jsonl", "layer-01.safetensors", "layer-02.safetensors",
    ]  # fmt: skip


def test_as_many_are_collected_as_show_the_smallest_bias_that_ignited_a_run() -> None:
    """With a noise of 2e-4 a row, 2,048 rows and 4 heads, at p < 0.001 over the heads."""
    from scipy import stats

    shown = stats.t.ppf(1 - 0.001 / 4 / 2, SEQUENCES - 1) * 2e-4 / 2048**0.5 / SEQUENCES**0.5
    assert shown == pytest.approx(min(IGNITED), rel=0.05)


def test_the_numbers_are_those_of_the_tensors_of_the_same_step(tmp_path: Path) -> None:
    """The same training twice: once a step's tensors are captured, once its δ alone is measured."""
    for name, first in (("tensors", 3), ("numbers", 2)):
        loop(tmp_path / name, step=capturing(first, 3), steps=5, interval=500)
    calls = read_calls(tmp_path / "tensors/own", 3)
    run = tmp_path / "numbers/own"
    samples = read_samples(run, None, read_calls(run))
    assert set(samples) == {1, 2}
    for call in calls:
        expected = delta_sample(call)
        assert samples[call.layer].steps == expected.steps == (3, 3, 3)
        assert samples[call.layer].measures.keys() == expected.measures.keys()
        for name, of in samples[call.layer].measures.items():
            assert torch.equal(of, expected.measures[name])


@pytest.mark.slow
@pytest.mark.parametrize("interval", [3, 500])
def test_collecting_changes_no_bit_of_the_training(tmp_path: Path, interval: int) -> None:
    watched_model, alone = (Pair() for _ in range(2))
    alone.load_state_dict(watched_model.state_dict())
    loop(tmp_path, watched_model, capturing(1, 20), steps=12, interval=interval)
    assert steps_of(tmp_path / "own/captures/step-0000001") == list(range(2, 9))
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    for _ in range(12):
        alone(torch.randn(3, 12, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(
        torch.equal(one, other) for one, other in zip(watched_model.parameters(), alone.parameters(), strict=True)
    )


def test_a_loop_that_ends_early_leaves_what_was_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        capturing(0, SEQUENCES)(model, number, watched)
        if number == 4:
            raise StopIteration

    with pytest.raises(StopIteration):
        loop(tmp_path, step=step, steps=9, interval=500)
    assert steps_of(tmp_path / "own/captures/step-0000000") == [1, 2, 3, 4]
    assert "measured on 12 of 256 sequences, of steps 1 to 4" in capsys.readouterr().err
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_capture_as_the_loop_ends_and_one_without_more_sequences_have_tensors_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, step in (("last", capturing(3, SEQUENCES)), ("none", capturing(0, 0))):
        loop(tmp_path / name, step=step, interval=500)
        run = tmp_path / name / "own"
        assert read_samples(run, None, read_calls(run)) == {}
    assert "δ is measured" not in capsys.readouterr().err


class Exploding:
    """Steps of a model whose head of layer 2 grows, and whose loss jumps at a step."""

    def __init__(self, jump: int, after: float) -> None:
        self.jump, self.after = jump, after

    def __call__(self, model: Any, number: int, watched: Watch) -> None:
        with torch.no_grad():
            model.second.qkv.weight[8:16] *= 1.01
        x = torch.randn(8, 12, 32)
        loss = model(x).square().mean()
        loss.backward()
        watched.step(loss * 0 + (self.after if number >= self.jump else 1.0), x)


@pytest.mark.slow
@pytest.mark.usefixtures("warned_soon")
def test_after_a_warning_its_layer_alone_is_measured(tmp_path: Path) -> None:
    loop(tmp_path, step=Exploding(9999, 0), steps=210, interval=100, weights_interval=10)
    (folder,) = (tmp_path / "own/captures").iterdir()
    assert [path.name for path in sorted(folder.glob("layer-*"))] == ["layer-02.safetensors"]
    assert {line["layer"] for line in lines(folder)} == {2}
    first = int(folder.name.removeprefix("step-")) + 1
    assert steps_of(folder) == list(range(first, first + SEQUENCES // 8))


@pytest.mark.slow
@pytest.mark.usefixtures("warned_soon")
def test_an_explosion_while_a_warnings_sequences_are_collected_has_its_own_capture(tmp_path: Path) -> None:
    loop(tmp_path, step=Exploding(120, 9.0), steps=220, interval=500, weights_interval=10)
    warned, exploded = sorted((tmp_path / "own/captures").iterdir())
    at = int(exploded.name.removeprefix("step-"))
    assert len(steps_of(warned)) < SEQUENCES // 8
    assert steps_of(warned)[-1] == at
    assert steps_of(exploded)[0] == at + 1
    assert len(steps_of(exploded)) == SEQUENCES // 8


@pytest.mark.slow
def test_a_loop_that_stops_when_the_watch_has_done_has_all_sequences(tmp_path: Path) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        Exploding(110, 9.0)(model, number, watched)
        if watched.verdict != "stable" and not watched.busy:
            raise StopIteration

    with pytest.raises(StopIteration):
        loop(tmp_path, step=step, steps=250, interval=500, weights_interval=10)
    (folder,) = (tmp_path / "own/captures").iterdir()
    assert len(steps_of(folder)) == SEQUENCES // 8
    assert {line["layer"] for line in lines(folder)} == {1, 2}  # no layer had grown for 500 steps


def test_a_loss_that_is_no_number_ends_the_collection(tmp_path: Path) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number in (1, 7):  # the second one after the loss was lost
            watched.capture()
        x = torch.randn(3, 12, 32)
        loss = model(x * float("nan") if number > 3 else x).square().mean()
        loss.backward()
        watched.step(loss, x)

    loop(tmp_path, step=step, steps=12, interval=500)
    assert steps_of(tmp_path / "own/captures/step-0000001") == [2, 3]
    assert not (tmp_path / "own/captures/step-0000007/delta.jsonl").exists()


@pytest.mark.slow
def test_a_capture_between_the_passes_of_a_collected_step_has_all_layers(tmp_path: Path, warned_soon: int) -> None:
    """The observation of the step has some layers alone: the next step is captured."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(8, 12, 32)
        loss = model(x).square().mean()
        if number == asked:
            watched.capture(sequences=8)
        loss.backward()
        with torch.no_grad():
            model.second.qkv.weight[8:16] *= 1.01  # type: ignore[union-attr, operator, index]
        watched.step(loss, x)

    asked = warned_soon + 24
    loop(tmp_path, step=step, steps=asked + 6, interval=500, weights_interval=20)
    warned, captured = sorted((tmp_path / "own/captures").iterdir())
    assert captured.name == f"step-{asked + 1:07}"
    assert steps_of(warned)[-2:] == [asked - 1, asked + 1]
    assert [call.layer for call in read_calls(captured)] == [1, 2]
    assert steps_of(captured) == [asked + 2]


def test_a_step_with_other_layers_is_left_out(tmp_path: Path) -> None:
    class Skipping(Pair):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            return self.second(x) if len(calls) in (3, 5) else super().forward(x)

    calls: list[Tensor] = []
    loop(tmp_path, Skipping(), capturing(1, 9), steps=8, interval=500)
    assert steps_of(tmp_path / "own/captures/step-0000001") == [3, 5, 6]


def test_a_step_whose_layers_are_of_other_modules_is_left_out(tmp_path: Path) -> None:
    """As where layers are dropped at random: as many are called, and a layer's number stands for another one."""

    class Alternating(Pair):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            return (self.second if len(calls) in (1, 2, 4, 6) else self.first)(x)

    calls: list[Tensor] = []
    run = loop(tmp_path, Alternating(), capturing(1, 5), steps=8, interval=1)
    assert steps_of(tmp_path / "own/captures/step-0000001") == [3, 5]
    assert run.columns["row_sum_relative_bias"][0].tolist() == [0, 1, 3, 5]  # the others are no numbers of this layer


@pytest.mark.slow
def test_measuring_ends_where_steps_show_the_captured_attentions_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with calls that cannot be recorded from some step on: a loop that waits for the watch goes on."""

    class Expanding(Pair):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            q = x.unflatten(-1, (4, 8)).transpose(1, 2)
            k = q[:1] if len(calls) > 4 else q
            out = F.scaled_dot_product_attention(q, k, k, is_causal=True)
            return x + self.first.out(out.transpose(1, 2).flatten(2))

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32, requires_grad=True)
        if number == 1:
            watched.capture()
        loss = model(x).square().mean()
        loss.backward()
        watched.step(loss)
        busy.append(watched.busy)

    calls: list[Tensor] = []
    busy: list[bool] = []
    loop(tmp_path, Expanding(), step, steps=106, interval=500, log_interval=50)
    assert steps_of(tmp_path / "own/captures/step-0000001") == [2, 3]
    assert busy.index(False, 2) == 4 + 99  # the hundredth step without them
    told = capsys.readouterr().err
    assert told.count("δ is measured no more: 100 steps in a row") == 1
    assert "6 of 256 sequences" in told


@pytest.mark.slow
@pytest.mark.usefixtures("warned_soon")
def test_after_a_warning_a_step_with_other_layers_has_all_of_them_captured(tmp_path: Path) -> None:
    """The layer that grew is the first one that such a step shows, and its number there is another one."""

    class Expanding(Pair):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            q, k, v = self.first.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            k, v = (x[:1] if len(calls) > 1 else x for x in (k, v))  # which is left out
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.second(x + self.first.out(out.transpose(1, 2).flatten(2)))

    calls: list[Tensor] = []
    loop(tmp_path, Expanding(), Exploding(9999, 0), steps=210, interval=500, weights_interval=20)
    (folder,) = (tmp_path / "own/captures").iterdir()
    assert [path.name for path in sorted(folder.glob("layer-*"))] == ["layer-01.safetensors"]
    assert steps_of(folder)


def test_measuring_that_fails_ends_the_collection_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flashpoint.watching.delta_collection.delta_sample", lambda _: 1 / 0)
    assert loop(tmp_path, step=capturing(1, 9), steps=8, interval=500).verdict == "stable to 8"
    assert capsys.readouterr().err.count("ZeroDivisionError: division by zero); training goes on") == 1


@pytest.mark.slow
def test_a_bias_that_a_capture_does_not_show_is_found_with_what_is_collected(tmp_path: Path) -> None:
    attend = faulty_attention(Fault("delta_bias", head=1, size=3e-5))

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).bfloat16().unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
            out: Tensor = _attend(q, k, v)
            return out.float()

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 0:
            watched.capture()
        loss = (model(torch.randn(8, 48, 64)) * torch.randn(8, 2, 48, 32)).mean()
        loss.backward()
        watched.step(loss)

    _Here.attend = staticmethod(attend)
    loop(tmp_path, Biased(), step, steps=40, interval=500, functions=[f"{__name__}:_attend"])
    (call,) = read_calls(tmp_path / "own")
    (sample,) = read_samples(tmp_path / "own", None, [call]).values()
    assert diagnose(call).findings == ()
    (found,) = diagnose(call, sample=sample).findings
    assert (found.kind, found.heads) == ("delta_bias", (2,))
    assert "264 sequences of 33 steps" in found.text
    capture = tmp_path / "own/captures/step-0000000"
    (capture / "layer-01.safetensors").unlink()
    result = CliRunner().invoke(main, ["diagnose", str(tmp_path / "own"), "--format", "json"])
    findings, heads = json.loads(result.stdout)["tables"]
    assert [(row["layer"], row["heads"], row["finding"]) for row in findings["rows"]] == [(1, "2", "delta_bias")]
    sums, bounds = (sample.measures[f"grad_delta_{part}"].sum(0) for part in ("sum", "bound"))
    assert [row["δ bias"] for row in heads["rows"]] == pytest.approx((sums / bounds).tolist(), rel=1e-12)
    few = tmp_path / "few"
    few.mkdir()
    line = lines(capture)[0]
    line["identities"] = line["identities"][:1]
    line["measures"] = {name: of[:1] for name, of in line["measures"].items()}
    (few / "delta.jsonl").write_text(json.dumps(line) + "\n")
    told = CliRunner().invoke(main, ["diagnose", str(few)]).stdout
    assert "Too few sequences to say anything of δ: 1 sequence with loss" in told
    assert "Nothing found" not in told
    refused = {"--attention": "sdpa", "--layer": "2", "--sequences": "9", "--step": "7", "--function": "a:b"}
    for option, value in refused.items():
        result = CliRunner().invoke(main, ["diagnose", str(capture), option, value])
        assert (result.exit_code, option in result.stderr) == (2, True)


class _Here:
    attend: Callable[..., Tensor]


def _attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
    return _Here.attend(q, k, v, is_causal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text.replace('"layer": 1', '"layer": 0'), "delta.jsonl:1: layer: found 0"),
        (lambda text: text.replace("delta_bias", "alpha_bias"), "of δ's errors"),
        (lambda text: text.replace("[[", "[[0.0], [", 1), "as many sequences and heads"),
        (lambda text: text[10:], "delta.jsonl:1: no JSON"),
        (lambda text: text * 2, "delta.jsonl:5: step 1 after step 2"),
        (
            lambda text: text[: len(text) // 2] + re.sub('"(grad_)?delta_', '"row_sum_', text[len(text) // 2 :]),
            "none of the measures that there were before",
        ),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, damage: Callable[[str], str], told: str) -> None:
    loop(tmp_path, step=capturing(0, 6), steps=4, interval=500)
    file = tmp_path / "own/captures/step-0000000/delta.jsonl"
    whole = file.read_text()
    calls = read_calls(tmp_path / "own")
    file.write_text(whole + whole[:20])  # a killed loop leaves a line cut short
    assert len(read_samples(tmp_path / "own", None, calls)[2].steps) == 6
    file.write_text(damage(whole))
    with pytest.raises(UserError, match=told.replace(".", r"\.")):
        read_samples(tmp_path / "own", None, calls)


def test_a_compressed_file_is_read_like_another_and_its_damage_is_told(tmp_path: Path) -> None:
    loop(tmp_path, step=capturing(0, 6), steps=4, interval=500)
    file, calls = tmp_path / "own/captures/step-0000000/delta.jsonl", read_calls(tmp_path / "own")
    plain_samples = read_samples(tmp_path / "own", None, calls)
    file.with_name("delta.jsonl.xz").write_bytes(content := lzma.compress(file.read_bytes()))
    file.unlink()
    packed = read_samples(tmp_path / "own", None, calls)
    assert {layer: of.steps for layer, of in packed.items()} == {layer: of.steps for layer, of in plain_samples.items()}
    for layer, sample in plain_samples.items():
        assert all(torch.equal(packed[layer].measures[name], of) for name, of in sample.measures.items())
    file.with_name("delta.jsonl.xz").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"delta\.jsonl\.xz: damaged"):
        read_samples(tmp_path / "own", None, calls)


@pytest.mark.parametrize("left_out", [("_rows",), ("_bound", "_rows")])
def test_an_older_file_that_leaves_measures_out_says_the_same(left_out: tuple[str, ...], tmp_path: Path) -> None:
    loop(tmp_path, step=capturing(0, 6), steps=4, interval=500)
    calls, file = read_calls(tmp_path / "own"), tmp_path / "own/captures/step-0000000/delta.jsonl"
    whole = read_samples(tmp_path / "own", None, calls)
    older = lines(file.parent)
    for line in older:
        line["measures"] = {name: of for name, of in line["measures"].items() if not name.endswith(left_out)}
    file.write_text("".join(json.dumps(line) + "\n" for line in older))
    for layer, sample in read_samples(tmp_path / "own", None, calls).items():
        assert sample.measures.keys() == whole[layer].measures.keys()
        for name, of in sample.measures.items():
            expected = torch.full_like(of, torch.inf) if name.endswith("_rows") else whole[layer].measures[name]
            torch.testing.assert_close(of, expected, rtol=1e-12, atol=0)
        assert not DeltaBias.of_samples([sample]).row_error.any()  # type: ignore[union-attr]


def test_a_file_of_another_models_heads_is_refused(tmp_path: Path) -> None:
    loop(tmp_path, step=capturing(0, 3), steps=4, interval=500)
    calls = [call.of_heads(slice(0, 2)) for call in read_calls(tmp_path / "own")]
    with pytest.raises(UserError, match="layer 1 with 4 heads, its tensors have 2"):
        read_samples(tmp_path / "own", None, calls)
