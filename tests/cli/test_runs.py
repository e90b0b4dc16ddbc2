"""``flashpoint runs`` on runs whose rates, norms and warnings are known by hand."""

import fcntl
from pathlib import Path
from typing import Any

import pytest

from flashpoint.runs.folder import RunFolder
from tests.lab.evidence.kept import set_outcome
from tests.records import call, refusal, rows, values, write_run

ATTN = {"name": "flash_bf16"}
LOSSES = [{"step": step, "loss": 2.0} for step in range(900)]


def test_a_run_that_has_not_ended_is_listed_among_those_that_have(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "whole", ATTN, steps=1000, onset=900, digest="abc"),
        write_run(tmp_path / "killed", ATTN, seed=2, metrics=LOSSES),
        write_run(tmp_path / "begun", ATTN, seed=2),
    ]
    for name in ("killed", "begun"):
        (tmp_path / name / "outcome.json").unlink()
    assert rows(call("runs", *runs)) == [
        "| `whole` | 1 | exploded | 1,000 | 900 | `abc` |",
        "| `killed` | 2 | not ended | 900 |  |  |",
        "| `begun` | 2 | not ended |  |  |  |",
    ]
    assert call("runs", *runs).stdout.splitlines()[0] == "a CPU, torch 2.99; corpus unknown; seeds 1 to 2; 2026-11-21"
    with RunFolder(tmp_path / "killed").locked():
        assert rows(call("runs", *runs))[1] == "| `killed` | 2 | under way | 900 |  |  |"
        with RunFolder(tmp_path / "whole").locked():
            assert not RunFolder(tmp_path / "begun").under_way
    assert rows(call("runs", *runs))[1] == "| `killed` | 2 | not ended | 900 |  |  |"
    with (tmp_path / "killed/.lock").open("rb") as another_reader:
        fcntl.flock(another_reader, fcntl.LOCK_SH)
        assert not RunFolder(tmp_path / "killed").under_way


def test_a_run_that_was_ended_early_is_stopped_wherever_its_end_is_shown(tmp_path: Path) -> None:
    """Unless it had exploded before. Survival tables count it as they did: censored at its last step."""
    held, exploded = (
        write_run(tmp_path / name, ATTN, seed=seed, steps=900, onset=onset, digest="abc", metrics=LOSSES)
        for seed, (name, onset) in enumerate([("held", None), ("exploded", 800)])
    )
    before = call("survival", held, exploded)
    for run in (held, exploded):
        set_outcome(Path(run), interrupted="SIGTERM")
    assert rows(call("runs", held, exploded)) == [
        "| `held` | 0 | stopped | 900 | none | `abc` |",
        "| `exploded` | 1 | exploded | 900 | 800 | `abc` |",
    ]
    assert call("survival", held, exploded).stdout == before.stdout
    assert call("watch", held, "--once").stdout.splitlines()[-1] == "held: stopped at 900"
    assert call("report", held, "--out", tmp_path / "page").returncode == 0
    assert '<td class="stopped">stopped at 900</td>' in (tmp_path / "page/report.html").read_text()


def test_hardware_has_a_column_where_it_differs(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / name, ATTN, onset=900, digest="abc", manifest={"hardware": hardware})
        for name, hardware in {"first": "NVIDIA H200", "second": "NVIDIA A100"}.items()
    ]
    assert rows(call("runs", *runs)) == [
        "| `first` | NVIDIA H200 | exploded | 1,000 | 900 | `abc` |",
        "| `second` | NVIDIA A100 | exploded | 1,000 | 900 | `abc` |",
    ]


@pytest.mark.parametrize("question", ["outcomes", "rates", "hottest", "recovery", "warnings", "overhead"])
def test_runs_of_one_name_are_called_by_where_they_are(tmp_path: Path, question: str) -> None:
    at = {"w_q_spectral_norm": norms(1.0), "val_loss": 2.0, "tokens_per_second": 1.0}
    of = {"onset": 900, "val_loss": 2.0, "metrics": [{"step": 0, **at}]}
    runs = [write_run(tmp_path / name, ATTN, **of) for name in ("one/same", "two/same", "two/other")]
    called = [row["run"] for row in values("runs", *runs, "--show", question)]
    assert called == [runs[0], runs[1], "other"]


def test_without_a_word_the_runs_here_and_those_of_their_sweeps_are_shown(tmp_path: Path) -> None:
    assert refusal(call("runs", cwd=tmp_path)).startswith("error: runs: no such folder here; flashpoint train makes it")
    for name in ("sweep/flash_bf16_seed-0", "reference/kept", "alone"):
        write_run(tmp_path / "runs" / name, ATTN, digest="d")
    assert rows(call("runs", cwd=tmp_path)) == [
        "| `alone` | stable | 1,000 | none | `d` |",
        "| `flash_bf16_seed-0` | stable | 1,000 | none | `d` |",
    ]


def test_a_bad_run_is_told_and_the_others_are_shown(tmp_path: Path) -> None:
    good, damaged = (write_run(tmp_path / name, ATTN) for name in ("good", "damaged"))
    (tmp_path / "damaged/manifest.json").write_text("{")
    result = call("runs", damaged, "nowhere", good)
    assert result.returncode == 2
    assert result.stdout == call("runs", good).stdout
    missing, unreadable = result.stderr.splitlines()
    assert missing.startswith("error: nowhere: no run there")
    assert unreadable.startswith(f"error: {damaged}/manifest.json: no JSON")


def rate(step: int, value: float) -> dict[str, Any]:
    return {"step": step, "tokens_per_second": value}


def test_rates_are_quartiles_without_the_first_fifth(tmp_path: Path) -> None:
    model = {"n_layer": 2, "d_model": 64, "context": 32}
    readings = [rate(10 * number, 1.0 if number < 2 else 1000.0 * number) for number in range(10)]
    run = write_run(tmp_path / "run", ATTN, seed=3, metrics=readings, config={"model": model})
    # Of 2,000 to 9,000: the quartiles of eight values, as NumPy interpolates them.
    assert rows(call("runs", run, "--show", "rates")) == [
        "| `run` | `flash_bf16` | 2 × 64, T 32 | 5,500 | 3,750 to 7,250 | 10 | a CPU | 2.99 | 3 | 2026-11-21 |"
    ]
    none = write_run(tmp_path / "none", ATTN)
    assert "no reading of tokens_per_second" in refusal(call("runs", none, "--show", "rates"))


def test_overhead_is_that_of_the_mean_step_of_the_second_half(tmp_path: Path) -> None:
    def record(name: str, *rates: float) -> str:
        config = {"model": {"context": 10}, "train": {"batch_size": 4}}
        metrics = [rate(step, value) for step, value in enumerate(rates)]
        return write_run(tmp_path / name, ATTN, metrics=metrics, config=config)

    without, probed = record("without", 1.0, 1.0, 40_000.0, 20_000.0), record("probed", 1.0, 20_000.0)
    # 40 tokens a step: 1 and 2 ms, and 2 ms.
    assert rows(call("runs", without, probed, "--show", "overhead")) == [
        "| `without` | 1.500 |  |",
        "| `probed` | 2.000 | +33.3 % |",
    ]
    assert values("runs", without, probed, "--show", "overhead")[1]["ms a step"] == pytest.approx(2)


def norms(hot: float) -> list[list[float]]:
    return [[1.0, 1.0, 1.0], [1.0, 1.0, hot]]


def test_the_hottest_heads_are_those_at_the_end(tmp_path: Path) -> None:
    metrics = [{"step": step, "w_q_spectral_norm": norms(hot)} for step, hot in ((0, 1.0), (9, 35.25))]
    deep = write_run(tmp_path / "deep", ATTN, onset=700, metrics=metrics)
    flat = write_run(tmp_path / "flat", ATTN, metrics=[{"step": 0, "w_q_spectral_norm": [[2.0]]}])
    assert rows(call("runs", deep, flat, "--show", "hottest")) == [
        "| `deep` | exploded at 700 | 1.0 1.0 1.0 | 1.0 1.0 35.2 |",
        "| `flat` | stable to 1,000 | 2.0 |  |",
    ]
    assert values("runs", deep, "--show", "hottest")[0]["layer 2"] == {"head 1": 1.0, "head 2": 1.0, "head 3": 35.25}


def test_a_run_that_two_words_name_counts_once(tmp_path: Path) -> None:
    """Of two explosions the interval is 0 to 84 %, 1 − 0.025^(1/2); of four it would be 0 to 60 %."""
    metrics = [{"step": step, "w_q_spectral_norm": [[1.0, 1.0]]} for step in range(0, 1000, 100)]
    for seed in (1, 2):
        write_run(tmp_path / str(seed), {"name": "flash_bf16"}, seed=seed, onset=900, metrics=metrics)
    told = call("runs", tmp_path, tmp_path / "*", tmp_path / "1/../2", "--show", "warnings").stdout
    assert "foretold 0 of 2 explosions (0 to 84 %)" in told
    assert [row.split(" | ")[0] for row in rows(call("runs", tmp_path / "2", tmp_path))] == ["| `2`", "| `1`"]


def test_warnings_are_leads_and_false_alarms(tmp_path: Path) -> None:
    def record(name: str, onset: int | None, final: float) -> str:
        at = ((0, 1.0), (500, 1.0), (1000, final), (1500, final))
        metrics = [{"step": step, "w_q_spectral_norm": norms(hot)} for step, hot in at]
        return write_run(tmp_path / name, ATTN, steps=1501, onset=onset, metrics=metrics)

    runs = [record("a", 1400, 3.0), record("b", 900, 3.0), record("c", None, 3.0), record("d", None, 1.0)]
    under_way = Path(record("e", None, 3.0))  # what it is warned of may come
    (under_way / "outcome.json").unlink()
    result = call("runs", *runs, under_way, "--show", "warnings")
    first, _, _, last, warned = rows(result)
    assert warned == "| `e` | not ended | 1,000 | L2H3 | 3.0 | ×3.00 |"
    assert first == "| `a` | exploded at 1,400 | 1,000 | L2H3 | 3.0 | ×3.00 |"
    assert last == "| `d` | stable to 1,501 | none |  |  |  |"
    assert result.stdout.splitlines()[-1] == (
        "foretold 1 of 2 explosions (1 to 99 %), 400 steps before; "
        "warned of 1 of 2 stable runs of attentions that exploded in another run (1 to 99 %)"
    )


def test_a_warning_right_before_the_onset_foretells_nothing(tmp_path: Path) -> None:
    """Nor do stable runs of an attention that never explodes thin out the false alarms of one that does."""

    def record(name: str, attention: str, onset: int | None, final: float) -> str:
        metrics = [{"step": step, "w_q_spectral_norm": norms(hot)} for step, hot in ((500, 1.0), (1000, final))]
        return write_run(tmp_path / name, {"name": attention}, steps=1201, onset=onset, metrics=metrics)

    runs = [
        record("a", "flash_bf16", 1099, 3.0),
        record("b", "flash_bf16", 1100, 3.0),
        record("c", "flash_bf16", None, 3.0),
        *(record(f"held-{seed}", "flash_fixed", None, 1.0) for seed in range(3)),
    ]
    assert call("runs", *runs, "--show", "warnings").stdout.splitlines()[-1] == (
        "foretold 1 of 2 explosions (1 to 99 %), 100 steps before, and 1 less than 100 steps before; "
        "warned of 1 of 1 stable runs of attentions that exploded in another run (3 to 100 %) "
        "and of 0 of 3 stable runs of attentions that exploded in no run (0 to 71 %)"
    )
