"""Of somebody's own loop a run says what it was told and what it has seen, and else that it does not know."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import flashpoint
from flashpoint.cli.progress import progress_of
from flashpoint.cli.run_words import open_run
from flashpoint.drop_in import variant_of
from flashpoint.errors import UserError
from flashpoint.lab.replay import resumed_values
from flashpoint.numerics.choices import DeltaError, Rounding
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.run import Run
from tests.records import call, refusal, rows, write_run
from tests.watching.loops import Pair, loop, plain

SHAPE = {"n_layer": 2, "n_head": 4, "d_model": 32, "context": 12, "modules": ["first", "second"]}
CRITERION = {"window": 100, "hold_steps": 50}


@pytest.mark.parametrize(
    ("given", "train"),
    [({}, {"warmup_steps": 0}), ({"steps": 9, "warmup_steps": 2, "margin": 0.5}, {"steps": 9, "warmup_steps": 2})],
)
def test_the_configuration_holds_what_is_known_and_no_default(
    tmp_path: Path, given: dict[str, Any], train: dict[str, Any]
) -> None:
    model = Pair()
    with flashpoint.watch(model, runs_dir=tmp_path, name="own", **given) as watched:
        plain(model, 0, watched)
    run = open_run("own", tmp_path)
    known = {"attn": {"name": "sdpa"}, "model": SHAPE, "train": train}
    known["detector"] = CRITERION | ({"margin": given["margin"]} if "margin" in given else {})
    assert json.loads((tmp_path / "own/config.json").read_text()) == known
    assert run.config.to_dict() == {**known, "model": {**SHAPE, "modules": ("first", "second")}}


class WithVariant(Pair):
    def __init__(self, choices: dict[str, Any]) -> None:
        super().__init__()
        self.variant = dataclasses.replace(variant_of("flash_bf16"), **choices)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return flashpoint.attention(q, k, v, is_causal=True, variant=self.variant)


@pytest.mark.parametrize(
    ("choices", "name"),
    [
        ({}, "flash_bf16"),
        ({"out_unnormalized": Rounding("nearest", 1)}, "flash_bf16, Ō of 1 mantissa bit"),
        ({"delta": "p_dp"}, "flash_bf16 delta=p_dp"),
        ({"delta_error": DeltaError(kind="bias", size=1e-3)}, "flash_bf16 injected"),
    ],
)
def test_a_variant_is_named_with_the_choices_that_are_not_its_files(
    tmp_path: Path, choices: dict[str, Any], name: str
) -> None:
    """A localisation that took its name for the file's would train branches with another attention."""
    assert loop(tmp_path, WithVariant(choices), steps=1).config.to_dict()["attn"] == {"name": name}


@pytest.fixture
def older(tmp_path: Path) -> str:
    """A watched run as earlier versions wrote it: their own defaults stand beside what they knew."""
    manifest = {"watched": True}
    metrics = [{"step": step, "loss": 2.0, "tokens_per_second": 1e3} for step in range(5)]
    return write_run(tmp_path / "older", {"name": "sdpa", "kernel": "sdpa"}, seed=7, manifest=manifest, metrics=metrics)


@pytest.mark.slow
def test_what_nobody_told_is_unknown_in_tables_and_pages(tmp_path: Path, older: str) -> None:
    loop(tmp_path, margin=0.3)
    new = str(tmp_path / "own")
    assert "seed" not in call("runs", older, new).stdout
    assert call("report", older, new, "--out", tmp_path / "page").returncode == 0
    page = (tmp_path / "page/report.html").read_text()
    assert page.count("<td>sdpa</td><td>unknown</td>") == 2
    assert "<p>2 runs with unknown initial weights and batches, on 2 kinds of hardware" in page
    (shown,) = rows(call("runs", older, "--show", "rates"))
    assert shown.endswith("| a CPU | 2.99 |  | 2026-11-21 |")


def test_a_question_to_what_nobody_told_is_refused(older: str) -> None:
    assert refusal(call("runs", older, older, "--show", "overhead")) == (
        f"error: {older}: its loop did not tell train.batch_size; leave the run out"
    )


@pytest.mark.parametrize("key", ["train.lr", "nonsense"])
def test_a_setting_that_nobody_told_is_not_the_example_of_one(older: str, key: str) -> None:
    told = refusal(call("survival", older, "--by", key))
    assert f"{key} is no number there" in told
    example = told.partition("e.g. ")[2].partition(",")[0]
    assert call("survival", older, "--by", example or "hardware").returncode == 0


def test_a_page_that_cannot_be_written_is_one_line(older: str, tmp_path: Path) -> None:
    page = tmp_path / "nowhere/page.html"
    assert refusal(call("watch", older, "--once", "--html", page)).startswith(f"error: --html {page}: No such file")


def test_a_record_is_not_taken_for_a_page(older: str) -> None:
    config = Path(older, "config.json")
    before = config.read_bytes()
    assert f"--html {config}: " in refusal(call("watch", older, "--once", "--html", config))
    assert config.read_bytes() == before


def test_a_watched_run_is_not_resumed(older: str) -> None:
    with pytest.raises(UserError, match="the loop that made it alone goes on"):
        resumed_values({"resume": older, "runs_dir": "runs"}, [])
    Path(older, "outcome.json").unlink()
    with pytest.raises(UserError, match="has not ended, the loop that made it alone goes on"):
        RunFolder(Path(older)).read_outcome()


def test_two_loops_are_never_taken_for_one_experiment_or_a_pair(tmp_path: Path) -> None:
    runs = []
    for name, onset in (("one", 500), ("two", None), ("three", None)):
        runs.append(write_run(tmp_path / name, {"name": "sdpa"}, onset=onset, manifest={"watched": True}))
    assert rows(call("survival", *runs))[0].startswith("| `sdpa` | 1 of 3 |")
    assert rows(call("survival", runs[0], runs[0]))[0].startswith("| `sdpa` | 1 of 1 |")  # one run, named twice
    assert refusal(call("survival", *runs[1:], "--paired", runs[0])).endswith("did not tell seed; leave the run out")


@pytest.mark.parametrize(
    ("steps", "first_step", "left", "shown"),
    [(None, 0, None, " 5 "), (20, 0, 30.0, "5 of 20"), (20, 3, 75.0, "5 of 20")],
)
def test_the_time_left_is_by_the_mean_rate_if_the_loop_tells_its_steps(
    older: str, steps: int | None, first_step: int, left: float | None, shown: str
) -> None:
    """Its tokens a step are unknown, so that the rate that it logs does not tell."""
    folder = RunFolder(Path(older))
    folder.outcome.unlink()
    config = json.loads(folder.config.read_text())
    config["train"] = {"warmup_steps": 0} | ({} if steps is None else {"steps": steps})
    folder.config.write_text(json.dumps(config))
    begun = {"started": "1970-01-01T00:16:40Z", "first_step": first_step}  # second 1,000
    manifest = json.loads(folder.manifest.read_text()) | begun
    folder.manifest.write_text(json.dumps(manifest))  # now, as when a step could not be recorded
    os.utime(folder.metrics, (1_010, 1_010))  # 2 s a step, or 5 of a loop that made two
    assert progress_of(Run.of_folder(folder)).seconds_left == left
    assert shown in call("watch", older, "--once").stdout
    os.utime(folder.metrics, (900, 900))  # as a copy may have it
    assert progress_of(Run.of_folder(folder)).seconds_left is None
    folder.manifest.write_text(json.dumps({**manifest, "started": "1970-13-01T"}))
    assert progress_of(Run.of_folder(folder)).seconds_left is None
