"""The end of a run as text, with what the disk alone knows about its patch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from backplane.contract.receipt import Receipt
from backplane.view import ended
from backplane.view.console import Look

LINE_BYTES_MAX = 4096
"""Most bytes of one line of a patch that are shown."""


def summary(receipt: Receipt, look: Look, patch: Path | None) -> str:
    """Return the outcome of a run in a few lines, the place of its patch among them."""
    return ended.summary(receipt, look, patch_line(receipt, patch))


def patch_line(receipt: Receipt, patch: Path | None, root: str = "DIR") -> str:
    """Return where a run's patch is and how to apply it; empty for a run without changes.

    Args:
        root: the folder to apply it to, if the run was made on another machine.
    """
    if patch is None or not patch.is_file() or not patch.stat().st_size:
        return ""
    from backplane.workspace.patch import mode_of

    return ended.patch_line(receipt, str(patch), mode_of(patch.parent), root)


def diff(patch: Path, look: Look) -> Iterator[str]:
    """Yield the lines of a patch file in their colours."""
    with patch.open("rb") as file:
        yield from ended.diff((line[:LINE_BYTES_MAX].decode("utf-8", "replace") for line in file), look, str(patch))
