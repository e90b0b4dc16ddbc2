"""Preparation gives the same bytes however it came about, and never something half written."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flashpoint.config import DataConfig
from flashpoint.data import corpus
from flashpoint.data import prepare as preparation
from flashpoint.data.prepare import prepare
from flashpoint.data.tokenizer import Tokenizer, gpt2_tokenizer, load_bpe, train_bpe
from flashpoint.data.tokens import open_tokens
from flashpoint.errors import UserError
from tests.conftest import environment

DOCUMENTS = [
    f"document {n}: " + "the second layer explodes, " * (n % 7 + 1) + "naïve Ω <|endoftext|>" for n in range(300)
]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """Three files of 100 documents, so that there are three shards."""
    folder = tmp_path / "text"
    folder.mkdir()
    for part in range(3):
        lines = [json.dumps({"text": text}) for text in DOCUMENTS[100 * part : 100 * part + 100]]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def config(path: Path, root: Path, **changes: object) -> DataConfig:
    settings = {
        "source": "text",
        "path": str(path),
        "root": str(root),
        "vocab_size": 300,
        "val_fraction": 0.1,
    }
    return DataConfig(**{**settings, "workers": 1, **changes})  # type: ignore[arg-type]


def decoded(tokens: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    ends = np.flatnonzero(tokens == tokenizer.end_of_text)
    return [tokenizer.decode(piece[piece != tokenizer.end_of_text].tolist()) for piece in np.split(tokens, ends + 1)][
        :-1
    ]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_tokens_decode_to_the_documents_in_order(jsonl: Path, tmp_path: Path) -> None:
    dataset = prepare(config(jsonl, tmp_path / "data"))
    tokenizer = load_bpe(dataset.path / "tokenizer.json")
    tokens = np.concatenate([dataset.train, dataset.val])
    assert decoded(tokens, tokenizer) == DOCUMENTS
    assert len(dataset.val) == round(0.1 * len(tokens))


def test_the_fingerprint_is_the_documented_one(jsonl: Path, tmp_path: Path) -> None:
    dataset = prepare(config(jsonl, tmp_path / "data"))
    digests = [hashlib.sha256((dataset.path / f"{split}.bin").read_bytes()).digest() for split in ("train", "val")]
    assert dataset.fingerprint == hashlib.sha256(b"".join(digests)).hexdigest()


@pytest.mark.parametrize("workers", [1, 2])
def test_preparing_again_gives_the_same_bytes_with_any_number_of_workers(
    jsonl: Path, tmp_path: Path, workers: int
) -> None:
    first = prepare(config(jsonl, tmp_path / "a"))
    again = prepare(config(jsonl, tmp_path / "b", workers=workers))
    assert bytes_of(first.path) == bytes_of(again.path)


def test_a_trained_tokenizer_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Hash maps are seeded per process, so only separate processes can show an order that leaks."""
    script = (
        "import sys; from pathlib import Path; from flashpoint.data.tokenizer import train_bpe;"
        "train_bpe([p.read_text() for p in sorted(Path(sys.argv[1]).glob('*.py'))], 600, Path(sys.argv[2]))"
    )
    source = Path(preparation.__file__).parent.parent / "attention"
    for name in "abc":
        subprocess.run([sys.executable, "-c", script, str(source), str(tmp_path / name)], env=environment(), check=True)
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 1


def test_prepared_data_are_not_prepared_again(jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(config(jsonl, tmp_path / "data"))
    monkeypatch.setattr(preparation, "source_shards", lambda _: pytest.fail("read the source again"))
    assert prepare(config(jsonl, tmp_path / "data")).fingerprint == first.fingerprint


def test_a_changed_file_is_a_new_preparation(jsonl: Path, tmp_path: Path) -> None:
    first = prepare(config(jsonl, tmp_path / "data"))
    (jsonl / "0.jsonl").write_text(json.dumps({"text": "something else " * 50}) + "\n")
    second = prepare(config(jsonl, tmp_path / "data"))
    assert first.path != second.path
    assert open_tokens(first.path).fingerprint == first.fingerprint


@pytest.mark.parametrize("stage", ["second shard", "tokenizer", "joining", "sidecar"])
def test_an_interrupted_preparation_is_not_trusted_and_ends_the_same(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    whole = prepare(config(jsonl, tmp_path / "whole"))

    class PowerLoss(BaseException):
        pass

    def fail(*_: object, **__: object) -> None:
        raise PowerLoss

    with monkeypatch.context() as patch:
        if stage == "second shard":
            run, calls = preparation._Job.run, []

            def second_fails(job: object, tokenizer: Tokenizer) -> dict:
                calls.append(job)
                if len(calls) == 2:
                    raise PowerLoss
                return run(job, tokenizer)  # type: ignore[arg-type]

            patch.setattr(preparation._Job, "run", second_fails)
        else:
            name = {"tokenizer": "train_bpe", "joining": "_join", "sidecar": "write_json"}[stage]
            original = preparation.write_json

            def sidecar_fails(path: Path, value: dict) -> None:
                fail() if path.name == "meta.json" else original(path, value)

            patch.setattr(preparation, name, sidecar_fails if stage == "sidecar" else fail)
        with pytest.raises(PowerLoss):
            prepare(config(jsonl, tmp_path / "broken"))
    assert not [path for path in (tmp_path / "broken").iterdir() if not path.name.startswith(".")]
    assert bytes_of(prepare(config(jsonl, tmp_path / "broken")).path) == bytes_of(whole.path)


def test_finished_shards_are_kept_and_damaged_ones_are_not(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(config(jsonl, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_join", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(config(jsonl, tmp_path / "broken"))
    (partial,) = (tmp_path / "broken").glob(".*.partial")
    damaged = partial / "shard-000001.bin"
    damaged.write_bytes(damaged.read_bytes()[:-2])
    run, done = preparation._Job.run, []
    monkeypatch.setattr(
        preparation._Job, "run", lambda job, tokenizer: done.append(job.path.name) or run(job, tokenizer)
    )
    assert bytes_of(prepare(config(jsonl, tmp_path / "broken")).path) == bytes_of(whole.path)
    assert done == ["shard-000001.bin"]


def test_killed_at_any_moment_the_next_preparation_ends_the_same(jsonl: Path, tmp_path: Path) -> None:
    whole = prepare(config(jsonl, tmp_path / "whole"))
    script = (
        "import sys; from tests.data.test_prepare import config, prepare; from pathlib import Path;"
        "print('started', flush=True); prepare(config(Path(sys.argv[1]), Path(sys.argv[2])))"
    )
    for attempt in range(6):
        command = [sys.executable, "-c", script, str(jsonl), str(tmp_path / "killed")]
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout
        process.stdout.readline()
        time.sleep(0.01 + 0.03 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert bytes_of(prepare(config(jsonl, tmp_path / "killed")).path) == bytes_of(whole.path)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "odd", "flipped"])
def test_a_damaged_token_file_is_refused_in_one_line(jsonl: Path, tmp_path: Path, split: str, damage: str) -> None:
    dataset = prepare(config(jsonl, tmp_path / "data"))
    file = dataset.path / f"{split}.bin"
    good = file.read_bytes()
    file.unlink()
    changed = {
        "empty": b"",
        "short": good[:-2],
        "odd": good[:-1],
        "flipped": good[:100] + bytes([good[100] ^ 1]) + good[101:],
    }
    if damage != "missing":
        file.write_bytes(changed[damage])
    assert_refused(config(jsonl, tmp_path / "data"), f"{split}.bin", f"delete {dataset.path}")


@pytest.mark.parametrize("damage", ["missing", "{", "{}", '{"format_version": 99}'])
def test_a_damaged_sidecar_is_refused_in_one_line(jsonl: Path, tmp_path: Path, damage: str) -> None:
    dataset = prepare(config(jsonl, tmp_path / "data"))
    sidecar = dataset.path / "meta.json"
    sidecar.unlink()
    if damage != "missing":
        sidecar.write_text(damage)
    assert_refused(config(jsonl, tmp_path / "data"), "meta.json", "delete")


def test_a_sidecar_of_other_files_is_refused(jsonl: Path, tmp_path: Path) -> None:
    dataset = prepare(config(jsonl, tmp_path / "data"))
    sidecar = json.loads((dataset.path / "meta.json").read_text())
    for change in ({"fingerprint": "0" * 64}, {"format_version": 2}, {"tokenizer": {"vocab_size": 5}}):
        (dataset.path / "meta.json").write_text(json.dumps({**sidecar, **change}))
        assert_refused(config(jsonl, tmp_path / "data"), "meta.json")


def assert_refused(settings: DataConfig, *fragments: str) -> None:
    with pytest.raises(UserError) as caught:
        prepare(settings)
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "fragments"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": \n', ["a.jsonl:2", "data.text_field"]),
        ("a.jsonl", b'{"body": "x"}\n', ["a.jsonl:1", "'text'"]),
        ("a.jsonl", b'{"text": 5}\n', ["a.jsonl:1", "no text"]),
        ("a.jsonl", b"[1]\n", ["a.jsonl:1"]),
        ("a.txt", b"\xff\xfe\x00broken", ["a.txt", "UTF-8"]),
        ("a.parquet", b"no parquet", ["a.parquet"]),
        ("a.txt", b"", ["too few", "data.val_fraction"]),
        ("a.pdf", b"x", ["data.path=", ".parquet"]),
    ],
)
def test_bad_text_is_refused_by_file_and_line(tmp_path: Path, name: str, content: bytes, fragments: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    assert_refused(config(tmp_path / name, tmp_path / "data"), *fragments)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(config(tmp_path / "empty", tmp_path / "data"), "empty", ".jsonl")
    assert_refused(config(tmp_path / "none", tmp_path / "data"), "none", "no such")


def test_an_unwritable_root_is_refused(jsonl: Path) -> None:
    assert_refused(config(jsonl, Path("/proc/data")), "/proc/data", "data.root")


def test_parquet_and_plain_text_hold_the_same_documents(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = DOCUMENTS[:50]
    pyarrow.parquet.write_table(pyarrow.table({"body": texts, "n": range(50)}), tmp_path / "a.parquet")
    (tmp_path / "folder").mkdir()
    for n, text in enumerate(texts):
        (tmp_path / f"folder/{n:03}.txt").write_text(text)
    parquet = prepare(config(tmp_path / "a.parquet", tmp_path / "data", text_field="body"))
    plain = prepare(config(tmp_path / "folder", tmp_path / "data"))
    assert parquet.fingerprint == plain.fingerprint
    assert_refused(config(tmp_path / "a.parquet", tmp_path / "data"), "body", "data.text_field")


def test_max_bytes_is_the_size_of_the_text_over_all_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for n in range(4):
        (tmp_path / f"folder/{n}.txt").write_text("".join(DOCUMENTS[10 * n : 10 * n + 10]))
    whole = "".join(DOCUMENTS[:40]).encode()
    for limit in (1001, 3000):
        dataset = prepare(config(tmp_path / "folder", tmp_path / "data", max_bytes=limit))
        tokenizer = load_bpe(dataset.path / "tokenizer.json")
        taken = "".join(decoded(np.concatenate([dataset.train, dataset.val]), tokenizer)).encode()
        assert limit - 4 < len(taken) <= limit  # a character cut in half is left out
        assert whole.startswith(taken)


# The Python corpus


@pytest.fixture
def site(tmp_path: Path) -> list[Path]:
    roots = [tmp_path / "lib", tmp_path / "lib/site-packages"]
    files = {
        "lib/a.py": "print(1)\n",
        "lib/copy_of_a.py": "print(1)\n",
        "lib/__pycache__/a.cpython-311.pyc": "x",
        "lib/__pycache__/cached.py": "cached",
        "lib/binary.so": "x",
        "lib/empty.py": "\n",
        "lib/large.py": "#" * 1_000_001,
        "lib/site-packages/b.md": "# b\n",
        "lib/site-packages/c/c.pyi": "c: int\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "lib/latin.py").write_bytes(b"# \xe9\n")
    return roots


def texts(roots: list[Path], max_bytes: int = 10**9) -> list[str]:
    return [text for shard in corpus._python_corpus(roots, max_bytes) for text in shard.documents()]


def test_the_python_corpus_takes_each_text_once(site: list[Path]) -> None:
    assert sorted(texts(site)) == ["# b\n", "c: int\n", "print(1)\n"]


def test_the_python_corpus_is_ordered_by_the_hash_of_relative_names(
    site: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"a.py": "print(1)\n", "copy_of_a.py": "print(1)\n", "b.md": "# b\n", "c/c.pyi": "c: int\n"}
    by_hash = [names[name] for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())]
    expected = list(dict.fromkeys(by_hash))
    assert texts(site) == expected
    walk = os.walk
    monkeypatch.setattr(corpus.os, "walk", lambda root: reversed(list(walk(root))))
    assert [text for text in texts(site) if text != "cached"] == expected


def test_max_bytes_is_the_size_of_the_python_corpus(site: list[Path]) -> None:
    whole = "".join(texts(site))
    for limit in range(1, len(whole) + 1):
        assert "".join(texts(site, limit)) == whole[:limit]


# OpenWebText


@pytest.fixture(autouse=True)
def _forget_openwebtext() -> Iterator[None]:
    yield
    corpus._load_openwebtext.cache_clear()


@pytest.mark.parametrize("script_on_main", [False, True])
def test_openwebtext_is_taken_in_ranges_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script_on_main: bool
) -> None:
    import datasets

    loaded = datasets.Dataset.from_dict({"text": DOCUMENTS})

    def load_dataset(name: str, split: str, revision: str = "main") -> datasets.Dataset:
        assert (name, split) == ("Skylion007/openwebtext", "train")
        if script_on_main and revision == "main":
            raise RuntimeError("Dataset scripts are no longer supported, but found openwebtext.py")
        return loaded

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(corpus, "_OPENWEBTEXT_SHARD", 70)
    settings = DataConfig(source="openwebtext", vocab_size=300, val_fraction=0.1, root=str(tmp_path), workers=1)
    dataset = prepare(settings)
    tokens = np.concatenate([dataset.train, dataset.val])
    assert decoded(tokens, load_bpe(dataset.path / "tokenizer.json")) == DOCUMENTS


def test_openwebtext_without_a_network_names_the_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host\nat all")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert_refused(DataConfig(source="openwebtext", root=str(tmp_path)), "data=openwebtext", "data=python_corpus")


# Tokenisers


def test_byte_level_bpe_round_trips_any_text(tmp_path: Path) -> None:
    train_bpe(DOCUMENTS, 300, tmp_path / "tokenizer.json")
    tokenizer = load_bpe(tmp_path / "tokenizer.json")
    assert tokenizer.vocab_size == 300
    samples = [
        "",
        " leading",
        "tabs\t\r\n",
        "emoji 🧨 漢字 \u0000\u007f\u0080",
        "<|endoftext|>",
        *DOCUMENTS[:5],
    ]
    for text, ids in zip(samples, tokenizer.encode_documents(samples), strict=True):
        assert ids[-1] == tokenizer.end_of_text == 299
        assert (ids[:-1] < 299).all()
        assert tokenizer.decode(ids.tolist()) == text


def test_a_small_corpus_gives_a_small_vocabulary(tmp_path: Path) -> None:
    train_bpe(["ab ab ab"], 5000, tmp_path / "tokenizer.json")
    tokenizer = load_bpe(tmp_path / "tokenizer.json")
    assert 257 <= tokenizer.vocab_size < 270


def test_gpt2_tokens_are_the_published_ones(tmp_path: Path) -> None:
    try:
        tokenizer = gpt2_tokenizer()
    except UserError:
        pytest.skip("tiktoken has not cached GPT-2's encoding and cannot fetch it")
    hello, special = tokenizer.encode_documents(["Hello world", "<|endoftext|>"])
    assert hello.tolist() == [15496, 995, 50256]
    assert 50256 not in special[:-1]


def test_gpt2_without_a_network_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    def offline(_: str) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match=r"data\.tokenizer=gpt2.*TIKTOKEN_CACHE_DIR.*data\.tokenizer=bpe"):
        gpt2_tokenizer()
