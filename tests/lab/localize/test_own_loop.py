"""Localisation of somebody's own loop: the nanoGPT example with an error planted in one head's δ."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner, Result
from torch import Tensor

import flashpoint
from examples import nanogpt
from flashpoint.cli.main import main
from flashpoint.diagnosis.faults import Fault, faulty_attention
from flashpoint.errors import UserError
from flashpoint.lab.localize.engine import engine
from flashpoint.lab.localize.mixture import LayerOf, Mixture, mixed
from flashpoint.lab.localize.own_loop import OwnLoop
from flashpoint.lab.localize.subject import Trained
from flashpoint.runs.comparison import batches_of
from flashpoint.runs.folder import RunFolder

SMALL = {"layers": "2", "heads": "2", "width": "32", "context": "16", "batch": "4", "lr": "3e-3", "steps": "20",
         "keep": "5", "name": "failing", "functions": f"{__name__}:attend"}  # fmt: skip
_planted = faulty_attention(Fault("delta_bias", head=1, size=1.0))


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
    return _planted(q, k, v, is_causal=is_causal)


def calling_by_name(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return attend(q, k, v, is_causal)


def other_batches(checkpoint: str, attention: Any, steps: int, watch: Any) -> None:
    nanogpt.step(str(Path(checkpoint).with_name("step-000000.pt")), attention, steps, watch)


def too_few(checkpoint: str, attention: Any, steps: int, watch: Any) -> None:
    nanogpt.step(checkpoint, attention, steps - 1, watch)


def unwatched(checkpoint: str, attention: Any, steps: int, watch: Any) -> None:
    pass


def some_layers(checkpoint: str, attention: Any, steps: int, watch: Any) -> None:
    nanogpt.step(
        checkpoint, lambda layer: attention(layer) if layer == 1 else F.scaled_dot_product_attention, steps, watch
    )


def one_for_all(checkpoint: str, attention: Any, steps: int, watch: Any) -> None:
    nanogpt.step(checkpoint, lambda _layer: attention(1), steps, watch)


def from_zero(checkpoint: str, attention: Any, steps: int, watch: Any) -> None:
    nanogpt.step(checkpoint, lambda layer: attention(layer - 1), steps, watch)


def asked_but_not_set(checkpoint: str, attention: Any, steps: int, watch: Any) -> None:
    def ignored(layer: int) -> Any:
        attention(layer)
        return F.scaled_dot_product_attention

    nanogpt.step(checkpoint, ignored, steps, watch)


def with_new_weights(checkpoint: str, attention: Any, steps: int, watch: Any) -> None:
    def watching(model: Any) -> Any:
        torch.nn.init.normal_(model.lm_head.weight)
        return watch(model)

    nanogpt.step(checkpoint, attention, steps, watching)


def with_options(checkpoint: str, attention: Any, steps: int, watch: Any) -> None:
    nanogpt.step(checkpoint, attention, steps, lambda model: watch(model, name="mine", interval=3, functions=["a:b"]))


def without_losses(checkpoint: str, attention: Any, steps: int, watch: Any) -> None:
    def watching(model: Any) -> Any:
        watched = watch(model)
        step = watched.step
        watched.step = lambda loss, batch: step(loss.repeat(2), batch)
        return watched

    nanogpt.step(checkpoint, attention, steps, watching)


def failing_step(checkpoint: str, attention: Any, steps: int, watch: Any) -> None:
    raise RuntimeError("no such layer\nat all")


def exiting_step(checkpoint: str, attention: Any, steps: int, watch: Any) -> None:
    sys.exit(3)


def interrupted_step(checkpoint: str, attention: Any, steps: int, watch: Any) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A watched run whose attention has an error in δ of head 2, with checkpoints."""
    runs = tmp_path_factory.mktemp("own")
    nanogpt.train(lambda q, k, v, is_causal: attend(q, k, v, is_causal), **SMALL, runs=str(runs))
    return runs / "failing"


def localize(run: Path, function: str, *options: str) -> Result:
    checkpoints = str(run / "step-*.pt")
    named = ["--attention", f"{__file__}:attend", "--function", function, "--checkpoints", checkpoints]
    return CliRunner().invoke(main, ["localize", str(run), *named, "--steps", "10", *options, "--format", "json"])


@pytest.mark.slow
def test_the_head_with_the_error_is_named_and_the_report_tells_it(failing: Path, tmp_path: Path) -> None:
    result = localize(failing, f"{nanogpt.__file__}:step", "--starts", "1")
    rows = json.loads(result.stdout)["tables"][0]["rows"]
    verdicts = [row["verdict"] for row in rows]
    assert [verdict for verdict in verdicts if verdict.startswith("head")] == [
        "head 2 of layer 1 alone: grows, from one start",
        "head 2 of layer 2 alone: grows, from one start",
        "head 2 of layer 1 and head 2 of layer 2 together: sufficient, from one start",
        "head 2 of layer 1 and head 2 of layer 2: necessary: the others do not grow, from one start",
    ]
    assert "flash_unrounded_out in its place: stops the growth, from one start" in verdicts
    told = CliRunner().invoke(main, ["report", str(failing), "--out", str(tmp_path)])
    assert told.exit_code == 0, told.output
    page = (tmp_path / "report.html").read_text()
    assert "head 2 of layer 1 and head 2 of layer 2 together: sufficient, from one start" in page
    assert "attend layers=[1,2] heads=[2]</td><td>10</td><td>10</td><td>stable" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("other_batches", "step 10 trains on another batch"),
        ("too_few", "trained 9 steps"),
        ("unwatched", "did not watch"),
        ("with_new_weights", "with the run's attention step 10 has loss "),
        ("nothing", "has no nothing; it has "),
        ("failing_step", "RuntimeError in a branch from step 10: no such layer"),
        (
            "exiting_step",
            f"--function {__file__}:exiting_step: SystemExit in a branch from step 10: sys.exit(3); let it return",
        ),
    ],
)
def test_a_function_that_does_something_else_is_refused(failing: Path, function: str, told: str) -> None:
    (failing / "localize.jsonl").unlink(missing_ok=True)
    result = localize(failing, f"{__file__}:{function}", "--starts", "1", "--steps", "10")
    assert result.exit_code == 2
    assert told in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error")]) == 1


@pytest.mark.slow
def test_an_interruption_of_the_function_ends_the_localisation(failing: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        branch_of(failing, "interrupted_step", tmp_path / "branch")


@pytest.mark.parametrize("named", [[], ["--attention", f"{__file__}:attend"]])
def test_a_run_whose_attention_was_not_seen_is_to_be_watched_with_its_name(tmp_path: Path, named: list[str]) -> None:
    changed = {**SMALL, "steps": "2", "keep": "1", "functions": ""}
    nanogpt.train(lambda q, k, v, is_causal: attend(q, k, v, is_causal), **changed, runs=str(tmp_path))
    run = tmp_path / "failing"
    where = ["--function", f"{nanogpt.__file__}:step", "--checkpoints", str(run / "step-*.pt")]
    result = CliRunner().invoke(main, ["localize", str(run), *where, *named])
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert result.exit_code == 2
    assert f"{run}: its attention was not recorded; name it with flashpoint.watch(functions=[" in line


def test_a_branch_of_another_function_is_another_branch(failing: Path, tmp_path: Path) -> None:
    """A repaired loop or attention must not be judged by branches of the faulty one."""
    file = tmp_path / "mine.py"
    file.write_text(Path(__file__).read_text())
    own = OwnLoop.of(RunFolder(failing), f"{file}:too_few", str(failing / "step-*.pt"), f"{__file__}:attend")
    faulty = own.identity(own.whole, 10)
    assert faulty == own.identity(own.whole, 10) != own.identity(own.twin, 10)
    file.write_text(file.read_text() + "# repaired\n")
    assert own.identity(own.whole, 10) != faulty


@pytest.mark.parametrize("in_folders", [False, True])
def test_a_branch_from_another_checkpoint_of_the_same_step_is_another_branch(
    failing: Path, tmp_path: Path, in_folders: bool
) -> None:
    """Corrected checkpoints must not be judged by branches of those before, wherever either lie."""

    def identity(folder: str, content: str) -> str:
        place = tmp_path / folder / "step-10"
        place.parent.mkdir()
        if in_folders:
            place.mkdir()
        (place / "weights.pt" if in_folders else place).write_text(content)
        own = OwnLoop.of(RunFolder(failing), f"{__file__}:too_few", f"{place.parent}/*", f"{__file__}:attend")
        return own.identity(own.whole, 10)

    assert identity("first", "wrong") == identity("moved", "wrong") != identity("second", "right")


@pytest.mark.parametrize("of", ["run", "branch"])
def test_without_losses_nothing_is_localised(failing: Path, tmp_path: Path, of: str) -> None:
    run = tmp_path / "failing"
    shutil.copytree(failing, run)
    if of == "run":
        metrics = RunFolder(run).metrics
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines if "loss" not in line))
    with pytest.raises(UserError, match=f"{'failing' if of == 'run' else 'a branch'}:? has no losses; hand them to"):
        branch_of(run, "without_losses", tmp_path / "branch")


def branch_of(run: Path, function: str, folder: Path) -> Trained:
    """Train two steps with the run's own attention."""
    own = OwnLoop.of(RunFolder(run), f"{__file__}:{function}", str(run / "step-*.pt"), f"{__file__}:attend")
    return own.train(own.whole, 10, 2, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("some_layers", r"did not call attention\(2\)"),
        ("one_for_all", r"did not call attention\(2\)"),
        ("from_zero", r"attention\(0\): the run has layers 1 to 2"),
        ("asked_but_not_set", r"did not call attention\(1\)"),
    ],
)
def test_each_layer_needs_the_attention_that_is_its_own(
    failing: Path, tmp_path: Path, function: str, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        branch_of(failing, function, tmp_path / "branch")


def test_a_row_that_the_run_is_still_writing_contradicts_no_branch(failing: Path, tmp_path: Path) -> None:
    run = tmp_path / "failing"
    shutil.copytree(failing, run)
    batches = run / "batches.csv"
    before, row, _ = batches.read_text().partition("\n11,")
    batches.write_text(f"{before}{row}0")
    branch_of(run, "with_options", tmp_path / "branch")


def test_options_that_the_loop_gives_its_own_watch_are_passed_over(failing: Path, tmp_path: Path) -> None:
    trained = branch_of(failing, "with_options", tmp_path / "branch")
    assert trained.outcome == "stable"
    assert [len(layer) for layer in trained.norms] == [2, 2]


@pytest.mark.slow
def test_a_run_that_was_watched_from_a_checkpoint_on_has_branches(failing: Path, tmp_path: Path) -> None:
    """Its steps and batches are those of the training, if it says with which step it began; else a line asks for it."""
    watching = partial(flashpoint.watch, runs_dir=tmp_path, functions=SMALL["functions"].split())
    for name, options in (("told", {"first_step": 5}), ("untold", {})):
        begun = partial(watching, name=name, **options)
        nanogpt.step(str(failing / "step-000005.pt"), lambda _: calling_by_name, 15, begun)
        for checkpoint in failing.glob("step-*.pt"):
            shutil.copy(checkpoint, tmp_path / name)
    run, other = tmp_path / "told", tmp_path / "untold"
    assert batches_of(RunFolder(run)).items() <= batches_of(RunFolder(failing)).items()
    assert branch_of(run, "with_options", tmp_path / "branch") == branch_of(failing, "with_options", tmp_path / "same")
    with pytest.raises(UserError, match="step 10 trains on another batch than the run did"):
        branch_of(run, "other_batches", tmp_path / "strange")
    assert OwnLoop.of(
        RunFolder(run), f"{nanogpt.__file__}:step", str(run / "step-*.pt"), f"{__file__}:attend"
    ).checkpoints == [5, 10, 15]
    for early in range(0, 15, 5):
        (other / f"step-{early:06}.pt").unlink()
    result = localize(other, f"{nanogpt.__file__}:step", "--starts", "1")
    assert result.exit_code == 2
    assert f"of steps 15 to 15, and {other} was watched from step 0 to 15; a loop that goes on" in result.stderr


def test_two_checkpoints_of_one_step_are_refused(failing: Path, tmp_path: Path) -> None:
    for name in ("model-000005.pt", "optimizer-000005.pt"):
        shutil.copy(failing / "step-000005.pt", tmp_path / name)
    with pytest.raises(UserError, match=r"model-000005.pt and .*optimizer-000005.pt have one step, 5"):
        OwnLoop.of(RunFolder(failing), f"{nanogpt.__file__}:step", str(tmp_path / "*.pt"), f"{__file__}:attend")


def test_a_damaged_batch_list_is_one_line(failing: Path, tmp_path: Path) -> None:
    shutil.copytree(failing, tmp_path / "run")
    with (tmp_path / "run/batches.csv").open("a") as file:
        file.write("\0\0\0,\n")
    result = localize(tmp_path / "run", f"{nanogpt.__file__}:step", "--starts", "1")
    assert (result.exit_code, "line 21 begins with no step" in result.stderr) == (2, True), result.stderr


def test_a_watched_run_needs_a_function_and_checkpoints(failing: Path) -> None:
    result = CliRunner().invoke(main, ["localize", str(failing)])
    assert (result.exit_code, "--function FILE.py:step" in result.stderr) == (2, True)
    function = ["--function", f"{nanogpt.__file__}:step", "--checkpoints", "nowhere/*.pt"]
    result = CliRunner().invoke(main, ["localize", str(failing), *function])
    assert (result.exit_code, "no file there" in result.stderr) == (2, True)
    result = localize(failing, f"{nanogpt.__file__}:step", "--gpus", "99")
    assert (result.exit_code, "--gpus 99" in result.stderr) == (2, True)


@pytest.mark.parametrize("attention", ["sdpa", f"{__file__}:attend", "flash_unrounded_out", "flash_bf16"])
def test_the_two_twins_of_a_loop_differ_by_a_rounding(failing: Path, attention: str) -> None:
    """In BF16, in which the loop goes on with O, in every head; and where all keys are one, dQ is 0 in both."""
    loop = OwnLoop.of(RunFolder(failing), f"{nanogpt.__file__}:step", str(failing / "step-*.pt"), attention)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 80, 16, generator=generator).bfloat16().requires_grad_() for _ in range(3))
    twins = [engine(of.inside) for of in (loop.twin, loop.second_twin)]
    outs = [call(q, k, v, True, 0.25) for call in twins]
    differing = (outs[0] != outs[1]).float().mean((0, 2, 3))
    assert [out.dtype for out in outs] == [torch.bfloat16, torch.bfloat16]
    assert (differing > 0.1).all()
    for call in twins:
        shared, apart = (
            torch.autograd.grad(call(q, keys, v, True, 0.25).float().square().sum(), q)[0].float().norm()
            for keys in (k[:, :, :1].expand_as(k), k)
        )
        assert shared < 2e-3 * apart


@pytest.mark.parametrize(
    ("layer", "heads", "inside"), [(1, (2,), [1]), (1, ((2,),), [1]), (1, None, [0, 1, 2, 3]), (2, None, [])]
)
def test_a_branch_has_the_runs_attention_where_it_is_asked_for(
    layer: int, heads: tuple[Any, ...] | None, inside: list[int]
) -> None:
    """Four heads share two of keys; SDPA in some, the baseline of the twin elsewhere, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, count, 16, 16, generator=generator).bfloat16().requires_grad_() for count in (4, 2, 2)]
    calls: list[Callable[..., Tensor]] = [
        lambda q, k, v: mixed(q, k, v, True, 0.25, place=LayerOf(Mixture("sdpa", "twin of sdpa", (1,), heads), layer)),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        lambda q, k, v: mixed(q, k, v, True, 0.25, place=LayerOf(Mixture("twin of sdpa", "twin of sdpa"), 1)),
    ]
    outs = [call(*tensors) for call in calls]
    grads = [torch.autograd.grad(out.float().square().sum(), tensors[0])[0] for out in outs]
    for head in range(4):
        for mixture, sdpa, twin in (outs, grads):
            assert torch.equal(mixture[:, head], (sdpa if head in inside else twin)[:, head])
