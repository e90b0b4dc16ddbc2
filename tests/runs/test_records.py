"""What a run's files hold is checked where it is read: file, key, what was found and what is expected, in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from flashpoint.cli.run_words import open_run
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.errors import UserError
from flashpoint.lab.config import Config, ProbesConfig
from flashpoint.lab.evidence.tables import Evidence
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.manifest import ProbeOff
from flashpoint.runs.metrics import read_metrics
from flashpoint.runs.run import Run
from tests.conftest import Command
from tests.lab.evidence.kept import write_kept_run
from tests.records import call, refusal, write_run

ATTN = {"name": "flash_bf16"}
GONE = object()


def change(path: Path, key: str, value: object) -> None:
    """Set a dotted key of a JSON file, or take it out."""
    whole = inside = json.loads(path.read_text())
    *parents, last = key.split(".")
    for parent in parents:
        inside = inside[parent]
    if value is GONE:
        del inside[last]
    else:
        inside[last] = value
    path.write_text(json.dumps(whole))


@pytest.mark.parametrize(
    ("stored", "today"),
    [
        ({"name": "flash_fixed", "exact_row_sum": True, "delta": "out"}, "flash_fixed_paper exact_row_sum=True"),
        ({"name": "flash_fixed beta=2.0", "exact_row_sum": True}, "flash_fixed_paper exact_row_sum=True beta=2.0"),
        ({"name": "flash_fixed", "exact_row_sum": False, "delta": "out"}, "flash_fixed_paper"),
        ({"name": "flash_fp32_delta_split out_residual_bits=3"}, "flash_fixed out_residual_bits=3"),
        ({"name": "flash_fixed", "delta": "out_fp32", "out_residual_bits": 6}, "flash_fixed"),
        ({"name": "flash_fixed delta=p_dp out_residual_bits=None", "delta": "p_dp"}, None),
        ({"name": "flash_fixed_paper", "exact_row_sum": True}, None),
    ],
)
def test_an_attention_that_was_called_otherwise_has_todays_name(tmp_path: Path, stored: dict, today: str) -> None:
    write_run(tmp_path / "r", stored)
    assert open_run(str(tmp_path / "r")).attention.name == (today or stored["name"])


@pytest.mark.parametrize(
    ("file", "key", "value", "told"),
    [
        ("config", "seed", GONE, "seed: missing, expected a whole number"),
        ("config", "seed", "3", 'seed: found "3", expected a whole number'),
        ("config", "train.steps", None, "train.steps: found null, expected a whole number"),
        ("config", "train.steps", -1, "train.steps: found -1, expected more than 0"),
        ("config", "train.lr", [0.1], "train.lr: found [0.1], expected a finite number"),
        ("config", "train.decay_steps", True, "train.decay_steps: found true, expected a whole number or null"),
        ("config", "model", [], "model: found [], expected an object"),
        ("config", "probes.attention", "ties", 'probes.attention: found "ties", expected a list'),
        ("config", "train.device", "tpu", 'train.device: found "tpu", expected one of auto, cpu, cuda'),
        ("config", "attn", {}, "attn.name: missing, expected text"),
        ("config", "attn.probs", {"mode": "up"}, 'attn.probs.mode: found "up", expected one of none, nearest, stoch'),
        ("config", "attn.block_k", 0, "attn.block_k=0: give at least 1"),
        ("config", "attn.later", 1, "attn.later: no key of this version of flashpoint, maybe of a newer one"),
        ("config", "attn.elsewhere", {"name": 5}, "attn.name: found 5, expected text"),
        ("manifest", "environment.torch", 2, "environment.torch: found 2, expected text"),
        ("manifest", "parent", {"run": "a"}, "parent.from_step: missing, expected a whole number or null"),
        ("outcome", "outcome", "lost", 'outcome: found "lost", expected one of stable, exploded, nonfinite'),
        ("outcome", "onset_step", None, "onset_step: found None beside outcome exploded"),
        ("outcome", "loss", "much", 'loss: found "much", expected a number, or -inf, inf, nan as text'),
        ("outcome", "step", 10**30, "step: found 1000000000000000000000000000000, expected less than 9,223,372,036"),
    ],
)
def test_a_wrong_value_is_told_with_file_and_key(tmp_path: Path, file: str, key: str, value: object, told: str) -> None:
    run = write_run(tmp_path / "run", ATTN, onset=900)
    change(tmp_path / f"run/{file}.json", key, value)
    assert refusal(call("survival", run)).startswith(f"error: {run}/{file}.json: {told}")


def test_a_stable_run_has_no_onset_not_even_at_step_0(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ATTN)
    change(tmp_path / "run/outcome.json", "onset_step", 0)
    told = f"error: {run}/outcome.json: onset_step: found 0 beside outcome stable"
    assert refusal(call("survival", run)).startswith(told)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', "[" * 100_000, '{"seed": "\\ud800"}', "\0"])
def test_what_is_no_record_at_all_is_one_line(tmp_path: Path, content: str) -> None:
    run = write_run(tmp_path / "run", ATTN)
    (tmp_path / "run/config.json").write_text(content)
    assert refusal(call("survival", run)).startswith(f"error: {run}/config.json: ")


def test_keys_of_newer_and_of_older_versions_are_read(tmp_path: Path) -> None:
    write_run(tmp_path / "run", ATTN)
    folder = RunFolder(tmp_path / "run")
    for file, key in ((folder.config, "later"), (folder.config, "train.later"), (folder.manifest, "later")):
        change(file, key, {"a": [1]})
    for key in ("train.precision", "probes", "checkpoints", "allow_world_size_change"):  # younger than some runs
        change(folder.config, key, GONE)
    change(folder.config, "attn", {**ATTN, "probs": "nearest", "probs_bits": 5})  # as earlier versions stored it
    run = Run.of_folder(folder)
    assert isinstance(run.config, Config)
    assert (run.config.probes, run.config.train.precision, run.attention.probs.bits) == (ProbesConfig(), "bf16", 5)
    assert run.manifest.parameters == 1000
    folder.note_probe_off(ProbeOff(probe="own.py:P", step=4, error="ValueError"))
    assert json.loads(folder.manifest.read_text())["later"] == {"a": [1]}  # what is not known is not lost


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"loss": 1.0}', "step: found None, expected a whole number of 0 or more"),
        ('{"step": "1", "loss": 1.0}', "step: found 1, expected a whole number"),
        ('{"step": 1, "loss": null}', "loss: expected a number, or lists of them by layer and head"),
        ('{"step": 1, "loss": "12"}', "loss: expected a number"),
        ('{"step": 1, "loss": true}', "loss: expected a number"),
        ('{"step": 1, "loss": 1' + "0" * 400 + "}", "loss: expected a number"),
        ('{"step": 1, "lr": [[1.0]]}', "lr: found a list, expected a number"),
        ('{"step": 1, "norm": [[]]}', "norm: expected a number, or lists"),
        ('{"step": 1, "norm": [[1.0], [2.0, 3.0]]}', "norm: expected a number, or lists"),
        ('{"step": 0, "loss": 1.0}', "loss: other heads than before, or an earlier step"),
        ('{"step": 1, "layer/1/head/2/norm": 1.0}', "norm: expected every head of 1 layers of 2"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
    ],
)
def test_a_wrong_metric_is_told_with_its_line(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "loss": 2.0}}\n{line}\n')
    with pytest.raises(UserError) as raised:
        read_metrics(path)
    assert str(raised.value).startswith(f"{path}:2: damaged line ({told}")


@pytest.mark.parametrize(
    ("table", "edit", "told"),
    [
        ("metrics/small", lambda t: t.drop_columns(["step"]), "step: missing, expected column 2 to be int64"),
        (
            "metrics/small",
            lambda t: t.set_column(t.column_names.index("loss"), "loss", t["run"]),
            "loss: found string, expected double, or lists",
        ),
        ("chains/small", lambda t: t.set_column(2, "loss", t["state"]), "loss: found uint64, expected float"),
        ("runs", lambda t: t.drop_columns(["config"]), "row 1: config: missing, expected text"),
        ("runs", lambda t: t.set_column(5, "manifest", t["name"]), "small:seed-0: manifest: no JSON"),
    ],
)
def test_a_wrong_column_of_the_evidence_is_told(
    tmp_path: Path, table: str, edit: Callable[[Any], Any], told: str
) -> None:
    run = write_kept_run(tmp_path / "runs/seed-0")
    assert run.folder
    call("archive", "seed-0", "small", cwd=tmp_path)
    path = tmp_path / f"runs/reference/{table}.parquet"
    pq.write_table(edit(pq.read_table(path)), path)

    def everything() -> object:
        kept = Evidence(tmp_path / "runs/reference").experiments["small"]["seed-0"]
        return kept.manifest, kept.columns, kept.chain

    with pytest.raises(UserError) as raised:
        everything()
    assert str(raised.value).startswith(f"{path}: {told}")


@pytest.mark.slow
def test_a_run_that_can_be_resumed_can_be_after_every_refusal(train: Command, tmp_path: Path) -> None:
    """Commands that are refused, by what they name or by what they find, leave every byte of the run."""
    result = train("checkpoints.interval=6", "run_name=killed", "probes.attention=[ties]")
    assert result.returncode == 0, result.stderr
    run = RunFolder(tmp_path / "runs/killed")
    digest = run.read_outcome().digest
    run.outcome.unlink()

    def state() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != ".lock"}

    whole = state()
    for argument in ("train.lr=1", "train.steps=none", "from_step=4"):
        refused = train("resume=killed", argument, tiny=False)
        assert refused.returncode == 2, refused.stderr
        assert state() == whole
    for file, content in ((run.config, "{}"), (run.manifest, "null"), (run.tape, "no tape"), (run.chain, "no chain")):
        kept = file.read_bytes()
        file.write_text(content)
        damaged = state()
        refused = train("resume=killed", tiny=False)
        assert refused.returncode == 2, refused.stderr
        assert refused.stderr.splitlines()[-1].startswith(f"error: runs/killed/{file.name}: ")
        assert state() == damaged
        file.write_bytes(kept)
    resumed = train("resume=killed", tiny=False)
    assert resumed.returncode == 0, resumed.stderr
    assert run.read_outcome().digest == digest


@pytest.mark.parametrize(
    ("told", "wrong"),
    [
        ('{"layer": "1"}', 'layer: found "1", expected a whole number'),
        ('{"scale": null}', "scale: found null, expected a finite number"),
        ("[]", "found [], expected an object"),
        ("{", "no JSON"),
    ],
)
def test_a_capture_that_says_something_else_of_its_call_is_refused(tmp_path: Path, told: str, wrong: str) -> None:
    path = tmp_path / "call.safetensors"
    save_file({name: torch.zeros(1, 1, 4, 16) for name in ("q", "k", "v", "grad_out")}, path, {"flashpoint": told})
    with pytest.raises(UserError) as raised:
        AttentionCall.read(path)
    assert str(raised.value).startswith(f"{path}: metadata: {wrong}")


def test_a_run_with_damaged_metrics_is_told_and_the_others_are_compared(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), ATTN, seed=seed, val_loss=2.5) for seed in range(3)]
    (tmp_path / "1/metrics.jsonl").write_text('{"step": null}\n')
    result = call("loss", *runs)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {runs[1]}/metrics.jsonl:1: damaged line (step: found None, expected")
    assert result.stdout == call("loss", runs[0], runs[2]).stdout
