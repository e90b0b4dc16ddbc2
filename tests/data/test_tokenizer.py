"""Tokenisers give back any text, know no special token in it, and are the same in every process."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from flashpoint.data import prepare as preparation
from flashpoint.data.tokenizer import gpt2_tokenizer, load_bpe, train_bpe
from flashpoint.errors import UserError
from tests.conftest import environment
from tests.data.texts import DOCUMENTS


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


def test_byte_level_bpe_round_trips_any_text(tmp_path: Path) -> None:
    train_bpe(DOCUMENTS, 300, tmp_path / "tokenizer.json")
    tokenizer = load_bpe(tmp_path / "tokenizer.json")
    assert tokenizer.vocab_size == 300
    generator = random.Random(0)
    points = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    samples = [
        "",
        " leading",
        "tabs\t\r\n",
        "emoji 🧨 漢字 \u0000\u007f\u0080",
        "<|endoftext|>",
        *DOCUMENTS[:5],
        *("".join(map(chr, generator.choices(points, k=200))) for _ in range(20)),
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
