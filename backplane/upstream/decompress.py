"""Bodies that a server packed, unpacked in pieces of a bounded size: some kilobytes can hold gigabytes.

Bytes come in as they came over the network, bytes go out; how many of them are too many is the reader's to say.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Final

PIECE_BYTES_MAX: Final = 256 * 1024
"""Unpacked at once, so that a reader with a limit stops in time."""

_WBITS: Final[dict[str, int]] = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Coding → the header that the packer's data begin with."""


class PackedError(Exception):
    """A body is packed in a way that is not read here, or its data are broken."""


def unpacked(raw: AsyncIterator[bytes], coding: str) -> AsyncIterator[bytes]:
    """Unpack a body while it comes.

    Args:
        coding: the header `content-encoding`; empty for none.

    Raises:
        PackedError: while it is read; also for a body that was packed twice.
    """
    name = coding.strip().lower()
    return raw if name in ("", "identity") else _each(raw, name)


async def _each(raw: AsyncIterator[bytes], name: str) -> AsyncIterator[bytes]:
    if name not in _WBITS:
        raise PackedError(f"the answer is packed as {name[:40]!r}, which nobody asked for")
    unpacker = zlib.decompressobj(_WBITS[name])
    async for data in raw:
        try:
            for piece in _pieces(unpacker, data):
                yield piece
        except zlib.error as error:
            raise PackedError(f"the answer is no {name}") from error


def _pieces(unpacker: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    while data and not unpacker.eof:
        piece = unpacker.decompress(data, PIECE_BYTES_MAX)
        data = unpacker.unconsumed_tail
        if piece:
            yield piece
