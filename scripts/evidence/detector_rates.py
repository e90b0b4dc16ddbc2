"""How often the watch's rule calls a healthy loss exploded, and finds an explosion.

    python scripts/evidence/detector_rates.py

The first table draws losses of 3,000 steps, by a seed each. A slow noise is of first order, x ← φ x + e, with standard
deviation 1, about a line that falls from 5 to 4.5. "Called" is how many of all are called exploded. Their steps 1,500
to 3,000 are then raised at once by some standard deviations of the noise, and "found" is how many of those that were
stable until then are called exploded within 500 steps.

The second table takes the explosions of runs/reference whose loss was recorded every ten steps. What the loss does from
200 steps before the onset on, as the mean of five neighbours, follows 3,000 steps at the level of the 500 steps before.
To each step white noise is added, of the standard deviation that the losses of these 500 steps have about their line.
The losses of a run that has all of them show such noise: their Allan deviation falls with the root of the length.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyarrow.parquet import read_schema, read_table

from flashpoint.cli.table import Cell, Table, share_interval, show
from flashpoint.detector import DetectorConfig, NoiseScaledDetector, noise_about_line
from flashpoint.errors import command_errors
from flashpoint.runs.metric_table import LOSS

REFERENCE = Path(__file__).resolve().parents[2] / "runs/reference"
STEPS, JUMP, TAIL, BEFORE = 3000, 1500, 500, 200
RISES = (1, 2, 5)
"""Standard deviations of the noise."""
Losses = NDArray[np.float64]


def slow(random: np.random.Generator, factor: float) -> Losses:
    """Return first-order noise of standard deviation 1, stationary from the first step on."""
    drawn = random.standard_normal(STEPS)
    drawn[1:] *= np.sqrt(1 - factor**2)
    for step in range(1, STEPS):
        drawn[step] += factor * drawn[step - 1]
    return drawn


LINE = np.linspace(5, 4.5, STEPS)
CURVE = 1e-3 + np.exp(-np.arange(STEPS) / 300)
Draw = Callable[[np.random.Generator], Losses]


def about_line(factor: float) -> Draw:
    return lambda random: LINE + slow(random, factor)


def on_curve(factor: float) -> Draw:
    return lambda random: CURVE * (1 + 0.2 * slow(random, factor))


KINDS: dict[str, tuple[Draw, float | Losses]] = {
    "white noise": (about_line(0.0), 1.0),
    "slow noise, φ = 0.9": (about_line(0.9), 1.0),
    "slow noise, φ = 0.97": (about_line(0.97), 1.0),
    "slow noise, φ = 0.99": (about_line(0.99), 1.0),
    "the exponential of white noise": (lambda random: np.exp(random.standard_normal(STEPS)), 2.16),
    "Student's t of 2 degrees": (lambda random: LINE + random.standard_t(2, STEPS), 1.0),
    "a decay to 1/1,000, white noise of 20 %": (on_curve(0.0), 0.2 * CURVE),
    "a decay to 1/1,000, φ = 0.97, 20 %": (on_curve(0.97), 0.2 * CURVE),
}


def drawn(count: int) -> Iterator[list[Cell | str]]:
    """Yield a row for each kind of losses."""
    for kind, (draw, noise) in KINDS.items():
        called, found, held = 0, [0] * len(RISES), 0
        for seed in range(count):
            losses = draw(np.random.default_rng(seed))
            before = judged(NoiseScaledDetector(DetectorConfig()), losses[:JUMP])
            called += judged(deepcopy(before), losses[JUMP:]).verdict == "exploded"
            if before.verdict == "stable":
                held += 1
                tail = slice(JUMP, JUMP + TAIL)
                for number, size in enumerate(RISES):
                    raised = losses[tail] + size * np.broadcast_to(noise, STEPS)[tail]
                    found[number] += judged(deepcopy(before), raised).verdict == "exploded"
        shares = [Cell(one, f"{one} of {held}") for one in found]
        yield [kind, Cell(called, f"{called} of {count}"), share_interval(called, count), *shares]


def recorded() -> Iterator[list[str | int]]:
    """Yield a row for each set of runs: how many explosions were found, and in how many steps after their onset."""
    with (REFERENCE / "index.csv").open() as lines:
        exploded = [row for row in csv.DictReader(lines) if row["outcome"] == "exploded"]
    for experiment in dict.fromkeys(row["experiment"] for row in exploded):
        table = REFERENCE / "metrics" / f"{experiment}.parquet"
        if not table.is_file() or LOSS.name not in read_schema(table).names:
            continue
        columns = read_table(table, columns=["run", "step", LOSS.name]).to_pandas().dropna()
        by_run = dict(iter(columns.groupby("run")))
        delays: list[int | None] = []
        for row in (row for row in exploded if row["experiment"] == experiment and row["run"] in by_run):
            found = by_run[row["run"]]
            drawn = redrawn(found["step"].to_numpy(), found[LOSS.name].to_numpy(float), int(row["onset"]))
            if drawn is not None:
                detector = judged(NoiseScaledDetector(DetectorConfig()), drawn)
                delays.append(None if detector.onset_step is None else detector.onset_step - STEPS - BEFORE)
        if delays:
            late = sorted(delay for delay in delays if delay is not None)
            yield [experiment, len(delays), len(late), late[len(late) // 2] if late else ""]


def redrawn(steps: Any, losses: Losses, onset: int) -> Losses | None:
    """Return the losses of an explosion at every step, behind a stretch of healthy ones; None of one whose losses were
    recorded too seldom."""
    before = (steps >= onset - BEFORE - 500) & (steps < onset - BEFORE)
    after = (steps >= onset - BEFORE) & (steps <= onset + TAIL + 50)
    if before.sum() < 45 or after.sum() < 20:
        return None
    noise, level = noise_about_line(list(losses[before])), losses[before].mean()
    smooth = np.convolve(np.pad(losses[after], 2, mode="edge"), np.full(5, 0.2), mode="valid")
    rise = np.interp(np.arange(onset - BEFORE, steps[after][-1] + 1), steps[after], smooth)
    curve = np.concatenate([np.full(STEPS, level), rise])
    random = np.random.default_rng(onset)
    return curve + noise * random.standard_normal(len(curve))


def judged(detector: NoiseScaledDetector, losses: Losses) -> NoiseScaledDetector:
    """Return a detector that goes on with losses, as far as it is stable."""
    for step, loss in enumerate(losses):
        if detector.verdict != "stable":
            break
        detector.update(step, float(loss), 0.0)
    return detector


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="of each kind that is drawn")
    arguments = parser.parse_args()
    with command_errors():
        kinds = Table(
            ("losses", "called", "95 % interval", *(f"found, + {size}" for size in RISES)), list(drawn(arguments.count))
        )
        runs = Table(("runs", "explosions", "found", "median onset after the recorded one, steps"), list(recorded()))
        show([kinds, runs], "markdown")


if __name__ == "__main__":
    main()
