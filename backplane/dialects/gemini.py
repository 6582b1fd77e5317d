"""Google's generateContent, as its reference describes it (ai.google.dev, read November 2026).

Contents hold parts; the system text and most options stand outside. Every member has two spellings. Calls have no id
as a rule. Every chunk of a stream is a small response; arguments of calls may come in pieces that say where in the
object they belong.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.dialects import ir
from backplane.dialects.codec import (
    Block,
    Blocks,
    Counters,
    Form,
    Hole,
    Members,
    OptionDraft,
    RequestOption,
    Tools,
    snake,
)
from backplane.dialects.common import EFFORT_BUDGETS, MADE_ID, NUMBER, Calls, LossLedger, json_text
from backplane.dialects.limits import CUT_CALL, ServerLimits, Spelling, calls_in
from backplane.dialects.outcome import Endings
from backplane.dialects.streams import BlockReader, BlockWriter, Key, begun, failure
from backplane.dialects.vendor import TableDialect, outside
from backplane.errors import TranslationError

NAME: Final = "gemini"

TOOL_NAMES: Final[dict[str, str]] = {
    "read_file": "read_file", "read_many_files": "read_file", "write_file": "write_file", "replace": "edit_file",
    "list_directory": "list_files", "glob": "glob", "search_file_content": "grep", "grep_search": "grep",
    "run_shell_command": "bash", "google_web_search": "web_search", "web_fetch": "web_fetch",
}  # fmt: skip
"""The names that the vendor's agent gives its tools → neutral names."""

CAPABILITIES: Final = Manifest({
    "streaming": NATIVE,
    "tool_read": NATIVE, "tool_write": EMULATED, "tool_edit": EMULATED, "tool_bash": EMULATED,
    "tool_glob": UNSUPPORTED, "tool_grep": UNSUPPORTED,
    "structured_output_json_schema": NATIVE,
    "mcp_client": UNSUPPORTED, "mcp_server": UNSUPPORTED,
})  # fmt: skip

DEFAULTS: Final[dict[str, Json]] = {"model": "gemini-3.8-flash", "max_tokens": 4096}

ROLES: Final[dict[str, ir.Role]] = {"user": "user", "model": "assistant", "function": "tool", "system": "system"}

STOPS: Final[dict[str, ir.Stop]] = {
    "STOP": "end", "MAX_TOKENS": "max_tokens", "SAFETY": "content_filter", "RECITATION": "content_filter",
    "BLOCKLIST": "content_filter", "PROHIBITED_CONTENT": "content_filter", "SPII": "content_filter",
    "IMAGE_SAFETY": "content_filter", "IMAGE_PROHIBITED_CONTENT": "content_filter", "LANGUAGE": "content_filter",
    "MALFORMED_FUNCTION_CALL": "error", "UNEXPECTED_TOOL_CALL": "error", "TOO_MANY_TOOL_CALLS": "error",
    "MALFORMED_RESPONSE": "error", "MISSING_THOUGHT_SIGNATURE": "error", "FINISH_REASON_UNSPECIFIED": "other",
}  # fmt: skip

STOP_WORDS: Final[dict[ir.Stop | None, str]] = {
    "end": "STOP", "tool_use": "STOP", "stop_sequence": "STOP", "max_tokens": "MAX_TOKENS",
    "content_filter": "SAFETY", "refusal": "SAFETY",
    # Never `STOP`: the answer may not be whole.
    None: "OTHER", "error": "OTHER", "pause": "OTHER", "cancelled": "OTHER", "other": "OTHER",
}  # fmt: skip

ENDINGS: Final = Endings(STOPS, STOP_WORDS)
MODES: Final = {"AUTO": "auto", "ANY": "required", "NONE": "none"}
LEVELS: Final = {"MINIMAL": "minimal", "LOW": "low", "MEDIUM": "medium", "HIGH": "high"}

LIMITS: Final = ServerLimits(
    tool_name=Spelling("[a-zA-Z0-9_.:-]", 64, "[a-zA-Z_]"), takes_empty_text=False, takes_objects=True, needs_user=True
)
"""ai.google.dev, function declarations and contents, read 2026-11."""

MEDIA_TYPES: Final = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}
"""Kind of media → the type written where the source says none."""


# Parts ----------------------------------------------------------------------------------------------------------------


def _write_thought(part: ir.Thinking, out: dict[str, Any], ledger: LossLedger) -> bool:
    out["thought"] = True
    return part.text != "" or ledger.is_home


def _read_call(members: Members, fields: dict[str, Any]) -> bool:
    fields |= {"name": fields.get("name", ""), "input": fields.get("input", {})}
    return members.inner("functionCall") is not None


def _write_call(part: ir.ToolUse, out: dict[str, Any], ledger: LossLedger) -> bool:
    if not _own_id(part):
        out["functionCall"].pop("id", None)
    return True


def _own_id(part: ir.ToolUse | ir.ToolOutput) -> dict[str, str]:
    return {} if part.id_made or part.id.startswith(MADE_ID) else {"id": part.id}


def _read_result(members: Members, fields: dict[str, Any]) -> bool:
    body = members.inner("functionResponse")
    if body is None:
        return False
    value = body.take("response", dict)
    content: tuple[ir.Part, ...] = ()
    if value is not None:
        at = f"{body.at}/response"
        if len(value) == 1 and type(text := value.get("output", value.get("error"))) is str:
            content = (ir.Text(text=text, at=at),)
            fields["is_error"] = True if "error" in value else None
        else:
            content, fields["value"] = (ir.Text(text=json_text(value), at=at),), value
    pictures = body.look("parts")
    found = tuple(PARTS.read(one, f"{body.at}/parts/{place}")
                  for place, one in enumerate(pictures if type(pictures) is list else ()))  # fmt: skip
    if found and all(isinstance(part, ir.Media) for part in found):
        body.forget("parts")
        content += found
    fields["content"] = content
    return True


def _write_result(part: ir.ToolOutput, out: dict[str, Any], ledger: LossLedger) -> bool:
    body: dict[str, Any] = {**_own_id(part), "name": "unknown" if part.name is None else part.name}
    texts = [inner.text for inner in part.content if isinstance(inner, ir.Text)]
    is_value = type(part.value) is dict and texts == [json_text(part.value)]
    media: list[Json] = []
    for inner in part.content:
        if isinstance(inner, ir.Text):
            ledger.put_ext(inner, {})
        elif isinstance(inner, ir.Media) and (made := PARTS.write(inner, ledger)) is not None:
            (texts if "text" in made else media).append(made.get("text", made))
        elif not isinstance(inner, ir.Media):
            ledger.lose_part(inner)
    if media:
        body["parts"] = media
    if is_value:
        body["response"] = part.value
    elif part.content or not ledger.is_home:
        body["response"] = {"error" if part.is_error else "output": "\n".join(texts)}
    out["functionResponse"] = body
    return True


def _read_media(members: Members, fields: dict[str, Any]) -> bool:
    head = (fields.get("media_type") or "").partition("/")[0]
    fields["kind"] = head if head in ("image", "audio", "video") else "document"
    return True


def _write_media(part: ir.Media, out: dict[str, Any], ledger: LossLedger) -> bool:
    (body,) = out.values()
    if not ledger.is_home:
        body.pop("displayName", None)
        if part.media_type is None:
            body["mimeType"] = MEDIA_TYPES.get(part.kind, "application/pdf")
            ledger.synthesise(part.at, "media", f"media have a type here: {body['mimeType']}")
    return True


PARTS: Final = Blocks(NAME, (
    Block("functionCall", ir.ToolUse, {"functionCall/name": "name", "functionCall/args": "input",
                                       "functionCall/id": "id"},
          types={"input": (dict,)}, read=_read_call, write=_write_call),
    Block("functionResponse", ir.ToolOutput, {"functionResponse/name": "name", "functionResponse/id": "id"},
          read=_read_result, write=_write_result),
    *(Block(member, ir.Media, {f"{member}/{path}!": field, f"{member}/mimeType": "media_type",
                               f"{member}/displayName": "name"}, read=_read_media, write=_write_media)
      for member, path, field in (("inlineData", "data", "data"), ("fileData", "fileUri", "url"))),
    Block("thought", ir.Thinking, {"text!": "text"}, write=_write_thought,
          read=lambda members, fields: members.take("thought", bool) is True),
    Block("text", ir.Text, {"text!": "text"}),
), tag="", signature="thoughtSignature", is_server_tool=lambda kind: kind in (
    "executableCode", "codeExecutionResult", "executable_code", "code_execution_result", "toolCall"))  # fmt: skip


# Contents -------------------------------------------------------------------------------------------------------------


def read_part(value: Json, at: str, calls: Calls) -> ir.Part:
    """Read one part; a bare text is one, too."""
    return ir.Text(text=value, at=at) if type(value) is str else PARTS.read(value, at, calls)


def read_message(value: Json, at: str, calls: Calls, role: ir.Role | None = None) -> ir.Message:
    """Read one content; without a role it says its own, which is `tool` where a user's holds only results."""
    if type(value) is str:
        return ir.Message(role=role or "user", parts=(ir.Text(text=value, at=at),), flat=True, at=at)
    members = Members(value, at)
    native_role = members.take("role")
    found = members.take("parts", list) or ()
    parts = tuple(read_part(part, f"{at}/parts/{place}", calls) for place, part in enumerate(found))
    if role is None:
        role = ROLES.get(native_role or "", "user")
        if role == "user" and parts and all(isinstance(part, ir.ToolOutput) for part in parts):
            role = "tool"
    return ir.Message(role=role, parts=parts, native_role=native_role, at=at, ext=members.ext(NAME))


def write_message(message: ir.Message, ledger: LossLedger, role: ir.Role | None = None) -> Json:
    """Write one content.

    Args:
        role: the role that the content was given when it was read.
    """
    native, mine = message.native_role, message.role
    fits = ROLES.get(native or "", mine) == mine or mine == "system" or (native, mine) == ("user", "tool")
    out: dict[str, Any] = {"role": "model" if mine == "assistant" else "user"}
    if ledger.is_home and native is not None and fits:
        out["role"] = native
    out["parts"] = PARTS.write_all(message.parts, ledger)
    ledger.put_ext(message, out)
    return out


def read_messages(members: Members, calls: Calls) -> list[ir.Message]:
    """Take the system text and the contents of a request."""
    messages: list[ir.Message] = []
    at = members.place("systemInstruction")
    if (system := members.take("systemInstruction", dict, str)) is not None:
        messages.append(read_message(system, at, calls, "system"))
    if (text := members.take("contents")) is not None:
        part = ir.Text(text=text, at="/contents")
        return [*messages, ir.Message(role="user", parts=(part,), flat=True, at="/contents")]
    found = members.need("contents")
    return [*messages, *(read_message(content, f"/contents/{place}", calls) for place, content in enumerate(found))]


def write_messages(conversation: ir.Conversation, out: dict[str, Any], ledger: LossLedger) -> None:
    """Write the contents and, outside of them, the system text."""
    messages = _with_names(conversation.messages, ledger)
    system, others = outside(messages, ledger, lambda message: message.at.startswith("/contents/"))
    if system is not None and ledger.is_home:
        out["systemInstruction"] = write_message(system, ledger, "system")
    elif system is not None:
        out["systemInstruction"] = {"parts": PARTS.write_all(system.parts, ledger)}
    out["contents"] = []
    for message in others:
        written = write_message(message, ledger)
        if type(written) is dict and not written.get("parts") and not ledger.is_home:
            ledger.drop(message.at, "part", "a content without parts is refused here")
        else:
            out["contents"].append(written)


def _with_names(messages: tuple[ir.Message, ...], ledger: LossLedger) -> tuple[ir.Message, ...]:
    """Name the tool of each result, which is known elsewhere by the id of the call."""
    names = {call.id: call.name for call in calls_in(messages)}

    def named(part: ir.Part) -> ir.Part:
        if not isinstance(part, ir.ToolOutput) or part.name is not None or (ledger.is_home and part.at):
            return part
        return msgspec.structs.replace(part, name=names.get(part.id))

    return tuple(
        msgspec.structs.replace(message, parts=tuple(map(named, message.parts)))
        if any(isinstance(part, ir.ToolOutput) for part in message.parts) else message for message in messages
    )  # fmt: skip


# Requests -------------------------------------------------------------------------------------------------------------


def _read_format(members: Members) -> tuple[Any, str] | None:
    """Take the form of the answer: a media type, and a schema under either of its two names."""
    mime = members.look("generationConfig/responseMimeType")
    body = members.inner("generationConfig")
    if body is None or mime not in ("application/json", "text/plain"):
        return None
    form: dict[str, Any] = {"type": "text" if mime == "text/plain" else "json"}
    at = body.place("responseMimeType")
    for name, read in (("responseJsonSchema", dict), ("responseSchema", lower_types)):
        if form["type"] == "json" and type(body.look(name)) is dict:
            at = body.place(name)
            form = {"type": "schema", "schema": read(body.take(name, dict))}
    body.forget("responseMimeType")
    return form, at


def _write_format(value: Any, draft: OptionDraft) -> None:
    mime = "text/plain" if value["type"] == "text" else "application/json"
    draft.put("generationConfig/responseMimeType", mime)
    if value["type"] == "schema" and "schema" in value:
        draft.put("generationConfig/responseJsonSchema", value["schema"])


def _write_effort(value: Any, draft: OptionDraft) -> None:
    words = {word: level for level, word in LEVELS.items()}
    if draft.is_home and value in words:
        draft.put("generationConfig/thinkingConfig/thinkingLevel", words[value])
    elif "reasoning_budget" in draft.conversation.options:
        draft.drop("the budget says how long to think", value, "option")
    elif value in EFFORT_BUDGETS:
        draft.degrade(f"the word became {EFFORT_BUDGETS[value]} tokens for thinking", value)
        draft.put("generationConfig/thinkingConfig/thinkingBudget", EFFORT_BUDGETS[value])
    else:
        draft.drop("no such effort here", value)


def _write_parallel(value: Any, draft: OptionDraft) -> None:
    if not value:
        draft.drop("several calls in one turn cannot be forbidden here", value, "option")


TOOL_HOLE: Final = Hole("name")
OPTIONS: Final = (
    RequestOption("generationConfig/maxOutputTokens", "max_tokens", (int,), least=1),
    RequestOption("generationConfig/temperature", "temperature", NUMBER, least=0, most=2),
    RequestOption("generationConfig/topP", "top_p", NUMBER),
    RequestOption("generationConfig/topK", "top_k", NUMBER, least=1),
    RequestOption("generationConfig/stopSequences", "stop", (list,), most=5),
    RequestOption("generationConfig/seed", "seed", (int,)),
    RequestOption("generationConfig/frequencyPenalty", "frequency_penalty", NUMBER),
    RequestOption("generationConfig/presencePenalty", "presence_penalty", NUMBER),
    RequestOption("generationConfig/candidateCount", "n", (int,), least=1, most=8),
    RequestOption("generationConfig/responseLogprobs", "logprobs", (bool,)),
    RequestOption("generationConfig/logprobs", "top_logprobs", (int,), least=0, most=20),
    RequestOption("generationConfig/thinkingConfig/thinkingBudget", "reasoning_budget", (int,)),
    RequestOption("generationConfig/thinkingConfig/includeThoughts", "reasoning_shown", (bool,)),
    RequestOption(
        "generationConfig/thinkingConfig/thinkingLevel", "reasoning_effort", words=LEVELS, write=_write_effort
    ),
    RequestOption("", "response_format", read=_read_format, write=_write_format),
    RequestOption("toolConfig/functionCallingConfig", "tool_choice", forms=(
        Form({"mode": "ANY", "allowedFunctionNames": [TOOL_HOLE]}, {"mode": "tool", "name": TOOL_HOLE}),
        *(Form({"mode": mode}, {"mode": word}) for mode, word in MODES.items()))),
    RequestOption("", "stream", write=lambda value, draft: draft.degrade(
        "whether to stream is said by the URL here", value, "transport")),
    RequestOption("", "parallel_tool_calls", write=_write_parallel),
)  # fmt: skip


def _read_schema(members: Members, fields: dict[str, Any]) -> bool:
    """Read a schema under the other of its two names, in the other of two dialects."""
    if "schema" not in fields and (own := members.take("parameters", dict)) is not None:
        fields["schema"] = lower_types(own)
    return True


def lower_types(schema: Json) -> Json:
    """Write the vendor's own schema dialect as JSON Schema: types in lower case."""
    if isinstance(schema, list):
        return [lower_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, str):
            out[key] = value.lower()
        else:
            out[key] = value if key in ("enum", "required", "example", "default") else lower_types(value)
    return out


TOOLS: Final = Tools(
    PARTS, {"name": "name", "description": "description", "schema": "parametersJsonSchema"},
    listed="functionDeclarations", read_more=_read_schema,
)  # fmt: skip


# Proofs ---------------------------------------------------------------------------------------------------------------

PROOF: Final = "skip_thought_signature_validator"
"""The vendor's stand-in for the signature of a call that another model made (ai.google.dev/gemini-api/docs/
thought-signatures, read 2026-11). Gemini 3 answers 400 where a call has neither."""

WANTS_PROOF: Final = re.compile(r"gemini-([3-9]|\d\d|(pro|flash|flash-lite)-latest)")
"""Models that refuse a call without its signature; those named `latest` are of generation 3 or later."""


def prove_calls(request: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Give the first call of each content the stand-in for a signature, if no call of that content has one.

    Returns:
        The request, and JSON pointers to what was added; the same object if its model wants no signatures.
    """
    contents = request.get("contents")
    if not WANTS_PROOF.search(str(request.get("model"))) or not isinstance(contents, list):
        return request, ()
    places = [(number, place) for number, content in enumerate(contents) if (place := _unproved(content)) is not None]
    out = list(contents)
    for number, place in places:
        parts = list(out[number]["parts"])
        parts[place] = {**parts[place], "thoughtSignature": PROOF}
        out[number] = {**out[number], "parts": parts}
    paths = tuple(f"/contents/{number}/parts/{place}/thoughtSignature" for number, place in places)
    return ({**request, "contents": out} if places else request), paths


def _unproved(content: Json) -> int | None:
    """Return the place of the first call of a content whose calls have no signature."""
    parts = content.get("parts") if isinstance(content, dict) else None
    found = [
        (place, part) for place, part in enumerate(parts if isinstance(parts, list) else ())
        if isinstance(part, dict) and {"functionCall", "function_call"} & part.keys()
    ]  # fmt: skip
    proved = any({"thoughtSignature", "thought_signature"} & part.keys() for _, part in found)
    return None if proved or not found else found[0][0]


def _with_proofs(out: dict[str, Any], conversation: ir.Conversation, ledger: LossLedger) -> None:
    proved, places = prove_calls(out) if ledger.source else (out, ())
    for place in places:
        ledger.synthesise(place, "signature", NO_PROOF)
    out.update(proved)


NO_PROOF: Final = "a call of another model has no signature; the vendor's stand-in for one is sent"


# Spelling -------------------------------------------------------------------------------------------------------------


def respelled(value: Json, like: Json) -> Json:
    """Return a document with its members spelled as those of another one, whose members may be in snake_case."""
    names = _snake_names(like)
    return _spelled(value, names) if names else value


def _snake_names(value: Json) -> set[str]:
    if isinstance(value, list):
        return {name for inner in value for name in _snake_names(inner)}
    if not isinstance(value, dict):
        return set()
    return {name for name in value if "_" in name} | {name for inner in value.values() for name in _snake_names(inner)}


def _spelled(value: Json, names: set[str]) -> Json:
    if isinstance(value, list):
        return [_spelled(inner, names) for inner in value]
    if not isinstance(value, dict):
        return value
    return {word if (word := snake(name)) in names else name: _spelled(inner, names) for name, inner in value.items()}


# Answers --------------------------------------------------------------------------------------------------------------


def read_candidates(members: Members, calls: Calls) -> tuple[ir.Candidate, ...]:
    """Take what an answer says and why it ended; a prompt that was refused has no candidate, only a reason."""
    found = members.take("candidates", list)
    feedback = members.find("promptFeedback")
    if found is None and feedback not in members.rest and members.find("usageMetadata") not in members.rest:
        raise TranslationError("dialect_mapping_failed", "no candidates", hint="check --from and --kind")
    if not found and feedback in members.rest:
        blocked = ir.Message(role="assistant", parts=())
        return (ir.Candidate(message=blocked, stop="content_filter", stop_at=f"/{feedback}"),)
    return tuple(_read_candidate(one, place, calls) for place, one in enumerate(found or ()))


def _read_candidate(candidate: Json, place: int, calls: Calls) -> ir.Candidate:
    at = f"/candidates/{place}"
    members = Members(candidate, at, spell=True)
    members.skip("index", place)
    content = members.take("content", dict)
    message = ir.Message(role="assistant", parts=())
    if content is not None:
        message = read_message(content, f"{at}/content", calls, "assistant")
    stop_at = members.place("finishReason")
    raw = members.take("finishReason")
    return ir.Candidate(
        message=message, stop=ENDINGS.read(raw, message.parts), stop_raw=raw, stop_at=stop_at, at=at,
        ext=members.ext(NAME),
    )  # fmt: skip


def write_candidates(answer: ir.Answer, out: dict[str, Any], ledger: LossLedger) -> None:
    """Write what an answer says and why it ended."""
    feedback = {"promptFeedback", "prompt_feedback"} & answer.ext.get(NAME, {}).keys()
    is_blocked = ledger.is_home and feedback and not answer.candidates[0].message.parts
    out["candidates"] = []
    for place, candidate in enumerate(answer.candidates[1:] if is_blocked else answer.candidates):
        one: dict[str, Any] = {"content": write_message(candidate.message, ledger, "assistant"), "index": place}
        if (word := ENDINGS.write(candidate, ledger)) is not None:
            one["finishReason"] = word
        ledger.put_ext(candidate, one)
        out["candidates"].append(one)


USAGE: Final = Counters({
    "promptTokenCount": "input", "candidatesTokenCount": "output", "thoughtsTokenCount": "reasoning",
    "cachedContentTokenCount": "cache_read",
}, total="totalTokenCount", apart={"output": ("reasoning",)}, beside_input="toolUsePromptTokenCount",
    spell=True)  # fmt: skip
PLACES: Final = {
    "id": "responseId", "model": "modelVersion", "usage": "usageMetadata", "signature": "thoughtSignature",
    "candidates": "candidates",
}  # fmt: skip


# Streams, read --------------------------------------------------------------------------------------------------------

# Every chunk is a small answer, but the tables that read a whole one would cost as much as all the rest of a chunk.
HEAD: Final = frozenset(
    {"candidates", "usageMetadata", "usage_metadata", "modelVersion", "model_version", "responseId", "response_id"}
)
BESIDE: Final = frozenset({"content", "finishReason", "finish_reason", "index"})
PIECES: Final = frozenset({"partialArgs", "partial_args", "willContinue", "will_continue"})
"""Members of a call whose arguments come in pieces."""

REPEAT_CHARS_MIN: Final = 6
"""A gateway that repeats the whole text so far is seen from a model that says a word twice by at least so much. Below
it a chunk that begins with all before it waits for the next one, which decides."""

WAITING_MAX: Final = 8
"""Most chunks that wait; a text below `REPEAT_CHARS_MIN` that grows with each chunk makes five."""

SENT_BEFORE: Final = "text that was sent before"

SAID_CHARS_MAX: Final = 256
"""Of a text so far this much is compared; no model begins one chunk with so much of the answer's own beginning."""

_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[['\"](.*?)['\"]\]")


def _said(holder: dict[str, Any], name: str) -> Json:
    """Return a member under either of its spellings."""
    return holder.get(name, holder.get(snake(name)))


class _Seen:
    """The text of one kind so far, and whether its chunks are pieces or the whole text so far."""

    def __init__(self) -> None:
        self.begin = ""
        self.length = 0
        self.is_pieces = False
        self.waiting: list[str] = []
        """Chunks that each begin with all before them, not yet passed on."""

    def add(self, text: str) -> str:
        # Long answers come in thousands of pieces: only their beginning is kept, which tells as much.
        self.begin = self.begin + text if self.length < SAID_CHARS_MAX else self.begin
        self.is_pieces = self.is_pieces or self.length > 0
        self.length += len(text)
        return text

    def replace(self, text: str) -> str:
        added, self.begin, self.length, self.waiting = text[self.length :], text, len(text), []
        return added

    def repeats(self, text: str) -> bool:
        """Whether a chunk surely repeats what was said, a waiting one included."""
        said, length = (self.waiting[-1], len(self.waiting[-1])) if self.waiting else (self.begin, self.length)
        return length >= REPEAT_CHARS_MIN and len(text) >= length and text.startswith(said) and not said.isspace()

    def may_repeat(self, text: str) -> bool:
        said = self.waiting[-1] if self.waiting else self.begin
        return (0 < len(said) < REPEAT_CHARS_MIN and not self.is_pieces and len(self.waiting) < WAITING_MAX
                and text.startswith(said))  # fmt: skip

    def pass_on(self) -> str:
        """Return the waiting chunks as the pieces that they then were."""
        text, self.waiting = "".join(self.waiting), []
        return self.add(text) if text else ""


class _Candidate:
    """One candidate while it comes in; at most one of its blocks is open, under the candidate's number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seen: dict[type[ir.Part], _Seen] = {}
        self.call: ir.ToolUse | None = None
        """A call whose arguments come in pieces."""
        self.args: dict[str, Any] = {}
        self.ids: set[str] = set()
        self.said_calls: set[tuple[str, str, int]] = set()
        """Calls without an id: name, arguments and chunk."""


class StreamReader(BlockReader):
    """Reads the chunks of one stream."""

    def __init__(self, dialect: Any) -> None:
        super().__init__(dialect)
        self.candidates: dict[int, _Candidate] = {}
        self.ids = Calls()
        self.notes: dict[tuple[int | None, str], Any] = {}
        self.usage: Json = None
        self.chunk = 0

    def read(self, chunk: Json) -> list[ir.StreamEvent]:
        """Read one chunk; anything that is no chunk is kept."""
        if type(chunk) is not dict:
            return [ir.Kept(chunk)]
        self.chunk += 1
        if "error" in chunk and "candidates" not in chunk:
            return [failure(chunk["error"], chunk, "status")]
        out: list[ir.StreamEvent] = []
        if not self.began:
            self.began = True
            out.append(begun(_said(chunk, "responseId"), _said(chunk, "modelVersion")))
        found = chunk.get("candidates")
        for place, candidate in enumerate(found if type(found) is list else ()):
            if type(candidate) is dict:
                self._candidate(candidate, place, out)
        usage = _said(chunk, "usageMetadata")
        if usage is not None and usage != self.usage:
            self.usage = usage
            out += self.count(usage, "/usageMetadata")
        self._note(chunk, HEAD, None, out)
        if not found and _said(chunk, "promptFeedback") is not None:
            out.append(ir.Stopped(stop="content_filter", at="/promptFeedback"))
        return out

    def end_all(self, choice: int | None = None) -> list[ir.StreamEvent]:
        """Close what is open; a call whose closing piece is missing ends here."""
        states = [state for number, state in self.candidates.items() if choice in (None, number)]
        return [event for state in states for event in self._close(state)]

    def _kind(self, state: _Candidate) -> type[ir.Part] | None:
        """Return the kind of the open block."""
        block = self.open.get(state.number)
        return None if block is None else type(block.part)

    def _note(
        self, holder: dict[str, Any], known: frozenset[str], choice: int | None, out: list[ir.StreamEvent]
    ) -> None:
        for key in sorted(holder.keys() - known):
            if self.notes.get((choice, key)) != holder[key]:
                self.notes[choice, key] = holder[key]
                out.append(ir.Noted(key, holder[key], choice))

    def _candidate(self, candidate: dict[str, Any], place: int, out: list[ir.StreamEvent]) -> None:
        number = candidate.get("index")
        number = number if type(number) is int else place
        state = self.candidates.get(number)
        if state is None:
            state = self.candidates[number] = _Candidate(number)
        content = candidate.get("content")
        parts = content.get("parts") if type(content) is dict else None
        for spot, part in enumerate(parts if type(parts) is list else ()):
            out += self._part(state, part, f"/candidates/{number}/content/parts/{spot}")
        self._note(candidate, BESIDE, number, out)
        out += self.stop(_said(candidate, "finishReason"), f"/candidates/{number}/finishReason", choice=number)

    def _part(self, state: _Candidate, part: Json, at: str) -> list[ir.StreamEvent]:
        call = _said(part, "functionCall") if type(part) is dict else None
        if type(call) is dict and (not PIECES.isdisjoint(call) or (state.call is not None and "name" not in call)):
            return self._piece(state, part, Members(call, f"{at}/functionCall", spell=True), at)
        read = read_part(part, at, self.ids)
        if isinstance(read, ir.Text | ir.Thinking):
            return self._text(state, read)
        out = self._close(state)
        if isinstance(read, ir.ToolUse):
            if self.mends and self._was_said(state, read):
                self.worked_around(read.at, "a call that was sent before")
                return out
            state.ids.add(read.id)
        return [*out, *self.begin(state.number, read, state.number), *self.end(state.number, read)]

    def _was_said(self, state: _Candidate, call: ir.ToolUse) -> bool:
        """Whether an earlier chunk had the same call; one chunk may hold the same call twice and mean it."""
        if not call.id_made and call.id in state.ids:
            return True
        arguments = json_text(call.input)
        said = any(name == call.name and text == arguments and chunk != self.chunk
                   for name, text, chunk in state.said_calls)  # fmt: skip
        if call.id_made and not said:
            state.said_calls.add((call.name, arguments, self.chunk))
        return call.id_made and said

    def _text(self, state: _Candidate, read: ir.Text | ir.Thinking) -> list[ir.StreamEvent]:
        out = self._close(state) if state.call is not None else []
        key, kind = state.number, type(read)
        text = self._new_text(state, kind, read.text, read.at)
        if not text and read.signature is None and (key in self.open or not read.ext):
            return out
        if self._kind(state) is not kind:
            out += self._close(state)
            out += self.begin(key, msgspec.structs.replace(read, text="", signature=None), state.number)
        if text:
            out.append(self.more(key, text))
        if read.signature is not None:
            # The signature proves the block up to here; what follows is another one.
            out += [*self._rest(state), self.more(key, read.signature, "signature"), *self._close(state)]
        return out

    def _new_text(self, state: _Candidate, kind: type[ir.Part], text: str, at: str) -> str:
        """Return what a text adds: some gateways send the whole text so far in every chunk."""
        if not self.mends or not text:
            return text
        seen = state.seen.setdefault(kind, _Seen())
        if seen.repeats(text):
            self.worked_around(at, SENT_BEFORE)
            return seen.replace(text)
        if self._kind(state) is kind and seen.may_repeat(text):
            seen.waiting.append(text)
            return ""
        return seen.pass_on() + seen.add(text)

    def _rest(self, state: _Candidate) -> list[ir.StreamEvent]:
        """Pass on what waited until its block ended: a word that begins anew is rarer than a text so far."""
        seen = state.seen.get(self._kind(state))  # type: ignore[arg-type]
        if seen is None or not seen.waiting:
            return []
        if any(map(str.isalpha, seen.begin)):
            self.worked_around(f"/candidates/{state.number}/content", SENT_BEFORE)
            text = seen.replace(seen.waiting[-1])
        else:
            text = seen.pass_on()
        return [self.more(state.number, text)] if text else []

    def _piece(self, state: _Candidate, part: Json, call: Members, at: str) -> list[ir.StreamEvent]:
        out = self._close(state) if "name" in call.rest else []
        if state.call is None:
            out += self._close(state)
            read: Any = PARTS.read(part, at, self.ids)
            state.args = dict(read.input)
            state.call = msgspec.structs.replace(read, input={}, ext={})
            out += self.begin(state.number, state.call, state.number)
        for piece in call.take("partialArgs", list) or ():
            if type(piece) is dict:
                put_piece(state.args, Members(piece, at, spell=True))
        return out if call.take("willContinue", bool) else [*out, *self._close(state)]

    def _close(self, state: _Candidate) -> list[ir.StreamEvent]:
        if state.call is None:
            return [*self._rest(state), *self.end(state.number)]
        whole, state.call = msgspec.structs.replace(state.call, input=_settled(state.args)), None
        return [self.more(state.number, json_text(whole.input), "arguments"), *self.end(state.number, whole)]


def put_piece(args: dict[Any, Any], piece: Members) -> None:
    """Put one piece of arguments where its path says, lists by their indices; texts go on where they ended."""
    steps = [int(index) if index else name or quoted for name, index, quoted in
             _STEP.findall(piece.take("jsonPath") or "")]  # fmt: skip
    values = [piece.take(name, str, int, float, bool) for name in ("stringValue", "numberValue", "boolValue")]
    value = next((value for value in reversed(values) if value is not None), None)
    for step in steps[:-1]:
        if type(args.get(step)) is not dict:
            args[step] = {}
        args = args[step]
    for step in steps[-1:]:
        before = args.get(step)
        args[step] = before + value if type(before) is str and type(value) is str else value


ITEMS_MAX: Final = 10_000
"""Longest list that a piece may reach into; a wild index would fill the memory."""


def _settled(value: Any) -> Json:
    """Return a value whose objects of indices are lists again."""
    if type(value) is not dict:
        return value
    indices = [key for key in value if type(key) is int]
    if indices and len(indices) == len(value):
        return [_settled(value.get(place)) for place in range(min(max(indices) + 1, ITEMS_MAX))]
    return {str(key): _settled(inner) for key, inner in value.items()}


# Streams, written -----------------------------------------------------------------------------------------------------


class StreamWriter(BlockWriter):
    """Templates of the chunks; a call is written when it is whole."""

    has_choices = True
    has_refusals = False

    def __init__(self, dialect: Any, source: str) -> None:
        super().__init__(dialect, source)
        self.calls: dict[int, dict[int, list[Json] | None]] = {}
        """Choice → the calls that wait for one that began earlier, and None for those that go on."""

    def _chunk(self, candidates: list[Json]) -> dict[str, Any]:
        began = self.sum.began
        pairs = (("candidates", candidates or None), ("modelVersion", began.model), ("responseId", began.id))
        return {key: value for key, value in pairs if value is not None}

    def _parts(self, choice: int, parts: list[Json]) -> list[Json]:
        return [self._chunk([{"content": {"role": "model", "parts": parts}, "index": choice}])]

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        if isinstance(part, ir.ToolUse):
            self.calls.setdefault(key[0], {})[key[1]] = None
            return None
        if not isinstance(part, ir.Text | ir.Refusal | ir.Thinking):
            return None
        self.opened[key] = {"thought": True} if isinstance(part, ir.Thinking) else {}
        return []

    def piece(self, key: Key, text: str, part: ir.Part) -> list[Json]:
        return self._parts(key[0], [{"text": text, **self.opened[key]}])

    def whole(self, key: Key, part: ir.Part) -> list[Json] | None:
        if isinstance(part, ir.Text | ir.Refusal) and not part.text:
            return []
        if isinstance(part, ir.ToolUse) and part.is_cut:
            self.ledger.drop(part.at, "arguments", CUT_CALL)
            return self._in_turn(key, [])
        count = len(self.ledger.losses)
        written = PARTS.write(part, self.ledger)
        made = [] if written is None else self._parts(key[0], [written])
        if written is None and len(self.ledger.losses) == count:
            return None
        return self._in_turn(key, made) if key[1] in self.calls.get(key[0], {}) else made

    def _in_turn(self, key: Key, made: list[Json]) -> list[Json]:
        """Give out calls in the order in which they began: without ids it is all that tells one from another."""
        waiting = self.calls[key[0]]
        waiting[key[1]] = made
        out: list[Json] = []
        for index in sorted(waiting):
            ready = waiting[index]
            if ready is None:
                break
            out += ready
            del waiting[index]
        return out

    def end(self) -> list[Json]:
        rest = [ready for waiting in self.calls.values() for _, ready in sorted(waiting.items()) if ready]
        candidates: list[Json] = []
        for choice, word in self.words.items():
            said = {} if word is None else {"finishReason": word}
            candidates.append({"content": {"role": "model", "parts": [{"text": ""}]}, "index": choice, **said})
        chunk = self._chunk(candidates)
        if (usage := self.counted()) is not None:
            chunk["usageMetadata"] = usage
        last = [chunk] if chunk.keys() & {"candidates", "usageMetadata"} else []
        return [*(made for ready in rest for made in ready), *last, *self.fail_cut()]


DIALECT: Final = TableDialect(
    NAME=NAME, TOOL_NAMES=TOOL_NAMES, CAPABILITIES=CAPABILITIES, DEFAULTS=DEFAULTS, options=OPTIONS,
    read_messages=read_messages, write_messages=write_messages, tools=TOOLS,
    read_candidates=read_candidates, write_candidates=write_candidates, usage=USAGE, reply="candidates",
    endings=ENDINGS, error={"code": 502, "status": "UNAVAILABLE"},
    read_stream=StreamReader, write_stream=StreamWriter, limits=LIMITS, places=PLACES,
    listed="/contents",
    spell=True, respell=respelled, finish=_with_proofs,
).dialect()  # fmt: skip
