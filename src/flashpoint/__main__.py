"""``python -m flashpoint``: the same as ``flashpoint``."""

from flashpoint.cli.process import own_process


def run() -> None:
    """Be the command ``flashpoint``."""
    with own_process():
        from flashpoint.cli.main import main

        main(prog_name="flashpoint")


if __name__ == "__main__":
    run()
