"""Every configuration in the repository composes, and every bad value is refused by name."""

import copy
import dataclasses
import functools
import json
import math
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from flashpoint.cli.run_words import open_run
from flashpoint.errors import UserError
from flashpoint.lab.build_config import build_config, hydra_schema, keys
from flashpoint.lab.config import Config, ModelConfig
from flashpoint.lab.evidence.tables import Evidence
from flashpoint.lab.training.run_size import capacity
from flashpoint.numerics.choices import DeltaError, Rounding
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.runs import migrations
from flashpoint.runs.migrations import REMOVED_CHOICES
from flashpoint.runs.run import Run
from tests.composed import CONFIGS, composed, composed_values, configured, configured_values
from tests.conftest import REPOSITORY, TINY


def stored_config(run: Run) -> dict[str, Any]:
    text = run.folder.config.read_text() if run.folder else run.stored.row.config  # type: ignore[attr-defined]
    values: dict[str, Any] = json.loads(text)
    return values


# One run of each attention that was ever recorded.
RECORDED = {
    json.dumps(migrations.config_as_kept(stored_config(run))["attn"]): run
    for runs in Evidence(REPOSITORY / "runs/reference").experiments.values()
    for run in runs.values()
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for group in ("attn", "model", "optimizer", "tracking", "experiment")
        for path in (CONFIGS / group).glob("*.yaml")
    ),
    ids=lambda path: f"{path.parent.name}={path.stem}",
)
def test_every_option_composes(path: Path) -> None:
    config = composed(f"{path.parent.name}={path.stem}")
    if path.parent.name == "attn":
        assert config.attn.name == path.stem


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        TINY,
        ("train.steps=3", "experiment=ignite", "train={warmup_steps: 7}", "model.vocab_size=512", "data=text"),
        ("attn=flash_bf16", "attn.out={mode: none}", "attn.layers=[1]", "tracking.tags=[a]", "replay=runs/a"),
    ],
)
def test_the_configurations_of_other_tests_are_those_that_hydra_composes(overrides: tuple[str, ...]) -> None:
    assert configured_values(*overrides) == composed_values(*overrides)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}={path.stem}")
def test_a_default_stands_once(path: Path) -> None:
    """No YAML gives a key the value that it has without one; an experiment stands on the choices of train.yaml."""
    defaults = composed_values() if path.parent.name == "experiment" else _defaults()
    given = yaml.safe_load(path.read_text())
    within = defaults if path.parent.name == "experiment" else defaults[path.parent.name]
    assert list(_repeated({name: value for name, value in given.items() if name != "defaults"}, within)) == []


@functools.cache
def _defaults() -> Any:
    return OmegaConf.to_container(OmegaConf.structured(hydra_schema()))


def _repeated(given: dict[str, Any], defaults: dict[str, Any]) -> Iterator[str]:
    for name, value in given.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in _repeated(value, defaults[name]))
        elif value == defaults[name]:
            yield name


def test_data_options_compose() -> None:
    assert composed("data=text", "data.path=x.txt").data.source == "text"
    assert composed("data=openwebtext", "model=gpt2_124m").data.tokenizer == "gpt2"


@pytest.mark.parametrize("path", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_has_room_for_its_checkpoints(path: Path) -> None:
    config = configured(f"experiment={path.stem}")
    shape = config.model
    parameters = (shape.vocab_size + shape.context + 12 * shape.n_layer * shape.d_model) * shape.d_model
    assert capacity(config.checkpoints, 12 * parameters) >= 8


def test_the_gpu_default_is_the_setting_in_which_the_explosion_was_seen() -> None:
    config = configured("experiment=ignite")
    assert config.model == ModelConfig(n_layer=6, n_head=4, d_model=256, context=2048, vocab_size=8192)
    settings = open_run("ignite-h200:flash_bf16_seed-1", REPOSITORY / "runs").config
    assert config.model == settings.model
    fields = ("batch_size", "lr", "warmup_steps", "min_lr_ratio", "beta1", "beta2", "eps", "weight_decay", "grad_clip")
    for field in fields:
        assert getattr(config.train, field) == getattr(settings.train, field), field


@pytest.mark.parametrize("experiment", ["laptop", "ignite"])
def test_the_tokeniser_follows_the_models_vocabulary(experiment: str) -> None:
    config = configured(f"experiment={experiment}", "model.vocab_size=1024")
    assert (config.model.vocab_size, config.data.vocab_size) == (1024, 1024)


def test_a_selection_names_its_other_variant() -> None:
    config = configured("attn=flash_bf16", "attn.layers=[2]", "attn.heads=[1,3]", "attn.elsewhere=standard")
    assert config.attn.elsewhere is not None
    assert config.attn.elsewhere.normalizer == "before_product"
    assert config.attn.layers == (2,)
    config = configured("attn=flash_bf16", "attn.layers=[2,3]", "attn.heads=[[1,3],[2]]", "attn.elsewhere=standard")
    assert [[heads for _, heads in config.attn.groups(layer, 4)] for layer in (1, 2, 3)] == [
        [(0, 1, 2, 3)], [(0, 2), (1, 3)], [(1,), (0, 2, 3)]
    ]  # fmt: skip


@pytest.mark.slow
def test_a_rounding_is_a_group_of_two_keys() -> None:
    config = configured("attn=flash_bf16", "attn.out_unnormalized.bits=3")
    assert config.attn.out_unnormalized == Rounding("nearest", 3)
    assert config.attn.title == "flash_bf16, Ō of 3 mantissa bits"
    assert configured("attn=flash_fp32", "attn.out_unnormalized.bits=3").attn.title == "flash_fp32"  # unrounded
    config = configured("attn=flash_bf16", "attn.out.mode=stochastic", "attn.scores={mode: none}")
    assert (config.attn.out, config.attn.scores) == (Rounding("stochastic"), Rounding("none"))
    assert config.attn.name == "flash_bf16 scores=none out=stochastic"
    assert configured("experiment=laptop").attn.out_unnormalized == Rounding("nearest", 1)
    coarse, fixed = (configured("experiment=demo_cpu", f"attn={name}").attn for name in ("flash_bf16", "flash_fixed"))
    assert fixed.out == Rounding("nearest", 1)
    assert (
        dataclasses.replace(fixed, name=coarse.name, delta=coarse.delta, out_residual_bits=coarse.out_residual_bits)
        == coarse
    )
    for wrong in ("attn.scores.mode=fp8", "attn.out.bits=0", "attn.out.bits=11"):
        with pytest.raises(UserError, match=wrong):
            configured(wrong)


@pytest.mark.slow
def test_a_cap_of_the_scores_takes_flexattention_and_no_probe_that_knows_none() -> None:
    no_probes = "probes.attention_interval=0"
    config = configured("attn=flex", "model.score_cap=30", no_probes)
    assert build_config(json.loads(json.dumps(config.to_dict())), CONFIGS / "attn") == config
    for attention in (["flash_bf16"], ["sdpa"], ["flex_fixed"], ["flex", "attn.shift_keys=sequence"],
                      ["flex", "attn.layers=[1]", "attn.elsewhere=sdpa"]):  # fmt: skip
        with pytest.raises(UserError, match=r"model\.score_cap=30: attn=.* takes no cap; choose attn=flex$"):
            configured(f"attn={attention[0]}", *attention[1:], "model.score_cap=30", no_probes)
    with pytest.raises(UserError, match=r"add probes\.attention_interval=0$"):
        configured("attn=flex", "model.score_cap=30")
    with pytest.raises(UserError, match=r"model\.score_cap=0"):
        configured("attn=flex", "model.score_cap=0", no_probes)


@pytest.mark.parametrize(("seeing", "value"), [("family", "llama"), ("qk_norm", "true"), ("score_cap", "30")])
def test_a_shift_by_a_bias_takes_no_model_whose_softmax_sees_it(seeing: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.shift_keys=running: .* before model\.{seeing}"):
        configured("attn=flex", f"model.{seeing}={value}", "model.shift_keys=running", "probes.attention_interval=0")


@pytest.mark.parametrize("targets", ["model", "unrounded"])
def test_drawn_targets_take_no_z_loss(targets: str) -> None:
    with pytest.raises(
        UserError, match=rf"^train\.z_loss=0\.1: .*probes\.targets={targets} .*set probes\.targets=data$"
    ):
        configured("train.z_loss=0.1", f"probes.targets={targets}")
    assert configured("train.z_loss=0.1").probes.targets == "data"


@pytest.mark.slow
def test_an_injected_error_is_keys_of_a_group_and_tells_itself() -> None:
    config = configured("attn=flash_fp32", "attn.delta_error.kind=bias", "attn.delta_error.size=3e-4")
    assert config.attn.delta_error == DeltaError(kind="bias", size=3e-4)
    assert config.attn.injected
    assert (config.attn.name, config.attn.title) == ("flash_fp32", "flash_fp32 injected")
    assert build_config(json.loads(json.dumps(config.to_dict())), CONFIGS / "attn") == config
    some = configured(
        "attn.delta_error.kind=noise",
        "attn.delta_error.size=-0.5",
        "attn.delta_error.layers=[1,3]",
        "attn.delta_error.into=grad_k",
    )
    assert (some.attn.delta_error.layers, some.attn.delta_error.into) == ((1, 3), "grad_k")
    assert build_config(json.loads(json.dumps(some.to_dict())), CONFIGS / "attn") == some
    assert not configured("attn.delta_error.kind=bias").attn.injected
    with pytest.raises(UserError, match=r"attn\.delta_error\.layers=\[7\]: the model has layers 1 to 6"):
        configured("attn.delta_error.kind=noise", "attn.delta_error.layers=[2,7]")
    with pytest.raises(UserError, match=r"attn\.delta_error\.kind=drift"):
        configured("attn.delta_error.kind=drift")


@pytest.mark.slow
@pytest.mark.parametrize(("text", "run"), RECORDED.items(), ids=[run.name for run in RECORDED.values()])
def test_the_attention_of_older_runs_still_builds(text: str, run: Run) -> None:
    recorded = json.loads(text)
    choices = json.loads(json.dumps(run.attention.to_dict()))
    assert _of_names_in(recorded, choices) == recorded


def _of_names_in(recorded: dict[str, Any], choices: dict[str, Any]) -> dict[str, Any]:
    """As the record has them: without choices that came later, nested ones among them, and roundings in two fields."""
    found = {}
    for name, value in recorded.items():
        point = name.removesuffix("_bits")
        if name in REMOVED_CHOICES:
            found[name] = REMOVED_CHOICES[name]
        elif isinstance(value, dict):
            found[name] = _of_names_in(value, choices[name])
        elif name not in choices:
            found[name] = choices[point]["bits"]
        else:
            found[name] = choices[name]["mode"] if isinstance(choices[name], dict) else choices[name]
    return found


def test_what_the_run_folder_stores_builds_the_same_configuration() -> None:
    config = configured("attn.layers=[2]", "attn.elsewhere=standard", "tracking.tags=[a,b]")
    assert build_config(config.to_dict(), CONFIGS / "attn") == config


def test_a_run_is_uploaded_only_where_it_is_asked_for() -> None:
    assert (Config().tracking.wandb, configured().tracking.wandb) == ("offline", "offline")
    assert {mode: configured(f"tracking={mode}").tracking.wandb for mode in ("disabled", "offline", "online")} == {
        mode: mode for mode in ("disabled", "offline", "online")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.n_layer=0", "model.n_layer=0: give more than 0"),
        ("model.d_model=96", "model.d_model=96 over model.n_head=4 gives heads of 24 features"),
        ("data.source=books", "data.source=books: choose one of packages, prose, python_corpus, openwebtext, text"),
        ("data.source=text", "data.path is missing"),
        ("data.path=x", "data.path=x is only read by data=text"),
        ("data.val_fraction=1.0", "data.val_fraction=1.0: give more than 0 and less than 1"),
        ("data.vocab_size=70000", "data.vocab_size=70000: give 257 or more and 65,536 or less"),
        ("data.max_bytes=0", "data.max_bytes=0: give more than 0"),
        ("train.steps=0", "train.steps=0: give more than 0"),
        ("train.lr=-1.0", "train.lr=-1.0: give 0 or more"),
        ("train.beta2=1.0", "train.beta2=1.0: give 0 or more and less than 1"),
        ("train.min_lr_ratio=2.0", "train.min_lr_ratio=2.0: give 0 or more and 1 or less"),
        ("train.warmup_steps=-1", "train.warmup_steps=-1: give 0 or more"),
        ("train.threads=0", "train.threads=0: give more than 0"),
        ("train.micro_batch_size=5", "train.batch_size=8 is no multiple of train.micro_batch_size=5"),
        ("optimizer.momentum=0.9", "optimizer.momentum=0.9 is only read by optimizer=muon: add optimizer=muon"),
        ("train.device=tpu", "train.device=tpu: choose one of auto, cpu, cuda"),
        ("detector.window=0", "detector.window=0: give more than 0"),
        ("detector.tail_steps=-1", "detector.tail_steps=-1: give 0 or more"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(override: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        configured("experiment=ignite", override)
    assert str(caught.value).startswith(told)
    assert "\n" not in str(caught.value)


def test_a_learning_rate_that_leaves_fp32_in_muon_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^train\.lr=1e\+31 times a matrix's size leaves FP32 in Muon: give 1e30 or less$"
    ):
        configured("optimizer=muon", "train.lr=1e31")


def test_every_key_says_what_it_is() -> None:
    listed = list(keys())
    assert {"seed", "model.context", "train.lr", "tracking.group"} <= {key.name for key in listed}
    assert [key.name for key in listed if "." in key.name and not key.description] == []


def numbers(section: type) -> Iterator[tuple[str, ...]]:
    """Paths of the fields that take a real number."""
    for name, hint in typing.get_type_hints(section).items():
        if dataclasses.is_dataclass(hint):
            yield from ((name, *path) for path in numbers(typing.cast(type, hint)))
        elif float in (hint, *typing.get_args(hint)):
            yield (name,)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_every_real_number_must_be_finite(number: float) -> None:
    values = composed_values("attn.layers=[2]", "attn.elsewhere=flash_fp32")
    other = composed_values("attn=flash_fp32")["attn"]
    paths = [*numbers(Config), *(("attn", "elsewhere", *path) for path in numbers(AttentionVariant))]
    assert {("train", "lr"), ("attn", "delta_error", "size"), ("attn", "elsewhere", "max_shift")} < set(paths)
    for *parents, last in paths:
        changed: dict[str, Any] = copy.deepcopy({**values, "attn": {**values["attn"], "elsewhere": other}})
        section = changed
        for parent in parents:
            section = section[parent]
        section[last] = number
        with pytest.raises(UserError, match=rf"{last}={number}: "):
            build_config(changed, CONFIGS / "attn")


@pytest.mark.parametrize("value", ["5", "true", "[flash_fp32]"])
def test_what_cannot_name_the_other_variant_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"attn\.elsewhere=.+; give a name, e\.g\. attn\.elsewhere=flash_fp32"):
        configured("attn.layers=[1]", f"attn.elsewhere={value}")


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size=512 is below data\.vocab_size=1024"):
        configured("model.vocab_size=512", "data.vocab_size=1024")


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_are_32_bits(seed: int) -> None:
    with pytest.raises(UserError, match=f"seed={seed}"):
        configured(f"seed={seed}")
