"""Conversations that vendors' own programs keep on this machine, read as data: nothing in them is run.

The form of each vendor's records is known to `agents.VENDOR.store` alone; a record without a reader is counted and
listed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from backplane.agents import STORES
from backplane.contract.conversation import Message
from backplane.dialects.history import Talk
from backplane.errors import ConfigError

FILE_BYTES_MAX: Final = 512 * 1024 * 1024
"""Most bytes of one conversation's file: Claude Code keeps each request beside what was said, some 150 KB a turn."""

LAST: Final = "last"


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as its vendor's program kept it."""

    vendor: str
    id: str
    """Id by the vendor."""
    root: str | None = None
    """Folder that the conversation worked on."""
    model: str | None = None
    messages: tuple[Message, ...] = ()
    losses: tuple[str, ...] = ()
    """What is in the record and not among the messages."""


def read_stored(vendor: str, name: str, environ: Mapping[str, str]) -> Stored:
    """Read a conversation from a vendor's store; blocking.

    Args:
        vendor: one of `STORES`.
        name: `last`, the beginning of an id, or the path of a file, of a store, or of a folder in it.

    Raises:
        ConfigError: `config_invalid`, the conversation is missing, too long, or of an unknown version.
    """
    if vendor not in STORES:
        fact = f"no store of {vendor[:40]!r} can be read"
        raise ConfigError("config_invalid", fact, hint=f"choose from: {', '.join(STORES)}")
    store, talk = importlib.import_module(f"backplane.agents.{vendor}.store"), Talk()
    path = _path(vendor, store, name, environ)
    head = store.read(_rows(path, talk), talk)
    _require_known(path, store, head.version)
    if not talk.messages:
        raise ConfigError("config_invalid", f"{path}: nothing was said in it", hint="name another conversation")
    id = head.id or path.stem
    return Stored(vendor=vendor, id=id, root=head.root, model=head.model, messages=talk.messages, losses=talk.losses)


def _path(vendor: str, store: Any, name: str, environ: Mapping[str, str]) -> Path:
    path = Path(name)
    if name != LAST and not path.is_dir() and (os.sep in name or path.is_file()):
        return path
    variable, default, below = store.HOME
    own = Path(environ.get(variable) or Path(environ.get("HOME") or os.path.expanduser("~"), default), below)
    home = path if name != LAST and path.is_dir() else own
    wanted = "" if name == LAST or home == path else name
    # A named folder may be the one around the store.
    places = [*home.glob(store.FILES)] or [*home.glob(f"{below}/{store.FILES}")]
    found = [one for one in places if one.is_file() and store.id_of(one).startswith(wanted)]
    if not found:
        fact = f"{home} has no conversation" + (f" that begins with {wanted[:80]!r}" if wanted else "")
        hint = f"give the path of a conversation's file; {vendor} keeps them in {own} here"
        raise ConfigError("config_invalid", fact, hint=hint)
    return max(found, key=lambda one: one.stat().st_mtime_ns)


def _rows(path: Path, talk: Talk) -> Iterator[dict[str, Any]]:
    """Yield a file's JSON objects, a line each; any other line is listed as left out.

    Raises:
        ConfigError: `config_invalid`, the file cannot be read or is too long.
    """
    try:
        size, is_file = path.stat().st_size, path.is_file()
        if not is_file or size > FILE_BYTES_MAX:
            fact = f"{path} is over {FILE_BYTES_MAX} bytes" if is_file else f"{path} is no file"
            raise ConfigError("config_invalid", fact, hint="name a conversation's file")
        with path.open("rb") as file:
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


def _require_known(path: Path, store: Any, version: object) -> None:
    """Refuse a conversation of a version that its reader was not tried with. Raises ConfigError: `config_invalid`."""
    if not isinstance(version, str | int) or not f"{version}.".startswith(store.VERSIONS):
        by = f"{store.PROGRAM} {str(version)[:40]}" if version is not None else "a program without a version"
        fact = f"{path} was written by {by}; only versions {store.VERSIONS}x can be read"
        raise ConfigError("config_invalid", fact, hint="use a backplane that knows this version")
