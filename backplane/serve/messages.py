"""Encodes the messages about a run for the client that started it: its events, and its end with the receipt.

Events and receipt are the canonical bytes that are stored, as the last member of their message, so that a reader can
verify the hash without parsing any number.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import msgspec

from backplane.contract.receipt import Receipt
from backplane.errors import CODES, BackplaneError, ProtocolError, from_code, unforeseen
from backplane.receipts.outcomes import End, ends_in_final
from backplane.receipts.pieces import canonical_chunks, canonical_parts
from backplane.receipts.trace import Trace


class EndedRun(Protocol):
    """A run that has ended, here or on another machine."""

    @property
    def id(self) -> str: ...
    @property
    def end(self) -> End | None: ...
    @property
    def end_error(self) -> BackplaneError | None: ...
    @property
    def is_sealed(self) -> bool: ...
    @property
    def stored(self) -> Receipt: ...
    @property
    def patch(self) -> Path | None: ...


def events(ref_id: str, records: list[bytes], *, line_bytes_max: int | None = None) -> bytes:
    """Return the `event` messages for canonical events, as one block of lines.

    Args:
        line_bytes_max: maximum length of a line that the other end reads; None if it is unknown.

    Raises:
        ProtocolError: `protocol_invalid_envelope`, an event is longer than the other end reads.
    """
    frame = msgspec.json.encode({"t": "event", "ref_id": ref_id})[:-1] + b',"event":'
    lines = frame + (b"}\n" + frame).join(records) + b"}\n"
    if line_bytes_max is not None and len(lines) > line_bytes_max:
        longest = max(map(len, records)) + len(frame) + 1
        if longest > line_bytes_max:
            # The canonical form can be longer than the received one: `1e5` becomes `100000.0`.
            raise ProtocolError(
                "protocol_invalid_envelope",
                f"an event's line of {longest} bytes is over line_bytes_max ({line_bytes_max} bytes)",
                hint="put long results into files and name them as artifacts",
            )
    return lines


def _words(error: BackplaneError) -> str:
    """Return an error's fact and next step in one text, as a message has no member for the step."""
    return f"{error.message}; {error.hint}" if error.hint else error.message


def ending(ended: EndedRun, *, ref_id: str, line_bytes_max: int, as_streamed: bool = True) -> Iterator[bytes]:
    """Yield the run's `final` or `fatal` in pieces, with the receipt's canonical bytes as its last member.

    A receipt that is too long for a line is sent without its trace, and the message says so. If it is still too long,
    or if an exception is raised, a `fatal` without the receipt is sent.

    Args:
        as_streamed: True if the streamed events are exactly the receipt's trace.
    """
    begun = False
    try:
        for piece in _ending(ended, ref_id, line_bytes_max, as_streamed):
            yield piece
            begun = True
    except Exception as error:
        fault = ended.end_error or unforeseen(error)
        line = _fatal(ref_id, fault.message, fault.code) + b"}\n"
        yield b"\n" + line if begun else line  # The newline ends a message that was written in part.


def fatal_of_no_run(fault: BackplaneError) -> bytes:
    """Return the `fatal` message for an error before a run was started."""
    code = fault.code if fault.code in CODES else "config_invalid"  # A peer knows only the contract's codes.
    return _fatal(None, _words(fault), code) + b"}\n"


def _fatal(ref_id: str | None, error: str, code: str) -> bytes:
    """Return a `fatal` without its closing brace, so that a member can follow."""
    return msgspec.json.encode({"t": "fatal", "ref_id": ref_id, "error": error, "error_code": code})[:-1]


def _ending(ended: EndedRun, ref_id: str, line_bytes_max: int, as_streamed: bool) -> Iterator[bytes]:
    if not ended.is_sealed:
        raise ended.end_error or from_code("internal", "the run has not ended")
    receipt = ended.stored
    head: dict[str, str] = {"t": "final" if ends_in_final(ended.end, ended.end_error) else "fatal", "ref_id": ref_id}
    if head["t"] == "fatal":
        error = ended.end_error
        head |= {"error": _words(error), "error_code": error.code} if error else {"error": "", "error_code": "internal"}
    prefix, suffix = canonical_parts(receipt)
    trace_bytes = receipt.trace.size_bytes if isinstance(receipt.trace, Trace) else 0
    start = msgspec.json.encode(head)[:-1]
    if len(start) + len(b',"receipt":}\n') + len(prefix) + trace_bytes + len(suffix) <= line_bytes_max:
        yield start + b',"receipt":'
        yield from canonical_chunks(receipt)
    elif as_streamed and len(start) + len(_AS_STREAMED) + len(prefix) + len(suffix) + 2 <= line_bytes_max:
        yield start + _AS_STREAMED + prefix + suffix
    else:
        error_text = f"the receipt of run {ended.id} does not fit a line of {line_bytes_max} bytes; it is kept there"
        yield _fatal(ref_id, error_text, "protocol_invalid_envelope")
    yield b"}\n"


_AS_STREAMED: Final = b',"trace":"as_streamed","receipt":'
