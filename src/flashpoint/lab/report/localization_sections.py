"""What ``flashpoint localize`` found of a run, as a part of its page."""

from __future__ import annotations

from collections.abc import Sequence

from flashpoint.lab.report.html_text import html_text
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.localized import KeptBranch
from flashpoint.runs.run import Run


def localization_sections(runs: Sequence[Run]) -> str:
    """Return a section of HTML for each run that has been localised."""
    return "".join(
        _section(run.name, run.folder) for run in runs if run.folder is not None and run.folder.localized.is_file()
    )


def _section(name: str, folder: RunFolder) -> str:
    found = folder.read_localized()
    branches = [_branch(branch) for branch in folder.read_branches()]
    columns = ("attention", "from step", "steps", "outcome", "largest norm of W_Q, by layer", "seconds")
    return (
        f"<section><h2>What of its attention makes W_Q of {html_text(name)} grow?</h2>"
        f"{_table(found.columns, found.rows)}<p>{html_text(found.heading)}</p>"
        f"<details><summary>{len(branches)} branches</summary>{_table(columns, branches)}</details></section>"
    )


def _branch(branch: KeptBranch) -> list[str]:
    at = "" if branch.onset is None else f" at {branch.onset:,}"
    norms = ", ".join(f"{max(layer):.2f}" for layer in branch.norms)
    steps = (f"{count:,}" for count in (branch.start, branch.steps))
    return [branch.attention, *steps, branch.outcome + at, norms, f"{branch.seconds:.1f}"]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join(_row("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{_row("th", columns)}</thead><tbody>{body}</tbody></table></div>'


def _row(cell: str, values: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{html_text(value)}</{cell}>' for value in values)}</tr>"
