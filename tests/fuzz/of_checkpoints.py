"""Checkpoints, tapes and chains that are not the run's, with hashes and digests that match."""

import json
import struct
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flashpoint.files import file_sha256
from tests.fuzz.judge import Command, Kind
from tests.fuzz.of_records import PLACE, changed, values_changed
from tests.fuzz.recorded import TRAINING, base, command
from tests.fuzz.recorded import lay as laid
from tests.fuzz.verb import digest

_RUN = "runs/original"
_FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "half": torch.Tensor.half,
    "double": torch.Tensor.double,
    "bfloat16": torch.Tensor.bfloat16,
    "int8": lambda x: x.to(torch.int8),
    "int64": lambda x: x.to(torch.int64),
    "bool": torch.Tensor.bool,
    "one number": lambda x: x.reshape(-1)[:1],
    "no number": lambda x: x.reshape(-1)[:0],
    "scalar": lambda x: x.reshape(-1)[0],
    "flat": lambda x: x.reshape(1, -1),
    "longer": lambda x: torch.cat((x.reshape(-1), x.reshape(-1)[:1])),
    "transposed": lambda x: x.reshape(-1, 1) if x.dim() < 2 else x.mT,
}
_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NaN": lambda x: torch.full_like(x, torch.nan),
    "infinite": lambda x: torch.full_like(x, -torch.inf),
    "zeros": torch.zeros_like,
    "negated": torch.neg,
    "one more": lambda x: x + 1,
    "least changed": lambda x: torch.nextafter(x, torch.full_like(x, torch.inf)),
    "huge": lambda x: torch.full_like(x, 3e38),
}
_WHOLE = ("gone", "renamed", "added", "swapped", "another run's", "another step's", "none", "no state")
_CHECKPOINTS = st.tuples(
    st.just("checkpoint"),
    st.sampled_from((6, 12)),
    st.integers(0, 60),
    st.sampled_from((*_FORMS, *_VALUES, *_WHOLE)),
)
_STATES = st.tuples(st.just("state"), st.sampled_from((6, 12)), PLACE, values_changed(st.none() | st.integers(-9, 99)))
_SIDECARS = st.tuples(
    st.just("sidecar"), st.sampled_from((6, 12)), PLACE, values_changed(st.text(max_size=3) | st.integers())
)
_TAPES = st.tuples(
    st.just("tape"),
    st.sampled_from(("windows", "windows", "swapped", "dropped", "repeated", "emptied", "context", "n_windows", "seed",
                     "micro_batches", "ranks", "sequences", "initial_weights", "data_fingerprint", "length")),
    st.integers(0, 60),
    st.one_of(st.integers(0, 2**32 - 1), st.sampled_from((0, 1, 2**31, 2**32 - 1, 10**30, -1, None, "x", 0.5))),
)  # fmt: skip
_CHAINS = st.tuples(
    st.just("chain"),
    st.sampled_from(("loss", "grad_norm", "state", "dropped", "repeated", "emptied", "more")),
    st.integers(0, 60),
    st.integers(0, 2**32 - 1),
)
_READ_BY = (*TRAINING, ("compare", "original", "small:original"), ("compare", "original", "whole"))
_CASES = st.tuples(
    st.one_of(_CHECKPOINTS, _CHECKPOINTS, _STATES, _SIDECARS, _TAPES, _CHAINS), st.sampled_from(_READ_BY)
)


def lay(tree: Path, case: tuple[tuple[Any, ...], tuple[str, ...]]) -> Command:
    (what, which, place, change), verb = case
    work = laid(tree)
    match what:
        case "tape":
            _forge_tape(work / _RUN / "tape.bin", which, place, change)
        case "chain":
            _forge_chain(work / _RUN / "chain.bin", which, place, change)
        case _:
            _forge_checkpoint(work, what, which, place, change)
    values = {*_VALUES, "swapped", "another run's", "another step's"}.difference(_NEVER)
    unseen = what == "checkpoint" and which == _UNCHECKED and change in values
    read = command(verb)
    return read if unseen else Command(**{**vars(read), "lost": _other_state})


_NEVER = ("NaN", "infinite")
"""What no checkpoint holds before the run computed it."""
_UNCHECKED = 6
"""A step of which the chain has no checksum, by which other values are told."""


@cache
def _states() -> frozenset[str]:
    """Return the states that the run was in, as ``verb.py`` tells them."""
    files = sorted((base() / "work" / _RUN / "checkpoints").glob("*.safetensors"))
    return frozenset(f"began {int(file.stem[5:])} {digest(load_file(file))}" for file in files)


def _other_state(_tree: Path, out: str) -> str | None:
    """Return what was begun with, unless the run was in that state."""
    began = [line for line in out.splitlines() if line.startswith("began ")]
    return next((f"{line}: not the run's" for line in began if line not in _states()), None)


def _forge_checkpoint(work: Path, what: str, step: int, place: Any, change: Any) -> None:
    path = work / _RUN / f"checkpoints/step-{step:09}.safetensors"
    sidecar = path.with_suffix(".json")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    if what == "checkpoint":
        tensors, metadata = _forged(work, path, tensors, metadata, place, change)
    elif what == "state":
        metadata["state"] = json.dumps(changed(json.loads(metadata["state"]), place, change))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    told = {"step": step, "size": path.stat().st_size, "sha256": file_sha256(path)}
    sidecar.write_text(json.dumps(changed(told, place, change) if what == "sidecar" else told))


def _forged(
    work: Path, path: Path, tensors: dict[str, torch.Tensor], metadata: Any, place: int, change: str
) -> tuple[dict[str, torch.Tensor], Any]:
    own = sorted(name for name in tensors if not name.startswith("probes/"))
    name = own[place % len(own)]
    match change:
        case "gone":
            del tensors[name]
        case "renamed":
            tensors[f"{name}x"] = tensors.pop(name)
        case "added":
            tensors["more"] = torch.zeros(2)
        case "swapped":
            other = own[(place + 7) % len(own)]
            tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()
        case "another run's" | "another step's":
            others = {"6": "12", "12": "06"}[str(int(path.stem[5:]))]
            file = work / f"runs/whole/checkpoints/{path.name}"
            if change == "another step's":
                file = path.with_name(f"step-0000000{others}.safetensors")
            tensors = load_file(file)
        case "none":
            tensors = {}
        case "no state":
            metadata = None
        case _:
            tensors[name] = (_FORMS | _VALUES)[change](tensors[name])
    return tensors, metadata


def _digest(before: bytes, data: bytes) -> bytes:
    return blake2b(before + data, digest_size=8).digest()


def _forge_tape(path: Path, which: str, place: int, value: Any) -> None:
    data = path.read_bytes()
    length = struct.unpack_from("<I", data, 8)[0]
    header, body = json.loads(data[12 : 12 + length]), data[12 + length + 8 :]
    size = 4 * header["micro_batches"] * header["ranks"] * header["sequences"] + 8
    records = _edited([body[at : at + size - 8] for at in range(0, len(body) - size + 1, size)], which, place)
    at = place % len(records) if records else 0
    if which == "windows" and isinstance(value, int) and records:
        window = 4 * (place % (len(records[at]) // 4))
        records[at] = records[at][:window] + struct.pack("<I", value % 2**32) + records[at][window + 4 :]
    if which in header:
        header[which] = value
    text = json.dumps(header).encode()
    told = value % 2**32 if which == "length" and isinstance(value, int) else len(text)
    head = data[:8] + struct.pack("<I", told) + text
    out, digest_ = head, _digest(b"", head)
    out += digest_
    for record in records:
        digest_ = _digest(digest_, record)
        out += record + digest_
    path.write_bytes(out)


def _forge_chain(path: Path, which: str, place: int, value: int) -> None:
    data = path.read_bytes()
    magic, body = data[:8], data[8:]
    records = _edited([body[at : at + 16] for at in range(0, len(body) - 23, 24)], which, place)
    if which in ("loss", "grad_norm", "state") and records:
        at, offset = place % len(records), {"loss": 0, "grad_norm": 4, "state": 8}[which]
        record = bytearray(records[at])
        record[offset : offset + 4] = np.uint32(value).tobytes()
        records[at] = bytes(record)
    out, told = magic, _digest(b"", magic)
    for record in records:
        told = _digest(told, record)
        out += record + told
    path.write_bytes(out)


def _edited(records: list[bytes], how: str, place: int) -> list[bytes]:
    at = place % len(records)
    match how:
        case "dropped":
            del records[at]
        case "repeated":
            records.insert(at, records[at])
        case "emptied":
            records.clear()
        case "more":
            records += records
        case "swapped":
            records[at], records[0] = records[0], records[at]
    return records


KIND = Kind("checkpoints, tapes and chains with matching hashes", _CASES, lay, in_ci=14)
