"""``python -m flashpoint``: the same as ``flashpoint``."""

from flashpoint.cli.process import quick_end


def run() -> None:
    """Be the command ``flashpoint``."""
    with quick_end():
        from flashpoint.cli.main import main

        main(prog_name="flashpoint")


if __name__ == "__main__":
    run()
