"""Tokens of ``data.path``, prepared; then damaged as ``../case.json`` says, and opened again."""

import json
import sys
from pathlib import Path
from typing import Any

from flashpoint.errors import exit_in_one_line
from flashpoint.lab.config import DataConfig
from flashpoint.lab.data.prepare import prepare


def main(path: str) -> None:
    with exit_in_one_line():
        config = DataConfig(source="text", path=path or "nowhere", vocab_size=260, val_fraction=0.1, workers=1)
        folder = prepare(config).path
        if case := json.loads(Path("../case.json").read_text()):
            damage(folder, *case)
            tokens = prepare(config)
            assert tokens.train.max() < tokens.vocab_size


def damage(folder: Path, what: str, where: Any, value: Any) -> None:
    if what != "meta":
        file = folder / what
        content = bytearray(file.read_bytes())
        content[where % len(content) :] = bytes.fromhex(value["bytes"])
        file.write_bytes(content)
        return
    file = folder / "meta.json"
    meta = json.loads(file.read_text())
    for part in (meta, meta["files"], meta["files"]["train"], meta["tokenizer"]):
        if where in part:
            part[where] = value
            if value == "gone":
                del part[where]
            break
    file.write_text(json.dumps(meta))


if __name__ == "__main__":
    main(sys.argv[1])
