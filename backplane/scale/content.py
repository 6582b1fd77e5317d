"""Workspaces and patches on their way between machines: files named by their own SHA-256, in a folder all can reach.

A content is written beside and renamed, so a reader sees it whole or not at all; what is read is checked by its name.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from backplane.errors import WorkspaceError

PIECE_BYTES: Final = 1024 * 1024
CONTENT_BYTES_MAX: Final = 2 * 1024**3
"""One workspace or patch: a large repository without its ignored files."""
_STAGING: Final = "workspace_staging_failed"


class ContentStore:
    """A folder of contents; it may lie on a network disk, as nothing in it is ever changed.

    Args:
        folder: made when the first content is put.
    """

    def __init__(self, folder: Path, bytes_max: int = CONTENT_BYTES_MAX) -> None:
        self.folder = folder
        self._bytes_max = bytes_max

    def put(self, pieces: Iterator[bytes]) -> str:
        """Keep a content and return its SHA-256. Blocks.

        Raises:
            WorkspaceError: `workspace_staging_failed`, it is too large or cannot be written.
        """
        whole, count = hashlib.sha256(), 0
        draft = self.folder / f".{secrets.token_hex(16)}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with draft.open("xb") as file:
                for piece in pieces:
                    count += len(piece)
                    if count > self._bytes_max:
                        fact = f"what is to travel has more than {self._bytes_max} bytes"
                        raise WorkspaceError(_STAGING, fact, hint="leave some out with --exclude")
                    whole.update(piece)
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self.folder / whole.hexdigest())
        except OSError as error:
            raise WorkspaceError(_STAGING, f"{self.folder} cannot be written: {error.strerror}") from error
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        return whole.hexdigest()

    def fetch(self, sha256: str, path: Path) -> None:
        """Copy a content to a new file. Blocks.

        Raises:
            WorkspaceError: `workspace_staging_failed`, it is not there, too large, or not what its name says.
        """
        if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
            raise WorkspaceError(_STAGING, f"{sha256[:80]!r} is no name of a content")
        whole, count = hashlib.sha256(), 0
        try:
            with (self.folder / sha256).open("rb") as source, path.open("xb") as target:
                while piece := source.read(PIECE_BYTES):
                    count += len(piece)
                    if count > self._bytes_max:
                        raise WorkspaceError(_STAGING, f"content {sha256} has more than {self._bytes_max} bytes")
                    whole.update(piece)
                    target.write(piece)
        except OSError as error:
            fact = f"content {sha256} cannot be read from {self.folder}: {error.strerror}"
            raise WorkspaceError(_STAGING, fact, hint="submitter and workers need the same --content folder") from error
        if whole.hexdigest() != sha256:
            raise WorkspaceError(_STAGING, f"content {sha256} in {self.folder} is not what its name says")
