"""Keeps secrets out of everything that is written, shown or passed on.

Text, bytes, JSON and events go in; the same come out with `[redacted]` in the place of every
known secret, in any of its usual encodings, and with the number of places. This guards against
carelessness; an agent that wants to smuggle can spell a secret in a way nobody lists.
"""

from __future__ import annotations

import base64
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import methodcaller
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, AssistantDelta, OutputReported, Reasoning
from backplane.errors import BackplaneError
from backplane.redact.tail import OutputTail

MARK: Final = "[redacted]"
"""Stands for a secret of any length."""

SECRET_CHARS_MIN: Final = 6
"""Shorter secrets are not replaced: they would be found in ordinary words, and hide nothing when guessed. Blanks
around a value do not count."""

_LINE_CHARS_MIN: Final = 16
"""A line of a secret of several lines is a secret too from this length on; shorter ones are not telling."""

_CUT_CHARS_MIN: Final = 8
"""So much of a secret where a text begins or ends is taken for the rest of one that was cut."""

_CUT_TEXT_CHARS_MIN: Final = 32
"""Shorter texts are names and short words, and nobody cuts there."""

_CUT_TEXTS_MAX: Final = 1000
"""More texts at once are worth a table of what stands in secrets."""

_RUN_BYTES: Final = 14
"""Letters and digits in a row that make a line worth a closer look. Longer than the words, field names, times
and groups of a UUID that every line has; shorter than what is random in a key."""

_PIECE_BYTES: Final = 1 << 20
"""As much is looked through for runs at once: a look takes twice the memory of what it looks at."""

_DEPTH_MAX: Final = 200
"""Deeper JSON is replaced whole; the reader of lines takes 128."""

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
"""How keys that are known by their looks start and go on, as a second net under the known values; all but two hold a
run of `_RUN_BYTES`. Looking for the start first is many times faster than an expression for all. Possessive are single
sets alone: before 3.11.5 groups were not repeated as they should be."""

_BROKEN: Final = ("AIza", _PRIVATE)
"""May be broken into shorter runs: by hyphens, or as pairs of digits."""

_NOT_IN_A_WORD: Final = r"(?:(?<![A-Za-z0-9]@)|(?<=\\[bfnrt]@)|(?<=\\u[0-9A-Fa-f]{4}@))"
"""`task-3fa85f64…` has the same three letters. It looks back over the start `@`, which comes first to be found fast."""

_SPAN: Final = methodcaller("span")
_SHAPE_CHARS_MIN: Final = 20
"""The shortest key that is known by its looks."""

_NO_TEXT: Final = "\ud800"
"""Stands in no text that JSON can hold."""
_NUMBER: Final = "0123456789.e+-"
_NUMBERS: Final = int, float
_LISTS: Final = list, tuple
_CONTAINERS: Final = dict, list, tuple

_TOKEN: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
_TOKEN_CONTEXT_CHARS_MAX: Final = 128
"""How much of a running word is remembered between deltas, so that a key cut in two is known by its looks."""

_RUNS: Final = bytes(0x61 if chr(byte).isalnum() and byte < 128 else 0x20 for byte in range(256))
_RUN: Final = "a" * _RUN_BYTES
_WORDS: Final = bytes(0x61 if chr(byte) in _TOKEN else 0x20 for byte in range(256))
_WORD: Final = "a" * _SHAPE_CHARS_MIN
_IN_QUOTES: Final = bytes(0x20 if byte == ord('"') else 0x61 for byte in range(256))
_LONG_TEXT: Final = b"a" * _CUT_TEXT_CHARS_MIN
_PLAIN_ESCAPE: Final = re.compile(rb"\\(?:u00([2-7][0-9A-Fa-f])|/)")
"""Escapes that JSON does not ask for; some writers have them for HTML's sake."""

Span = tuple[int, int]


class Redactor:
    """The secrets of one run, ready to be looked for.

    Args:
        secrets: values; those shorter than `SECRET_CHARS_MIN` are not looked for.
        shapes: look for keys that are known by their looks too.
    """

    def __init__(self, secrets: Iterable[str], *, shapes: bool = True) -> None:
        forms = {form for secret in secrets for form in _forms(secret)}
        self._texts: Final = tuple(sorted(forms, key=lambda form: (-len(form), form)))
        self._latin: Final = tuple(_encode(form).decode("latin-1") for form in self._texts)
        """The forms' bytes, each as one character: looking into a text costs a tenth of looking into bytes."""
        self._direct: Final = tuple(form for form in self._latin if _RUN not in _runs(form.encode("latin-1")))
        """Forms that a look for a long run would miss."""
        self._short: Final = tuple(
            form for form in self._latin if _WORD not in form.encode("latin-1").translate(_WORDS).decode("latin-1")
        )
        """Forms that a look for a long word would miss."""
        self._numeric: Final = tuple(form for form in self._texts if not form.strip(_NUMBER))
        """Forms that a number may hold."""
        self._shortest: Final = min([len(form) for form in forms] + [_SHAPE_CHARS_MIN] * shapes, default=sys.maxsize)
        self._shapes: Final = shapes
        self._whole: Final = "\0".join(form for form in self._texts if len(form) > _CUT_CHARS_MIN)
        self._edges: Final = tuple(
            {edge for form in self._latin if len(form) > _CUT_CHARS_MIN for edge in _edges(form)}
        )
        """What stands in every line with a text that begins or ends with a part of a secret."""

    def found(self, data: bytes) -> bool:
        """Whether a line holds a secret; the quick look before lines are parsed, for one or for a whole read of them.

        For JSON that will be parsed: when this says yes, redact the parsed value with `json` or
        `event`, so that a number stays a number and a name of the contract stays a name.
        """
        text = data.decode("latin-1")
        if self._look(data, text):
            return True
        if "\\" not in text or ("\\u00" not in text and "\\/" not in text):
            return False
        plain = _PLAIN_ESCAPE.sub(_unescaped, data)
        return self._look(plain, plain.decode("latin-1"))

    def may_be_in(self, line: bytes) -> bool:
        """Whether what is read from a line of JSON may hold a secret: found in it, in escapes or in a number."""
        if b"\\" in line or self._numeric or self.found(line):
            return True
        return bool(self._edges) and self._may_be_cut(line, line.decode("latin-1"))

    def cut_in(self, texts: Sequence[str]) -> bool:
        """Whether one of these texts begins with the end of a secret, or ends with the beginning of one."""
        return bool(self._whole) and any(self._cuts(text, self._whole) for text in texts)

    def found_in(self, texts: list[str]) -> bool:
        """Whether one of these texts, which come out of JSON, holds a secret.

        One look at them all for words as long as the shortest key; a closer one only at texts that have one.
        """
        data = _encode("\0".join(texts))
        text = data.decode("latin-1")
        if (self._shapes and "-----BEGIN" in text) or _any_in(self._short, text):
            return any(self._confirmed(piece) for piece in text.split("\0"))
        words = data.translate(_WORDS).decode("latin-1")
        at = words.find(_WORD)
        while at != -1:
            end = text.find("\0", at)
            end = len(text) if end == -1 else end
            if self._confirmed(text[text.rfind("\0", 0, at) + 1 : end]):
                return True
            at = words.find(_WORD, end)
        return False

    def _look(self, data: bytes, text: str) -> bool:
        return self._unrun_found(text) or any(self._confirmed(line) for line in _lines_with_runs(data, text))

    def _may_hold(self, data: bytes, text: str) -> bool:
        """The quick look at what is looked through whole: at bytes, and at them read as Latin-1."""
        return _RUN in _runs(data) or self._unrun_found(text)

    def _may_be_cut(self, data: bytes, text: str) -> bool:
        """Whether JSON may have a text that begins or ends with a part of a secret: a long one, and such a part."""
        if '"' not in text or ("\\" not in text and _LONG_TEXT not in data.translate(_IN_QUOTES)):
            return False
        return _any_in(self._edges, text)

    def _unrun_found(self, text: str) -> bool:
        """Look for what has no long run of letters and digits; the text is bytes read as Latin-1."""
        if self._shapes and any(start in text and _expression(start).search(text) is not None for start in _BROKEN):
            return True
        return _any_in(self._direct, text)

    def _confirmed(self, line: str) -> bool:
        return _any_in(self._latin, line) or (self._shapes and next(_shapes_in(line), None) is not None)

    def text(self, text: str, *, whole: bool = True) -> tuple[str, int]:
        """Redact a text that is not JSON, or a text out of JSON.

        Args:
            whole: no more of it comes, so what is left of a secret that was cut at its beginning or end is redacted.

        Returns:
            The text and how many places were replaced.
        """
        spans = self.spans(text)
        if whole and self._whole and (cuts := self._cuts(text, self._whole)):
            spans = _merged(sorted(spans + cuts))
        return (_masked(text, spans), len(spans)) if spans else (text, 0)

    def data(self, data: bytes) -> tuple[bytes, int]:
        """Redact bytes of any kind, for a log or for standard error; not for JSON that will be parsed."""
        return self.part(data) if not isinstance(data, OutputTail) else self.part(data.before + data, len(data.before))

    def part(self, data: bytes, start: int = 0, stop: int = sys.maxsize) -> tuple[bytes, int]:
        """The same for a part of the bytes: nothing is left of a secret that is cut in two where it begins or ends.

        Cutting after redaction would not do: a mark may be shorter than its secret, and bring in what was behind it.
        """
        # Every byte is one character here and back, so invalid UTF-8 stays as it is.
        text = data.decode("latin-1")
        if not self._may_hold(data, text):
            return data[start:stop], 0
        found = _found_spans(text, self._latin, self._shapes)
        spans = [(max(at - start, 0), min(end, stop) - start) for at, end in found if at < stop and end > start]
        return (_masked(text[start:stop], spans).encode("latin-1"), len(spans)) if spans else (data[start:stop], 0)

    def error(self, error: BackplaneError) -> BackplaneError:
        """The error itself without secrets: what could not be read, made or applied is named as others named it."""
        for name in ("message", "hint", "evidence"):
            setattr(error, name, self.json(getattr(error, name))[0])
        return error

    def json(self, value: Json, *, whole: bool = True) -> tuple[Json, int]:
        """Redact every text of a JSON value, names of members included; a number that holds a secret becomes a text.

        Args:
            whole: as for `text`.
        """
        data = msgspec.json.encode(value)
        text = data.decode("latin-1")
        whole = whole and bool(self._edges)
        if not (self._may_hold(data, text) or (whole and self._may_be_cut(data, text))):
            return value, 0
        texts: list[str] = []
        others: list[Json] = []
        deep = _gather(value, texts, others, 0)
        clean, count = self._texts_redacted(texts)
        count += self._cuts_redacted(texts, clean) if whole else 0
        numeric = self._numeric if self._numeric and _any_in(self._numeric, repr(others)) else ()
        if not (count or deep or numeric):
            return value, 0
        walk = _Walk(clean, numeric)
        return walk.value(value, 0), count + walk.count

    def _texts_redacted(self, texts: list[str]) -> tuple[list[str], int]:
        """Redact texts as one, with between them what none of them holds: a look at each takes ten times as long."""
        between = "\0"
        whole = between.join(texts)
        if whole.count(between) >= len(texts):
            between = _NO_TEXT
            whole = between.join(texts)
        spans = _found_spans(whole, [form for form in self._texts if between not in form], self._shapes)
        return _masked(whole, spans).split(between), len(spans)

    def _cuts_redacted(self, texts: list[str], clean: list[str]) -> int:
        """Redact anew those that begin or end with a part of a secret, and say how many more places that are."""
        if max(map(len, texts), default=0) < _CUT_TEXT_CHARS_MIN:
            return 0
        every, size = self._whole, _CUT_CHARS_MIN
        parts: str | frozenset[str] = every
        if len(texts) > _CUT_TEXTS_MAX:
            parts = frozenset(every[at : at + size] for at in range(len(every) - size + 1))
        more = 0
        for at, text in enumerate(texts):
            if len(text) >= _CUT_TEXT_CHARS_MIN and self._cuts(text, parts):
                clean[at], count = self.text(text)
                more += count - len(self.spans(text))
        return more

    def _cuts(self, text: str, parts: str | frozenset[str]) -> list[Span]:
        """Where a text begins with the end of a secret, or ends with the beginning of one; `parts` has every part."""
        size = len(text)
        if size < _CUT_TEXT_CHARS_MIN:
            return []
        spans: list[Span] = []
        first, last = text[:_CUT_CHARS_MIN], text[-_CUT_CHARS_MIN:]
        if first in parts and (stop := max(_end_of(form, text) for form in self._texts)):
            spans.append((0, stop))
        if last in parts and (length := max(_beginning_of(form, text) for form in self._texts)):
            spans.append((size - length, size))
        return _merged(spans)

    def event(self, event: AgentEvent) -> tuple[AgentEvent, int]:
        """Redact what an event says; its type, its time and its numbers are the contract's and stay."""
        changes: dict[str, Any] = {}
        total = 0
        # Where a text comes in pieces, the rest of a secret is in the next one.
        pieces = _PIECES.get(type(event))
        for name in event.__struct_fields__:
            value = getattr(event, name)
            if name == "ts" or value is None or value is msgspec.UNSET or isinstance(value, int):
                continue
            redact: Callable[..., tuple[Any, int]] = self.text if isinstance(value, str) else self.json
            clean, count = redact(value, whole=name != pieces)
            if count:
                changes[name], total = clean, total + count
        return (msgspec.structs.replace(event, **changes), total) if changes else (event, 0)

    def spans(self, text: str) -> list[Span]:
        """Where secrets stand in a text; those that overlap or touch are one."""
        if len(text) < self._shortest:
            return []
        if not _has_run(text) and not self._unrun_found(_latin(text)):
            return []
        return _found_spans(text, self._texts, self._shapes)

    def ends_in_shape(self, text: str) -> bool:
        """Whether the text ends in a key known by its looks, so that more of the key may follow."""
        return self._shapes and any(stop == len(text) for _, stop in _shapes_in(text))

    @property
    def forms(self) -> tuple[str, ...]:
        """Every spelling that is looked for, longest first. Secret: never print it."""
        return self._texts


NO_SECRETS: Final = Redactor(())
"""Of runs without secrets of their own: it looks for what is known by its looks."""


class DeltaRedactor:
    """Redacts a text that comes in pieces, for one stream of deltas.

    A tail is held back only while it could be the beginning of a known secret. For how long is
    the caller's to say: `flush` lets it go. What was let go still counts as the beginning, and
    the rest of the secret is redacted whenever it comes.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._starts = frozenset(
            form[:size] for form in redactor.forms for size in range(1, min(len(form), _START_CHARS))
        )
        self._first = frozenset(form[0] for form in redactor.forms)
        self._long = tuple(form for form in redactor.forms if len(form) > _START_CHARS)
        self._heads = frozenset(form[:_START_CHARS] for form in self._long)
        self._context = ""
        """Already out (shown or masked), and still the beginning of what may come."""
        self._held = ""
        self._swallowing = False
        """The last thing was a key known by its looks, and it may not be over."""

    @property
    def holding(self) -> bool:
        """Whether `flush` would give something back."""
        return bool(self._held)

    def feed(self, delta: str) -> tuple[str, int]:
        """Take a delta; give what may be shown now (perhaps nothing) and how many places were replaced."""
        if self._swallowing:
            delta = delta.lstrip(_TOKEN)
            self._swallowing = not delta
        window, shown = self._context + self._held + delta, len(self._context)
        if not window:
            return "", 0
        spans = self._redactor.spans(window)
        beginning = self._beginning(window)
        end = max(beginning, shown, spans[-1][1] if spans else 0)
        self._swallowing = self._swallowing or (bool(spans) and self._redactor.ends_in_shape(window))
        kept = beginning if self._swallowing else min(beginning, _running_from(window))
        self._context, self._held = window[kept:end], window[end:]
        new = [(max(start, shown) - shown, stop - shown) for start, stop in spans if stop > shown]
        return _masked(window[shown:end], new), len(new)

    def flush(self) -> str:
        """Give what was held back: the bound has passed, or the stream is over."""
        held, self._held = self._held, ""
        self._context += held
        return held

    def _beginning(self, window: str) -> int:
        """Where the longest tail starts that is the beginning of a secret; the window's length if there is none."""
        size = best = len(window)
        likely = size >= _START_CHARS and any(head in window for head in self._heads)
        for form in self._long if likely else ():
            head = form[:_START_CHARS]
            at = window.find(head, max(0, size - len(form) + 1))
            while at != -1 and at < best:
                if form.startswith(window[at:]):
                    best = at
                at = window.find(head, at + 1)
        if best < size or self._first.isdisjoint(window[1 - _START_CHARS :]):
            return best
        lengths = range(min(_START_CHARS - 1, size), 0, -1)
        return next((size - length for length in lengths if window[-length:] in self._starts), size)


_START_CHARS: Final = 8
"""Shorter beginnings of a secret are looked up, longer ones are searched for."""


def _running_from(window: str) -> int:
    """Where the word that may go on starts."""
    last = window[-_TOKEN_CONTEXT_CHARS_MAX:]
    return len(window) - len(last) + len(last.rstrip(_TOKEN))


_PIECES: Final[dict[type[Any], str]] = {AssistantDelta: "text", Reasoning: "ext", OutputReported: "ext"}
"""Event type → its member that has a piece of a running text."""


def _edges(form: str) -> tuple[str, str]:
    return form[:_CUT_CHARS_MIN], form[-_CUT_CHARS_MIN:]


def _beginning_of(form: str, text: str) -> int:
    """How much of the beginning of a form a text ends with; 0 for less than counts, and for the whole."""
    last = text[-_CUT_CHARS_MIN:]
    at = form.rfind(last, 0, -1)
    while at != -1:
        length = at + _CUT_CHARS_MIN
        if text.endswith(form[:length]):
            return length
        at = form.rfind(last, 0, length - 1)
    return 0


def _end_of(form: str, text: str) -> int:
    """How much of the end of a form a text begins with."""
    first = text[:_CUT_CHARS_MIN]
    at = form.find(first, 1)
    while at != -1:
        if text.startswith(form[at:]):
            return len(form) - at
        at = form.find(first, at + 1)
    return 0


def _any_in(forms: Iterable[str], text: str) -> bool:
    return any(form in text for form in forms)


class _Walk:
    """A way through a JSON value in the order of `_gather`: its texts are replaced, and its numbers looked at.

    Args:
        texts: what the texts become.
        numeric: what no number may hold; empty when none does.
    """

    def __init__(self, texts: list[str], numeric: tuple[str, ...]) -> None:
        self.count = 0
        """Values that became a mark."""
        self._texts = iter(texts)
        self._numeric = numeric
        self._kept = frozenset({bool, type(None)} if numeric else {bool, type(None), int, float})
        """Types of values that hold nothing."""

    def value(self, value: Json, depth: int) -> Json:
        if isinstance(value, str):
            return next(self._texts)
        if depth > _DEPTH_MAX:
            self.count += 1
            return MARK
        if isinstance(value, dict):
            return self._object(value, depth)
        if isinstance(value, _LISTS):
            kept, texts = self._kept if depth < _DEPTH_MAX else (), self._texts
            return [
                item  # Here as well as below: a call for each takes three times as long.
                if (kind := type(item)) in kept
                else next(texts)
                if kind is str
                else self.value(item, depth + 1)
                for item in value
            ]
        if isinstance(value, _NUMBERS) and not isinstance(value, bool) and _any_in(self._numeric, repr(value)):
            self.count += 1
            return MARK
        return value

    def _object(self, value: dict[str, Json], depth: int) -> Json:
        kept, texts = self._kept if depth < _DEPTH_MAX else (), self._texts
        if all(type(item) in kept for item in value.values()):
            names = list(islice(texts, len(value)))
            clean = dict(zip(names, value.values(), strict=True))
            if len(clean) == len(value):
                return clean
            texts = iter(names)
        clean = {}
        copies: dict[str, int] = {}
        for item in value.values():
            key = shown = next(texts)
            while key in clean:
                # Two names may have become one; both members are kept. Every number is tried once for all of them.
                copies[shown] = copies.get(shown, 1) + 1
                key = f"{shown} {copies[shown]}"
            clean[key] = item if type(item) in kept else self.value(item, depth + 1)
        return clean


def _gather(value: Json, texts: list[str], others: list[Json], depth: int) -> bool:
    """Put every text of a JSON value on a list, names of members before their values, and on another what is neither
    text nor list nor object; say whether it is too deep.
    """
    if isinstance(value, str):
        texts.append(value)
        return False
    if depth > _DEPTH_MAX:
        return True
    deep = False
    if isinstance(value, dict):
        for name, item in value.items():
            texts.append(name)
            if type(item) is str:  # Here as well: a call for each takes three times as long.
                texts.append(item)
            elif depth == _DEPTH_MAX or isinstance(item, _CONTAINERS):
                deep = _gather(item, texts, others, depth + 1) or deep
            else:
                others.append(item)
    elif isinstance(value, _LISTS):
        for item in value:
            if type(item) is str:
                texts.append(item)
            elif depth == _DEPTH_MAX or isinstance(item, _CONTAINERS):
                deep = _gather(item, texts, others, depth + 1) or deep
            else:
                others.append(item)
    else:
        others.append(value)
    return deep


def _masked(text: str, spans: Iterable[Span]) -> str:
    parts: list[str] = []
    at = 0
    for start, stop in spans:
        parts.append(text[at:start])
        at = stop
    parts.append(text[at:])
    return MARK.join(parts)


def _found_spans(text: str, forms: Iterable[str], shapes: bool) -> list[Span]:
    """Where secrets stand in a text; those that overlap or touch are one."""
    spans = [span for form in forms if form in text for span in _places(text, form)]
    if shapes:
        spans += _shapes_in(text)
    spans.sort()
    done = -1
    for start, stop in spans:
        if start <= done:
            return _merged(spans)
        done = stop
    return spans


def _places(text: str, form: str) -> Iterator[Span]:
    size = len(form)
    overlaps = any(form.startswith(form[shift:]) for shift in range(1, size))
    at = text.find(form)
    while at != -1:
        stop = at + size
        # A secret of zeros in a text of zeros stands everywhere: the last place that still overlaps is enough.
        while overlaps and (last := text.rfind(form, stop - size + 1, stop + size)) != -1:
            stop = last + size
        yield at, stop
        at = text.find(form, stop)


def _merged(ordered: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, stop in ordered:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _shapes_in(text: str) -> Iterator[Span]:
    starts = (start for start in _SHAPES if start in text)
    return chain.from_iterable(map(_SPAN, _expression(start).finditer(text)) for start in starts)


@functools.cache  # As most runs never look so close.
def _expression(start: str) -> re.Pattern[str]:
    rest = _SHAPES[start]
    return re.compile(start + rest if start == _PRIVATE else start + _NOT_IN_A_WORD.replace("@", start) + rest)


def _unescaped(escape: re.Match[bytes]) -> bytes:
    character = bytes([int(escape[1], 16)]) if escape[1] else b"/"
    return b"\\" + character if character in b'"\\' else character


def _latin(text: str) -> str:
    """The text's bytes, each as one character."""
    return text if text.isascii() else _encode(text).decode("latin-1")


def _runs(data: bytes) -> str:
    return data.translate(_RUNS).decode("latin-1")


def _lines_with_runs(data: bytes, text: str) -> Iterator[str]:
    """The lines that need a closer look. One pass over a whole read costs a fifth of one a line."""
    done = 0
    for start in range(0, len(data), _PIECE_BYTES):
        runs = _runs(data[start : start + _PIECE_BYTES + _RUN_BYTES - 1])
        at = runs.find(_RUN, max(0, done - start))
        while at != -1:
            begin, stop = text.rfind("\n", 0, start + at) + 1, text.find("\n", start + at)
            done = len(text) if stop == -1 else stop
            yield text[begin:done]
            at = runs.find(_RUN, done - start)


def _has_run(text: str) -> bool:
    if len(text) <= _PIECE_BYTES:
        return _RUN in _runs(_encode(text))
    pieces = range(0, len(text), _PIECE_BYTES)
    return any(_RUN in _runs(_encode(text[start : start + _PIECE_BYTES + _RUN_BYTES - 1])) for start in pieces)


def _forms(secret: str) -> Iterator[str]:
    """Every spelling of a secret that ordinary programs write."""
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
    """What JSON does not ask for and some writers do, and quoting for HTML and for a shell; each differs from `value`
    only where it has such characters.
    """
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
"""How writers of HTML have a double and a single quote."""


def _telling_lines(secret: str) -> list[str]:
    lines = secret.splitlines()
    return [line for line in lines if len(line) >= _LINE_CHARS_MIN and "-----" not in line] if len(lines) > 1 else []


def _json_escaped(text: str) -> str:
    return msgspec.json.encode(text).decode()[1:-1] if _is_unicode(text) else _json_escaped_ascii(text)


def _json_escaped_ascii(text: str) -> str:
    import json

    return json.dumps(text)[1:-1]


_JSON_ESCAPES: Final[tuple[Callable[[str], str], ...]] = (_json_escaped, _json_escaped_ascii)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


_UNRESERVED: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
_ALSO_PLAIN: Final = (b"", b"/", b"!'()*", b"!'()*;,/?:@&=+$#")
"""What different encoders leave as it is: none, Python's, the component and the whole-URL encoder of browsers."""


def _url_forms(raw: bytes) -> Iterator[str]:
    for also in _ALSO_PLAIN:
        plain = _UNRESERVED + also
        for pattern in ("%{:02X}", "%{:02x}"):
            form = "".join(chr(byte) if byte in plain else pattern.format(byte) for byte in raw)
            yield form
            yield form.replace("%20", "+")


def _base64_forms(raw: bytes) -> Iterator[str]:
    """The letters that a secret alone decides, wherever it stands in what was encoded."""
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + raw)
        form = encoded[-(-8 * before // 6) : 8 * (before + len(raw)) // 6].decode()
        yield form
        yield form.replace("+", "-").replace("/", "_")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
