"""Probes beside a run: they change nothing, and a user adds one by naming it."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashpoint.drop_in import variant_of
from flashpoint.errors import UserError
from flashpoint.lab.config import Config, ModelConfig, ProbesConfig, TrainConfig
from flashpoint.lab.model import GPT
from flashpoint.lab.probes import observation, user_probes
from flashpoint.lab.probes.runner import BUILT_IN, ProbeRunner
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.manifest import ProbeOff
from flashpoint.runs.metrics import read_metrics
from tests.conftest import Command

OWN = """
import torch
from flashpoint.lab.probes.attention import Probe

class Longest(Probe):
    def measure(self, seen):
        return {"longest_query": seen.q.float().norm(dim=-1).amax((1, 3))}

class NoProbe:
    pass

class Unwritten(Probe):
    pass
"""


@pytest.mark.slow
def test_a_run_without_probes_has_the_same_digest(train: Command, tmp_path: Path) -> None:
    without = train("probes.weights_interval=0", "probes.attention_interval=0", "run_name=without")
    (tmp_path / "own.py").write_text(OWN)
    names = ",".join([*BUILT_IN, f"{tmp_path}/own.py:Longest"])
    observed = train("probes.attention_interval=1", f"probes.attention=[{names}]", "run_name=with")
    for result in (without, observed):
        assert result.returncode == 0, result.stderr
    outcomes = [json.loads((tmp_path / f"runs/{name}/outcome.json").read_text()) for name in ("without", "with")]
    assert outcomes[0]["digest"] == outcomes[1]["digest"]
    metrics = [read_metrics(tmp_path / f"runs/{name}/metrics.jsonl") for name in ("without", "with")]
    without_probes, with_probes = metrics
    assert not any(values.ndim == 3 for _, values in without_probes.values())
    steps, longest = with_probes["longest_query"]
    assert steps.tolist() == list(range(12))
    assert longest.shape == (2, 2, 12)
    assert with_probes["w_q_update_mean_key_share"][1][0, 1, -1] > 0
    assert abs(with_probes["delta_error_cumulative"][1][0, 1, -1]) > 0


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere.py:Longest", "nowhere.py is no file"),
        ("own.py:Shortest", "own.py has no Shortest; it has Longest, NoProbe, Unwritten"),
        ("own.py:NoProbe", "no subclass of"),
        ("own.py:Unwritten", "no measure(self, seen)"),
    ],
)
def test_a_probe_that_is_not_there_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        user_probes.load(name)
    assert told in str(raised.value)


@pytest.mark.slow
def test_a_run_with_a_probe_that_is_not_there_is_refused_in_one_line(train: Command, tmp_path: Path) -> None:
    result = train("probes.attention=[entropie]")
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "no probe named entropie" in line
    assert not (tmp_path / "runs").exists()


FAILING = """
import torch
from flashpoint.lab.probes.attention import Probe

class Failing(Probe):
    def measure(self, seen):
        return {"a": %s}

    def state(self):
        return %s

    def load_state(self, state):
        %s
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measures", "state", "told"),
    [
        ("1 / 0", "{}", "7: ZeroDivisionError: division by zero"),
        ("exit(3)", "{}", "7: SystemExit: 3"),
        ("seen.w_q.shape[7]", "{}", "7: IndexError: "),
        ("None", "{}", "6: measure gives a as a NoneType, expected a tensor [2, 2] of numbers"),
        ("0.5", "{}", "6: measure gives a as a float, expected a tensor [2, 2] of numbers"),
        ("torch.zeros(2)", "{}", "6: measure gives a as [2], expected a tensor [2, 2] of numbers"),
        ("seen.w_q[..., 0, 0].to_sparse() * 1j", "{}", "6: measure gives a as [2, 2], expected a tensor"),
        ("seen.w_q[..., 0, 0], 'loss': seen.w_q[..., 0, 0]", "{}", "6: measure names a metric 'loss', expected a free"),
        ("seen.w_q[..., 0, 0]", "{'of': [torch.zeros(1)]}", "9: state returns a Tensor as of.0; a state is stored as"),
        ("seen.w_q[..., 0, 0]", "{1: 2}", "9: state returns a int as a key, expected text; a state is stored as JSON"),
        ("seen.w_q[..., 0, 0]", "{'text': '\\ud800'}", "ValueError: "),
        ("seen.w_q[..., 0, 0]", "None", "9: state returns a NoneType, expected a dict of plain values"),
        ("seen.w_q[..., 0, 0]", "1 / 0", "10: ZeroDivisionError: division by zero"),
    ],
)
def test_a_probe_that_fails_is_off_and_told_with_its_users_line(
    tmp_path: Path, measures: str, state: str, told: str
) -> None:
    name = f"{tmp_path}/own.py:Failing"
    (tmp_path / "own.py").write_text(FAILING % (measures, state, "pass"))
    config, device = Config(), torch.device("cpu")
    model = GPT(ModelConfig(n_layer=2, n_head=2, d_model=32, context=8, vocab_size=300), config.attn, 0)
    probes = ProbesConfig(attention=(name, "ties"), attention_interval=1, weights_interval=0)
    runner = ProbeRunner(probes, model, TrainConfig(batch_size=4), device, print)
    batch = torch.arange(36).view(4, 9)
    for step in range(2):
        runner.before_step(step, batch, torch.tensor([0, step]))
        metrics = runner.after_step(step, last=False)
        assert "tied_rows" in metrics
        assert json.dumps(runner.state()[1].model_dump())
    assert "a" not in metrics
    (failed,) = runner.failed
    assert failed.probe == name
    assert failed.error.startswith(f"{tmp_path}/own.py:{told}" if told[0].isdigit() else f"{tmp_path}/own.py: {told}")


SWITCH = """
import torch
from flashpoint.lab.probes.attention import Probe

class Switch(Probe):
    def measure(self, seen):
        return {"is_fp32": torch.full((2, 2), torch.get_float32_matmul_precision() == "highest"), "a": %s}
"""


@pytest.mark.parametrize("measures", ["seen.w_q[..., 0, 0]", "1 / 0"])
@pytest.mark.parametrize("of_training", ["high", "highest"])
def test_a_probe_takes_products_in_fp32_and_leaves_the_switch_as_the_training_has_it(
    tmp_path: Path, of_training: str, measures: str
) -> None:
    (tmp_path / "own.py").write_text(SWITCH % measures)
    name = f"{tmp_path}/own.py:Switch"
    probes = ProbesConfig(attention=("deviation", name), attention_interval=1, weights_interval=1)
    model = GPT(ModelConfig(n_layer=2, n_head=2, d_model=32, context=8, vocab_size=300), Config().attn, 0)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(of_training)
        runner = ProbeRunner(probes, model, TrainConfig(batch_size=4), torch.device("cpu"), print)
        runner.before_step(0, torch.arange(36).view(4, 9), torch.tensor([0, 0]))
        assert torch.get_float32_matmul_precision() == of_training
        metrics = runner.after_step(0, last=False)
        assert torch.get_float32_matmul_precision() == of_training
    finally:
        torch.set_float32_matmul_precision(before)
    assert bool(runner.failed) == (measures == "1 / 0")
    assert runner.failed or metrics["is_fp32"].all()


@pytest.mark.slow
def test_a_failing_probe_costs_the_probe_or_with_strict_a_stop_from_which_the_run_goes_on(
    train: Command, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(FAILING % ("1 / 0", "{}", "pass"))
    probes = (f"probes.attention=[{own}:Failing,ties]", "checkpoints.interval=6")
    goes_on, stops = (train(*probes, f"probes.strict={strict}", f"run_name={strict}") for strict in (False, True))
    told = f"{own}:7: ZeroDivisionError: division by zero"
    assert (goes_on.returncode, stops.returncode) == (0, 2)
    assert f"step 4: {told}; probes.attention={own}:Failing is off, the run goes on" in goes_on.stderr
    assert (
        f"error: probes.attention={own}:Failing: {told}; mend it, then resume=runs/True trust=true goes on"
        in stops.stderr
    )
    runs = RunFolder(tmp_path / "runs/False"), RunFolder(tmp_path / "runs/True")
    off = {"probe": f"{own}:Failing", "step": 4, "error": told}
    assert [json.loads(run.manifest.read_text())["probes_off"] for run in runs] == [[off], [off]]
    assert [run.read_manifest().probes_off for run in runs] == [(ProbeOff(**off),)] * 2
    assert (runs[1].read_outcome().interrupted, runs[1].read_outcome().step) == ("probes.strict", 6)
    own.write_text(FAILING % ("seen.w_q[..., 0, 0]", "{}", "pass"))
    resumed = train("resume=True", "trust=true", tiny=False)
    assert resumed.returncode == 0, resumed.stderr
    without = train("probes.attention=[ties]", "run_name=without")
    digests = [RunFolder(tmp_path / f"runs/{name}").read_outcome().digest for name in ("False", "True", "without")]
    assert without.returncode == 0
    assert len(set(digests)) == 1
    assert read_metrics(runs[1].metrics)["a"][0].tolist() == [9]


@pytest.mark.parametrize(
    "variant",
    [
        variant_of("flash_bf16"),
        variant_of("flash_fixed"),
        dataclasses.replace(variant_of("flash_bf16"), layers=(2,), elsewhere=variant_of("flash_exact_rowsum")),
    ],
    ids=lambda variant: variant.name,
)
def test_what_an_observation_launches_is_launched_before_the_steps(
    monkeypatch: pytest.MonkeyPatch, variant: AttentionVariant
) -> None:
    """But for the passes of training. Else a GPU would wait at the first observation for the kernels' compilation."""
    launched = set[tuple[str, AttentionVariant, int]]()

    def noting(name: str) -> Callable[..., Any]:
        launch = getattr(observation, name)

        def noted(*given: Any, layer: int, **others: Any) -> Any:
            launched.add((name, given[3], layer))
            return launch(*given, layer=layer, **others)

        return noted

    for name in ("flash_fwd", "row_statistics"):
        monkeypatch.setattr(observation, name, noting(name))
    shape = ModelConfig(n_layer=2, n_head=2, d_model=32, context=16, vocab_size=64)
    model, key = GPT(shape, variant, 0), torch.tensor([1, 0])
    observation.launch_kernels(variant, torch.zeros(2, 1, 2, 16, 16, dtype=torch.bfloat16), key)
    before = launched | {("flash_fwd", variant, layer) for layer in (1, 2)}
    launched.clear()
    train = TrainConfig(batch_size=2)
    runner = ProbeRunner(
        ProbesConfig(attention=tuple(BUILT_IN), attention_interval=1), model, train, torch.device("cpu"), print
    )
    runner.before_step(0, torch.randint(0, 64, (1, 2, 17), generator=torch.Generator().manual_seed(0)), key)
    assert runner.after_step(0, last=False)
    assert launched
    assert launched <= before
