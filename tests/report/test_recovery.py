"""Whether the loss came back, on runs where it is known by hand."""

from pathlib import Path

from tests.report.records import call, refusal, write_run


def test_the_rise_is_from_the_last_validation_before_the_onset_to_the_end(tmp_path: Path) -> None:
    losses = [{"step": 99, "val_loss": 3.0}, {"step": 199, "val_loss": 2.0}, {"step": 299, "val_loss": 9.0}]

    def run(name: str, end: float, onset: int | None) -> str:
        attn, detector = {"name": "flash_bf16"}, {"margin": 0.3}
        return write_run(tmp_path / name, attn, onset=onset, val_loss=end, detector=detector, metrics=losses)

    result = call("recovery.py", run("lost", 2.5, 200), run("back", 2.25, 200), run("stable", 2.0, None))
    assert result.stdout.splitlines() == [
        "lost                     onset    200, ended at  1,000: 2.00 before, 2.50 at its end (+0.50)",
        "back                     onset    200, ended at  1,000: 2.00 before, 2.25 at its end (+0.25)",
        "1 of 2 ended above what they had before by more than the detector's margin",
    ], result.stderr
    assert "not validated both before its onset and at its end" in refusal(call("recovery.py", run("early", 2.5, 50)))
