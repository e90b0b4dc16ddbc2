"""The answers of localisations side by side: no share, no doubt and no start is lost."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

PRINTED = """outcome=exploded step=9180 onset=8625 loss=3.4960 digest=a90b8c6ab980a1ed
one: flash_bf16, seed 16, exploded at 8,625; 211 branches, 9 of them trained now in 10.6 min; GPU, torch 2; 2026-11-26

| question | verdict | evidence |
|:-|:-|:-|
| starts | step 6,000: no growth to localise here | growth ×1.06, chance ×1.03 |
| criterion | W_Q after 300 steps from 4,800, 6,300 | growth ×9.51, chance ×1.05; growth ×10, chance ×1 |
| layers | layer 2 alone: grows | 1.02 ± 0.13 of its own growth, 1 of 1 starts |
| layers | layers 2, 3 together: sufficient | 1.10 ± 0.12 of the growth, 2 of 2 starts |
| layers | layers 2, 3: necessary: the others do not grow | -0.00 ± 0.01 of the growth, 0 of 2 starts |
| heads | head 2 of layer 3 alone: undecided | 0.9 ± 0.98 of its own growth, 2 of 2 starts, one with 80% of the weight |
| heads | heads 1, 3 of layer 2 and head 2 of layer 3 together: sufficient | 1.02 ± 0.06 of the growth, 2 of 2 starts |
| choice | Ō is not rounded: undecided whether it stops the growth | 0.74 ± 0.33 of the growth, 1 of 2 starts |
| onset | heads 1, 3 of layer 2 and head 2 of layer 3 alone: explodes at 8,587 | from step 8,100 to 8,975 |
| onset | without layers 2, 3: does not explode | from step 8,100 to 8,975 |
"""


def test_each_answer_has_its_row(tmp_path: Path) -> None:
    file = tmp_path / "localize.txt"
    file.write_text(PRINTED)
    command = [sys.executable, str(REPOSITORY / "scripts/evidence/localized_table.py"), str(file)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = dict([cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if "|" in line)
    del rows[next(row for row in rows if row.startswith(":-"))]
    assert rows == {
        "": "seed 16",
        "exploded at": "8,625",
        "branches": "211",
        "took": "10.6 min",
        "starts": "2",
        "growth by start": "×9.51 ×10",
        "chance, at most": "×1.05",
        "L2 alone, of its own": "1.02 ± 0.13, of 1",
        "layers named": "L2,3",
        "these layers alone": "1.10 ± 0.12",
        "without these layers": "-0.00 ± 0.01",
        "L3H2 alone, of its own": "0.9 ± 0.98 ?, one weighs",
        "heads named": "L2H1,3 L3H2",
        "these heads alone": "1.02 ± 0.06",
        "Ō is not rounded": "0.74 ± 0.33 ?",
        "what is named, alone, explodes at": "8,587",
        "without these layers, explodes at": "no",
    }
