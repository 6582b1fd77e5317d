"""Sessions from vendors' own stores: only data is carried, and what is left out is listed.

An imported conversation is data: its calls are not run, its approvals and policy do not count, and its proofs are not
sent to a service, as the account that they were made for is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from backplane.contract.conversation import Message, SessionFile, SessionTurn, UserMessage, unresolved
from backplane.providers import store
from backplane.providers.stores import Stored, read_stored
from backplane.redact.secrets import Redactor

IMPORTED: Final = "import:"
"""Before the vendor's name, in place of a provider's, in turns that were no runs here; no backend is called so."""

_SECRET_NAMES: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS")
"""Ends of variables' names whose values are redacted, as a program may have shown them to its model."""


def take_in(vendor: str, name: str, backend: str, environ: Mapping[str, str]) -> SessionFile:
    """Read a conversation from a vendor's store as a session, without secrets; blocking.

    Args:
        name: as `stores.read_stored` takes it.
        backend: the one that is to go on with it.

    Raises:
        ConfigError: `config_invalid`, there is none, or it cannot be read.
    """
    stored = read_stored(vendor, name, environ)
    file = store.new_file(backend, root=stored.root, turns=_turns(stored), losses=stored.losses)
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
