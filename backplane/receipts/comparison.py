"""Where two receipts differ, place by place; traces event by event.

Only reads; what a difference means is for people to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, zip_longest
from typing import Any, Final

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.receipt import Receipt
from backplane.receipts.trace import Trace

DIFFERENCES_MAX: Final = 1_000
"""Nobody reads more, and two unlike traces of a million events must not fill the memory."""
ABSENT: Final = msgspec.UNSET
"""Stands for the side that has nothing at this place."""


class Difference(msgspec.Struct, frozen=True):
    """One place where two receipts are not the same."""

    pointer: str
    """JSON pointer, `/trace/3/text` for the fourth event's text."""
    left: Json
    right: Json


def compare(left: Receipt, right: Receipt, *, limit: int = DIFFERENCES_MAX) -> list[Difference]:
    """The differences in the contract's order of members, the trace last.

    Args:
        limit: differences at most; later ones are not looked for.

    Raises:
        StoreError: `receipt_store_failed` when a stored trace cannot be read.
    """
    return list(islice(_differences(left, right), limit))


def _differences(left: Receipt, right: Receipt) -> Iterator[Difference]:
    for name in Receipt.__struct_fields__:
        if name != "trace":
            ours, theirs = (msgspec.to_builtins(getattr(side, name)) for side in (left, right))
            yield from _walk(f"/{name}", ours, theirs)
    pairs = zip_longest(_lines(left), _lines(right))
    for index, (our_line, their_line) in enumerate(pairs):
        if our_line != their_line:
            yield from _walk(f"/trace/{index}", _event(our_line), _event(their_line))


def _lines(receipt: Receipt) -> Iterator[bytes]:
    trace = receipt.trace
    return trace.lines() if isinstance(trace, Trace) else map(canonical.encode, trace)


def _event(line: bytes | None) -> Json:
    return ABSENT if line is None else canonical.decode(line)


def _walk(pointer: str, left: Any, right: Any) -> Iterator[Difference]:
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            place = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
            yield from _walk(place, left.get(key, ABSENT), right.get(key, ABSENT))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        for index, (ours, theirs) in enumerate(zip_longest(left, right, fillvalue=ABSENT)):
            yield from _walk(f"{pointer}/{index}", ours, theirs)
    # Python calls 1, 1.0 and True equal; on the wire they are three values.
    elif left is not right and (type(left) is not type(right) or left != right):
        yield Difference(pointer, left, right)
