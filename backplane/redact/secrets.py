"""Keeps secrets out of everything that is written, shown or passed on.

Text, bytes, JSON and events go in; they come out with `[redacted]` in place of each known secret, in any of its usual
encodings, and with the number of replacements. This protects from carelessness only: an agent that wants to leak a
secret can encode it in a way that is not in the list.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from typing import Any, Final, Literal

import msgspec
from ahocorasick_rs import BytesAhoCorasick, Implementation, MatchKind

from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, AssistantDelta, OutputReported, Reasoning
from backplane.errors import BackplaneError
from backplane.redact.tail import OutputTail

MARK: Final = "[redacted]"
"""Replaces a secret of any length."""

SECRET_CHARS_MIN: Final = 6
"""Minimum length of a secret that is replaced, without the blanks around it; shorter ones occur in ordinary words, and
are quickly guessed."""

_LINE_CHARS_MIN: Final = 16
"""Minimum length of a line of a secret with several lines, for the line to be a secret by itself."""

_PIECE_BYTES: Final = 1 << 18
"""Bytes searched at once, which bounds the list of places: a secret of zeros is found at every byte of zeros."""

_DEPTH_MAX: Final = 200
"""Levels of JSON that are searched; a deeper object or list is replaced. Lines of the protocol have at most 128."""

_PRIVATE: Final = "-----BEGIN "
_SHAPES: Final = {
    "sk-": r"(?=[A-Za-z_-]{0,64}+[0-9])(?=[A-Za-z0-9_-]{0,64}?[A-Za-z0-9]{14})[A-Za-z0-9_-]{20,}",
    **{f"gh{kind}_": r"[A-Za-z0-9]{30,}" for kind in "pousr"},
    "github_pat_": r"[A-Za-z0-9]{14}[A-Za-z0-9_]{8,}",
    "AKIA": r"[A-Z0-9]{16}(?![A-Za-z0-9])",
    "ASIA": r"[A-Z0-9]{16}(?![A-Za-z0-9])",
    "AIza": r"[A-Za-z0-9_-]{35}",
    "xox": r"[a-z]-(?=[A-Za-z0-9-]{0,64}?[A-Za-z0-9]{14})[A-Za-z0-9-]{16,}",
    _PRIVATE: r"[A-Z ]{0,32}PRIVATE KEY-----(?:[A-Za-z0-9+/=\s\\:,]|-(?!-)){64,16384}",
}
"""Beginning of a well-known kind of key → expression for its rest; finds keys whose values are not known.

Only single sets are possessive, because Python before 3.11.5 repeats possessive groups wrongly.
"""

_NOT_IN_A_WORD: Final = r"(?:(?<![A-Za-z0-9])|(?<=\\[bfnrt])|(?<=\\u[0-9A-Fa-f]{4}))"
"""Expression for the place before a key: no word may go on there, as `task-3fa85f64…` does with `sk-`."""

_TOKEN: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
_TOKEN_CONTEXT_BYTES_MAX: Final = 128
"""Bytes of an unfinished word that are kept between deltas, to find a key of `_SHAPES` that is split over two."""

HEAD_BYTES: Final = 8
"""Length of a secret's beginning that is searched for; a shorter beginning counts only at the end of a delta."""

_CUT_TEXT_BYTES_MIN: Final = 32
"""Minimum length of a text whose end may be a secret that was cut; shorter texts are names, which nobody cuts."""

_PIECES: Final[dict[type[Any], str]] = {AssistantDelta: "text", Reasoning: "ext", OutputReported: "ext"}
"""Event type → its member with a piece of a text that later events continue."""

ByteSpan = tuple[int, int]
Kind = Literal["known", "look", "head"]


class Redactor:
    """Finds and replaces the secrets of one run.

    Args:
        secrets: values; those shorter than `SECRET_CHARS_MIN` are ignored.
        shapes: True to find the keys of `_SHAPES` too.
    """

    def __init__(self, secrets: Iterable[str], *, shapes: bool = True) -> None:
        forms = {_encode(form) for secret in secrets for form in _forms(secret)}
        self.forms: Final = tuple(sorted(forms, key=lambda form: (-len(form), form)))
        """Every encoding of the secrets, in UTF-8, longest first. Never print it."""
        self._longest: Final = max(map(len, (*self.forms[:1], *_SHAPES)))
        self._starts: Final = tuple(_SHAPES) if shapes else ()
        self._heads: Final = tuple({form[:HEAD_BYTES] for form in self.forms if len(form) > HEAD_BYTES})

    def _finder(self, kind: MatchKind) -> Callable[..., list[tuple[int, int, int]]]:
        words = [*self.forms, *(start.encode() for start in self._starts), *self._heads]
        # Of the three implementations, this one is built fastest and needs little memory for long words.
        automaton = BytesAhoCorasick(words, matchkind=kind, implementation=Implementation.ContiguousNFA)
        return automaton.find_matches_as_indexes

    @cached_property
    def _first(self) -> Callable[..., list[tuple[int, int, int]]]:
        """Finds words that do not overlap; faster than `_all`, because it compares many bytes at once, in vectors."""
        return self._finder(MatchKind.LeftmostFirst)

    @cached_property
    def _all(self) -> Callable[..., list[tuple[int, int, int]]]:
        return self._finder(MatchKind.Standard)

    def places(self, data: bytes) -> Iterator[tuple[Kind, int, int]]:
        """Yield kind, start and end of each secret, and of each possible beginning of one; they may overlap."""
        forms, size = len(self.forms), len(data)
        looks = forms + len(self._starts)
        done = dict.fromkeys(self._starts, 0)
        for first in range(0, size, _PIECE_BYTES):
            piece = data if size <= _PIECE_BYTES else data[first : first + _PIECE_BYTES + self._longest]
            if not self._first(piece):
                continue
            for which, start, stop in self._all(piece, overlapping=True):
                at = first + start
                if not forms <= which < looks:
                    yield "known" if which < forms else "head", at, first + stop
                elif at >= done[begin := self._starts[which - forms]]:
                    look = _expression(begin).match(data, at)
                    if look is not None:
                        done[begin] = look.end()
                        yield "look", at, look.end()

    def found(self, data: bytes) -> bool:
        """Return whether canonical JSON may contain a secret; then redact its value, so that it stays valid."""
        return next(self.places(data), None) is not None

    def tail(self, data: bytes, heads: Iterable[int]) -> int:
        """Return the first place from which the rest of a text is the beginning of a secret; the text's size if none.

        Args:
            heads: places where secrets may begin, in order.
        """
        size = len(data)
        for at in heads:
            if at > size - self._longest:
                end = data[at:]
                if any(len(form) > len(end) and form.startswith(end) for form in self.forms):
                    return at
        return size

    def _spans(self, data: bytes, *, whole: bool) -> list[ByteSpan]:
        """Return the spans of secrets, joined where they overlap or touch.

        Args:
            whole: True to include the beginning of a secret at the end, as one that was cut.
        """
        places = list(self.places(data))
        spans = [(start, stop) for kind, start, stop in places if kind != "head"]
        if whole and len(data) >= _CUT_TEXT_BYTES_MIN and len(spans) < len(places):
            at = self.tail(data, (start for kind, start, _ in places if kind == "head"))
            spans += [(at, len(data))] if at < len(data) else []
        return _merged(spans)

    def text(self, text: str, *, whole: bool = True) -> tuple[str, int]:
        """Redact a text that is not JSON, or one text in JSON.

        Args:
            whole: True if the text is complete, so that the beginning of a secret at its end is replaced.

        Returns:
            The text and the number of replacements.
        """
        data = _encode(text)
        spans = self._spans(data, whole=whole)
        return (_decode(_masked(data, spans)), len(spans)) if spans else (text, 0)

    def pieces(self, texts: Sequence[str]) -> tuple[list[str], int]:
        """Redact a whole text that came in pieces; return the pieces and the replacements.

        A secret that is cut in several pieces is replaced in the first of them.
        """
        pieces = list(map(_encode, texts))
        data = b"".join(pieces)
        spans = self._spans(data, whole=True)
        if not spans:
            return list(texts), 0
        out: list[str] = []
        start, first = 0, 0
        for piece in pieces:
            stop, at, parts = start + len(piece), start, b""
            while first < len(spans) and spans[first][1] <= start:
                first += 1
            for low, high in spans[first:]:
                if low >= stop:
                    break
                parts += data[at : max(low, at)] + (MARK.encode() if low >= start else b"")
                at = min(high, stop)
            out.append(_decode(parts + data[at:stop]))
            start = stop
        return out, len(spans)

    def data(self, data: bytes) -> tuple[bytes, int]:
        """Redact bytes for a log or standard error, not JSON, which it may break; return them and the replacements."""
        return self.part(data) if not isinstance(data, OutputTail) else self.part(data.before + data, len(data.before))

    def part(self, data: bytes, start: int = 0, stop: int = sys.maxsize) -> tuple[bytes, int]:
        """Return the bytes from `start` to `stop` without secrets, even parts of one, and the number of replacements.

        Redact before the cut, not after: a mark may be shorter than its secret, so that other bytes move in.
        """
        found = self._spans(data, whole=False)
        spans = [(max(at - start, 0), min(end, stop) - start) for at, end in found if at < stop and end > start]
        return _masked(data[start:stop], spans), len(spans)

    def error(self, error: BackplaneError) -> BackplaneError:
        """Remove secrets from an error, whose texts may contain names chosen by others; return the same error."""
        for name in ("message", "hint", "evidence"):
            setattr(error, name, self.json(getattr(error, name))[0])
        return error

    def json(self, value: Json) -> tuple[Json, int]:
        """Redact the texts and member names of a JSON value; a number that contains a secret becomes `MARK`.

        Returns:
            The value and the number of replacements.
        """
        return self._inner(value, 0) if self.found(msgspec.json.encode(value)) else (value, 0)

    def _inner(self, value: Json, depth: int, *, whole: bool = True) -> tuple[Json, int]:
        if isinstance(value, str):
            return self.text(value, whole=whole)
        if isinstance(value, dict | list | tuple) and depth > _DEPTH_MAX:
            return MARK, 1
        if isinstance(value, dict):
            return self._object(value, depth, whole)
        if isinstance(value, list | tuple):
            inner = [self._inner(item, depth + 1, whole=whole) for item in value]
            return [clean for clean, _ in inner], sum(count for _, count in inner)
        hides = type(value) in (int, float) and self._spans(msgspec.json.encode(value), whole=False)
        return (MARK, 1) if hides else (value, 0)

    def _object(self, value: dict[str, Json], depth: int, whole: bool) -> tuple[Json, int]:
        clean: dict[str, Json] = {}
        copies: dict[str, int] = {}
        total = 0
        for name, item in value.items():
            key, count = self.text(name)
            shown = key
            while key in clean:
                # Redaction may make two names equal; both members are kept. `copies` avoids trying a number twice.
                copies[shown] = copies.get(shown, 1) + 1
                key = f"{shown} {copies[shown]}"
            clean[key], more = self._inner(item, depth + 1, whole=whole)
            total += count + more
        return clean, total

    def event(self, event: AgentEvent) -> tuple[AgentEvent, int]:
        """Redact the texts of an event, but not its type and time; return it and the number of replacements."""
        changes: dict[str, Any] = {}
        total = 0
        for name in event.__struct_fields__:
            value = getattr(event, name)
            if name != "ts" and isinstance(value, str | dict | list | tuple):
                # If a text comes in pieces, the rest of a secret is in the next piece.
                clean, count = self._inner(value, 0, whole=_PIECES.get(type(event)) != name)
                if count:
                    changes[name], total = clean, total + count
        return (msgspec.structs.replace(event, **changes), total) if changes else (event, 0)


NO_SECRETS: Final = Redactor(())
"""Redactor for runs without known secrets: it finds only the keys of `_SHAPES`."""


class DeltaRedactor:
    """Redacts one stream of deltas.

    The end of the text is delayed while it could be the beginning of a known secret, until the caller calls `flush`.
    The returned text still counts as a beginning: if the rest of the secret comes later, the rest is redacted.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        sizes = range(1, HEAD_BYTES)
        self._starts = frozenset(form[:size] for form in redactor.forms for size in sizes if size < len(form))
        self._context = b""
        """The end of the text that was returned; a secret may begin in it."""
        self._held = b""
        self._swallowing = False
        """True if the text ends in a key of `_SHAPES` that the next delta may continue."""

    @property
    def holding(self) -> bool:
        """Return whether `flush` would return any text."""
        return bool(self._held)

    def feed(self, text: str) -> tuple[str, int]:
        """Take a delta; return the text that may be shown now, which may be empty, and the number of replacements."""
        delta = _encode(text)
        if self._swallowing:
            delta = delta.lstrip(_TOKEN)
            self._swallowing = not delta
        window, shown = self._context + self._held + delta, len(self._context)
        if not window:
            return "", 0
        places = list(self._redactor.places(window))
        spans = _merged((start, stop) for kind, start, stop in places if kind != "head")
        beginning = self._beginning(window, (start for kind, start, _ in places if kind == "head"))
        end = max(beginning, shown, spans[-1][1] if spans else 0)
        self._swallowing = self._swallowing or any(kind == "look" and stop == len(window) for kind, _, stop in places)
        kept = beginning if self._swallowing else min(beginning, _running_from(window))
        self._context, self._held = window[kept:end], window[end:]
        new = [(max(start, shown) - shown, stop - shown) for start, stop in spans if stop > shown]
        return _decode(_masked(window[shown:end], new)), len(new)

    def flush(self) -> str:
        """Return the delayed text; called when the delay has passed or the stream has ended."""
        held, self._held = self._held, b""
        self._context += held
        return _decode(held)

    def _beginning(self, window: bytes, heads: Iterable[int]) -> int:
        """Return the first place from which the rest of the window is the beginning of a secret; its size if none."""
        size = len(window)
        best = self._redactor.tail(window, heads)
        lengths = range(min(HEAD_BYTES - 1, size) if best == size else 0, 0, -1)
        return next((size - length for length in lengths if window[-length:] in self._starts), best)


def _running_from(window: bytes) -> int:
    """Return the start of the last word, which may be unfinished; the window's size if it does not end in a word."""
    last = window[-_TOKEN_CONTEXT_BYTES_MAX:]
    return len(window) - len(last) + len(last.rstrip(_TOKEN))


def _masked(data: bytes, spans: Iterable[ByteSpan]) -> bytes:
    parts: list[bytes] = []
    at = 0
    for start, stop in spans:
        parts.append(data[at:start])
        at = stop
    parts.append(data[at:])
    return MARK.encode().join(parts)


def _merged(spans: Iterable[ByteSpan]) -> list[ByteSpan]:
    merged: list[ByteSpan] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


@cache  # Compiled on first use, because most runs contain no beginning of a key.
def _expression(start: str) -> re.Pattern[bytes]:
    before = "" if start == _PRIVATE else _NOT_IN_A_WORD
    return re.compile((before + start + _SHAPES[start]).encode())


def _forms(secret: str) -> Iterator[str]:
    """Yield every encoding of a secret that ordinary programs write."""
    for value in dict.fromkeys((secret, secret.strip(), *_telling_lines(secret))):
        if len(value.strip()) < SECRET_CHARS_MIN:
            continue
        yield value
        for escape in _JSON_ESCAPES:
            yield escape(value)
            # A tool's arguments often travel as JSON inside JSON.
            yield _json_escaped(escape(value))
        for form in _other_forms(value):
            yield form
            for escape in _JSON_ESCAPES:
                yield escape(form)
        raw = _encode(value)
        yield from _url_forms(raw)
        yield from _base64_forms(raw)
        yield raw.hex()
        yield raw.hex().upper()


def _other_forms(value: str) -> Iterator[str]:
    """Yield `value` with the escapes that only some writers of JSON make, and as HTML and shells quote it."""
    for escape in _JSON_ESCAPES:
        plain = escape(value)
        yield plain.replace("/", "\\/")
        for pattern in ("\\u{:04x}", "\\u{:04X}"):
            yield "".join(pattern.format(ord(one)) if one in "<>&" else one for one in plain)
    yield re.sub(r"\\u[0-9a-f]{4}", lambda found: "\\u" + found[0][2:].upper(), _json_escaped_ascii(value))
    safe = value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for double, single in _HTML_QUOTES:
        yield safe.replace('"', double).replace("'", single)
    yield value.replace("'", "'\\''")
    yield value.replace("'", "'\"'\"'")


_HTML_QUOTES: Final = (('"', "'"), ("&quot;", "'"), ("&quot;", "&#39;"), ("&quot;", "&#x27;"), ("&#34;", "&#39;"))
"""HTML escapes of the double and the single quote."""


def _telling_lines(secret: str) -> list[str]:
    lines = secret.splitlines()
    return [line for line in lines if len(line) >= _LINE_CHARS_MIN and "-----" not in line] if len(lines) > 1 else []


def _json_escaped(text: str) -> str:
    return msgspec.json.encode(text).decode()[1:-1] if _is_unicode(text) else _json_escaped_ascii(text)


def _json_escaped_ascii(text: str) -> str:
    return json.dumps(text)[1:-1]


_JSON_ESCAPES: Final[tuple[Callable[[str], str], ...]] = (_json_escaped, _json_escaped_ascii)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


_UNRESERVED: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
_ALSO_PLAIN: Final = (b"", b"/", b"!'()*", b"!'()*;,/?:@&=+$#")
"""Further bytes that URL encoders do not escape: none, those of Python, and of `encodeURIComponent` and `encodeURI`."""


def _url_forms(raw: bytes) -> Iterator[str]:
    for also in _ALSO_PLAIN:
        plain = _UNRESERVED + also
        for pattern in ("%{:02X}", "%{:02x}"):
            form = "".join(chr(byte) if byte in plain else pattern.format(byte) for byte in raw)
            yield form
            yield form.replace("%20", "+")


def _base64_forms(raw: bytes) -> Iterator[str]:
    """Yield the Base64 characters that depend on the secret alone, for each of its three possible offsets."""
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + raw)
        form = encoded[-(-8 * before // 6) : 8 * (before + len(raw)) // 6].decode()
        yield form
        yield form.replace("+", "-").replace("/", "_")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
