"""The command ``flashpoint``. A verb is imported when it is called, so that ``--help`` answers at once."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from flashpoint.cli.selection import BAD_RUNS
from flashpoint.errors import UserError, command_errors, nearest, pip_install, readers_may_leave

VERBS = {
    "train": ("lab.cli.train:command", "Train, record or replay a model; KEY=VALUE sets its configuration."),
    "watch": ("cli.watch:command", "Follow runs that are under way."),
    "runs": ("cli.runs:command", "How runs ended, their rates, hottest heads, recovery and warnings."),
    "compare": ("cli.compare:command", "Whether two runs are equal, or the first step that differs."),
    "survival": (
        "lab.cli.survival:command",
        "How many runs exploded, and when; against a control or a setting.",
    ),
    "loss": ("lab.cli.loss:command", "What an attention costs in validation loss."),
    "series": (
        "lab.cli.series:command",
        "Metrics of a run over steps; what departs first in an explosion.",
    ),
    "weights": ("lab.cli.weights:command", "How far weights come apart where runs differ in one thing."),
    "delta": ("lab.cli.delta:command", "The error of δ by head, layer, attention, weights or targets."),
    "deviation": (
        "lab.cli.deviation:command",
        "How far attentions are from each other and from FP64, by precision.",
    ),
    "diagnose": ("cli.diagnose:command", "What an attention does wrong, by layer and head."),
    "localize": ("lab.cli.localize:command", "Which layers, heads and choices made a run explode."),
    "claims": ("lab.cli.claims:command", "What was claimed of the explosion, and what the evidence says."),
    "report": ("lab.cli.report:command", "Write a page with figures of runs."),
    "archive": ("lab.cli.archive:command", "Add runs to the evidence tables."),
}
"""Verb → its command, as MODULE:ATTRIBUTE, and its line in the list of verbs. Those of ``lab`` need its extra."""


class Verbs(click.Group):
    """Verbs of :data:`VERBS`. Errors end in one line on stderr with status 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        name = VERBS[cmd_name][0]
        if name.startswith("lab."):
            from flashpoint.extras import from_lab  # other verbs do without

            command: click.Command = from_lab(name.removeprefix("lab."), f"flashpoint {cmd_name}")
            return command
        module, attribute = name.split(":")
        command = getattr(import_module(f"flashpoint.{module}"), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and (meant := nearest(args[0], VERBS)):
            ctx.fail(f"No such command '{args[0]}'; {meant.rstrip()}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        verbs = [CompletionItem(verb, help=line) for verb, (_, line) in VERBS.items() if verb.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        with readers_may_leave():  # here: outside, click ends a broken pipe with status 1
            status = super().invoke(ctx)
        return 2 if ctx.meta.get(BAD_RUNS) else status

    def main(self, *args: Any, **extra: Any) -> Any:
        with command_errors():
            try:
                status = super().main(*args, **{**extra, "standalone_mode": False})
            except click.exceptions.NoArgsIsHelpError as error:
                error.show()
                status = error.exit_code
            except click.ClickException as error:
                context: click.Context | None = getattr(error, "ctx", None)
                command = context.command_path if context else "flashpoint"
                message = error.format_message().rstrip(".")
                raise UserError(f"{command}: {message}; {command} --help tells what it takes") from error
            except click.Abort:
                status = 130  # Ctrl-C
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                raise UserError(f"needs PyTorch; {pip_install('torch')}") from error
        sys.exit(status)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="flashpoint")
def main() -> None:
    """Reproduce, replay and localise the loss explosion of GPT-2 training with BF16 FlashAttention.

    RUN is a run's folder, its name under runs/, a folder of runs, a glob, or EXPERIMENT:PATTERN for runs of the
    evidence tables, e.g. 'ignite-h200:flash_bf16_*'. runs, series, report and watch also take a log of another tool:
    trainer_state.json, TensorBoard, W&B, CSV, text; PATH:NAME says which column is the loss. "flashpoint VERB --help"
    tells what a verb takes.
    """
