"""Keeps values in memory between two requests of a client; the one that was used longest ago is dropped first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

import msgspec

from backplane.contract.canonical import Json
from backplane.gateway.frames import encode
from backplane.upstream.endpoint import Endpoint

BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum bytes of all values in one store. A turn's thinking has about 10 KB, a conversation about 100 KB."""

ITEM_BYTES_MAX: Final = 4 * 1024 * 1024
"""Maximum bytes of one value; a larger one is not kept."""

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
        """Keep a value of `size` bytes, in place of an earlier one with the same key, unless it is too large."""
        self.drop(key)
        if size <= ITEM_BYTES_MAX:
            self._rows[key] = (value, size)
            self.size += size
        while self.size > BYTES_MAX:
            self.drop(next(iter(self._rows)))

    def find(self, key: K) -> V | None:
        """Return a value, and note that it was used; None if it is not kept."""
        if key not in self._rows:
            return None
        self._rows.move_to_end(key)
        return self._rows[key][0]

    def drop(self, key: K) -> None:
        """Drop a value, if it is kept."""
        self.size -= self._rows.pop(key, (None, 0))[1]


class KeptResponse(msgspec.Struct, frozen=True):
    """An answer of the Responses interface, which a later request may continue."""

    response: bytes
    """The answer, as JSON, as the client got it."""
    items: bytes
    """The conversation up to and with this answer, as a JSON list of items."""
    account: str
    """The client, service and key that it belongs to, as `Exchange` names them."""
    endpoint: Endpoint | None
    """The service, which may have kept the answer, too; None if it speaks another dialect."""

    def conversation(self, account: str, *, is_own: bool) -> list[Json]:
        """Return the conversation's items for a service that does not have this answer.

        Args:
            account: the client, service and key that the items are for.
            is_own: True if the service speaks Responses: for the same account the items stay as they are, for another
                one reasoning is left out, as its service cannot decrypt it. In all other cases, ids are left out.
        """
        items: list[Json] = msgspec.json.decode(self.items)
        if is_own and account == self.account:
            return items
        return [_as_input(item) for item in items if not (is_own and _is_reasoning(item))]


def _is_reasoning(item: Json) -> bool:
    return isinstance(item, dict) and item.get("type") == "reasoning"


def _as_input(item: Json) -> Json:
    """Return an item without the members that only an answer has; a service would look up its id."""
    if not isinstance(item, dict):
        return item
    return {name: value for name, value in item.items() if name not in ("id", "status")}


Responses = KeptStore[tuple[str, str], KeptResponse]
"""The store of answers: name of the client and id of the answer → answer."""


def keep_response(
    store: Responses, owner: str, asked: Json, answer: dict[str, Json], account: str, endpoint: Endpoint | None
) -> None:
    """Keep an answer of a client.

    Args:
        owner: name of the client.
        asked: the input of its request, with the conversation before it.
        account, endpoint: as in `KeptResponse`.
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
