"""What a localisation says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One verdict.

    Attributes:
        question: what was asked, e.g. ``layers``.
        verdict: the answer in words.
        evidence: the growth of the branches that decide it.
    """

    question: str
    verdict: str
    evidence: str
