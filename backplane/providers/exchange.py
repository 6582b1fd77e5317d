"""Sessions from vendors' own stores, and into them: data alone is carried, and what is not is listed.

What comes in was said elsewhere: no call of it is run, no approval or policy of it counts, and its proofs go back to
nobody, as the account that they were made for is not known.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from backplane.agents.spec import neutral
from backplane.agents.store import Stored, read_stored, store_of
from backplane.contract.canonical import timestamp_at
from backplane.contract.conversation import (
    AgentMessage,
    Message,
    SessionFile,
    SessionTurn,
    UserMessage,
    unresolved,
)
from backplane.dialects import dialect
from backplane.dialects.pairing import paired
from backplane.errors import BackendError, ConfigError
from backplane.ir import Conversation
from backplane.providers import store
from backplane.providers.orders import without_proofs
from backplane.redact.secrets import Redactor

IMPORTED: Final = "import:"
"""Before the vendor's name, in place of a provider's, in turns that were no runs here; no backend is called so."""

_SECRET_NAMES: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS")
"""How the name of a variable ends whose value is taken for a secret: a program may have shown it to its model."""


def take_in(vendor: str, name: str, backend: str, environ: Mapping[str, str]) -> SessionFile:
    """Read a conversation from a vendor's store as a session, without secrets; blocking.

    Args:
        name: as `agents.store.read_stored` takes it.
        backend: the one that is to go on with it.

    Raises:
        ConfigError: `config_invalid`, there is none, or it cannot be read.
    """
    stored = read_stored(vendor, name, environ)
    file = SessionFile(
        format="backplane.session",
        version=1,
        id=str(uuid.uuid4()),
        created_at=timestamp_at(time.time_ns()),
        provider=backend,
        root=stored.root,
        turns=_turns(stored),
        losses=stored.losses,
    )
    secrets = [value for key, value in environ.items() if key.upper().endswith(_SECRET_NAMES)]
    return msgspec.convert(store.clean(file, Redactor(secrets)), SessionFile)


def _turns(stored: Stored) -> tuple[SessionTurn, ...]:
    """A turn for each of the user's messages, with what came of it."""
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


class Written(msgspec.Struct, frozen=True):
    """A session in a vendor's form."""

    id: str
    """The vendor's own, made for it."""
    data: bytes
    files: dict[Path, bytes]
    """Where its program looks for it, and what lies beside it; empty where its own program alone writes its store."""
    takes_in: str | None
    """The vendor's own command for a file, where there is one."""
    losses: tuple[str, ...]


def give_out(file: SessionFile, vendor: str, environ: Mapping[str, str], *, root: str) -> Written:
    """Write a session in the form that a vendor's program keeps; blocking only where it looks for the store.

    Args:
        root: the folder that the program is to go on in.

    Raises:
        ConfigError: `config_invalid`, there is no such vendor, or nothing was said.
    """
    theirs = store_of(vendor, "a conversation cannot be put into the store of {}")
    messages = tuple(message for turn in file.turns[file.cleared :] for message in turn.messages)
    if not messages:
        raise ConfigError("config_invalid", f"nothing was said in the session {file.id}", hint="`sessions show ID`")
    bare = tuple(
        msgspec.structs.replace(without_proofs(message), thinking=()) if isinstance(message, AgentMessage) else message
        for message in messages
    )
    losses = [] if bare == messages else ["dropped: thinking and proofs, which only go back to who made them"]
    losses += ["dropped: system_prompt, the program has its own"] if file.system_prompt else []
    repaired = paired(Conversation(dialect=theirs.dialect, messages=neutral(bare)))
    written = dialect(theirs.dialect).from_ir(repaired.value)
    lost = {loss.reason for loss in (*repaired.losses, *written.losses) if loss.is_material and loss.code != "required"}
    now, id = time.time_ns(), theirs.new_id()
    rows = theirs.write(written.value, id, root=root, now_ns=now)
    data = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    files = theirs.files_of(theirs.folder(environ), data, id, root=root, now_ns=now)
    said = (*losses, *(f"dropped: {reason}" for reason in sorted(lost)))
    return Written(id, data, files, theirs.takes_in, said)


def into_store(written: Written) -> None:
    """Put a session where its vendor's program looks for it; never over a file.

    Raises:
        BackendError: `capability_unsupported`, its program alone writes its store.
        ConfigError: see `put`.
    """
    if not written.files:
        fact = "its store is a database that its own program alone writes"
        raise BackendError("capability_unsupported", fact, hint=f"export to a FILE, then: {written.takes_in}")
    for path, data in reversed(written.files.items()):  # The conversation last: what it needs is there then.
        put(data, path)


def put(data: bytes, path: Path) -> None:
    """Write a new file, mode 0600; never over one that is there.

    Raises:
        ConfigError: `config_invalid`, there is one, or it cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        fact = f"{path}: {error.strerror}"
        hint = "name a file that is not there yet" if path.exists() else "name a file where this user can write"
        raise ConfigError("config_invalid", fact, hint=hint) from error
    with open(fd, "wb") as out:
        out.write(data)
