"""``python -m flashpoint``: the same as ``flashpoint``."""

from flashpoint.cli.main import main
from flashpoint.cli.process import end_with


def run() -> None:
    """Be the command ``flashpoint``."""
    end_with(lambda: main(prog_name="flashpoint"))


if __name__ == "__main__":
    run()
