"""The content store of a queue: workspaces and patches as files named by their SHA-256, for all machines.

It is a folder, or any URL that fsspec can write to. A content is written to a temporary file first, so a reader of a
folder sees it whole or not at all; reads are bounded, and checked against the name.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final
from urllib.parse import unquote, urlsplit

from backplane.errors import ConfigError, WorkspaceError, install_hint

PIECE_BYTES: Final = 1024 * 1024
CONTENT_BYTES_MAX: Final = 2 * 1024**3
"""Largest workspace or patch in bytes: a large repository without its ignored files."""
_STAGING: Final = "workspace_staging_failed"


def open_contents(where: str) -> Contents:
    """Return the store in a folder (a path or a `file:` URL) or at another URL; nothing is opened yet.

    Raises:
        ConfigError: `config_invalid`: no URL of fsspec, one with a password, or fsspec or its driver is not installed.
    """
    if "://" not in where:
        return Contents(Path(where))
    try:
        url = urlsplit(where)
        scheme, has_password = url.scheme, url.password is not None
    except ValueError:
        hint = "give a folder, file:///FOLDER, or a URL as s3://BUCKET/PATH"
        raise ConfigError("config_invalid", f"{where[:200]!r} is not a URL", hint=hint) from None
    if has_password:
        fact = "the URL of the content store has a password in it, which process lists show"
        raise ConfigError("config_invalid", fact, hint="put it into fsspec's configuration (FSSPEC_... variables)")
    if scheme == "file" and not url.netloc and url.path.startswith("/"):
        return Contents(Path(unquote(url.path)))
    return UrlContents(where)


class Contents:
    """Contents in a folder; it may be on a network disk, as no file in it is ever changed.

    Args:
        folder: created with the first content.
    """

    def __init__(self, folder: Path, bytes_max: int = CONTENT_BYTES_MAX) -> None:
        self.folder, self._bytes_max = folder, bytes_max
        self._place = str(folder)

    def put(self, pieces: Iterator[bytes]) -> str:
        """Keep a content and return its SHA-256. Blocks.

        Raises:
            WorkspaceError: `workspace_staging_failed`, it is too large or cannot be written.
        """
        with self._drafted() as draft:
            name = self._write(pieces, draft)
            self._keep(draft, name)
        return name

    def fetch(self, sha256: str, path: Path) -> None:
        """Copy a content to a new file. Blocks.

        Raises:
            WorkspaceError: `workspace_staging_failed`, it is missing, too large, or differs from its name.
        """
        if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
            raise WorkspaceError(_STAGING, f"{sha256[:80]!r} is not a SHA-256")
        with self._used(f"read content {sha256}"), self._open(sha256) as source:
            found = self._write(iter(lambda: source.read(PIECE_BYTES), b""), path)
        if found != sha256:
            raise WorkspaceError(_STAGING, f"content {sha256} in {self._place} does not match its SHA-256")

    @contextmanager
    def _drafted(self) -> Iterator[Path]:
        draft = self.folder / f".{secrets.token_hex(16)}"
        with self._used("write a content"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                yield draft
            finally:
                with suppress(OSError):
                    draft.unlink(missing_ok=True)

    def _keep(self, draft: Path, name: str) -> None:
        os.replace(draft, self.folder / name)

    def _open(self, name: str) -> IO[bytes]:
        return (self.folder / name).open("rb")

    @contextmanager
    def _used(self, doing: str) -> Iterator[None]:
        try:
            yield
        except WorkspaceError:
            raise
        except Exception as error:  # fsspec's drivers raise errors of their own libraries, too.
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {str(error)[:200]}"
            hint = "give the same --content to submitter and workers, and check its permissions"
            raise WorkspaceError(_STAGING, f"cannot {doing} in {self._place}: {why}", hint=hint) from error

    def _write(self, pieces: Iterator[bytes], path: Path) -> str:
        """Write a new file, flushed to the disk, and return its SHA-256."""
        whole, count = hashlib.sha256(), 0
        with path.open("xb") as file:
            for piece in pieces:
                count += len(piece)
                if count > self._bytes_max:
                    fact = f"a file for the content store has more than {self._bytes_max} bytes"
                    raise WorkspaceError(_STAGING, fact, hint="leave files of the workspace out with --exclude GLOB")
                whole.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        return whole.hexdigest()


class UrlContents(Contents):
    """Contents at a URL of fsspec, for example `s3://BUCKET/PATH`; keys come from fsspec's own configuration."""

    def __init__(self, url: str, bytes_max: int = CONTENT_BYTES_MAX) -> None:
        super().__init__(Path(), bytes_max)
        self._place = url
        try:
            import fsspec
        except ImportError:
            fact = "a URL as content store needs fsspec, which is not installed"
            raise ConfigError("config_invalid", fact, hint=install_hint("scale")) from None
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:  # An unknown kind of URL, a missing driver, or one that already connects.
            hint = "give a folder, or a URL whose driver for fsspec is installed"
            raise ConfigError("config_invalid", f"{url[:200]!r} cannot be used: {error}", hint=hint) from error

    @contextmanager
    def _drafted(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="backplane-") as folder, self._used("write a content"):
            yield Path(folder) / "draft"

    def _keep(self, draft: Path, name: str) -> None:
        self._files.makedirs(self._root, exist_ok=True)
        self._files.put_file(str(draft), f"{self._root}/{name}")

    def _open(self, name: str) -> IO[bytes]:
        return self._files.open(f"{self._root}/{name}", "rb")  # type: ignore[no-any-return]  # fsspec has no types
