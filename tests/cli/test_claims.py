"""``flashpoint claims`` on files and runs whose verdicts are known by hand."""

import json
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy.stats import binomtest

from flashpoint.lab.analysis.claims_file import read_claims
from flashpoint.lab.analysis.expectations_file import read_expectations
from flashpoint.lab.cli.claims import FILE
from flashpoint.lab.cli.expectations import EXPECTED
from tests.conftest import REPOSITORY
from tests.records import call, refusal, rows, write_run

HOLDS: dict[str, Any] = {
    "id": "holds",
    "source": "paper",
    "where": "§3.2",
    "claim": "It holds.",
    "scale": "tiny",
    "short": True,
}
HOLDS |= {"preregistered": True}
HOLDS |= {"runs": ["stable"], "criterion": {"kind": "holds", "steps": 1000}}
EXPLODES = {"id": "explodes", "source": "ours", "claim": "It explodes.", "scale": "tiny", "runs": ["exploded"]}
EXPLODES |= {"criterion": {"kind": "explodes"}}
UNTESTED = {"id": "untested", "source": "golden", "where": "abstract", "claim": "It deviates."}


def listed(folder: Path, *claims: object, version: int = 1) -> Path:
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"version": version, "claims": list(claims)}, allow_unicode=True))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven stable runs, one of them short, and five that exploded."""
    for seed in range(7):
        write_run(tmp_path / f"runs/stable/{seed}", {"name": "flash_fp32"}, seed=seed, steps=900 if seed == 6 else 1000)
    for seed in range(5):
        write_run(tmp_path / f"runs/exploded/{seed}", {"name": "flash_bf16"}, seed=seed, onset=500)
    return tmp_path


def test_each_claim_has_its_value_interval_and_verdict(folder: Path) -> None:
    listed(folder, HOLDS, EXPLODES, UNTESTED)
    result = call("claims", cwd=folder)
    assert rows(result) == [
        "| `holds` | It holds. | Qiu & Yao, §3.2 | tiny | most hold for 1,000 steps | yes | 6 | 6 of 6, 1 left out "
        "| 54 to 100 % |  |  | undecided |",
        "| `explodes` | It explodes. | flashpoint | tiny | most explode | no | 5 | 5 of 5 "
        "| 48 to 100 % | 5 unknown |  | undecided |",
        "| `untested` | It deviates. | Golden et al., abstract |  |  |  |  |  |  |  |  | not tested |",
    ]
    assert result.stdout.splitlines()[0] == "a CPU, torch 2.99; corpus unknown; seeds 0 to 6; 2026-11-21"


def test_a_source_and_the_short_table_can_be_chosen(folder: Path) -> None:
    path = listed(folder, HOLDS, EXPLODES, UNTESTED)
    golden = call("claims", "--source", "golden", cwd=folder)
    assert [row.split(" | ")[0] for row in rows(golden)] == ["| `untested`"]
    assert [row.split(" | ")[0] for row in rows(call("claims", "--short", cwd=folder))] == ["| `holds`"]
    assert "drop --source, --short or --text" in refusal(call("claims", "--short", "--source", "ours", cwd=folder))
    moved = path.rename(folder / "mine.yaml")
    assert len(rows(call("claims", "--file", moved, cwd=folder))) == 3
    assert "no such file" in refusal(call("claims", cwd=folder))


def test_programs_read_the_table(folder: Path) -> None:
    listed(folder, HOLDS, UNTESTED)
    holds, untested = json.loads(call("claims", "--format", "json", cwd=folder).stdout)["tables"][0]["rows"]
    assert holds["value"] == {"count": 6, "of": 6, "left out": 1}
    assert holds["95 % interval"] == {"low": pytest.approx(0.025 ** (1 / 6)), "high": 1}
    assert (untested["n"], untested["value"], untested["verdict"]) == (0, None, "not tested")
    assert len(call("claims", "--format", "csv", cwd=folder).stdout.splitlines()) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"claim": None}, "holds: claim: None; input should be a valid string"),
        ({"source": "them"}, "holds: source: them; give one of paper, golden, ours"),
        ({"scale": None}, "holds: scale: missing; a claim that is tested needs it"),
        ({"criterion": None}, "holds: criterion: missing; a claim that is tested needs it"),
        ({"verdict": "replicates"}, "holds: verdict: no such key; drop it"),
        ({"runs": "stable"}, "holds: runs: stable; give a list"),
        ({"runs": []}, "holds: runs: []; give a list"),
        ({"criterion": {"steps": 10}}, "holds: criterion.kind: missing; give one of explodes, holds, "),
        ({"criterion": {"kind": "held"}}, "holds: criterion.kind: held: no such kind; give one of explodes, holds, "),
        ({"criterion": {"kind": "holds"}}, "holds: criterion.steps: missing; add it"),
        ({"criterion": {"kind": "holds", "steps": 0}}, "holds: criterion.steps: 0; input should be greater than 0"),
        ({"criterion": {"kind": "explodes", "step": 1}}, "holds: criterion.step: no such key; drop it"),
        ({"criterion": {"kind": "later", "against": ["nowhere"]}}, "holds: criterion.against: nowhere: no run there"),
        (
            {"criterion": {"kind": "interval", "quantity": "bias_exponent"}},
            "holds: criterion.above: missing; give above, below or both",
        ),
        (
            {"criterion": {"kind": "interval", "quantity": "validation_loss", "below": 0}},
            "holds: criterion.step: missing; validation_loss needs it",
        ),
        (
            {"criterion": {"kind": "interval", "quantity": "bias_over_variance", "above": 0}},
            "holds: runs: runs/stable/0: ",
        ),
        (
            {"criterion": {"kind": "deviates", "above": 1, "below": 2}},
            "holds: runs: a criterion that is computed needs ",
        ),
        ({"criterion": {"kind": "deviates", "above": 2, "below": 1}}, "holds: criterion.above: 2.0 is not less than "),
        (
            {"runs": None, "criterion": {"kind": "deviates", "above": 1, "below": 2, "sums": "fp8"}},
            "holds: criterion.sums: fp8; give one of fp32, within",
        ),
        ({"runs": None, "criterion": {"kind": "differs", "of": {}}}, "holds: criterion.over: missing; add it"),
        (
            {"runs": None, "criterion": {"kind": "differs", "of": {"length": 0}, "over": {}}},
            "holds: criterion.of.length: 0; ",
        ),
        ({"runs": ["nowhere:*"]}, "holds: runs: nowhere:*: no experiment nowhere in runs/reference"),
        ({"runs": ["stable", "exploded"]}, "holds: runs: 2 attentions: flash_fp32; flash_bf16; name runs of one of"),
    ],
)
def test_a_wrong_claim_is_one_line_with_file_claim_and_key(folder: Path, changed: dict[str, object], told: str) -> None:
    listed(folder, {**HOLDS, **changed})
    assert refusal(call("claims", cwd=folder)).startswith(f"error: {FILE}: {told}")


def test_a_wrong_file_is_one_line(folder: Path) -> None:
    path = listed(folder, HOLDS, HOLDS)
    assert refusal(call("claims", cwd=folder)).startswith(f"error: {FILE}: holds: id: a second claim has it")
    listed(folder, {key: value for key, value in HOLDS.items() if key != "id"})
    assert refusal(call("claims", cwd=folder)) == f"error: {FILE}: claim 1: id: missing; add it"
    listed(folder, "holds")
    assert refusal(call("claims", cwd=folder)).startswith(f"error: {FILE}: claim 1: no keys")
    listed(folder, HOLDS, version=2)
    assert refusal(call("claims", cwd=folder)).startswith(f"error: {FILE}: version: 2; ")
    path.write_text("claims: [")
    assert refusal(call("claims", cwd=folder)).startswith(f"error: {FILE}: no YAML: ")
    path.write_text("version: 1\n")
    assert refusal(call("claims", cwd=folder)).startswith(f"error: {FILE}: claims: missing")


def test_runs_hold_where_their_controls_alone_explode(folder: Path) -> None:
    for seed in range(7):
        onset = None if seed == 6 else 500
        write_run(folder / f"runs/control/{seed}", {"name": "flash_bf16"}, seed=seed, steps=1000, onset=onset)
    paired = {**HOLDS, "criterion": {**HOLDS["criterion"], "against": ["control"]}}
    listed(folder, paired, {**paired, "id": "alike", "criterion": {**paired["criterion"], "against": ["stable"]}})
    asked = call("claims", "--columns", "value,alone,verdict", cwd=folder)
    assert rows(asked) == [
        f"| 6 of 6, 1 left out | 6 and 0, p {binomtest(6, 6).pvalue:.2g} | replicates |",
        "| 6 of 6, 1 left out | 0 and 0, p 1 | undecided |",
    ]


def test_the_runs_of_a_horizon_that_none_reached_test_nothing(folder: Path) -> None:
    listed(folder, {**HOLDS, "criterion": {"kind": "holds", "steps": 2000}})
    (row,) = rows(call("claims", cwd=folder))
    assert row.endswith("|  |  |  | not tested |")


def test_a_mean_has_its_unit_bounds_and_interval(tmp_path: Path) -> None:
    for name, losses in (("flash_bf16", (2.5, 2.7, 2.9)), ("flash_fp32", (2.4, 2.5, 2.6))):
        for seed, loss in enumerate(losses):
            write_run(tmp_path / f"runs/{name}/{seed}", {"name": name}, seed=seed, steps=1000, val_loss=loss)
    asked = {"kind": "interval", "quantity": "validation_loss", "step": 1000, "against": ["flash_fp32"], "below": 0.5}
    listed(tmp_path, {**EXPLODES, "runs": ["flash_bf16"], "criterion": asked})
    (row,) = rows(call("claims", cwd=tmp_path))
    assert row.endswith(
        "| difference of validation loss in nats after 1,000 steps: below 0.5 "
        "| no | 3 | +0.200 | -0.048 to +0.448 |  |  | supported |"
    )


def test_a_run_that_two_patterns_name_counts_once(folder: Path) -> None:
    listed(folder, {**EXPLODES, "runs": ["exploded", "exploded/[01]"]})
    (row,) = rows(call("claims", cwd=folder))
    assert "| 5 of 5 |" in row


def test_the_committed_claims_are_whole_and_the_short_table_is_short() -> None:
    claims = read_claims(REPOSITORY / FILE)
    short = Counter(claim.source for claim in claims if claim.short)
    assert short.keys() == {"paper", "golden", "ours"}
    assert max(short.values()) <= 40


def test_claims_are_chosen_by_text_and_verdict(folder: Path) -> None:
    listed(folder, HOLDS, EXPLODES, UNTESTED)
    chosen = call("claims", "--text", "it", "--text", "EXPL", cwd=folder)
    assert [row.split(" | ")[0] for row in rows(chosen)] == ["| `explodes`"]
    undecided = call("claims", "--verdict", "undecided", "--source", "ours", cwd=folder)
    assert [row.split(" | ")[0] for row in rows(undecided)] == ["| `explodes`"]
    untested = call("claims", "--verdict", "not tested", "--verdict", "replicates", cwd=folder)
    assert [row.split(" | ")[0] for row in rows(untested)] == ["| `untested`"]
    assert "Of 1 of our claims: undecided 1. 1 of them are shown." in untested.stdout
    assert "drop --verdict" in refusal(call("claims", "--verdict", "supported", cwd=folder))


EXPECTED_SET = {
    "id": "made-up",
    "setting": "Seeds 0 to 7",
    "written": [{"commit": "0123abcd", "day": date(2026, 11, 21)}],
    "expectations": [
        {"expected": "It holds", "verdict": "met", "came": "on 8 of 8"},
        {"expected": "It explodes", "verdict": "to come", "written": [{"commit": "fedcba9"}]},
    ],
}


def expected(folder: Path, *sets: object) -> Path:
    path = folder / "expectations.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "sets": list(sets)}))
    return path


def test_expectations_are_shown_with_their_commits_and_chosen_by_text_and_verdict(tmp_path: Path) -> None:
    asked = ("claims", "--expected", "--file", expected(tmp_path, EXPECTED_SET))
    both = rows(call(*asked, "--columns", "all", cwd=tmp_path))
    assert both == [
        "| `made-up/1` | It holds | 0123abcd, 2026-11-21 | met | on 8 of 8 | Seeds 0 to 7 |",
        "| `made-up/2` | It explodes | fedcba9, not in the history | to come |  | Seeds 0 to 7 |",
    ]
    assert "to come" in rows(call(*asked, "--text", "EXPLODES", cwd=tmp_path))[0]
    assert "`made-up/1`" in rows(call(*asked, "--verdict", "met", cwd=tmp_path))[0]
    assert "drop --text or --verdict" in refusal(call(*asked, "--text", "8 of 9", cwd=tmp_path))
    assert "drop --source" in refusal(call(*asked, "--source", "ours", cwd=tmp_path))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"expectations": []}, "made-up: expectations: []; give a list"),
        ({"written": [{"commit": "no"}]}, "made-up: written.0.commit: no; "),
        (
            {"expectations": [{"expected": "It holds", "verdict": "so"}]},
            "made-up: expectations.0.verdict: so; give one",
        ),
    ],
)
def test_a_wrong_expectation_is_one_line(tmp_path: Path, changed: dict[str, object], told: str) -> None:
    path = expected(tmp_path, {**EXPECTED_SET, **changed})
    assert told in refusal(call("claims", "--expected", "--file", path, cwd=tmp_path))


def test_the_committed_expectations_are_whole() -> None:
    sets = read_expectations(REPOSITORY / EXPECTED)
    assert len({one.id for one in sets}) == len(sets)
