"""Speed on this machine, side by side with others: kernels, whole optimiser steps, and the seconds before the first.

    python scripts/benchmarks/bench.py kernels    # TFLOP/s, memory of variants, PyTorch's, flash-attn-4 where installed
    python scripts/benchmarks/bench.py training   # tokens/s of flashpoint's step and of a loop as nanoGPT has it
    python scripts/benchmarks/bench.py users      # a step of Transformers' GPT-2 with what users put into it; host time
    python scripts/benchmarks/bench.py compile    # seconds to the first step, with empty and with warm caches
    python scripts/benchmarks/bench.py all --out FOLDER    # each in a process of its own
    python scripts/benchmarks/bench.py all --device cpu    # tiny models, to see that it runs

What is compared takes turns, so that a drift of the clock falls on all alike. --attention takes variants, or
NAME,KEY=VALUE with settings: flash_fixed,attn.out_residual_bits=3, or of a training flash_bf16,train.cuda_graph=false.
--shape takes EXPERIMENT, with sequences of a step and of a micro-batch if they are others: gpt2_124m:128/32; for
kernels it takes BxHxTxd.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import compilation, kernels, other_work, training, users
from benchmarks.shapes import ATTENTION_SHAPES, AttentionShape, attention_shape, training_shape
from flashpoint.errors import UserError, exit_in_one_line

COMMANDS = ("kernels", "training", "users", "compile")
"""The last one loads the host most: a table tells of the load before it."""
KERNEL_SECONDS, LOOP_SECONDS = 0.3, 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=(*COMMANDS, "all"))
    parser.add_argument("--attention", nargs="+", default=[], metavar="NAME", help="only these of this package's")
    parser.add_argument("--shape", nargs="+", default=[], metavar="SHAPE", help="only these")
    of_each = f"of each measurement; {KERNEL_SECONDS} for a pass and {LOOP_SECONDS:.0f} for a loop if not given"
    parser.add_argument("--seconds", type=float, metavar="N", help=of_each)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write each table here as text and as CSV")
    parser.add_argument("--profile", action="store_true", help="training, users: kernel time of one step by group, too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    with exit_in_one_line():
        run(parser.parse_args())


def run(arguments: argparse.Namespace) -> None:
    """Measure what the arguments ask for.

    Raises:
        UserError: this machine, or an argument, does not allow it.
    """
    other_work.at_start()
    commands = COMMANDS if arguments.command == "all" else (arguments.command,)
    device = _device(arguments.device)
    of_kernels, of_training = _shapes(arguments.shape, commands)
    if arguments.command == "all":
        _run_each(arguments, of_kernels, of_training)
        return
    if "kernels" in commands:
        seconds = arguments.seconds or KERNEL_SECONDS
        kernels.measure(
            device, of_kernels or ATTENTION_SHAPES[device.type], arguments.attention, seconds, arguments.out
        )
    if "training" in commands:
        shapes = [training_shape(word) for word in of_training or training.SHAPES[device.type]]
        attentions = arguments.attention or training.ATTENTIONS
        seconds = arguments.seconds or LOOP_SECONDS
        training.measure(device, shapes, attentions, seconds, arguments.out, arguments.profile)
    if "compile" in commands:
        shapes = [training_shape(word) for word in of_training or compilation.SHAPES[device.type]]
        compilation.measure(device, shapes, arguments.attention or compilation.ATTENTIONS, arguments.out)
    if "users" in commands:
        users.measure(device, arguments.seconds or LOOP_SECONDS, arguments.out, arguments.profile)


def _run_each(arguments: argparse.Namespace, of_kernels: list[AttentionShape], of_training: list[str]) -> None:
    """Run each command in a process of its own, so that one which fails does not end the others.

    Raises:
        UserError: some have failed.
    """
    failed = []
    for command in COMMANDS:
        words = ["x".join(map(str, shape)) for shape in of_kernels] if command == "kernels" else of_training
        given = {
            "--shape": [] if command == "users" else words,
            "--attention": arguments.attention,
            "--seconds": [] if arguments.seconds is None else [arguments.seconds],
            "--out": [] if arguments.out is None else [arguments.out],
            "--device": [arguments.device],
        }
        options = [str(word) for name, values in given.items() if values for word in (name, *values)]
        options += ["--profile"] if arguments.profile else []
        if subprocess.run([sys.executable, __file__, command, *options], check=False).returncode:
            failed.append(command)
    if failed:
        raise UserError(f"failed: {', '.join(failed)}; what was said stands above, and the other tables are whole")


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is visible; the benchmark needs one, or --device cpu for a look at it")
    return torch.device(name)


def _shapes(words: list[str], commands: tuple[str, ...]) -> tuple[list[AttentionShape], list[str]]:
    """Return the shapes of attentions, and the words that mean shapes of trainings.

    Raises:
        UserError: there is one that none of the commands takes.
    """
    shapes = {word: attention_shape(word) for word in words}
    for word, shape in shapes.items():
        if shape is None and commands == ("kernels",):
            raise UserError(f"--shape {word}: kernels take BxHxTxd: sequences, heads, tokens, features of a head")
        if shape is not None and "kernels" not in commands:
            raise UserError(f"--shape {word}: {commands[0]} takes EXPERIMENT[:SEQUENCES[/MICRO]]")
    return [shape for shape in shapes.values() if shape], [word for word, shape in shapes.items() if shape is None]


if __name__ == "__main__":
    main()
