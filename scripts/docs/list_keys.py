"""Every key of the configuration but those of ``attn``, and its meaning, as a Markdown table: for the reference."""

from __future__ import annotations

import re

from flashpoint.cli.table import Table, show
from flashpoint.lab.build_config import keys
from flashpoint.typed import Key


def main() -> None:
    show(Table(("key", "meaning"), [[f"`{key.name}`", _meaning(key)] for key in keys() if key.description]), "markdown")


def _meaning(key: Key) -> str:
    """Return the description in Markdown, and the names that the key takes, where it takes some."""
    described = re.sub(r":\w+:(?=`)", "", key.description.replace("``", "`"))
    before, _, names = key.type.partition("one of ")
    listed = ", ".join(f"`{name}`" for name in names.split(", "))
    return f"{described} One of {listed}." if names and not before else described


if __name__ == "__main__":
    main()
