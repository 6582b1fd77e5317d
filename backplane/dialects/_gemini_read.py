"""Parts, contents, counters and stop reasons of Gemini's generateContent, read.

The vendor accepts two spellings of every member; a node remembers which of its members came in the second one.
"""

from __future__ import annotations

from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.dialects._parts import (
    ABSENT,
    SPELLED,
    Calls,
    Ledger,
    json_text,
    need_object,
    put_rest,
    shape,
    slot,
    snake,
    take,
    take_constant,
)
from backplane.dialects._reading import stop_of
from backplane.ir import (
    Media,
    Message,
    Node,
    Opaque,
    Part,
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
    return None if raw is None else stop_of(raw, STOPS, parts)


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
