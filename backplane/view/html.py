"""HTML of foreign texts: a value of the type `Html` was escaped here, and a type checker refuses any other. Pure."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Final, NewType

from backplane.view.columns import Line
from backplane.view.markdown import Markdown
from backplane.view.text import printable

Html = NewType("Html", str)

_PLAIN: Final = re.compile(r"[\n\t !#-%(-;=?-~]*")
"""Text that needs no escaping, as most texts do not; the way below takes five times as long."""


def text(foreign: object) -> Html:
    """Escape a text; characters that a browser would act on or not show are written out."""
    whole = str(foreign)
    if _PLAIN.fullmatch(whole):
        return Html(whole)
    return Html(html.escape(printable(whole), quote=True))


def said(words: str) -> Html:
    """Draw the Markdown of an agent's message; a link in it stays text."""
    drawn = Markdown()
    return join(*(line(drawn.line(one)) for one in words.split("\n")), between="\n")


def line(spans: Line) -> Html:
    """Draw a line of a terminal: elements for some colours, none for the others."""
    names = {"bold": "b", "cyan": "code", "dim": "i"}
    return join(*(tag(names[one.colour], text(one.text)) if one.colour in names else text(one.text) for one in spans))


def join(*parts: Html, between: str = "") -> Html:
    """Join several pieces."""
    return Html(between.join(parts))


def tag(element: str, /, *inner: Html, **attributes: str | None) -> Html:
    """Return an element; `class_` is its class, None leaves an attribute out, and an empty one has no value."""
    words = [element]
    for key, value in attributes.items():
        if value is not None:
            spelt = key.rstrip("_").replace("_", "-")
            words.append(f'{spelt}="{text(value)}"' if value else spelt)
    return Html(f"<{' '.join(words)}>{''.join(inner)}</{element}>")


def table(head: Iterable[str], rows: Iterable[Iterable[Html]], label: str) -> Html:
    """Return a table with its caption."""
    top = tag("tr", *(tag("th", text(name), scope="col") for name in head))
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    return tag("div", tag("table", tag("caption", text(label)), tag("thead", top), tag("tbody", *body)), class_="wide")
