"""Nodes of Augment's wire, read: what a user's turn carries and what an answer was made of.

Members come in snake_case and camelCase and under several names; whoever reads takes them through `Members`.
What a target has no word for is carried as labelled text and named as a loss. Pairing is `pairing`'s.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from backplane.contract.canonical import Json
from backplane.dialects import codec
from backplane.dialects.codec import Ledger, escape, json_text, read_arguments
from backplane.ir import Ext, Media, Opaque, Part, Text, Thinking, ToolResult, ToolUse

NAME: Final = "augment"

TEXT, TOOL_RESULT, IMAGE, IMAGE_ID, IDE_STATE, EDIT_EVENTS, CHECKPOINT_REF, CHANGE_PERSONALITY = range(8)
FILE, FILE_ID, HISTORY_SUMMARY = 8, 9, 10
"""Types of the nodes of a request."""

RAW_RESPONSE, MAIN_TEXT_FINISHED, TOOL_USE, TOOL_USE_START, THINKING, TOKEN_USAGE = 0, 2, 5, 7, 8, 10
"""Types of the nodes of an answer that we read or write."""

REQUEST_BODIES: Final[dict[int, str]] = {
    TEXT: "text_node",
    TOOL_RESULT: "tool_result_node",
    IMAGE: "image_node",
    IMAGE_ID: "image_id_node",
    IDE_STATE: "ide_state_node",
    EDIT_EVENTS: "edit_events_node",
    CHECKPOINT_REF: "checkpoint_ref_node",
    CHANGE_PERSONALITY: "change_personality_node",
    FILE: "file_node",
    FILE_ID: "file_id_node",
    HISTORY_SUMMARY: "history_summary_node",
}
"""Type → the member that holds the node's body."""

IMAGE_TYPES: Final[dict[int, str]] = {1: "image/png", 2: "image/jpeg", 3: "image/gif", 4: "image/webp"}
IMAGE_HEADS: Final[dict[str, str]] = {
    "iVBORw0KGgo": "image/png",
    "/9j/": "image/jpeg",
    "R0lGOD": "image/gif",
    "UklGR": "image/webp",
}
"""How the base64 of each begins, for nodes that do not say their format."""

PLACEHOLDER_CHARS_MAX: Final = 16
"""A message of so many hyphens at most is what a client sends that has only nodes to say."""

K = TypeVar("K")


def is_said(text: str) -> bool:
    """Whether a text says something: it is not blank and no placeholder."""
    bare = text.strip()
    return bool(bare) and not (len(bare) <= PLACEHOLDER_CHARS_MAX and not bare.strip("-"))


def camel(name: str) -> str:
    """Spell a member's name in camelCase."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


class Members:
    """An object whose members are taken under any of their names; what is not taken remains.

    Args:
        value: the object.
        at: JSON pointer to it.

    Raises:
        TranslationError: `dialect_mapping_failed`, it is no object.
    """

    def __init__(self, value: Json, at: str, ledger: Ledger) -> None:
        self.at = at
        self.ledger = ledger
        self.left = codec.Members(value, at).rest

    def each(self, kind: type[K], *names: str) -> Iterator[tuple[str, K]]:
        """Take every member of this type under these names, with its pointer; null and empty ones are nothing."""
        for spelled in dict.fromkeys(word for name in names for word in (name, camel(name))):
            value = self.left.get(spelled)
            if type(value) is kind:
                del self.left[spelled]
                if value:
                    yield f"{self.at}/{escape(spelled)}", value

    def take(self, kind: type[K], *names: str) -> K | None:
        """Take the first that says something; another that says something else is a loss."""
        found: K | None = None
        for at, value in self.each(kind, *names):
            if found is None:
                found = value
            elif value != found:
                self.ledger.drop(at, "extension", f"said already under another name of {names[0]}", value)
        return found

    def text(self, *names: str) -> str:
        return self.take(str, *names) or ""

    def flag(self, name: str) -> bool | None:
        """Take a boolean; None when it is not said."""
        for spelled in (name, camel(name)):
            if type(self.left.get(spelled)) is bool:
                return bool(self.left.pop(spelled))
        return None

    def number(self, name: str) -> int | None:
        """Take an integer, also one written as text."""
        for spelled in (name, camel(name)):
            value = self.left.get(spelled)
            if type(value) is int or (type(value) is str and value.isdecimal()):
                del self.left[spelled]
                return int(value)
        return None

    def ext(self) -> Ext:
        """Return what was not taken as the extension slot of a node."""
        rest = self.rest()
        return {NAME: rest} if rest else {}

    def rest(self) -> dict[str, Any]:
        """What was not taken and says something, as entries of an extension slot."""
        return {escape(key): value for key, value in self.left.items() if value not in (None, "", [], {})}


def listed(members: Members, *names: str) -> Iterator[tuple[str, Json]]:
    """Yield the elements of all lists under these names; one that stands in two of them is one."""
    seen: list[Json] = []
    for at, values in members.each(list, *names):
        before = len(seen)
        for place, value in enumerate(values):
            if value not in seen[:before]:
                seen.append(value)
                yield f"{at}/{place}", value


# Nodes of a request ---------------------------------------------------------------------------------------------------


def node_kind(node: Json) -> int | None:
    """Return a node's type, None when it says none."""
    if type(node) is not dict:
        return None
    found = node.get("type")
    return int(found) if type(found) is int or (type(found) is str and found.isdecimal()) else None


def node_body(members: Members, kind: int) -> tuple[str, dict[str, Any]] | None:
    """Take the body of a node of this type with its pointer; its number and type say nothing beside it."""
    members.left.pop("id", None)
    members.left.pop("type", None)
    return next(members.each(dict, REQUEST_BODIES[kind]), None)


def read_node(node: Json, at: str, ledger: Ledger) -> Part | None:
    """Read one node of a request; None where it says nothing. Summaries are not for here."""
    kind = node_kind(node)
    if kind is None or kind not in READERS:
        return Opaque(dialect=NAME, label=f"a node of type {kind}", payload=node, at=at)
    members = Members(node, at, ledger)
    found = node_body(members, kind)
    if found is None:
        text = members.text("content") if kind == TEXT else ""
        if text or kind == TEXT:
            return Text(text=text, at=at, ext=members.ext()) if is_said(text) else None
        return Opaque(dialect=NAME, label=f"a node of type {kind} without its body", payload=node, at=at)
    body = Members(found[1], found[0], ledger)
    part = READERS[kind](body, at)
    for path, value in members.rest().items():
        ledger.drop(f"{at}/{path}", "extension", f"only {NAME} knows it", value)
    for path, value in body.rest().items():
        ledger.drop(f"{body.at}/{path}", "extension", f"only {NAME} knows it", value)
    return part


def _read_text(body: Members, at: str) -> Part | None:
    text = body.text("content")
    return Text(text=text, at=at) if is_said(text) else None


def lose_ids(members: Members) -> None:
    """Report ids by which only the client's own service knows an exchange."""
    for at, value in members.each(str, "request_id", "id"):
        members.ledger.drop(at, "identity", "only the client's own service knows this id", value)


def read_image(body: Members, at: str) -> Part:
    """Read an image; one that does not say its format is known by how it begins."""
    data = body.text("image_data")
    media_type = IMAGE_TYPES.get(body.number("format") or 0)
    if media_type is None:
        known = next((name for head, name in IMAGE_HEADS.items() if data.startswith(head)), None)
        media_type = known or "image/png"
        body.ledger.synthesise(f"{body.at}/format", "media", f"the format is not said; {media_type} is assumed")
    return Media(kind="image", media_type=media_type, data=data, at=at)


def _read_file(body: Members, at: str) -> Part:
    """Read a file: text as text, anything else as a document."""
    data, media_type = body.text("file_data"), body.text("format")
    if media_type.startswith("text/") or media_type == "application/json":
        try:
            text = binascii.a2b_base64(data).decode()
        except (binascii.Error, UnicodeDecodeError, ValueError):
            text = ""
        if text:
            body.ledger.degrade(at, "media", "a file of text is said as text")
            return Text(text=text, at=at)
    if "/" not in media_type:
        label = media_type or "nothing"
        media_type = "application/octet-stream"
        body.ledger.degrade(f"{body.at}/format", "media", f"{label} is no media type; {media_type} is written")
    kind = media_type.partition("/")[0]
    return Media(
        kind=kind if kind in ("image", "audio", "video") else "document",  # type: ignore[arg-type]
        media_type=media_type,
        data=data,
        at=at,
    )


def _read_result(body: Members, at: str) -> Part | None:
    call = body.text("tool_use_id")
    if not call:
        return None
    plain = body.text("content")
    content = tuple(_result_parts(body))
    if content and plain and not any(isinstance(part, Text) and plain in part.text for part in content):
        body.ledger.drop(f"{body.at}/content", "part", "the content nodes say it otherwise", plain)
    flat = not content
    if flat and plain:
        content = (Text(text=plain, at=f"{body.at}/content"),)
    lose_ids(body)
    return ToolResult(id=call, content=content, is_error=body.flag("is_error"), flat=flat, at=at)


RESULT_TEXT, RESULT_IMAGE = 1, 2


def _result_parts(body: Members) -> Iterator[Part]:
    for at, value in listed(body, "content_nodes"):
        members = Members(value, at, body.ledger)
        kind = members.number("type")
        if kind == RESULT_TEXT and (text := members.text("text_content")):
            yield Text(text=text, at=at)
        elif kind == RESULT_IMAGE and (found := next(members.each(dict, "image_content"), None)):
            yield read_image(Members(found[1], found[0], body.ledger), at)
        elif members.rest():
            body.ledger.drop(at, "part", f"content of type {kind} has no counterpart", value)


def _said(label: str) -> Callable[[Members, str], Part | None]:
    def read(body: Members, at: str) -> Part | None:
        value, body.left = body.left, {}
        if not value:
            return None
        body.ledger.degrade(at, "part", f"{label} is said as text", value)
        return Text(text=f"[{label}] {json_text(value)}", at=at)

    return read


READERS: Final[dict[int, Callable[[Members, str], Part | None]]] = {
    TEXT: _read_text,
    TOOL_RESULT: _read_result,
    IMAGE: read_image,
    IMAGE_ID: _said("image kept by the client"),
    IDE_STATE: _said("state of the editor"),
    EDIT_EVENTS: _said("edits since the last message"),
    CHECKPOINT_REF: _said("checkpoint"),
    CHANGE_PERSONALITY: _said("change of personality"),
    FILE: _read_file,
    FILE_ID: _said("file kept by the client"),
}


# Nodes of an answer ---------------------------------------------------------------------------------------------------


def read_answer(text: str, nodes: list[tuple[str, Json]], at: str, ledger: Ledger) -> list[Part]:
    """Read what an exchange answered: thinking, the text, the calls; what is no part of an answer is a loss."""
    thoughts: list[Part] = []
    calls: list[Part] = []
    pieces: dict[int, list[str]] = {RAW_RESPONSE: [], MAIN_TEXT_FINISHED: []}
    begun: dict[str, tuple[str, Json]] = {}
    for where, node in nodes:
        members = Members(node, where, ledger)
        kind = node_kind(node)
        body = next(members.each(dict, "thinking" if kind == THINKING else "tool_use"), None)
        if kind in pieces:
            pieces[kind].append(members.text("content"))
        elif kind == THINKING and body is not None:
            inner = Members(body[1], body[0], ledger)
            thoughts.append(Thinking(text=inner.text("summary"), at=where, ext=inner.ext()))
        elif kind in (TOOL_USE, TOOL_USE_START) and body is not None:
            call = _read_call(Members(body[1], body[0], ledger), where)
            if kind == TOOL_USE_START:
                begun[call.id] = (where, node)
            elif all(other.id != call.id for other in calls if isinstance(other, ToolUse)):
                calls.append(call)
        else:
            ledger.drop(where, "part", f"a node of type {kind} is no part of an answer", node)
    for call_id, (where, node) in begun.items():
        if all(call_id != call.id for call in calls if isinstance(call, ToolUse)):
            ledger.drop(where, "part", "a call that began and never came whole", node)
    said = text or "".join(pieces[MAIN_TEXT_FINISHED]) or "".join(pieces[RAW_RESPONSE])
    for kind, found in pieces.items():
        if "".join(found).strip() not in said:
            ledger.drop(at, "part", f"nodes of type {kind} say another text than the exchange", found)
    return [*thoughts, *([Text(text=said, at=at)] if said else []), *calls]


def _read_call(body: Members, at: str) -> ToolUse:
    written = body.text("input_json")
    return ToolUse(
        id=body.text("tool_use_id"), name=body.text("tool_name"), text=written or None,
        input=read_arguments(written), at=at, ext=body.ext(),
    )  # fmt: skip
