"""Reads and writes OpenAI's Responses, which its agent Codex uses (platform.openai.com, read November 2026).

A request and an answer are lists of items: messages, calls, results, reasoning. Adjacent items of the assistant become
one message. In streams, each item has a start and an end event, and so has each content inside an item; the last event
repeats the whole answer and takes precedence, because some gateways omit indices, starts and ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.dialects import ir
from backplane.dialects.chat import (
    ERROR,
    read_audio,
    read_choice_of_tool,
    read_citation,
    read_form,
    read_given,
    write_form,
)
from backplane.dialects.chat import KNOWN as CHAT_KNOWN
from backplane.dialects.common import (
    NUMBER,
    Counters,
    LossLedger,
    MediaTable,
    OptionsRead,
    answer_of,
    arguments_text,
    by_address,
    conversation_of,
    effort_word,
    ext_of,
    head_of,
    item_of,
    kind_of,
    media_url,
    members_of,
    merged,
    pop,
    pop_at,
    pop_inner,
    pop_list,
    put_at,
    put_back,
    read_content,
    read_file,
    read_part,
    read_url,
    server_tool,
    takes,
    tool_of,
    without_none,
    write_content,
    write_options,
    write_part,
    write_parts,
)
from backplane.dialects.limits import ServerLimits, Spelling
from backplane.dialects.outcome import Endings
from backplane.dialects.streams import BlockReader, BlockWriter, Key, begun, failure, text_of
from backplane.dialects.vendor import Dialect, read_error, type_name

NAME: Final = "codex"

TOOL_NAMES: Final[dict[str, str]] = {
    "shell": "bash", "shell_command": "bash", "exec_command": "bash", "local_shell": "bash",
    "apply_patch": "apply_patch", "read_file": "read_file", "list_dir": "list_files", "grep_files": "grep",
    "web_search": "web_search",
}  # fmt: skip
"""Tool names of the vendor's agent → neutral names."""

CAPABILITIES: Final = Manifest({
    "streaming": NATIVE,
    "tool_read": NATIVE, "tool_write": NATIVE, "tool_edit": NATIVE, "tool_bash": NATIVE,
    "tool_glob": EMULATED, "tool_grep": EMULATED,
    "structured_output_json_schema": NATIVE,
    "hooks_pre_tool_use": EMULATED, "hooks_post_tool_use": EMULATED,
    "mcp_client": UNSUPPORTED, "mcp_server": UNSUPPORTED,
})  # fmt: skip

DEFAULTS: Final[dict[str, Json]] = {"model": "gpt-5.5", "max_tokens": 4096}

ROLES: Final[dict[str, ir.Role]] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
BOUND: Final = frozenset({"item_reference", "compaction", "compaction_trigger"})

STOPS: Final[dict[str, ir.Stop]] = {
    "completed": "end", "incomplete": "other", "incomplete:max_output_tokens": "max_tokens",
    "incomplete:content_filter": "content_filter", "failed": "error", "cancelled": "cancelled",
}  # fmt: skip

STOP_WORDS: Final[dict[ir.Stop | None, str]] = {
    "end": "completed", "tool_use": "completed", "stop_sequence": "completed",
    "max_tokens": "incomplete:max_output_tokens", "content_filter": "incomplete:content_filter",
    "refusal": "incomplete:content_filter", "error": "failed", "cancelled": "cancelled",
    # These answers may be incomplete, so they must not end with `completed`.
    None: "incomplete", "pause": "incomplete", "other": "incomplete",
}  # fmt: skip

ENDINGS: Final = Endings(STOPS, STOP_WORDS, frozenset({"in_progress", "queued"}))

LIMITS: Final = ServerLimits(call_id=Spelling(most=64), tool_name=Spelling("[a-zA-Z0-9_-]", 64))
"""Limits of tool names and of the lengths of ids (platform.openai.com, responses/create, read 2026-11)."""


TEXTS: Final = ("input_text", "output_text", "text")
SERVER_TOOLS: Final = ("_call", "_call_output", "_output", "mcp_list_tools", "program")
"""Endings of the item kinds that belong to tools run by the vendor."""
CALLS: Final[dict[str, tuple[str, Any]]] = {
    "function_call": ("arguments", "function"), "custom_tool_call": ("input", "custom"),
}  # fmt: skip
"""Kind of a call's item → the member with its arguments, and `ToolUse.kind`."""
RESULTS: Final[dict[str, Any]] = {"function_call_output": "function", "custom_tool_call_output": "custom"}
FILES: Final[frozenset[str | None]] = frozenset({"openai", "copilot"})
MEDIA: Final[MediaTable] = {
    "image/data": None, "image/url": None, "image/file_id": FILES, "document/data": None, "document/url": None,
    "document/file_id": FILES,
}  # fmt: skip
STATE: Final = frozenset({"prompt", "conversation", "previous_response_id"})
"""Members that refer to messages stored at the vendor; a request with one of them needs no input."""

SAME: Final[dict[str, tuple[type[Any], ...]]] = {
    "max_output_tokens": (int,), "temperature": NUMBER, "top_p": NUMBER, "top_logprobs": (int,), "stream": (bool,),
    "parallel_tool_calls": (bool,), "user": (str,), "metadata": (dict,), "service_tier": (str,),
    "reasoning/effort": (str,), "text/verbosity": (str,),
}  # fmt: skip
"""Path of a member whose value is the same in the neutral form → types of the value."""
BOUNDS: Final[dict[str, tuple[Any, Any]]] = {
    "max_output_tokens": (16, None), "temperature": (0, 2), "top_logprobs": (0, 20),
}  # fmt: skip
"""Member → least and greatest value that the server accepts; None for no limit."""
NAMES: Final = {
    "max_output_tokens": "max_tokens", "reasoning/effort": "reasoning_effort", "text/verbosity": "verbosity",
}  # fmt: skip
"""Path of a member → its option, where their names differ."""
KNOWN: Final = {**CHAT_KNOWN, "service_tier": frozenset({"auto", "default", "flex", "scale", "priority"})}


# Blocks of a content list ---------------------------------------------------------------------------------------------


def read_block(value: Json, at: str) -> ir.Part:
    """Read one block of a `content` list; a block of an unknown kind stays native."""
    return read_part(NAME, value, at, _read_block)


def _read_block(kind: str, rest: dict[str, Any], at: str) -> ir.Part | None:
    if kind in TEXTS and (text := pop(rest, "text")) is not None:
        found = rest.get("annotations")
        if type(found) is not list or not found or not all(type(one) is dict for one in found):
            return ir.Text(text=text)
        del rest["annotations"]
        cited = (read_citation(one, f"{at}/annotations/{place}", NAME) for place, one in enumerate(found))
        return ir.Text(text=text, citations=tuple(cited))
    if kind == "refusal" and (text := pop(rest, "refusal")) is not None:
        return ir.Refusal(text=text)
    if kind == "input_audio":
        body = pop_inner(rest, kind)
        media = read_audio(body)
        put_back(rest, kind, body)
        return media
    members = {"input_image": ("image_url", "file_id"), "input_file": ("file_data", "file_url", "file_id")}.get(
        kind, ()
    )
    found = {name: rest[name] for name in members if type(rest.get(name)) is str}
    if len(found) != 1:
        return None
    ((member, word),) = found.items()
    del rest[member]
    fields = {"file_id": {"file_id": word}, "file_url": {"url": word}}.get(member)
    fields = fields or (read_url(word) if kind == "input_image" else read_file(word))
    if kind == "input_image":
        return ir.Media(kind="image", detail=pop(rest, "detail"), **fields)
    return ir.Media(kind="document", name=pop(rest, "filename"), **fields)


def write_block(part: ir.Part, notes: LossLedger, text: str = "input_text") -> Json:
    """Write a block of a content list; if the vendor has no such block, note a loss and return None.

    Args:
        text: kind of a text block: `output_text` for text of the model, else `input_text`.
    """
    out = write_part(part, notes, partial(_write_block, text=text))
    if type(out) is dict and ".." in out:  # members of the item, not of the block
        del out[".."]
    return out


def _write_block(part: ir.Part, notes: LossLedger, text: str) -> dict[str, Any] | None:
    match part:
        case ir.Text():
            cited = write_citations(part, notes)
            return {"type": text, "text": part.text, **({"annotations": cited} if cited else {})}
        case ir.Refusal():
            return {"type": "refusal", "refusal": part.text}
        case ir.Media() if takes(part, MEDIA if text == "input_text" else {}, notes):
            return _write_media(part, notes)
    return None


def write_citations(part: ir.Text, notes: LossLedger) -> list[Json]:
    """Write a text's annotations; omit an annotation without a URL, and note a loss."""
    out: list[Json] = []
    for found in part.citations:
        one = found if notes.is_home else by_address(found, part, notes)
        if one is not None:
            kind = "url_citation" if one.kind == "url" or not notes.is_home else one.kind or None
            body = {"type": kind, "url": one.url, "title": one.title, "start_index": one.start, "end_index": one.end}
            out.append(notes.own(without_none(body), found))
    return out


def _write_media(part: ir.Media, notes: LossLedger) -> dict[str, Any] | None:
    url = media_url(part)
    if url is None and part.file_id is None:
        return None
    if part.kind == "image":
        detail = part.detail if notes.is_home or part.detail is not None else "auto"
        return without_none({"type": "input_image", "image_url": url, "file_id": part.file_id, "detail": detail})
    if part.kind == "document":
        is_bare = part.data is not None and part.media_type is None and notes.is_home
        data = part.data if is_bare or part.data is None else url
        name = part.name if part.name is not None else part.title
        ids = {"file_url": part.url, "file_id": part.file_id, "filename": name}
        return without_none({"type": "input_file", "file_data": data, **ids})
    if part.kind == "audio" and part.data is not None:
        form = (part.media_type or "").partition("/")[2]
        return {"type": "input_audio", "input_audio": {"data": part.data, "format": "mp3" if form == "mpeg" else form}}
    return None


def write_said(parts: Iterable[ir.Part], notes: LossLedger) -> Json:
    """Write blocks as a `content`: a text if there is a single text block, else a list."""
    return write_content(parts, partial(write_block, notes=notes))


# Items, read ----------------------------------------------------------------------------------------------------------


def read_items(items: list[Json], base: str, *, is_answer: bool = False) -> list[ir.Message]:
    """Read a list of items into messages; adjacent items of the assistant become one message."""
    out: list[ir.Message] = []
    is_open = False
    for place, item in enumerate(items):
        found = read_item(item, f"{base}/{place}", is_answer=is_answer)
        if isinstance(found, ir.Message):
            out.append(found)
        elif is_open:
            out[-1] = msgspec.structs.replace(out[-1], parts=(*out[-1].parts, *found))
        else:
            out.append(ir.Message(role="assistant", parts=tuple(found), at=f"{base}/{place}"))
        is_open = not isinstance(found, ir.Message)
    return out or ([ir.Message(role="assistant", parts=(), at=base)] if is_answer else [])


def read_item(item: Json, at: str, *, is_answer: bool = False) -> ir.Message | list[ir.Part]:
    """Read one item: a message of its own, or parts of the assistant's turn."""
    rest = item.copy() if type(item) is dict else {}
    kind = pop(rest, "type") if "type" in rest else "message" if rest else None
    if kind == "message" and type(rest.get("role")) is str:
        return _read_message(item, rest, at, is_answer=is_answer)
    call_id = rest.get("call_id")
    if kind in RESULTS and type(call_id) is str:
        del rest["call_id"]
        content = read_content(rest, "output", at, read_block)
        result = ir.ToolOutput(id=call_id, content=content, kind=RESULTS[kind], at=at, ext=ext_of(NAME, rest))
        return ir.Message(role="tool", parts=(result,), at=at)
    if kind in CALLS and type(call_id) is str and type(rest.get("name")) is str:
        member, of = CALLS[kind]
        del rest["call_id"]
        name, (text, given) = rest.pop("name"), read_given(rest, member, of)
        return [ir.ToolUse(id=call_id, name=name, input=given, text=text, kind=of, at=at, ext=ext_of(NAME, rest))]
    if kind == "reasoning":
        proof, (text, field) = pop(rest, "encrypted_content"), _take_thoughts(rest)
        return [ir.Thinking(text=text, field=field, signature=proof, at=at, ext=ext_of(NAME, rest))]
    is_tool = type(kind) is str and kind.endswith(SERVER_TOOLS)
    label = str((is_tool and item.get("name")) or kind)
    return [ir.NativePart(dialect=NAME, label=label, payload=item, at=at, is_tool=is_tool, is_bound=kind in BOUND)]


THOUGHTS: Final = {"summary": "summary_text", "content": "reasoning_text"}
"""Member of a reasoning item → kind of its blocks."""


def _take_thoughts(rest: dict[str, Any]) -> tuple[str, str | None]:
    """Remove the summary or else the content of a reasoning item; return its text and its member, or `""` and None."""
    for key, kind in THOUGHTS.items():
        found = rest.get(key)
        if type(found) is list and found and all(
            kind_of(one) == kind and one.keys() == {"type", "text"} and type(one["text"]) is str for one in found
        ):  # fmt: skip
            del rest[key]
            return "\n\n".join(one["text"] for one in found), key
    return "", None


def _read_message(item: Json, rest: dict[str, Any], at: str, *, is_answer: bool) -> ir.Message | list[ir.Part]:
    """Read a message item; the unread members of an assistant's item are kept in `ext` of its first part."""
    native = rest.pop("role")
    role = ROLES.get(native, "user")
    parts = read_content(rest, "content", at, read_block)
    if role != "assistant":
        if is_answer:
            return [ir.NativePart(dialect=NAME, label=f"item of {role}", payload=item, at=at)]
        return ir.Message(role=role, parts=parts, native_role=native, at=at, ext=ext_of(NAME, rest))
    if not parts:
        return [ir.NativePart(dialect=NAME, label="empty message", payload=item, at=at)]
    if rest:
        ext = {NAME: {**parts[0].ext.get(NAME, {}), "..": rest}}
        parts = (msgspec.structs.replace(parts[0], ext=ext), *parts[1:])
    return list(parts)


# Items, written -------------------------------------------------------------------------------------------------------


def write_item(part: ir.Part, notes: LossLedger) -> Json:
    """Write a call, a result or thinking as an item; if the vendor has no such item, note a loss and return None."""
    return write_part(part, notes, _write_item)


def _write_item(part: ir.Part, notes: LossLedger) -> dict[str, Any] | None:
    made = notes.is_answer and not notes.is_home
    out: dict[str, Any]
    match part:
        case ir.ToolUse():
            kind, member = ("function_call", "arguments") if part.kind == "function" else ("custom_tool_call", "input")
            out = {"type": kind, "call_id": part.id, "name": part.name, member: arguments_text(part)}
            own = {"id": f"fc_{_word(part, notes)}", "status": "incomplete" if part.is_cut else "completed"}
            return {**out, **own} if made else out
        case ir.ToolOutput():
            kind = "function_call_output" if part.kind == "function" else "custom_tool_call_output"
            return {"type": kind, "call_id": part.id, "output": _write_output(part, notes)}
        case ir.Thinking() if part.redacted is None and (notes.is_answer or notes.is_home):
            key = part.field if notes.is_home and part.field == "content" else "summary"
            said = [{"type": THOUGHTS[key], "text": part.text}] if part.text else []
            out = {"type": "reasoning", "summary": [], key: said}
            if notes.is_home:
                return without_none({**out, "encrypted_content": part.signature})
            notes.degrade(part.at, "thinking", "thinking stands in a summary, without this vendor's proof")
            return {**out, "id": f"rs_{_word(part, notes)}"}
    return None  # The vendor would search its store for thinking that has no signature of its own.


def _write_output(part: ir.ToolOutput, notes: LossLedger) -> Json:
    if notes.is_home or any(isinstance(inner, ir.Media) for inner in part.content):
        return write_said(part.content, notes) or ""
    if len(part.content) > 1 and all(isinstance(inner, ir.Text) for inner in part.content):
        return write_said(part.content, notes)
    return notes.plain_text(part.content)


def _word(part: ir.Part, notes: LossLedger) -> str:
    """Return a hash from which a block's id is made; if the block came from Codex, an edit of its text keeps the id."""
    text = part.at if notes.is_home and part.at else f"{part.at} {getattr(part, 'text', '')}"
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()


def write_items(messages: tuple[ir.Message, ...], notes: LossLedger) -> list[Json]:
    """Write messages as a list of items."""
    out: list[Json] = []
    for message in messages:
        out += write_turn(message, notes) if message.role == "assistant" else _write_message(message, notes)
    return out


def _write_message(message: ir.Message, notes: LossLedger) -> list[Json]:
    out = [write_item(part, notes) for part in message.parts if isinstance(part, ir.ToolOutput)]
    others = [part for part in message.parts if not isinstance(part, ir.ToolOutput)]
    if out and not others:
        return out
    native, role = message.native_role, "user" if message.role == "tool" else message.role
    is_own = native is not None and ROLES.get(native) == message.role and not out
    made = {"type": "message", "role": native if is_own else role, "content": write_said(others, notes) or ""}
    return [*out, notes.own(made, message)]


def write_turn(message: ir.Message, notes: LossLedger) -> list[Json]:
    """Write the items of an assistant's message; adjacent content blocks become one message item."""
    out: list[Json] = []
    said: list[ir.Part] = []
    for part in (*message.parts, None):
        is_said = isinstance(part, ir.Text | ir.Refusal | ir.Media) or (
            isinstance(part, ir.NativePart) and "/content/" in part.at
        )
        if said and not (is_said and (not notes.is_home or item_of(said[0].at) == item_of(part.at))):  # type: ignore[union-attr]
            out += _write_said(said, notes)
            said = []
        if is_said:
            said.append(part)  # type: ignore[arg-type]
        elif part is not None and (written := write_item(part, notes)) is not None:
            out.append(written)
    return out


def _write_said(parts: list[ir.Part], notes: LossLedger) -> list[Json]:
    write = write_parts if notes.is_answer else write_content
    content = write(parts, partial(write_block, notes=notes, text="output_text"))
    out: dict[str, Any] = {"type": "message", "role": "assistant", "content": content}
    if notes.is_home:
        merged(out, parts[0].ext.get(NAME, {}).get("..", {}))
    if type(content) is list:  # a message with a list needs an id, a status and annotations
        for block in content:
            if kind_of(block) == "output_text":
                block.setdefault("annotations", [])
        out = {"id": f"msg_{_word(parts[0], notes)}", "status": "completed", **out}
    return [out] if out["content"] else []


# Requests -------------------------------------------------------------------------------------------------------------


def read_request(document: Json) -> ir.Conversation:
    """Read a Responses request as a conversation."""
    rest = members_of(document)
    messages: list[ir.Message] = []
    roles: tuple[tuple[str, ir.Role], ...] = (("instructions", "system"), ("input", "user"))
    for name, role in roles:
        if (text := pop(rest, name)) is not None:
            messages.append(ir.Message(role=role, parts=(ir.Text(text=text, at=f"/{name}"),), at=f"/{name}"))
    is_read = any(message.at == "/input" for message in messages)
    if "input" in rest or not (is_read or STATE & rest.keys()):
        messages += read_items(pop_list(rest, "input"), "/input")
    options = OptionsRead(rest, SAME, NAMES)
    _read_options(rest, options)
    return conversation_of(NAME, rest, messages, options, lambda tool, at: [read_tool(tool, at)])


def read_tool(value: Json, at: str) -> ir.ToolSpec:
    """Read a tool definition; a tool that is neither a function nor a free-text tool is run by the vendor."""
    rest = value.copy() if type(value) is dict else {}
    kind = pop(rest, "type")
    return (tool_of(NAME, rest, at, kind) if kind in ("function", "custom") else None) or server_tool(value, at)


def _read_options(rest: dict[str, Any], options: OptionsRead) -> None:
    form = pop_inner(pop_inner(rest, "text"), "format")
    if (asked := read_form(form.pop("type", None), form)) is not None:
        options.add("response_format", asked, "/text/format")
        pop_at(rest, "text/format", dict)
    if (choice := read_choice_of_tool(rest.get("tool_choice"))) is not None:
        options.add("tool_choice", choice, "/tool_choice")
        del rest["tool_choice"]


def write_request(conversation: ir.Conversation, notes: LossLedger) -> dict[str, Any]:
    """Write a conversation as a Responses request, and note the losses."""
    out = head_of(conversation, notes)
    messages = conversation.messages
    first = messages[0] if messages else None
    if first is not None and first.role == "system" and first.name is None and first.native_role in (None, "system"):
        content = write_said(first.parts, notes)
        if type(content) is str and (first.native_role is None or not notes.is_home):
            out["instructions"] = content
            messages = messages[1:]
    out["input"] = write_items(messages, notes)
    if conversation.tools:
        out["tools"] = [write_tool(tool, notes) for tool in conversation.tools]
    _write_options(conversation, out, notes)
    return notes.own(out, conversation)


def write_tool(tool: ir.ToolSpec, notes: LossLedger) -> Json:
    """Write a tool definition; a function of another dialect gets `strict: false` if it has no `strict`."""
    if tool.kind == "server":
        return tool.payload
    strict = tool.strict
    if strict is None and tool.kind == "function" and not notes.is_home:
        # Without this member the vendor treats every schema as strict.
        notes.synthesise(tool.at, "required", "a tool says here that its schema is not strict")
        strict = False
    out = without_none({"type": tool.kind, "name": tool.name, "description": tool.description, "strict": strict})
    if tool.kind == "function" and (tool.schema is not None or not notes.is_home):
        out["parameters"] = tool.schema
    return notes.own(out, tool)


def _write_options(conversation: ir.Conversation, out: dict[str, Any], notes: LossLedger) -> None:
    left = dict(conversation.options)
    budget = left.pop("reasoning_budget", None)
    if budget is not None and (word := effort_word(budget, conversation, notes)) is not None:
        left["reasoning_effort"] = word
    out |= write_options(left, SAME, notes, NAMES, BOUNDS, KNOWN)
    if (form := left.pop("response_format", None)) is not None:
        kind, body = write_form(form, notes)
        put_at(out, "text/format", {"type": kind, **body})
    if (choice := left.pop("tool_choice", None)) is not None:
        by_name = {"type": choice.get("kind", "function"), "name": choice.get("name")}
        out["tool_choice"] = by_name if choice["mode"] == "tool" else choice["mode"]
    notes.lose_options(left)


# Answers --------------------------------------------------------------------------------------------------------------

USAGE: Final = Counters({
    "input_tokens": "input", "output_tokens": "output", "input_tokens_details/cached_tokens": "cache_read",
    "input_tokens_details/cache_write_tokens": "cache_write", "output_tokens_details/reasoning_tokens": "reasoning",
}, needed=("input", "output", "cache_read", "cache_write", "reasoning"))  # fmt: skip


def read_answer(document: Json) -> ir.Answer:
    """Read a Responses response as an answer."""
    rest = members_of(document)
    if (failed := read_error(document, rest, "output", NAME)) is not None:
        return failed
    (message,) = read_items(pop_list(rest, "output"), "/output", is_answer=True)
    raw, stop_at = pop(rest, "status"), "/status"
    details = rest.get("incomplete_details")
    reason = details.get("reason") if type(details) is dict and len(details) == 1 else None
    if raw == "incomplete" and type(reason) is str and reason:
        del rest["incomplete_details"]
        raw, stop_at = f"incomplete:{reason}", "/incomplete_details/reason"
    candidate = ir.Candidate(message=message, stop=ENDINGS.read(raw, message.parts), stop_raw=raw, stop_at=stop_at)
    return answer_of(NAME, rest, (candidate,), USAGE, created="created_at")


def write_answer(answer: ir.Answer, notes: LossLedger) -> dict[str, Any]:
    """Write an answer as a Responses response, and note the losses."""
    out = without_none({"id": answer.id, "model": answer.model, "created_at": answer.created})
    out |= {"object": "response", "output": []}
    for candidate in answer.candidates[:1]:
        out["output"] = write_turn(candidate.message, notes)
        out |= status_of(ENDINGS.write(candidate, notes) or "")
        notes.own(out, candidate)
    notes.lose_candidates(answer)
    if answer.usage is not None:
        out["usage"] = USAGE.write(answer.usage, notes)
    if notes.is_home:
        return notes.own(out, answer)
    # The last three repeat the request, which is unknown here.
    made = {"id": "resp_translated", "created_at": 0, "model": "unknown", "parallel_tool_calls": True,
            "tool_choice": "auto", "tools": []}  # fmt: skip
    return {**made, **without_none(out)}


def status_of(word: str) -> dict[str, Any]:
    """Return the members of an answer for a stop reason, which is `status` or `status:reason`."""
    status, _, reason = word.partition(":")
    return {**({"status": status} if status else {}), **({"incomplete_details": {"reason": reason}} if reason else {})}


# Streams, read --------------------------------------------------------------------------------------------------------

TERMINAL: Final = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})

DELTAS: Final = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.reasoning_summary_text.delta": "summary",
    "response.reasoning_text.delta": "content",
    "response.function_call_arguments.delta": "call",
    "response.custom_tool_call_input.delta": "call",
}

DONES: Final = {
    "response.output_text.done": ("text", "text"),
    "response.refusal.done": ("refusal", "refusal"),
    "response.reasoning_text.done": ("content", "text"),
    "response.function_call_arguments.done": ("call", "arguments"),
    "response.custom_tool_call_input.done": ("call", "input"),
}
"""Event that repeats a whole text → the kind of the text, and the event's member that has it."""

NOISE: Final = frozenset({
    "response.content_part.done", "response.keepalive", "response.reasoning_summary_text.done",
    "response.reasoning_summary_part.done", "response.reasoning_summary_part.added", "keepalive", "ping",
})  # fmt: skip
"""Events without new content, which are ignored."""


class _Item:
    """An item of a stream, until its last event."""

    def __init__(self, key: Any, kind: str) -> None:
        self.key = key
        self.kind = kind
        self.summary = -1
        self.is_done = False

    @property
    def at(self) -> str:
        return f"/output/{self.key}"


class StreamReader(BlockReader):
    """Reads the events of one Responses stream."""

    def __init__(self, dialect: Any) -> None:
        super().__init__(dialect)
        self.items: dict[Any, _Item] = {}
        self.current: Any = None
        self.call_ids: set[str] = set()
        self.texts: list[str] = []
        """Texts and refusals that have ended; if the last event has further ones, they are added."""
        self.handlers = {
            "response.created": self._begin, "response.in_progress": self._begin, "response.queued": self._begin,
            "response.output_item.added": self._added, "response.output_item.done": self._done,
            "response.content_part.added": self._part_added,
            "response.output_text.annotation.added": self._annotation, "error": self._error,
            **dict.fromkeys(DELTAS, self._delta), **dict.fromkeys(DONES, self._text_done),
            **dict.fromkeys(TERMINAL, self._end), **dict.fromkeys(NOISE, lambda chunk: []),
        }  # fmt: skip

    def other(self, chunk: Json) -> list[ir.StreamEvent]:
        """Read a whole answer or a failure; keep events of a later version unchanged."""
        kind = kind_of(chunk)
        if type(chunk) is not dict:
            return [ir.Kept(chunk)]
        if chunk.get("object") == "response" and "output" in chunk:
            return self._end({"type": "response.completed", "response": chunk})
        if kind is None and chunk.get("error"):
            return self._error(chunk["error"] if type(chunk["error"]) is dict else {"message": chunk["error"]})
        # For tools that the vendor runs, the end of the item repeats the content of its events.
        return [ir.Kept(chunk, type(kind) is str and "_call." in kind)]

    def _begin(self, chunk: Json) -> list[ir.StreamEvent]:
        response = chunk.get("response")
        if self.began or type(response) is not dict:
            return []
        self.began = True
        return [begun(response.get("id"), response.get("model"), response.get("created_at"), "/response")]

    def _item(self, chunk: Json, kind: str) -> _Item:
        """Return the item of an event: the item with its index, else with its id, else the current item."""
        index, raw = chunk.get("output_index"), chunk.get("item")
        key: Any = chunk.get("item_id") or (raw.get("id") if type(raw) is dict else None)
        key = key if type(key) is str else None
        if type(index) is int:
            key = index
        elif key is None or key not in self.items:
            if chunk.get("type") == "response.output_item.added" or self.current is None:
                key = key if key is not None else ("item", len(self.items))
            else:
                key = self.current
        if chunk.get("type") == "response.output_item.added" and key in self.items and self.items[key].is_done:
            del self.items[key]  # some gateways send index 0 for every item
        self.current = key
        return self.items.setdefault(key, _Item(key, kind))

    def _open(self, item: _Item, place: int, part: ir.Part) -> list[ir.StreamEvent]:
        if isinstance(part, ir.ToolUse):
            self.call_ids.add(part.id)
        return self.begin((item.key, place), part)

    def _added(self, chunk: Json) -> list[ir.StreamEvent]:
        raw = chunk.get("item")
        if type(raw) is not dict:
            return [ir.Kept(chunk, False)]
        item = self._item(chunk, str(raw.get("type")))
        found = read_item(raw, item.at)
        part = found[0] if isinstance(found, list) and len(found) == 1 else None
        if (item.key, 0) in self.open:
            return []
        if isinstance(part, ir.ToolUse):
            return self._open(item, 0, msgspec.structs.replace(part, text=part.text or "", input={}))
        if isinstance(part, ir.Thinking):
            return self._open(item, 0, msgspec.structs.replace(part, text="", signature=None))
        return []

    def _part_added(self, chunk: Json) -> list[ir.StreamEvent]:
        item, place = self._item(chunk, "message"), _place(chunk)
        part = read_block(chunk.get("part"), f"{item.at}/content/{place}")
        if (item.key, place) in self.open or item.kind == "reasoning" or not isinstance(part, ir.Text | ir.Refusal):
            return []
        return self._open(item, place, part)

    def _delta(self, chunk: Json) -> list[ir.StreamEvent]:
        return self._say(chunk, DELTAS[chunk["type"]], chunk.get("delta"))

    def _say(self, chunk: Json, what: str, text: Json) -> list[ir.StreamEvent]:
        if type(text) is not str or not text:
            return []
        item = self._item(chunk, {"call": "function_call", "summary": "reasoning", "content": "reasoning"}.get(
            what, "message"))  # fmt: skip
        place = _place(chunk) if what in ("text", "refusal") else 0
        key, out = (item.key, place), []
        if key not in self.open:
            if what == "call":
                return []  # a call without a name yet: the end of its item has the whole call
            at = f"{item.at}/content/{place}"
            part: ir.Part = ir.Thinking(text="", field=what, at=item.at)
            if item.kind != "reasoning":
                part = ir.Text(text="", at=at) if what == "text" else ir.Refusal(text="", at=at)
            out = self._open(item, place, part)
        number = chunk.get("summary_index", 0)
        if what == "summary" and type(number) is int and number > item.summary:
            text = "\n\n" + text if item.summary >= 0 else text
            item.summary = number
        return [*out, self.more(key, text, "arguments" if what == "call" else "text")]

    def _text_done(self, chunk: Json) -> list[ir.StreamEvent]:
        """Read an event that repeats a text; add the part that was in no delta."""
        what, member = DONES[chunk["type"]]
        text = chunk.get(member)
        item = self._item(chunk, {"call": "function_call", "content": "reasoning"}.get(what, "message"))
        if type(text) is not str or not text or item.is_done or (what == "content" and item.summary >= 0):
            return []
        key = (item.key, _place(chunk) if what in ("text", "refusal") else 0)
        return self._rest(key, text, item.at) if key in self.open else self._say(chunk, what, text)

    def _rest(self, key: Any, whole: str, at: str) -> list[ir.StreamEvent]:
        """Add the rest of a complete text that was in no piece; note it if the text differs from the pieces."""
        block = self.open[key]
        said = _said(block)
        field = "arguments" if isinstance(block.part, ir.ToolUse) else "text"
        if whole != said and whole.startswith(said):
            return [self.more(key, whole[len(said) :], field)]
        reason = "the end of a block says another text than its pieces"
        if whole and whole != said and at not in self.ledger.named:
            self.worked_around(at, reason)
        return []

    def _annotation(self, chunk: Json) -> list[ir.StreamEvent]:
        key = (self._item(chunk, "message").key, _place(chunk))
        found = chunk.get("annotation")
        if key not in self.open or type(found) is not dict:
            return []
        return [self.more(key, "", "citation", read_citation(found, "/annotations/0", NAME))]

    def _done(self, chunk: Json) -> list[ir.StreamEvent]:
        raw = chunk.get("item")
        if type(raw) is not dict:
            return [ir.Kept(chunk, False)]
        item = self._item(chunk, str(raw.get("type")))
        if item.is_done:
            return []
        item.is_done = True
        found = read_item(raw, item.at, is_answer=True)
        parts = found.parts if isinstance(found, ir.Message) else found
        return [event for place, part in enumerate(parts) for event in self._settle(item, place, part)]

    def _settle(self, item: _Item, place: int, part: ir.Part) -> list[ir.StreamEvent]:
        """Add the part of a complete block that was in no delta, and end the block."""
        key = (item.key, place)
        if key in self.open:
            out = self._rest(key, getattr(part, "text", None) or "", item.at)
        else:
            out = self._open(item, place, part)
        if isinstance(part, ir.Text | ir.Refusal):
            self.texts.append(part.text)
        return [*out, *self.end(key, part)]

    def _error(self, chunk: Json) -> list[ir.StreamEvent]:
        inner = chunk.get("error")
        return [failure(inner if type(inner) is dict else chunk, chunk, "code")]

    def _end(self, chunk: Json) -> list[ir.StreamEvent]:
        response = chunk.get("response")
        if self.ended or type(response) is not dict:
            return []
        self.ended = True
        out = self._begin(chunk)
        answer = None
        if type(response.get("output")) is list:
            answer = self.dialect.read_answer(response)
            out += self._missing(answer.candidates[0].message.parts)
        out += [*self.end_all(), *self.count(response.get("usage"), "/usage")]
        error = response.get("error")
        if type(error) is dict:
            out += self._error({**error, "type": "error"})
        raw = response.get("status") or str(chunk.get("type")).partition(".")[2]
        if answer is not None and answer.candidates[0].stop is not None:
            raw = answer.candidates[0].stop_raw
        out += self.stop(raw, "/status")
        # Some servers, and every interrupted answer, end with an empty list although there was content.
        has_all = answer is not None and (answer.candidates[0].message.parts or not self.counts)
        return [*out, ir.StreamEnded(answer if has_all else None)]

    def _missing(self, parts: tuple[ir.Part, ...]) -> list[ir.StreamEvent]:
        """Add blocks of the complete answer that were in no event, and the rest of incomplete texts."""
        out: list[ir.StreamEvent] = []
        nothing, told = not self.counts, list(self.texts)
        waiting = [key for key, block in self.open.items() if not isinstance(block.part, ir.Thinking)]
        for place, part in enumerate(parts):
            if isinstance(part, ir.Text | ir.Refusal) and not nothing:
                if part.text in told:
                    told.remove(part.text)
                    continue
                key = next((key for key in waiting if part.text.startswith(_said(self.open[key]))), None)
                if key is not None:
                    waiting.remove(key)
                    out += self._rest(key, part.text, part.at)
                if key is not None or told or waiting:
                    continue
            elif part.id in self.call_ids if isinstance(part, ir.ToolUse) else not nothing:
                continue
            out += self._settle(_Item(("whole", place), "whole"), 0, part)
        return out


def _place(chunk: dict[str, Any]) -> int:
    place = chunk.get("content_index")
    return place if type(place) is int else 0


def _said(block: Any) -> str:
    return (getattr(block.part, "text", None) or "") + "".join(block.texts)


# Streams, written -----------------------------------------------------------------------------------------------------

SAID: Final[dict[Any, tuple[str, str, dict[str, Any]]]] = {
    ir.Text: ("output_text", "text", {"content_index": 0}),
    ir.Refusal: ("refusal", "refusal", {"content_index": 0}),
    ir.Thinking: ("reasoning_summary_text", "text", {"summary_index": 0}),
    "function": ("function_call_arguments", "arguments", {}),
    "custom": ("custom_tool_call_input", "input", {}),
}
"""Kind of block → the name of its events, the member with its whole text, and the members with its index."""


class StreamWriter(BlockWriter):
    """Writes one stream as the vendor's events; every block is an item of its own."""

    cites_at_end = True

    def __init__(self, dialect: Any, source: str) -> None:
        super().__init__(dialect, source)
        self.sequence = 0
        self.answer_id: str | None = None
        """The id in the first event; it stays the same even if the source changes its id later."""
        self.items: list[Json] = []
        self.texts: dict[Key, list[str]] = {}

    def _event(self, kind: str, **members: Any) -> Json:
        event = {"type": f"response.{kind}", "sequence_number": self.sequence, **members}
        self.sequence += 1
        return event

    def head(self) -> list[Json]:
        head = self._head("in_progress")
        return [self._event("created", response=head), self._event("in_progress", response=dict(head))]

    def _head(self, status: str) -> dict[str, Any]:
        began = self.sum.began
        if self.answer_id is None:
            self.answer_id = began.id or "resp_translated"
        return {
            "id": self.answer_id, "object": "response", "created_at": began.created or 0,
            "status": status, "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
            "model": began.model or "unknown", "output": [], "parallel_tool_calls": True, "temperature": None,
            "tool_choice": "auto", "tools": [], "top_p": None,
        }  # fmt: skip

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        place = len(self.items)
        item: dict[str, Any]
        if isinstance(part, ir.Text | ir.Refusal):
            item = {"id": f"msg_{place}", "type": "message", "role": "assistant", "status": "in_progress",
                    "content": []}  # fmt: skip
        elif isinstance(part, ir.Thinking):
            item = {"id": f"rs_{place}", "type": "reasoning", "summary": []}
            self.ledger.degrade(part.at, "thinking", "thinking stands in a summary, without this vendor's proof")
        elif isinstance(part, ir.ToolUse):
            item = {"id": f"fc_{place}", "call_id": part.id, "name": part.name, "type": "custom_tool_call", "input": ""}
            if part.kind == "function":
                del item["input"]
                item |= {"type": "function_call", "arguments": "", "status": "in_progress"}
        else:
            return None
        self.items.append(item)
        self.opened[key], self.texts[key] = place, []
        return [self._event("output_item.added", output_index=place, item=dict(item)),
                *self._inner(key, "added", part, "")]  # fmt: skip

    def _where(self, key: Key) -> dict[str, Any]:
        return {"item_id": self.items[self.opened[key]]["id"], "output_index": self.opened[key]}

    def _inner(self, key: Key, word: str, part: ir.Part, text: str) -> list[Json]:
        """Return the event that begins (`word` is `added`) or ends (`done`) the content of an item; none for a call."""
        if isinstance(part, ir.ToolUse):
            return []
        name = "reasoning_summary_part" if isinstance(part, ir.Thinking) else "content_part"
        where = SAID[type(part)][2]
        return [self._event(f"{name}.{word}", part=_content(part, text, self.ledger), **self._where(key), **where)]

    def piece(self, key: Key, text: str, part: ir.Part) -> list[Json]:
        self.texts[key].append(text)
        name, _, where = SAID[part.kind if isinstance(part, ir.ToolUse) else type(part)]
        more: dict[str, Any] = {"logprobs": []} if type(part) is ir.Text else {}
        return [self._event(f"{name}.delta", delta=text, **self._where(key), **where, **more)]

    def close(self, key: Key, part: ir.Part) -> list[Json]:
        item = self.items[self.opened[key]]
        text = text_of(part) if isinstance(part, ir.ToolUse) else "".join(self.texts[key])
        name, member, where = SAID[part.kind if isinstance(part, ir.ToolUse) else type(part)]
        inner = None if isinstance(part, ir.ToolUse) else _content(part, text, self.ledger)
        more: dict[str, Any] = {"logprobs": []} if type(part) is ir.Text else {}
        out: list[Json] = []
        if inner is None:
            item[member] = text
            if item["type"] == "function_call":
                item["status"] = "incomplete" if part.is_cut else "completed"  # type: ignore[attr-defined]
                more = {"name": item["name"]}
        elif isinstance(part, ir.Thinking):
            item["summary"] = [inner] if text else []
        else:
            item |= {"content": [inner], "status": "completed"}
            out = [self._event("output_text.annotation.added", annotation_index=spot, annotation=one,
                               **self._where(key), **where)
                   for spot, one in enumerate(inner.get("annotations", ()))]  # fmt: skip
        out += [self._event(f"{name}.done", **{member: text}, **self._where(key), **where, **more),
                *self._inner(key, "done", part, text)]  # fmt: skip
        return [*out, self._event("output_item.done", output_index=self.opened[key], item=dict(item))]

    def end(self) -> list[Json]:
        failure = self.sum.failure
        end: dict[str, Any] = status_of(self.words.get(0) or "incomplete")
        if failure is not None or self.is_cut:
            words = failure.message if failure is not None else "the stream was cut"
            end = {"status": "failed", "error": {"code": "server_error", "message": words}}
        response = {**self._head("completed"), **end, "output": self.items, "usage": self.counted()}
        status = response["status"]
        kind = status if status in ("completed", "incomplete", "failed") else "incomplete"
        return [self._event(kind, response=response)]

    def fail(self, event: ir.StreamFailed) -> list[Json]:
        return [{**self._event(""), "type": "error", "code": event.code, "message": event.message, "param": None}]


def _content(part: ir.Part, text: str, ledger: LossLedger) -> dict[str, Any]:
    if isinstance(part, ir.Refusal):
        return {"type": "refusal", "refusal": text}
    if isinstance(part, ir.Thinking):
        return {"type": "summary_text", "text": text}
    citations = write_citations(part, ledger) if text else []  # type: ignore[arg-type]
    return {"type": "output_text", "text": text, "annotations": citations, "logprobs": []}


DIALECT: Final = Dialect(
    NAME=NAME, TOOL_NAMES=TOOL_NAMES, CAPABILITIES=CAPABILITIES, DEFAULTS=DEFAULTS, read_request=read_request,
    write_request=write_request, read_answer=read_answer, write_answer=write_answer, read_stream=StreamReader,
    write_stream=StreamWriter, event_name=type_name, usage=USAGE, endings=ENDINGS, error=ERROR, limits=LIMITS,
)  # fmt: skip
