"""Tokenisers give back any text, know no special token in it, and are the same in every process."""

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import regex
import tokenizers
from tiktoken_ext.openai_public import r50k_pat_str

from flashpoint.errors import UserError
from flashpoint.lab.data import prepare as preparation
from flashpoint.lab.data import tokenizer as module
from flashpoint.lab.data.tokenizer import Tokenizer, gpt2_tokenizer, load_bpe, train_bpe
from tests.conftest import environment
from tests.lab.data.texts import DOCUMENTS


@pytest.mark.slow
def test_a_trained_tokenizer_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Hash maps are seeded per process, so only separate processes can show an order that leaks."""
    script = (
        "import sys; from pathlib import Path; from flashpoint.lab.data.tokenizer import train_bpe;"
        "train_bpe([p.read_text() for p in sorted(Path(sys.argv[1]).glob('*.py'))], 600, Path(sys.argv[2]))"
    )
    source = Path(preparation.__file__).parent.parent / "attention"
    for name in "abc":
        subprocess.run([sys.executable, "-c", script, str(source), str(tmp_path / name)], env=environment(), check=True)
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 1


def test_byte_level_bpe_round_trips_any_text(tmp_path: Path) -> None:
    train_bpe(DOCUMENTS, 300, tmp_path / "tokenizer.json")
    tokenizer = load_bpe(tmp_path / "tokenizer.json")
    of_library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
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
        assert of_library.decode(ids[:-1].tolist()) == text


def _nasty_texts() -> list[str]:
    """Texts whose words, line ends and spaces meet in every way."""
    generator = random.Random(1)
    parts = [
        "a",
        "don't",
        "'s",
        "7",
        "é",
        "漢字",
        "!?",
        "\x1c",
        "\u0085",
        "\u00a0",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "<|endoftext|>",
    ]
    return ["".join(generator.choices(parts, k=generator.randrange(40))) for _ in range(500)]


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [257, 400])
def test_a_document_in_pieces_has_the_tokens_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab_size: int
) -> None:
    """Oracle: the library, which is given whole documents; with 257 tokens, of which this package makes a table."""
    texts = [*_nasty_texts(), "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000), 0x10FFFF]))]
    train_bpe(texts, vocab_size, tmp_path / "whole.json")
    bpe, tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "whole.json")), load_bpe(tmp_path / "whole.json")
    for characters in (1, 2, 5):
        monkeypatch.setattr(module, "_PIECE_CHARACTERS", characters)
        train_bpe(texts, vocab_size, tmp_path / "pieces.json")
        assert (tmp_path / "pieces.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
        for text, ids in zip(texts, tokenizer.encode_documents(texts), strict=True):
            assert ids.tolist() == [*bpe.encode(text).ids, tokenizer.end_of_text]


def test_pieces_have_the_words_of_gpt2s_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: tiktoken's pattern, on whole documents."""
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 1)
    for text in _nasty_texts():
        pieces = [piece for piece, _ in module._pieces(text)]
        assert [word for piece in pieces for word in regex.findall(r50k_pat_str, piece)] == regex.findall(
            r50k_pat_str, text
        )


@pytest.mark.slow
def test_the_library_never_gets_a_large_document_whole() -> None:
    given: list[int] = []

    def encode(batch: Sequence[str]) -> list[list[int]]:
        given.append(sum(map(len, batch)))
        return [[0] * len(piece) for piece in batch]

    document = "one line of a file\n" * 1_000_000
    (ids,) = Tokenizer(2, 1, encode).encode_documents([document])
    assert len(ids) == len(document) + 1
    assert max(given) < len(document) / 4


def test_a_vocabulary_of_bytes_is_the_one_that_the_library_trains(tmp_path: Path) -> None:
    """Oracle: the library, which is given text."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(DOCUMENTS, trainer)
    train_bpe(DOCUMENTS, 257, tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_text(encoding="utf-8") == bpe.to_str(pretty=True)


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
