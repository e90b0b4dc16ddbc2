"""The committed runs are whole, small, and equal where they are said to be."""

import json
from pathlib import Path

import pytest

from flashpoint.data.tape import Tape
from flashpoint.run_folder import RunFolder
from flashpoint.tracking import metric_lines
from tests.conftest import REPOSITORY

REFERENCE = REPOSITORY / "runs/reference"


def test_the_runs_said_to_be_equal_are(name_of_equal: tuple[str, str]) -> None:
    one, other = (REFERENCE / name / "outcome.json" for name in name_of_equal)
    for field in ("digest", "chain_digest", "weights_digest", "tape_digest", "onset_step"):
        assert json.loads(one.read_text())[field] == json.loads(other.read_text())[field]


@pytest.fixture(
    params=[
        ("replay-h200/proof", "replay-h200/proof-again"),
        ("replay-h200/proof", "replay-h200/proof-killed"),
        ("replay-h200/explosion", "replay-h200/explosion-rewound"),
        ("ignite-h200/flash_bf16_seed-0", "default-h200/explosion"),
        ("default-h200/explosion", "replay-default-h200/explosion-rewound"),
        ("ignite-h200/flash_bf16_seed-2", "twins-h200/flash_bf16_seed-2"),
        ("ignite-h200/flash_bf16_seed-12", "twins-h200/flash_bf16_seed-12"),
        *(
            (f"ignite-h200/flash_bf16_seed-{seed}", f"early-full-h200/flash_bf16_seed-{seed}")
            for seed in (0, 1, *range(3, 12), 13)
        ),
        ("ignite-h200/flash_bf16_seed-2", "early-similarity-h200/flash_bf16_seed-2"),
        *(
            (f"ignite-h200/flash_centered_grad_seed-{seed}", f"centered-h200/flash_centered_grad_seed-{seed}")
            for seed in (4, 6)
        ),
        ("frozen-h200/flash_bf16-at4000_seed-2", "targets-h200/flash_bf16-unrounded-at4000_seed-2"),
        ("frozen-h200/flash_stochastic-at4500_seed-12", "targets-h200/flash_stochastic-model-at4500_seed-12"),
        ("probes-h200/default-unprobed", "probes-h200/default-probed"),
        ("probes-h200/default-unprobed", "replay-default-h200/proof"),
        ("replay-default-h200/proof", "replay-default-h200/proof-again"),
        ("replay-default-h200/proof", "replay-default-h200/proof-killed"),
        ("probes-h200/ignite-unprobed", "probes-h200/ignite-probed"),
        ("probes-h200/ignite-probed", "replay-h200/proof"),
        ("probes-h200/gpt2-unprobed", "probes-h200/gpt2-probed"),
        ("probes-h200/gpt2-probed", "probes-h200/gpt2-unprobed-again"),
        ("probes-h200/gpt2-probed", "probes-h200/gpt2-probed-again"),
        ("ranks-h200/ranks", "ranks-h200/ranks-again"),
        ("sdpa-h200/short", "sdpa-h200/short-again"),
        ("trainer-h200/ignite", "trainer-h200/ignite-single"),
        *((f"laptop-wandb/disabled-{seed}", f"laptop-wandb/offline-{seed}") for seed in range(4)),
    ]
)
def name_of_equal(request: pytest.FixtureRequest) -> tuple[str, str]:
    pair: tuple[str, str] = request.param
    return pair


def test_the_evidence_stays_small() -> None:
    assert sum(file.stat().st_size for file in REFERENCE.rglob("*") if file.is_file()) <= 40e6  # bytes


@pytest.mark.parametrize("seed", [1, 3, 4, 5])
def test_the_runs_with_longer_tails_are_the_same_until_their_onset(seed: int) -> None:
    onset, losses = _until_onset(REFERENCE / f"ignite-h200/flash_bf16_seed-{seed}")
    assert _until_onset(REFERENCE / f"tail-h200/flash_bf16_seed-{seed}") == (onset, losses)
    assert len(losses) == onset // 1000


def _until_onset(run: Path) -> tuple[int, dict[int, str]]:
    """Onset, and the validation losses before it to the six digits that evidence has."""
    onset = json.loads((run / "outcome.json").read_text())["onset_step"]
    records = map(json.loads, metric_lines(RunFolder(run).metrics))
    return onset, {
        record["step"]: f"{record['val_loss']:.6g}"
        for record in records
        if "val_loss" in record and record["step"] < onset
    }


@pytest.mark.parametrize("name", ["default-h200/explosion", "default-h200/fixed"])
def test_the_committed_tapes_are_whole(name: str) -> None:
    run = REFERENCE / name
    outcome = json.loads((run / "outcome.json").read_text())
    tape = Tape.read(run / "tape.bin")
    assert (tape.steps, tape.digest) == (outcome["tape_steps"], outcome["tape_digest"])


def test_the_committed_twins_had_the_same_weights_and_batches() -> None:
    explosion, fixed = (REFERENCE / "default-h200" / name / "tape.bin" for name in ("explosion", "fixed"))
    assert fixed.read_bytes().startswith(explosion.read_bytes())  # its header has the initial weights' digest


def test_the_committed_run_repeats_from_its_checkpoint() -> None:
    original, rewound = (REFERENCE / "replay-h200" / name for name in ("explosion", "explosion-rewound"))
    by_step, again = (
        {record["step"]: record for record in map(json.loads, metric_lines(RunFolder(run).metrics)) if "loss" in record}
        for run in (original, rewound)
    )
    assert len(again) > 50
    assert all(by_step[step] == record for step, record in again.items())
