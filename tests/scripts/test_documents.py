"""What documents show of commands is what the commands print, and links lead somewhere."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import warm
from tests.conftest import REPOSITORY, environment
from tests.records import write_run

PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]


def refresh(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(REPOSITORY / "scripts/docs/refresh_docs.py"), *map(str, arguments)]
    return warm.run(command, env=environment(), timeout=300)


def relative(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_pages_have_what_their_commands_print(page: Path) -> None:
    result = refresh("--check", page)
    assert result.returncode == 0, f"python scripts/docs/refresh_docs.py:\n{result.stdout}{result.stderr}"


def test_the_evidence_is_printed_by_commands() -> None:
    """Not pasted by hand beside the blocks, and not by a check that finds nothing to run."""
    pages = [page.read_text() for page in PAGES]
    by_hand = [re.sub(r"<!-- \[\[\[cog .*?\[\[\[end\]\]\] -->", "", page, flags=re.DOTALL) for page in pages]
    assert not re.findall(r"^\| `.+` +\| +\d+ of \d+ \| +\d+ to \d+ % \|", "\n".join(by_hand), re.MULTILINE)
    assert any("[[[cog shell(" in page for page in pages)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_to_a_heading_find_it(page: Path) -> None:
    """GitHub makes an anchor of a heading: small letters, no punctuation, a hyphen for each space."""

    def anchors(of: Path) -> set[str]:
        headings = re.findall(r"^#+ (.*)", of.read_text(), re.MULTILINE)
        texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings)
        return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}

    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
    pages = {file: page.parent / file if file else page for file, _ in links}
    assert not [(file, anchor) for file, anchor in links if anchor not in anchors(pages[file])]


def test_the_recipe_for_the_trainer_takes_in_what_a_step_trained_on() -> None:
    """The Trainer divides losses so that they add up to the step's; the last step of an epoch has fewer of them."""

    class Trainer:
        accelerator = SimpleNamespace(sync_gradients=False)

        def training_step(self, _model: None, inputs: float) -> float:
            return inputs

    seen: list[tuple[float, list[float]]] = []
    watched = SimpleNamespace(step=lambda loss, batch: seen.append((loss, list(batch))), verdict="stable", busy=False)
    (recipe,) = re.findall(
        r"^(class Watched\(Trainer\):.*?\n)\n\n",
        (REPOSITORY / "docs/watching.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    known: dict[str, Any] = {"Trainer": Trainer, "watched": watched}
    exec(recipe, known)
    for trainer in (known["Watched"](), known["Watched"]()):
        for inputs, last in ((1.0, False), (2.0, True), (4.0, True)):
            trainer.accelerator.sync_gradients = last
            assert trainer.training_step(None, inputs) == inputs
    assert seen == 2 * [(3.0, [1.0, 2.0]), (4.0, [4.0])]


@pytest.mark.slow
def test_a_page_is_filled_with_what_commands_print(tmp_path: Path) -> None:
    """A verb alone and before a pipe, and any other command; a table or a list stands as such, the rest as a block."""
    run = write_run(tmp_path / "one", {"name": "flash_bf16"}, steps=12_920, onset=12_362)
    start, end = '<!-- [[[cog shell("{}") ]]] -->', "<!-- [[[end]]] -->\n"
    commands = [
        f"flashpoint runs '{tmp_path}/on[e]'",
        f"flashpoint runs {run} --format csv | tail -1",
        "printf '%s\\\\n' alone",
        f"for run in {run}; do flashpoint runs $run --format csv | head -1; done",
        f"flashpoint runs {run} --format list --columns run,onset",
    ]
    page = tmp_path / "page.md"
    page.write_text("".join(f"{start.format(command)}\nold\n{end}\n" for command in commands))
    before = page.read_text()
    check = refresh("--check", page)
    assert check.returncode == 5, check.stderr
    assert "-old" in check.stdout.splitlines()
    assert page.read_text() == before
    assert refresh(page).returncode == 0
    table, row, plain, loop, items = page.read_text().split("<!-- [[[end]]] -->\n\n")[:5]
    assert f"$ {commands[0]}\n```\n\na CPU, torch 2.99;" in table
    assert table.endswith("|\n\n")
    assert row.endswith("| tail -1\none,exploded,12920,12362,digest of one\n```\n")
    assert plain.endswith("alone\n```\n")
    assert loop.endswith("done\nrun,outcome,steps,onset,digest\n```\n")
    assert items.endswith("\n\n- **`one`** *onset* 12,362\n\n")
    assert refresh("--check", page).returncode == 0

    page.write_text(f"{start.format('flashpoint runs nowhere')}\n{end}")
    before = page.read_text()
    failed = refresh(page)
    assert failed.returncode != 0
    assert "nowhere: no run there" in failed.stderr
    assert page.read_text() == before


@pytest.mark.slow
def test_the_walks_of_the_architecture_lead_through_code_that_is_there() -> None:
    page = REPOSITORY / "docs/architecture.md"
    stations = re.findall(r"^\d+\. \[`[^`]+`\]\(([^)]+)\): ((?:`\w+`(?:, )?)+)", page.read_text(), re.MULTILINE)
    assert len(stations) > 30
    for link, words in stations:
        tree = ast.parse((page.parent / link).read_text())
        named = [node.targets if isinstance(node, ast.Assign) else [node] for node in ast.walk(tree)]
        there = {getattr(one, "name", getattr(one, "id", None)) for some in named for one in some}
        assert not set(re.findall(r"`(\w+)`", words)) - there, link
