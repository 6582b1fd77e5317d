"""Parts, contents, counters and stop reasons of Gemini's generateContent, written.

A node that came in the second spelling is written in it again, by its own dialect only.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._gemini_read import EXACT, NAME, ROLES, STOP_WORDS, read_stop, respell
from backplane.dialects._losses import (
    cache_write_path,
    lose_detail,
    lose_marks,
    lose_name,
    lose_part,
    lose_signature,
    stop_word,
)
from backplane.dialects._parts import (
    ABSENT,
    MADE_ID,
    Ledger,
    arguments_object,
    give_back,
    is_home_raw,
    json_text,
    shape,
)
from backplane.ir import Candidate, Media, Message, Part, Refusal, Text, Thinking, ToolResult, ToolUse, Usage


def write_content(message: Message, names: dict[str, str], ledger: Ledger) -> Json:
    """Write one content.

    Args:
        names: id of a call → the tool's name, which a result has to say here.
    """
    if ledger.is_home and shape(message, NAME, "#text") and len(message.parts) == 1:
        return message.parts[0].text  # type: ignore[attr-defined]
    out: dict[str, Any] = {}
    absent = shape(message, NAME, ABSENT) or () if ledger.is_home else ()
    native = message.native_role
    if ledger.is_home and native is not None and _role_fits(native, message.role):
        out["role"] = native
    elif "role" not in absent:
        out["role"] = "model" if message.role == "assistant" else "user"
        if native not in (None, message.role, "model", "function"):
            ledger.degrade(f"{message.at}/role", "role", f"the role {native} became {out['role']}")
    lose_name(message, ledger)
    if message.flat is False and not ledger.is_home and len(message.parts) < 2:
        ledger.degrade(f"{message.at}/content", "shape", "a list of one block is not told from a text here")
    parts = write_parts(message.parts, names, ledger)
    if parts or "parts" not in absent:
        out["parts"] = parts
    give_back(message, out, ledger)
    return out


def _role_fits(native: str, role: str) -> bool:
    if role == "system" or native not in ROLES:
        return True
    return ROLES.get(native, "user") == role or (role == "tool" and ROLES.get(native, "user") == "user")


def write_parts(parts: tuple[Part, ...], names: dict[str, str], ledger: Ledger) -> list[Json]:
    """Write parts; those that the target has no word for are left out and reported."""
    out: list[Json] = []
    for part in parts:
        if is_home_raw(part, ledger):
            out.append(part.payload)  # type: ignore[attr-defined]
        elif (written := write_part(part, names, ledger)) is not None:
            out.append(written)
    return out


def write_part(part: Part, names: dict[str, str], ledger: Ledger) -> Json:
    """Write one part, None where the target has no word for it."""
    if is_home_raw(part, ledger):
        return part.payload  # type: ignore[attr-defined]
    if shape(part, NAME, "#bare") and ledger.is_home:
        return part.text  # type: ignore[attr-defined]
    out = _write_kind(part, names, ledger)
    if out is None:
        return None
    if part.signature is not None:
        if ledger.is_home:
            out["thoughtSignature"] = part.signature
        else:
            lose_signature(part, ledger)
    lose_marks(part, ledger, signature=False)
    respell(part, out, ledger)
    give_back(part, out, ledger)
    return out


def _write_kind(part: Part, names: dict[str, str], ledger: Ledger) -> dict[str, Any] | None:
    if isinstance(part, Text):
        for citation in part.citations:
            ledger.drop(citation.at, "citation", "citations stand on the whole answer here")
        return {"text": part.text}
    if isinstance(part, Thinking) and part.redacted is None:
        if not part.text and not ledger.is_home:
            ledger.drop(part.at, "thinking", f"thinking without words, which only {ledger.source} takes back")
            return None
        return {"text": part.text, "thought": True}
    if isinstance(part, Refusal):
        ledger.degrade(part.at, "part", "a refusal is said as text here")
        return {"text": part.text}
    if isinstance(part, ToolUse):
        return _write_call(part, ledger)
    if isinstance(part, ToolResult):
        return _write_result(part, names, ledger)
    if isinstance(part, Media):
        return _write_media(part, ledger)
    if isinstance(part, Thinking):
        ledger.drop(part.at, "thinking", f"only {ledger.source} can read it", part.redacted)
        return None
    lose_part(part, ledger)
    return None


def _write_call(part: ToolUse, ledger: Ledger) -> dict[str, Any]:
    absent = shape(part, NAME, ABSENT) or () if ledger.is_home else ()
    body: dict[str, Any] = {}
    if not part.id_made and not part.id.startswith(MADE_ID):
        body["id"] = part.id
    if part.name or "functionCall/name" not in absent:
        body["name"] = part.name
    value = part.input if ledger.is_home else arguments_object(part, ledger)
    if value or "functionCall/args" not in absent:
        body["args"] = value
    inner: dict[str, Any] = {"functionCall": respell(part, body, ledger, "functionCall")}
    return inner


def _write_result(part: ToolResult, names: dict[str, str], ledger: Ledger) -> dict[str, Any]:
    absent = shape(part, NAME, ABSENT) or () if ledger.is_home else ()
    body: dict[str, Any] = {}
    if not part.id_made and not part.id.startswith(MADE_ID):
        body["id"] = part.id
    name = part.name if part.name is not None else names.get(part.id)
    if "functionResponse/name" not in absent:
        body["name"] = "unknown" if name is None else name
    if part.content or part.value is not None or "functionResponse/response" not in absent:
        body["response"] = _write_value(part, body, ledger)
    return {"functionResponse": respell(part, body, ledger, "functionResponse")}


def _write_value(part: ToolResult, body: dict[str, Any], ledger: Ledger) -> dict[str, Any]:
    texts = [inner.text for inner in part.content if isinstance(inner, Text)]
    if type(part.value) is dict and texts == [json_text(part.value)]:
        return part.value
    media = []
    for inner in part.content:
        if isinstance(inner, Media) and (made := _write_media(inner, ledger)) is not None:
            if "text" in made:
                texts.append(made["text"])
            else:
                media.append(made)
        elif isinstance(inner, Text):
            lose_marks(inner, ledger)
        elif not isinstance(inner, Media):
            lose_part(inner, ledger)
        give_back(inner, {}, ledger)
    if media:
        body["parts"] = media
    if not ledger.is_home and part.flat is False:
        ledger.degrade(part.at, "shape", "a list of blocks is one text here")
    if part.is_error is False:
        ledger.degrade(part.at, "shape", "no error, said in words")
    return {"error" if part.is_error else "output": "\n".join(texts)}


def _write_media(part: Media, ledger: Ledger) -> dict[str, Any] | None:
    default = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}.get(part.kind, "application/pdf")
    if part.text is not None:
        ledger.degrade(part.at, "media", "a document of plain text became a text")
        return {"text": part.text}
    if part.data is not None:
        name, body = "inlineData", {"data": part.data}
    elif part.url is not None:
        name, body = "fileData", {"fileUri": part.url}
    else:
        ledger.drop(part.at, "media", f"the target takes no {part.kind} in this form", msgspec.to_builtins(part))
        return None
    media_type = part.media_type
    if media_type is None and not ledger.is_home:
        if part.data is not None:
            ledger.synthesise(part.at, "media", f"data has a type here: {default}")
            media_type = default
        else:
            media_type = default
            ledger.synthesise(part.at, "media", f"a file has a type here: {default}")
    if media_type is not None:
        body["mimeType"] = media_type
    if part.name is not None and ledger.is_home:
        body["displayName"] = part.name
    elif (label := part.name or part.title) is not None:
        ledger.drop(part.at, "media", "data has no name here", label)
    lose_detail(part, ledger)
    return {name: respell(part, body, ledger, name)}


def write_stop(candidate: Candidate, ledger: Ledger) -> str | None:
    """Return the word for why the answer stopped: the vendor's own while it means the same."""
    raw, stop = candidate.stop_raw, candidate.stop
    if ledger.is_home:
        if raw is not None and read_stop(raw, candidate.message.parts) == stop:
            return raw
        if stop is None:
            return None
    word = STOP_WORDS.get(stop or "", "OTHER" if stop else "STOP")
    if stop not in EXACT:
        ledger.degrade(candidate.stop_at, "stop", f"{raw or stop} became {word}")
    elif stop == "tool_use":
        ledger.degrade(candidate.stop_at, "shape", "calls end with STOP here")
    stop_word(candidate, ledger)
    return word


def write_usage(usage: Usage, ledger: Ledger) -> dict[str, Any]:
    """Write token counters: thoughts apart from what was said."""
    out: dict[str, Any] = {}
    mine = usage.ext.get(NAME, {})
    tools = mine.get("toolUsePromptTokenCount", mine.get("tool_use_prompt_token_count", 0))
    tools = tools if type(tools) is int else 0
    absent = mine.get(ABSENT, ())
    if usage.input is not None and ("promptTokenCount" not in absent or usage.input > tools):
        out["promptTokenCount"] = usage.input - tools
    spoken = None if usage.output is None else usage.output - (usage.reasoning or 0)
    if spoken is not None and (spoken or "candidatesTokenCount" not in absent):
        out["candidatesTokenCount"] = spoken
    for key, value in (("thoughtsTokenCount", usage.reasoning), ("cachedContentTokenCount", usage.cache_read)):
        if value is not None:
            out[key] = value
    if usage.cache_write:
        ledger.drop(cache_write_path(usage.at, ledger), "usage", "no such counter here", usage.cache_write)
    if "totalTokenCount" not in absent:
        total = (usage.input or 0) + (usage.output or 0)
        if not {"totalTokenCount", "total_token_count"} & mine.keys():
            out["totalTokenCount"] = total
    respell(usage, out, ledger)
    give_back(usage, out, ledger)
    return out
