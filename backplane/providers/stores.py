"""Makes sessions from conversations that vendors' own programs keep on this machine.

A conversation is data: its calls are not run, its approvals and policy do not count, and its proofs are not sent to a
service, as the account that they were made for is unknown. The form of each vendor's records is known to
`agents.VENDOR.store` alone; a record without a reader is counted and listed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from backplane.agents import STORES
from backplane.contract.conversation import Message, SessionFile, SessionTurn, UserMessage, unresolved
from backplane.dialects.history import Talk
from backplane.errors import ConfigError
from backplane.providers import store
from backplane.redact.secrets import Redactor

FILE_BYTES_MAX: Final = 512 * 1024 * 1024
"""Most bytes of one conversation's file: Claude Code keeps each request beside what was said, some 150 KB a turn."""

LAST: Final = "last"

IMPORTED: Final = "import:"
"""Prefix of a vendor's name as the provider of an imported turn; no backend has such a name."""

_SECRET_NAMES: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS")
"""Ends of the names of variables whose values are redacted: the program may have shown them to its model."""


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, read from the store of its vendor's program."""

    vendor: str
    id: str
    """The vendor's id of the conversation."""
    root: str | None = None
    """Folder in which the conversation worked; None if unknown."""
    model: str | None = None
    messages: tuple[Message, ...] = ()
    losses: tuple[str, ...] = ()
    """Descriptions of the parts of the vendor's record that the messages lack."""


def import_stored(vendor: str, name: str, backend: str, environ: Mapping[str, str]) -> SessionFile:
    """Read a conversation from a vendor's store as a session, without secrets; blocking.

    Args:
        name: see `read_stored`.
        backend: name of the backend that continues it.

    Raises:
        ConfigError: `config_invalid`, the conversation is missing, or cannot be read.
    """
    stored = read_stored(vendor, name, environ)
    file = store.new_file(backend, root=stored.root, turns=_turns(stored), losses=stored.losses)
    secrets = [value for key, value in environ.items() if key.upper().endswith(_SECRET_NAMES)]
    return msgspec.convert(store.clean(file, Redactor(secrets)), SessionFile)


def _turns(stored: Stored) -> tuple[SessionTurn, ...]:
    """Return a turn for each of the user's messages."""
    groups: list[list[Message]] = []
    for message in stored.messages:
        if isinstance(message, UserMessage) or not groups:
            groups.append([])
        groups[-1].append(message)
    return tuple(
        SessionTurn(
            run_id=None,
            provider=IMPORTED + stored.vendor,
            model=stored.model,
            stop_reason="error" if unresolved(tuple(group)) else "end_turn",
            messages=tuple(group),
        )
        for group in groups
    )


def read_stored(vendor: str, name: str, environ: Mapping[str, str]) -> Stored:
    """Read a conversation from a vendor's store; blocking.

    Args:
        vendor: one of `STORES`.
        name: `last`, the beginning of an id, or the path of a file.

    Raises:
        ConfigError: `config_invalid`, the conversation is missing, too long, or of an unknown version.
    """
    if vendor not in STORES:
        fact = f"no store of {vendor[:40]!r} can be read"
        raise ConfigError("config_invalid", fact, hint=f"choose from: {', '.join(STORES)}")
    form, talk = importlib.import_module(f"backplane.agents.{vendor}.store"), Talk()
    path = _path(vendor, form, name, environ)
    head = form.read(_rows(path, talk), talk)
    if not isinstance(head.version, str | int) or not f"{head.version}.".startswith(form.VERSIONS):
        by = f"{form.PROGRAM} {str(head.version)[:40]}" if head.version is not None else "a program without a version"
        fact = f"{path} was written by {by}; only versions {form.VERSIONS}x can be read"
        raise ConfigError("config_invalid", fact, hint="use a backplane that knows this version")
    if not talk.messages:
        raise ConfigError("config_invalid", f"{path}: nothing was said in it", hint="name another conversation")
    id = head.id or path.stem
    return Stored(vendor=vendor, id=id, root=head.root, model=head.model, messages=talk.messages, losses=talk.losses)


def _path(vendor: str, form: Any, name: str, environ: Mapping[str, str]) -> Path:
    if name != LAST and (os.sep in name or Path(name).is_file()):
        return Path(name)
    variable, default, below = form.HOME
    home = Path(environ.get(variable) or Path(environ.get("HOME") or os.path.expanduser("~"), default), below)
    wanted = "" if name == LAST else name
    found = [one for one in home.glob(form.FILES) if one.is_file() and form.id_of(one).startswith(wanted)]
    if not found:
        fact = f"{home} has no conversation" + (f" that begins with {wanted[:80]!r}" if wanted else "")
        raise ConfigError("config_invalid", fact, hint=f"give the path of a conversation's file of {vendor}")
    return max(found, key=lambda one: one.stat().st_mtime_ns)


def _rows(path: Path, talk: Talk) -> Iterator[dict[str, Any]]:
    """Yield a file's JSON objects, one per line; any other line is listed as a loss.

    Raises:
        ConfigError: `config_invalid`, the file cannot be read or is too long.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > FILE_BYTES_MAX:
                raise ConfigError("config_invalid", f"{path} is over {FILE_BYTES_MAX} bytes", hint="name another file")
            for line in file:
                try:
                    row = msgspec.json.decode(line)
                except (ValueError, RecursionError):
                    row = None
                if isinstance(row, dict):
                    yield row
                elif line.strip():
                    talk.drop("lines that are no JSON object")
    except OSError as error:
        raise ConfigError("config_invalid", f"{path}: {error.strerror}", hint="name the file itself") from error
