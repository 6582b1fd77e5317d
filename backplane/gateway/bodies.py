"""The bodies of requests and answers, in a file beside the gateway's record; kept if `gateway.bodies` is true.

A line has an exchange's id, its request and its answer; known secrets are replaced. A file is deleted with its record.
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
"""Bytes kept of each request and of each answer; an agent's requests have about 100 KB. The rest is cut off."""

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
