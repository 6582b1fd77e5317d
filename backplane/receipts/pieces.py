"""Encodes a receipt in pieces of canonical bytes, and hashes it.

A receipt of any length is hashed and written while its trace stays on disk. Reading the trace blocks, so use a worker
thread for a long receipt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.receipt import NAMES_MAX, Receipt
from backplane.contract.unknown import is_lenient, unknown_pointers
from backplane.receipts.trace import Trace, as_trace

NAME_CHARS_MAX: Final = 200
"""Maximum length of a listed pointer of an unknown member."""

_BEFORE_TRACE: Final = ("artifacts", "backend", "capabilities", "meta", "mode", "outcome", "receipt_sha256")
_AFTER_TRACE: Final = ("usage", "usage_raw", "verification")


def canonical_parts(receipt: Receipt) -> tuple[bytes, bytes]:
    """Return the canonical bytes up to `"trace":[`, and those from its `]` on, without reading the trace."""
    members = [{name: getattr(receipt, name) for name in names} for names in (_BEFORE_TRACE, _AFTER_TRACE)]
    before, after, _ = canonical.encode_lines(members).split(b"\n")
    return before[:-1] + b',"trace":[', b"]," + after[1:]


def canonical_chunks(receipt: Receipt) -> Iterator[bytes]:
    """Yield the whole receipt in canonical bytes, trace included, in pieces."""
    prefix, suffix = canonical_parts(receipt)
    yield prefix
    yield from as_trace(receipt.trace).chunks()
    yield suffix


def digest(receipt: Receipt) -> str:
    """Return the receipt's hash as `contract.receipt.receipt_hash` defines it, with bounded memory."""
    prefix, suffix = canonical_parts(msgspec.structs.replace(receipt, receipt_sha256=None))
    whole = hashlib.sha256(prefix)
    for chunk in as_trace(receipt.trace).chunks():
        whole.update(chunk)
    whole.update(suffix)
    return whole.hexdigest()


def seal(receipt: Receipt) -> Receipt:
    """Return the receipt with its hash, which replaces an earlier one.

    Raises:
        StoreError: `receipt_store_failed`, the trace's file cannot be read.
        ValueError: a number in it has no canonical form.
    """
    return msgspec.structs.replace(receipt, receipt_sha256=digest(receipt))


def is_intact(receipt: Receipt) -> bool:
    """Return True if the receipt has a correct hash."""
    return receipt.receipt_sha256 is not None and receipt.receipt_sha256 == digest(receipt)


def without_trace(receipt: Receipt) -> bytes:
    """Return the canonical bytes with an empty trace, which the store keeps as the body."""
    prefix, suffix = canonical_parts(receipt)
    return prefix + suffix


def with_trace(body: bytes, trace: Trace) -> Receipt:
    """Return the receipt of a stored body and its trace.

    Raises:
        msgspec.DecodeError, msgspec.ValidationError: not the body of a receipt.
    """
    return msgspec.structs.replace(msgspec.convert(canonical.decode(body), Receipt), trace=trace)


def unheard_names(vendor: Mapping[str, Any]) -> list[str]:
    """Return the JSON pointers of an order's members without effect, at most as many as a receipt lists."""
    return [pointer[:NAME_CHARS_MAX] for pointer in islice(unknown_pointers(vendor), NAMES_MAX)]


def unheard_facts(vendor: Mapping[str, Any]) -> dict[str, Json]:
    """Return the members `unheard` and `lenient` of a receipt, which name an order's unknown members."""
    names, lenient = unheard_names(vendor), is_lenient(vendor)
    return {**({"unheard": names} if names else {}), **({"lenient": True} if lenient else {})}
