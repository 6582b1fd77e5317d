"""Writes a turn's frames as the bytes of a body, with the faults of frames and bytes.

A frame is one event of a stream with a label by which a fault names it. Nothing here sends.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from backplane.contract.canonical import Json
from backplane.testing.script import Call, Fault


class Frame(NamedTuple):
    """One event of a stream."""

    label: str
    data: Any
    """A JSON value; a string is sent as it is."""
    event: str | None = None


class RenderRequest(NamedTuple):
    """The facts of a request that a renderer needs."""

    model: str
    number: int
    wants_usage: bool = True
    """False if the format makes a stream's usage optional and the request did not ask for it."""


def cut_text(text: str, pieces: int) -> list[str]:
    """Cut a text into at most `pieces` parts of nearly the same length; an empty text has none."""
    count = max(1, min(pieces, len(text)))
    edges = [len(text) * place // count for place in range(count + 1)]
    return [text[start:end] for start, end in itertools.pairwise(edges) if end > start]


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def arguments(call: Call) -> str:
    """Return a call's arguments as the wire has them."""
    return call.input if isinstance(call.input, str) else json_text(call.input)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not valid JSON")


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
    frames: Sequence[Frame], fault: Fault, groups: Mapping[str, Sequence[str]], failed: Frame | None
) -> list[Frame]:
    """Leave out frames, and replace the end by a failure, as the fault says.

    Args:
        groups: names of several labels; `END` has those of the frames that say how the answer ended.
        failed: replaces the end if the answer fails half-way.
    """
    drop = [label for name in fault.drop for label in groups.get(name, (name,))]
    ends = next((i for i, frame in enumerate(frames) if is_one_of(frame.label, groups["END"])), len(frames))
    whole = [*frames[:ends], failed] if failed is not None else frames
    return [frame for frame in whole if not is_one_of(frame.label, drop)]


def as_events(frames: Sequence[Frame]) -> list[bytes]:
    """Write frames as server-sent events, one item each."""
    out = []
    for frame in frames:
        data = frame.data if isinstance(frame.data, str) else json_text(frame.data)
        head = f"event: {frame.event}\n" if frame.event else ""
        out.append(f"{head}data: {data}\n\n".encode())
    return out


def as_array(frames: Sequence[Frame]) -> list[bytes]:
    """Write frames as one JSON array, an element at a time."""
    texts = [frame.data if isinstance(frame.data, str) else json_text(frame.data) for frame in frames]
    return [
        f"{',' if place else '['}{text}{']' if place + 1 == len(texts) else ''}\n".encode()
        for place, text in enumerate(texts)
    ] or [b"[]"]


def cut_bytes(pieces: Sequence[bytes], size: int) -> list[bytes]:
    """Cut a body into pieces of `size` bytes."""
    whole = b"".join(pieces)
    return [whole[start : start + size] for start in range(0, len(whole), size)]


def shorten(pieces: Sequence[bytes], size: int) -> list[bytes]:
    """Return the first `size` bytes of the pieces, cut as before."""
    out: list[bytes] = []
    for piece in pieces:
        if size <= 0:
            break
        out.append(piece[:size])
        size -= len(piece)
    return out
