"""Render a turn's frames as the bytes of a body, with the faults that concern bytes.

A frame is one event of a stream with a label by which a fault can name it. Nothing is sent here.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NoReturn

from backplane.contract.canonical import Json
from backplane.testing.script import Call, Fault

COMMENT: Final = ": keep-alive\n\n"


class Frame(NamedTuple):
    """One event of a stream."""

    label: str
    data: Any
    """A JSON value; a string goes out as it is."""
    event: str | None = None


class RenderRequest(NamedTuple):
    """The facts of a request that a renderer needs."""

    model: str
    number: int
    wants_usage: bool = True
    """True if the request asks for a stream's usage, which is optional in some formats."""


def cut_text(text: str, pieces: int) -> list[str]:
    """Cut a text into at most so many pieces of nearly the same length; an empty one into none."""
    count = max(1, min(pieces, len(text)))
    edges = [len(text) * place // count for place in range(count + 1)]
    return [text[start:end] for start, end in itertools.pairwise(edges) if end > start]


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def arguments(call: Call) -> str:
    """Return a call's arguments as they stand on the wire."""
    return call.input if isinstance(call.input, str) else json_text(call.input)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def arguments_value(text: str) -> Json:
    """Return the JSON value of arguments, for formats that have them as a value; broken JSON stays a string."""
    try:
        value: Json = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return text
    return value


def is_one_of(label: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(label, pattern) for pattern in patterns)


def with_faults(
    frames: Sequence[Frame], fault: Fault, terminal: Sequence[str], done: Sequence[str], failed: Frame | None
) -> list[Frame]:
    """Leave out, repeat and add frames as the fault says.

    Args:
        terminal: labels of the frames that say how the answer ended.
        done: labels of the closing frames that say nothing new.
        failed: what comes instead of the end when the answer fails half-way.
    """
    groups = {"END": terminal, "CLOSING": done}
    drop = [label for name in fault.drop for label in groups.get(name, (name,))]
    ends = next((i for i, frame in enumerate(frames) if is_one_of(frame.label, terminal)), len(frames))
    body, end = list(frames[:ends]), list(frames[ends:])
    if failed is not None:
        end = [failed]
    if fault.garbage is not None:
        body.append(Frame("garbage", fault.garbage))
    kept = [frame for frame in [*body, *end] if not is_one_of(frame.label, drop)]
    return [frame for frame in kept for _ in range(2 if is_one_of(frame.label, fault.repeat) else 1)]


def as_events(frames: Sequence[Frame], fault: Fault) -> list[bytes]:
    """Write frames as server-sent events, one item each."""
    out = []
    for frame in frames:
        data = frame.data if isinstance(frame.data, str) else json_text(frame.data)
        head = f"event: {frame.event}\n" if frame.event else ""
        out.append(f"{COMMENT * fault.keep_alives}{head}data: {data}\n\n")
    return [ended(text, fault).encode() for text in out]


def ended(text: str, fault: Fault) -> str:
    """Give an event's text the line ends that are asked for."""
    return text.replace("\n", "\r\n") if fault.crlf else text


def as_array(frames: Sequence[Frame], fault: Fault) -> list[bytes]:
    """Write frames as one JSON array that comes an element at a time."""
    texts = [frame.data if isinstance(frame.data, str) else json_text(frame.data) for frame in frames]
    blank = "\n" * fault.keep_alives
    return [
        f"{blank}{',' if place else '['}{text}{']' if place + 1 == len(texts) else ''}\n".encode()
        for place, text in enumerate(texts)
    ] or [b"[]"]


def cut_bytes(pieces: Sequence[bytes], size: int) -> list[bytes]:
    """Cut a body anew into pieces of so many bytes."""
    whole = b"".join(pieces)
    return [whole[start : start + size] for start in range(0, len(whole), size)]


def shorten(pieces: Sequence[bytes], size: int) -> list[bytes]:
    """Return the pieces' first bytes, cut where they were cut before."""
    out: list[bytes] = []
    for piece in pieces:
        if size <= 0:
            break
        out.append(piece[:size])
        size -= len(piece)
    return out
