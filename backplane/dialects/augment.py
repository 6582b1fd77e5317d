"""Translates Augment's wire format: its requests into the ir, and any dialect's stream into its NDJSON chunks.

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
BODIES: Final = {
    TEXT: "text_node", TOOL_RESULT: "tool_result_node", IMAGE: "image_node", FILE: "file_node",
    HISTORY_SUMMARY: "history_summary_node",
}  # fmt: skip
"""Type of a request node that has a reader of its own → member with its body."""
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
    "Code before the selection:": ("prefix",),
    "Selected code:": ("selected_code", "selected_text", "selected_code_snippet"),
    "Code after the selection:": ("suffix",), "Diff:": ("diff",),
}  # fmt: skip
"""Heading before a piece of code → names that the member with this code can have."""

NOTHING: Final[tuple[Json, ...]] = (None, "", [], {})
"""Values that count as a missing member: editors send them for members that they do not use."""

K = TypeVar("K")


def is_said(text: str) -> bool:
    """Return whether a text is neither blank nor a placeholder of hyphens."""
    bare = text.strip()
    return bool(bare) and not (len(bare) <= PLACEHOLDER_CHARS_MAX and not bare.strip("-"))


# Members --------------------------------------------------------------------------------------------------------------


def named(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object with its names in snake_case; a name stays if the new one is taken by another value."""
    out: dict[str, Any] = {}
    for name, inner in value.items():
        spelled = snake(name)
        out[name if out.get(spelled, inner) != inner else spelled] = inner
    return out


class Read:
    """Collects the losses of one request, and JSON pointers to the values that were read; the rest is lost."""

    def __init__(self, request: Json) -> None:
        self.request = request
        self.ledger = LossLedger(NAME, NAME)
        self.places: set[str] = set()

    def losses(self) -> tuple[ir.Loss, ...]:
        """Return the losses, also of each value that was not read."""
        above = {""}
        for place in self.places:
            while place := place.rpartition("/")[0]:
                above.add(place)
        for at, value in self._unread(self.request, "", above):
            self.ledger.drop(at, "extension", f"only {NAME} knows it", value)
        return self.ledger.done()

    def _unread(self, value: Json, at: str, above: set[str]) -> Iterator[tuple[str, Json]]:
        if at in self.places or value in NOTHING:
            return
        if at not in above:
            yield at, value
            return
        inner = named(value).items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, one in inner:
            yield from self._unread(one, f"{at}/{escape(str(key))}", above)


class Node:
    """An object of a request, in snake_case or camelCase; a member that is taken from it counts as read.

    Args:
        at: JSON pointer to the object, in snake_case.

    Raises:
        TranslationError: `dialect_mapping_failed`, the value is no object.
    """

    def __init__(self, value: Json, at: str, read: Read) -> None:
        self.value, self.at, self.read, self.ledger = value, at, read, read.ledger
        self.members = named(members_of(value, at))
        self.kind = self.number("type")

    def each(self, kind: type[K], *names: str) -> Iterator[tuple[str, K]]:
        """Yield the members with these names and this type, with their pointers, unless null or empty."""
        for name in names:
            value = self.members.get(name)
            if type(value) is kind and value not in NOTHING:
                yield f"{self.at}/{name}", value

    def take(self, kind: type[K], *names: str) -> K | None:
        """Return the first member with one of these names; further ones count as read if they are equal to it."""
        found = [value for _, value in self.each(kind, *names)]
        self.read.places |= {at for at, value in self.each(kind, *names) if value == found[0]}
        return found[0] if found else None

    def text(self, *names: str) -> str:
        return self.take(str, *names) or ""

    def number(self, name: str) -> int | None:
        """Return an integer, also from a text of digits; None if the member is neither."""
        value = self.members.get(name)
        if type(value) is not int and not (type(value) is str and value.isdecimal()):
            return None
        self.read.places.add(f"{self.at}/{name}")
        return int(value)

    def body(self, name: str) -> Node | None:
        """Return a member that is an object; None if it is missing or empty."""
        return next((Node(value, at, self.read) for at, value in self.each(dict, name)), None)

    def listed(self, *names: str) -> Iterator[Node]:
        """Yield the elements of all lists with these names; an element of an earlier list only once."""
        seen: list[Json] = []
        for at, values in self.each(list, *names):
            before = len(seen)
            for place, value in enumerate(values):
                if value in seen[:before]:
                    self.read.places.add(f"{at}/{place}")
                else:
                    seen.append(value)
                    yield Node(value, f"{at}/{place}", self.read)

    def drop(self, reason: str, code: str = "part") -> None:
        """Report the whole object as a loss."""
        self.read.places.add(self.at)
        self.ledger.drop(self.at, code, reason, self.value)


# Nodes of a request ---------------------------------------------------------------------------------------------------


def read_node(node: Node) -> ir.Part | None:
    """Read one node of a request; None if it has no content. Summaries are read by `read_turn`."""
    kind = -1 if node.kind is None else node.kind
    node.read.places.add(f"{node.at}/id")
    if kind in LABELS:
        member, label = LABELS[kind]
        if value := node.take(dict, member):
            node.ledger.degrade(node.at, "part", f"{label} is said as text", value)
            return ir.Text(text=f"[{label}] {json_text(value)}", at=node.at)
    body = node.body(BODIES[kind]) if kind in BODIES else None
    if kind == TEXT:
        text = (body or node).text("content")
        return ir.Text(text=text, at=node.at) if is_said(text) else None
    if body is None:
        node.read.places.add(node.at)
        return ir.NativePart(dialect=NAME, label=f"a node of type {node.kind}", payload=node.value, at=node.at)
    return {IMAGE: read_image, FILE: _read_file, TOOL_RESULT: _read_result}[kind](body, node.at)


def read_image(body: Node, at: str) -> ir.Part:
    """Read an image; without a format, the first characters of its data give the media type."""
    data = body.text("image_data")
    media_type = IMAGE_TYPES.get(body.number("format") or 0)
    if media_type is None:
        media_type = next((name for head, name in IMAGE_HEADS.items() if data.startswith(head)), "image/png")
        body.ledger.synthesise(f"{body.at}/format", "media", f"the format is not said; {media_type} is assumed")
    return ir.Media(kind="image", media_type=media_type, data=data, at=at)


def _read_file(body: Node, at: str) -> ir.Part:
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


def _read_result(body: Node, at: str) -> ir.Part | None:
    call, plain = body.text("tool_use_id"), body.text("content")
    content: list[ir.Part] = []
    for node in body.listed("content_nodes"):
        if text := node.text("text_content"):
            content.append(ir.Text(text=text, at=node.at))
        elif found := node.body("image_content"):
            content.append(read_image(found, node.at))
        else:
            node.drop("content of a type without a counterpart")
    if not call:
        return None
    if content and plain and not any(isinstance(part, ir.Text) and plain in part.text for part in content):
        body.ledger.drop(f"{body.at}/content", "part", "the content nodes say it otherwise", plain)
    if not content and plain:
        content = [ir.Text(text=plain, at=f"{body.at}/content")]
    return ir.ToolOutput(id=call, content=tuple(content), is_error=body.take(bool, "is_error"), at=at)


# Nodes of an answer ---------------------------------------------------------------------------------------------------


def read_answer(text: str, nodes: Iterable[Node], at: str, ledger: LossLedger) -> tuple[ir.Part, ...]:
    """Read an exchange's answer: thinking, then text, then calls; nodes of other types are losses."""
    thoughts: list[ir.Part] = []
    calls: dict[str, ir.ToolUse] = {}
    pieces: dict[int | None, str] = {MAIN_TEXT_FINISHED: "", RAW_RESPONSE: ""}
    begun: dict[str, Node] = {}
    for node in nodes:
        node.read.places.add(f"{node.at}/id")
        body = node.body("thinking" if node.kind == THINKING else "tool_use")
        if node.kind in pieces:
            pieces[node.kind] += node.text("content")
        elif node.kind == THINKING and body is not None:
            thoughts.append(ir.Thinking(text=body.text("summary"), at=node.at))
        elif node.kind in (TOOL_USE, TOOL_USE_START) and body is not None:
            call_id, name, written = (body.text(one) for one in ("tool_use_id", "tool_name", "input_json"))
            if node.kind == TOOL_USE_START:
                begun[call_id] = node
            else:
                given = read_arguments(written)
                call = ir.ToolUse(id=call_id, name=name, text=written or None, input=given, at=node.at)
                calls.setdefault(call_id, call)
        else:
            node.drop(f"a node of type {node.kind} is no part of an answer")
    for call_id in begun.keys() - calls.keys():
        begun[call_id].drop("a call that began and never came whole")
    said = text or pieces[MAIN_TEXT_FINISHED] or pieces[RAW_RESPONSE]
    for kind, found in pieces.items():
        if found.strip() not in said:
            ledger.drop(at, "part", f"nodes of type {kind} say another text than the exchange", found)
    return (*thoughts, *([ir.Text(text=said, at=at)] if said else []), *calls.values())


# Requests -------------------------------------------------------------------------------------------------------------


def read_exchange(node: Node) -> Iterator[ir.Message]:
    """Yield the messages of one exchange of the history: the user's turn, and the answer."""
    yield from read_turn(node.text("request_message", "message"), f"{node.at}/request_message", node)
    answered = node.text("response_text", "response", "text")
    parts = read_answer(answered, node.listed(*RESPONSE_NODES), f"{node.at}/response_text", node.ledger)
    if parts:
        yield ir.Message(role="assistant", parts=parts, at=node.at)


def read_turn(text: str, text_at: str, turn: Node, code: Iterable[ir.Part] = ()) -> Iterator[ir.Message]:
    """Yield a user's turn: the messages of a summary, then results, then text, `code` and other nodes."""
    results: list[ir.Part] = []
    parts: list[ir.Part] = [ir.Text(text=text, at=text_at)] if is_said(text) else []
    said = {text.strip()}
    parts += code
    for node in turn.listed(*REQUEST_NODES):
        if node.kind == HISTORY_SUMMARY:
            yield from _read_summary(node)
            continue
        part = read_node(node)
        if isinstance(part, ir.ToolOutput):
            results.append(part)
        elif part is not None and not (type(part) is ir.Text and part.text.strip() in said):
            parts.append(part)
            said.add(part.text.strip() if isinstance(part, ir.Text) else "")
    if results:
        yield ir.Message(role="tool", parts=tuple(results), at=turn.at)
    if parts:
        yield ir.Message(role="user", parts=joined(parts), at=turn.at)


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


def _read_summary(node: Node) -> Iterator[ir.Message]:
    """Yield a summary as a user's text, then the messages of the exchanges that it contains unshortened."""
    node.read.places.add(f"{node.at}/id")
    body = node.body(BODIES[HISTORY_SUMMARY]) or Node({}, node.at, node.read)
    node.ledger.degrade(node.at, "part", "a summary is said as text")
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
    yield ir.Message(role="user", parts=(ir.Text(text=text, at=node.at),), at=node.at)
    for exchange in body.listed("history_end"):
        yield from read_exchange(exchange)


def to_ir(request: Json, system: str = "") -> ir.Translated[ir.Conversation]:
    """Read a request.

    Args:
        system: text of the gateway's operator, added to the request's guidelines.

    Raises:
        TranslationError: `dialect_mapping_failed`, the request is no object or has no content.
    """
    read = Read(request)
    root = Node(request, "", read)
    exchanges = [*root.listed("chat_history"), root]
    with_summary = [
        place for place, exchange in enumerate(exchanges)
        if any(node.kind == HISTORY_SUMMARY for node in exchange.listed(*REQUEST_NODES))
    ]  # fmt: skip
    start = max(with_summary, default=0)
    for exchange in exchanges[:start]:
        exchange.drop("a summary that comes later stands for it")
    messages = [message for exchange in exchanges[start:-1] for message in read_exchange(exchange)]
    head = _read_system(root, system)
    messages += _read_last_turn(root)
    if not messages:
        fact = f"the request has no message, no nodes ({', '.join(REQUEST_NODES)}) and no chat_history"
        raise TranslationError("dialect_mapping_failed", fact, hint="check --from")
    tools = tuple(map(_read_tool, root.listed("tool_definitions")))
    # Without this flag the editor cannot run several calls at once.
    flags = root.body("feature_detection_flags") or Node({}, "/feature_detection_flags", read)
    flags.take(bool, "support_tool_use_start")  # no loss: `reply_of` uses it
    is_parallel = flags.take(bool, "support_parallel_tool_use") or not tools
    conversation = ir.Conversation(
        dialect=NAME, messages=(*head, *messages), model=root.text("model") or None, tools=tools,
        options={} if is_parallel else {"parallel_tool_calls": False},
        options_at={"parallel_tool_calls": f"{flags.at}/support_parallel_tool_use"},
    )  # fmt: skip
    # An editor may have been stopped anywhere: results may be missing or late, or have no call.
    whole = paired(conversation)
    return ir.Translated(whole.value, _spelled((*read.losses(), *whole.losses), request))


def _spelled(losses: Iterable[ir.Loss], request: Json) -> tuple[ir.Loss, ...]:
    """Return losses whose pointers are spelled as in the request."""
    return tuple(msgspec.structs.replace(loss, path=spelled_at(loss.path, request)) for loss in losses)


def _read_last_turn(root: Node) -> Iterator[ir.Message]:
    text, at = "", "/message"
    for where, value in root.each(str, "message", "prompt", "instruction"):
        if not text and is_said(value):
            text, at = value, where
        if not is_said(value) or value == text:
            root.read.places.add(where)
    code: dict[str, ir.Text] = {}
    for heading, names in CODE.items():
        for where, value in root.each(str, *names):
            root.read.places.add(where)
            code.setdefault(f"{heading}\n{value}", ir.Text(text=f"{heading}\n{value}", at=where))
    return read_turn(text, at, root, code.values())


def _read_system(root: Node, system: str) -> tuple[ir.Message, ...]:
    """Return the system message; its texts have the order of the extension, with blank lines between."""
    persona = root.number("persona_type") or 0
    is_agent = str(root.members.get("mode")).upper() == "AGENT" and root.text("mode") != ""
    language, path = root.text("language", "lang"), root.text("path")
    found = {
        "/persona_type": f"Persona: {PERSONAS.get(persona, persona)}" if persona else "",
        "/user_guidelines": root.text("user_guidelines"), "/workspace_guidelines": root.text("workspace_guidelines"),
        "/rules": _read_rules(root), "/agent_memories": root.text("agent_memories", "memories_info"), "": system,
        "/mode": AGENT if is_agent else "", "/lang": f"Language: {language}" if language else "",
        "/path": f"Path: {path}" if path else "",
    }  # fmt: skip
    parts = joined(ir.Text(text=text.strip(), at=at) for at, text in found.items() if text.strip())
    return (ir.Message(role="system", parts=parts, at="/user_guidelines"),) if parts else ()


def _read_rules(root: Node) -> str:
    """Return the rules as one text; they may be a text, a list of texts, or a list of objects with a content."""
    rules = [root.text("rules")]
    for at, listed in root.each(list, "rules"):
        for place, rule in enumerate(listed):
            if isinstance(rule, str):
                root.read.places.add(f"{at}/{place}")
                rules.append(rule)
            else:
                one = Node(rule, f"{at}/{place}", root.read)
                rules.append("\n".join(filter(None, (one.text("path", "name"), one.text("content", "text")))))
    return "\n\n".join(filter(None, rules))


def _read_tool(tool: Node) -> ir.ToolSpec:
    for name in ("mcp_server_name", "mcp_tool_name"):
        tool.text(name)  # no loss: `reply_of` uses it for the calls of the answer
    schema, written = tool.take(dict, "input_schema"), tool.text("input_schema_json")
    if schema is None and written:
        read = parse_json(written)
        schema = read if isinstance(read, dict) else None
        if schema is None:
            tool.ledger.drop(f"{tool.at}/input_schema_json", "tool_field", "the schema is no JSON object", written)
    if schema is None:
        tool.ledger.synthesise(f"{tool.at}/input_schema", "required", "a tool without a schema takes any object")
        schema = {"type": "object", "properties": {}}
    return ir.ToolSpec(
        name=tool.text("name"), description=tool.text("description") or None, schema=schema, at=tool.at
    )  # fmt: skip


def reply_of(request: Json) -> Reply:
    """Return the settings of a request for its answer, which a `ChunkStream` needs.

    Raises:
        TranslationError: `dialect_mapping_failed`, the request is no object.
    """
    root = Node(request, "", Read(request))
    flags = root.body("feature_detection_flags")
    names = {
        tool.text("name"): (server, tool.text("mcp_tool_name") or tool.text("name"))
        for tool in root.listed("tool_definitions") if (server := tool.text("mcp_server_name"))
    }  # fmt: skip
    return Reply(
        tool_use_start=flags is not None and flags.take(bool, "support_tool_use_start") is True, mcp_names=names
    )


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
    """The settings of a request for its answer."""

    tool_use_start: bool = False
    """True to announce each call before the call itself."""
    mcp_names: Mapping[str, tuple[str, str]] = {}
    """Tool of an MCP server → the server's name, and the tool's name there."""


class ChunkWriter(BlockWriter):
    """Writes Augment's chunks.

    Args:
        source: dialect from which the events were read.
        reply: settings of the request, from `reply_of`.
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
        """Return a chunk with this text; if `kind` is set, also with a node of this type and the members `body`."""
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
        self.reason = candidate  # `_stop_reason` also needs the calls and failures until the end
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
        reply: settings of the request, from `reply_of`.

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
