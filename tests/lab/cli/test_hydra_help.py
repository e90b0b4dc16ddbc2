"""Hydra's help of an option is an object; argparse of Python 3.14 reads it as text when the option is added."""

import argparse

import pytest
from hydra._internal.utils import get_args_parser  # noqa: TID251 - what hydra.main builds

from flashpoint.lab.cli.hydra_help import help_as_text


def test_argparse_reads_hydras_help_as_text() -> None:
    with help_as_text():
        parser = get_args_parser()
        (action,) = (one for one in parser._actions if one.dest == "shell_completion")
        assert "shell completion" in argparse.HelpFormatter("train")._expand_help(action)
    with pytest.raises(TypeError):  # Hydra still needs it
        argparse.HelpFormatter("train")._expand_help(action)
