"""``python -m flashpoint``: the same as ``flashpoint``."""

from flashpoint.cli.main import main

if __name__ == "__main__":
    main(prog_name="flashpoint")
