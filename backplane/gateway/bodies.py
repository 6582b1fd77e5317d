"""The bodies of requests and answers, in a file beside the gateway's record; kept if `gateway.bodies` is true.

A line has an exchange's id, its request and its answer; known secrets are replaced. A file is deleted with its record.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import framing
from backplane.errors import BackplaneError
from backplane.gateway.frames import encode
from backplane.gateway.journal import SUFFIX
from backplane.redact.secrets import Redactor

BODY_BYTES_MAX: Final = 1024 * 1024
"""Bytes kept of each request and of each answer; an agent's requests have about 100 KB. The rest is cut off."""

COPY_BYTES_MAX: Final = BODY_BYTES_MAX + 64 * 1024
"""Bytes that are searched for secrets; a secret may begin within the kept bytes and end after them."""

FILE_BYTES_MAX: Final = 128 * 1024 * 1024
"""Bytes of a file after which it is renamed, in place of an older one, and a new file begins."""

ENDING: Final = ".bodies"
OLDER: Final = ".bodies.older"


class ExchangeBodies(msgspec.Struct, frozen=True, kw_only=True):
    """The line of one exchange."""

    id: str
    request: str
    answer: str
    request_bytes: int
    """Size of the whole request; `request` may be only its beginning."""


class Bodies:
    """Writes the bodies of one gateway's exchanges; files whose record was deleted are removed first.

    Args:
        record: the gateway's record; the bodies get its name with another ending.
        secrets: values to replace in the texts.
    """

    def __init__(self, record: Path, secrets: Iterable[str]) -> None:
        self.path = record.with_suffix(ENDING)
        self._older = record.with_suffix(OLDER)
        self._redactor = Redactor(secrets)
        for path in record.parent.glob(f"*{ENDING}*"):
            if not (path.parent / (path.name.partition(".")[0] + SUFFIX)).exists():
                path.unlink(missing_ok=True)

    def keep(self, id: str, request: bytes, answer: bytes) -> None:
        """Append a line; on a full disk it is lost without an error, as the exchange itself is in the record."""
        asked, got = self._clean(request[:COPY_BYTES_MAX]), self._clean(self._joined(answer))
        line = ExchangeBodies(id=id, request=asked, answer=got, request_bytes=len(request))
        with suppress(OSError):
            if self.path.exists() and self.path.stat().st_size > FILE_BYTES_MAX:
                self.path.replace(self._older)
            self.path.touch(0o600)
            with self.path.open("ab") as file:
                file.write(encode(line) + b"\n")

    def _clean(self, data: bytes) -> str:
        text = self._redactor.text(data.decode("utf-8", "replace"))[0]
        return text.encode()[:BODY_BYTES_MAX].decode("utf-8", "ignore")

    def _joined(self, answer: bytes) -> bytes:
        """Return an answer; if it is a stream with a secret in its texts, rewrite its events without the secret.

        A model may repeat a secret in pieces of a few letters, so no single event contains it. An incomplete event,
        such as the last one of a stream that broke off, may contain the end of a secret, so it is left out.
        """
        split = framing.Detecting()
        try:
            documents = [*split.feed(answer), *split.finish()]
        except BackplaneError:  # One event is over the limit of its framing.
            return answer
        skipped = split.inner.skipped if split.inner is not None else 0
        if len(documents) + skipped < 2:
            return answer
        texts: dict[object, list[_Place]] = {}
        for document in documents:
            for place in _texts(document) if isinstance(document, dict | list) else ():
                texts.setdefault(place.text, []).append(place)
        total = 0
        for places in texts.values():
            cleaned, count = self._redactor.pieces([place.holder[place.member] for place in places])
            total += count
            for place, text in zip(places, cleaned, strict=True) if count else ():
                place.holder[place.member] = text
        return b"".join(map(framing.sse_bytes, documents)) if total or skipped else answer


class _Place(NamedTuple):
    """The place of a piece of text in an event."""

    text: object
    """Identifies the text; equal for all pieces of one text."""
    holder: Any
    member: str | int


def _texts(document: Json) -> list[_Place]:
    """Return the places of all texts in an event; pieces of one text have the same path and the same `_NUMBERS`."""
    found: list[_Place] = []
    waiting: list[tuple[Any, tuple[object, ...]]] = [(document, ())]
    while waiting:
        value, path = waiting.pop()
        items: Iterable[tuple[Any, Json]]
        if type(value) is dict:
            path = (*path, *[value[name] for name in _NUMBERS if type(value.get(name)) in (int, str)])
            items = value.items()
        else:
            items = enumerate(value)
        for member, one in items:
            kind = type(one)
            if kind is str:
                found.append(_Place((path, member), value, member))
            elif kind is dict or kind is list:
                waiting.append((one, (*path, member)))
    return found


_NUMBERS: Final = ("type", "index", "output_index", "content_index")
"""Members whose values distinguish the texts of one answer."""
