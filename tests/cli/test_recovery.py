"""Whether the loss came back, on runs where it is known by hand."""

from pathlib import Path

from tests.records import call, refusal, rows, write_run


def test_the_rise_is_from_the_last_validation_before_the_onset_to_the_end(tmp_path: Path) -> None:
    losses = [{"step": 99, "val_loss": 3.0}, {"step": 199, "val_loss": 2.0}, {"step": 299, "val_loss": 9.0}]
    losses += [{"step": 399, "val_loss": 2.1}, {"step": 499, "val_loss": 2.4}, {"step": 599, "val_loss": 2.31}]

    def run(name: str, end: float, onset: int | None) -> str:
        attn, detector = {"name": "flash_bf16"}, {"margin": 0.3}
        return write_run(tmp_path / name, attn, onset=onset, val_loss=end, detector=detector, metrics=losses)

    runs = [run("lost", 2.5, 200), run("nan", float("nan"), 200), run("back", 2.25, 200), run("stable", 2.0, None)]
    result = call("runs", *runs, "--show", "recovery")
    assert rows(result) == [
        "| `lost` | 200 | 1,000 | 2.00 | 2.50 | +0.50 | 500 |",
        "| `nan` | 200 | 1,000 | 2.00 | nan | +nan | 500 |",
        "| `back` | 200 | 1,000 | 2.00 | 2.25 | +0.25 | none |",
    ]
    assert result.stdout.splitlines()[-1].startswith("2 of 3 ended above what they had before")
    early = run("early", 2.5, 50)
    assert "not validated both before its onset and at its end" in refusal(call("runs", early, "--show", "recovery"))
    some = call("runs", early, *runs, "--show", "recovery")
    assert (some.returncode, some.stdout.splitlines()[2:]) == (2, result.stdout.splitlines()[2:])
    assert some.stderr.startswith(f"error: {early}: not validated")
