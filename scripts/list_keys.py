"""Every key of the configuration, its type, default and description, as a Markdown table: for docs/reference.md."""

from __future__ import annotations

import json

from flashpoint.build_config import keys
from flashpoint.cli.table import Table, show


def main() -> None:
    rows = [
        [f"`{key.name}`", key.type, f"`{json.dumps(key.default)}`", key.description.replace("``", "`")]
        for key in keys()
        if key.description  # sections have none
    ]
    show(Table(("key", "type", "default", "meaning"), rows), "markdown")


if __name__ == "__main__":
    main()
