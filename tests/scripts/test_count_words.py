"""``scripts/docs/count_words.py``: words and sentences, in small texts that were counted by hand."""

import sys

import pytest

from tests.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts/docs"))

import count_words

PAGE = """# Two words

One sentence here. Another
one goes on over a line.

| a | table row |
|---|---|
| of six | more words `now` |

    indented code is not prose

```bash
neither is this.
```

<!-- A comment
of two lines. -->
<!-- [[[cog shell("flashpoint runs") ]]] -->
printed. By a command.
<!-- [[[end]]] -->

1. An item, of a list,
   that goes on.
   ```python
   in_an_item = "fenced"
   ```
2. See [what a *link* says](docs/page.md#a-b), and ![a picture](x.png) `code. With a stop` = 1.
"""


def test_a_document_is_counted_as_by_hand() -> None:
    counts = count_words.count_markdown(PAGE)
    assert counts.sentences == (
        "Two words",
        "One sentence here.",
        "Another one goes on over a line.",
        "An item, of a list, that goes on.",
        "See what a *link* says, and  `code. With a stop` = 1.",
    )
    assert counts.words == 2 + 3 + 7 + 8 + 11
    assert counts.table_words == 3 + 5


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("δ is small. it grows.", 2),
        ("Why? Because! (So it is.) **It is.** End", 5),
        ("Golden et al. measured 1.5, i.e. more, in `a.b` of v2.13.", 1),
        ("It rounds O. With 3 bits it holds.", 2),
        ("A list:\n- one\n- two. three.\n\n> Said.", 5),
        ("", 0),
        ("— → |", 0),
    ],
)
def test_what_ends_a_sentence(text: str, sentences: int) -> None:
    assert len(count_words.count_markdown(text).sentences) == sentences


def test_a_sentence_of_more_than_thirty_words_is_long() -> None:
    thirty = " ".join(30 * ["word"]) + "."
    one_more = f"One {thirty}"
    assert count_words.count_markdown(f"{thirty} {one_more}").long == [one_more]


def test_all_docstrings_are_counted_and_no_other_text() -> None:
    code = '''
"""Of the module: see :func:`f`."""

NUMBER = 1  # a comment of a few words
"""Below a constant."""


class Some:
    """Of a class, with code::

        print("which. Is not prose")

    And more.
    """

    def method(self, first, rest):
        """Of a method.

        Args:
            first: one sentence that
                goes on.
            rest: another, e.g. this.

        Returns:
            Nothing.

        \\b
        one  of a table
        two  of a table
        """
        return "a string of no docstring"
'''
    assert sorted(count_words.count_docstrings(code).sentences) == sorted(
        [
            "Of the module: see `f`.",
            "Below a constant.",
            "Of a class, with code::",
            "And more.",
            "Of a method.",
            "first: one sentence that goes on.",
            "rest: another, e.g. this.",
            "Nothing.",
        ]
    )
