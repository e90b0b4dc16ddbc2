"""The report: one HTML file that needs nothing else, and the figures beside it as PNG."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from flashpoint.report import localized
from flashpoint.report.figures import PANELS, Panel
from flashpoint.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNKNOWN = "unknown"
"""What the page says of a setting that somebody's own loop did not tell."""
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
body { color: #222; background: #fff; }
h1 { font-size: 1.5rem; line-height: 1.2; } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; min-width: 62rem; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
.exploded, .nonfinite { color: #b00020; font-weight: 600; } .stable { color: #1b6e2e; font-weight: 600; }
.stopped { color: #8a5a00; font-weight: 600; }
figure { margin: 0; break-inside: avoid; } img { max-width: 100%; height: auto; }
p, figcaption { max-width: 45rem; } figcaption, footer { font-size: .85rem; color: #555; }
@media print { body { max-width: none; font-size: 11px; } h2 { break-after: avoid; } .scroll { overflow: visible; } }
"""


def write_report(runs: Sequence[Run], folder: Path) -> Path:
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
    images = _images(runs)
    for panel, image in images.items():
        (folder / "figures" / f"{panel.key}.png").write_bytes(image)
    written = folder / "report.html"
    written.write_text(_page(runs, images, with_files=True), encoding="utf-8")
    return written


def page(runs: Sequence[Run], reload_seconds: float | None = None) -> str:
    """Return the report as one HTML page with its figures inside.

    Args:
        runs: in the order in which they are shown; they may still be under way.
        reload_seconds: after which a browser loads the page again; None is never.

    Raises:
        UserError: a run's files are missing or damaged.
    """
    return _page(runs, _images(runs), reload_seconds)


def _images(runs: Sequence[Run]) -> dict[Panel, bytes]:
    """Return the PNG files of the panels that these runs have measured."""
    drawn = ((panel, panel.draw(runs)) for panel in PANELS)
    return {panel: _png(figure) for panel, figure in drawn if figure is not None}


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _section(panel: Panel, image: bytes, *, with_files: bool) -> str:
    file = f" File: figures/{panel.key}.png." if with_files else ""
    source = base64.b64encode(image).decode()
    return (
        f'<section id="{panel.key}"><h2>{escape(panel.question)}</h2><figure>'
        f'<img alt="{escape(panel.question)}" src="data:image/png;base64,{source}">'
        f"<figcaption>{escape(panel.caption)}{file}</figcaption>"
        "</figure></section>"
    )


def _page(
    runs: Sequence[Run], images: Mapping[Panel, bytes], reload_seconds: float | None = None, *, with_files: bool = False
) -> str:
    ended = [run for run in runs if run.ended]
    own = [run for run in runs if not run.watched]  # other loops tell neither their batches nor their weights
    known = len(ended) == len(runs) == len(own)
    tapes = f", {_count(len({run.outcome['tape_digest'] for run in ended}), 'tape')}" if known else ""
    starts = {run.manifest["initial_weights"] for run in runs}
    which = UNKNOWN if len(own) < len(runs) else "the same" if len(starts) == 1 else "different"
    places = len({run.manifest["hardware"] for run in runs})
    elsewhere = f", on {places} kinds of hardware, on which sums have other last bits" if places > 1 else ""
    missing = [panel.question for panel in PANELS if panel not in images]
    unmeasured = f"<p>Not measured by these runs: {escape('; '.join(missing))}</p>" if missing else ""
    reload = f'<meta http-equiv="refresh" content="{reload_seconds:g}">' if reload_seconds else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">{reload}
<title>flashpoint: {escape(", ".join(run.name for run in runs))}</title><style>{_STYLE}</style></head><body>
<h1>{escape("; ".join(f"{run.title} {run.verdict}" for run in runs))}</h1>
<div class="scroll"><table><thead><tr><th>run</th><th>attention</th><th>outcome</th><th>steps</th><th>seed</th>
<th>model</th><th>hardware and versions</th><th>digest</th></tr></thead>
<tbody>{"".join(_row(run) for run in runs)}</tbody></table></div>
<p>{_count(len(runs), "run")} with {which} initial weights{tapes}{elsewhere}. Each row is one run (n = 1):
one run is no rate.
Layers and heads count from 1. A dashed line is the onset.
Figures of single heads show layer {runs[0].hottest_layer}: there W_Q of the first run is largest.</p>
{localized.sections(runs)}{"".join(_section(panel, image, with_files=with_files) for panel, image in images.items())}
{unmeasured}<footer>Written by <code>flashpoint report</code> from the runs' own files.</footer></body></html>
"""


def _row(run: Run) -> str:
    model, environment = run.config.get("model"), run.manifest["environment"]
    shape = f"{model['n_layer']} × {model['d_model']}, {model['n_head']} heads, T {model['context']}" if model else ""
    place = f"{run.manifest['hardware']}, torch {environment['torch']}, {run.manifest['started'][:10]}"
    kind, digest = "", ""
    steps = f"{run.logged_steps:,} so far" if run.logged_steps else ""
    if run.ended:
        kind, steps, digest = run.ending, f"{run.outcome['step']:,}", run.outcome["digest"]
    before, after = ([run.name, run.title], [steps, run.config.get("seed", UNKNOWN), shape or UNKNOWN, place])
    why = run.outcome.get("nonfinite") if run.ended else None
    verdict = f'<td class="{kind}">{escape(": ".join(filter(None, [run.verdict, why])))}</td>'
    return f"<tr>{_cells(before)}{verdict}{_cells(after)}<td><code>{digest}</code></td></tr>"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cells(values: Sequence[object]) -> str:
    return "".join(f"<td>{escape(str(value))}</td>" for value in values)
