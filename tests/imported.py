"""What train.py and the verbs import and build sooner or later: once, in the server that `tests.warm` forks from.

What is missing here costs time and nothing else.
"""

# ruff: noqa: E402, F401
import gc

gc.disable()  # imports make a million objects that stay, and each look goes over all of them

import atexit
import copy
import importlib
import io
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import hydra.main
import pyarrow.compute
import pyarrow.parquet
import rich.live
import scipy.stats
import tokenizers.implementations
import torch._dynamo.utils
import torch._inductor.config  # by torch.use_deterministic_algorithms
from hydra import compose, initialize_config_dir
from hydra._internal.config_repository import ConfigRepository  # noqa: TID251
from hydra._internal.hydra import Hydra  # noqa: TID251
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from matplotlib.figure import Figure

import flashpoint.cli.diagnose
import flashpoint.cli.runs
import flashpoint.diagnosis.verdict
import flashpoint.lab.analysis.lifetimes
import flashpoint.lab.cli.claims
import flashpoint.lab.cli.delta
import flashpoint.lab.cli.deviation
import flashpoint.lab.cli.loss
import flashpoint.lab.cli.series
import flashpoint.lab.cli.survival
import flashpoint.lab.deviation.engines
import flashpoint.lab.replay
import flashpoint.lab.report.page
import flashpoint.lab.report.terminal_curves
import flashpoint.lab.training.execution
from flashpoint.lab.build_config import key_types
from flashpoint.lab.cli.composition import store_schema
from flashpoint.lab.config import Config
from flashpoint.lab.training.determinism import describe_environment
from tests import composition_once

CONFIGS = Path(__file__).parent.parent / "configs"
_load, _parse = ConfigRepository.load_config, OverridesParser.parse_rule
_read: dict[tuple[tuple[str, ...], str], ConfigResult | None] = {}
_parsed: dict[str, Override] = {}


def _key(repository: ConfigRepository, config_path: str) -> tuple[tuple[str, ...], str]:
    return tuple(source.path for source in repository.sources), config_path


def _note(self: ConfigRepository, config_path: str) -> ConfigResult | None:
    for path in [config_path, *(f"{file.parent.name}/{file.stem}" for file in CONFIGS.glob("*/*.yaml"))]:
        if _key(self, path) not in _read:
            _read[_key(self, path)] = _load(self, path)
    return _load(self, config_path)


def _load_once(self: ConfigRepository, config_path: str) -> ConfigResult | None:
    return _read.pop(_key(self, config_path), None) or _load(self, config_path)


def _parse_once(self: OverridesParser, s: str, rule_name: str) -> Any:
    return copy.copy(_parsed[s]) if rule_name == "override" and s in _parsed else _parse(self, s, rule_name)


# The first composition finds Hydra's plugins and fills its parser's caches. A fork takes each file once as it is read
# here, and as it is parsed here what most runs are given.
composition_once.work_once()
store_schema()
key_types()
tiny = importlib.import_module("tests.conftest").TINY  # whose imports no type checker is to follow
ConfigRepository.load_config = _note  # type: ignore[method-assign]
with initialize_config_dir(str(CONFIGS), version_base="1.3"):
    given = ["train.steps=1", "data.path=a/b", "+tracking.tags=[a]", "hydra.sweep.dir=a"]
    for preset in (tiny, ["tracking=disabled"], ["experiment=demo_cpu"]):
        compose("train", [*preset, *given], return_hydra_config=True)
_parsed.update({text: OverridesParser.create().parse_override(text) for text in tiny})
ConfigRepository.load_config = _load_once  # type: ignore[method-assign]
OverridesParser.parse_rule = _parse_once  # type: ignore[method-assign]

# Hydra composes all of it once more to look for hydra.mode, which only the command line or files of the user's can set.
_look_for_mode = Hydra.get_mode


def _mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """None is what Hydra finds where nobody has set it."""
    asked = any(argument.startswith("-") or "hydra" in argument for argument in sys.argv[1:])
    return _look_for_mode(self, config_name, overrides) if asked else None


Hydra.get_mode = _mode  # type: ignore[method-assign]

# The first figure builds what Matplotlib keeps for all: its list of fonts, its parser of "$10^1$".
figure = Figure(layout="constrained")
figure.subplots().semilogy([1, 10])
figure.savefig(io.BytesIO())

# Two thirds of a figure's time make room for its labels. Nobody sees the figures of these runs; tests/report/ has room.
Figure.set_layout_engine = lambda *_, **__: None  # type: ignore[method-assign]

os.fsync = lambda fd: None  # as in tests/conftest.py

describe_environment(torch.device("cpu"), Config())  # the digest of the source takes as long as a short training

# What was imported here ends with the server. At the end of each fork PyTorch would take its operators back one by one.
for registered in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    registered.atexit = False
atexit.unregister(torch._dynamo.utils.dump_compile_times)

# A collection in a fork would look at everything imported here, and so copy its pages.
gc.freeze()
gc.enable()
# The end of a fork (flashpoint.cli.process) would look through all of it for files that are open.
gc.unfreeze = lambda: None
