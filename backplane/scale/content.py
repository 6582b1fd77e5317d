"""The content store of a queue: workspaces and patches as files named by their SHA-256, for all machines.

It is a shared folder, or a server that accepts PUT. A content is written to a temporary file and renamed, so a reader
sees it whole or not at all; reads are bounded, and checked against the name.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import unquote, urlsplit

from backplane.errors import ConfigError, WorkspaceError

if TYPE_CHECKING:
    import httpx

PIECE_BYTES: Final = 1024 * 1024
CONTENT_BYTES_MAX: Final = 2 * 1024**3
"""Largest workspace or patch in bytes: a large repository without its ignored files."""
ANSWER_S_MAX: Final = 60.0
"""Seconds for a server to accept or send the next piece."""
TOKEN: Final = "BACKPLANE_CONTENT_TOKEN"
"""The variable with the bearer token for a content server."""
_STAGING: Final = "workspace_staging_failed"


class Contents(Protocol):
    """A content store."""

    def put(self, pieces: Iterator[bytes]) -> str:
        """Keep a content and return its SHA-256. Blocks.

        Raises:
            WorkspaceError: `workspace_staging_failed`, it is too large or cannot be written.
        """
        ...

    def fetch(self, sha256: str, path: Path) -> None:
        """Copy a content to a new file. Blocks.

        Raises:
            WorkspaceError: `workspace_staging_failed`, it is missing, too large, or differs from its name.
        """
        ...


def open_contents(where: str, environ: Mapping[str, str]) -> Contents:
    """Return the store in a folder (a path or a `file:` URL) or on a server (`http:`, `https:`); opens nothing yet.

    Raises:
        ConfigError: `config_invalid`, another kind of URL, or one with a password.
    """
    if "://" not in where:
        return ContentStore(Path(where))
    hint = "give a folder, file:///FOLDER, http://HOST/PATH or https://HOST/PATH"
    try:
        url = urlsplit(where)
        server, user = url.hostname, url.username
    except ValueError:
        raise ConfigError("config_invalid", f"{where[:200]!r} is not a URL", hint=hint) from None
    if url.scheme == "file" and not url.netloc and url.path.startswith("/"):
        return ContentStore(Path(unquote(url.path)))
    if url.scheme not in ("http", "https") or not server or url.query or url.fragment:
        raise ConfigError("config_invalid", f"{url.scheme}://{server or ''} cannot be a content store", hint=hint)
    if user is not None:
        fact = "the URL of the content store has a user name in it, which process lists show"
        raise ConfigError("config_invalid", fact, hint=f"remove it from the URL, and put a bearer token into {TOKEN}")
    return ContentServer(where.rstrip("/"), environ.get(TOKEN))


class ContentStore:
    """A folder of contents, see `Contents`; it may be on a network disk, as no file in it is ever changed.

    Args:
        folder: created with the first content.
    """

    def __init__(self, folder: Path, bytes_max: int = CONTENT_BYTES_MAX) -> None:
        self.folder = folder
        self._bytes_max = bytes_max

    def put(self, pieces: Iterator[bytes]) -> str:
        draft = self.folder / f".{secrets.token_hex(16)}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            name = _write(pieces, draft, self._bytes_max)
            os.replace(draft, self.folder / name)
        except OSError as error:
            raise WorkspaceError(_STAGING, f"{self.folder} cannot be written: {error.strerror}") from error
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        return name

    def fetch(self, sha256: str, path: Path) -> None:
        _check_name(sha256)
        try:
            with (self.folder / sha256).open("rb") as source:
                found = _write(iter(lambda: source.read(PIECE_BYTES), b""), path, self._bytes_max)
        except OSError as error:
            fact = f"content {sha256} cannot be read from {self.folder}: {error.strerror}"
            raise WorkspaceError(_STAGING, fact, hint="give the same --content to submitter and workers") from error
        if found != sha256:
            raise WorkspaceError(_STAGING, f"content {sha256} in {self.folder} does not match its SHA-256")


class ContentServer:
    """Contents on a server, see `Contents`: PUT and GET of URL/SHA256, as WebDAV and object stores accept them.

    Args:
        url: without a trailing slash.
        token: sent as a bearer token, to this URL only; a redirection is an error. None sends none.
    """

    def __init__(self, url: str, token: str | None = None, bytes_max: int = CONTENT_BYTES_MAX) -> None:
        self._url, self._token, self._bytes_max = url, token, bytes_max

    def put(self, pieces: Iterator[bytes]) -> str:
        with tempfile.TemporaryFile() as file:
            name = _copy(pieces, file.write, self._bytes_max)
            count = file.tell()
            file.seek(0)
            with self._client() as client:
                body = iter(lambda: file.read(PIECE_BYTES), b"")
                self._check(client.put(name, content=body, headers={"Content-Length": str(count)}), name)
        return name

    def fetch(self, sha256: str, path: Path) -> None:
        _check_name(sha256)
        with self._client() as client, client.stream("GET", sha256) as answer:
            self._check(answer, sha256)
            found = _write(answer.iter_bytes(), path, self._bytes_max)
        if found != sha256:
            raise WorkspaceError(_STAGING, f"content {sha256} on {self._url} does not match its SHA-256")

    @contextmanager
    def _client(self) -> Iterator[httpx.Client]:
        import httpx  # It takes 0.1 s, so a folder does without.

        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {self._token}"} if self._token else {})}
        try:
            with httpx.Client(base_url=f"{self._url}/", headers=headers, timeout=ANSWER_S_MAX) as client:
                yield client
        except (httpx.HTTPError, OSError) as error:
            fact = f"the content store {self._url} cannot be used: {type(error).__name__}: {str(error)[:200]}"
            raise WorkspaceError(_STAGING, fact, hint="check the URL of --content") from error

    def _check(self, answer: httpx.Response, name: str) -> None:
        if not answer.is_success:
            verb = answer.request.method
            fact = f"{self._url} answers {answer.status_code} to {verb} of content {name}"
            raise WorkspaceError(_STAGING, fact, hint=f"the server must accept PUT and GET, and the token in {TOKEN}")


def _check_name(sha256: str) -> None:
    """Raise WorkspaceError `workspace_staging_failed` if this is no SHA-256."""
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise WorkspaceError(_STAGING, f"{sha256[:80]!r} is not a SHA-256")


def _write(pieces: Iterator[bytes], path: Path, bytes_max: int) -> str:
    """Write a new file, flushed to the disk, and return its SHA-256."""
    with path.open("xb") as file:
        name = _copy(pieces, file.write, bytes_max)
        file.flush()
        os.fsync(file.fileno())
    return name


def _copy(pieces: Iterator[bytes], write: Callable[[bytes], object], bytes_max: int) -> str:
    whole, count = hashlib.sha256(), 0
    for piece in pieces:
        count += len(piece)
        if count > bytes_max:
            fact = f"a file for the content store has more than {bytes_max} bytes"
            raise WorkspaceError(_STAGING, fact, hint="leave files of the workspace out with --exclude GLOB")
        whole.update(piece)
        write(piece)
    return whole.hexdigest()
