"""The command as a whole: help, completion, bad input, and formats of tables."""

import csv
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashpoint.cli.main import VERBS
from flashpoint.errors import remedy
from tests import warm
from tests.conftest import REPOSITORY, environment
from tests.records import call, refusal, write_run

HEAVY = ("torch", "numpy", "matplotlib", "pyarrow", "scipy", "hydra", "wandb", "tabulate")


def flashpoint(*arguments: str, cwd: Path | None = None, **variables: str) -> "subprocess.CompletedProcess[str]":
    """In a process of its own, as a user starts it."""
    command = [sys.executable, "-m", "flashpoint", *arguments]
    return subprocess.run(
        command, cwd=cwd, env={**environment(), **variables}, capture_output=True, text=True, timeout=120
    )


def test_help_lists_the_verbs_and_imports_nothing_heavy() -> None:
    code = "import sys; from flashpoint.cli.main import main; main(['--help'], standalone_mode=False)"
    watched = f"import atexit, sys\natexit.register(lambda: print(*sys.modules, file=sys.stderr))\n{code}"
    result = subprocess.run([sys.executable, "-c", watched], env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not set(HEAVY) & set(result.stderr.split())
    assert all(f"\n  {verb} " in result.stdout for verb in VERBS)


@pytest.mark.slow
def test_a_verb_that_reads_runs_does_without_pytorch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", {"name": "flash_bf16"}, onset=500)
    code = f"from flashpoint.cli.main import main; main(['survival', {run!r}], standalone_mode=False)"
    watched = f"import atexit, sys\natexit.register(lambda: print(*sys.modules, file=sys.stderr))\n{code}"
    result = subprocess.run([sys.executable, "-c", watched], env=environment(), capture_output=True, text=True)
    assert "| 1 of 1 |" in " ".join(result.stdout.split())
    assert not {"torch", "matplotlib", "hydra"} & set(result.stderr.split())


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "train"])
def test_every_verb_has_its_help(verb: str) -> None:
    result = call(verb, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith(f"Usage: flashpoint {verb} ")
    assert "--help" in result.stdout


@pytest.mark.slow
def test_the_help_of_train_is_the_configurations(tmp_path: Path) -> None:
    verb, stub = ["-m", "flashpoint", "train"], [str(REPOSITORY / "train.py")]
    result, of_stub = (
        warm.run([sys.executable, *command, "--help"], cwd=tmp_path, env=environment()) for command in (verb, stub)
    )
    assert result.returncode == 0
    for line in (
        " flash_bf16, ",
        "model: gpt2_124m, ignite, laptop",
        "data: openwebtext",
        "experiment:",
    ):
        assert line in result.stdout
    assert of_stub.stdout == result.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["explode"], "flashpoint: No such command 'explode'"),
        (["trian"], "flashpoint: No such command 'trian'; did you mean train?"),
        (["survival"], "flashpoint survival: Missing argument 'RUN...'"),
        (["survival", "one", "--contrl", "x"], "flashpoint survival: No such option"),
        (["runs", "one", "--format", "xml"], "flashpoint runs: Invalid value for '--format'"),
        (["runs", "nowhere"], "nowhere: no run there (no config.json); give a run's folder, e.g. runs/NAME"),
        (["runs", "nowhere:*"], "nowhere:*: no experiment nowhere in runs/reference"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], told: str) -> None:
    assert told in refusal(call(arguments[0], *arguments[1:], cwd=tmp_path))


def test_without_pytorch_a_verb_that_needs_it_says_so_in_one_line(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['torch'] = None"
    code = f"{hidden}; from flashpoint.cli.main import main; main(['diagnose', 'one'], prog_name='flashpoint')"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert "PyTorch" in refusal(result)
    assert sys.executable in result.stderr


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", {"name": "flash_bf16"})
    result = call("survival", run, "--control", "flash_bf16", "--out", tmp_path / "nowhere/curves.png")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "nowhere/curves.png: No such file or directory; see that" in line


@pytest.mark.parametrize(("number", "told"), [(errno.ENOSPC, "free space"), (errno.EACCES, "may be read and written")])
def test_a_file_without_permission_is_not_told_to_free_space(number: int, told: str) -> None:
    assert told in remedy(OSError(number, "told"))


def test_without_a_verb_the_help_is_shown() -> None:
    result = flashpoint()
    assert result.returncode == 2
    assert "Usage: flashpoint" in result.stderr


@pytest.mark.slow
def test_the_shell_completes_verbs_and_options() -> None:
    script = flashpoint(_FLASHPOINT_COMPLETE="bash_source")
    assert script.returncode == 0
    assert "complete -o nosort -F _flashpoint_completion flashpoint" in script.stdout

    def completed(words: str) -> list[str]:
        variables = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        result = flashpoint(_FLASHPOINT_COMPLETE="bash_complete", **variables)
        return [line.split(",")[1] for line in result.stdout.splitlines()]

    assert completed("flashpoint ") == list(VERBS)
    assert completed("flashpoint sur") == ["survival"]
    assert completed("flashpoint survival --pa") == ["--paired"]
    assert completed("flashpoint runs --show ho") == ["hottest"]


@pytest.mark.slow
def test_a_closed_stdout_is_no_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", {"name": "flash_bf16"})
    command = f"{sys.executable} -m flashpoint runs {run} >&-"
    result = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_a_reader_who_has_had_enough_is_no_error(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 1 / 3} for step in range(4000)]  # more than a pipe takes before its reader has gone
    write_run(tmp_path / "one", {"name": "flash_bf16"}, metrics=rows)
    command = f"{sys.executable} -m flashpoint series one loss --format csv | head -1"
    result = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "step,loss\n"
    assert result.stderr == ""
    command = f"{sys.executable} -m flashpoint train --help | :"
    result = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert result.stderr == ""


def metrics() -> list[dict[str, object]]:
    """Of one layer with two heads, all that a verb asks for."""
    names = ("delta_error_sum", "delta_error_variance", "delta_error_relative_bias", "delta_error_relative_noise")
    of_heads = {name: [[1.0, 2.0]] for name in ("w_q_spectral_norm", *names)}
    return [
        *({"step": step, "loss": 3.0 - step / 100, **of_heads} for step in range(0, 60, 10)),
        {"step": 99, "val_loss": 2.0, "tokens_per_second": 100.0},
    ]


SELECTIONS = [
    *(f"runs RUNS --show {what}" for what in ("outcomes", "rates", "hottest", "recovery", "warnings", "overhead")),
    "survival RUNS",
    "survival RUNS --by train.lr",
    "survival RUNS --paired RUN",
    "loss RUNS",
    "series RUN loss w_q_spectral_norm --head 1/2",
    "series RUNS --departures w_q_spectral_norm",
    *(f"delta RUNS --until 100 --by {kind}" for kind in ("head", "layer", "attention", "weights")),
    "delta RUNS --by layer --metric w_q_spectral_norm --until 100",
    "delta RUN --by targets",
]


@pytest.mark.slow
@pytest.mark.parametrize("command", SELECTIONS)
def test_every_table_is_read_in_every_format(tmp_path: Path, command: str) -> None:
    config = {"probes": {"sequences": 1}, "model": {"context": 2, "n_layer": 1, "d_model": 8}}
    for attention, onset in (("flash_bf16", 1200), ("flash_fp32", None)):
        write_run(
            tmp_path / f"runs/{attention}",
            {"name": attention},
            seed=1,
            steps=100 if onset is None else 1300,
            onset=onset,
            val_loss=2.0,
            metrics=metrics(),
            config=config,
        )
    words = [{"RUNS": "runs", "RUN": "flash_bf16"}.get(word, word) for word in command.split()]
    markdown, comma, plain = (
        call(words[0], *words[1:], "--format", form, cwd=tmp_path) for form in ("markdown", "csv", "json")
    )
    assert (markdown.returncode, comma.returncode, plain.returncode) == (0, 0, 0), markdown.stderr
    tables = json.loads(plain.stdout)["tables"]
    blocks = comma.stdout.split("\n\n")
    assert len(tables) == len(blocks)
    shown = [line for line in markdown.stdout.splitlines() if line.startswith("|")]
    assert len(shown) == sum(2 + len(table["rows"]) for table in tables)
    for table, block in zip(tables, blocks, strict=True):
        heading, *rows = csv.reader(io.StringIO(block))
        assert len(rows) == len(table["rows"]) > 0
        assert {len(row) for row in rows} == {len(heading)}
        assert len(set(heading)) == len(heading)


def test_the_entry_point_is_this_group() -> None:
    assert os.environ.get("_FLASHPOINT_COMPLETE") is None
    result = flashpoint("--version")
    assert result.stdout.startswith("flashpoint, version ")
