"""Text of the page. Its names and values come from records, which may be somebody else's."""

from __future__ import annotations

from html import escape

from flashpoint.errors import escaped


def html_text(value: object) -> str:
    """Return a value as text, between tags or in an attribute: nothing in it is markup, or turns the direction of what
    follows."""
    return escape(escaped(str(value)))
