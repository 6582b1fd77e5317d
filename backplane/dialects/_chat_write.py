"""Messages of the Chat Completions family, written."""

from __future__ import annotations

from typing import Any

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._chat import DETAILS, ROLES, Flavour
from backplane.dialects._losses import (
    address_citation,
    lose_detail,
    lose_error,
    lose_marks,
    lose_part,
    lose_signature,
    lose_thinking,
    result_text,
    split_results,
)
from backplane.dialects._parts import ABSENT, Ledger, arguments_text, give_back, is_home_raw, is_plain, media_url, shape
from backplane.ir import Media, Message, Opaque, Part, Refusal, Text, Thinking, ToolResult, ToolSpec, ToolUse


def write_cache(node: Part | ToolSpec, out: dict[str, Any], ledger: Ledger) -> None:
    """Write a breakpoint of the prompt cache, which only gateways take."""
    if node.cache is None:
        return
    if ledger.is_home:
        out["cache_control"] = {"type": "ephemeral", **node.cache}
    else:
        ledger.drop(node.at, "cache", "the target has no breakpoint here", node.cache)


def write_messages(messages: tuple[Message, ...], flavour: Flavour, ledger: Ledger) -> list[Json]:
    """Write the messages; results leave a mixed message and come first, each as a message of its own.

    What only a user may show moves out of the results into a message after the last of them: between a call and its
    result no other message may stand.
    """
    out: list[Json] = []
    shown: list[Json] = []
    for message in messages:
        results, rest = split_results(message, ledger)
        for place, result in enumerate(results):
            texts = _show(result, shown, flavour, ledger)
            out.append(_write_result(texts, message, place, flavour, ledger))
        if rest is None:
            continue
        if shown:
            out.append({"role": "user", "content": shown})
            shown = []
        out.append(_write_message(rest, flavour, ledger))
    return [*out, {"role": "user", "content": shown}] if shown else out


def _show(result: ToolResult, shown: list[Json], flavour: Flavour, ledger: Ledger) -> ToolResult:
    """Move what is no text out of a result into `shown`, after the id of its call; return what remains."""
    if ledger.is_home or all(isinstance(part, Text) for part in result.content):
        return result
    moved: list[Json] = []
    rest: list[Part] = []
    for part in result.content:
        if not isinstance(part, Media) or part.text is not None:
            rest.append(part)
        elif (written := _write_part(part, flavour, ledger)) is not None:
            ledger.degrade(part.at, "media", "a result takes only text here: it moved to a user's message after it")
            moved.append(written)
    if moved:
        shown += [{"type": "text", "text": f"From the result of {result.id}:"}, *moved]
    return msgspec.structs.replace(result, content=tuple(rest))


def _write_result(result: ToolResult, message: Message, place: int, flavour: Flavour, ledger: Ledger) -> Json:
    is_old = message.native_role == "function" and message.role == "tool" and ledger.is_home
    out: dict[str, Any] = {"role": "function" if is_old else "tool"}
    if not (result.id_made and ledger.is_home):
        out["tool_call_id"] = result.id
    name = result.name if result.name is not None and (ledger.is_home or ledger.kin.get(ledger.source)) else None
    if name is not None:
        out["name"] = name
    elif result.name is not None:
        ledger.degrade(result.at, "shape", "the tool's name is known by the id of the call")
    if (result.flat is False and ledger.is_home) or (
        result.flat is False and len(result.content) > 1 and all(type(part) is Text for part in result.content)
    ):
        out["content"] = _write_list(result.content, flavour, ledger)
    elif result.content or not (ledger.is_home and shape(message, flavour.name, ABSENT)):
        if result.flat is False and result.content:
            ledger.degrade(result.at, "shape", "a list of one text became the text")
        out["content"] = result_text(result, ledger)
    _lose_result_fields(result, ledger)
    if place == 0:
        give_back(message, out, ledger)
    if ledger.is_home and not result.content and result.flat is None:
        out = {key: value for key, value in out.items() if key != "content" or value}
        give_back(message, out, ledger)
    return out


def _lose_result_fields(result: ToolResult, ledger: Ledger) -> None:
    lose_error(result, ledger)
    lose_marks(result, ledger)
    give_back(result, {}, ledger)


def _write_message(message: Message, flavour: Flavour, ledger: Ledger) -> Json:
    out: dict[str, Any] = {}
    _write_role(message, out, flavour, ledger)
    if message.name is not None:
        out["name"] = message.name
    if message.role == "assistant":
        write_assistant(message, out, flavour, ledger, is_answer=False)
    else:
        content = _write_content(message.parts, message.flat, flavour, ledger)
        if content is not None or not message.parts:
            out["content"] = content if content or (ledger.is_home and content is not None) else ""
        if not message.parts and ledger.is_home and message.flat is None:
            del out["content"]
    give_back(message, out, ledger)
    return out


def _write_role(message: Message, out: dict[str, Any], flavour: Flavour, ledger: Ledger) -> None:
    native = message.native_role
    if ledger.is_home and native is None and "role" in (shape(message, flavour.name, ABSENT) or ()):
        return
    is_known = native in flavour.roles and ROLES.get(native or "") == message.role != "tool"
    if is_known or (ledger.is_home and native is not None and ROLES.get(native, "user") == message.role):
        out["role"] = native
        return
    # Only a result may speak as a tool, and those are written elsewhere.
    out["role"] = "user" if message.role == "tool" and not ledger.is_home else message.role
    if native is not None and native != message.role and native != "model":
        ledger.degrade(f"{message.at}/role", "role", f"the role {native} became {message.role}")


def _write_content(parts: tuple[Part, ...], flat: bool | None, flavour: Flavour, ledger: Ledger) -> Json:
    if not parts:
        return [] if flat is False else None
    if flat is not False and is_plain(parts):
        give_back(parts[0], {}, ledger)
        return parts[0].text  # type: ignore[attr-defined]
    return _write_list(parts, flavour, ledger)


def _write_list(parts: tuple[Part, ...], flavour: Flavour, ledger: Ledger) -> list[Json]:
    out: list[Json] = []
    for part in parts:
        if is_home_raw(part, ledger):
            out.append(part.payload)  # type: ignore[attr-defined]
        elif (written := _write_part(part, flavour, ledger)) is not None:
            out.append(written)
    return out


def _write_part(part: Part, flavour: Flavour, ledger: Ledger) -> Json:
    """Write one member of a content list; None where the target has no word for it."""
    if type(part) is Text:
        out: dict[str, Any] = {"type": "text", "text": part.text}
        for citation in part.citations:
            ledger.drop(citation.at, "citation", "no citations in a request here")
    elif isinstance(part, Media):
        made = _write_media(part, flavour, ledger)
        if made is None:
            return None
        out = made
    elif type(part) is Refusal:
        out = {"type": "refusal", "refusal": part.text}
    else:
        lose_part(part, ledger)
        return None
    write_cache(part, out, ledger)
    lose_marks(part, ledger, cache=False)
    give_back(part, out, ledger)
    return out


def _write_media(media: Media, flavour: Flavour, ledger: Ledger) -> dict[str, Any] | None:
    out: dict[str, Any] | None = None
    if media.kind in ("image", "video") and (url := media_url(media)) is not None:
        key = f"{media.kind}_url"
        body: Json = {"url": url}
        if media.detail in DETAILS or (media.detail is not None and ledger.is_home):
            body["detail"] = media.detail
        else:
            lose_detail(media, ledger)
        out = {"type": key, key: url if shape(media, flavour.name, "#plain_url") else body}
    elif media.kind == "audio" and media.data is not None:
        form = (media.media_type or "audio/wav").partition("/")[2]
        out = {"type": "input_audio", "input_audio": {"data": media.data, "format": form}}
        if not ledger.is_home:
            ledger.degrade(media.at, "shape", "the type of a sound is one word here")
    elif media.kind == "document" and (flavour.has_files or ledger.is_home):
        out = _write_file(media, flavour, ledger)
    # Kimi reads films, yet the types of the SDK that it names as its own have no word for them.
    if out is None or (media.kind == "video" and not ledger.is_home):
        ledger.drop(media.at, "media", f"the target takes no {media.kind} in this form", msgspec.to_builtins(media))
        return None
    is_filename = media.kind == "document" and media.name is None and media.text is None
    if media.title is not None and not ledger.is_home and not is_filename:
        ledger.drop(f"{media.at}/title", "media", "no titles here", media.title)
    return out


def _write_file(media: Media, flavour: Flavour, ledger: Ledger) -> dict[str, Any] | None:
    body: dict[str, Any] = {}
    if media.data is not None:
        body["file_data"] = media.data if shape(media, flavour.name, "#bare_data") else media_url(media)
    elif media.file_id is not None and (ledger.is_home or ledger.source in ("openai", "codex", "copilot")):
        body["file_id"] = media.file_id
    elif media.text is not None:
        ledger.degrade(media.at, "media", "a document of plain text became a text")
        return {"type": "text", "text": media.text}
    else:
        return None
    if media.name is not None:
        body["filename"] = media.name
    elif media.title is not None and not ledger.is_home:
        body["filename"] = media.title
    return {"type": "file", "file": body}


def write_assistant(
    message: Message, out: dict[str, Any], flavour: Flavour, ledger: Ledger, *, is_answer: bool
) -> None:
    """Write what an assistant said: thinking, text, refusal and calls are members of their own."""
    content: list[Part] = []
    calls: list[Json] = []
    rank = 0
    for part in message.parts:
        place = 3 if isinstance(part, ToolUse) else 0 if isinstance(part, Thinking) else 1
        if place < rank and not ledger.is_home:
            ledger.degrade(part.at, "order", "thinking, text and calls stand apart here")
        rank = max(rank, place)
        if isinstance(part, ToolUse):
            _write_call(part, out, calls, flavour, ledger)
        elif isinstance(part, Thinking):
            _write_thinking(part, out, flavour, ledger, is_answer=is_answer)
        elif isinstance(part, Refusal) and not shape(part, flavour.name, "#part"):
            out["refusal"] = out.get("refusal", "") + part.text
            lose_marks(part, ledger)
            give_back(part, {}, ledger)
        elif isinstance(part, Media) and part.kind == "audio" and _is_spoken(part, flavour):
            _write_spoken(part, out, ledger)
        elif isinstance(part, Opaque) and part.label.startswith("call of type") and ledger.is_home:
            calls.append(part.payload)
        else:
            content.append(part)
    _write_said(tuple(content), message, out, flavour, ledger, is_answer=is_answer)
    if calls:
        out["tool_calls"] = calls
    if "content" not in out and not ledger.is_home:
        out["content"] = None


def _is_spoken(part: Media, flavour: Flavour) -> bool:
    return part.file_id is not None or shape(part, flavour.name, "##spoken") is not None


def _write_said(
    parts: tuple[Part, ...], message: Message, out: dict[str, Any], flavour: Flavour, ledger: Ledger, *, is_answer: bool
) -> None:
    is_list = ledger.is_home and message.flat is False
    if not is_answer or is_list:
        content = _write_content(parts, message.flat, flavour, ledger)
        # A service refuses an empty list; one is written only where one was read.
        if content or content == "" or (is_list and content is not None):
            out["content"] = content
        return
    texts: list[str] = []
    for part in parts:
        if type(part) is Text:
            _write_citations(part, sum(map(len, texts)), out, ledger)
            texts.append(part.text)
            lose_marks(part, ledger)
            give_back(part, {}, ledger)
        else:
            lose_part(part, ledger)
    if texts:
        out["content"] = "".join(texts)
    if len(texts) > 1 and not ledger.is_home:
        ledger.degrade(message.at, "order", f"{len(texts)} texts became one")


def _write_citations(part: Text, begin: int, out: dict[str, Any], ledger: Ledger) -> None:
    for citation in part.citations:
        if (body := address_citation(citation, part, ledger, begin)) is None:
            continue
        annotation: dict[str, Any] = {"type": "url_citation", "url_citation": body}
        give_back(citation, annotation, ledger)
        out.setdefault("annotations", []).append(annotation)


def _write_spoken(media: Media, out: dict[str, Any], ledger: Ledger) -> None:
    body: dict[str, Any] = {}
    if media.file_id is not None:
        body["id"] = media.file_id
    if media.data is not None:
        body["data"] = media.data
    if media.transcript is not None:
        body["transcript"] = media.transcript
    give_back(media, body, ledger)
    out["audio"] = body


def _write_thinking(part: Thinking, out: dict[str, Any], flavour: Flavour, ledger: Ledger, *, is_answer: bool) -> None:
    field = flavour.thinking_answer if is_answer else flavour.thinking_request
    if ledger.is_home and part.field is not None:
        field = part.field
    if part.redacted is not None or field is None:
        lose_thinking(part, ledger, "the target takes no such thinking")
        return
    if not ledger.is_home:
        ledger.degrade(part.at, "thinking", f"thinking stands in {field}")
    out[field] = out.get(field, "") + part.text
    if part.signature is not None:
        if flavour.signature_field is not None and ledger.is_home:
            out[flavour.signature_field] = part.signature
        else:
            lose_signature(part, ledger)
    give_back(part, {}, ledger)


def _write_call(part: ToolUse, out: dict[str, Any], calls: list[Json], flavour: Flavour, ledger: Ledger) -> None:
    absent = shape(part, flavour.name, "#old")
    if absent is not None and ledger.is_home:
        old = {"name": part.name, "arguments": arguments_text(part)}
        old = {key: value for key, value in old.items() if key not in absent or value not in ("", "{}")}
        give_back(part, old, ledger)
        out["function_call"] = old
        return
    kind = part.kind
    key = "arguments" if kind == "function" else "input"
    absent = shape(part, flavour.name, ABSENT) or ()
    call: dict[str, Any] = {} if "type" in absent and ledger.is_home else {"type": kind}
    body: dict[str, Any] = {"name": part.name}
    if part.input not in ({}, "") or f"{kind}/{key}" not in absent:
        is_object = shape(part, flavour.name, "#object") and ledger.is_home
        body[key] = part.input if is_object else arguments_text(part)
    call[kind] = body
    if not (part.id_made and ledger.is_home):
        call["id"] = part.id
    lose_marks(part, ledger)
    give_back(part, call, ledger)
    calls.append(call)
