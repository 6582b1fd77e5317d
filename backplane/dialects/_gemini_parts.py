"""Parts, contents, counters and stop reasons of Gemini's generateContent, read and written.

The vendor accepts two spellings of every member; a node remembers which of its members came in the second one.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._parts import (
    ABSENT,
    MADE_ID,
    SPELLED,
    Ledger,
    arguments_object,
    cache_write_path,
    escape,
    give_back,
    is_home_raw,
    json_text,
    lose_detail,
    lose_marks,
    lose_part,
    lose_signature,
    need_object,
    put_rest,
    shape,
    slot,
    snake,
    stop_word,
    take,
    take_constant,
)
from backplane.ir import (
    Candidate,
    Media,
    Message,
    Node,
    Opaque,
    Part,
    Refusal,
    Role,
    ServerTool,
    Stop,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
    Usage,
)

NAME: Final = "gemini"

STOPS: Final[dict[str, Stop]] = {
    "STOP": "end",
    "MAX_TOKENS": "max_tokens",
    "SAFETY": "content_filter",
    "RECITATION": "content_filter",
    "BLOCKLIST": "content_filter",
    "PROHIBITED_CONTENT": "content_filter",
    "SPII": "content_filter",
    "IMAGE_SAFETY": "content_filter",
    "MALFORMED_FUNCTION_CALL": "error",
    "UNEXPECTED_TOOL_CALL": "error",
    "FINISH_REASON_UNSPECIFIED": "other",
}
STOP_WORDS: Final[dict[str, str]] = {
    "end": "STOP",
    "tool_use": "STOP",
    "stop_sequence": "STOP",
    "max_tokens": "MAX_TOKENS",
    "content_filter": "SAFETY",
    "refusal": "SAFETY",
    "error": "OTHER",
}
EXACT: Final = frozenset({"end", "tool_use", "max_tokens", "content_filter"})

ROLES: Final[dict[str, Role]] = {"user": "user", "model": "assistant", "function": "tool", "system": "system"}


class Members:
    """An object to take members from in either spelling.

    Args:
        value: the object; it is copied.
        at: its pointer.
    """

    __slots__ = ("at", "rest", "spelled")

    def __init__(self, value: dict[str, Any], at: str) -> None:
        self.rest = value.copy()
        self.at = at
        self.spelled: list[str] = []

    def find(self, name: str) -> str | None:
        """Return the spelling that is there, None when there is none; camelCase wins."""
        if name in self.rest:
            return name
        other = SPELLINGS.get(name)
        return other if other is not None and other in self.rest else None

    def take(self, name: str, *kinds: type[Any]) -> Any:
        """Take a member of one of these types, else None."""
        key = self.find(name)
        if key is None or type(self.rest[key]) not in kinds:
            return None
        if key != name:
            self.spelled.append(name)
        return self.rest.pop(key)

    def pointer(self, name: str) -> str:
        """Return where a member is, asked before it is taken."""
        return f"{self.at}/{self.find(name) or name}"

    def keep(self, ext: dict[str, Any], prefix: str = "", memory: str = "") -> None:
        """Keep what was not taken, and the spellings.

        Args:
            prefix: path of the object below its node, as it was spelled.
            memory: the same in camelCase.
        """
        if self.rest:
            put_rest(ext, self.rest, prefix)
        if self.spelled:
            ext[SPELLED + memory] = {"at": self.at, "names": tuple(self.spelled)}


SPELLINGS: Final[dict[str, str]] = {
    name: snake(name)
    for name in (
        "systemInstruction", "generationConfig", "toolConfig", "safetySettings", "cachedContent", "inlineData",
        "fileData", "functionCall", "functionResponse", "executableCode", "codeExecutionResult", "thoughtSignature",
        "mimeType", "fileUri", "displayName", "functionDeclarations", "parametersJsonSchema", "maxOutputTokens",
        "topP", "topK", "stopSequences", "candidateCount", "presencePenalty", "frequencyPenalty", "responseLogprobs",
        "responseMimeType", "responseSchema", "responseJsonSchema", "thinkingConfig", "thinkingBudget",
        "thinkingLevel", "includeThoughts", "functionCallingConfig", "allowedFunctionNames", "usageMetadata",
        "promptTokenCount", "candidatesTokenCount", "totalTokenCount", "cachedContentTokenCount",
        "thoughtsTokenCount", "toolUsePromptTokenCount", "modelVersion", "responseId", "finishReason",
        "promptFeedback", "blockReason", "partialArgs", "willContinue", "jsonPath", "stringValue", "numberValue",
        "boolValue", "nullValue", "toolCall", "toolResponse",
    )
}  # fmt: skip
"""Every member that is read here → its second spelling."""


def respell(node: Node, out: dict[str, Any], ledger: Ledger, memory: str = "") -> dict[str, Any]:
    """Give members back the spelling in which they came."""
    if ledger.is_home and (spelled := shape(node, NAME, SPELLED + memory)) is not None:
        for name in spelled["names"]:
            if name in out:
                out[SPELLINGS[name]] = out.pop(name)
    return out


class Calls:
    """Ids for calls without one: made in order, found again by name."""

    def __init__(self) -> None:
        self.made = 0
        self.open: list[tuple[str, str]] = []

    def make(self, name: str) -> str:
        made = f"{MADE_ID}{self.made}"
        self.made += 1
        self.open.append((name, made))
        return made

    def answer(self, name: str) -> str:
        for place, (open_name, made) in enumerate(self.open):
            if open_name == name:
                del self.open[place]
                return made
        return f"{MADE_ID}unknown_{name}"


# Reading --------------------------------------------------------------------------------------------------------------


def read_content(content: Json, at: str, calls: Calls) -> Message:
    """Read one content; a user's content that holds only results is of the role `tool`."""
    if type(content) is str:
        return Message(role="user", parts=(Text(text=content, at=at),), flat=True, at=at, ext={NAME: {"#text": True}})
    rest = need_object(content, at)
    ext: dict[str, Any] = {}
    native_role = take(rest, "role", str)
    if native_role is None:
        ext[ABSENT] = ("role",)
    found = take(rest, "parts", list)
    if found is None:
        ext[ABSENT] = (*ext.get(ABSENT, ()), "parts")
    parts = tuple(read_part(part, f"{at}/parts/{place}", calls) for place, part in enumerate(found or ()))
    role = ROLES.get(native_role or "", "user")
    if role == "user" and parts and all(isinstance(part, ToolResult) for part in parts):
        role = "tool"
    if rest:
        put_rest(ext, rest)
    return Message(role=role, parts=parts, native_role=native_role, at=at, ext=slot(NAME, ext))


def read_part(part: Json, at: str, calls: Calls) -> Part:
    """Read one part of any kind."""
    if type(part) is str:
        return Text(text=part, at=at, ext={NAME: {"#bare": True}})
    if type(part) is not dict:
        return Opaque(dialect=NAME, label="part", payload=part, at=at)
    if len(part) == 1 and type(part.get("text")) is str:
        return Text(text=part["text"], at=at)
    members = Members(part, at)
    signature = members.take("thoughtSignature", str)
    for name, reader in PART_READERS.items():
        if members.find(name) is not None:
            made: Part | None = reader(members, signature, at, calls)
            if made is not None:
                return made
    label = next(iter(part), "empty part")
    if label in ("executableCode", "codeExecutionResult", "executable_code", "code_execution_result", "toolCall"):
        return ServerTool(dialect=NAME, name=label, payload=part, at=at)
    return Opaque(dialect=NAME, label=label, payload=part, at=at)


def _step(pointer: str) -> str:
    return pointer.rpartition("/")[2] + "/"


def _ext(members: Members) -> dict[str, dict[str, Any]]:
    ext: dict[str, Any] = {}
    members.keep(ext)
    return slot(NAME, ext)


def _read_text(members: Members, signature: str | None, at: str, calls: Calls) -> Part | None:
    text = members.take("text", str)
    if text is None:
        return None
    if members.rest.get("thought") is True:
        del members.rest["thought"]
        return Thinking(text=text, signature=signature, at=at, ext=_ext(members))
    return Text(text=text, signature=signature, at=at, ext=_ext(members))


def _take_id(body: Members) -> str | None:
    return body.take("id", str) if body.rest.get("id") else None


def _read_call(members: Members, signature: str | None, at: str, calls: Calls) -> Part | None:
    place = members.pointer("functionCall")
    found = members.take("functionCall", dict)
    if found is None:
        return None
    body = Members(found, place)
    ext: dict[str, Any] = {}
    name, args, call_id = body.take("name", str), body.take("args", dict), _take_id(body)
    absent = [f"functionCall/{key}" for key, value in (("name", name), ("args", args)) if value is None]
    if absent:
        ext[ABSENT] = tuple(absent)
    body.keep(ext, _step(place), "functionCall")
    members.keep(ext)
    return ToolUse(
        id=call_id or calls.make(name or ""),
        id_made=not call_id,
        name=name or "",
        input=args or {},
        signature=signature,
        at=at,
        ext=slot(NAME, ext),
    )


def _read_result(members: Members, signature: str | None, at: str, calls: Calls) -> Part | None:
    place = members.pointer("functionResponse")
    found = members.take("functionResponse", dict)
    if found is None:
        return None
    body = Members(found, place)
    ext: dict[str, Any] = {}
    name, value, call_id = body.take("name", str), body.take("response", dict), _take_id(body)
    if name is None:
        ext[ABSENT] = ("functionResponse/name",)
    content: tuple[Part, ...] = ()
    is_error: bool | None = None
    at_value = f"{place}/response"
    if value is None:
        ext[ABSENT] = (*ext.get(ABSENT, ()), "functionResponse/response")
    elif len(value) == 1 and type(text := value.get("output", value.get("error"))) is str:
        content = (Text(text=text, at=at_value),)
        is_error = True if "error" in value else None
        value = None
    else:
        content = (Text(text=json_text(value), at=at_value),)
    body.keep(ext, _step(place), "functionResponse")
    members.keep(ext)
    return ToolResult(
        id=call_id or calls.answer(name or ""), id_made=not call_id, name=name, content=content, is_error=is_error,
        value=value, signature=signature, at=at, ext=slot(NAME, ext),
    )  # fmt: skip


def _read_media(member: str, key: str) -> Any:
    def read(members: Members, signature: str | None, at: str, calls: Calls) -> Part | None:
        place = members.pointer(member)
        found = members.take(member, dict)
        if found is None:
            return None
        body = Members(found, place)
        media_type, value = body.take("mimeType", str), body.take(key, str)
        name = body.take("displayName", str)
        if value is None:
            return None
        ext: dict[str, Any] = {}
        body.keep(ext, _step(place), member)
        members.keep(ext)
        return Media(
            kind=media_kind(media_type),
            media_type=media_type,
            data=value if key == "data" else None,
            url=value if key == "fileUri" else None,
            name=name,
            signature=signature,
            at=at,
            ext=slot(NAME, ext),
        )

    return read


def media_kind(media_type: str | None) -> Any:
    """Return what kind of media a type is."""
    head = (media_type or "").partition("/")[0]
    return head if head in ("image", "audio", "video") else "document"


PART_READERS: Final[dict[str, Any]] = {
    "functionCall": _read_call,
    "functionResponse": _read_result,
    "inlineData": _read_media("inlineData", "data"),
    "fileData": _read_media("fileData", "fileUri"),
    "text": _read_text,
}


def read_stop(raw: str | None, parts: tuple[Part, ...]) -> Stop | None:
    """Translate a reason to stop; this vendor says `STOP` after a call, too."""
    if raw is None:
        return None
    stop = STOPS.get(raw, "other")
    return "tool_use" if stop == "end" and any(isinstance(part, ToolUse) for part in parts) else stop


def read_usage(usage: dict[str, Any], at: str) -> Usage:
    """Read token counters; thoughts and what tools put into the prompt are counted apart here."""
    body = Members(usage, at)
    ext: dict[str, Any] = {}
    sent, made = body.take("promptTokenCount", int), body.take("candidatesTokenCount", int)
    thought, cached = body.take("thoughtsTokenCount", int), body.take("cachedContentTokenCount", int)
    key = body.find("toolUsePromptTokenCount")
    tools = body.rest[key] if key is not None and type(body.rest[key]) is int else 0
    total = (sent or 0) + (made or 0) + (thought or 0) + tools
    absent: list[str] = []
    if (total_key := body.find("totalTokenCount")) is not None and body.rest[total_key] == total:
        body.take("totalTokenCount", int)
    elif total_key is None:
        take_constant(body.rest, "totalTokenCount", total, absent)
    if made is None:
        absent.append("candidatesTokenCount")
    if sent is None and tools:
        absent.append("promptTokenCount")
    if absent:
        ext[ABSENT] = tuple(absent)
    body.keep(ext)
    return Usage(
        input=None if sent is None and not tools else (sent or 0) + tools,
        output=None if made is None and thought is None else (made or 0) + (thought or 0),
        cache_read=cached,
        reasoning=thought,
        at=at,
        ext=slot(NAME, ext),
    )


# Writing --------------------------------------------------------------------------------------------------------------


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
    if message.name is not None:
        ledger.drop(f"{message.at}/name", "role", "a message has no name here", message.name)
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


def kept(rest: dict[str, Any]) -> dict[str, Any]:
    """Return what remains as entries of `ext`."""
    return {escape(key): value for key, value in rest.items()}
