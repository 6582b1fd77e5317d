"""Shared parts of the `receipts` commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backplane.cli import streams
from backplane.cli.command import wrong_words
from backplane.receipts.bundle import RECEIPT_BYTES_MAX, parse_receipt

if TYPE_CHECKING:
    from backplane.contract.receipt import Receipt

NUMBER_MAX = (1 << 63) - 1
"""SQLite counts no further."""


def number(option: str, value: int, hint: str) -> int:
    """Return a count that an option gives. Raises ConfigError `usage_invalid`."""
    if not 0 <= value <= NUMBER_MAX:
        raise wrong_words(f"{option} {value} is out of range", hint)
    return value


def read_file(name: str, called: str | None = None) -> Receipt:
    """Read and check a receipt's file. Raises what `parse_receipt` raises."""
    return parse_receipt(streams.read_input(name, RECEIPT_BYTES_MAX), called or streams.source(name))
