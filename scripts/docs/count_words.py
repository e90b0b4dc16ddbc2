"""Count the words that people read, and the sentences that are too long: ``python scripts/docs/count_words.py``.

The table has a row for each Markdown document, one for all documents, and one each for the docstrings of src/ and of
kernels/. Prose is what stands outside tables, blocks of code, HTML comments, and blocks that cog fills. The words of
tables that were written by hand are counted beside it.

``--sentences N`` prints the N longest sentences in place of the counts. PATH names documents, Python files, or folders.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashpoint.cli.table import Table, show

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 30
"""Words of the longest sentence that is not counted as long."""
_ABBREVIATIONS = r"\b(?:e\.g|i\.e|et al|vs|cf|approx|resp|Eq|Fig|Sec)\."
_END = re.compile(r"""[.!?…][*_")\]”’]*(?=\s)""")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
_GOES_ON = "\N{WORD JOINER}"
"""Put behind a mark that ends no sentence."""


@dataclass(frozen=True)
class Counts:
    """What a text has."""

    sentences: tuple[str, ...]
    """Of the prose."""
    table_words: int = 0

    @property
    def words(self) -> int:
        return sum(map(words_of, self.sentences))

    @property
    def long(self) -> list[str]:
        """The sentences of more than :data:`LIMIT` words."""
        return [sentence for sentence in self.sentences if words_of(sentence) > LIMIT]

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.sentences + other.sentences, self.table_words + other.table_words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="default: the whole repository")
    parser.add_argument("--sentences", type=int, metavar="N", help="print the longest sentences")
    arguments = parser.parse_args()
    counted = {path: count(path) for path in _files(arguments.paths or [ROOT])}
    if arguments.sentences:
        placed = [(sentence, _name(path)) for path, counts in counted.items() for sentence in counts.sentences]
        placed.sort(key=lambda one: -words_of(one[0]))
        rows = [[words_of(sentence), place, sentence] for sentence, place in placed[: arguments.sentences]]
        show(Table(("words", "place", "sentence"), rows), "markdown")
        return
    documents = {_name(path): counts for path, counts in counted.items() if path.suffix == ".md"}
    code = {_name(path): counts for path, counts in counted.items() if path.suffix == ".py"}
    named = {**documents, "all documents": _sum(documents.values())}
    if not arguments.paths:
        for folder in ("src", "kernels"):
            inside = [counts for name, counts in code.items() if name.startswith(f"{folder}/")]
            named[f"docstrings in {folder}/"] = _sum(inside)
    else:
        named |= code
    columns = ("text", "words of prose", "sentences", f"of more than {LIMIT} words", "longest", "words in tables")
    show(Table(columns, [_row(name, counts) for name, counts in named.items()]), "markdown")


def _row(name: str, counts: Counts) -> list[str | int]:
    longest = max(map(words_of, counts.sentences), default=0)
    return [name, counts.words, len(counts.sentences), len(counts.long), longest, counts.table_words]


def _sum(many: Iterable[Counts]) -> Counts:
    return sum(many, Counts(()))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """Return the documents and modules that git knows or would take; of Python files those of src/ and kernels/."""
    for path in (path.resolve() for path in paths):
        if path.is_file():
            yield path
            continue
        patterns = ["*.md"] + (["src/*.py", "kernels/*.py"] if path == ROOT else ["*.py"])
        command = ["git", "ls-files", "-co", "--exclude-standard", "--", *patterns]
        listed = subprocess.run(command, cwd=path, capture_output=True, text=True, check=True).stdout.split("\n")
        yield from (path / name for name in sorted(set(filter(None, listed))) if (path / name).is_file())


def count(path: Path) -> Counts:
    """Count a Markdown document, or the docstrings of a Python file."""
    text = path.read_text(encoding="utf-8")
    return count_markdown(text) if path.suffix == ".md" else count_docstrings(text)


def count_markdown(text: str) -> Counts:
    """Count a document in Markdown."""
    text = re.sub(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    prose: list[str] = []
    table_words = 0
    fence = ""
    after_blank, indented, in_list = True, False, False
    for line in text.splitlines():
        if mark := re.match(r"\s*(`{3,}|~{3,})", line):
            fence = "" if fence and line.strip().startswith(fence) else fence or mark[1]
            prose.append("")
            continue
        if fence:
            continue
        blank = not line.strip()
        indented = line.startswith("    ") and not in_list and (after_blank or indented)
        in_list = bool(_ITEM.match(line)) or (in_list and (blank or line.startswith(" ")))
        after_blank = blank
        if line.lstrip().startswith("|"):
            table_words += sum(map(words_of, _sentences(line.replace("|", " "))))
        elif line.startswith("#"):
            prose += ["", line.lstrip("# "), ""]
        elif not indented:
            prose.append(line.removeprefix("> "))
    return Counts(tuple(_of_paragraphs(prose)), table_words)


def count_docstrings(code: str) -> Counts:
    """Count the docstrings of a module, of its classes and functions, and those below constants and fields."""
    sentences: list[str] = []
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                sentences += _of_docstring(inspect.cleandoc(docstring).splitlines())
    return Counts(tuple(sentences))


def _of_docstring(lines: Sequence[str]) -> Iterator[str]:
    """Return the sentences of a docstring: an argument, an error and an item of a list begin a paragraph.

    Rows of tables, whose columns stand two spaces apart or below click's mark for such a paragraph, are left out.
    """
    prose: list[str] = []
    literal_below = -1
    aligned = False
    for line in lines:
        depth = len(line) - len(line.lstrip())
        aligned = line.strip(" ") == "\b" or (aligned and bool(line.strip()))
        literal = literal_below >= 0 and (not line.strip() or depth > literal_below)
        if literal or aligned or re.search(r"\S {2,}\S", line):
            prose.append("")
            continue
        literal_below = depth if line.rstrip().endswith("::") else -1
        if depth and re.match(r"\s*\*{0,2}\w+( \([^)]*\))?: ", line):
            prose.append("")
        prose.append(line)
        if re.fullmatch(r"\s*(Args|Returns|Raises|Yields|Attributes|Example|Examples|Note):", line.rstrip()):
            prose[-1] = ""
    return _of_paragraphs(prose)


def _of_paragraphs(lines: Iterable[str]) -> Iterator[str]:
    paragraph: list[str] = []
    for line in [*lines, ""]:
        item = _ITEM.match(line)
        if item or not line.strip():
            yield from _sentences(" ".join(paragraph))
            paragraph = []
        if line.strip():
            paragraph.append((line[item.end() :] if item else line).strip())


def _sentences(paragraph: str) -> list[str]:
    """Split a paragraph after each full stop, question or exclamation mark outside code and abbreviations."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", paragraph)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r":\w+:(?=`)", "", text)
    text = re.sub(r"(`+)(.+?)\1", lambda code: re.sub(r"[.!?…]", rf"\g<0>{_GOES_ON}", code[0]), text)
    text = re.sub(_ABBREVIATIONS, rf"\g<0>{_GOES_ON}", text)
    ends = [end.end() for end in _END.finditer(text)]
    parts = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    return [part.strip().replace(_GOES_ON, "") for part in parts if words_of(part)]


def words_of(sentence: str) -> int:
    """Count what stands between spaces and has a letter or a digit."""
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


if __name__ == "__main__":
    main()
