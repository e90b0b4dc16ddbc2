"""Figures in the documents are what the scripts print from the committed runs."""

import json
import math
import re
from pathlib import Path

import pytest

from flashpoint.report.series import RecordedRun
from flashpoint.run_folder import RunFolder
from tests.conftest import REPOSITORY
from tests.report.records import call

REFERENCE = REPOSITORY / "runs/reference"
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
README = PAGES[0].read_text()
MECHANISM = (REPOSITORY / "docs/mechanism.md").read_text()


def relative(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_pages_have_what_their_commands_print(page: Path) -> None:
    result = call("refresh_docs.py", "--check", page)
    assert result.returncode == 0, f"python scripts/refresh_docs.py:\n{result.stdout}{result.stderr}"


def test_the_evidence_is_printed_by_commands() -> None:
    """Not pasted by hand beside the blocks, and not by a check that finds nothing to run."""
    pages = [page.read_text() for page in PAGES]
    by_hand = [re.sub(r"<!-- \[\[\[cog .*?\[\[\[end\]\]\] -->", "", page, flags=re.DOTALL) for page in pages]
    assert not re.findall(r"^\| `.+` \| \d+ of \d+ \| \d+ to \d+ % \|", "\n".join(by_hand), re.MULTILINE)
    commands = [command for page in pages for command in re.findall(r"\[\[\[cog shell\(\"(.+)\"\)", page)]
    assert len(commands) >= 80
    assert sum(command.startswith("python scripts/") for command in commands) >= 75


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_folders_of_evidence_exist(page: Path) -> None:
    folders = re.findall(r"runs/reference/([a-z0-9-]+-h200|laptop[a-z0-9-]*)", page.read_text())
    assert [folder for folder in folders if not (REFERENCE / folder).is_dir()] == []


def printed(script: str, *globs: str) -> str:
    """What the script prints last of runs under runs/reference."""
    program, *options = script.split()
    runs = [run for pattern in globs for run in sorted(REFERENCE.glob(pattern))]
    result = call(program, *options, *runs)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


# Sentences written by hand.


@pytest.mark.parametrize(
    ("row", "runs"),
    [
        ("1 bit, to nearest | the data", "laptop-frozen/flash_bf16-1bit_seed-*"),
        ("1 bit, to nearest | drawn, O unrounded", "laptop-targets/flash_bf16-1bit-unrounded_seed-*"),
        ("1 bit, to nearest | drawn, O rounded", "laptop-targets/flash_bf16-1bit-model_seed-*"),
        ("1 bit, at random | the data", "laptop-frozen/flash_stochastic-1bit_seed-*"),
        ("1 bit, at random | drawn, O unrounded", "laptop-targets/flash_stochastic-1bit-unrounded_seed-*"),
        ("7 bits, to nearest | the data", "laptop-frozen/flash_bf16-7bits_seed-*"),
        ("7 bits, to nearest | drawn, O unrounded", "laptop-targets/flash_bf16-7bits-unrounded_seed-*"),
    ],
)
def test_the_ratios_in_nats_are_those_of_the_committed_runs(row: str, runs: str) -> None:
    last = printed("delta_bias.py --by layer", runs).split(" | ")
    count = len(list(REFERENCE.glob(runs)))
    page = (REPOSITORY / "docs/evidence/laptop.md").read_text()
    assert f"| {row} | {count} | {last[2]} | {last[3]} |" in page


@pytest.mark.parametrize("targets", ["unrounded", "model", "data"])
def test_the_ratios_of_the_law_are_those_of_the_committed_runs(targets: str) -> None:
    page = (REPOSITORY / "docs/evidence/bias.md").read_text()
    (row,) = re.findall(rf"^\| bias, {targets} \(n = 16\) \| .+$", page, re.MULTILINE)
    layer_2 = row.split(" | ")[2]
    named = "the data's" if targets == "data" else f"probes.targets={targets}"
    (told,) = re.findall(rf"^\| .*{named}.* \|$", MECHANISM, re.MULTILINE)
    assert told.endswith(f"| {layer_2} |")


def test_the_layers_said_to_grow_are_those_that_did() -> None:
    reports = [REFERENCE / name for name in ("ignite-h200", "paper-h200", "explosion-h200")]
    folders = [*(run for report in reports for run in sorted(report.iterdir())), REFERENCE / "replay-h200/explosion"]
    exploded = [run for run in map(RecordedRun, map(RunFolder.open, folders)) if run.onset is not None]
    layers = [run.hottest_layer for run in exploded]
    second, third = layers.count(2), layers.count(3)
    of = "of the default experiment and of the paper's settings"
    assert f"in {second} of {len(layers)} explosions {of}, the third in {third};" in MECHANISM
    told = f"Layer 2 explodes in {second} of {len(layers)} runs {of}, layer 3 in {third}."
    assert told in " ".join(MECHANISM.split())
    assert f"as in the paper, in {second} of {len(layers)} runs" in README


def test_the_counts_in_the_readme_are_those_of_the_committed_runs() -> None:
    above, _, count, *_ = printed("recovery.py", "ignite-h200/*").split()
    assert f"{above} of the {count} had not come back when they ended" in README
    foretold = printed("sentinel.py", "ignite-h200/*")
    numbers = re.fullmatch(
        r"foretold (\d+ of \d+) explosions, .* \(median (\d+)\); warned of (\d+ of \d+) stable runs", foretold
    )
    assert numbers
    explosions, lead, stable = numbers.groups()
    told = f"on the default experiment {explosions} explosions, in the median {lead} steps before, and {stable} runs"
    assert told in " ".join(README.split())
    on_laptops = re.fullmatch(
        r"foretold (\d+ of \d+) .* warned of (\d+ of \d+) stable runs", printed("sentinel.py", "laptop/*")
    )
    assert on_laptops
    assert "at laptop scale {}, and {} stable runs".format(*on_laptops.groups()) in " ".join(README.split())
    injected = ("injected-h200/bias1e-5-L2_*", "injected-settings-h200/*-bias1e-5_*")
    onsets = [RecordedRun.open(run).onset for pattern in injected for run in REFERENCE.glob(pattern)]
    exploded = sum(onset is not None for onset in onsets)
    assert f"1e-5 in {exploded} of {len(onsets)} over eight settings" in " ".join(README.split())


@pytest.mark.parametrize(
    "attention",
    [
        *("flash_fixed_paper", "flash_fixed", "flash_exact_rowsum", "flash_delta_pdp", "flash_delta_fp32"),
        *("flash_centered", "flash_centered_grad"),
    ],
)
def test_what_a_fix_costs_in_the_readme_is_what_was_measured(attention: str) -> None:
    (told,) = re.findall(
        rf"^\| `{attention}` \| (\d+ of \d+) \| (\d+ and \d+) % \| (.*)\| (.*)\| .+ \|$", README, re.MULTILINE
    )
    exploded, costs, rate, loss = (cell.strip() for cell in told)
    (survived,) = re.findall(rf"^\| `{attention}` \| (\d+ of \d+) \| \d+ to \d+ % \|", README, re.MULTILINE)
    assert exploded == survived

    bench = (REFERENCE / "kernels-h200/bench-2026-11-22.txt").read_text()
    measured = [re.search(rf"^{shape} +{attention} .*both +\+?(\d+)%", bench, re.MULTILINE) for shape in SHAPES]
    assert costs == " and ".join(match[1] for match in measured if match)

    if rate:
        speeds = {run: _tokens_per_second(REFERENCE / f"probes-h200/timed-{run}") for run in (attention, "flash_bf16")}
        assert rate == f"{speeds[attention] / speeds['flash_bf16']:.2f}"
    if loss:
        page = (REPOSITORY / "docs/evidence/attentions.md").read_text()
        number = r"([+-]\d\.\d{4})"
        (minus,) = re.findall(rf"^\| `{attention}` \| .* \| {number} \| {number} to {number} \|$", page, re.MULTILINE)
        rounded = [float(value) for value in re.findall(r"[+-]\d\.\d{3}", loss.replace("−", "-"))]
        assert rounded == pytest.approx([float(value) for value in minus], abs=0.00051)


SHAPES = ("32×12×1024×64", "64×4×512×64")


def _tokens_per_second(run: Path) -> float:
    printed = call("throughput.py", run).stdout
    (rate,) = re.findall(r": ([\d,]+) tokens/s", printed)
    return float(rate.replace(",", ""))


def test_the_times_in_the_readme_are_those_of_the_committed_runs() -> None:
    seconds = {
        run.name: json.loads((run / "outcome.json").read_text())["seconds"]
        for run in [*(REFERENCE / "ignite-h200").glob("flash_bf16_*"), *(REFERENCE / "default-h200").iterdir()]
    }
    explosion, fixed = seconds.pop("explosion"), seconds.pop("fixed")
    assert len(seconds) == 16
    assert f"within {5 * math.ceil(max(seconds.values()) / 5)} s of training on 16 of 16 seeds" in README
    assert f"; {explosion:.0f} and {fixed:.0f} s of training (" in README
