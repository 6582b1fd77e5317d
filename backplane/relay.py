"""A run told on in the protocol's own messages, for whoever drives this control plane.

Events and receipt go out in the canonical bytes they were stored in, as the last member of
their message, so that a reader can verify the hash without parsing a number.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from backplane.receipts.pieces import canonical_parts
from backplane.receipts.trace import Trace
from backplane.record import STOPPED
from backplane.runtime import Run


def events(ref_id: str, records: list[bytes]) -> bytes:
    """The `event` messages of these canonical events, in one piece."""
    frame = msgspec.json.encode({"t": "event", "ref_id": ref_id})[:-1] + b',"event":'
    return b"".join([frame + record + b"}\n" for record in records])


def ends_in_final(ended: Run) -> bool:
    """Whether the run's last message is `final`: the host's was taken, or a person or a limit ended it."""
    assert ended.end is not None, "the run has not ended"
    if ended.end.reason in STOPPED or ended.error is None:
        return ended.end.reason not in ("refused", "host_exit", "protocol", "store")
    # The host's own word was good; what failed is putting its result into the files.
    return ended.error.code == "execution_workspace_error"


def ending(ended: Run, *, ref_id: str, line_bytes_max: int) -> Iterator[bytes]:
    """The run's `final` or `fatal` in pieces, the receipt's canonical bytes as its last member.

    A receipt whose line would be over the limit goes without its trace, and the message says so.
    """
    receipt = ended.receipt
    assert receipt is not None, "the run has not ended"
    head: dict[str, str] = {"t": "final" if ends_in_final(ended) else "fatal", "ref_id": ref_id}
    if head["t"] == "fatal":
        error = ended.error
        head |= {"error": error.message, "error_code": error.code} if error else {"error": "", "error_code": "internal"}
    prefix, suffix = canonical_parts(receipt)
    trace_bytes = receipt.trace.size_bytes if isinstance(receipt.trace, Trace) else 0
    start = msgspec.json.encode(head)[:-1]
    if len(start) + len(b',"receipt":}\n') + len(prefix) + trace_bytes + len(suffix) <= line_bytes_max:
        yield start + b',"receipt":'
        yield from ended.receipt_chunks()
    else:
        yield start + b',"trace":"as_streamed","receipt":' + prefix + suffix
    yield b"}\n"
