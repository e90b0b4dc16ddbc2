"""Localisations on GPUs, asked again of the branches that they kept."""

import json
import lzma
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashpoint.detector import DetectorConfig
from flashpoint.drop_in import variant_of
from flashpoint.lab.config import TrainConfig
from flashpoint.lab.localize.branches import Branches
from flashpoint.lab.localize.questions import answers
from flashpoint.lab.localize.replayed import ReplayedRun
from flashpoint.lab.localize.subject import Trained
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.runs.folder import EVIDENCE, RunFolder

KEPT = Path(__file__).parents[3] / "runs" / EVIDENCE
PRINTED = (KEPT / "localize-h200.txt").read_text(encoding="utf-8").split("outcome=")[1:]


@dataclass(frozen=True)
class Recorded(ReplayedRun):
    """A run whose branches are read, not trained: of any other one it has none."""

    failed_at: int
    ends: dict[tuple[str, int, int], Trained] = field(hash=False)

    @property
    def run(self) -> Any:
        config = SimpleNamespace(train=TrainConfig(warmup_steps=200), detector=DetectorConfig())
        shape = SimpleNamespace(n_layer=6, n_head=4)
        return SimpleNamespace(failed_at=self.failed_at, verdict="exploded", shape=shape, config=config)

    @property
    def checkpoints(self) -> list[int]:
        return list(range(0, self.failed_at + 300, 300))

    @property
    def whole(self) -> AttentionVariant:
        return variant_of("flash_bf16")

    def identity(self, attention: AttentionVariant, start: int) -> str:
        return attention.name

    def train(self, attention: AttentionVariant, start: int, steps: int, folder: Path) -> Trained:
        return self.ends[attention.name, start, steps]


def recorded(folder: Path, seed: int, failed_at: int) -> Recorded:
    with lzma.open(KEPT / f"localize_h200_seed-{seed}.jsonl.xz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    ends = {(row["attention"], row["start"], row["steps"]): row for row in rows}
    trained = {key: Trained(row["outcome"], row["onset"], row["norms"]) for key, row in ends.items()}
    return Recorded(RunFolder(folder), failed_at, trained)


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [4, 6])
@pytest.mark.parametrize("printed", PRINTED, ids=lambda text: re.findall(r"seed \d+", text)[0])
def test_the_answers_are_the_printed_ones_whatever_trains_side_by_side(
    printed: str, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One at a time they are asked in rounds, of branches that were not trained here.
    monkeypatch.setattr("flashpoint.lab.localize.branches.branch_processes", ThreadPoolExecutor)
    seed, failed_at = (int(re.findall(told, printed)[0]) for told in (r"seed (\d+)", r"onset=(\d+)"))
    subject = recorded(tmp_path, seed, failed_at)
    with Branches(subject, subject.folder, 300, None, gpus) as branches:
        *_, stand = answers(branches, 4)
    rows = re.findall(r"^\| (\w[\w ]*?) +\| (.+?) +\| (.+?) +\|$", printed, re.M)[1:]
    assert len(rows) >= 19
    assert [(one.question, one.verdict) for one in stand] == [row[:2] for row in rows]
    for one, row in zip(stand, rows, strict=True):  # that one start has most of the weight is told since
        assert one.evidence.partition(", one with")[0] == row[2].partition(", one with")[0]
