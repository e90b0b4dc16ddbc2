"""What ``flashpoint localize`` found of a run, as a part of its page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from flashpoint.files import read_json
from flashpoint.runs.recorded import Run


def sections(runs: Sequence[Run]) -> str:
    """Return a section of HTML for each run that has been localised."""
    return "".join(_section(run) for run in runs if run.folder is not None and run.folder.localized.is_file())


def _section(run: Run) -> str:
    assert run.folder is not None
    told = read_json(run.folder.localized)
    return (
        f"<section><h2>What of its attention makes {escape(run.name)} grow?</h2>"
        f'<div class="scroll"><table><thead>{_row("th", told["columns"])}</thead>'
        f"<tbody>{''.join(_row('td', row) for row in told['rows'])}</tbody></table></div>"
        f"<p>{escape(told['heading'])}. Branches: {escape(run.folder.branch_log.name)}.</p></section>"
    )


def _row(cell: str, values: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{escape(value)}</{cell}>' for value in values)}</tr>"
