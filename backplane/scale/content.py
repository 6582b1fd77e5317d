"""The content store of a queue: workspaces and patches as files named by their SHA-256, for all machines.

The store is a folder or any URL that fsspec can write to. A content gets its name when it is complete; reads have a
size limit, and are checked against the name.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from backplane.errors import ConfigError, WorkspaceError

PIECE_BYTES: Final = 1024 * 1024
CONTENT_BYTES_MAX: Final = 2 * 1024**3
"""Largest workspace or patch in bytes: a large repository without its ignored files."""
_STAGING: Final = "workspace_staging_failed"


class Contents:
    """The files of one content store; no file is ever changed. All methods block.

    Args:
        place: a folder, which is created with the first content, or a URL as `s3://BUCKET/PATH`; keys come from
            fsspec's own configuration.

    Raises:
        ConfigError: `config_invalid`: no URL of fsspec, one with a password, or its driver is not installed.
    """

    def __init__(self, place: str | os.PathLike[str], bytes_max: int = CONTENT_BYTES_MAX) -> None:
        import fsspec

        self.place, self._bytes_max = os.fspath(place), bytes_max
        if "://" not in self.place:
            self._files, self._root = fsspec.filesystem("file"), os.path.abspath(self.place)
            return
        try:
            has_password = urlsplit(self.place).password is not None
            if not has_password:
                self._files, self._root = fsspec.core.url_to_fs(self.place)
        except Exception as error:  # An unknown kind of URL, a missing driver, or one whose connection fails.
            hint = "give a folder, or a URL whose driver for fsspec is installed, such as s3://BUCKET/PATH"
            raise ConfigError("config_invalid", f"{self.place[:200]!r} cannot be used: {error}", hint=hint) from error
        if has_password:
            fact = "the URL of the content store has a password in it, which process lists show"
            raise ConfigError("config_invalid", fact, hint="put it into fsspec's configuration (FSSPEC_... variables)")

    def put(self, pieces: Iterator[bytes]) -> str:
        """Store a content and return its SHA-256.

        Raises:
            WorkspaceError: `workspace_staging_failed`, it is too large or cannot be written.
        """
        with self._used("write a content"), tempfile.TemporaryDirectory(prefix="backplane-") as folder:
            whole = Path(folder) / "content"
            name = self._write(pieces, whole)
            part = f"{self._root}/.{secrets.token_hex(16)}"
            if not self._files.exists(self._root):  # A misspelt path must not become a new tree of folders.
                self._files.mkdir(self._root, create_parents="://" in self.place)
            self._files.put_file(str(whole), part)
            self._files.mv(part, f"{self._root}/{name}")
        return name

    def fetch(self, sha256: str, path: Path) -> None:
        """Copy a content to a new file.

        Raises:
            WorkspaceError: `workspace_staging_failed`, it is missing, too large, or differs from its name.
        """
        if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
            raise WorkspaceError(_STAGING, f"{sha256[:80]!r} is not a SHA-256")
        with self._used(f"read content {sha256}"), self._files.open(f"{self._root}/{sha256}", "rb") as source:
            found = self._write(iter(lambda: source.read(PIECE_BYTES), b""), path)
        if found != sha256:
            raise WorkspaceError(_STAGING, f"content {sha256} in {self.place} does not match its SHA-256")

    @contextmanager
    def _used(self, doing: str) -> Iterator[None]:
        try:
            yield
        except WorkspaceError:
            raise
        except Exception as error:  # fsspec's drivers raise errors of their own libraries, too.
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {str(error)[:200]}"
            hint = "give the same --content to submitter and workers, and check its permissions"
            raise WorkspaceError(_STAGING, f"cannot {doing} in {self.place}: {why}", hint=hint) from error

    def _write(self, pieces: Iterator[bytes], path: Path) -> str:
        """Write a new file, and return its SHA-256."""
        whole, count = hashlib.sha256(), 0
        with path.open("xb") as file:
            for piece in pieces:
                count += len(piece)
                if count > self._bytes_max:
                    fact = f"a file for the content store has more than {self._bytes_max} bytes"
                    raise WorkspaceError(_STAGING, fact, hint="leave files of the workspace out with --exclude GLOB")
                whole.update(piece)
                file.write(piece)
        return whole.hexdigest()
