"""Augment's wire: its requests into the ir and on to any dialect, any dialect's stream into its NDJSON chunks.

Not one of the dialects of `DIALECTS`: it asks like an editor and answers like none, so requests are only read and
streams are only written. The facts are those of the public extension, read November 2026.
"""

from __future__ import annotations

from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.dialects import Policy, StreamTranslation, check_losses, dialect
from backplane.dialects._augment_history import REQUEST_NODES, has_summary, joined, read_exchange, read_turn
from backplane.dialects._augment_nodes import NAME, Members, is_said, listed
from backplane.dialects._augment_stream import ChunkWriter, Reply
from backplane.dialects.codec import Ledger, parse_json
from backplane.dialects.pairing import paired
from backplane.errors import TranslationError
from backplane.ir import Conversation, Message, Text, ToolSpec, Translated

PERSONAS: Final[dict[int, str]] = {1: "PROTOTYPER", 2: "BRAINSTORM", 3: "REVIEWER"}
"""By `persona_type`; 0 is none."""

AGENT: Final = "Work as a coding agent: use the tools you are given until the task is done."
"""Said when the mode is AGENT."""

CODE: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("prefix",), "Code before the selection:"),
    (("selected_code", "selected_text", "selected_code_snippet"), "Selected code:"),
    (("suffix",), "Code after the selection:"),
    (("diff",), "Diff:"),
)
"""Members that show code, and the words before it."""


def to_ir(request: Json, system: str = "") -> Translated[Conversation]:
    """Read a request.

    Args:
        system: an operator's own words, put among the request's guidelines.

    Raises:
        TranslationError: `dialect_mapping_failed`, it is no object or says nothing at all.
    """
    ledger = Ledger(NAME, NAME)
    members = Members(request, "", ledger)
    messages: list[Message] = []
    history = list(listed(members, "chat_history"))
    start = max((place for place, (_, value) in enumerate(history) if has_summary(value)), default=0)
    start = len(history) if has_summary(request) else start
    for at, value in history[:start]:
        ledger.drop(at, "part", "a summary that comes later stands for it", value)
    for at, value in history[start:]:
        messages += read_exchange(value, at, ledger)
    head = _read_system(members, system)
    messages += _read_last_turn(members, ledger)
    if not messages:
        raise TranslationError(
            "dialect_mapping_failed",
            f"the request has no message, no nodes ({', '.join(REQUEST_NODES)}) and no chat_history",
            hint="check --from",
        )
    tools = tuple(_read_tool(tool, at, ledger) for at, tool in listed(members, "tool_definitions"))
    options, options_at = _read_flags(members, bool(tools))
    model = members.text("model") or None
    conversation = Conversation(
        dialect=NAME, messages=(*head, *messages), model=model, tools=tools, options=options, options_at=options_at,
        ext=members.ext(),
    )  # fmt: skip
    # An editor may have been stopped anywhere: calls without results, results without calls, results that come late.
    whole = paired(conversation)
    return Translated(whole.value, (*ledger.done(), *whole.losses))


def _read_last_turn(members: Members, ledger: Ledger) -> list[Message]:
    text, at = "", "/message"
    for where, value in members.each(str, "message", "prompt", "instruction"):
        if not text and is_said(value):
            text, at = value, where
        elif is_said(value) and value != text:
            ledger.drop(where, "extension", f"the text of the turn is {at}", value)
    code: list[Text] = []
    for names, words in CODE:
        for where, value in members.each(str, *names):
            shown = Text(text=f"{words}\n{value}", at=where)
            if shown.text not in (other.text for other in code):
                code.append(shown)
    return read_turn(text, at, members, ledger, code=code)


def _read_system(members: Members, system: str) -> tuple[Message, ...]:
    """Join the system text, in the order in which the extension does, blank line between."""
    persona = members.number("persona_type") or 0
    found: list[tuple[str, str]] = []
    if persona:
        found.append(("/persona_type", f"Persona: {PERSONAS.get(persona, persona)}"))
    for name in ("user_guidelines", "workspace_guidelines"):
        found.append((f"/{name}", members.text(name)))
    found.append(("/rules", _read_rules(members)))
    found.append(("/agent_memories", members.text("agent_memories", "memories_info")))
    found.append(("", system))
    mode = members.left.get("mode")
    if isinstance(mode, str) and mode.upper() == "AGENT":
        del members.left["mode"]
        found.append(("/mode", AGENT))
    language, path = members.text("language", "lang"), members.text("path")
    found += [("/lang", f"Language: {language}" if language else ""), ("/path", f"Path: {path}" if path else "")]
    parts = joined(Text(text=text.strip(), at=at) for at, text in found if text.strip())
    return (Message(role="system", parts=parts, at="/user_guidelines"),) if parts else ()


def _read_rules(members: Members) -> str:
    """Rules as one text, as a list of texts, or as a list of objects with their content."""
    text = members.text("rules")
    found: list[str] = []
    for at, rule in listed(members, "rules"):
        if isinstance(rule, str):
            found.append(rule)
            continue
        one = Members(rule, at, members.ledger)
        found.append("\n".join(words for words in (one.text("path", "name"), one.text("content", "text")) if words))
        for key, value in one.rest().items():
            members.ledger.drop(f"{at}/{key}", "extension", f"only {NAME} knows it", value)
    return text or "\n\n".join(found)


def _read_tool(value: Json, at: str, ledger: Ledger) -> ToolSpec:
    members = Members(value, at, ledger)
    for name in ("mcp_server_name", "mcp_tool_name"):
        members.text(name)  # these come back with the call, by `reply_of`
    schema = members.take(dict, "input_schema")
    written = members.text("input_schema_json")
    if schema is None and written:
        read = parse_json(written)
        if isinstance(read, dict):
            schema = read
        else:
            ledger.drop(f"{at}/input_schema_json", "tool_field", "the schema is no JSON object", written)
    if schema is None:
        ledger.synthesise(f"{at}/input_schema", "required", "a tool without a schema takes any object")
        schema = {"type": "object", "properties": {}}
    return ToolSpec(
        name=members.text("name"), description=members.text("description") or None, schema=schema, at=at,
        ext=members.ext(),
    )  # fmt: skip


def _read_flags(members: Members, has_tools: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Calls come one at a time unless the editor says that it can run several."""
    at, found = next(members.each(dict, "feature_detection_flags"), ("/feature_detection_flags", {}))
    flags = Members(found, at, members.ledger)
    flags.flag("support_tool_use_start")  # it is about the answer: `reply_of`
    is_parallel = flags.flag("support_parallel_tool_use")
    for key, value in flags.rest().items():
        members.ledger.drop(f"{at}/{key}", "extension", f"only {NAME} knows it", value)
    if not has_tools or is_parallel:
        return {}, {}
    return {"parallel_tool_calls": False}, {"parallel_tool_calls": f"{at}/support_parallel_tool_use"}


def reply_of(request: Json) -> Reply:
    """Read what a request says about the answer that it wants; a `ChunkStream` needs it.

    Raises:
        TranslationError: `dialect_mapping_failed`, it is no object.
    """
    scratch = Ledger(NAME, NAME)
    members = Members(request, "", scratch)
    flags = Members(members.take(dict, "feature_detection_flags") or {}, "", scratch)
    names: dict[str, tuple[str, str]] = {}
    for at, tool in listed(members, "tool_definitions"):
        one = Members(tool, at, scratch)
        server, inner = one.text("mcp_server_name"), one.text("mcp_tool_name")
        if server:
            names[one.text("name")] = (server, inner or one.text("name"))
    return Reply(tool_use_start=flags.flag("support_tool_use_start") is True, mcp_names=names)


def translate_request(document: Json, target: str, policy: Policy = "warn", *, system: str = "") -> Translated[Json]:
    """Translate a request into a dialect's.

    Args:
        policy: `warn` returns the losses, `allow` leaves them out, `fail` raises when there are material ones.
        system: as for `to_ir`.

    Raises:
        TranslationError: `dialect_unknown`; `dialect_mapping_failed`, it is no request; `mapping_lossy_conversion`
            by the policy.
    """
    writer = dialect(target)
    read = to_ir(document, system)
    written = writer.from_ir(read.value)
    losses = (*read.losses, *written.losses)
    check_losses(losses, policy)
    return Translated(written.value, () if policy == "allow" else losses)


class ChunkStream(StreamTranslation):
    """One stream of a dialect's chunks into Augment's, each to be written as a line of JSON.

    Args:
        source: dialect of the chunks that come.
        reply: what the request said about its answer.

    Raises:
        TranslationError: `dialect_unknown`.
    """

    def __init__(self, source: str, reply: Reply = Reply()) -> None:  # noqa: B008  frozen
        super().__init__(source, source)
        # An editor's model stands behind a gateway; what it repeats is shown once, as the host `api` does.
        self.reader.mends = True
        self.writer = ChunkWriter(source, reply)
