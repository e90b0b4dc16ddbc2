"""The report: one HTML file that needs nothing else, and the figures beside it as PNG."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from flashpoint.report.figures import PANELS, Panel
from flashpoint.report.series import RecordedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
body { color: #222; background: #fff; }
h1 { font-size: 1.5rem; line-height: 1.2; } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; min-width: 62rem; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
.exploded, .nonfinite { color: #b00020; font-weight: 600; } .stable { color: #1b6e2e; font-weight: 600; }
figure { margin: 0; break-inside: avoid; } img { max-width: 100%; height: auto; }
p, figcaption { max-width: 45rem; } figcaption, footer { font-size: .85rem; color: #555; }
@media print { body { max-width: none; font-size: 11px; } h2 { break-after: avoid; } .scroll { overflow: visible; } }
"""


def write_report(runs: Sequence[RecordedRun], folder: Path) -> Path:
    """Write ``report.html`` and ``figures/*.png``.

    Args:
        runs: in the order in which they are shown.
        folder: made if it is not there.

    Returns:
        The page's path.

    Raises:
        UserError: a run's files are missing or damaged.
        OSError: the folder cannot be written.
    """
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    sections, missing = [], []
    for panel in PANELS:
        figure = panel.draw(runs)
        if figure is None:
            missing.append(panel.question)
            continue
        image = _png(figure)
        (folder / "figures" / f"{panel.key}.png").write_bytes(image)
        sections.append(_section(panel, image))
    page = folder / "report.html"
    page.write_text(_page(runs, sections, missing), encoding="utf-8")
    return page


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _section(panel: Panel, image: bytes) -> str:
    source = base64.b64encode(image).decode()
    return (
        f'<section id="{panel.key}"><h2>{escape(panel.question)}</h2><figure>'
        f'<img alt="{escape(panel.question)}" src="data:image/png;base64,{source}">'
        f"<figcaption>The paper says: {escape(panel.claim)}. File: figures/{panel.key}.png.</figcaption>"
        "</figure></section>"
    )


def _page(runs: Sequence[RecordedRun], sections: Sequence[str], missing: Sequence[str]) -> str:
    tapes = {run.outcome["tape_digest"] for run in runs}
    starts = {run.manifest["initial_weights"] for run in runs}
    same = "the same initial weights" if len(starts) == 1 else "different initial weights"
    unmeasured = f"<p>Not measured by these runs: {escape('; '.join(missing))}</p>" if missing else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>flashpoint: {escape(", ".join(run.name for run in runs))}</title><style>{_STYLE}</style></head><body>
<h1>{escape("; ".join(_headline(run) for run in runs))}</h1>
<div class="scroll"><table><thead><tr><th>run</th><th>attention</th><th>outcome</th><th>steps</th><th>seed</th>
<th>model</th><th>hardware and versions</th><th>digest</th></tr></thead>
<tbody>{"".join(_row(run) for run in runs)}</tbody></table></div>
<p>{len(runs)} run(s) with {same}; {len(tapes)} tape(s). n = 1 a row: one run is no rate. Layers and heads count from 1,
in text, figures and the names of metrics; a dashed line is the onset. Of heads those of layer {runs[0].hottest_layer}
are shown, where the first run's W_Q norm is highest at the onset.</p>
{"".join(sections)}
{unmeasured}<footer>Written by scripts/report.py from the runs' own records.</footer></body></html>
"""


def _headline(run: RecordedRun) -> str:
    at = "" if run.onset is None else f" at step {run.onset:,}"
    return f"{run.title} {run.outcome['outcome']}{at}"


def _row(run: RecordedRun) -> str:
    model, environment = run.config["model"], run.manifest["environment"]
    onset = "" if run.onset is None else f", onset {run.onset:,}"
    shape = f"{model['n_layer']} × {model['d_model']}, {model['n_head']} heads, T {model['context']}"
    place = f"{run.manifest['hardware']}, torch {environment['torch']}, {run.manifest['started'][:10]}"
    verdict = run.outcome["outcome"]
    cells = [run.name, run.title, None, f"{run.outcome['step']:,}", run.config["seed"], shape, place]
    html = "".join(
        f'<td class="{verdict}">{verdict}{onset}</td>' if cell is None else f"<td>{escape(str(cell))}</td>"
        for cell in cells
    )
    return f"<tr>{html}<td><code>{run.outcome['digest']}</code></td></tr>"
