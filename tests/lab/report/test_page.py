"""The page of made-up runs: what it says, what is written where, and how a browser draws it."""

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashpoint.cli.run_words import open_run
from flashpoint.errors import UserError
from flashpoint.lab.report.page import page, write_report
from flashpoint.lab.report.panels import PANELS
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.run import Run, called
from tests.lab.evidence.kept import set_outcome
from tests.lab.report.made_up import BY_HEAD, record
from tests.records import call, refusal, write_run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures stay empty and small: half of a page's time, for tests that look at its files alone."""
    monkeypatch.setattr(Axes, "draw", lambda *_: None)
    monkeypatch.setattr(Figure, "savefig", functools.partialmethod(Figure.savefig, dpi=10))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    runs = [record(folder, "flash_bf16", onset=300), record(folder, "flash_centered")]
    return write_report(runs, folder / "out")


@pytest.mark.slow
def test_it_needs_no_other_file_and_shows_every_figure(report: Path) -> None:
    html = report.read_text()
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,|#)', html) == []
    assert not re.search(r"https?://|@import|<script", html)
    assert html.count("<img ") == len(PANELS)
    assert html.count("2 panels side by side") == len(PANELS) - 1  # the losses are in one panel
    for panel in PANELS:
        image = matplotlib.image.imread(report.parent / f"figures/{panel.key}.png")[..., :3]
        assert (np.ptp(image, axis=-1) > 0.3).mean() > 1e-3, f"{panel.key} is blank"


@pytest.mark.slow
@pytest.mark.usefixtures("unseen")
def test_a_damaged_record_leaves_nothing_half_written(tmp_path: Path) -> None:
    run = record(tmp_path, "plain", probes=False)
    run.folder.localized.write_text("[1]")
    with pytest.raises(UserError, match=re.escape(str(run.folder.localized))):
        write_report([run], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_it_links_to_each_figure(report: Path) -> None:
    html = report.read_text()
    assert re.findall(r'href="#([^"]+)"', html) == re.findall(r'<section id="([^"]+)"', html) == [p.key for p in PANELS]


@pytest.mark.slow
def test_it_says_what_happened_and_where(report: Path) -> None:
    html = report.read_text()
    for text in (
        "<h1>flash_bf16: exploded at 300<br>flash_centered: stable",
        "exploded at 300</td>",
        "a &lt;GPU&gt;, torch 2.99",
        f"<td>layer 2, head 2: {319 / 100 * 5 + 2:.1f}</td>",  # at the first step measured since the onset
        "the last 1 steps stands 1 nats above its lowest value for 1 steps",
    ):
        assert text in html
    assert "<code>d-flash_centered</code>" in html
    assert "2 runs with the same initial weights and batches." in html
    assert "show layer 2" in html
    assert "Not measured" not in html
    assert "not BF16's own" not in html


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, "the same initial weights and batches"),
        ({"config": {"train": {"order_seed": 9}}}, "the same initial weights and different batches"),
        ({"manifest": {"initial_weights": "others"}}, "different initial weights and the same batches"),
    ],
)
def test_runs_of_different_lengths_have_the_same_batches(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    """The shorter one's tape has another digest, and says no other thing."""
    for name, steps, changed in (("short", 300, {}), ("long", 900, change)):
        write_run(tmp_path / name, {"name": "flash_bf16"}, steps=steps, **changed)
        set_outcome(tmp_path / name, tape_digest=f"of {name}")
    assert f"2 runs with {told}." in page([open_run(str(tmp_path / name)) for name in ("short", "long")])


def test_it_names_the_model_and_what_its_runs_differ_in(tmp_path: Path) -> None:
    """A Llama trained with Muon stood beside a GPT-2 as another run of the same experiment."""
    llama = {"family": "llama", "n_kv_head": 2, "qk_norm": True}
    for seed, (name, changed) in enumerate(
        {
            "plain": {"model": {"shift_keys": "running"}},
            "other": {"model": llama, "optimizer": {"name": "muon"}},
        }.items()
    ):
        write_run(tmp_path / name, {"name": "flash_bf16"}, seed=seed, config=changed)
    html = page([open_run(str(tmp_path / name)) for name in ("plain", "other")])
    assert "<td>GPT-2, 2 × 256, 4 heads, keys less a running mean, T 2048</td>" in html
    assert "<td>Llama, 2 × 256, 4 heads, 2 of keys, QK-norm, T 2048</td>" in html
    assert "They differ in model.family, model.n_kv_head, model.qk_norm, model.shift_keys, optimizer.name. " in html
    assert "<h1>flash_bf16: 0 of 2 runs exploded</h1>" in html


def test_twins_of_several_seeds_are_told_as_twins(tmp_path: Path) -> None:
    """Of two attentions with two seeds it said that all four had different initial weights and batches."""

    def run(name: str, seed: int, weights: str) -> Run:
        path = tmp_path / f"{name}-{seed}-{weights}"
        return open_run(write_run(path, {"name": name}, seed=seed, manifest={"initial_weights": weights}))

    runs = [run(name, seed, f"of {seed}") for name in ("flash_bf16", "sdpa") for seed in (0, 1)]
    assert "4 runs; those of one seed have the same initial weights and batches." in page(runs)
    assert "2 runs with different initial weights and batches." in page(runs[:2])
    others = [*runs, run("standard", 0, "others")]
    assert "5 runs with different initial weights and batches." in page(others)


def test_runs_are_called_by_attention_and_seed_and_by_their_folder_where_that_is_not_enough(tmp_path: Path) -> None:
    """They were called by their folders, whose names are the times at which they began."""
    given = {"first": ("flash_bf16", 0), "second": ("flash_bf16", 1), "third": ("sdpa", 0)}
    runs = [open_run(write_run(tmp_path / name, {"name": of}, seed=seed)) for name, (of, seed) in given.items()]
    assert [called(run, runs) for run in runs] == ["flash_bf16, seed 0", "flash_bf16, seed 1", "sdpa"]
    again = open_run(write_run(tmp_path / "again", {"name": "flash_bf16"}, seed=0))
    assert called(again, [*runs, again]) == "again (flash_bf16)"


def test_a_branch_is_told_with_the_step_at_which_it_begins(tmp_path: Path) -> None:
    parents = {"replay": 0, "branch": 1100, "original": None}
    runs = []
    for name, step in parents.items():
        parent = None if step is None else {"run": "runs/original", "from_step": step}
        runs.append(open_run(write_run(tmp_path / name, {"name": name}, manifest={"parent": parent})))
    html = page(runs)
    assert html.count("is a branch") == 1
    assert "branch is a branch: it begins at step 1,100 of original." in html


def test_of_several_runs_of_an_attention_those_that_exploded_are_counted(tmp_path: Path) -> None:
    runs = [
        open_run(write_run(tmp_path / f"{name}{seed}", {"name": name}, seed=seed, onset=onset))
        for seed, (name, onset) in enumerate([("sdpa", 300), ("sdpa", None), ("sdpa", 7), ("standard", None)])
    ]
    share = "95 % interval 9 to 99 %"  # Clopper & Pearson: 2 of 3
    assert f"<h1>sdpa: 2 of 3 runs exploded ({share})<br>standard: stable to 1,000</h1>" in page(runs)


@pytest.mark.parametrize(
    "second", [{"seed": 1}, {"seed": 2, "manifest": {"parent": {"run": "runs/first", "from_step": 5}}}]
)
def test_runs_that_are_not_independent_have_no_interval(tmp_path: Path, second: dict[str, Any]) -> None:
    write_run(tmp_path / "first", {"name": "sdpa"}, seed=1, onset=9)
    write_run(tmp_path / "second", {"name": "sdpa"}, **second)
    assert "<h1>sdpa: 1 of 2 runs exploded</h1>" in page(
        [open_run(str(tmp_path / name)) for name in ("first", "second")]
    )


def test_runs_that_were_stopped_have_no_interval(tmp_path: Path) -> None:
    """They are no sample of how many runs explode: where they were to go on nobody knows."""
    for seed in range(3):
        write_run(tmp_path / f"{seed}", {"name": "sdpa"}, seed=seed)
    set_outcome(tmp_path / "0", interrupted="SIGTERM")
    (tmp_path / "2/outcome.json").unlink()
    html = page([open_run(str(tmp_path / f"{seed}")) for seed in range(3)])
    assert "<h1>sdpa: 0 of 3 runs exploded, 2 have not run to the end</h1>" in html


def test_a_format_coarser_than_bf16_is_told(tmp_path: Path) -> None:
    coarse = {"name": "flash_bf16", "out_unnormalized": {"mode": "nearest", "bits": 1}}
    assert "not BF16's own" in page([open_run(write_run(tmp_path / "coarse", coarse))])


def test_a_run_without_probes_names_what_is_missing(tmp_path: Path) -> None:
    html = write_report([record(tmp_path, "plain", probes=False, attention="<mine>")], tmp_path / "out").read_text()
    assert html.count("<img ") == 1
    assert "Not measured by these runs: Which layer&#x27;s W_Q takes off?" in html
    assert "W_Q of the first run is largest" not in html
    assert "<mine>" not in html
    assert "&lt;mine&gt;" in html


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_a_run_of_no_numbers_under_a_long_name_is_drawn(tmp_path: Path) -> None:
    run = record(tmp_path, "broken", onset=1, attention="flash_fp32_out layers=[2] heads=[1] elsewhere=flash_bf16 " * 4)
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    broken = [{name: value if name == "step" else "nan" for name, value in line.items()} for line in lines]
    run.folder.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in broken))
    html = write_report([open_run(str(run.folder.path))], tmp_path / "out").read_text()
    assert html.count("<img ") > 5


@pytest.mark.slow
def test_sizes_that_no_axis_can_have_are_passed_over(tmp_path: Path) -> None:
    """A record of somebody else's may hold them: the page ended in an error of Matplotlib's."""
    sizes = [1e308, -1e308, 5e-324, 1e-300, 1.0, 2.0]
    lines = [{"step": step, "loss": 1.0, "grad_norm": 1.0} for step in range(6)]
    metrics = [
        {**line, **{name: [[sizes[(head + line["step"]) % 6] for head in range(3)]] for name in BY_HEAD}}
        for line in lines
    ]
    html = page([open_run(write_run(tmp_path / "run", {"name": "a"}, onset=3, metrics=metrics))])
    assert html.count("<img ") == len(PANELS)


@pytest.mark.slow
@pytest.mark.usefixtures("unseen")
def test_the_verb_writes_beside_the_run_and_refuses_in_one_line(tmp_path: Path) -> None:
    record(tmp_path / "runs", "plain", probes=False)

    result = call("report", "plain", cwd=tmp_path)
    assert result.stdout == "runs/plain/report/report.html\n", result.stderr
    assert (tmp_path / "runs/plain/report/figures/loss.png").is_file()
    assert (tmp_path / "runs/plain/curves.png").is_file()  # of a run that was killed before it was drawn
    assert refusal(call("report", "nowhere", cwd=tmp_path)).startswith("error: nowhere: no run there")

    own = (tmp_path / "runs/plain/report/report.html").read_text()
    record(tmp_path / "runs", "other", probes=False)
    result = call("report", "plain", "other", cwd=tmp_path)
    assert result.stdout == "runs/plain/comparison/report.html\n", result.stderr
    assert "other" in (tmp_path / "runs/plain/comparison/report.html").read_text()
    assert (tmp_path / "runs/plain/report/report.html").read_text() == own


@pytest.mark.slow
@pytest.mark.usefixtures("unseen")
def test_a_run_whose_folder_takes_no_page_has_it_elsewhere(tmp_path: Path) -> None:
    run = record(tmp_path / "runs", "plain", probes=False).folder.path
    (run / "report").write_text("a file")
    assert "choose another folder with --out" in refusal(call("report", "plain", cwd=tmp_path))
    assert call("report", "plain", "--out", "page", cwd=tmp_path).stdout == "page/report.html\n"
    assert (run / "report").read_text() == "a file"


@pytest.mark.slow
@pytest.mark.usefixtures("unseen")
def test_a_page_of_what_is_left_of_several_runs_is_none_of_the_first_alone(tmp_path: Path) -> None:
    good = record(tmp_path / "runs", "good", probes=False).folder.path
    call("report", "good", cwd=tmp_path).check_returncode()
    own = (good / "report/report.html").read_bytes()
    record(tmp_path / "runs", "broken", probes=False).folder.manifest.write_text("{")
    result = call("report", "broken", "good", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "runs/good/comparison/report.html\n")
    assert (good / "report/report.html").read_bytes() == own


@pytest.mark.usefixtures("unseen")
@pytest.mark.slow
@pytest.mark.parametrize("place", ["report", "report/figures", "report/report.html", "report/figures/loss.png"])
def test_a_link_in_a_run_leads_no_page_out_of_it(tmp_path: Path, place: str) -> None:
    run = record(tmp_path / "runs", "plain", probes=False).folder.path
    (tmp_path / "own").mkdir()
    (tmp_path / "own/loss.png").write_text("mine")
    link = run / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / ("own/loss.png" if link.suffix else "own"))
    result = call("report", "plain", cwd=tmp_path)
    assert [(one.name, one.read_text()) for one in (tmp_path / "own").iterdir()] == [("loss.png", "mine")]
    if link.suffix:
        assert result.returncode == 0, result.stderr
        assert not link.is_symlink()
    else:
        assert f"{place}: a link" in refusal(result)


@pytest.mark.parametrize("out", ["~/page", "link"])
def test_a_page_is_written_where_it_is_said(tmp_path: Path, out: str) -> None:
    record(tmp_path / "runs", "plain", probes=False)
    (tmp_path / "link").symlink_to(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert f"--out {out}: " in refusal(call("report", "plain", "--out", out, cwd=tmp_path))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
@pytest.mark.usefixtures("unseen")
def test_a_report_leaves_no_figure_of_an_earlier_one(tmp_path: Path) -> None:
    """The page names a file beside each figure, and W&B takes all that are there."""
    for name, probes in (("measured", True), ("plain", False)):
        write_report([record(tmp_path, name, probes=probes)], tmp_path / "out")
    assert [path.name for path in (tmp_path / "out/figures").iterdir()] == ["loss.png"]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a run under way, as ``flashpoint watch --html`` keeps it."""
    folder = tmp_path_factory.mktemp("live")
    run = record(folder, "going", attention="flash_bf16")
    (folder / "going/outcome.json").unlink()
    written = folder / "live.html"
    written.write_text(page([open_run(str(run.folder.path))], reload_seconds=15), encoding="utf-8")
    return written


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("shown", ["report", "live"])
def test_a_browser_draws_it(request: pytest.FixtureRequest, tmp_path: Path, shown: str, width: int) -> None:
    assert BROWSER
    written: Path = request.getfixturevalue(shown)
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2400",
        f"--screenshot={tmp_path / 'page.png'}", written.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=90)
    image = matplotlib.image.imread(tmp_path / "page.png")[..., :3]
    assert image.shape[1] == width
    # Text is grey or black; figures have colour. A broken page or picture would show none.
    bands = [(np.ptp(band, axis=-1) > 0.3).mean() for band in np.array_split(image, 4)]
    assert min(bands) > 1e-3, bands
    assert (image[:, -3:] > 0.99).all(), "something runs over the right edge"


@pytest.mark.parametrize("link", ["report", "report/figures"])
def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path, link: str) -> None:
    run, other = record(tmp_path, "run", probes=False), tmp_path / "other"
    other.mkdir()
    place = tmp_path / "run" / link
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(other)
    with pytest.raises(UserError, match=f"{place}: a link"):
        write_report([run], tmp_path / "run/report")
    assert not list(other.iterdir())


@pytest.mark.usefixtures("unseen")
@pytest.mark.slow
def test_a_link_in_the_place_of_a_figure_or_the_page_is_replaced(tmp_path: Path) -> None:
    run, other = record(tmp_path, "run", probes=False), tmp_path / "other"
    other.write_text("mine")
    report = RunFolder(tmp_path / "run").report
    figure = report.figure("loss")
    figure.parent.mkdir(parents=True)
    for file in (figure, report.page):
        file.symlink_to(other)
    write_report([run], report.path)
    assert other.read_text() == "mine"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert report.page.read_text().startswith("<!doctype html>")
