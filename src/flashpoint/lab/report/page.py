"""The report: one HTML file that needs nothing else, and the figures beside it as PNG."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flashpoint.errors import UserError
from flashpoint.files import atomic_write
from flashpoint.lab.analysis.lifetimes import usual_settings
from flashpoint.lab.config import ModelConfig
from flashpoint.lab.report.axes import boxes_for_missing_glyphs
from flashpoint.lab.report.html_text import html_text
from flashpoint.lab.report.localization_sections import localization_sections
from flashpoint.lab.report.panel_grid import PanelGrid
from flashpoint.lab.report.panels import PANELS, Panel
from flashpoint.lab.stored_config import trained_config
from flashpoint.numerics.variant import ROUNDING_POINTS
from flashpoint.quantiles import clopper_pearson
from flashpoint.runs.run import Run, called
from flashpoint.runs.subfolders import ReportFolder
from flashpoint_kernels.codes import BF16_BITS

DIFFERENT = "different"
UNKNOWN = "unknown"
"""What the page says of a setting that somebody's own loop did not tell."""
_FAMILIES = {"gpt2": "GPT-2", "llama": "Llama"}
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
body { color: #222; background: #fff; }
h1 { font-size: clamp(1.1rem, 3vw, 1.5rem); line-height: 1.2; } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; min-width: 62rem; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
.exploded, .nonfinite { color: #b00020; font-weight: 600; } .stable { color: #1b6e2e; font-weight: 600; }
.stopped { color: #8a5a00; font-weight: 600; }
figure { margin: 0; break-inside: avoid; }
img { width: 100%; height: auto; }
p, figcaption { max-width: 45rem; } figcaption, footer { font-size: .9rem; color: #444; }
@media screen and (min-width: 60rem) {
  .beside { display: grid; grid-template-columns: minmax(0, 44rem) minmax(0, 1fr); gap: 0 2rem; align-items: start; }
  nav { margin-top: 1rem; }
}
@media screen and (max-width: 45rem) { img { width: calc(100% + (var(--columns) - 1) * 88%); } }
@media print { img { max-width: 100%; } .wide { display: none; } }
@media print { body { max-width: none; font-size: 11px; } h2 { break-after: avoid; } .scroll { overflow: visible; } }
"""
"""Light in dark mode, too, as the figures are. On a wide screen a figure of one column has its caption beside it. On a
phone a figure's first column fills the screen, and the next ones are reached by scrolling sideways."""


class Image(NamedTuple):
    """A figure as a PNG file."""

    png: bytes
    columns: int
    """Of panels side by side."""


def write_report(runs: Sequence[Run], folder: Path) -> Path:
    """Write ``report.html`` and ``figures/*.png``.

    Args:
        runs: in the order in which they are shown.
        folder: made if it is not there.

    Returns:
        The page's path.

    Raises:
        UserError: a run's files are missing or damaged, or the folder, or that of its figures, is a link.
        OSError: the folder cannot be written.
    """
    report = ReportFolder(folder)
    figures = report.figure("").parent
    if link := next((place for place in (report.path, figures) if place.is_symlink()), None):
        raise UserError(f"{link}: a link to another folder; delete it, or name with --out a folder that is none")
    images = _images(runs)
    text = _page(runs, images, with_files=True)  # before anything is written: what it reads may be damaged
    figures.mkdir(parents=True, exist_ok=True)
    for panel in PANELS:
        file = report.figure(panel.key)
        if panel in images:
            with atomic_write(file, durable=False) as partial:
                partial.write_bytes(images[panel].png)
        else:
            file.unlink(missing_ok=True)  # of an earlier report, of other runs
    with atomic_write(report.page, durable=False) as partial:
        partial.write_text(text, encoding="utf-8")
    return report.page


def page(runs: Sequence[Run], reload_seconds: float | None = None) -> str:
    """Return the report as one HTML page with its figures inside.

    Args:
        runs: in the order in which they are shown; they may still be under way.
        reload_seconds: after which a browser loads the page again; None is never.

    Raises:
        UserError: a run's files are missing or damaged.
    """
    return _page(runs, _images(runs), reload_seconds)


def _images(runs: Sequence[Run]) -> dict[Panel, Image]:
    """Return the PNG files of the panels that these runs have measured."""
    drawn = ((panel, panel.draw(runs)) for panel in PANELS)
    return {panel: _image(grid) for panel, grid in drawn if grid is not None}


def _image(grid: PanelGrid) -> Image:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # matplotlib takes half a second to import
    from PIL import Image as Picture

    canvas = FigureCanvasAgg(grid.figure)
    with boxes_for_missing_glyphs():
        canvas.draw()
    buffer = io.BytesIO()
    # curves hardly shrink by more effort, of which the library's default takes twice the time; nothing is transparent
    Picture.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").save(buffer, "png", compress_level=1)
    return Image(buffer.getvalue(), grid.columns)


def _section(panel: Panel, image: Image, *, with_files: bool) -> str:
    wide = f' <span class="wide">{image.columns} panels side by side; on a narrow screen, scroll.</span>'
    more, beside = (wide, "") if image.columns > 1 else ("", ' class="beside"')
    file = f" File: figures/{panel.key}.png." if with_files else ""
    source = base64.b64encode(image.png).decode()
    return (
        f'<section id="{panel.key}"><h2>{html_text(panel.question)}</h2>'
        f"<figure{beside}>"
        f'<div class="scroll"><img style="--columns: {image.columns}" alt="{html_text(panel.question)}" '
        f'src="data:image/png;base64,{source}"></div>'
        f"<figcaption>{html_text(panel.caption)} <em>{html_text(panel.paper)}</em>{file}{more}</figcaption>"
        "</figure></section>"
    )


def _page(
    runs: Sequence[Run], images: Mapping[Panel, Image], reload_seconds: float | None = None, *, with_files: bool = False
) -> str:
    missing = [panel.question for panel in PANELS if panel not in images]
    unmeasured = f"<p>Not measured by these runs: {html_text(' '.join(missing))}</p>" if missing else ""
    links = " · ".join(f'<a href="#{panel.key}">{html_text(panel.question)}</a>' for panel in images)
    reload = f'<meta http-equiv="refresh" content="{reload_seconds:g}">' if reload_seconds else ""
    title = html_text(", ".join(dict.fromkeys(run.title for run in runs)))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">{reload}
<title>flashpoint: {title}</title><style>{_STYLE}</style></head><body>
<h1>{"<br>".join(map(html_text, _answers(runs)))}</h1>
<div class="scroll"><table><thead><tr><th>attention</th><th>seed</th><th>outcome</th><th>steps</th>
<th>largest W_Q norm, at the onset or the end</th>
<th>model</th><th>hardware and versions</th><th>digest</th><th>folder</th></tr></thead>
<tbody>{"".join(_row(run) for run in runs)}</tbody></table></div>
<div class="beside"><p>{_compared(runs)} {_differing(runs)}{_branches(runs)}{_criterion(runs)}
Layers and heads count from 1.
Figures of single heads show layer {runs[0].hottest_layer}{_why_that_layer(runs[0])}.{_coarse(runs)}</p>
<nav>{links}</nav></div>
{localization_sections(runs)}{"".join(_section(panel, image, with_files=with_files) for panel, image in images.items())}
{unmeasured}<footer>Written by <code>flashpoint report</code> from the runs' own files. The paper is Qiu &amp; Yao,
arXiv 2510.04212.</footer></body></html>
"""


def _answers(runs: Sequence[Run]) -> list[str]:
    """Return what became of each attention: the verdict of its one run, or how many of its runs exploded."""
    members = {title: [run for run in runs if run.title == title] for title in dict.fromkeys(run.title for run in runs)}
    return [f"{title}: {alike[0].verdict if len(alike) == 1 else _exploded(alike)}" for title, alike in members.items()]


def _exploded(runs: Sequence[Run]) -> str:
    """Return how many exploded; where all ran to their end and are independent of one another, with the interval of the
    share."""
    exploded = sum(run.ended and run.failed_at is not None for run in runs)
    told = f"{exploded} of {len(runs)} runs exploded"
    if unfinished := sum(not run.ended or run.ending == "stopped" for run in runs):
        return f"{told}, {unfinished} have not run to the end"
    seeds = {run.config.seed for run in runs if not (run.origin and run.origin[1])}
    if len(seeds) < len(runs) or usual_settings(runs):
        return told
    low, high = clopper_pearson(exploded, len(runs))
    return f"{told} (95 % interval {100 * low:.0f} to {100 * high:.0f} %)"


def _compared(runs: Sequence[Run]) -> str:
    """Say what the runs have in common, and that a run is no rate."""
    if len(runs) == 1:
        return "One run (n = 1) is no rate."
    weights = _shared(runs, lambda run: run.manifest.initial_weights)
    batches = _shared(runs, _batches)
    apart = "" if weights == batches else f"{batches} "
    places = len({run.manifest.hardware for run in runs})
    elsewhere = f", on {places} kinds of hardware, on which sums have other last bits" if places > 1 else ""
    told = f"{len(runs)} runs with {weights} initial weights and {apart}batches{elsewhere}."
    if weights == batches == DIFFERENT and _by_seed(runs):
        told = f"{len(runs)} runs; those of one seed have the same initial weights and batches{elsewhere}."
    one_each = len({run.title for run in runs}) == len(runs)
    return f"{told} Each is one run (n = 1), and one run is no rate." if one_each else told


def _differing(runs: Sequence[Run]) -> str:
    """Name the settings besides attention and seed in which the trainer's runs differ."""
    if any(run.watched for run in runs) or not (keys := list(usual_settings(runs))):
        return ""
    return f"They differ in {', '.join(keys)}. "


def _branches(runs: Sequence[Run]) -> str:
    """Say which runs began with the weights of another one."""
    told = (
        f"{html_text(called(run, runs))} is a branch: it begins at step {run.origin[1]:,} of "
        f"{html_text(Path(run.origin[0]).name)}. "
        for run in runs
        if run.origin and run.origin[1]
    )
    return "".join(told)


def _shared(runs: Sequence[Run], value_of: Callable[[Run], object]) -> str:
    if any(run.watched for run in runs):  # other loops tell neither their batches nor their weights
        return UNKNOWN
    return "the same" if len({value_of(run) for run in runs}) == 1 else DIFFERENT


def _by_seed(runs: Sequence[Run]) -> bool:
    """Return whether there are several runs of a seed, and those of a seed share initial weights and batches."""
    seeds: dict[int | None, set[object]] = {}
    for run in runs:
        seeds.setdefault(run.config.seed, set()).add((run.manifest.initial_weights, *_batches(run)))
    return len(seeds) < len(runs) and all(len(starts) == 1 for starts in seeds.values())


def _batches(run: Run) -> tuple[object, ...]:
    """Return what a run's batches follow from, as far as it goes."""
    config = trained_config(run)
    order = config.seed if config.train.order_seed is None else config.train.order_seed
    return run.manifest.data.fingerprint, order, config.train.batch_size, config.model.context


def _criterion(runs: Sequence[Run]) -> str:
    """Say what an explosion is, if it is the same for all runs."""
    criteria = [run.config.detector for run in runs]
    asked = {(criterion.window, criterion.margin, criterion.hold_steps) for criterion in criteria}
    if len(asked) > 1:
        return "A dashed line is the onset of an explosion."
    ((window, margin, hold),) = asked
    rise = "far" if math.isnan(margin) else f"{margin:g}" if runs[0].watched else f"{margin:g} nats"
    return (
        f"A run has exploded when the mean loss of the last {window} steps stands {rise} above its lowest "
        f"value for {hold} steps. The dashed line is the first of these, the onset."
    )


def _why_that_layer(run: Run) -> str:
    return ": there W_Q of the first run is largest" if run.w_q_norms else "; W_Q of the first run was not measured"


def _coarse(runs: Sequence[Run]) -> str:
    """Say so where an attention rounds to fewer bits than BF16 has."""
    roundings = [getattr(run.attention, point) for run in runs for point in ROUNDING_POINTS]
    coarse = any(rounding.mode != "none" and rounding.bits < BF16_BITS for rounding in roundings)
    told = f" BF16 has {BF16_BITS} mantissa bits: an explosion of an attention with fewer is not BF16's own."
    return told if coarse else ""


def _row(run: Run) -> str:
    place = f"{run.manifest.place}, {run.manifest.day}"
    kind, digest = "", ""
    steps = f"{run.logged_steps:,} so far" if run.logged_steps else ""
    if run.ended:
        kind, steps, digest = run.ending, f"{run.outcome.step:,}", run.outcome.digest
    hottest = ""
    if run.w_q_norms:
        hottest = "layer {}, head {}: {:.1f}".format(*run.hottest_head, run.hottest_norms.max())
    seed = UNKNOWN if run.config.seed is None else run.config.seed
    before, after = ([run.title, seed], [steps, hottest, _model(run), place])
    why = run.outcome.nonfinite if run.ended else None
    verdict = f'<td class="{html_text(kind)}">{html_text(": ".join(filter(None, [run.verdict, why])))}</td>'
    named = f"<td><code>{html_text(digest)}</code></td>{_cells([run.name])}"
    return f"<tr>{_cells(before)}{verdict}{_cells(after)}{named}</tr>"


def _model(run: Run) -> str:
    model = run.config.model
    if model is None:
        return UNKNOWN
    shape = [f"{model.n_layer} × {model.d_model}", f"{model.n_head} heads"]
    if isinstance(model, ModelConfig):
        shape[0] = f"{_FAMILIES[model.family]}, {shape[0]}"
        shape += [f"{model.kv_heads} of keys"] if model.kv_heads < model.n_head else []
        shape += ["QK-norm"] if model.qk_norm else []
        shape += ["keys less a running mean"] if model.shift_keys == "running" else []
        shape += [f"scores capped at {model.score_cap:g} nats"] if model.score_cap else []
    return ", ".join([*shape, f"T {model.context}"])


def _cells(values: Sequence[object]) -> str:
    return "".join(f"<td>{html_text(value)}</td>" for value in values)
