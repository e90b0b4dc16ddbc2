"""Code of a run's records or of a YAML file runs, and W&B gets a run, where the command line says so itself."""

import json
import shutil
from pathlib import Path

import pytest

from flashpoint.errors import UserError
from flashpoint.lab.cli.unnamed import refuse_unnamed
from tests.composed import composed
from tests.conftest import Command
from tests.verdicts import assert_one_line

PROBE = """
from pathlib import Path
from flashpoint.lab.probes.attention import Probe

Path("was_run").touch()


class Mine(Probe):
    def measure(self, seen):
        return {}
"""
WORD = "probes.attention=[ties,theirs.py:Mine]"


@pytest.fixture
def theirs(train: Command, tmp_path: Path) -> Path:
    """A run whose records name a file of code, which has not been run since."""
    (tmp_path / "theirs.py").write_text(PROBE)
    result = train(WORD, "run_name=theirs", "train.steps=2", "checkpoints.interval=1")
    assert result.returncode == 0, result.stderr
    (tmp_path / "was_run").unlink()
    return tmp_path / "runs/theirs"


@pytest.mark.slow
@pytest.mark.parametrize("again", ["replay=theirs", "resume=theirs"])
def test_code_that_records_name_runs_where_the_command_line_names_or_trusts_it(
    train: Command, theirs: Path, tmp_path: Path, again: str
) -> None:
    more = ("train.steps=3",)
    before = sorted(path.name for path in theirs.iterdir())
    assert_one_line(train(again, *more, tiny=False), again, "theirs.py", "trust=true")
    assert not (tmp_path / "was_run").exists()
    assert sorted(path.name for path in theirs.iterdir()) == before
    assert [path.name for path in theirs.parent.iterdir()] == ["theirs"]
    shutil.copytree(theirs, copy := tmp_path / "copy")
    for consent in (WORD, "trust=true"):
        shutil.rmtree(theirs)
        shutil.copytree(copy, theirs)
        result = train(again, consent, *more, tiny=False)
        assert result.returncode == 0, result.stderr
        (tmp_path / "was_run").unlink()
    stored = [json.loads(path.read_text())["trust"] for path in theirs.parent.glob("*/config.json")]
    assert stored == [False] * (3 if again.startswith("replay") else 1)
    train("replay=theirs", "train.steps=3", tiny=False)  # a consent is no setting of the run
    assert not (tmp_path / "was_run").exists()


@pytest.mark.slow
def test_a_resumed_run_has_no_other_probes(train: Command, theirs: Path) -> None:
    refused = train("resume=theirs", "probes.attention=[theirs.py:Mine]", "train.steps=3", tiny=False)
    assert_one_line(refused, "probes.attention contradicts resume=theirs")


@pytest.mark.parametrize(
    "overrides",
    [
        ["probes.attention=[theirs.py:Mine]"],
        ["probes={attention: [theirs.py:Mine]}"],
        ["replay=RUN", "trust=true"],
    ],
)
def test_code_that_is_named_is_not_refused(overrides: list[str]) -> None:
    refuse_unnamed(composed("probes.attention=[theirs.py:Mine]"), overrides)


@pytest.mark.parametrize(
    "overrides", [["replay=RUN"], ["experiment=theirs"], ["resume=RUN", "probes.attention=[other.py:Mine]"]]
)
def test_code_that_is_not_named_is_refused(overrides: list[str]) -> None:
    with pytest.raises(UserError, match=r"names a file of code, theirs\.py, and this command line does not"):
        refuse_unnamed(composed("probes.attention=[theirs.py:Mine]"), overrides)


@pytest.mark.parametrize("overrides", [["experiment=theirs"], ["tracking=offline"], ["tracking={project: p}"]])
def test_an_upload_that_is_not_named_is_refused(overrides: list[str]) -> None:
    with pytest.raises(UserError, match=r"tracking\.wandb=online"):
        refuse_unnamed(composed("tracking=online"), overrides)
    for named in ("tracking=online", "tracking.wandb=online", "tracking={wandb: online}", "trust=true"):
        refuse_unnamed(composed("tracking=online"), [named])


def test_an_upload_to_somebody_who_is_not_named_is_refused() -> None:
    config = composed("tracking=online", "tracking.entity=somebody")
    with pytest.raises(UserError, match=r"tracking\.entity=somebody"):
        refuse_unnamed(config, ["tracking=online"])
    refuse_unnamed(config, ["tracking=online", "tracking.entity=somebody"])


@pytest.mark.slow
def test_a_folder_that_has_settings_of_hydra_runs_no_code(train: Command, tmp_path: Path) -> None:
    """Hydra takes that file of a folder without being asked to."""
    (tmp_path / "mine/hydra").mkdir(parents=True)
    (tmp_path / "mine/hydra/config.yaml").write_text("callbacks: {evil: {_target_: theirs.Evil}}")
    assert_one_line(train("--config-dir", "mine", "seed=1", tiny=False), "mine/hydra/config.yaml: ", "trust=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "# @package _global_\nhydra: {callbacks: {evil: {_target_: theirs.Evil}}}",
        "# @package hydra.callbacks.evil\n_target_: theirs.Evil",
        "# @package _global_\ndefaults: [override /hydra/launcher: evil, _self_]",
        "# @package _global_\ndefaults: [/model@hydra.callbacks.evil: evil, _self_]",
        "# @package _global_\ndefaults: ['override /hydra/launcher: ${oc.env:HOME}', _self_]",
        "# @package _global_\n<<: {hydra: {callbacks: {evil: {_target_: theirs.Evil}}}}",
        "# @package _global_\ntrust: true\nhydra: {launcher: {setup: [touch was_run]}}",
        "# @package _global_\ntrust: true\nprobes: {attention: ['theirs.py:Mine']}",
    ],
)
def test_a_yaml_file_runs_no_code(train: Command, tmp_path: Path, text: str) -> None:
    (tmp_path / "theirs.py").write_text(f"{PROBE}\n\nclass Evil(object):\n    pass\n")
    for path in ("experiment/theirs", "hydra/launcher/evil", "model/evil"):
        (tmp_path / f"mine/{path}.yaml").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"mine/{path}.yaml").write_text("_target_: theirs.Evil")
    (tmp_path / "mine/experiment/theirs.yaml").write_text(text)
    refused = train("--config-dir", "mine", "experiment=theirs", tiny=False)
    assert_one_line(refused, "trust=true")
    assert not (tmp_path / "was_run").exists()
