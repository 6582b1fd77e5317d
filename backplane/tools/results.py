"""Defines the result of a tool's call: a text for the model, and the changes for events."""

from __future__ import annotations

from typing import Final

import msgspec

OUTPUT_CHARS_MAX: Final = 32 * 1024
"""Most characters of an answer to the model: some 8,000 tokens, a whole test report."""


class ChangedFile(msgspec.Struct, frozen=True):
    """A file that a tool changed."""

    path: str
    """Path of the file, relative to the workspace's root."""
    summary: str


class Ran(msgspec.Struct, frozen=True):
    """A command that a tool ran to its end."""

    command: str
    exit_code: int | None
    """Exit code of the command; None if a signal or a limit ended it."""
    output: str


class CallResult(msgspec.Struct, frozen=True):
    """The answer to one call."""

    text: str
    is_error: bool = False
    changes: tuple[ChangedFile, ...] = ()
    ran: Ran | None = None


def shortened(text: str, chars_max: int = OUTPUT_CHARS_MAX) -> str:
    """Cut the middle out of a long text; errors are at its beginning or its end."""
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
