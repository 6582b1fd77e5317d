"""Items and counters of the Responses dialect, written: turns become the items that their parts were of."""

from __future__ import annotations

from typing import Any

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._codex_read import CONTINUES, NAME, ROLES
from backplane.dialects._losses import (
    address_citation,
    lose_error,
    lose_marks,
    lose_name,
    lose_part,
    lose_signature,
    lose_silence,
    lose_thinking,
    put_counters,
    result_text,
    split_results,
)
from backplane.dialects._parts import (
    ABSENT,
    ITEM,
    Ledger,
    arguments_text,
    give_back,
    is_home_raw,
    is_plain,
    media_url,
    shape,
)
from backplane.ir import Media, Message, Opaque, Part, Refusal, Text, Thinking, ToolResult, ToolUse, Usage


def write_items(messages: tuple[Message, ...], ledger: Ledger, *, is_answer: bool = False) -> list[Json]:
    """Write messages as items."""
    out: list[Json] = []
    last: Message | None = None
    for message in messages:
        if message.role == "assistant":
            if last is not None and last.role == "assistant" and not ledger.is_home:
                ledger.degrade(message.at, "order", "two turns of the assistant in a row are one here")
            out += write_turn(message, ledger, is_answer=is_answer)
        else:
            out += _write_message(message, ledger)
        last = message
    return out


def _write_message(message: Message, ledger: Ledger) -> list[Json]:
    results, rest = split_results(message, ledger)
    out: list[Json] = [_write_result(result, ledger) for result in results]
    if out:
        give_back(message, out[0], ledger)
    lose_name(message, ledger)
    if rest is None:
        return out
    message = rest
    made: dict[str, Any] = {"role": _role(message, ledger)}
    is_text = message.flat is not False and _is_plain(message.parts)
    if is_text and message.parts:
        give_back(message.parts[0], {}, ledger)
    if message.parts or message.flat is not None or not ledger.is_home:
        made["content"] = _plain(message.parts) if is_text else write_content(message.parts, ledger)
    give_back(message, made, ledger)
    if "type" not in (shape(message, NAME, ABSENT) or ()) and (ledger.is_home or not is_text):
        made.setdefault("type", "message")
    return [*out, made]


def _is_plain(parts: tuple[Part, ...]) -> bool:
    return not parts or is_plain(parts)


def _plain(parts: tuple[Part, ...]) -> str:
    return parts[0].text if parts and isinstance(parts[0], Text) else ""


def _role(message: Message, ledger: Ledger) -> str:
    native = message.native_role
    if native is not None and (ROLES.get(native) == message.role or (ledger.is_home and native not in ROLES)):
        return native
    if native not in (None, message.role, "tool", "function"):
        ledger.degrade(f"{message.at}/role", "role", f"the role {native} became {message.role}")
    return "user" if message.role == "tool" else message.role


def write_content(parts: tuple[Part, ...], ledger: Ledger, *, is_said: bool = False) -> list[Json]:
    """Write a content list.

    Args:
        is_said: of the assistant, whose texts are `output_text`.
    """
    out: list[Json] = []
    for part in parts:
        if is_home_raw(part, ledger):
            out.append(part.payload)  # type: ignore[attr-defined]
        elif (made := write_part(part, ledger, is_said=is_said)) is not None:
            out.append(made)
    return out


def write_part(part: Part, ledger: Ledger, *, is_said: bool = False) -> Json:
    """Write one member of a content list, None where the target has no word for it."""
    if is_home_raw(part, ledger):
        return part.payload  # type: ignore[attr-defined]
    out: dict[str, Any] | None
    if isinstance(part, Text):
        kind = shape(part, NAME, "##type") if ledger.is_home else None
        kind = kind or ("output_text" if is_said else "input_text")
        out = {"type": kind, "text": part.text}
        annotations = write_citations(part, ledger)
        if annotations or (is_said and not ledger.is_home):
            out["annotations"] = annotations
    elif isinstance(part, Refusal):
        out = {"type": "refusal", "refusal": part.text}
    elif isinstance(part, Media) and (ledger.is_home or not is_said):
        out = _write_media(part, ledger)
    elif isinstance(part, Media):
        out = None
    else:
        lose_part(part, ledger)
        return None
    if out is None:
        ledger.drop(part.at, "media", "the target takes no media in this form", msgspec.to_builtins(part))
        return None
    lose_marks(part, ledger)
    give_back(part, out, ledger)
    return out


def write_citations(part: Text, ledger: Ledger) -> list[Json]:
    """Write the citations of a text; those without an address are left out and reported."""
    out = []
    for citation in part.citations:
        if (body := address_citation(citation, part, ledger)) is None:
            continue
        kind = citation.kind if ledger.is_home and citation.kind != "url" else "url_citation"
        body = {"type": kind, **body} if kind else body
        give_back(citation, body, ledger)
        out.append(body)
    return out


def _write_media(part: Media, ledger: Ledger) -> dict[str, Any] | None:
    if part.text is not None:
        ledger.degrade(part.at, "media", "a document of plain text became a text")
        return {"type": "input_text", "text": part.text}
    is_kin = ledger.is_home or ledger.source in ("openai", "copilot")
    out: dict[str, Any]
    if part.kind == "image":
        out = {"type": "input_image"}
        if part.file_id is not None and is_kin:
            out["file_id"] = part.file_id
        elif (url := media_url(part)) is not None:
            out["image_url"] = url
        else:
            return None
        if part.detail is not None:
            out["detail"] = part.detail
        elif not ledger.is_home:
            out["detail"] = "auto"
    elif part.kind == "document":
        out = {"type": "input_file"}
        if part.data is not None:
            out["file_data"] = part.data if shape(part, NAME, "#bare_data") else media_url(part)
        elif part.url is not None:
            out["file_url"] = part.url
        elif part.file_id is not None and is_kin:
            out["file_id"] = part.file_id
        else:
            return None
        if (name := part.name or part.title) is not None:
            out["filename"] = name
    elif part.kind == "audio" and part.data is not None and ledger.is_home:
        form = (part.media_type or "audio/wav").partition("/")[2]
        return {"type": "input_audio", "input_audio": {"data": part.data, "format": form}}
    else:
        return None
    if part.title is not None and part.name is not None:
        ledger.drop(f"{part.at}/title", "media", "no titles here", part.title)
    return out


def write_turn(message: Message, ledger: Ledger, *, is_answer: bool = False) -> list[Json]:
    """Write the items of an assistant's turn."""
    out: list[Json] = []
    said: list[Part] = []

    def flush() -> None:
        if said:
            out.append(_write_said(tuple(said), message, ledger, len(out), is_answer=is_answer))
            said.clear()

    for part in message.parts:
        if isinstance(part, Text | Refusal | Media) or (isinstance(part, Opaque) and _is_inner(part)):
            if shape(part, NAME, ITEM) is not None:
                flush()
            said.append(part)
            continue
        flush()
        made = _write_own(part, ledger, len(out), is_answer=is_answer)
        if made is not None or is_home_raw(part, ledger):
            out.append(made)
    flush()
    lose_name(message, ledger)
    if message.native_role not in (None, "assistant", "model"):
        ledger.degrade(f"{message.at}/role", "role", f"the role {message.native_role} became assistant")
    give_back(message, {}, ledger)
    return out


def _is_inner(part: Opaque) -> bool:
    """Whether an unknown block stood inside a message item, not beside it."""
    entries = part.ext.get(NAME, {})
    return ITEM in entries or CONTINUES in entries


def _write_said(
    parts: tuple[Part, ...], message: Message, ledger: Ledger, place: int, *, is_answer: bool
) -> dict[str, Any]:
    memory = shape(parts[0], NAME, ITEM) if ledger.is_home else None
    out: dict[str, Any] = {"role": "assistant"}
    if memory is not None:
        is_text = memory["flat"] and is_plain_here(parts)
        out["content"] = _plain(parts) if is_text else write_content(parts, ledger, is_said=True)
        out.update({key: value for key, value in memory["rest"].items() if key not in out})
        if "type" not in memory["absent"]:
            out.setdefault("type", "message")
        return out
    if not is_answer and message.flat is not False and is_plain_here(parts):
        out["content"] = _plain(parts)
        if not isinstance(parts[0], Text):
            return out
        lose_marks(parts[0], ledger)
        give_back(parts[0], {}, ledger)
        return out
    out["content"] = write_content(parts, ledger, is_said=True)
    out |= {"type": "message", "id": f"msg_{place if is_answer else _word(parts[0].at)}", "status": "completed"}
    return out


def _word(pointer: str) -> str:
    """Make an id of a pointer: one of its own for every message of a request."""
    return "".join(letter if letter.isalnum() else "_" for letter in pointer).strip("_") or "0"


def is_plain_here(parts: tuple[Part, ...]) -> bool:
    """Whether these parts are one text, the memory of its item left aside."""
    if len(parts) != 1 or not isinstance(parts[0], Text) or parts[0].citations:
        return False
    return is_plain(parts)


def _write_own(part: Part, ledger: Ledger, place: int, *, is_answer: bool) -> Json:
    """Write a part that is an item of its own."""
    if is_home_raw(part, ledger):
        return part.payload  # type: ignore[attr-defined]
    out: dict[str, Any] | None = None
    if isinstance(part, ToolUse):
        absent = shape(part, NAME, ABSENT) or ()
        kind, key = ("function_call", "arguments") if part.kind == "function" else ("custom_tool_call", "input")
        out = {"type": kind, "call_id": part.id, "name": part.name}
        if part.input not in ({}, "") or key not in absent:
            out[key] = arguments_text(part)
        if is_answer and not ledger.is_home:
            out |= {"id": f"fc_{place}", "status": "incomplete" if part.is_cut else "completed"}
    elif isinstance(part, Thinking):
        if not is_answer and not ledger.is_home:
            # Without the vendor's own proof it would look for the thinking among what it keeps.
            lose_thinking(part, ledger)
            return None
        out = _write_reasoning(part, ledger, place)
    else:
        lose_part(part, ledger)
    if out is None:
        return None
    lose_marks(part, ledger, signature=not isinstance(part, Thinking))
    give_back(part, out, ledger)
    return out


def _write_reasoning(part: Thinking, ledger: Ledger, place: int) -> dict[str, Any] | None:
    if part.redacted is not None:
        ledger.drop(part.at, "thinking", f"only {ledger.source} can read it", part.redacted)
        return None
    out: dict[str, Any] = {"type": "reasoning"}
    if ledger.is_home:
        if part.signature is not None:
            out["encrypted_content"] = part.signature
    else:
        if part.signature is not None:
            lose_signature(part, ledger)
        ledger.degrade(part.at, "thinking", "thinking stands in a summary, without this vendor's proof")
        out["id"] = f"rs_{place}"
    texts = shape(part, NAME, "##texts") if ledger.is_home else None
    if texts is None or "\n\n".join(texts) != part.text:
        texts = (part.text,) if part.text else ()
    key = part.field if ledger.is_home and part.field == "content" else "summary"
    kind = "summary_text" if key == "summary" else "reasoning_text"
    if texts:
        out[key] = [{"type": kind, "text": text} for text in texts]
    elif not ledger.is_home:
        out[key] = []
    return out


def _write_result(part: ToolResult, ledger: Ledger) -> dict[str, Any]:
    kind = "function_call_output" if part.kind == "function" else "custom_tool_call_output"
    out: dict[str, Any] = {"type": kind, "call_id": part.id}
    if part.flat is False and (ledger.is_home or not _is_text_list(part)):
        out["output"] = write_content(part.content, ledger)
    elif part.content or not ledger.is_home:
        if part.flat is False and part.content:
            ledger.degrade(part.at, "shape", "a list of one text became the text")
        out["output"] = result_text(part, ledger)
    lose_error(part, ledger)
    if part.name is not None and not ledger.is_home:
        ledger.drop(part.at, "shape", "the tool's name is known by the id of the call")
    lose_marks(part, ledger)
    give_back(part, out, ledger)
    return out


def _is_text_list(part: ToolResult) -> bool:
    return len(part.content) <= 1 and all(isinstance(inner, Text) for inner in part.content)


def write_usage(usage: Usage, ledger: Ledger) -> dict[str, Any]:
    """Write token counters."""
    out: dict[str, Any] = {}
    details = (
        ("input_tokens_details", "cached_tokens", usage.cache_read),
        ("input_tokens_details", "cache_write_tokens", usage.cache_write),
        ("output_tokens_details", "reasoning_tokens", usage.reasoning),
    )
    put_counters(out, (("input_tokens", usage.input), ("output_tokens", usage.output)), usage, ledger)
    for key, name, value in details:
        if value is not None:
            out.setdefault(key, {})[name] = value
        elif not ledger.is_home:
            out.setdefault(key, {})[name] = 0
    if not ledger.is_home and None in (usage.cache_read, usage.cache_write, usage.reasoning):
        lose_silence(usage.at, ledger)
    give_back(usage, out, ledger)
    if "total_tokens" not in (shape(usage, NAME, ABSENT) or ()):
        out.setdefault("total_tokens", (usage.input or 0) + (usage.output or 0))
    return out
