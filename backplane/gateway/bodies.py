"""Requests and answers as they passed the gateway, kept beside its record if the configuration says so.

A line has the exchange's id, and both texts without known secrets. The files go with the record that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from backplane.gateway.frames import encode
from backplane.gateway.journal import SUFFIX
from backplane.redact.secrets import Redactor

BODY_BYTES_MAX: Final = 1024 * 1024
"""Bytes kept of one request, and of one answer; an agent's requests have some 100 KB."""

FILE_BYTES_MAX: Final = 128 * 1024 * 1024
"""Bytes of a file, after which a second one begins in place of the one before."""

ENDING: Final = ".bodies"
OLDER: Final = ".bodies.older"


class ExchangeBodies(msgspec.Struct, frozen=True, kw_only=True):
    """The line of one exchange."""

    id: str
    request: str
    answer: str
    request_bytes: int
    """Size of the request; the text may be only its beginning."""


class Bodies:
    """The files of one start.

    Args:
        record: the file of the exchanges' lines.
        secrets: values that are replaced.
    """

    def __init__(self, record: Path, secrets: Iterable[str]) -> None:
        self.path = record.with_suffix(ENDING)
        self._older = record.with_suffix(OLDER)
        self._redactor = Redactor(secrets)
        for path in record.parent.glob(f"*{ENDING}*"):
            if not (path.parent / (path.name.partition(".")[0] + SUFFIX)).exists():
                path.unlink(missing_ok=True)

    def keep(self, id: str, request: bytes, answer: bytes) -> None:
        """Append a line; a full disk loses it, as the exchange itself is in the record."""
        asked, got = (self._redactor.part(data, 0, BODY_BYTES_MAX)[0] for data in (request, answer))
        line = ExchangeBodies(
            id=id, request=asked.decode("utf-8", "replace"), answer=got.decode("utf-8", "replace"),
            request_bytes=len(request),
        )  # fmt: skip
        with suppress(OSError):
            if self.path.exists() and self.path.stat().st_size > FILE_BYTES_MAX:
                self.path.replace(self._older)
            self.path.touch(0o600)
            with self.path.open("ab") as file:
                file.write(encode(line) + b"\n")
