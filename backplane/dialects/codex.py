"""OpenAI's Responses, which its agent Codex speaks (platform.openai.com, read November 2026).

A request and an answer are lists of items: messages, calls, results, reasoning. The assistant's items in a row are one
message here; what was read belongs to the item. Streams are in `codex_stream`.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

from backplane import ir
from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.dialects import codec
from backplane.dialects.chat import TOOL, form_of, form_words, read_audio, read_choice, write_metadata
from backplane.dialects.codec import (
    EFFORT_BUDGETS,
    NUMBER,
    Block,
    Blocks,
    Calls,
    Ledger,
    Members,
    Option,
    Writer,
    arguments_text,
    effort_of,
    is_own_raw,
    is_plain,
    item_of,
    kind_of,
    put_ext,
    read_arguments,
    read_content,
    read_options,
    unchanged,
    write_options,
)
from backplane.dialects.limits import Limits, Spelling
from backplane.dialects.losses import address_citation, chosen_kind, lose_part, require, result_text
from backplane.dialects.outcome import OPENAI_ERROR, Endings, failed_answer, failed_body
from backplane.dialects.vendor import Dialect, type_name, write_tools

NAME: Final = "codex"

TOOL_NAMES: Final[dict[str, str]] = {
    "shell": "bash", "shell_command": "bash", "exec_command": "bash", "local_shell": "bash",
    "apply_patch": "apply_patch", "read_file": "read_file", "list_dir": "list_files", "grep_files": "grep",
    "web_search": "web_search",
}  # fmt: skip
"""The names that the vendor's agent gives its tools → neutral names."""

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
    # Never `completed`: the answer may not be whole.
    None: "incomplete", "pause": "incomplete", "other": "incomplete",
}  # fmt: skip

ENDINGS: Final = Endings(STOPS, STOP_WORDS, frozenset({"in_progress", "queued"}))

OPTIONS: Final = (
    Option("max_output_tokens", "max_tokens", (int,), least=16),
    Option("temperature", "temperature", NUMBER, least=0, most=2),
    Option("top_p", "top_p", NUMBER),
    Option("top_logprobs", "top_logprobs", (int,), least=0, most=20),
    Option("stream", "stream", (bool,)),
    Option("parallel_tool_calls", "parallel_tool_calls", (bool,)),
    Option("user", "user"),
    Option("metadata", "metadata", (dict,)),
    Option("service_tier", "service_tier", known=frozenset({"auto", "default", "flex", "scale", "priority"})),
    Option("reasoning/effort", "reasoning_effort", known=frozenset(EFFORT_BUDGETS)),
    Option("text/verbosity", "verbosity", known=frozenset({"low", "medium", "high"})),
)

USAGE: Final = {
    "input_tokens": "input", "output_tokens": "output", "input_tokens_details/cached_tokens": "cache_read",
    "input_tokens_details/cache_write_tokens": "cache_write", "output_tokens_details/reasoning_tokens": "reasoning",
}  # fmt: skip
PLACES: Final = {
    **{row.name: row.path.partition("/")[0] for row in OPTIONS}, **{field: path for path, field in USAGE.items()},
    "id": "id", "model": "model", "created": "created_at", "usage": "usage", "response_format": "text",
    "stop_detail": "incomplete_details", "system": "instructions", "tool_choice": "tool_choice",
    "reasoning_budget": "reasoning",
    "signature": "encrypted_content", "detail": "detail",
}  # fmt: skip
LIMITS: Final = Limits(call_id=Spelling(most=64), tool_name=Spelling("[a-zA-Z0-9_-]", 64))
"""platform.openai.com, responses/create: names of tools and lengths of ids, read 2026-11."""


# Blocks of a content list ---------------------------------------------------------------------------------------------


def _read_annotations(members: Members, fields: dict[str, Any]) -> bool:
    return codec.read_citations("annotations", read_citation, members, fields)


def read_citation(raw: dict[str, Any], at: str) -> ir.Citation:
    """Read where a text is from."""
    members = Members(raw, at)
    kind = members.take("type") or ""
    return ir.Citation(
        kind="url" if kind == "url_citation" else kind, url=members.take("url"), title=members.take("title"),
        start=members.take("start_index", int), end=members.take("end_index", int), at=at, ext=members.ext(NAME),
        raw=raw,
    )  # fmt: skip


def write_citations(part: ir.Text, ledger: Ledger) -> list[Json]:
    """Write the citations of a text; those without an address are left out and reported."""
    out = []
    for citation in part.citations:
        if (body := address_citation(citation, part, ledger)) is not None:
            kind = citation.kind if ledger.is_home and citation.kind != "url" else "url_citation"
            body = {"type": kind, **body} if kind else body
            put_ext(citation, body, ledger)
            out.append(body)
    return out


def _is_one(members: Members, fields: dict[str, Any]) -> bool:
    return sum(fields.get(name) is not None for name in ("url", "data", "file_id")) == 1


def _read_file(members: Members, fields: dict[str, Any]) -> bool:
    data = fields.pop("text", None)
    fields |= {} if data is None else read_data(data)
    return _is_one(members, fields)


def read_data(data: str) -> dict[str, Any]:
    """Return the fields of a document's data: a data URL, or the base64 alone."""
    head, found, body = data.partition(";base64,")
    return {"media_type": head.removeprefix("data:"), "data": body} if found else {"data": data}


def _write_image(part: ir.Media, out: dict[str, Any], ledger: Ledger) -> bool:
    if not ledger.is_home:
        if ledger.source not in ("openai", "copilot"):
            out.pop("file_id", None)
        out.setdefault("detail", "auto")
    return "image_url" in out or "file_id" in out


def _write_file(part: ir.Media, out: dict[str, Any], ledger: Ledger) -> bool:
    out.pop("file_data", None)
    if part.data is not None:
        out["file_data"] = f"data:{part.media_type or 'application/octet-stream'};base64,{part.data}"
    elif not ledger.is_home and ledger.source not in ("openai", "copilot"):
        out.pop("file_id", None)
    if "filename" not in out and part.title is not None:
        out["filename"] = part.title
    return not {"file_data", "file_url", "file_id"}.isdisjoint(out)


def _write_audio(part: ir.Media, out: dict[str, Any], ledger: Ledger) -> bool:
    form = (part.media_type or "audio/wav").partition("/")[2]
    out["input_audio"]["format"] = "mp3" if form == "mpeg" else form
    return ledger.is_home  # the vendor's types have no word for it


BLOCKS: Final = Blocks(NAME, (
    *(Block(kind, ir.Text, {"text!": "text"}, read=_read_annotations, is_written=False)
      for kind in ("input_text", "output_text", "text")),
    Block("refusal", ir.Refusal, {"refusal!": "text"}),
    Block("input_image", ir.Media, {"image_url": "address", "file_id": "file_id", "detail": "detail"},
          {"kind": "image"}, read=_is_one, write=_write_image),
    Block("input_file", ir.Media, {"file_data": "text", "file_url": "url", "file_id": "file_id", "filename": "name"},
          {"kind": "document"}, read=_read_file, write=_write_file),
    Block("input_audio", ir.Media, {"input_audio/data!": "data", "input_audio/format!": "media_type"},
          {"kind": "audio"}, read=read_audio, write=_write_audio),
))  # fmt: skip


def read_part(value: Json, at: str) -> ir.Part:
    """Read one member of a content list."""
    return BLOCKS.read(value, at) or ir.Opaque(dialect=NAME, label=str(kind_of(value)), payload=value, at=at, raw=value)


def write_part(part: ir.Part, ledger: Ledger, *, is_said: bool = False, is_made: bool = False) -> Json:
    """Write one member of a content list, None where the target has no word for it.

    Args:
        is_said: of the assistant, whose texts are `output_text`.
        is_made: written for the first time, so with every member that the vendor's type requires.
    """
    if is_own_raw(part, ledger):
        return part.payload  # type: ignore[attr-defined]
    if unchanged(part, ledger, lambda: read_part(part.raw, part.at)):
        return part.raw
    if isinstance(part, ir.Text):
        kind = kind_of(part.raw) if ledger.is_home else None
        out: dict[str, Any] = {"type": kind or ("output_text" if is_said else "input_text"), "text": part.text}
        annotations = write_citations(part, ledger)
        if annotations or (is_said and is_made):
            out["annotations"] = annotations
        put_ext(part, out, ledger)
        return out
    if isinstance(part, ir.Media) and not ledger.is_home:
        if part.text is not None:
            ledger.degrade(part.at, "media", "a document of plain text became a text")
            return {"type": "input_text", "text": part.text}
        if is_said:
            lose_part(part, ledger)
            return None
    found = BLOCKS.write(part, ledger)
    if found is None:
        lose_part(part, ledger)
    return found


def write_content(
    parts: tuple[ir.Part, ...], ledger: Ledger, *, is_said: bool = False, is_made: bool = False
) -> list[Json]:
    """Write a content list."""
    made = ((part, write_part(part, ledger, is_said=is_said, is_made=is_made)) for part in parts)
    return [written for part, written in made if written is not None or is_own_raw(part, ledger)]


# Items, read ----------------------------------------------------------------------------------------------------------


def read_items(items: list[Json], base: str, start: int = 0, *, is_answer: bool = False) -> list[ir.Message]:
    """Read a list of items into messages; an assistant's items in a row are one message.

    Args:
        start: place of the first item in its list.
    """
    out: list[ir.Message] = []
    turn: list[ir.Part] = []
    raw: list[Json] = []

    def flush() -> None:
        if raw or (is_answer and not out):
            at = f"{base}/{start + len(out_items) - len(raw)}" if raw else base
            out.append(ir.Message(role="assistant", parts=tuple(turn), flat=_flat_of(raw), at=at, raw=[*raw]))
            turn.clear()
            raw.clear()

    out_items: list[Json] = []
    for place, item in enumerate(items):
        found = read_item(item, f"{base}/{start + place}", is_answer=is_answer)
        if isinstance(found, ir.Message):
            if turn:
                flush()
            out.append(found)
        else:
            turn += found
            raw.append(item)
        out_items.append(item)
    if turn or is_answer:
        flush()
    return out


def _flat_of(items: list[Json]) -> bool | None:
    """Return whether the messages among items are one text each; None where there is no message."""
    found = [type(item.get("content")) is str for item in items if type(item) is dict and "role" in item]
    return all(found) if found else None


def read_item(item: Json, at: str, *, is_answer: bool = False) -> ir.Message | list[ir.Part]:
    """Read one item: a message of its own, or parts of the assistant's turn."""
    kind = kind_of(item) if type(item) is not dict or "type" in item else "message"
    if kind == "message" and type(item.get("role")) is str:
        message = _read_message(item, at)
        if message.role != "assistant" and is_answer:
            return [ir.Opaque(dialect=NAME, label=f"item of {message.role}", payload=item, at=at, raw=item)]
        return list(message.parts) if message.role == "assistant" else message
    if kind in ITEM_READERS:
        members = Members(item, at)
        del members.rest["type"]
        made: ir.Part | None = ITEM_READERS[kind](members, {"at": at, "raw": item}, kind)
        if made is not None:
            made = msgspec.structs.replace(made, ext=members.ext(NAME))
            return (
                ir.Message(role="tool", parts=(made,), at=at, raw=[item]) if isinstance(made, ir.ToolResult) else [made]
            )
    if type(kind) is str and kind.endswith(("_call", "_call_output", "_output", "mcp_list_tools", "program")):
        return [ir.ServerTool(dialect=NAME, name=str(item.get("name", kind)), payload=item, at=at, raw=item)]
    return [ir.Opaque(dialect=NAME, label=str(kind), payload=item, at=at, bound=kind in BOUND, raw=item)]


def _read_message(item: dict[str, Any], at: str) -> ir.Message:
    """Read a message item; an assistant's keeps the item's own members on its first part."""
    members = Members(item, at)
    native_role = members.take("role") or ""
    members.skip("type", "message")
    role = ROLES.get(native_role, "user")
    parts, flat = read_content(members, "content", read_part)
    if role != "assistant":
        ext = members.ext(NAME)
        return ir.Message(role=role, parts=parts, native_role=native_role, flat=flat, at=at, ext=ext, raw=[item])
    if not parts:
        parts = (ir.Opaque(dialect=NAME, label="empty message", payload=item, at=at, raw=item),)
    elif members.rest:
        mine = {f"../{key}": value for key, value in members.left().items()}
        parts = (msgspec.structs.replace(parts[0], ext={NAME: {**parts[0].ext.get(NAME, {}), **mine}}), *parts[1:])
    return ir.Message(role=role, parts=parts, at=at)


def _read_call(members: Members, fields: dict[str, Any], kind: str) -> ir.Part | None:
    key = "arguments" if kind == "function_call" else "input"
    name, call_id = members.take("name"), members.take("call_id")
    if name is None or call_id is None:
        return None
    text = members.take(key)
    value: Json = read_arguments(text or "") if key == "arguments" else text or ""
    tool: Any = "function" if key == "arguments" else "custom"
    return ir.ToolUse(id=call_id, name=name, input=value, text=text, kind=tool, **fields)


def _read_result(members: Members, fields: dict[str, Any], kind: str) -> ir.Part | None:
    call_id = members.take("call_id")
    if call_id is None:
        return None
    content, flat = read_content(members, "output", read_part)
    tool: Any = "function" if kind == "function_call_output" else "custom"
    return ir.ToolResult(id=call_id, content=content, flat=flat, kind=tool, **fields)


def _read_reasoning(members: Members, fields: dict[str, Any], kind: str) -> ir.Part | None:
    """Read thinking: its summary where there is one, else its text; the proof is what is encrypted."""
    text, field = "", None
    for key, name in (("summary", "summary_text"), ("content", "reasoning_text")):
        texts = _texts(members.rest.get(key), name)
        if texts and any(texts) and field is None:
            text, field = "\n\n".join(texts), key
            del members.rest[key]
    return ir.Thinking(text=text, field=field, signature=members.take("encrypted_content"), **fields)


def _texts(value: Json, kind: str) -> list[str] | None:
    """Return the texts of a list that holds nothing else."""
    if type(value) is not list or not all(
        kind_of(part) == kind and set(part) == {"type", "text"} and type(part["text"]) is str for part in value
    ):
        return None
    return [part["text"] for part in value]


ITEM_READERS: Final[dict[Any, Any]] = {
    "function_call": _read_call, "custom_tool_call": _read_call, "function_call_output": _read_result,
    "custom_tool_call_output": _read_result, "reasoning": _read_reasoning,
}  # fmt: skip


# Items, written -------------------------------------------------------------------------------------------------------


def write_items(messages: tuple[ir.Message, ...], ledger: Ledger) -> list[Json]:
    """Write messages as items."""
    out: list[Json] = []
    for message in messages:
        if unchanged(message, ledger, lambda: _again(message)):  # noqa: B023
            out += message.raw
        elif message.role == "assistant":
            out += write_turn(message, ledger)
        else:
            out += _write_message(message, ledger)
    return out


def _again(message: ir.Message) -> ir.Message | None:
    """Read the items of a message again."""
    base, _, start = message.at.rpartition("/")
    found = read_items(message.raw, base, int(start)) if start.isdecimal() else []
    return found[0] if len(found) == 1 else None


def _write_message(message: ir.Message, ledger: Ledger) -> list[Json]:
    results = [part for part in message.parts if isinstance(part, ir.ToolResult)]
    others = tuple(part for part in message.parts if not isinstance(part, ir.ToolResult))
    if results and others and not isinstance(message.parts[0], ir.ToolResult):
        ledger.degrade(message.at, "order", "results come before the rest of their message")
    out: list[Json] = [_write_result(result, ledger) for result in results]
    if results and not others:
        put_ext(message, out[0], ledger)
        return out
    native, role = message.native_role, "user" if message.role == "tool" else message.role
    is_own = native is not None and (ROLES.get(native) == message.role or (ledger.is_home and native not in ROLES))
    made: dict[str, Any] = {"type": "message", "role": native if is_own and not results else role}
    if message.flat is not False and (not others or is_plain(others)):
        made["content"] = others[0].text if others else ""  # type: ignore[attr-defined]
        for part in others:
            put_ext(part, {}, ledger)
    else:
        made["content"] = write_content(others, ledger) or ([] if ledger.is_home else "")
    put_ext(message, made, ledger)
    return [*out, made]


def write_turn(message: ir.Message, ledger: Ledger, *, is_answer: bool = False) -> list[Json]:
    """Write the items of an assistant's turn."""
    out: list[Json] = []
    said: list[ir.Part] = []

    def flush() -> None:
        if said:
            out.extend(_write_said(tuple(said), message, ledger, len(out), is_answer=is_answer))
            said.clear()

    for part in message.parts:
        if isinstance(part, ir.Text | ir.Refusal | ir.Media) or (
            isinstance(part, ir.Opaque) and "/content/" in part.at
        ):
            if said and ledger.is_home and item_of(said[0].at) != item_of(part.at):
                flush()
            said.append(part)
            continue
        flush()
        made = _write_own(part, ledger, len(out), is_answer=is_answer)
        if made is not None or is_own_raw(part, ledger):
            out.append(made)
    flush()
    put_ext(message, {}, ledger)
    return out


def _write_said(
    parts: tuple[ir.Part, ...], message: ir.Message, ledger: Ledger, place: int, *, is_answer: bool
) -> list[dict[str, Any]]:
    out: dict[str, Any] = {"type": "message", "role": "assistant"}
    is_made = not ledger.is_home or message.flat is None  # a message that was read says how it was written
    if not is_answer and message.flat is not False and is_plain(parts):
        out["content"] = parts[0].text  # type: ignore[attr-defined]
        put_ext(parts[0], {}, ledger)
    else:
        out["content"] = write_content(parts, ledger, is_said=True, is_made=is_made)
        if is_made:
            out |= {"id": f"msg_{place if is_answer else _word(parts[0])}", "status": "completed"}
    if ledger.is_home:
        mine = parts[0].ext.get(NAME, {})
        out |= {path[3:]: value for path, value in mine.items() if path[:3] == "../" and path[3:] not in out}
    return [out] if out["content"] or out["content"] == "" or ledger.is_home else []


def _word(part: ir.Part) -> str:
    """Make an id of a block's place and text: one of its own for every message of a request."""
    text = f"{part.at} {getattr(part, 'text', '')}"
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()


def _write_own(part: ir.Part, ledger: Ledger, place: int, *, is_answer: bool) -> Json:
    """Write a part that is an item of its own."""
    if is_own_raw(part, ledger):
        return part.payload  # type: ignore[attr-defined]
    if unchanged(part, ledger, lambda: next(iter(read_item(part.raw, part.at)), None)):  # type: ignore[arg-type]
        return part.raw
    out: dict[str, Any] | None = None
    if isinstance(part, ir.ToolUse):
        kind, key = ("function_call", "arguments") if part.kind == "function" else ("custom_tool_call", "input")
        out = {"type": kind, "call_id": part.id, "name": part.name, key: arguments_text(part)}
        if is_answer and not ledger.is_home:
            out |= {"id": f"fc_{place}", "status": "incomplete" if part.is_cut else "completed"}
    elif isinstance(part, ir.Thinking) and part.redacted is None and (is_answer or ledger.is_home):
        out = _write_reasoning(part, ledger, place)
    if out is None:
        # Thinking without the vendor's own proof would be looked for among what it keeps.
        lose_part(part, ledger)
    else:
        put_ext(part, out, ledger)
    return out


def _write_reasoning(part: ir.Thinking, ledger: Ledger, place: int) -> dict[str, Any]:
    key = part.field if ledger.is_home and part.field == "content" else "summary"
    kind = "summary_text" if key == "summary" else "reasoning_text"
    out: dict[str, Any] = {"type": "reasoning", key: [{"type": kind, "text": part.text}] if part.text else []}
    if not ledger.is_home:
        ledger.degrade(part.at, "thinking", "thinking stands in a summary, without this vendor's proof")
        out["id"] = f"rs_{place}"
    elif part.signature is not None:
        out["encrypted_content"] = part.signature
    return out


def _write_result(part: ir.ToolResult, ledger: Ledger) -> dict[str, Any]:
    kind = "function_call_output" if part.kind == "function" else "custom_tool_call_output"
    out: dict[str, Any] = {"type": kind, "call_id": part.id}
    is_text = len(part.content) <= 1 and all(isinstance(inner, ir.Text) for inner in part.content)
    if part.flat is False and (ledger.is_home or not is_text):
        out["output"] = write_content(part.content, ledger)
    else:
        media = [inner for inner in part.content if isinstance(inner, ir.Media) and inner.text is None]
        out["output"] = write_content(part.content, ledger) if media else result_text(part, ledger)
        for inner in () if media else part.content:
            put_ext(inner, {}, ledger)
    put_ext(part, out, ledger)
    return out


# Requests -------------------------------------------------------------------------------------------------------------


def read_request(request: Json, ledger: Ledger, calls: Calls) -> ir.Conversation:
    """Read a request. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
    members = Members(request, "")
    messages: list[ir.Message] = []
    for name, role in (("instructions", "system"), ("input", "user")):
        if (text := members.take(name)) is not None:
            part = ir.Text(text=text, at=f"/{name}")
            messages.append(ir.Message(role=role, parts=(part,), flat=True, at=f"/{name}"))  # type: ignore[arg-type]
    is_read = "/input" in (message.at for message in messages)
    is_elsewhere = not {"prompt", "conversation", "previous_response_id"}.isdisjoint(members.rest)
    if "input" in members.rest or not (is_read or is_elsewhere):
        messages += read_items(members.need("input"), "/input")
    options: dict[str, Any] = {}
    places: dict[str, str] = {}
    read_options(members, OPTIONS, options, places)
    read_choice(members, options, places)
    text = (members.below or {}).get("text") or (members.inner("text") if "text" in members.rest else None)
    found = None if text is None else text.rest.get("format")
    body = {key: value for key, value in found.items() if key != "type"} if type(found) is dict else None
    if text is not None and (form := form_of(found, body)) is not None:
        del text.rest["format"]
        options["response_format"], places["response_format"] = form, "/text/format"
    tools = codec.take_tools(members, read_tool)
    return ir.Conversation(
        dialect=NAME, messages=tuple(messages), model=members.take("model"), tools=tools, options=options,
        options_at=places, ext=members.ext(NAME),
    )  # fmt: skip


def write_request(conversation: ir.Conversation, ledger: Ledger) -> dict[str, Any]:
    """Write a request."""
    out: dict[str, Any] = {}
    if conversation.model is not None:
        out["model"] = conversation.model
    messages = conversation.messages
    if messages and _is_instructions(messages[0], ledger):
        out["instructions"] = messages[0].parts[0].text  # type: ignore[attr-defined]
        put_ext(messages[0].parts[0], {}, ledger)
        put_ext(messages[0], {}, ledger)
        messages = messages[1:]
    if messages or not ledger.is_home or "input" in (conversation.raw or {"input": ()}):  # else it is a stored prompt's
        out["input"] = write_items(messages, ledger)
    if tools := write_tools(conversation.tools, ledger, write_tool):
        out["tools"] = tools
    write_options(conversation, out, ledger, OPTIONS, _special(conversation))
    put_ext(conversation, out, ledger)
    if not ledger.is_home:
        require(out, {"model": "unknown"})
    return out


def _is_instructions(message: ir.Message, ledger: Ledger) -> bool:
    """Return whether a message is the text that stands outside of the items."""
    if message.role != "system" or message.flat is False or not is_plain(message.parts) or message.name is not None:
        return False
    return message.native_role is None if ledger.is_home else message.native_role in (None, "system")


def _special(conversation: ir.Conversation) -> dict[str, Writer]:
    def choice(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        if value["mode"] != "tool":
            out["tool_choice"] = value["mode"]
        elif (kind := chosen_kind(value, conversation, ledger, at)) is not None:
            out["tool_choice"] = {"type": "custom" if kind == "custom" else "function", "name": value["name"]}

    return {"tool_choice": choice, "reasoning_budget": _write_budget, "response_format": _write_format,
            "metadata": write_metadata}  # fmt: skip


def _write_budget(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if "reasoning" in out:
        ledger.drop(at, "option", "the target has the effort in words only", value)
        return
    out["reasoning"] = {"effort": effort_of(value)}
    ledger.degrade(at, "option_value", f"tokens for thinking became the word {effort_of(value)}", value)


def _write_format(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    word, body = form_words(value, ledger)
    out.setdefault("text", {})["format"] = {"type": word, **body}


def read_tool(tool: Json, at: str) -> ir.ToolSpec:
    """Read one tool definition."""
    kind = kind_of(tool)
    if kind not in ("function", "custom") or type(tool.get("name")) is not str:
        name = str(tool.get("name", kind)) if type(tool) is dict else "unreadable"
        return ir.ToolSpec(name=name, kind="server", payload=tool, at=at)
    return codec.read_tool(tool, at, NAME, TOOL, kind)


def write_tool(tool: ir.ToolSpec, ledger: Ledger) -> Json:
    """Write one tool definition."""
    if unchanged(tool, ledger, lambda: read_tool(tool.raw, tool.at)):
        return tool.raw
    strict = tool.strict
    if not ledger.is_home and tool.kind == "function" and strict is None:
        # Without the word this vendor would take every schema for a strict one.
        ledger.synthesise(tool.at, "required", "a tool says here that its schema is not strict")
        strict = False
    out: dict[str, Any] = {"type": tool.kind}
    if not ledger.is_home and tool.kind == "function":
        out["parameters"] = None
    return codec.write_tool(msgspec.structs.replace(tool, strict=strict), out, ledger, TOOL)


# Answers --------------------------------------------------------------------------------------------------------------


def read_answer(response: Json, ledger: Ledger, calls: Calls) -> ir.Answer:
    """Read a response. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
    members = Members(response, "")
    error = members.rest.get("error")
    if "output" not in members.rest and type(error) in (dict, str):
        return failed_answer(NAME, members)
    (message,) = read_items(members.need("output"), "/output", is_answer=True)
    members.skip("object", "response")
    raw, stop_at = members.take("status"), "/status"
    details = members.rest.get("incomplete_details")
    reason = details.get("reason") if type(details) is dict and len(details) == 1 else None
    if raw == "incomplete" and type(reason) is str and reason:
        del members.rest["incomplete_details"]
        raw, stop_at = f"incomplete:{reason}", "/incomplete_details/reason"
    words = error.get("message") if type(error) is dict else None
    usage = codec.take_usage(members, read_usage)
    candidate = ir.Candidate(message=message, stop=ENDINGS.read(raw, message.parts), stop_raw=raw, stop_at=stop_at)
    return ir.Answer(
        dialect=NAME, id=members.take("id"), model=members.take("model"), created=members.take("created_at", *NUMBER),
        candidates=(candidate,), usage=usage, error=words if type(words) is str else None, ext=members.ext(NAME),
    )  # fmt: skip


def read_usage(usage: dict[str, Any], at: str) -> ir.Usage:
    """Read token counters; input includes what the cache gave."""
    return codec.read_counters(usage, at, NAME, USAGE)


def write_answer(answer: ir.Answer, ledger: Ledger) -> dict[str, Any]:
    """Write a response."""
    out: dict[str, Any] = {}
    if answer.error is not None and not answer.candidates:
        return failed_body(answer, ledger, {**OPENAI_ERROR, "message": answer.error})
    out = {"object": "response", "output": []}
    for key, value in (("id", answer.id), ("model", answer.model), ("created_at", answer.created)):
        if value is not None:
            out[key] = value
    for candidate in answer.candidates[:1]:
        out["output"] = write_turn(candidate.message, ledger, is_answer=True)
        write_status(candidate, out, ledger)
        put_ext(candidate, out, ledger)
    if answer.usage is not None:
        out["usage"] = write_usage(answer.usage, ledger)
    put_ext(answer, out, ledger)
    if not ledger.is_home:
        require(out, {"id": "resp_translated", "created_at": 0, "model": "unknown"})
        # These repeat the request, which an answer alone does not know.
        out = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], **out}
    return out


def write_status(candidate: ir.Candidate, out: dict[str, Any], ledger: Ledger) -> None:
    """Write why the answer ended: the vendor's own words while they mean the same."""
    status, _, reason = (ENDINGS.write(candidate, ledger) or "").partition(":")
    if status:
        out["status"] = status
    if reason:
        out["incomplete_details"] = {"reason": reason}


def write_usage(usage: ir.Usage, ledger: Ledger) -> dict[str, Any]:
    """Write token counters; all of them must be said here."""
    out = codec.write_counters(usage, ledger, USAGE, tuple(USAGE.values()))
    out.setdefault("total_tokens", (usage.input or 0) + (usage.output or 0))
    return out


def _dialect() -> Dialect:
    from backplane.dialects.codex_stream import CodexReader, CodexWriter

    return Dialect(
        NAME=NAME, TOOL_NAMES=TOOL_NAMES, CAPABILITIES=CAPABILITIES, DEFAULTS=DEFAULTS, read_request=read_request,
        write_request=write_request, read_answer=read_answer, write_answer=write_answer, read_tool=read_tool,
        write_tool=write_tool, read_stream=CodexReader, write_stream=CodexWriter,
        event_name=type_name, limits=LIMITS, places=PLACES, listed="/input",
        answered="/output", content=frozenset({"input", "instructions", "output"}),
    )  # fmt: skip


DIALECT: Final = _dialect()
