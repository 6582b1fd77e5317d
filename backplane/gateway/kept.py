"""Keeps values in memory between two requests of a client, within bounds: the oldest goes first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

import msgspec

from backplane.contract.canonical import Json
from backplane.gateway.frames import encode
from backplane.upstream.endpoint import Endpoint

BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of all that one store keeps. A turn's thinking has some 10 KB, a conversation some 100 KB."""

ITEM_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of one item; a larger one is not kept."""

K = TypeVar("K")
V = TypeVar("V")


class KeptStore(Generic[K, V]):
    """Values with their sizes in bytes."""

    def __init__(self) -> None:
        self._rows: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._rows)

    def keep(self, key: K, value: V, size: int) -> None:
        """Keep a value, in place of an older one with this key; a too large one is not kept."""
        self.drop(key)
        if size <= ITEM_BYTES_MAX:
            self._rows[key] = (value, size)
            self.size += size
        while self.size > BYTES_MAX:
            self.drop(next(iter(self._rows)))

    def find(self, key: K) -> V | None:
        """Return a value, which is then the newest."""
        if key not in self._rows:
            return None
        self._rows.move_to_end(key)
        return self._rows[key][0]

    def drop(self, key: K) -> None:
        """Forget a value, if it is there."""
        self.size -= self._rows.pop(key, (None, 0))[1]


class KeptResponse(msgspec.Struct, frozen=True):
    """An answered request of the interface Responses, which a later request may continue."""

    response: bytes
    """The answer, as the client got it."""
    items: bytes
    """The conversation with this answer, as a list of items."""
    account: str
    """The service, key and client that have it; see `Exchange`."""
    endpoint: Endpoint | None
    """The service, if it may have kept the answer, too."""

    def conversation(self, account: str, *, is_own: bool) -> list[Json]:
        """Return the items for a service that does not know this answer.

        Args:
            account: the service, key and client that get them.
            is_own: the service speaks Responses, so it would look for proofs of its own.
        """
        items: list[Json] = msgspec.json.decode(self.items)
        if is_own and account == self.account:
            return items
        return [_as_input(item) for item in items if not (is_own and _is_reasoning(item))]


def _is_reasoning(item: Json) -> bool:
    return isinstance(item, dict) and item.get("type") == "reasoning"


def _as_input(item: Json) -> Json:
    """Return an item without what only an answer has: a service would look up the id."""
    if not isinstance(item, dict):
        return item
    return {name: value for name, value in item.items() if name not in ("id", "status")}


Responses = KeptStore[tuple[str, str], KeptResponse]
"""The store of answers: client and id → answer."""


def keep_response(
    store: Responses, owner: str, asked: Json, answer: dict[str, Json], account: str, endpoint: Endpoint | None
) -> None:
    """Keep an answer.

    Args:
        asked: the input of its request, with what came before.
    """
    output = answer.get("output")
    items = encode([*items_of(asked), *(output if isinstance(output, list) else [])])
    data = encode(answer)
    row = KeptResponse(response=data, items=items, account=account, endpoint=endpoint)
    store.keep((owner, str(answer.get("id"))), row, len(data) + len(items))


def items_of(given: Json) -> list[Json]:
    """Return the input of a request as a list of items."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return list(given) if isinstance(given, list) else []
