"""Which attention calls of a model are found, and what is told of those that are left out."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from tests import warm
from tests.conftest import environment
from tests.watching.loops import Block, Pair, capturing, loop, plain


class With(Block):
    """A block whose attention is called with some options, and with keys of the first sequences alone."""

    def __init__(self, first: int = 3, **options: Any) -> None:
        super().__init__()
        self.first, self.options = first, options

    def forward(self, x: Tensor, _: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        k, v = k[: self.first], v[: self.first]
        return x + F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2)


class Alone(nn.Sequential):
    """Its parts are no modules that are called."""

    def forward(self, x: Tensor) -> Tensor:
        for one in self:
            x = one.forward(x)
        return x


@pytest.mark.parametrize("alone", [False, True])
def test_which_calls_of_a_forward_pass_are_left_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], alone: bool
) -> None:
    """Layers are counted without them: the reader cannot tell otherwise which of the model's they are. Where one module
    calls them all, their numbers do."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        with torch.no_grad():
            model(torch.zeros(1, 12, 32))  # its calls are of another forward pass
        plain(model, number, watched)

    monkeypatch.setattr(torch, "get_rng_state", lambda: torch.Generator().get_state())  # another than is drawn from
    one, kind = [With(first=1) for _ in range(5)], Alone if alone else nn.Sequential
    model = kind(Block(), one[0], With(dropout_p=0.1), *one[1:], With(is_causal=True))
    dropout, expand = sorted(loop(tmp_path, model, step).manifest.not_recorded)
    where = "calls 2, 4, 5, 6, … of 8" if alone else "modules 1, 3, 4, 5, …"
    assert expand.endswith(f"expand k and v to those of q, in {where}")
    assert dropout.endswith(", in call 3 of 8" if alone else ", in module 2")
    assert capsys.readouterr().err.count(f"({dropout}; {expand})") == 1


SCRIPT = """
import torch
import flashpoint

def attend(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

class Model(torch.nn.Linear):
    def forward(self, x):
        return attend(*super().forward(x).unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4))

model = Model(8, 24)
with flashpoint.watch(model, name="own", functions=["script:attend"]) as watched:
    watched.capture(sequences=0)
    for _ in range(2):
        loss = model(torch.randn(2, 12, 8)).square().mean()
        loss.backward()
        watched.step(loss)
        model.zero_grad()
print("trained")
"""


def test_a_function_of_the_script_that_runs_is_not_that_of_a_second_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which would train again, and the model would call the first one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("script.py").write_text(SCRIPT)
    runpy.run_path("script.py", run_name="__main__")
    assert capsys.readouterr().out.count("trained") == 1
    (call,) = read_calls(tmp_path / "runs/own")
    assert call.attention == "script:attend"


@pytest.mark.slow
def test_whoever_trains_a_model_of_transformers_is_told_what_can_be_done_there(tmp_path: Path) -> None:
    """Its attention and its checkpoints are called by the library, and not by a line of theirs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        tokens = torch.arange(24).view(2, 12)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        watched.step(loss, tokens)

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 32}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    reentrant = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", attn_pdrop=0.0, **sizes, **ends))
    reentrant.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    (told,) = loop(tmp_path / "reentrant", reentrant.train(), step, steps=1).manifest.not_recorded
    assert "gradient_checkpointing_kwargs={'use_reentrant': False}" in told
    bloom = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **sizes))
    (told,) = loop(tmp_path / "bloom", bloom, step, steps=1).manifest.not_recorded
    assert "BloomForCausalLM does without Transformers' AttentionInterface" in told
    (told,) = loop(tmp_path / "other", nn.Linear(32, 32), steps=1).manifest.not_recorded
    assert "AttentionInterface" not in told


class OfThree(nn.Linear):
    """Calls its attention with tensors of three dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, super().forward(x))


@pytest.mark.parametrize("capture", [False, True])
def test_a_loop_of_one_step_tells_why_its_calls_are_not_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], capture: bool
) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if capture:
            watched.capture()
        plain(model, number, watched)

    run = loop(tmp_path, OfThree(32, 32), step, steps=1)
    (reason,) = run.manifest.not_recorded
    told = capsys.readouterr().err
    assert told.count(f"step 0: no attention was recorded: {reason}") == 1
    assert "[3, 12, 32]" in reason


def test_a_capture_after_the_forward_pass_of_the_last_step_accuses_no_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32)
        loss = model(x).square().mean()
        if number == 2:
            watched.capture()  # observes what follows, and nothing does
        loss.backward()
        watched.step(loss, x)

    run = loop(tmp_path, None, step, steps=3, interval=100)
    assert run.manifest.not_recorded == ()
    assert "no attention was recorded" not in capsys.readouterr().err
    assert (tmp_path / "own/captures/step-0000000").is_dir()


class Nested(nn.Linear):
    """Calls its attention with sequences of several lengths."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), torch.tensor([0, 5, 14, 36]))
        x = super().forward(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x).transpose(1, 2).values()


def test_nested_tensors_are_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (reason,) = loop(tmp_path, Nested(32, 32)).manifest.not_recorded
    assert "nested" in reason
    assert "failed" not in capsys.readouterr().err


@pytest.mark.parametrize("thaws", [True, False])
def test_layers_that_are_trained_later_are_told_to_have_no_norms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], thaws: bool
) -> None:
    model = Pair()
    model.first.requires_grad_(not thaws)

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 2:
            model.requires_grad_()
        plain(model, number, watched)

    run = loop(tmp_path, model, step)
    told = "2 attentions are trained, and norms of W_Q and W_K are logged of the 1 that"
    assert capsys.readouterr().err.count(told) == thaws
    assert run.columns["w_q_spectral_norm"][1].shape[0] == (1 if thaws else 2)


def another(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later & is_causal, -torch.inf)
    return scores.softmax(-1) @ v


def test_a_function_in_the_place_of_pytorchs_attention_is_told_by_the_name_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", another)
    given = "torch.nn.functional:scaled_dot_product_attention"
    loop(tmp_path / "unnamed", With(is_causal=True), steps=1)
    assert given in capsys.readouterr().err
    loop(tmp_path / "named", With(is_causal=True), capturing(0, 0), steps=1, functions=[given])
    assert "is not PyTorch's" not in capsys.readouterr().err
    (call,) = read_calls(tmp_path / "named" / "own")
    assert (call.attention, call.form.is_causal) == (given, True)


@pytest.mark.slow
def test_pytorchs_attention_is_seen_inside_what_took_its_place_before(tmp_path: Path) -> None:
    """The watch took what was there at its import for PyTorch's: it saw neither."""
    script = tmp_path / "script.py"
    script.write_text("""
import sys, torch, torch.nn.functional as F
for name in [name for name in sys.modules if name.partition(".")[0] == "flashpoint"]:
    del sys.modules[name]  # this process was forked with it imported
own = F.scaled_dot_product_attention
F.scaled_dot_product_attention = lambda *given, **options: own(*given, **options)
import flashpoint
class Model(torch.nn.Linear):
    def forward(self, x):
        q = super().forward(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)
model = Model(8, 8)
with flashpoint.watch(model, runs_dir=sys.argv[1], name="run") as watched:
    watched.capture()
    loss = model(torch.randn(2, 5, 8)).square().mean()
    loss.backward()
    watched.step(loss)
""")
    ran = warm.run([sys.executable, str(script), str(tmp_path)], env=environment())
    ran.check_returncode()
    assert "what it does beside is not judged" in ran.stderr
    assert [call.attention for call in read_calls(tmp_path / "run")] == ["sdpa"]


def test_dimensions_beyond_four_are_to_be_flattened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Windows(Block):
        def forward(self, x: Tensor, _: Tensor | None = None) -> Tensor:
            q, k, v = self.qkv(x[:, None]).unflatten(-1, (3, 4, 8)).permute(3, 0, 1, 4, 2, 5)
            return x + F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(3)[:, 0]

    loop(tmp_path, Windows(), steps=1)
    told = capsys.readouterr().err
    assert "x.flatten(0, -4)" in told
    assert "unflatten" not in told
