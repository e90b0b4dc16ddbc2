"""The committed runs are whole, small, and equal where they are said to be."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from flashpoint.cli.run_words import select_runs
from flashpoint.detector import ExplosionDetector
from flashpoint.errors import UserError
from flashpoint.lab.data.batches import BatchOrder
from flashpoint.lab.data.tape import TapeHeader, TapeWriter
from flashpoint.lab.evidence.archiving import index_of
from flashpoint.lab.evidence.tables import Evidence, InTables
from flashpoint.lab.stored_config import trained_config
from flashpoint.runs import migrations
from flashpoint.runs.chain import first_difference, steps_of_both
from flashpoint.runs.metrics import Series
from flashpoint.runs.run import Run
from tests.conftest import REPOSITORY

REFERENCE = REPOSITORY / "runs/reference"
EVIDENCE = Evidence(REFERENCE)


def kept(name: str) -> Run:
    """A run of the evidence, EXPERIMENT:NAME."""
    experiment, _, run = name.partition(":")
    return EVIDENCE.experiments[experiment][run]


def test_the_runs_said_to_be_equal_are(name_of_equal: tuple[str, str]) -> None:
    one, other = (kept(name.replace("/", ":")).outcome for name in name_of_equal)
    for field in ("digest", "chain_digest", "weights_digest", "tape_digest", "onset_step"):
        assert getattr(one, field) == getattr(other, field)


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


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_run_of_the_tables_is_whole() -> None:
    """Every configuration, series and digest chain can be read, and all that is said to be there is."""
    for row in EVIDENCE.rows:
        run = EVIDENCE.experiments[row.experiment][row.name]
        stored = migrations.config_as_kept(json.loads(row.config))
        assert run.attention.name == stored["attn"]["name"]
        assert (run.seed, run.batch_size) == (stored["seed"], stored["train"]["batch_size"])
        if row.digits is None:
            with pytest.raises(UserError, match="kept without metrics"):
                run.columns  # noqa: B018
        else:
            assert run.columns
        if row.chain:
            assert run.chain.digest == run.outcome.chain_digest


@pytest.mark.slow
def test_the_index_is_that_of_the_tables() -> None:
    assert EVIDENCE.index_path.read_text() == index_of(EVIDENCE)
    experiments = {row.experiment for row in EVIDENCE.rows if row.digits is not None}
    assert {path.stem for path in (REFERENCE / "metrics").iterdir()} == experiments
    assert {path.stem for path in (REFERENCE / "chains").iterdir()} == {
        row.experiment for row in EVIDENCE.rows if row.chain
    }


def test_the_checkout_stays_small() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    files = [REPOSITORY / name for name in listed.decode().split("\0") if name]
    assert sum(file.lstat().st_size for file in files if file.is_file()) <= 30_000_000


@pytest.mark.parametrize("seed", [1, 3, 4, 5])
def test_the_runs_with_longer_tails_are_the_same_until_their_onset(seed: int) -> None:
    onset, losses = _until_onset(kept(f"ignite-h200:flash_bf16_seed-{seed}"))
    assert _until_onset(kept(f"tail-h200:flash_bf16_seed-{seed}")) == (onset, losses)
    assert onset is not None
    assert len(losses) == onset // 1000


def _until_onset(run: Run) -> tuple[int | None, dict[int, str]]:
    """Onset, and the validation losses before it to the six digits that evidence has."""
    series = zip(*run.columns["val_loss"], strict=True)
    return run.onset, {int(step): f"{loss:.6g}" for step, loss in series if step < (run.onset or 0)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_the_runs_whose_weights_were_measured_are_the_first_steps_of_those_with_an_onset(seed: int) -> None:
    runs = select_runs([f"weights-packages:*flash*_seed-{seed}"], REPOSITORY / "runs")
    assert len(runs) == 7
    for run in runs:
        longer = kept(f"laptop-packages:{run.name}").chain
        assert (run.chain.steps, steps_of_both(run.chain, longer)) == (600, 600)
        assert first_difference(run.chain, longer) is None


@pytest.mark.parametrize(
    "name",
    [
        *(f"flash_bf16_seed-{seed}" for seed in (0, 3, 6, 7)),
        *(f"exact_row_sum-flash_fixed_paper_seed-{seed}" for seed in (0, 4, 5, 6, 7)),
    ],
)
def test_runs_of_two_days_have_the_same_bits(name: str) -> None:
    one, other = (kept(f"{experiment}:{name}").chain for experiment in ("packages-h200", "horizon-h200"))
    assert steps_of_both(one, other) > min(one.steps, other.steps) - 100 > 5900
    assert first_difference(one, other) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["default-h200:explosion", "124m-h100:flash_bf16_seed-2", "laptop-packages:flash_bf16_seed-7"]
)
def test_the_batches_of_a_run_follow_from_its_seed(tmp_path: Path, name: str) -> None:
    run = kept(name)
    assert isinstance(run.stored, InTables)
    data = json.loads(run.stored.row.manifest)["data"]
    context, size = run.shape.context, run.batch_size
    sequences = trained_config(run).train.sequences
    n_tokens = data["files"]["train"]["tokens"]
    header = TapeHeader(
        data_fingerprint=data["fingerprint"],
        context=context,
        n_windows=(n_tokens - 1) // context,
        micro_batches=size // sequences,
        ranks=1,
        sequences=sequences,
        seed=run.seed,
        initial_weights=run.manifest.initial_weights,
    )
    tape, order = TapeWriter(tmp_path / "tape.bin", header), BatchOrder(n_tokens, context, header.shape, header.seed)
    for step in range(run.outcome.tape_steps):
        tape.append(order.windows(step))
    tape.close()
    assert tape.digest == run.outcome.tape_digest


def test_the_committed_run_repeats_from_its_checkpoint() -> None:
    original, rewound = (kept(f"replay-h200:{name}") for name in ("explosion", "explosion-rewound"))
    for name in ("loss", "grad_norm"):
        by_step, again = (_by_step(run.columns[name]) for run in (original, rewound))
        assert len(again) > 50
        assert again.items() <= by_step.items()


def _by_step(series: Series) -> dict[int, float]:
    return dict(zip(series[0].tolist(), series[1].tolist(), strict=True))


@pytest.mark.parametrize("name", ["default-h200:explosion", "ranks-h200:ranks"])
def test_a_verdict_follows_from_the_digest_chain(name: str) -> None:
    run = kept(name)
    detector = ExplosionDetector(trained_config(run).detector)
    assert len(run.chain.records) == run.chain.steps  # of these two runs each step is kept
    losses, norms = (run.chain.records[part].view(np.float32).tolist() for part in ("loss", "grad_norm"))
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        detector.update(step, loss, norm)
    assert (detector.verdict, detector.onset_step) == (run.outcome.outcome, run.onset)
    steps, kept_losses = run.columns["loss"]
    assert [float(f"{losses[step]:.6g}") for step in steps] == [float(f"{loss:.6g}") for loss in kept_losses]
