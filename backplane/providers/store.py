"""Stores each session in a file `HOME/sessions/ID.json`, which one process at a time may write.

A file is data: reading it checks its size and its shape, and nothing in it is run.
"""

from __future__ import annotations

import fcntl
import io
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from backplane.contract import canonical
from backplane.contract.canonical import timestamp_at
from backplane.contract.conversation import SessionFile, SessionTurn
from backplane.errors import BackplaneError, ConfigError, StoreError
from backplane.process.locks import try_lock
from backplane.providers import reading
from backplane.receipts.journal import replace_file
from backplane.receipts.store import Store
from backplane.redact.secrets import MARK, Redactor

FILE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Size limit of a session's file: four times the longest order, which has to hold the history."""

FOLDER: Final = "sessions"


class Saved:
    """The file of a session that this process may write, until `close`."""

    def __init__(self, path: Path, lock: io.FileIO) -> None:
        # A file object: of a session that is dropped unclosed, the collector closes it and warns.
        self.path, self._lock = path, lock

    def write(self, file: SessionFile, secrets: Iterable[str] = ()) -> None:
        """Write the file anew: whole, or not at all.

        Raises:
            ConfigError: as `clean`; `config_invalid`, this object is closed, so another process may write the file.
            StoreError: `receipt_store_failed`, the disk failed, or the file would be over `FILE_BYTES_MAX`.
        """
        if self._lock.closed:
            raise ConfigError("config_invalid", "the session is closed", hint="resume it by its session_id")
        data = canonical.encode(clean(file, Redactor(secrets)))
        if len(data) > FILE_BYTES_MAX:
            fact = f"the session {file.id} would be over {FILE_BYTES_MAX} bytes"
            raise StoreError("receipt_store_failed", fact, hint="`clear_history`, or begin another session")
        replace_file(self.path, data, durable=True)

    def remove(self) -> None:
        """Remove the file; this process may write it again until `close`."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let other processes write the file; the lock of a session that was never written is removed."""
        if not self._lock.closed and not self.path.exists():
            self.path.with_suffix(".lock").unlink(missing_ok=True)
        self._lock.close()


def clean(file: SessionFile, redactor: Redactor) -> Any:
    """Return the file as JSON values without secrets; a signed block that this changes is left out and listed.

    Raises:
        ConfigError: `config_invalid`, a rule of the session's policy contains a secret, without which the rule would
            match nothing.
    """
    plain = msgspec.to_builtins(file)
    if redactor.json(plain["policy"])[1]:
        hint = "name the file or tool by a glob that leaves the secret out"
        raise ConfigError("config_invalid", "a rule of the session's policy has a secret in it", hint=hint)
    cleaned = redactor.json(plain)[0]
    messages = [message for turn in cleaned["turns"] for message in turn.get("messages", ())]
    if any(list(map(_drop_broken, messages))):
        cleaned["losses"] = list(dict.fromkeys((*cleaned["losses"], SIGNED)))
    return cleaned


SIGNED: Final = "dropped: signed thinking with a secret in it, as redaction would break its signature"
"""Loss of a thinking block; text and calls stay, and lose only their signature."""


def _drop_broken(message: dict[str, Any]) -> bool:
    """Remove the signatures of redacted text from a message; return True if there were any."""

    def is_broken(block: Any) -> bool:
        return bool(block.keys() & {"signature", "redacted"}) and MARK in msgspec.json.encode(block).decode()

    words = {name: message[name] for name in ("signature", "content") if name in message}
    thinking = message.get("thinking", ())
    broken = [block for block in (*thinking, *message.get("tool_calls", ()), words) if is_broken(block)]
    if thinking:
        message["thinking"] = [block for block in thinking if block not in broken]
    for block in broken:
        (message if block is words else block).pop("signature", None)
    return bool(broken)


def new_file(provider: str, **members: Any) -> SessionFile:
    """Return the file of a session without messages."""
    now = timestamp_at(time.time_ns())
    id = str(uuid.uuid4())
    return SessionFile(format="backplane.session", version=1, id=id, created_at=now, provider=provider, **members)


def create(home: Path, id: str) -> Saved:
    """Take a session's name for writing.

    Raises:
        ConfigError: `config_invalid`, another process has the session open, or the id is no UUID.
        StoreError: `receipt_store_failed`, the folder cannot be written.
    """
    path = path_of(home, id)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = io.FileIO(os.open(path.with_suffix(".lock"), flags, 0o600))
    except OSError as error:
        raise StoreError("receipt_store_failed", f"{path.parent}: {error.strerror}") from error
    if not try_lock(lock.fileno()):
        lock.close()
        fact = f"the session {id} is open in another process, or a second time in this one"
        raise ConfigError("config_invalid", fact, hint=f"backplane sessions fork {id}")
    return Saved(path, lock)


def is_open(home: Path, id: str) -> bool:
    """Return True if a process has the session open."""
    try:
        lock = os.open(path_of(home, id).with_suffix(".lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def path_of(home: Path, id: str) -> Path:
    """Return a session's file. Raises ConfigError: `config_invalid`, the id is no UUID."""
    try:
        return home / FOLDER / f"{uuid.UUID(id)}.json"
    except ValueError:
        fact = f"{id[:80]!r} is no id of a session"
        raise ConfigError("config_invalid", fact, hint="backplane sessions list") from None


def read(path: Path) -> SessionFile:
    """Read a session's file, wherever it lies.

    Raises:
        ConfigError: `config_invalid`, the file is missing, too long, of another version, or no session's.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError("config_invalid", f"{path}: {error.strerror}", hint="backplane sessions list") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError("config_invalid", f"{path} is over {FILE_BYTES_MAX} bytes")
    try:
        return msgspec.convert(canonical.decode(data), SessionFile)
    except (ValueError, RecursionError) as error:
        hint = "give a file that `sessions show --json` printed"
        raise ConfigError("config_invalid", f"{path} is no session: {error}"[:400], hint=hint) from error


def find(home: Path, name: str) -> str:
    """Return the id of the session whose id begins with `name`; `last` is the session that was written last.

    Raises:
        ConfigError: `config_invalid`, no session or several fit.
    """
    ids = [path.stem for path in _files(home)]
    found = ids[:1] if name == "last" else [id for id in ids if name and id.startswith(name.lower())]
    if len(found) != 1:
        fact = f"{len(found) or 'no'} sessions begin with {name[:80]!r}" if name != "last" else "no session is saved"
        raise ConfigError("config_invalid", fact, hint="backplane sessions list")
    return found[0]


def _files(home: Path) -> list[Path]:
    """Return the files of all sessions, the last written first."""
    folder = home / FOLDER
    found = [path for path in folder.glob("*.json") if not path.is_symlink()] if folder.is_dir() else []
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def listed(home: Path) -> Iterator[SessionFile | BackplaneError]:
    """Yield each saved session, the last written first; one that cannot be read as its error."""
    for path in _files(home):
        try:
            yield read(path)
        except BackplaneError as error:
            yield error


def changed_at(home: Path, file: SessionFile) -> str:
    """Return the time at which a session was last written."""
    try:
        return timestamp_at(path_of(home, file.id).stat().st_mtime_ns)
    except (OSError, ConfigError):  # Its file has another name.
        return file.created_at


def settled(file: SessionFile, store: Store) -> SessionFile:
    """Return the session with its unfinished turns completed from their receipts, as after a crash."""
    turns = [turn if turn.stop_reason is not None else _settled(turn, file, store) for turn in file.turns]
    return replace(file, turns=tuple(turns))


def _settled(turn: SessionTurn, file: SessionFile, store: Store) -> SessionTurn:
    try:
        receipt = store.load(turn.run_id or "")
    except BackplaneError:  # The run was never begun, or its receipt was pruned: only the user's message is known.
        return replace(turn, stop_reason="error")
    transcript = reading.Transcript()
    for event in receipt.trace:
        transcript.take(event)
    stop = reading.stop_of(receipt, transcript.stop)
    transcript.end(is_cut_off=stop in reading.CUT_OFF)
    return replace(
        turn,
        **reading.noted(receipt, stop, file),
        stop_reason=stop,
        messages=(*turn.messages, *transcript.messages()),
        conversation=transcript.conversation,
    )
