"""Files of runs, tokens and evidence whose bytes are damaged: cut, flipped, emptied, gone, grown, or others."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.judge import Command, Kind
from tests.fuzz.recorded import VERBS, command
from tests.fuzz.recorded import lay as laid

_FILES = (
    *(f"runs/original/{name}" for name in ("config.json", "manifest.json", "outcome.json", "metrics.jsonl")),
    *(f"runs/original/{name}" for name in ("tape.bin", "chain.bin", "localize.jsonl")),
    *(f"runs/original/checkpoints/step-0000000{step}" for step in ("06.json", "12.json", "06.safetensors")),
    "runs/original/checkpoints/step-000000012.safetensors",
    *(f"runs/reference/{name}" for name in ("runs.parquet", "metrics/small.parquet", "chains/small.parquet")),
    "data/*/meta.json", "data/*/train.bin", "data/*/val.bin", "data/*/tokenizer.json",
    "claims.yaml", "captures/layer-01.safetensors", "captures/delta.jsonl",
)  # fmt: skip
_READ_BY = {
    "claims.yaml": ("claims", "--file", "claims.yaml"),
    "captures/layer-01.safetensors": ("diagnose", "captures"),
    "captures/delta.jsonl": ("diagnose", "captures"),
}
"""Files that one verb alone reads."""
_DAMAGES = st.sampled_from(("cut", "flip", "empty", "gone", "grown", "other", "folder"))
_CASES = st.tuples(st.sampled_from(_FILES), _DAMAGES, st.floats(0, 1, exclude_max=True), st.binary(max_size=40), VERBS)


def lay(tree: Path, case: tuple[Any, ...]) -> Command:
    where, damage, share, others, verb = case
    (path,) = laid(tree).glob(where)
    content = bytearray(path.read_bytes())
    place = int(share * len(content))
    match damage:
        case "cut":
            del content[place:]
        case "flip" if content:
            content[place] ^= 1 + (others[0] if others else 0) % 255
        case "empty":
            content.clear()
        case "grown":
            content[place:place] = others
        case "other":
            content[:] = others
    path.write_bytes(content)
    if damage in ("gone", "folder"):
        path.unlink()
    if damage == "folder":
        path.mkdir()
    return command(_READ_BY.get(where, verb))


KIND = Kind("damaged bytes", _CASES, lay, in_ci=14)
