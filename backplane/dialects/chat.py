"""Reads and writes the Chat Completions family of dialects; a `Flavour` has the differences between them.

An assistant's message has a member for each kind of content (thinking, text, refusal, audio, calls). Streams are
deltas of one message; a block ends when another member appears.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import Manifest
from backplane.dialects import ir
from backplane.dialects.common import (
    EFFORT_BUDGETS,
    NUMBER,
    Calls,
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
    json_text,
    kind_of,
    media_url,
    members_of,
    merged,
    parse_json,
    pop,
    pop_inner,
    pop_list,
    put_back,
    read_arguments,
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
)
from backplane.dialects.limits import ServerLimits, Spelling
from backplane.dialects.outcome import Endings, has_cut_call
from backplane.dialects.streams import BlockReader, BlockWriter, Incoming, Key, begun, failure, whole_events
from backplane.dialects.vendor import Dialect, read_error

ROLES: Final[dict[str, ir.Role]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip

STOPS: Final[dict[str, ir.Stop]] = {
    "stop": "end", "length": "max_tokens", "tool_calls": "tool_use", "function_call": "tool_use",
    "content_filter": "content_filter",
    # Stop reasons that gateways pass on from other vendors.
    "end_turn": "end", "max_tokens": "max_tokens", "tool_use": "tool_use", "refusal": "refusal",
    "STOP": "end", "MAX_TOKENS": "max_tokens", "SAFETY": "content_filter", "RECITATION": "content_filter",
    "MALFORMED_FUNCTION_CALL": "error",
}  # fmt: skip

STOP_WORDS: Final[dict[ir.Stop | None, str]] = {
    "end": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls",
    "content_filter": "content_filter", "refusal": "content_filter",
    # These answers may be incomplete, so they must not end with `stop`.
    None: "length", "pause": "length", "error": "length", "cancelled": "length", "other": "length",
}  # fmt: skip

OWN_STOPS: Final = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
"""Stop reasons of the family, which are copied unchanged between its dialects."""
ENDINGS: Final = Endings(STOPS, STOP_WORDS)
DETAILS: Final = frozenset({"auto", "low", "high"})
AUDIO_FORMATS: Final = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/wave": "wav", "audio/mpeg": "mp3",
                        "audio/mp3": "mp3"}  # fmt: skip
"""Media type → name of the format; the server accepts `wav` and `mp3` (platform.openai.com, audio, 2026-11)."""
AUDIO_TYPES: Final = {"mp3": "audio/mpeg"}
MEDIA: Final[MediaTable] = {
    "image/data": None, "image/url": None, "audio/data": frozenset({*AUDIO_FORMATS, None}), "document/data": None,
    "document/file_id": frozenset({"openai", "codex", "copilot"}),
}  # fmt: skip
SOUND: Final = {"id": "file_id", "data": "data", "transcript": "transcript"}
"""Member of an assistant's `audio` → field of `ir.Media`."""

MEMBERS: Final[dict[str, type[Any]]] = {
    "tool_calls": list, "annotations": list, "audio": dict, "logprobs": dict, "system_fingerprint": str,
    "function_call": dict, "logit_bias": dict, "store": bool, "stream_options": dict, "prediction": dict,
    "modalities": list, "prompt_cache_key": str, "safety_identifier": str, "functions": list,
    "expires_at": int, "prompt_tokens_details": dict, "completion_tokens_details": dict,
}  # fmt: skip
"""Members that a document keeps when it is translated within the family → the type that they must have."""
SISTERS: Final = ("openai", "kimi", "copilot")

USAGE_TABLE: Final = {
    "prompt_tokens": "input", "completion_tokens": "output", "prompt_tokens_details/cached_tokens": "cache_read",
    "prompt_tokens_details/cache_write_tokens": "cache_write",
    "completion_tokens_details/reasoning_tokens": "reasoning",
}  # fmt: skip
USAGE: Final = Counters(USAGE_TABLE, needed=("input", "output"), also={"cache_read": "cached_tokens"})
CACHED_ON_TOP: Final = Counters(
    {"cached_tokens" if field == "cache_read" else path: field for path, field in USAGE_TABLE.items()},
    needed=("input", "output"), also={"cache_read": "prompt_tokens_details/cached_tokens"},
)  # fmt: skip
ERROR: Final[dict[str, Json]] = {"type": "upstream_error", "param": None, "code": None}
"""Members that a written error has beside its `message`."""

LIMITS: Final = ServerLimits(call_id=Spelling(most=40), tool_name=Spelling("[a-zA-Z0-9_-]", 64))
"""Limits of tool names and of the lengths of ids (platform.openai.com, chat/create, read 2026-11)."""

SAME: Final[dict[str, tuple[type[Any], ...]]] = {
    "temperature": NUMBER, "top_p": NUMBER, "seed": (int,), "frequency_penalty": NUMBER, "presence_penalty": NUMBER,
    "n": (int,), "logprobs": (bool,), "top_logprobs": (int,), "stream": (bool,), "parallel_tool_calls": (bool,),
    "user": (str,), "reasoning_effort": (str,), "verbosity": (str,), "service_tier": (str,), "metadata": (dict,),
}  # fmt: skip
"""Options with the same name and value in the neutral form → types of the value."""
KNOWN: Final[dict[str, frozenset[Any]]] = {
    "reasoning_effort": frozenset(EFFORT_BUDGETS), "verbosity": frozenset({"low", "medium", "high"}),
    "service_tier": frozenset({"auto", "default", "flex", "scale", "priority", "fast"}),
}  # fmt: skip
"""Option → values that the server accepts."""
FORM_MEMBERS: Final = frozenset({"name", "schema", "strict", "description"})
"""Members of a response format that the neutral form has."""


class Flavour(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between one dialect and the rest of the family."""

    name: str
    roles: frozenset[str] = frozenset(ROLES)
    max_tokens: str = "max_completion_tokens"
    """Member that gets the token limit of a request from another dialect."""
    stops_max: int | None = None
    """Maximum number of stop sequences; None for any number."""
    bounds: Mapping[str, tuple[Any, Any]] = {}
    """Option → least and greatest value that the server accepts; an option without bounds is not listed."""
    thinking_request: str | None = None
    """Member that has the thinking in messages of a request; None if the vendor has no such member."""
    thinking_answer: str = "reasoning_content"
    thinking_fields: tuple[str, ...] = ("reasoning_content", "reasoning", "reasoning_text")
    thinking_is_on_or_off: bool = False
    """True if a request can only switch thinking on or off, in its member `thinking`."""
    signature_field: str | None = None
    cached_tokens_on_top: bool = False
    """True if the vendor writes its count of cached tokens into `usage`, not into `usage.prompt_tokens_details`."""
    media: MediaTable = msgspec.field(default_factory=lambda: MEDIA)
    can_force_tools: bool = True
    unknown_options: frozenset[str] = frozenset()

    @property
    def usage(self) -> Counters:
        return CACHED_ON_TOP if self.cached_tokens_on_top else USAGE


def is_shared(dialect: str, name: str, value: Json) -> bool:
    """Return True if the family shares this native member of `dialect`, and the value has the required type."""
    if dialect not in SISTERS or type(value) is not MEMBERS.get(name):
        return False
    if name == "annotations":
        return all(kind_of(one) == "url_citation" for one in value)
    if name == "logprobs":
        found = (value.get("content"), value.get("refusal"))
        tokens = [one for listed in found if type(listed) is list for one in listed]
        return bool({"content", "refusal"} & value.keys()) and all(
            type(one) is dict and {"token", "logprob", "top_logprobs"} <= one.keys() for one in tokens
        )
    return True


def own(out: dict[str, Any], node: ir.Node, notes: LossLedger) -> dict[str, Any]:
    """Add a node's native members to `out`; from another dialect of the family only those that the family shares."""
    if notes.is_home:
        return notes.own(out, node)
    sister = node.ext.get(notes.source, {})
    return merged(out, {name: value for name, value in sister.items() if is_shared(notes.source, name, value)})


# Blocks ---------------------------------------------------------------------------------------------------------------


def read_block(value: Json, at: str, flavour: Flavour) -> ir.Part:
    """Read one block of a `content` list; a block of an unknown kind stays native."""
    return read_part(flavour.name, value, at, _read_block)


def _read_block(kind: str, rest: dict[str, Any], at: str) -> ir.Part | None:
    if kind in ("text", "refusal") and (text := pop(rest, kind)) is not None:
        return ir.Text(text=text) if kind == "text" else ir.Refusal(text=text)
    if kind == "thinking" and (thoughts := _joined_thoughts(rest.get("thinking"))) is not None:
        del rest["thinking"]
        return ir.Thinking(text=thoughts)
    body, media = pop_inner(rest, kind), None
    if kind in ("image_url", "video_url") and (url := pop(rest, kind) or pop(body, "url")):  # some send a bare URL
        of: Any = "image" if kind == "image_url" else "video"
        media = ir.Media(kind=of, detail=pop(body, "detail"), **read_url(url))
    elif kind == "input_audio":
        media = read_audio(body)
    elif kind == "file" and {type(body.get("file_data")), type(body.get("file_id"))} == {str, type(None)}:
        name = pop(body, "filename")
        data, file_id = pop(body, "file_data"), pop(body, "file_id")
        media = ir.Media(kind="document", name=name, file_id=file_id, **({} if data is None else read_file(data)))
    put_back(rest, kind, body)
    return media


def _joined_thoughts(value: Json) -> str | None:
    """Join thinking into one text, as some gateways send a list of texts; return None for any other value."""
    texts = [value] if type(value) is str else value if type(value) is list else [None]
    texts = [one.get("text") if type(one) is dict else one if type(value) is str else None for one in texts]
    return "".join(texts) if all(type(text) is str for text in texts) else None


def read_audio(body: dict[str, Any]) -> ir.Media | None:
    """Read the body of a block `input_audio`; None if a member is missing."""
    if type(body.get("data")) is not str or type(body.get("format")) is not str:
        return None
    data, form = body.pop("data"), body.pop("format")
    return ir.Media(kind="audio", data=data, media_type=AUDIO_TYPES.get(form, f"audio/{form}"))


def write_block(part: ir.Part, flavour: Flavour, notes: LossLedger) -> Json:
    """Write a block of a content list; if the family has no such block, note a loss and return None."""
    return write_part(part, notes, partial(_write_block, flavour=flavour))


def _write_block(part: ir.Part, notes: LossLedger, flavour: Flavour) -> dict[str, Any] | None:
    out: dict[str, Any] | None = None
    match part:
        case ir.Text():
            out = {"type": "text", "text": part.text}
        case ir.Refusal():
            out = {"type": "refusal", "refusal": part.text}
        case ir.Thinking() if notes.is_home and part.redacted is None:
            out = {"type": "thinking", "thinking": part.text}
        case ir.Media() if takes(part, flavour.media, notes):
            out = _write_media(part, notes)
    if out is not None and part.cache is not None and notes.is_home:
        out["cache_control"] = {"type": "ephemeral", **part.cache}
    return out


def _write_media(part: ir.Media, notes: LossLedger) -> dict[str, Any] | None:
    url = media_url(part)
    if part.kind in ("image", "video") and url is not None:
        detail = part.detail if notes.is_home or part.detail in DETAILS else None
        kind = f"{part.kind}_url"
        return {"type": kind, kind: without_none({"url": url, "detail": detail})}
    if part.kind == "audio" and part.data is not None:
        kind = part.media_type or "audio/wav"
        form = AUDIO_FORMATS.get(kind, kind.partition("/")[2])
        return {"type": "input_audio", "input_audio": {"data": part.data, "format": form}}
    if part.kind != "document" or (url is None and part.file_id is None):
        return None
    is_bare = part.data is not None and part.media_type is None and notes.is_home
    name = part.name if part.name is not None or notes.is_home else part.title
    body = {"file_data": part.data if is_bare else url, "file_id": part.file_id, "filename": name}
    return {"type": "file", "file": without_none(body)}


def write_said(parts: Iterable[ir.Part], flavour: Flavour, notes: LossLedger) -> Json:
    """Write blocks as a `content`: a text if there is a single text block, else a list."""
    return write_content(parts, partial(write_block, flavour=flavour, notes=notes))


# Messages, read -------------------------------------------------------------------------------------------------------


def read_message(value: Json, at: str, calls: Calls, flavour: Flavour) -> ir.Message:
    """Read one message; the deprecated role `function` is read as `tool`, a missing one as `user`."""
    rest = members_of(value, at)
    native, name = pop(rest, "role"), pop(rest, "name")
    role = ROLES.get(native or "", "user")
    parts = read_content(rest, "content", at, partial(read_block, flavour=flavour))
    if role == "tool":
        call_id = pop(rest, "tool_call_id")
        result = ir.ToolOutput(
            id=calls.answer(name or "") if call_id is None else call_id, id_made=call_id is None, name=name,
            content=parts, at=at, ext=ext_of(flavour.name, rest),
        )  # fmt: skip
        return ir.Message(role="tool", parts=(result,), at=at)
    if role == "assistant":
        parts = _read_assistant(rest, parts, at, calls, flavour)
    return ir.Message(role=role, parts=parts, native_role=native, name=name, at=at, ext=ext_of(flavour.name, rest))


def _read_assistant(
    rest: dict[str, Any], content: tuple[ir.Part, ...], at: str, calls: Calls, flavour: Flavour
) -> tuple[ir.Part, ...]:
    """Return an assistant's members as blocks in the order thinking, text, refusal, audio, calls."""
    parts: list[ir.Part] = []
    for field in flavour.thinking_fields:
        if not parts and (text := pop(rest, field)) is not None:
            proof = pop(rest, flavour.signature_field) if flavour.signature_field else None
            parts.append(ir.Thinking(text=text, field=field, signature=proof, at=f"{at}/{field}"))
    parts += content
    if (refusal := pop(rest, "refusal")) is not None:
        parts.append(ir.Refusal(text=refusal, at=f"{at}/refusal"))
    if (audio := pop(rest, "audio", dict)) is not None:
        parts.append(read_sound(audio, f"{at}/audio", flavour))
    old = rest.get("function_call")
    if type(old) is dict and type(old.get("name")) is str:
        del rest["function_call"]
        parts.append(read_call({"function": old}, f"{at}/function_call", calls, flavour))
    found = pop(rest, "tool_calls", list) or ()
    parts += [read_call(call, f"{at}/tool_calls/{place}", calls, flavour) for place, call in enumerate(found)]
    _cite(parts, rest, at, flavour)
    return tuple(parts)


def read_sound(value: dict[str, Any], at: str, flavour: Flavour) -> ir.Media:
    """Read the member `audio` of an assistant's message as a media block."""
    rest = value.copy()
    fields = {field: pop(rest, member) for member, field in SOUND.items()}
    return ir.Media(kind="audio", **fields, at=at, ext=ext_of(flavour.name, rest))


def read_call(value: Json, at: str, calls: Calls, flavour: Flavour) -> ir.Part:
    """Read a call; gateways may omit the kind or the id of a call, or send its arguments as an object."""
    rest = value.copy() if type(value) is dict else {}
    kind: Any = rest.pop("type", None) or "function"
    body = pop_inner(rest, kind) if kind in ("function", "custom") else {}
    name = pop(body, "name")
    if name is None:
        return ir.NativePart(dialect=flavour.name, label=f"call of type {kind}", payload=value, at=at)
    text, given = read_given(body, "input" if kind == "custom" else "arguments", kind)
    call_id = pop(rest, "id") or None
    put_back(rest, kind, body)
    return ir.ToolUse(
        id=calls.make(name) if call_id is None else call_id, id_made=call_id is None, name=name, input=given, text=text,
        kind=kind, at=at, ext=ext_of(flavour.name, rest),
    )  # fmt: skip


def read_given(body: dict[str, Any], member: str, kind: str) -> tuple[str | None, Json]:
    """Remove the arguments of a call; return their text (None if they were an object) and their value."""
    given = pop(body, member, *((str,) if kind == "custom" else (str, dict)))
    text = given if type(given) is str else None
    return text, (text or "") if kind == "custom" else given if type(given) is dict else read_arguments(text or "")


def _cite(parts: list[ir.Part], rest: dict[str, Any], at: str, flavour: Flavour) -> None:
    """Move annotations into the text as citations; they stay native if the message has no text or several texts."""
    places = [place for place, part in enumerate(parts) if type(part) is ir.Text]
    found = rest.get("annotations")
    if len(places) != 1 or type(found) is not list or not found or not all(
        kind_of(one) == "url_citation" and type(one.get("url_citation")) is dict for one in found
    ):  # fmt: skip
        return
    del rest["annotations"]
    cited = tuple(
        read_citation({"type": "url_citation", **one["url_citation"]}, f"{at}/annotations/{place}", flavour.name)
        for place, one in enumerate(found)
    )
    parts[places[0]] = msgspec.structs.replace(parts[places[0]], citations=cited)


def read_citation(value: dict[str, Any], at: str, dialect: str) -> ir.Citation:
    """Read one annotation of a text as a citation."""
    rest = value.copy()
    kind, url, title = (pop(rest, name) for name in ("type", "url", "title"))
    start, end = pop(rest, "start_index", int), pop(rest, "end_index", int)
    return ir.Citation(
        kind="url" if kind == "url_citation" else kind or "", url=url, title=title, start=start, end=end, at=at,
        ext=ext_of(dialect, rest),
    )  # fmt: skip


# Messages, written ----------------------------------------------------------------------------------------------------


def write_messages(messages: tuple[ir.Message, ...], flavour: Flavour, notes: LossLedger) -> list[Json]:
    """Write the messages; each result becomes a message of its own, before the rest of its message.

    Media, which only a user's message may contain, move out of the results into a user's message after the last of
    them: no other message may stand between a call and its result.
    """
    made: list[Json] = []
    shown: list[Json] = []
    for message in messages:
        results = [part for part in message.parts if isinstance(part, ir.ToolOutput)]
        others = tuple(part for part in message.parts if not isinstance(part, ir.ToolOutput))
        made += [_write_result(result, shown, flavour, notes) for result in results]
        if results and not others:
            continue
        if shown:
            made.append({"role": "user", "content": shown})
            shown = []
        if results:
            message = msgspec.structs.replace(message, role="user", parts=others, native_role=None)
        made.append(_write_message(message, flavour, notes))
    return [*made, {"role": "user", "content": shown}] if shown else made


def _write_result(result: ir.ToolOutput, shown: list[Json], flavour: Flavour, notes: LossLedger) -> Json:
    """Write a result; its media move into `shown`, after a text with the id of its call."""
    out: dict[str, Any] = {"role": "tool"}
    if not (result.id_made and notes.is_home):
        out["tool_call_id"] = result.id
    if result.name is not None and (notes.is_home or notes.source in SISTERS):
        out["name"] = result.name
    if notes.is_home or all(type(part) is ir.Text for part in result.content):
        out["content"] = write_said(result.content, flavour, notes) or ""
        return own(out, result, notes)
    moved: list[Json] = []
    for part in result.content:
        if isinstance(part, ir.Media) and (written := write_block(part, flavour, notes)) is not None:
            notes.degrade(part.at, "media", "a result takes only text here: it moved to a user's message after it")
            moved.append(written)
    out["content"] = notes.plain_text(part for part in result.content if not isinstance(part, ir.Media))
    if moved:
        shown += [{"type": "text", "text": f"From the result of {result.id}:"}, *moved]
    return own(out, result, notes)


def _write_message(message: ir.Message, flavour: Flavour, notes: LossLedger) -> Json:
    is_known = message.native_role in flavour.roles and ROLES.get(message.native_role or "") == message.role
    out: dict[str, Any] = {"role": message.native_role if is_known else message.role}
    if message.name is not None:
        out["name"] = message.name
    if message.role == "assistant":
        write_assistant(message, out, flavour, notes)
    else:
        out["content"] = write_said(message.parts, flavour, notes) or ""
    return own(out, message, notes)


def write_assistant(message: ir.Message, out: dict[str, Any], flavour: Flavour, notes: LossLedger) -> None:
    """Write an assistant's blocks into `out`; thinking, text, refusal and calls have a member each."""
    content: list[ir.Part] = []
    calls: list[Json] = []
    home = notes.is_home
    for part in message.parts:
        if isinstance(part, ir.ToolUse):
            calls.append(write_call(part, notes))
        elif isinstance(part, ir.Thinking):
            _write_thinking(part, out, flavour, notes)
        elif isinstance(part, ir.Refusal):
            out["refusal"] = out.get("refusal", "") + part.text
        elif isinstance(part, ir.Media) and part.kind == "audio" and (part.file_id or part.transcript) and (
            home or "audio/data" in flavour.media
        ):  # fmt: skip
            out["audio"] = own(sound_of(part), part, notes)
        elif isinstance(part, ir.Media) and not home:
            notes.lose_part(part, "an assistant says only text here")
        elif isinstance(part, ir.NativePart) and part.label.startswith("call of type") and home:
            calls.append(part.payload)
        else:
            content.append(part)
    if notes.is_answer:
        _write_said(content, out, notes)
    elif (said := write_said(content, flavour, notes)) != []:  # services refuse an empty list
        out["content"] = said
    if calls:
        out["tool_calls"] = calls
    if "content" not in out:
        out["content"] = None if calls or notes.is_answer or "refusal" in out else ""


def sound_of(part: ir.Media) -> dict[str, Any]:
    """Write an audio block as the member `audio` of an assistant's message."""
    return without_none({member: getattr(part, field) for member, field in SOUND.items()})


def _write_said(parts: list[ir.Part], out: dict[str, Any], notes: LossLedger) -> None:
    """Write the texts of an answer as one text, with their citations."""
    texts: list[str] = []
    for part in parts:
        if type(part) is not ir.Text:
            notes.lose_part(part)
            continue
        begin = sum(map(len, texts))
        for found in part.citations:
            if (one := found if notes.is_home else by_address(found, part, notes)) is not None:
                start, end = (None if place is None else place + begin for place in (one.start, one.end))
                body = {"url": one.url, "title": one.title, "start_index": start, "end_index": end}
                made = {"type": "url_citation", "url_citation": notes.own(without_none(body), found)}
                out.setdefault("annotations", []).append(made)
        texts.append(part.text)
    if texts:
        out["content"] = "".join(texts)


def _write_thinking(part: ir.Thinking, out: dict[str, Any], flavour: Flavour, notes: LossLedger) -> None:
    field = flavour.thinking_answer if notes.is_answer else flavour.thinking_request
    if notes.is_home:
        field = part.field or field or flavour.thinking_answer
    if part.redacted is not None or field is None:
        notes.lose_part(part)
        return
    if not (notes.is_home or flavour.thinking_request):
        notes.degrade(part.at, "thinking", f"thinking stands in {field}, which is the word of other vendors")
    out[field] = out.get(field, "") + part.text
    if part.signature is not None and flavour.signature_field is not None and notes.is_home:
        out[flavour.signature_field] = part.signature


def write_call(part: ir.ToolUse, notes: LossLedger) -> dict[str, Any]:
    """Write a call; an id that we made is not written back to the dialect that omitted it."""
    given = {"input" if part.kind == "custom" else "arguments": arguments_text(part)}
    out: dict[str, Any] = {} if part.id_made and notes.is_home else {"id": part.id}
    out |= {"type": part.kind, part.kind: {"name": part.name, **given}}
    return own(out, part, notes)


# Requests -------------------------------------------------------------------------------------------------------------


def read_request(document: Json, flavour: Flavour) -> ir.Conversation:
    """Read a Chat Completions request as a conversation."""
    rest, calls = members_of(document), Calls()
    found = pop_list(rest, "messages")
    messages = tuple(read_message(one, f"/messages/{place}", calls, flavour) for place, one in enumerate(found))
    options = OptionsRead(rest, SAME)
    _read_options(rest, options, flavour)
    return conversation_of(flavour.name, rest, messages, options, lambda tool, at: [read_tool(tool, at, flavour)])


def read_tool(value: Json, at: str, flavour: Flavour) -> ir.ToolSpec:
    """Read a tool definition; a tool that is neither a function nor a free-text tool is run by the vendor."""
    rest = value.copy() if type(value) is dict else {}
    kind: Any = pop(rest, "type")
    tool = tool_of(flavour.name, rest, at, kind, inner=kind) if kind in ("function", "custom") else None
    return tool or server_tool(value, at)


def normal(document: Json) -> Json:
    """Return a request with its token limit in `max_tokens`, which `max_completion_tokens` has replaced."""
    if type(document) is not dict or "max_tokens" in document:
        return document
    return {{"max_completion_tokens": "max_tokens"}.get(name, name): value for name, value in document.items()}


def _read_options(rest: dict[str, Any], options: OptionsRead, flavour: Flavour) -> None:
    for member in sorted(("max_completion_tokens", "max_tokens"), key=lambda name: name != flavour.max_tokens):
        if "max_tokens" not in options.values:
            options.add("max_tokens", pop(rest, member, int), f"/{member}")
    stop = pop(rest, "stop", str, list)
    options.add("stop", (stop,) if type(stop) is str else stop, "/stop")
    if (choice := read_choice_of_tool(rest.get("tool_choice"))) is not None:
        options.add("tool_choice", choice, "/tool_choice")
        del rest["tool_choice"]
    form = pop_inner(rest, "response_format")
    kind = form.pop("type", None)
    body = form["json_schema"] if form.keys() == {"json_schema"} and type(form["json_schema"]) is dict else form
    if (asked := read_form(kind, body)) is not None:
        options.add("response_format", asked, "/response_format")
        del rest["response_format"]


def read_form(kind: Json, body: dict[str, Any]) -> dict[str, Any] | None:
    """Read a response format; None if the neutral form has no field for one of its members."""
    if kind in ("text", "json_object") and not body:
        return {"type": "text" if kind == "text" else "json"}
    is_known = kind == "json_schema" and body and body.keys() <= FORM_MEMBERS and None not in body.values()
    return {"type": "schema", **body} if is_known else None


def write_form(form: dict[str, Any], notes: LossLedger) -> tuple[str, dict[str, Any]]:
    """Return the type of a response format and its members; a schema gets a name if it has none."""
    if form["type"] != "schema":
        return "text" if form["type"] == "text" else "json_object", {}
    body = {name: value for name, value in form.items() if name in FORM_MEMBERS}
    if "name" not in body and not notes.is_home:
        notes.synthesise(notes.option_at("response_format"), "required", "a schema has a name here: answer")
        body = {"name": "answer", **body}
    return "json_schema", body


def read_choice_of_tool(value: Json) -> dict[str, Any] | None:
    """Read `tool_choice`, which is a mode or the tool that the model must call; None for an unknown form."""
    if value in ("auto", "none", "required"):
        return {"mode": value}
    kind = kind_of(value)
    if kind not in ("function", "custom") or type(value) is not dict or len(value) != 2:
        return None
    body = value.get(kind)
    name = body.get("name") if type(body) is dict and len(body) == 1 else value.get("name")
    more = {"kind": "custom"} if kind == "custom" else {}
    return {"mode": "tool", "name": name, **more} if type(name) is str else None


def write_request(conversation: ir.Conversation, notes: LossLedger, flavour: Flavour) -> dict[str, Any]:
    """Write a conversation as a Chat Completions request, and note the losses."""
    out = head_of(conversation, notes)
    out["messages"] = write_messages(conversation.messages, flavour, notes)
    if conversation.tools:
        out["tools"] = [write_tool(tool, notes) for tool in conversation.tools]
    _write_options(conversation, out, flavour, notes)
    return own(out, conversation, notes)


def write_tool(tool: ir.ToolSpec, notes: LossLedger) -> Json:
    """Write a tool definition; a tool that the vendor runs is written as it was read."""
    if tool.kind == "server":
        return tool.payload
    body = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    if tool.kind == "function":
        body["parameters"] = tool.schema
    out: dict[str, Any] = {"type": tool.kind, tool.kind: without_none(body)}
    if tool.cache is not None and notes.is_home:
        out["cache_control"] = {"type": "ephemeral", **tool.cache}
    return own(out, tool, notes)


def _write_options(conversation: ir.Conversation, out: dict[str, Any], flavour: Flavour, notes: LossLedger) -> None:
    home, left = notes.is_home, dict(conversation.options)
    if flavour.thinking_is_on_or_off:
        _write_switch(left, out, notes)
    members = [name for name in (*SAME, "stop") if home or name not in flavour.unknown_options]
    out |= write_options(left, members, notes, bounds=flavour.bounds, known=KNOWN, stops_max=flavour.stops_max)
    if (limit := left.pop("max_tokens", None)) is not None:
        member = notes.option_at("max_tokens")[1:] if home and "max_tokens" in notes.places else flavour.max_tokens
        out[member] = notes.bounded("max_tokens", limit, 1)
    choice = left.pop("tool_choice", None)
    if choice is not None and choice["mode"] not in ("auto", "none") and not (home or flavour.can_force_tools):
        notes.drop(notes.option_at("tool_choice"), "tool_choice", "no tool can be forced here", choice)
    elif choice is not None:
        kind = choice.get("kind", "function")
        by_name = {"type": kind, kind: {"name": choice.get("name")}}
        out["tool_choice"] = by_name if choice["mode"] == "tool" else choice["mode"]
    if (form := left.pop("response_format", None)) is not None:
        kind, body = write_form(form, notes)
        out["response_format"] = {"type": kind, kind: body} if body else {"type": kind}
    if (budget := left.pop("reasoning_budget", None)) is not None:
        word = effort_word(budget, conversation, notes)
        if word is not None:
            out["reasoning_effort"] = word
    notes.lose_options(left)


def _write_switch(left: dict[str, Any], out: dict[str, Any], notes: LossLedger) -> None:
    """Write the effort or budget for thinking for a vendor that can only switch thinking on or off."""
    budget = left.pop("reasoning_budget", None)
    effort = None if notes.is_home else left.pop("reasoning_effort", None)
    for name, value, is_on in (
        ("reasoning_effort", effort, effort != "none"),
        ("reasoning_budget", budget, budget != 0),
    ):
        if value is None:
            continue
        if value != 0 and value != -1:
            notes.change_option(name, value, "thinking is on or off here")
        out["thinking"] = {"type": "enabled" if is_on else "disabled"}


# Answers --------------------------------------------------------------------------------------------------------------


def read_answer(document: Json, flavour: Flavour) -> ir.Answer:
    """Read a Chat Completions response as an answer."""
    rest, calls = members_of(document), Calls()
    if (failed := read_error(document, rest, "choices", flavour.name)) is not None:
        return failed
    found = pop_list(rest, "choices")
    candidates = tuple(_read_choice(choice, place, calls, flavour) for place, choice in enumerate(found))
    return answer_of(flavour.name, rest, candidates, flavour.usage, created="created")


def _read_choice(choice: Json, place: int, calls: Calls, flavour: Flavour) -> ir.Candidate:
    at = f"/choices/{place}"
    rest = members_of(choice, at)
    body = pop(rest, "message", dict) or {}
    message = read_message({"role": "assistant", **body}, f"{at}/message", calls, flavour)
    raw = pop(rest, "finish_reason")
    return ir.Candidate(
        message=message, stop=ENDINGS.read(raw, message.parts), stop_raw=raw, stop_at=f"{at}/finish_reason", at=at,
        ext=ext_of(flavour.name, rest),
    )  # fmt: skip


def write_answer(answer: ir.Answer, notes: LossLedger, flavour: Flavour) -> dict[str, Any]:
    """Write an answer as a Chat Completions response, and note the losses."""
    created = answer.created if notes.is_home or answer.created is None else int(answer.created)
    out = without_none({"id": answer.id, "model": answer.model, "created": created})
    out["choices"] = [_write_choice(one, place, flavour, notes) for place, one in enumerate(answer.candidates)]
    if answer.usage is not None:
        out["usage"] = own(flavour.usage.write(answer.usage, notes), answer.usage, notes)
    own(out, answer, notes)
    out["object"] = "chat.completion"
    return (
        out if notes.is_home else {"id": "chatcmpl-translated", "created": 0, "model": "unknown", **without_none(out)}
    )


def _write_choice(candidate: ir.Candidate, place: int, flavour: Flavour, notes: LossLedger) -> Json:
    source = candidate.message
    message: dict[str, Any] = {"role": "assistant", **({} if source.name is None else {"name": source.name})}
    write_assistant(source, message, flavour, notes)
    choice: dict[str, Any] = {"message": own(message, source, notes), "index": place}
    raw = candidate.stop_raw
    is_whole = notes.source in SISTERS and not has_cut_call(source.parts)
    is_own = is_whole and raw in OWN_STOPS and ENDINGS.read(raw, source.parts) == candidate.stop
    if (word := raw if is_own else ENDINGS.write(candidate, notes)) is not None:
        choice["finish_reason"] = word
    return own(choice, candidate, notes)


# Streams, read --------------------------------------------------------------------------------------------------------

HEAD: Final = frozenset({"id", "model", "created", "object", "choices", "usage", "error", "obfuscation"})
"""Members of a chunk that are read, and `obfuscation`, padding that hides the lengths of tokens."""


class _Call:
    """A call in a stream, until its last piece; its block begins when its name is complete."""

    def __init__(self, part: ir.ToolUse) -> None:
        self.part = part
        self.name = ""
        self.block: Incoming | None = None

    def is_whole(self) -> bool:
        return self.block is not None and parse_json("".join(self.block.texts)) is not None


class _Choice:
    """The open blocks of one choice, which is one of the answers in a stream."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.text: tuple[str, Any] = ("", None)
        """Member of the latest text, and the key of its block; `""` and None before the first."""
        self.calls: dict[int, _Call] = {}
        """The vendor's `index` of a call → the call."""
        self.grown: dict[int, _Call] = {}
        """Index of a block → its call, if it grew since the last check; to check all would take quadratic time."""
        self.last_call = 0
        self.newest: _Call | None = None
        """The latest call, whose block may not have begun yet; None before the first."""
        self.audio: dict[str, Any] = {}


class StreamReader(BlockReader):
    """Reads the chunks of one stream of the family."""

    def __init__(self, dialect: Any, flavour: Flavour) -> None:
        super().__init__(dialect)
        self.flavour = flavour
        self.fields = {"content", "refusal", *flavour.thinking_fields}
        self.choices: dict[int, _Choice] = {}
        self.notes: dict[str, Any] = {}
        self.ids = Calls()

    def read(self, chunk: Json) -> list[ir.StreamEvent]:
        """Read one chunk; a value that is no object is kept as it is."""
        if type(chunk) is not dict:
            return [ir.Kept(chunk)]
        out: list[ir.StreamEvent] = []
        error = chunk.get("error")
        failed: list[ir.StreamEvent] = [failure(error, {"error": error}, "code")] if error else []
        choices = chunk.get("choices")
        if failed and not choices:
            return failed
        if chunk.get("object") == "chat.completion":
            self.ended = True  # some gateways send the whole answer though a stream was requested
            return whole_events(self.dialect.read_answer(chunk))
        answer_id, model = chunk.get("id"), chunk.get("model")
        if not self.began and (answer_id or model or choices):
            self.began = True
            out.append(begun(answer_id, model, chunk.get("created")))
        for key in sorted(chunk.keys() - HEAD):
            if key not in self.notes or self.notes[key] != chunk[key]:
                self.notes[key] = chunk[key]
                out.append(ir.Noted(key, chunk[key]))
        for place, choice in enumerate(choices if type(choices) is list else ()):
            if type(choice) is dict:
                self._choice(choice, place, out)
        return out + self.count(chunk.get("usage"), "/usage") + failed

    def _choice(self, choice: dict[str, Any], place: int, out: list[ir.StreamEvent]) -> None:
        number = choice.get("index")
        number = number if type(number) is int else place
        state = self.choices.get(number)
        if state is None:
            state = self.choices[number] = _Choice(number)
        found = choice.get("delta") or choice.get("message")
        delta: dict[str, Any] = found if type(found) is dict else {}
        for key, value in delta.items():
            if key in self.fields and type(value) is str:
                if value:
                    self._text(state, key, value, out)
            elif key == "tool_calls" and type(value) is list:
                for spot, call in enumerate(value):
                    if type(call) is dict:
                        self._call(state, call, spot, out)
            elif key == "content" and type(value) is list:
                self._listed(state, value, out)
            elif key not in ("role", "content") and value is not None:
                self._member(state, key, value, out)
        self._beside(state, choice, out)

    def _text(self, state: _Choice, key: str, value: str, out: list[ir.StreamEvent]) -> None:
        if state.text[0] != key or state.text[1] not in self.open:
            out += self.end_all(state.number)
            at = f"/choices/{state.number}/delta/{key}"
            part: ir.Part = ir.Thinking(text="", field=key, at=at)
            if key in ("content", "refusal"):
                part = ir.Text(text="", at=at) if key == "content" else ir.Refusal(text="", at=at)
            state.text = (key, (state.number, self.counts.get(state.number, 0)))
            out += self.begin(state.text[1], part, state.number)
        out.append(self.more(state.text[1], value))

    def _listed(self, state: _Choice, parts: list[Any], out: list[ir.StreamEvent]) -> None:
        """Read a delta whose content is a list of blocks, as some gateways send it."""
        for value in parts:
            part = read_block(value, f"/choices/{state.number}/delta/content", self.flavour)
            if not isinstance(part, ir.Text | ir.Thinking):
                out.append(ir.Noted("content", [value], state.number, joins=True, at_message=True))
            elif part.text:
                self._text(state, "content" if isinstance(part, ir.Text) else "thinking", part.text, out)

    def _call(self, state: _Choice, value: dict[str, Any], spot: int, out: list[ir.StreamEvent]) -> None:
        place = value.get("index")
        if type(place) is not int:
            place = state.last_call if not value.get("id") and state.calls else len(state.calls)
        kind = "custom" if type(value.get("custom")) is dict else "function"
        found = value.get(kind)
        body: dict[str, Any] = found if type(found) is dict else {}
        call = state.calls.get(place)
        call_id = value.get("id")
        if call is not None and type(call_id) is str and call_id not in ("", call.part.id) and call.is_whole():
            call = None  # a new call with the index of a complete one: some gateways send index 0 for each
        if call is None:
            call = self._start_call(state, place, call_id, kind, out)
        state.last_call = place
        name = body.get("name")
        if type(name) is str and name != call.name and call.block is None:
            call.name += name
        text = body.get("arguments" if kind == "function" else "input")
        text = json_text(text) if type(text) is dict else text
        if type(text) is str and text:
            block = self._begin_call(state, call, out)
            block.texts.append(text)
            state.grown[block.index] = call
            out.append(ir.PartDelta(block.index, text, "arguments", state.number))

    def _start_call(self, state: _Choice, place: int, call_id: Any, kind: Any, out: list[ir.StreamEvent]) -> _Call:
        out += self.end(state.text[1])
        for index, other in sorted(state.grown.items()):
            # Pieces of several calls may be interleaved, so a call with incomplete arguments stays open.
            if other.is_whole():
                out += self.end((state.number, index))
        state.grown.clear()
        if state.newest is not None:
            self._begin_call(state, state.newest, out)
        made = not (type(call_id) is str and call_id)
        at = f"/choices/{state.number}/delta/tool_calls/{place}"
        part = ir.ToolUse(
            id=self.ids.make("") if made else call_id, id_made=made, name="", input={}, text="", kind=kind, at=at
        )  # fmt: skip
        call = state.newest = state.calls[place] = _Call(part)
        self.calls.add(state.number)
        return call

    def _begin_call(self, state: _Choice, call: _Call, out: list[ir.StreamEvent]) -> Incoming:
        if call.block is None:
            key = (state.number, self.counts.get(state.number, 0))
            out += self.begin(key, msgspec.structs.replace(call.part, name=call.name), state.number)
            call.block = self.open[key]
        return call.block

    def _member(self, state: _Choice, key: str, value: Any, out: list[ir.StreamEvent]) -> None:
        if key == "function_call" and type(value) is dict:
            self._call(state, {"index": -1, "function": value}, 0, out)
        elif key == "audio" and type(value) is dict:
            for name, piece in value.items():
                before = state.audio.get(name)
                joins = type(before) is str and type(piece) is str and name != "id"
                state.audio[name] = before + piece if joins else piece
        elif value not in ("", [], {}):
            out.append(ir.Noted(key, value, state.number, joins=True, at_message=True))

    def _beside(self, state: _Choice, choice: dict[str, Any], out: list[ir.StreamEvent]) -> None:
        at = f"/choices/{state.number}"
        out += self.count(choice.get("usage"), f"{at}/usage")
        for key, value in choice.items():
            if key not in ("index", "delta", "message", "finish_reason", "usage") and value is not None:
                out.append(ir.Noted(key, value, state.number, joins=key == "logprobs"))
        out += self.stop(choice.get("finish_reason"), f"{at}/finish_reason", choice=state.number)

    def end_all(self, choice: int | None = None) -> list[ir.StreamEvent]:
        """End the open blocks; add the audio as one whole block, because its members come in pieces."""
        out: list[ir.StreamEvent] = []
        states = [state for number, state in self.choices.items() if choice in (None, number)]
        for state in states:
            if state.newest is not None:
                self._begin_call(state, state.newest, out)
        out += super().end_all(choice)
        for state in states:
            if state.audio:
                audio, state.audio = state.audio, {}
                part = read_sound(audio, f"/choices/{state.number}/delta/audio", self.flavour)
                out += [*self.begin("audio", part, state.number), *self.end("audio")]
        return out


# Streams, written -----------------------------------------------------------------------------------------------------


class StreamWriter(BlockWriter):
    """Writes one stream as chunks of the family."""

    has_choices = True

    def __init__(self, dialect: Any, source: str, flavour: Flavour) -> None:
        super().__init__(dialect, source)
        self.flavour = flavour
        self.counts: dict[int, int] = {}
        self.roles: set[int] = set()

    def _chunk(self, choices: list[Json], **more: Any) -> Json:
        began = self.sum.began
        return {
            "id": began.id or "chatcmpl-translated", "object": "chat.completion.chunk",
            "created": int(began.created or 0), "model": began.model or "unknown", "choices": choices, **more,
        }  # fmt: skip

    def _delta(self, choice: int, delta: dict[str, Any], **more: Any) -> list[Json]:
        """Return a chunk with a delta; the first delta of a choice also has the role."""
        head = {} if choice in self.roles else {"role": "assistant"}
        self.roles.add(choice)
        return [self._chunk([{"index": choice, "delta": {**head, **delta}, "finish_reason": None, **more}])]

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        if isinstance(part, ir.Thinking):
            field = self.opened[key] = self.flavour.thinking_answer
            if self.flavour.thinking_request is None and self.once("thinking"):
                self.ledger.degrade(
                    part.at, "thinking", f"thinking stands in {field}, which is the word of other vendors"
                )
        elif isinstance(part, ir.Text | ir.Refusal):
            self.opened[key] = "content" if isinstance(part, ir.Text) else "refusal"
        elif isinstance(part, ir.ToolUse):
            place = self.opened[key] = self.counts.get(key[0], 0)
            self.counts[key[0]] = place + 1
            if part.kind == "custom":
                self.ledger.degrade(part.at, "tool", "free text is streamed as arguments")
            function = {"name": part.name, "arguments": ""}
            call = {"index": place, "id": part.id, "type": "function", "function": function}
            return self._delta(key[0], {"tool_calls": [call]})
        else:
            return None
        return []

    def piece(self, key: Key, text: str, part: ir.Part) -> list[Json]:
        name = self.opened[key]
        if type(name) is str:
            return self._delta(key[0], {name: text})
        return self._delta(key[0], {"tool_calls": [{"index": name, "function": {"arguments": text}}]})

    def whole(self, key: Key, part: ir.Part) -> list[Json] | None:
        if not isinstance(part, ir.Media) or part.kind != "audio" or part.file_id is None:
            return None
        return self._delta(key[0], {"audio": sound_of(part)})

    def stop(self, event: ir.Stopped) -> list[Json]:
        head = [] if event.choice in self.roles else self._delta(event.choice, {})
        return [*head, *self._delta(event.choice, {}, finish_reason=self.words[event.choice])]

    def end(self) -> list[Json]:
        usage = self.counted()
        return [*([] if usage is None else [self._chunk([], usage=usage)]), *self.fail_cut()]

    def noted(self, event: ir.Noted) -> list[Json] | None:
        if not is_shared(self.ledger.source, event.key, event.value):
            return None
        if event.choice is None:
            return [self._chunk([], **{event.key: event.value})]
        if event.at_message:
            return self._delta(event.choice, {event.key: event.value})
        return self._delta(event.choice, {}, **{event.key: event.value})


def dialect_of(
    flavour: Flavour, tool_names: Mapping[str, str], capabilities: Manifest, defaults: Mapping[str, Json],
    reader: type[StreamReader] = StreamReader,
) -> Dialect:  # fmt: skip
    """Make the `Dialect` of a flavour; `reader` reads its streams."""
    return Dialect(
        NAME=flavour.name, TOOL_NAMES=tool_names, CAPABILITIES=capabilities, DEFAULTS=defaults, DONE=True,
        read_request=partial(read_request, flavour=flavour), write_request=partial(write_request, flavour=flavour),
        read_answer=partial(read_answer, flavour=flavour), write_answer=partial(write_answer, flavour=flavour),
        read_stream=partial(reader, flavour=flavour), write_stream=partial(StreamWriter, flavour=flavour),
        usage=flavour.usage, endings=ENDINGS, error=ERROR, limits=LIMITS, normal=normal,
        aliases={"max_tokens": "max_completion_tokens"},
    )  # fmt: skip
