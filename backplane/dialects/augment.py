"""Augment's wire format: reads its requests into the ir, and writes any dialect's stream as its NDJSON chunks.

It is not in `DIALECTS`: requests, which an editor sends, are only read, and streams are only written. Nodes without a
counterpart in the ir become labelled text, and are reported as losses. The facts are from the public extension, read
November 2026.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import LossPolicy, StreamTranslation, check_losses, dialect, ir
from backplane.dialects.common import (
    LossLedger,
    arguments_text,
    escape,
    json_text,
    members_of,
    parse_json,
    read_arguments,
    snake,
    spelled_at,
)
from backplane.dialects.limits import CUT_CALL, ServerLimits, sayable
from backplane.dialects.outcome import has_cut_call
from backplane.dialects.pairing import paired
from backplane.dialects.streams import BlockWriter, Key
from backplane.errors import TranslationError

NAME: Final = "augment"
LIMITS: Final = ServerLimits(takes_refusals=False, takes_objects=True)

TEXT, TOOL_RESULT, IMAGE, FILE, HISTORY_SUMMARY = 0, 1, 2, 8, 10
"""Types of request nodes that have a reader of their own."""
LABELS: Final[dict[int, tuple[str, str]]] = {
    3: ("image_id_node", "image kept by the client"), 4: ("ide_state_node", "state of the editor"),
    5: ("edit_events_node", "edits since the last message"), 6: ("checkpoint_ref_node", "checkpoint"),
    7: ("change_personality_node", "change of personality"), 9: ("file_id_node", "file kept by the client"),
}  # fmt: skip
"""Type of a request node that becomes text → member with its body, and the label before the text."""

RAW_RESPONSE, MAIN_TEXT_FINISHED, TOOL_USE, TOOL_USE_START, THINKING, TOKEN_USAGE = 0, 2, 5, 7, 8, 10
"""Types of the nodes of an answer that we read or write."""

IMAGE_TYPES: Final = {1: "image/png", 2: "image/jpeg", 3: "image/gif", 4: "image/webp"}
IMAGE_HEADS: Final = {
    "iVBORw0KGgo": "image/png", "/9j/": "image/jpeg", "R0lGOD": "image/gif", "UklGR": "image/webp",
}  # fmt: skip
"""First characters of the base64 → media type, for nodes without a format."""

PLACEHOLDER_CHARS_MAX: Final = 16
"""Maximum hyphens of a placeholder: clients send a message of hyphens if a request has only nodes."""

REQUEST_NODES: Final = ("request_nodes", "structured_request_nodes", "nodes")
RESPONSE_NODES: Final = ("response_nodes", "structured_output_nodes")

PERSONAS: Final = {1: "PROTOTYPER", 2: "BRAINSTORM", 3: "REVIEWER"}
"""`persona_type` → name; 0 means no persona."""

AGENT: Final = "Work as a coding agent: use the tools you are given until the task is done."
"""System text that is added if `mode` is AGENT."""

CODE: Final = {
    ("prefix",): "Code before the selection:",
    ("selected_code", "selected_text", "selected_code_snippet"): "Selected code:",
    ("suffix",): "Code after the selection:",
    ("diff",): "Diff:",
}
"""Names of a member with code → the heading before the code."""

NOTHING: Final[tuple[Json, ...]] = (None, "", [], {})
"""Values that count as a missing member: editors send them for members that they do not use."""

K = TypeVar("K")


def is_said(text: str) -> bool:
    """Return whether a text is neither blank nor a placeholder of hyphens."""
    bare = text.strip()
    return bool(bare) and not (len(bare) <= PLACEHOLDER_CHARS_MAX and not bare.strip("-"))


def as_number(value: Json) -> int | None:
    """Return an integer, or a text of digits as an integer; None for anything else."""
    return int(value) if type(value) is int or (type(value) is str and value.isdecimal()) else None


class Members:
    """An object whose members are removed as they are read, under any of their names; unread ones can be reported.

    Args:
        value: the object, in snake_case or camelCase.
        at: JSON pointer to it, in snake_case.

    Raises:
        TranslationError: `dialect_mapping_failed`, it is no object.
    """

    def __init__(self, value: Json, at: str, ledger: LossLedger) -> None:
        self.at, self.ledger = at, ledger
        self.left: dict[str, Any] = {}
        for name, inner in members_of(value, at).items():
            spelled = snake(name)
            self.left[name if self.left.get(spelled, inner) != inner else spelled] = inner

    def each(self, kind: type[K], *names: str) -> Iterator[tuple[str, K]]:
        """Remove and yield the members with these names and this type, with their pointers, unless null or empty."""
        for name in names:
            if type(self.left.get(name)) is kind and (value := self.left.pop(name)) not in NOTHING:
                yield f"{self.at}/{escape(name)}", value

    def take(self, kind: type[K], *names: str) -> K | None:
        """Remove all members with these names, and return the first; one with a different value is a loss."""
        found: K | None = None
        for at, value in self.each(kind, *names):
            if found is None:
                found = value
            elif value != found:
                self.ledger.drop(at, "extension", f"said already under another name of {names[0]}", value)
        return found

    def text(self, *names: str) -> str:
        return self.take(str, *names) or ""

    def number(self, name: str) -> int | None:
        """Remove and return an integer, also from a text of digits; None if the member is neither."""
        return None if as_number(self.left.get(name)) is None else as_number(self.left.pop(name))

    def body(self, name: str) -> Members | None:
        """Remove and return a member that is an object; None if it is missing or empty."""
        found = next(self.each(dict, name), None)
        return None if found is None else Members(found[1], found[0], self.ledger)

    def listed(self, *names: str) -> Iterator[tuple[str, Json]]:
        """Remove all lists with these names and yield their elements; an element of an earlier list only once."""
        seen: list[Json] = []
        for at, values in self.each(list, *names):
            before = len(seen)
            for place, value in enumerate(values):
                if value not in seen[:before]:
                    seen.append(value)
                    yield f"{at}/{place}", value

    def rest(self) -> dict[str, Any]:
        """Return the unread members that are neither null nor empty."""
        return {key: value for key, value in self.left.items() if value not in NOTHING}

    def lose_rest(self) -> None:
        """Report the unread members as losses."""
        for key, value in self.rest().items():
            self.ledger.drop(f"{self.at}/{escape(key)}", "extension", f"only {NAME} knows it", value)


# Nodes of a request ---------------------------------------------------------------------------------------------------


def node_kind(node: Json) -> int | None:
    """Return a node's type; None if it has none."""
    return as_number(node.get("type")) if type(node) is dict else None


def read_node(node: Json, at: str, ledger: LossLedger) -> ir.Part | None:
    """Read one node of a request; None if it has no content. Summaries are read by `read_turn`."""
    kind = node_kind(node)
    if kind in LABELS:
        member, label = LABELS[kind]
    else:
        member = {TEXT: "text_node", TOOL_RESULT: "tool_result_node", IMAGE: "image_node", FILE: "file_node"}.get(
            -1 if kind is None else kind, ""
        )
    if not member:
        return ir.Opaque(dialect=NAME, label=f"a node of type {kind}", payload=node, at=at)
    members = Members(node, at, ledger)
    for name in ("id", "type"):
        members.left.pop(name, None)  # not needed beside the node's body
    if kind in LABELS and (value := members.take(dict, member)):
        members.lose_rest()
        ledger.degrade(at, "part", f"{label} is said as text", value)
        return ir.Text(text=f"[{label}] {json_text(value)}", at=at)
    body = members.body(member) or (members if kind == TEXT else None)
    if body is None:
        return ir.Opaque(dialect=NAME, label=f"a node of type {kind} without its body", payload=node, at=at)
    part = _read_body(kind, body, at)
    members.lose_rest()
    body.lose_rest()
    return part


def _read_body(kind: int | None, body: Members, at: str) -> ir.Part | None:
    if kind == IMAGE:
        return read_image(body, at)
    if kind == FILE:
        return _read_file(body, at)
    if kind == TOOL_RESULT:
        return _read_result(body, at)
    text = body.text("content")
    return ir.Text(text=text, at=at) if is_said(text) else None


def read_image(body: Members, at: str) -> ir.Part:
    """Read an image; if it has no format, its first characters decide."""
    data = body.text("image_data")
    media_type = IMAGE_TYPES.get(body.number("format") or 0)
    if media_type is None:
        media_type = next((name for head, name in IMAGE_HEADS.items() if data.startswith(head)), "image/png")
        body.ledger.synthesise(f"{body.at}/format", "media", f"the format is not said; {media_type} is assumed")
    return ir.Media(kind="image", media_type=media_type, data=data, at=at)


def _read_file(body: Members, at: str) -> ir.Part:
    """Read a file: a text file as text, others as media (`document` if neither image, audio nor video)."""
    data, media_type = body.text("file_data"), body.text("format")
    if media_type.startswith("text/") or media_type == "application/json":
        try:
            text = binascii.a2b_base64(data).decode()
        except ValueError:
            text = ""
        if text:
            body.ledger.degrade(at, "media", "a file of text is said as text")
            return ir.Text(text=text, at=at)
    if "/" not in media_type:
        body.ledger.degrade(f"{body.at}/format", "media", f"{media_type or 'nothing'} is no media type")
        media_type = "application/octet-stream"
    kind: Any = media_type.partition("/")[0]
    kind = kind if kind in ("image", "audio", "video") else "document"
    return ir.Media(kind=kind, media_type=media_type, data=data, at=at)


def _read_result(body: Members, at: str) -> ir.Part | None:
    call, plain = body.text("tool_use_id"), body.text("content")
    content = tuple(_result_parts(body))
    if not call:
        return None
    if content and plain and not any(isinstance(part, ir.Text) and plain in part.text for part in content):
        body.ledger.drop(f"{body.at}/content", "part", "the content nodes say it otherwise", plain)
    if not content and plain:
        content = (ir.Text(text=plain, at=f"{body.at}/content"),)
    return ir.ToolOutput(id=call, content=content, is_error=body.take(bool, "is_error"), at=at)


def _result_parts(body: Members) -> Iterator[ir.Part]:
    for at, value in body.listed("content_nodes"):
        members = Members(value, at, body.ledger)
        if text := members.text("text_content"):
            yield ir.Text(text=text, at=at)
        elif found := members.body("image_content"):
            yield read_image(found, at)
        elif members.rest():
            body.ledger.drop(at, "part", "content of a type without a counterpart", value)


# Nodes of an answer ---------------------------------------------------------------------------------------------------


def read_answer(text: str, nodes: Iterable[tuple[str, Json]], at: str, ledger: LossLedger) -> list[ir.Part]:
    """Read an exchange's answer: thinking, then text, then calls; nodes of other types are losses."""
    thoughts: list[ir.Part] = []
    calls: dict[str, ir.ToolUse] = {}
    pieces: dict[int | None, str] = {MAIN_TEXT_FINISHED: "", RAW_RESPONSE: ""}
    begun: dict[str, tuple[str, Json]] = {}
    for where, node in nodes:
        members, kind = Members(node, where, ledger), node_kind(node)
        body = members.body("thinking" if kind == THINKING else "tool_use")
        if kind in pieces:
            pieces[kind] += members.text("content")
        elif kind == THINKING and body is not None:
            thoughts.append(ir.Thinking(text=body.text("summary"), at=where))
            body.lose_rest()
        elif kind in (TOOL_USE, TOOL_USE_START) and body is not None:
            written, call_id = body.text("input_json"), body.text("tool_use_id")
            if kind == TOOL_USE_START:
                begun[call_id] = (where, node)
                continue
            call_name = body.text("tool_name")
            body.lose_rest()
            calls.setdefault(call_id, ir.ToolUse(
                id=call_id, name=call_name, text=written or None, input=read_arguments(written), at=where,
            ))  # fmt: skip
        else:
            ledger.drop(where, "part", f"a node of type {kind} is no part of an answer", node)
    for call_id, (where, node) in begun.items():
        if call_id not in calls:
            ledger.drop(where, "part", "a call that began and never came whole", node)
    said = text or pieces[MAIN_TEXT_FINISHED] or pieces[RAW_RESPONSE]
    for kind, found in pieces.items():
        if found.strip() not in said:
            ledger.drop(at, "part", f"nodes of type {kind} say another text than the exchange", found)
    return [*thoughts, *([ir.Text(text=said, at=at)] if said else []), *calls.values()]


# Requests -------------------------------------------------------------------------------------------------------------


def read_exchange(value: Json, at: str, ledger: LossLedger) -> list[ir.Message]:
    """Read one exchange of the history: the user's turn, and the answer."""
    members = Members(value, at, ledger)
    asked = members.text("request_message", "message")
    answered = members.text("response_text", "response", "text")
    turn = read_turn(asked, f"{at}/request_message", members)
    parts = read_answer(answered, members.listed(*RESPONSE_NODES), f"{at}/response_text", ledger)
    members.lose_rest()
    return [*turn, *([ir.Message(role="assistant", parts=tuple(parts), at=at)] if parts else [])]


def read_turn(text: str, text_at: str, members: Members, code: Iterable[ir.Part] = ()) -> list[ir.Message]:
    """Read a user's turn: the messages of a summary, then results, then text, `code` and other nodes."""
    out: list[ir.Message] = []
    results: list[ir.Part] = []
    parts: list[ir.Part] = [ir.Text(text=text, at=text_at)] if is_said(text) else []
    said = {text.strip()}
    parts += code
    for at, node in members.listed(*REQUEST_NODES):
        if node_kind(node) == HISTORY_SUMMARY:
            out += _read_summary(node, at, members.ledger)
            continue
        part = read_node(node, at, members.ledger)
        if isinstance(part, ir.ToolOutput):
            results.append(part)
        elif part is not None and not (type(part) is ir.Text and part.text.strip() in said):
            parts.append(part)
            said.add(part.text.strip() if isinstance(part, ir.Text) else "")
    if results:
        out.append(ir.Message(role="tool", parts=tuple(results), at=members.at))
    if parts:
        out.append(ir.Message(role="user", parts=joined(parts), at=members.at))
    return out


def has_summary(value: Json) -> bool:
    """Return whether an exchange or a request contains a summary of earlier messages."""
    if type(value) is not dict:
        return False
    members = Members(value, "", LossLedger(NAME, NAME))
    return any(node_kind(node) == HISTORY_SUMMARY for _, node in members.listed(*REQUEST_NODES))


def joined(parts: Iterable[ir.Part]) -> tuple[ir.Part, ...]:
    """Join adjacent texts, with a blank line between: some gateways accept only a message of one text."""
    out: list[ir.Part] = []
    for part in parts:
        last = out[-1] if out else None
        if type(part) is ir.Text and type(last) is ir.Text:
            out[-1] = msgspec.structs.replace(last, text=f"{last.text}\n\n{part.text}")
        else:
            out.append(part)
    return tuple(out)


def _read_summary(node: Json, at: str, ledger: LossLedger) -> Iterator[ir.Message]:
    """Yield a summary as a user's text, then the messages of the exchanges that it contains unshortened."""
    body = Members(node, at, ledger).body("history_summary_node") or Members({}, at, ledger)
    ledger.degrade(at, "part", "a summary is said as text")
    words = template = body.text("message_template")
    summary, middle = body.text("summary_text"), body.text("history_middle_abridged_text")
    values: dict[str, Any] = {
        "summary": summary, "middle_part_abridged": middle, "end_part_full": "(the messages that follow)",
        "summarization_request_id": body.text("summarization_request_id"),
        "beginning_part_dropped_num_exchanges": body.number("history_beginning_dropped_num_exchanges") or 0,
    }  # fmt: skip
    for name, value in values.items():
        words = words.replace("{" + name + "}", str(value))
    missing = [one for one in (summary, middle) if one not in words]
    text = "\n\n".join(found for found in (words if template else "Summary of what came before:", *missing) if found)
    kept = list(body.listed("history_end"))
    body.lose_rest()
    yield ir.Message(role="user", parts=(ir.Text(text=text, at=at),), at=at)
    for end_at, exchange in kept:
        yield from read_exchange(exchange, end_at, ledger)


def to_ir(request: Json, system: str = "") -> ir.Translated[ir.Conversation]:
    """Read a request.

    Args:
        system: text of the gateway's operator, added to the request's guidelines.

    Raises:
        TranslationError: `dialect_mapping_failed`, the request is no object or has no content.
    """
    ledger = LossLedger(NAME, NAME)
    members = Members(request, "", ledger)
    messages: list[ir.Message] = []
    history = list(members.listed("chat_history"))
    start = max((place for place, (_, value) in enumerate(history) if has_summary(value)), default=0)
    start = len(history) if has_summary(request) else start
    for at, value in history[:start]:
        ledger.drop(at, "part", "a summary that comes later stands for it", value)
    for at, value in history[start:]:
        messages += read_exchange(value, at, ledger)
    head = _read_system(members, system)
    messages += _read_last_turn(members)
    if not messages:
        fact = f"the request has no message, no nodes ({', '.join(REQUEST_NODES)}) and no chat_history"
        raise TranslationError("dialect_mapping_failed", fact, hint="check --from")
    tools = tuple(_read_tool(tool, at, ledger) for at, tool in members.listed("tool_definitions"))
    model, options = members.text("model") or None, {}
    # Without this flag the editor cannot run several calls at once.
    flags = members.body("feature_detection_flags") or Members({}, "/feature_detection_flags", ledger)
    flags.take(bool, "support_tool_use_start")  # read by `reply_of`
    if not flags.take(bool, "support_parallel_tool_use") and tools:
        options = {"parallel_tool_calls": False}
    flags.lose_rest()
    members.lose_rest()
    conversation = ir.Conversation(
        dialect=NAME, messages=(*head, *messages), model=model, tools=tools, options=options,
        options_at=dict.fromkeys(options, f"{flags.at}/support_parallel_tool_use"),
    )  # fmt: skip
    # An editor may have been stopped anywhere: results may be missing or late, or have no call.
    whole = paired(conversation)
    return ir.Translated(whole.value, _spelled((*ledger.done(), *whole.losses), request))


def _spelled(losses: Iterable[ir.Loss], request: Json) -> tuple[ir.Loss, ...]:
    """Return losses whose pointers are spelled as in the request."""
    return tuple(msgspec.structs.replace(loss, path=spelled_at(loss.path, request)) for loss in losses)


def _read_last_turn(members: Members) -> list[ir.Message]:
    text, at = "", "/message"
    for where, value in members.each(str, "message", "prompt", "instruction"):
        if not text and is_said(value):
            text, at = value, where
        elif is_said(value) and value != text:
            members.ledger.drop(where, "extension", f"the text of the turn is {at}", value)
    code: dict[str, ir.Text] = {}
    for names, words in CODE.items():
        for where, value in members.each(str, *names):
            code.setdefault(f"{words}\n{value}", ir.Text(text=f"{words}\n{value}", at=where))
    return read_turn(text, at, members, code.values())


def _read_system(members: Members, system: str) -> tuple[ir.Message, ...]:
    """Return the system message; its texts have the order of the extension, with blank lines between."""
    persona, mode = members.number("persona_type") or 0, members.left.get("mode")
    is_agent = isinstance(mode, str) and mode.upper() == "AGENT"
    if is_agent:
        del members.left["mode"]
    language, path = members.text("language", "lang"), members.text("path")
    found = {
        "/persona_type": f"Persona: {PERSONAS.get(persona, persona)}" if persona else "",
        "/user_guidelines": members.text("user_guidelines"),
        "/workspace_guidelines": members.text("workspace_guidelines"), "/rules": _read_rules(members),
        "/agent_memories": members.text("agent_memories", "memories_info"), "": system,
        "/mode": AGENT if is_agent else "", "/lang": f"Language: {language}" if language else "",
        "/path": f"Path: {path}" if path else "",
    }  # fmt: skip
    parts = joined(ir.Text(text=text.strip(), at=at) for at, text in found.items() if text.strip())
    return (ir.Message(role="system", parts=parts, at="/user_guidelines"),) if parts else ()


def _read_rules(members: Members) -> str:
    """Return the rules as one text; they may be a text, a list of texts, or a list of objects with a content."""
    text = members.text("rules")
    found: list[str] = []
    for at, rule in members.listed("rules"):
        if isinstance(rule, str):
            found.append(rule)
            continue
        one = Members(rule, at, members.ledger)
        found.append("\n".join(words for words in (one.text("path", "name"), one.text("content", "text")) if words))
        one.lose_rest()
    return text or "\n\n".join(found)


def _read_tool(value: Json, at: str, ledger: LossLedger) -> ir.ToolSpec:
    members = Members(value, at, ledger)
    for name in ("mcp_server_name", "mcp_tool_name"):
        members.text(name)  # read by `reply_of`, for the calls of the answer
    schema, written = members.take(dict, "input_schema"), members.text("input_schema_json")
    if schema is None and written:
        read = parse_json(written)
        schema = read if isinstance(read, dict) else None
        if schema is None:
            ledger.drop(f"{at}/input_schema_json", "tool_field", "the schema is no JSON object", written)
    if schema is None:
        ledger.synthesise(f"{at}/input_schema", "required", "a tool without a schema takes any object")
        schema = {"type": "object", "properties": {}}
    name, description = members.text("name"), members.text("description") or None
    members.lose_rest()
    return ir.ToolSpec(name=name, description=description, schema=schema, at=at)


def reply_of(request: Json) -> Reply:
    """Return a request's wishes about its answer, which a `ChunkStream` needs.

    Raises:
        TranslationError: `dialect_mapping_failed`, the request is no object.
    """
    scratch = LossLedger(NAME, NAME)
    members = Members(request, "", scratch)
    flags = members.body("feature_detection_flags") or Members({}, "", scratch)
    names: dict[str, tuple[str, str]] = {}
    for at, tool in members.listed("tool_definitions"):
        one = Members(tool, at, scratch)
        server, inner = one.text("mcp_server_name"), one.text("mcp_tool_name")
        if server:
            names[one.text("name")] = (server, inner or one.text("name"))
    return Reply(tool_use_start=flags.take(bool, "support_tool_use_start") is True, mcp_names=names)


def translate_request(
    document: Json, target: str, policy: LossPolicy = "warn", *, system: str = ""
) -> ir.Translated[Json]:
    """Translate a request to a dialect.

    Args:
        policy: `warn` returns the losses, `allow` omits them, `fail` raises if there are material ones.
        system: as in `to_ir`.

    Raises:
        TranslationError: `dialect_unknown`; `dialect_mapping_failed`, the document is no request;
            `mapping_lossy_conversion` by the policy.
    """
    read = to_ir(document, system)
    written = dialect(target).from_ir(read.value)
    losses = (*read.losses, *_spelled(written.losses, document))
    check_losses(losses, policy)
    return ir.Translated(written.value, () if policy == "allow" else losses)


# Streams --------------------------------------------------------------------------------------------------------------

UNSPECIFIED, END_TURN, MAX_TOKENS, TOOL_USE_REQUESTED, SAFETY, RECITATION, MALFORMED_FUNCTION_CALL = range(7)
"""Numbers of the stop reasons."""

STOPS: Final = {
    "end": END_TURN, "stop_sequence": END_TURN, "max_tokens": MAX_TOKENS, "tool_use": TOOL_USE_REQUESTED,
    "content_filter": SAFETY, "refusal": END_TURN, "other": END_TURN,
}  # fmt: skip
"""The ir's stop reason → Augment's. A refusal (its text is shown) and an unknown reason end the turn, as in the public
extension. A failure, a cancelled or paused answer and a stream without its last event have no entry, so that the editor
does not treat them as complete."""

RAW_STOPS: Final = {
    "safety": SAFETY, "recitation": RECITATION, "malformed_function_call": MALFORMED_FUNCTION_CALL,
    "incomplete": UNSPECIFIED, "queued": UNSPECIFIED, "in_progress": UNSPECIFIED,
}  # fmt: skip
"""Vendors' stop reasons (lower case) that Augment distinguishes and the ir does not."""

USAGE: Final = {
    "input_tokens": "input", "output_tokens": "output", "cache_read_input_tokens": "cache_read",
    "cache_creation_input_tokens": "cache_write",
}  # fmt: skip
"""Counter of a node → field of the ir."""


class Reply(msgspec.Struct, frozen=True):
    """The wishes of a request about its answer."""

    tool_use_start: bool = False
    """True to announce each call before the call itself."""
    mcp_names: Mapping[str, tuple[str, str]] = {}
    """Tool of an MCP server → the server's name, and the tool's name there."""


class ChunkWriter(BlockWriter):
    """Writes Augment's chunks.

    Args:
        source: dialect from which the events were read.
        reply: wishes of the request, from `reply_of`.
    """

    has_refusals = False

    def __init__(self, source: str, reply: Reply) -> None:
        super().__init__(dialect(source), source)
        self.ledger = LossLedger(source, NAME, is_answer=True)  # Augment is not in `DIALECTS`
        self.reply = reply
        self.node_id = 0
        self.calls: set[tuple[str, str, str]] = set()
        self.reason: ir.Candidate | None = None

    def _chunk(self, text: str = "", kind: int | None = None, **body: Any) -> list[Json]:
        """Write a chunk, with a node if it has a kind."""
        nodes = {}
        if kind is not None:
            self.node_id += 1
            nodes = {"nodes": [{"id": self.node_id, "type": kind, "content": text, **body}]}
        return [{"text": text, "unknown_blob_names": [], "checkpoint_not_found": False, "workspace_file_chunks": [],
                 **nodes}]  # fmt: skip

    def empty(self) -> list[Json]:
        """Write a chunk without content, which keeps a silent stream open."""
        return self._chunk()

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        if not isinstance(part, ir.Text | ir.Refusal):
            return None
        self.opened[key] = True
        return []

    def piece(self, key: Key, text: str, part: ir.Part) -> list[Json]:
        return self._chunk(text, RAW_RESPONSE) if text else []

    def whole(self, key: Key, part: ir.Part) -> list[Json] | None:
        if isinstance(part, ir.ToolUse):
            return self._whole_call(part)
        if not isinstance(part, ir.Thinking) or part.redacted is not None:
            return None
        if part.signature is not None:
            self.ledger.drop(part.at, "signature", "a chunk has no member for it")
        return self._chunk("", THINKING, thinking={"summary": part.text}) if part.text else []

    def _whole_call(self, part: ir.ToolUse) -> list[Json]:
        if part.is_cut:
            self.ledger.drop(part.at, "arguments", CUT_CALL)
            return []
        fit: Any = sayable(part, LIMITS, self.ledger)
        text = arguments_text(fit) or "{}"
        if (part.id, part.name, text) in self.calls:
            return []
        self.calls.add((part.id, part.name, text))
        call = {"tool_use_id": part.id, "tool_name": part.name, "input_json": text}
        if part.name in self.reply.mcp_names:
            call["mcp_server_name"], call["mcp_tool_name"] = self.reply.mcp_names[part.name]
        kinds = (TOOL_USE_START, TOOL_USE) if self.reply.tool_use_start else (TOOL_USE,)
        return [chunk for kind in kinds for chunk in self._chunk("", kind, tool_use=dict(call))]

    def stop_word(self, candidate: ir.Candidate) -> str | None:
        self.reason = candidate  # the stop reason depends on what is known at the end
        return None

    def fail(self, event: ir.StreamFailed) -> list[Json]:
        """Write the error as text, because chunks have no member for one; the answer then has no stop reason."""
        self.ledger.degrade("", "stop", "an error is said as text")
        return self._chunk(f"The model's service failed: {event.message}", RAW_RESPONSE)

    def end(self) -> list[Json]:
        usage = self._usage()
        (last,) = self._chunk()
        head = self._chunk("", TOKEN_USAGE, token_usage=usage) if usage else []
        return [*head, {**last, "stop_reason": self._stop_reason()}]

    def _stop_reason(self) -> int:
        """Return the number of the stop reason: `UNSPECIFIED` for a failure or a cut stream."""
        if self.sum.failure is not None or self.reason is None:
            return UNSPECIFIED
        word = self.reason.stop_raw or ""
        found = RAW_STOPS.get(word.lower(), STOPS.get(self.reason.stop or "", UNSPECIFIED))
        if self.reason.stop not in STOPS or self.reason.stop == "refusal":
            self.ledger.degrade(self.reason.stop_at, "stop", f"{word or self.reason.stop} became {found}")
        is_cut = has_cut_call(self.reason.message.parts)
        return TOOL_USE_REQUESTED if self.calls and found == END_TURN and not is_cut else found

    def _usage(self) -> dict[str, int]:
        """Return the known counters, each counted as the stream's vendor counts it."""
        usage, counters = self.sum.usage, self.dialect.usage
        if usage is None:
            return {}
        if usage.reasoning:
            self.ledger.drop(usage.at, "usage", "tokens of thinking are not counted apart", usage.reasoning)
        found = {name: counters.native(usage, field, self.dialect.NAME) for name, field in USAGE.items()}
        return {name: count for name, count in found.items() if count is not None}


class ChunkStream(StreamTranslation):
    """Translates a stream of a dialect's chunks to Augment's; the caller writes each as a line of JSON.

    Args:
        source: dialect of the chunks to translate.
        reply: wishes of the request, from `reply_of`.

    Raises:
        TranslationError: `dialect_unknown`.
    """

    def __init__(self, source: str, reply: Reply = Reply()) -> None:  # noqa: B008  frozen
        super().__init__(source, source)
        # The model may be behind a gateway that repeats text; repetitions are shown once, as by the host `api`.
        self.reader.mends = True
        self.writer = ChunkWriter(source, reply)

    def _compared(self) -> Iterator[ir.Loss]:
        return iter(())  # Augment's chunks cannot be read back, so there is nothing to compare.
