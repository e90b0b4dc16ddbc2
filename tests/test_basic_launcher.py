"""A sweep in this process, by Hydra's launcher with what this package adds to it."""

import weakref

import pytest
from hydra.core.utils import JobReturn, JobStatus

from flashpoint.errors import UserError
from hydra_plugins.flashpoint_launcher.basic import BasicLauncher


def test_a_failed_run_of_a_sweep_in_this_process_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error held its frames, and with them the model, while the other runs trained."""

    class Model: ...

    models, alive = list[weakref.ref[Model]](), list[int]()

    def fails() -> None:
        model = Model()
        models.append(weakref.ref(model))
        try:
            raise UserError("the memory is full") from ValueError(str(model))
        except UserError as error:
            raise error from error  # as the command does with what is told in one line already

    def launch_one(*_: object) -> list[JobReturn]:
        alive.append(sum(model() is not None for model in models))
        result = JobReturn()
        result.status = JobStatus.FAILED
        try:
            fails()
        except UserError as error:
            result.return_value = error
        return [result]

    monkeypatch.setattr(BasicLauncher.__mro__[1], "launch", launch_one)
    with pytest.raises(UserError, match="3 of 3 runs failed"):
        BasicLauncher().launch([["seed=0"], ["seed=1"], ["seed=2"]], 0)
    assert alive == [0, 0, 0]


def test_a_stopped_sweep_names_the_runs_that_were_not_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> list[JobReturn]:
        raise SystemExit(130)

    monkeypatch.setattr(BasicLauncher.__mro__[1], "launch", stopped)
    with pytest.raises(SystemExit):
        BasicLauncher().launch([["train.steps=3", f"seed={seed}"] for seed in range(3)], 0)
    assert capsys.readouterr().err == (
        "not begun: 2 of the sweep's runs (seed=1, seed=2); a sweep with hydra/launcher=gpus goes on where it was "
        "stopped\n"
    )
