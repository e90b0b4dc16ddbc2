"""The experiment that explodes a GPT-2 of Transformers on a GPU, in small."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from flashpoint.cli.main import main
from flashpoint.cli.run_words import open_run
from flashpoint.lab.localize.own_loop import Mixture, OwnLoop
from flashpoint.runs.folder import RunFolder
from flashpoint.watching.loop import watch
from tests.conftest import REPOSITORY

WATCHING = REPOSITORY / "docs/watching.md"
SMALL = {"layers": "2", "heads": "2", "width": "32", "context": "16", "batch": "4", "vocabulary": "300", "steps": "8",
         "keep": "3", "observe": "4", "warmup": "2", "runs": "runs"}  # fmt: skip


def flashpoint(*words: str) -> Result:
    return CliRunner().invoke(main, words)


@pytest.mark.slow
def test_the_experiment_of_the_gpu_runs_in_small(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples import explode_gpt2

    monkeypatch.chdir(tmp_path)
    runs = [tmp_path / "runs" / f"explode-{name}" for name in ("sdpa", "flash_unrounded_out")]
    for run in runs:
        settings: dict[str, Any] = {**SMALL, "text": str(text_file), "attention": run.name.removeprefix("explode-")}
        assert explode_gpt2.train(**settings) == "stable"
    assert (runs[0] / "batches.csv").read_text() == (runs[1] / "batches.csv").read_text()
    assert [open_run(str(run)).title for run in runs] == ["sdpa", "point:unrounded_out"]
    told = flashpoint("diagnose", str(runs[0]), "--attention", "sdpa:math", "--format", "json")
    assert told.exit_code == 0, told.output
    assert [row["layer"] for row in json.loads(told.stdout)["tables"][-1]["rows"]] == [1, 1, 2, 2]
    function = f"{explode_gpt2.__file__}:step"
    loop = OwnLoop.of(RunFolder(runs[0]), function, str(runs[0] / "step-*.pt"), None)
    assert loop.checkpoints == [0, 3, 6]
    # A branch with the run's own attention is the run. Norms are taken before the last step changes the weights.
    trained = loop.train(Mixture("sdpa", "sdpa"), 0, 4, tmp_path / "branch")
    weights = torch.load(runs[0] / "step-000003.pt")["model"]["transformer.h.0.attn.c_attn.weight"][:, :32]
    norms = [float(torch.linalg.matrix_norm(part.double(), 2)) for part in weights.split(16, 1)]
    assert trained.norms[0] == pytest.approx(norms, rel=1e-3)
    assert trained.outcome == "stable"


@pytest.mark.slow
def test_a_bias_planted_as_the_documents_say_is_found_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples import nanogpt

    monkeypatch.chdir(tmp_path)
    ((head, *body),) = re.findall(
        r"^(from dataclasses import replace\n.*?)^(biased = .*?)^```", WATCHING.read_text(), re.M | re.S
    )
    known: dict[str, Any] = {}
    exec(head + "\n".join(body).replace("out =", "attend = lambda q, k, v, is_causal:"), known)
    loop = nanogpt.Loop({**nanogpt.SETTINGS, "context": "64"}, torch.nn.functional.scaled_dot_product_attention)
    loop.model.h[1].attn.attend = known["attend"]
    with watch(loop.model, name="planted") as watched:
        watched.capture(sequences=64)
        for _ in range(6):
            loop.step(watched)
    told = json.loads(flashpoint("diagnose", "runs/planted", "--format", "json").output)
    (found,) = told["tables"][0]["rows"]
    assert (found["layer"], found["heads"], found["finding"]) == (2, "1, 2, 3, 4", "delta_bias")
    sizes = {(row["layer"], row["head"]): row["δ bias"] for row in told["tables"][1]["rows"]}
    assert [sizes[2, head] for head in range(1, 5)] == pytest.approx([known["biased"].delta_error.size] * 4, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("symptom", "outcome"),
    [("nan", "nonfinite"), ("no_labels", "stable"), ("resume", "stable"), ("rise", "exploded"), ("zero", "stable")],
)
def test_each_symptom_ends_as_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, symptom: str, outcome: str
) -> None:
    from examples import symptoms

    monkeypatch.chdir(tmp_path)
    symptoms.main(symptom)
    run = open_run(str(tmp_path / "runs" / symptom))
    assert run.outcome is not None
    assert run.outcome.outcome == outcome
