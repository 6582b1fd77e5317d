"""Writes a client's request in the dialect of a service, and names what the translation loses.

An agent sends its whole history with each request. The translation of the history is kept, under a hash of the history,
and only the new messages are translated and appended. A history is cut only before a message of the model, where every
call has its result. If the two parts might depend on each other, the whole request is translated, so the result is
always the same as without the kept translation.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import dialect
from backplane.dialects.common import kind_of, spelled_at
from backplane.dialects.diff import ABSENT, REASONS, Difference, code_of, differences, is_named
from backplane.dialects.ir import Conversation, Loss, Message, Text
from backplane.dialects.pairing import is_paired, paired
from backplane.errors import TranslationError
from backplane.gateway.customs import functions_only
from backplane.gateway.fronts import AUGMENT, Front
from backplane.upstream.arguments import sendable
from backplane.upstream.endpoint import PROTOCOLS
from backplane.upstream.ladder import prepare

BYTES_MAX: Final = 32 * 1024 * 1024
"""Maximum bytes of all kept histories, as JSON; the one that was used longest ago is dropped first."""
ROWS_MAX: Final = 1_024
"""Maximum kept histories; a conversation has two or three."""
ELEMENTS_MIN: Final = 4
"""Minimum messages of a history that is worth keeping."""

OURS: Final = frozenset({"/model", "/stream", "/stream_options", "/previous_response_id", "/store"})
"""Members of a request that the gateway itself sets or applies; a change in them is no loss."""
BILLING: Final = "x-anthropic-billing-header:"
"""Prefix of a system text that Claude Code writes for its own service, and changes with each request."""

LISTS: Final = {
    "openai": "messages", "kimi": "messages", "copilot": "messages", "claude": "messages", "codex": "input",
    "gemini": "contents",
}  # fmt: skip
"""Dialect → member with the list of messages."""

_ONCE: Final = frozenset({"identity", "tool_field"})
"""Codes of losses that a request names only once, at the first place."""

_encode: Final = msgspec.json.Encoder().encode


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A request's way: the client's interface, and the service's dialect, protocol and model."""

    front: Front
    dialect: str
    """The service's dialect."""
    protocol: str
    model: str
    stream: bool


class WrittenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the dialect of a service."""

    request: dict[str, Any]
    losses: tuple[Loss, ...]
    """First the losses of the request as a whole, then those of each message, in order."""
    customs: frozenset[str]
    """Names of custom tools that are sent as functions."""
    is_local: bool = False
    """True if further messages at the end would not change these losses."""
    is_paired: bool = False
    """True if every call has its result, in the same order."""
    has_mended: bool = False
    """True if arguments or names of calls were corrected."""


class _Move(msgspec.Struct, frozen=True):
    """Changes pointers into a part of a request to pointers into the whole request.

    The part has the request's first messages, the lead, and later ones; those between them are left out.
    """

    name: str
    """Member with the list of messages."""
    lead: int = 0
    """Number of messages in the lead."""
    by: int = 0
    """Number of messages left out; 0 for a whole request."""

    def path(self, at: str) -> str:
        """Return the pointer into the whole request for a pointer into the part."""
        place = _place(at, self.name)
        return at if place < self.lead or not self.by else _moved(at, self.name, place, self.by)


def _place(at: str, name: str) -> int:
    """Return the index of the message that a pointer points to or into; -1 if there is none."""
    begin = f"/{name}/"
    word = at[len(begin) :].partition("/")[0] if at.startswith(begin) else ""
    return int(word) if word.isdecimal() else -1


def _moved(at: str, name: str, place: int, by: int) -> str:
    return f"/{name}/{place + by}{at[len(f'/{name}/{place}') :]}"


def write(route: Route, document: dict[str, Any], move: _Move | None = None) -> WrittenRequest:
    """Translate a request without use of kept translations.

    Args:
        document: the client's request, or a part of it.
        move: the part's place in the whole request; None for a whole one.

    Raises:
        TranslationError: the translation would change its meaning.
    """
    front, writer = route.front, dialect(route.dialect)
    move = move or _Move(LISTS.get(front.dialect, ""))
    read = front.read(document)
    plain, customs = functions_only(read.value if not move.by else _with_places(read.value, move))
    conversation, mended = sendable(plain, writer.limits.tool_name)
    repaired = paired(conversation, ids_optional=PROTOCOLS[route.protocol].ids_optional)
    options = {name: value for name, value in repaired.value.options.items() if name != "stream"}
    if route.stream and PROTOCOLS[route.protocol].path:
        options["stream"] = True
    changed = msgspec.structs.replace(
        repaired.value, model=route.model, options=options,
        messages=tuple(filter(None, map(without_billing, repaired.value.messages))),
    )  # fmt: skip
    written = writer.from_ir(changed)
    request, added = prepare(route.protocol, written.value, parallel=True)
    before = (msgspec.structs.replace(loss, path=move.path(loss.path)) for loss in read.losses)
    named = (*before, *mended, *repaired.losses, *written.losses, *added)
    is_local = False
    if front is not AUGMENT:  # This dialect cannot be written, so its requests cannot be compared.
        rest, is_local = _unnamed(document, request, dialect(front.dialect), writer, named, move)
        named += rest
    return WrittenRequest(
        request=request, losses=_in_order([one for one in named if one.is_material and one.path not in OURS], route),
        customs=customs, is_local=is_local, is_paired=is_paired(conversation.messages), has_mended=bool(mended),
    )  # fmt: skip


def _in_order(losses: Sequence[Loss], route: Route) -> tuple[Loss, ...]:
    source, target = LISTS.get(route.front.dialect, ""), LISTS[route.dialect]
    return tuple(
        sorted(losses, key=lambda one: (_place(one.path, source), _place(one.path, target) if target != source else 0))
    )


def without_billing(message: Message) -> Message | None:
    """Return a message without the texts that begin with `BILLING`; None if it has nothing else."""
    if message.role != "system":
        return message
    parts = tuple(part for part in message.parts if not (isinstance(part, Text) and part.text.startswith(BILLING)))
    if len(parts) == len(message.parts):
        return message
    return msgspec.structs.replace(message, parts=parts) if parts else None


def _is_billing(block: Json) -> bool:
    return isinstance(block, dict) and str(block.get("text")).startswith(BILLING)


def _with_places(conversation: Conversation, move: _Move) -> Conversation:
    """Return a conversation with pointers into the whole request."""

    def of(node: Any) -> Any:
        changes: dict[str, Any] = {"at": move.path(node.at)}
        for name in ("parts", "content", "citations"):
            inner = getattr(node, name, ())
            if inner and isinstance(inner, tuple):
                changes[name] = tuple(map(of, inner))
        return msgspec.structs.replace(node, **changes)

    return msgspec.structs.replace(conversation, messages=tuple(map(of, conversation.messages)))


# Losses found by translating back -------------------------------------------------------------------------------------


def _unnamed(
    document: dict[str, Any], request: dict[str, Any], reader: Any, writer: Any, named: Sequence[Loss], move: _Move
) -> tuple[tuple[Loss, ...], bool]:
    """Translate a request back, and return a loss for each value that differs, unless `named` has a loss for it.

    Returns:
        The losses, and True if further messages at the end would not change them.
    """
    back = reader.from_ir(writer.to_ir(request).value).value
    before, after, name = reader.normal(document), reader.normal(back), move.name
    walked = _walked(before.get(name), after.get(name), name) if isinstance(after, dict) else None
    found, is_local = walked or ([], False)
    if walked is None:
        found = list(differences(before, after))
    else:
        head, rest = ({key: value for key, value in one.items() if key != name} for one in (before, after))
        found = [*differences(head, rest), *found]
    paths = {loss.path for loss in named}
    # A loss for an added value does not cover a value that is missing at the same path.
    missing = {loss.path for loss in named if loss.kind != "synthesised"}
    out = []
    for place, how in found:
        at = move.path(spelled_at(place, document, reader.aliases))
        if not is_named(at, paths if how == "synthesised" else missing):
            code = "required" if how == "synthesised" else code_of(at, how)
            out.append(Loss(path=at, dialect=reader.NAME, target=writer.NAME, kind=how, code=code, reason=REASONS[how]))
    return tuple(out), is_local


def _walked(before: Json, after: Json, name: str) -> tuple[list[Difference], bool] | None:
    """Compare two lists of messages; a message of the first may be missing in the second.

    Returns:
        The differences, and False if the second list ended before the first, as further messages could then change
        the comparison. None if the second list has a message that the first does not have.
    """
    if not isinstance(before, list) or not isinstance(after, list):
        return None
    found: list[Difference] = []
    there, is_local = 0, True
    for place, one in enumerate(before):
        other = after[there] if there < len(after) else ABSENT
        following = before[place + 1] if place + 1 < len(before) else ABSENT
        is_dropped = other is ABSENT or _sort(one) != _sort(other) or (one != other and following == other)
        if one != other:
            found += differences(one, ABSENT if is_dropped else other, f"/{name}/{place}")
        there, is_local = there + (not is_dropped), is_local and other is not ABSENT
    return (found, is_local) if there == len(after) else None


def _sort(value: Json) -> tuple[Any, Any]:
    return (value.get("role"), value.get("type")) if isinstance(value, dict) else (None, None)


# Places to cut a history ----------------------------------------------------------------------------------------------


def look(name: str, one: Json) -> tuple[str, list[Any], list[Any], bool]:
    """Return the speaker of a message, and the ids of its calls and results.

    Args:
        name: member with the list of messages.
        one: the message.

    Returns:
        The speaker (`model`, `user`, or `result` for results of tools; empty for any other), the ids of calls, the ids
        of results, and True if the message has only results.
    """
    if not isinstance(one, dict):
        return "", [], [], False
    role = one.get("role")
    if name == "input":
        kind = kind_of(one)
        if kind in ("function_call", "custom_tool_call"):
            return "model", [one.get("call_id")], [], False
        if kind in ("function_call_output", "custom_tool_call_output"):
            return "result", [], [one.get("call_id")], True
        if kind == "reasoning":
            return "model", [], [], False
        return (_SPEAKERS.get(role, "") if kind in (None, "message") else ""), [], [], False
    if role == "tool":
        return "result", [], [one.get("tool_call_id")], True
    calls, results = [_id(call) for call in one.get("tool_calls") or ()], []
    blocks = one.get("parts") if name == "contents" else one.get("content")
    blocks = blocks if isinstance(blocks, list) else []
    for block in blocks:
        kind = kind_of(block)
        if kind == "tool_use":
            calls.append(block.get("id"))
        elif kind == "tool_result":
            results.append(block.get("tool_use_id"))
        elif kind is None and isinstance(block, dict):
            if "functionCall" in block:
                calls.append(_id(block["functionCall"]))
            elif "functionResponse" in block:
                results.append(_id(block["functionResponse"]))
            elif "function_call" in block or "function_response" in block:
                return "", [], [], False
    speaker = _SPEAKERS.get(role, "") if one.get("function_call") is None else ""
    return ("result" if results and speaker == "user" else speaker), calls, results, len(results) == len(blocks)


_SPEAKERS: Final[dict[Any, str]] = {"user": "user", "assistant": "model", "model": "model"}


def _id(value: Json) -> Any:
    return value.get("id") if isinstance(value, dict) else None


class _Cuts(msgspec.Struct, frozen=True):
    """The places at which a history can be cut."""

    places: list[int]
    """Indexes of the messages before which a history can be cut, in order; the last one is the number of messages.

    The first one is that of the model's first message.
    """
    is_pure: bool
    """True if messages with results of tools have nothing else."""


def cuts_of(name: str, elements: list[Any]) -> _Cuts | None:
    """Return where a history can be cut; None if it has no such place, or its parts might depend on each other."""
    places: list[int] = []
    waiting: set[Any] = set()
    seen: set[Any] = set()
    before, is_pure = "", True
    for place, one in enumerate(elements):
        speaker, calls, results, has_results_only = look(name, one)
        if not speaker or (not place and speaker == "model"):
            if places or speaker == "model":
                return None
            before = "user"
            continue
        if speaker == "model" and before != "model" and not waiting:
            places.append(place)
        for id in calls:
            if not isinstance(id, str) or not id or id in seen:
                return None
            seen.add(id)
            waiting.add(id)
        for id in results:
            if id not in waiting:
                return None
            waiting.remove(id)
        is_pure = is_pure and (speaker != "result" or has_results_only)
        before = speaker
    if not places or before == "model" or waiting:
        return None
    return _Cuts([*places, len(elements)], is_pure)


# The store ------------------------------------------------------------------------------------------------------------


class _Row(msgspec.Struct):
    written: WrittenRequest | None
    """The translation; None if the history was only a part of a request, and is not translated by itself yet."""
    size: int


class Translations:
    """Writes requests, and keeps the translations of their histories, bounded in number and size."""

    def __init__(self) -> None:
        self._rows: OrderedDict[bytes, _Row] = OrderedDict()
        self._size = 0

    def write(self, route: Route, owner: str, document: dict[str, Any]) -> WrittenRequest:
        """Return the translation of a request; the part of its history that is known is not translated again.

        Args:
            owner: the account, which keeps the histories of clients and services apart.
            document: the client's request.

        Raises:
            TranslationError: the translation would change the request's meaning.
        """
        name = LISTS.get(route.front.dialect, "")
        elements = document.get(name)
        cuts = None
        if isinstance(elements, list) and len(elements) >= ELEMENTS_MIN and route.dialect in LISTS:
            cuts = cuts_of(name, elements)
        if cuts is None or not isinstance(elements, list):
            return write(route, document)
        places = cuts.places
        keys, sizes = _hashes(route, owner, name, document, places)
        known = next((at for at in reversed(range(1, len(places))) if keys[at] in self._rows), None)
        if known is not None:
            found = self._continued(route, document, cuts, keys, sizes, known)
            if found is not None:
                return found
        found = write(route, document)
        self._keep(keys[-1], found, sizes[-1])
        if len(places) > 2:
            self._keep(keys[-2], None, 0)
        return found

    def _continued(
        self, route: Route, document: dict[str, Any], cuts: _Cuts, keys: list[bytes], sizes: list[int], known: int
    ) -> WrittenRequest | None:
        """Return a known translation with the new messages; None if the request has to be translated as a whole.

        Args:
            keys, sizes: hash and size of the request up to each place in `cuts`.
            known: index of the last place whose translation is known.
        """
        name, places = LISTS[route.front.dialect], cuts.places
        try:
            lead = self._of(route, document, places[0], keys[0], sizes[0])
            found = self._of(route, document, places[known], keys[known], sizes[known])
            # The last turn is translated by itself, as some clients change it in their next request.
            for at in sorted({max(known, len(places) - 2), len(places) - 1} - {known}):
                part = {**document, name: document[name][: places[0]] + document[name][places[known] : places[at]]}
                move = _Move(name, places[0], places[known] - places[0])
                joined = _joined(route, lead, found, write(route, part, move), places[0], is_pure=cuts.is_pure)
                if joined is None:
                    return None
                found, known = joined, at
                self._keep(keys[at], found, sizes[at])
        except TranslationError:
            return None
        return found

    def _of(self, route: Route, document: dict[str, Any], end: int, key: bytes, size: int) -> WrittenRequest:
        """Return the translation of a request's messages before the index `end`, from the store if it is there."""
        row = self._rows.get(key)
        if row is not None and row.written is not None:
            self._rows.move_to_end(key)
            return row.written
        name = LISTS[route.front.dialect]
        found = write(route, {**document, name: document[name][:end]})
        self._keep(key, found, size)
        return found

    def _keep(self, key: bytes, written: WrittenRequest | None, size: int) -> None:
        before = self._rows.pop(key, None)
        if before is not None:
            self._size -= before.size
            if written is None:
                written, size = before.written, before.size
        self._rows[key] = _Row(written, size)
        self._size += size
        while self._size > BYTES_MAX or len(self._rows) > ROWS_MAX:
            _, oldest = self._rows.popitem(last=False)
            self._size -= oldest.size


def _hashes(
    route: Route, owner: str, name: str, document: dict[str, Any], places: list[int]
) -> tuple[list[bytes], list[int]]:
    """Return the hashes and the sizes (bytes of JSON) of the request up to each place."""
    head = {key: value for key, value in document.items() if key != name}
    if isinstance(head.get("system"), list):
        head["system"] = [BILLING if _is_billing(block) else block for block in head["system"]]  # It is not sent.
    told = (route.front.name, route.dialect, route.protocol, route.model, route.stream, owner, head)
    total, size = hashlib.blake2b(_encode(told), digest_size=24), 0
    keys, sizes, start = [], [], 0
    for place in places:
        data = _encode(document[name][start:place])
        total.update(data)
        size, start = size + len(data), place
        keys.append(total.digest())
        sizes.append(size)
    return keys, sizes


def _joined(
    route: Route, lead: WrittenRequest, begin: WrittenRequest, part: WrittenRequest, lead_size: int, *, is_pure: bool
) -> WrittenRequest | None:
    """Return a known translation with a translated part appended; None if the two might depend on each other.

    Args:
        lead: the translation of the messages that both begin with.
        begin: the known translation.
        part: the translation of the lead and the new messages.
        lead_size: number of messages in the lead, in the client's request.
        is_pure: as in `_Cuts`.
    """
    name, source = LISTS[route.dialect], LISTS[route.front.dialect]
    first, old, new = (one.request.get(name) for one in (lead, begin, part))
    if not (isinstance(first, list) and isinstance(old, list) and isinstance(new, list)):
        return None
    size = len(first)
    own = [one for one in part.losses if _place(one.path, source) >= lead_size or _is_behind(one, name, source, size)]
    is_free = (
        lead.is_local and begin.is_local and part.is_local
        and (begin.is_paired == part.is_paired or is_pure)
        and not part.has_mended
        and part.customs == begin.customs
        and new[:size] == first and old[:size] == first and len(new) > size
        and look(name, new[size])[0] == "model" and look(name, old[-1])[0] != "model"
        and _head(part.request, name) == _head(begin.request, name)
        and [one for one in part.losses if one not in own] == list(lead.losses)
        and not any(one.code in _ONCE for one in own)
    )  # fmt: skip
    if not is_free:
        return None
    by = len(old) - size
    behind = [
        msgspec.structs.replace(one, path=_moved(one.path, name, _place(one.path, name), by))
        if _is_behind(one, name, source, size) else one
        for one in own
    ]  # fmt: skip
    return msgspec.structs.replace(
        begin, request={**begin.request, name: [*old, *new[size:]]},
        losses=_in_order([*begin.losses, *behind], route), is_paired=begin.is_paired and part.is_paired,
    )  # fmt: skip


def _is_behind(loss: Loss, name: str, source: str, size: int) -> bool:
    """Return True if a loss points into the service's request, at or after the message with the index `size`."""
    return name != source and _place(loss.path, name) >= size


def _head(request: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in request.items() if key != name]
