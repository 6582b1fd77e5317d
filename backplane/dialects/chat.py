"""The Chat Completions family, read and written by tables; what sets its dialects apart is in their own files.

Messages have members for what an assistant says (thinking, text, refusal, sound, calls). Streams are deltas of one
message; a block ends when another member appears.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import ir
from backplane.dialects.codec import (
    REST,
    Block,
    Blocks,
    Citations,
    Counters,
    Form,
    Hole,
    Members,
    OptionDraft,
    RequestOption,
    Tools,
    effort_writer,
)
from backplane.dialects.common import (
    EFFORT_BUDGETS,
    NUMBER,
    Calls,
    LossLedger,
    json_text,
    kind_of,
    parse_json,
    read_url,
)
from backplane.dialects.limits import ServerLimits, Spelling
from backplane.dialects.outcome import Endings
from backplane.dialects.streams import BlockReader, BlockWriter, Incoming, Key, begun, failure, whole_events
from backplane.dialects.vendor import Dialect, TableDialect

ROLES: Final[dict[str, ir.Role]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip

STOPS: Final[dict[str, ir.Stop]] = {
    "stop": "end", "length": "max_tokens", "tool_calls": "tool_use", "function_call": "tool_use",
    "content_filter": "content_filter",
    # Words of gateways that hand on what another vendor said.
    "end_turn": "end", "max_tokens": "max_tokens", "tool_use": "tool_use", "refusal": "refusal",
    "STOP": "end", "MAX_TOKENS": "max_tokens", "SAFETY": "content_filter", "RECITATION": "content_filter",
    "MALFORMED_FUNCTION_CALL": "error",
}  # fmt: skip

STOP_WORDS: Final[dict[ir.Stop | None, str]] = {
    "end": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls",
    "content_filter": "content_filter", "refusal": "content_filter",
    # Never `stop`: the answer may not be whole.
    None: "length", "pause": "length", "error": "length", "cancelled": "length", "other": "length",
}  # fmt: skip

OWN_STOPS: Final = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
ENDINGS: Final = Endings(STOPS, STOP_WORDS, kin_words=OWN_STOPS)
DETAILS: Final = frozenset({"auto", "low", "high"})
AUDIO_FORMATS: Final = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/wave": "wav", "audio/mpeg": "mp3",
                        "audio/mp3": "mp3"}  # fmt: skip
"""Media type → the only two formats that the server takes, by name (platform.openai.com, audio, 2026-11)."""
AUDIO_TYPES: Final = {"mp3": "audio/mpeg"}

MEMBERS: Final[dict[str, type[Any]]] = {
    "tool_calls": list, "annotations": list, "audio": dict, "logprobs": dict, "system_fingerprint": str,
    "function_call": dict, "logit_bias": dict, "store": bool, "stream_options": dict, "prediction": dict,
    "modalities": list, "prompt_cache_key": str, "safety_identifier": str, "functions": list,
    "prompt_tokens_details/audio_tokens": int, "completion_tokens_details/audio_tokens": int,
    "completion_tokens_details/accepted_prediction_tokens": int,
    "completion_tokens_details/rejected_prediction_tokens": int, "expires_at": int,
}  # fmt: skip
"""Members that every dialect of the family takes from its sisters, and the type that they must have for it."""
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
CITATION: Final = {
    "type": "kind", "url_citation/url": "url", "url_citation/title": "title", "url_citation/start_index": "start",
    "url_citation/end_index": "end",
}  # fmt: skip
"""Path → field."""
TOOL: Final = {"name": "{}/name", "description": "{}/description", "schema": "{}/parameters", "strict": "{}/strict"}
KINDS: Final = {"function": "function", "custom": "custom"}
"""Kinds of tools, at OpenAI."""
ERROR: Final[dict[str, Json]] = {"type": "upstream_error", "param": None, "code": None}
"""What OpenAI's dialects say of an error beside its message."""

LIMITS: Final = ServerLimits(call_id=Spelling(most=40), tool_name=Spelling("[a-zA-Z0-9_-]", 64))
"""platform.openai.com, chat/create: names of tools and lengths of ids, read 2026-11."""


# Options --------------------------------------------------------------------------------------------------------------


NAME: Final = Hole("name")
CUSTOM: Final = {"mode": "tool", "name": NAME, "kind": "custom"}
FUNCTION: Final = {"mode": "tool", "name": NAME}
CHOICES: Final = tuple(Form(word, {"mode": word}) for word in ("auto", "none", "required"))
NESTED: Final = (Form({"type": "custom", "custom": {"name": NAME}}, CUSTOM),
                 Form({"type": "function", "function": {"name": NAME}}, FUNCTION))  # fmt: skip
FLAT: Final = Form({"type": "custom", "name": NAME}, CUSTOM), Form({"type": "function", "name": NAME}, FUNCTION)
"""Which tool the model has to call: a word, or a tool's name in or beside its kind."""

FORMATS: Final = Form({"type": "text"}, {"type": "text"}), Form({"type": "json_object"}, {"type": "json"})
BODY: Final = Hole("body", (dict,), ("name", "schema", "strict", "description"))
SCHEMA: Final = {"type": "schema", REST: BODY}
NAMED: Final = {"name": "answer"}
"""The form of an answer; a schema has a name at OpenAI."""


def write_metadata(value: Any, draft: OptionDraft) -> None:
    """Write the caller's labels, which are texts at OpenAI."""
    if draft.is_home or all(type(label) is str for label in value.values()):
        draft.put("metadata", value)
    else:
        draft.drop("labels are texts here", value)


METADATA: Final = RequestOption("metadata", "metadata", (dict,), write=write_metadata)


def _read_stop(members: Members) -> tuple[Any, str] | None:
    found = members.take("stop", str, list)
    return None if found is None else ([found] if type(found) is str else found, "/stop")


STOP: Final = RequestOption("stop", "stop", read=_read_stop)
OPTIONS: Final = (
    RequestOption("temperature", "temperature", NUMBER),
    RequestOption("top_p", "top_p", NUMBER),
    RequestOption("seed", "seed", (int,)),
    RequestOption("frequency_penalty", "frequency_penalty", NUMBER),
    RequestOption("presence_penalty", "presence_penalty", NUMBER),
    RequestOption("n", "n", (int,)),
    RequestOption("logprobs", "logprobs", (bool,)),
    RequestOption("top_logprobs", "top_logprobs", (int,)),
    RequestOption("stream", "stream", (bool,)),
    RequestOption("parallel_tool_calls", "parallel_tool_calls", (bool,)),
    RequestOption("user", "user"),
    RequestOption("reasoning_effort", "reasoning_effort", known=frozenset(EFFORT_BUDGETS)),
    RequestOption("", "reasoning_budget", write=effort_writer("reasoning_effort")),
    RequestOption("verbosity", "verbosity", known=frozenset({"low", "medium", "high"})),
    RequestOption("service_tier", "service_tier",
           known=frozenset({"auto", "default", "flex", "scale", "priority", "fast"})),
    METADATA,
    RequestOption("max_completion_tokens", "max_tokens", (int,), least=1),
    RequestOption("max_tokens", "max_tokens", (int,), least=1),
    STOP,
    RequestOption("tool_choice", "tool_choice", forms=(*CHOICES, *NESTED, *FLAT)),
    RequestOption("response_format", "response_format", made=NAMED,
                  forms=(*FORMATS, Form({"type": "json_schema", "json_schema": BODY}, SCHEMA, "/json_schema"))),
)  # fmt: skip
PLACES: Final = {
    "id": "id", "model": "model", "created": "created", "usage": "usage", "cache": "cache_control",
    "candidates": "choices",
}  # fmt: skip


# Blocks of a content list ---------------------------------------------------------------------------------------------


def _read_image(members: Members, fields: dict[str, Any]) -> bool:
    if "url" not in fields and "data" not in fields:  # some gateways send the address itself
        address = members.take("image_url")
        fields |= {} if address is None else read_url(address)
    return "url" in fields or "data" in fields


def _write_url(part: ir.Media, out: dict[str, Any], ledger: LossLedger) -> bool:
    body = out.get(out["type"], {})
    if part.detail not in DETAILS and not ledger.is_home:
        body.pop("detail", None)
    # The SDK that Kimi names as its own has no word for films.
    return "url" in body and (ledger.is_home or part.kind == "image")


def read_audio(members: Members, fields: dict[str, Any]) -> bool:
    """Read the format of a sound, which is said by name."""
    form = fields.pop("media_type")
    fields["media_type"] = AUDIO_TYPES.get(form, f"audio/{form}")
    return True


def write_audio(part: ir.Media, out: dict[str, Any], ledger: LossLedger) -> bool:
    """Write the format of a sound by name; False where it has none here."""
    form = AUDIO_FORMATS.get(part.media_type or "audio/wav")
    if form is None and ledger.is_home:
        form = (part.media_type or "").partition("/")[2]
    out["input_audio"]["format"] = form
    return form is not None


def _write_data(part: ir.Media, out: dict[str, Any], ledger: LossLedger) -> bool:
    """Write an image where the server takes none by its address."""
    return _write_url(part, out, ledger) and (ledger.is_home or part.data is not None)


def _write_file(part: ir.Media, out: dict[str, Any], ledger: LossLedger) -> bool:
    body = out.setdefault("file", {})
    if part.data is not None:
        body.pop("file_id", None)
    elif part.file_id is None or (ledger.source not in ("openai", "codex", "copilot") and not ledger.is_home):
        return False
    if "filename" not in body and part.title is not None and not ledger.is_home:
        body["filename"] = part.title
    return True


def _read_thoughts(members: Members, fields: dict[str, Any]) -> bool:
    """Read thoughts that some gateways give as a list of texts."""
    found = fields.pop("text")
    texts: list[Any] = [found] if type(found) is str else [one.get("text") for one in found if type(one) is dict]
    if not all(type(text) is str for text in texts) or (type(found) is list and len(texts) != len(found)):
        return False
    fields["text"] = "".join(texts)
    return True


SOUND: Final = {"id": "file_id", "data": "data", "transcript": "transcript"}
"""Member of what an assistant said aloud → field."""


def sound_of(part: ir.Media) -> dict[str, Any]:
    """Write what an assistant said aloud."""
    pairs = ((member, getattr(part, field)) for member, field in SOUND.items())
    return {member: value for member, value in pairs if value is not None}


def blocks_of(name: str, *, has_files: bool, has_image_urls: bool) -> Blocks:
    """Return the family's table of blocks, with what a vendor takes of them."""
    urls = {"image_url/url": "address", "image_url/detail": "detail"}
    films = {"video_url/url!": "address", "video_url/detail": "detail"}
    return Blocks(name, (
        Block("text", ir.Text, {"text!": "text"}),
        Block("refusal", ir.Refusal, {"refusal!": "text"}),
        Block("image_url", ir.Media, urls, {"kind": "image"}, read=_read_image,
              write=_write_url if has_image_urls else _write_data),
        Block("video_url", ir.Media, films, {"kind": "video"}, write=_write_url),
        Block("input_audio", ir.Media, {"input_audio/data!": "data", "input_audio/format!": "media_type"},
              {"kind": "audio"}, read=read_audio, write=write_audio),
        Block("file", ir.Media, {"file/file_data": "file", "file/file_id": "file_id", "file/filename": "name"},
              {"kind": "document"}, read=lambda members, fields: ("data" in fields) != ("file_id" in fields),
              write=_write_file, is_written=has_files),
        Block("thinking", ir.Thinking, {"thinking!": "text"}, types={"text": (str, list)}, read=_read_thoughts,
              is_written=False),
    ), cache="cache_control")  # fmt: skip


def calls_of(name: str) -> Blocks:
    """Return the family's table of calls."""
    return Blocks(name, tuple(
        Block(kind, ir.ToolUse, {"id": "id", f"{kind}/name!": "name", f"{kind}/{member}": "arguments"}, {"kind": kind})
        for kind, member in (("function", "arguments"), ("custom", "input"))
    ), untyped="function", noun="call of type ")  # fmt: skip


class Chat:
    """One dialect of the family: what sets it apart, and the functions that all share."""

    name: str
    roles: frozenset[str] = frozenset(ROLES)
    max_tokens: str = "max_tokens"
    """The member that is written for a limit that came from elsewhere."""
    thinking_request: str | None = None
    """The message member that takes thinking in a request; None where there is none."""
    thinking_answer: str = "reasoning_content"
    thinking_fields: tuple[str, ...] = ("reasoning_content", "reasoning", "reasoning_text")
    signature_field: str | None = None
    cached_tokens_on_top: bool = False
    """`usage.cached_tokens` instead of a member of the details."""
    has_files: bool = True
    has_image_urls: bool = True
    """Whether images may be given by an address, not only as data."""
    special: tuple[RequestOption, ...] = ()
    """Options that are written in another way than by the family."""
    unknown_options: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.blocks = blocks_of(self.name, has_files=self.has_files, has_image_urls=self.has_image_urls)
        self.calls = calls_of(self.name)
        self.citations = Citations(self.name, "annotations", CITATION, "url_citation")
        self.usage = CACHED_ON_TOP if self.cached_tokens_on_top else USAGE
        special = {row.name: row for row in self.special}
        rows = [msgspec.structs.replace(row, is_written=row.name not in self.unknown_options)
                for row in OPTIONS if row.name not in special]  # fmt: skip
        rows.sort(key=lambda row: row.path != self.max_tokens)
        self.options = (*special.values(), *rows)

    def dialect(self, *, reader: type[StreamReader] | None = None, **own: Any) -> Dialect:
        """Make a dialect of the family.

        Args:
            own: members of `Dialect` that this vendor has of its own.
        """
        members = {"limits": LIMITS, **own}
        return TableDialect(
            NAME=self.name, DONE=True, options=self.options, read_messages=self.read_messages,
            write_messages=self.write_messages, tools=Tools(self.blocks, TOOL, KINDS),
            required={"model": "unknown"}, read_candidates=self.read_candidates,
            write_candidates=self.write_candidates, usage=self.usage, answer_head={"object": "chat.completion"},
            answer_required={"id": "chatcmpl-translated", "created": 0, "model": "unknown"}, error=ERROR,
            endings=ENDINGS, read_stream=partial(reader or StreamReader, chat=self),
            write_stream=partial(StreamWriter, chat=self),
            kin={name: MEMBERS for name in SISTERS if name != self.name}, places=PLACES,
            **members,
        ).dialect()  # fmt: skip

    # Messages, read

    def read_messages(self, members: Members, calls: Calls) -> list[ir.Message]:
        """Take the messages of a request."""
        found = members.need("messages")
        return [self.read_message(message, f"/messages/{place}", calls) for place, message in enumerate(found)]

    def read_message(self, value: Json, at: str, calls: Calls) -> ir.Message:
        """Read one message; its role may be old, or missing."""
        members = Members(value, at)
        native_role = members.take("role")
        role = ROLES.get(native_role or "", "user")
        name = members.take("name")
        if role == "tool":
            return self._read_result(members, value, native_role, name, calls)
        parts, flat = members.content("content", self.blocks.read)
        if role == "assistant":
            parts = self._read_assistant(members, parts, at, calls)
        return ir.Message(
            role=role, parts=parts, native_role=native_role, name=name, flat=flat, at=at, ext=members.ext(self.name),
        )  # fmt: skip

    def _read_assistant(
        self, members: Members, content: tuple[ir.Part, ...], at: str, calls: Calls
    ) -> tuple[ir.Part, ...]:
        """Put an assistant's members in the order in which they were said: thinking, text, refusal, sound, calls."""
        parts: list[ir.Part] = []
        for field in self.thinking_fields:
            if not parts and (text := members.take(field)) is not None:
                proof = members.take(self.signature_field) if self.signature_field else None
                proof_at = f"{at}/{self.signature_field}" if proof is not None else ""
                parts.append(
                    ir.Thinking(text=text, field=field, signature=proof, signature_at=proof_at, at=f"{at}/{field}")
                )
        parts += content
        if (refusal := members.take("refusal")) is not None:
            parts.append(ir.Refusal(text=refusal, at=f"{at}/refusal"))
        if members.rest.get("audio") is not None and (audio := members.take("audio", dict)) is not None:
            parts.append(self.read_sound(audio, f"{at}/audio"))
        old = members.rest.get("function_call")
        if type(old) is dict and type(old.get("name")) is str:
            del members.rest["function_call"]
            parts.append(self.calls.read({"function": old}, f"{at}/function_call", calls))
        if members.rest.get("tool_calls"):
            found = members.take("tool_calls", list) or ()
            parts += [self.calls.read(call, f"{at}/tool_calls/{place}", calls) for place, call in enumerate(found)]
        if members.rest.get("annotations"):
            self._cite(parts, members)
        return tuple(parts)

    def read_sound(self, value: Json, at: str) -> ir.Media:
        """Read what an assistant said aloud."""
        members = Members(value, at)
        fields = {field: members.take(member) for member, field in SOUND.items()}
        return ir.Media(kind="audio", **fields, at=at, ext=members.ext(self.name))

    def _cite(self, parts: list[ir.Part], members: Members) -> None:
        """Hang annotations on the message's text; they stay members where there is no single text."""
        places = [place for place, part in enumerate(parts) if type(part) is ir.Text]
        found = members.rest["annotations"]
        if len(places) != 1 or type(found) is not list or not all(
            type(one) is dict and one.get("type") == "url_citation" and type(one.get("url_citation")) is dict
            for one in found
        ):  # fmt: skip
            return
        cited = self.citations.take(members)
        parts[places[0]] = msgspec.structs.replace(parts[places[0]], citations=cited)

    def _read_result(
        self, members: Members, value: Json, native_role: str | None, name: str | None, calls: Calls
    ) -> ir.Message:
        call_id = members.take("tool_call_id")
        content, flat = members.content("content", self.blocks.read)
        result = ir.ToolOutput(
            id=calls.answer(name or "") if call_id is None else call_id, id_made=call_id is None, name=name,
            content=content, flat=flat, at=members.at, ext=members.ext(self.name),
        )  # fmt: skip
        return ir.Message(role="tool", parts=(result,), native_role=native_role, at=members.at)

    # Messages, written

    def write_messages(self, conversation: ir.Conversation, out: dict[str, Any], ledger: LossLedger) -> None:
        """Write the messages; results leave a mixed message and come first, each as a message of its own.

        What only a user may show moves out of the results into a message after the last of them: between a call and
        its result no other message may stand.
        """
        made: list[Json] = []
        shown: list[Json] = []
        for message in conversation.messages:
            results = [part for part in message.parts if isinstance(part, ir.ToolOutput)]
            others = tuple(part for part in message.parts if not isinstance(part, ir.ToolOutput))
            made += [self._write_result(self._show(result, shown, ledger), message, ledger) for result in results]
            if results and not others:
                ledger.put_ext(message, made[-1])
                continue
            if shown:
                made.append({"role": "user", "content": shown})
                shown = []
            if results:
                message = msgspec.structs.replace(message, role="user", parts=others, native_role=None, flat=None)
            made.append(self._write_message(message, ledger))
        out["messages"] = [*made, {"role": "user", "content": shown}] if shown else made

    def _show(self, result: ir.ToolOutput, shown: list[Json], ledger: LossLedger) -> ir.ToolOutput:
        """Move what is no text out of a result into `shown`, after the id of its call; return what remains."""
        moved: list[Json] = []
        rest: list[ir.Part] = []
        for part in result.content:
            if not isinstance(part, ir.Media) or part.text is not None or ledger.is_home:
                rest.append(part)
            elif (written := self.blocks.write(part, ledger)) is not None:
                ledger.degrade(part.at, "media", "a result takes only text here: it moved to a user's message after it")
                moved.append(written)
        if moved:
            shown += [{"type": "text", "text": f"From the result of {result.id}:"}, *moved]
        return msgspec.structs.replace(result, content=tuple(rest))

    def _write_result(self, result: ir.ToolOutput, message: ir.Message, ledger: LossLedger) -> Json:
        is_old = message.native_role == "function" and message.role == "tool" and ledger.is_home
        out: dict[str, Any] = {"role": "function" if is_old else "tool"}
        if not (result.id_made and ledger.is_home):
            out["tool_call_id"] = result.id
        if result.name is not None and (ledger.is_home or ledger.kin.get(ledger.source)):
            out["name"] = result.name
        texts = all(type(part) is ir.Text for part in result.content)
        if result.flat is False and (ledger.is_home or (len(result.content) > 1 and texts)):
            out["content"] = self.blocks.write_all(result.content, ledger)
        else:
            out["content"] = ledger.plain_text(result.content)
        ledger.put_ext(result, out)
        return out

    def _write_message(self, message: ir.Message, ledger: LossLedger) -> Json:
        native = message.native_role
        is_known = native in self.roles and ROLES.get(native or "") == message.role != "tool"
        is_own = ledger.is_home and native is not None and ROLES.get(native, "user") == message.role
        out: dict[str, Any] = {"role": native if is_known or is_own else message.role}
        if message.name is not None:
            out["name"] = message.name
        if message.role == "assistant":
            self.write_assistant(message, out, ledger)
        else:
            content = self.blocks.write_content(message.parts, message.flat, ledger)
            nothing: Json = None if message.flat is not False else []
            out["content"] = content if content != [] else nothing if ledger.is_home else ""
        ledger.put_ext(message, out)
        return out

    def write_assistant(self, message: ir.Message, out: dict[str, Any], ledger: LossLedger) -> None:
        """Write what an assistant said: thinking, text, refusal and calls are members of their own."""
        content: list[ir.Part] = []
        calls: list[Json] = []
        for part in message.parts:
            if isinstance(part, ir.ToolUse):
                self._write_call(part, out, calls, ledger)
            elif isinstance(part, ir.Thinking) and not (ledger.is_home and "/content/" in part.at):
                self._write_thinking(part, out, ledger)
            elif isinstance(part, ir.Refusal) and not (ledger.is_home and "/content/" in part.at):
                out["refusal"] = out.get("refusal", "") + part.text
                ledger.put_ext(part, {})
            elif isinstance(part, ir.Media) and part.kind == "audio" and (part.file_id or part.transcript):
                out["audio"] = sound_of(part)
                ledger.put_ext(part, out["audio"])
            elif isinstance(part, ir.Media) and part.text is None and not ledger.is_home:
                ledger.lose_part(part, "an assistant says only text here")
            elif isinstance(part, ir.Opaque) and part.label.startswith("call of type") and ledger.is_home:
                calls.append(part.payload)
            else:
                content.append(part)
        self._write_said(content, message, out, ledger)
        if calls:
            out["tool_calls"] = calls
        if "content" not in out and not ledger.is_home:
            out["content"] = None if calls or ledger.is_answer or "refusal" in out else ""

    def _write_said(self, parts: list[ir.Part], message: ir.Message, out: dict[str, Any], ledger: LossLedger) -> None:
        is_list = ledger.is_home and message.flat is False
        if not ledger.is_answer or is_list:
            content = self.blocks.write_content(parts, message.flat, ledger)
            # A service refuses an empty list; one is written only where one was read.
            if content != [] or is_list:
                out["content"] = content
            return
        texts: list[str] = []
        for part in parts:
            if type(part) is ir.Text:
                if cited := self.citations.write(part, ledger, sum(map(len, texts))):
                    out["annotations"] = [*out.get("annotations", ()), *cited]
                texts.append(part.text)
                ledger.put_ext(part, {})
            else:
                ledger.lose_part(part)
        if texts:
            out["content"] = "".join(texts)

    def _write_thinking(self, part: ir.Thinking, out: dict[str, Any], ledger: LossLedger) -> None:
        field = self.thinking_answer if ledger.is_answer else self.thinking_request
        if ledger.is_home:
            field = part.field or field or self.thinking_answer
        if part.redacted is not None or field is None:
            ledger.lose_part(part)
            return
        if not ledger.is_home:
            ledger.degrade(part.at, "thinking", f"thinking stands in {field}")
        out[field] = out.get(field, "") + part.text
        if part.signature is not None and self.signature_field is not None and ledger.is_home:
            out[self.signature_field] = part.signature
        ledger.put_ext(part, {})

    def _write_call(self, part: ir.ToolUse, out: dict[str, Any], calls: list[Json], ledger: LossLedger) -> None:
        call: Any = self.calls.write(part, ledger)
        if ledger.is_home and part.at.endswith("/function_call"):
            out["function_call"] = call["function"]
        else:
            calls.append(call)

    # Answers

    def read_candidates(self, members: Members, calls: Calls) -> tuple[ir.Candidate, ...]:
        """Take what an answer says and why it ended."""
        found = members.need("choices")
        return tuple(self._read_choice(choice, place, calls) for place, choice in enumerate(found))

    def _read_choice(self, choice: Json, place: int, calls: Calls) -> ir.Candidate:
        at = f"/choices/{place}"
        members = Members(choice, at)
        members.skip("index", place)
        body = members.take("message", dict) or {}
        message = self.read_message({"role": "assistant", **body}, f"{at}/message", calls)
        raw = members.take("finish_reason")
        return ir.Candidate(
            message=message, stop=ENDINGS.read(raw, message.parts), stop_raw=raw, stop_at=f"{at}/finish_reason", at=at,
            ext=members.ext(self.name),
        )  # fmt: skip

    def write_candidates(self, answer: ir.Answer, out: dict[str, Any], ledger: LossLedger) -> None:
        """Write what an answer says and why it ended."""
        if "created" in out and not ledger.is_home:
            out["created"] = int(out["created"])
        out["choices"] = [self._write_choice(one, place, ledger) for place, one in enumerate(answer.candidates)]

    def _write_choice(self, candidate: ir.Candidate, place: int, ledger: LossLedger) -> Json:
        source = candidate.message
        message: dict[str, Any] = {} if source.name is None else {"name": source.name}
        self.write_assistant(source, message, ledger)
        ledger.put_ext(source, message)
        native = source.native_role if ledger.is_home else None
        message.setdefault("role", native if native is not None else "assistant")
        choice: dict[str, Any] = {"message": message, "index": place}
        if (word := ENDINGS.write(candidate, ledger)) is not None:
            choice["finish_reason"] = word
        ledger.put_ext(candidate, choice)
        if not ledger.is_home:
            _keep_valid(choice, candidate, ledger)
        return choice


def _keep_valid(choice: dict[str, Any], source: ir.Candidate, ledger: LossLedger) -> None:
    """Leave out what gateways hang on a choice and a message, where the family's own types refuse it."""
    found = choice["message"].get("annotations")
    if type(found) is list and any(kind_of(one) != "url_citation" for one in found):
        ledger.drop(f"{source.message.at}/annotations", "citation", "only citations of addresses are said here", found)
        choice["message"]["annotations"] = [one for one in found if kind_of(one) == "url_citation"]
    if (found := choice.get("logprobs")) is None:
        return
    lists = [found.get(key) for key in ("content", "refusal")] if type(found) is dict else []
    tokens = [one for found in lists if type(found) is list for one in found]
    if (
        type(found) is not dict
        or not {"content", "refusal"} & found.keys()
        or not all(type(one) is dict and {"token", "logprob", "top_logprobs"} <= one.keys() for one in tokens)
    ):
        ledger.drop(f"{source.at}/logprobs", "extension", "probabilities in a form of its own", found)
        del choice["logprobs"]


# Streams, read --------------------------------------------------------------------------------------------------------

HEAD: Final = frozenset({"id", "model", "created", "object", "choices", "usage", "error", "obfuscation"})
"""Members of a chunk that are read, and padding against guessing lengths."""


class _Call:
    """One call while it comes in; it is not begun before its name is whole."""

    def __init__(self, part: ir.ToolUse) -> None:
        self.part = part
        self.name = ""
        self.block: Incoming | None = None

    def is_whole(self) -> bool:
        return self.block is not None and parse_json("".join(self.block.texts)) is not None


class _Choice:
    """What is open in one choice."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.text: tuple[str, Any] = ("", None)
        """Member that text goes to, and the key of its block."""
        self.calls: dict[int, _Call] = {}
        """Native place of a call → the call."""
        self.grown: dict[int, _Call] = {}
        """Calls of which it was not yet looked whether they are whole; to look at all would be quadratic."""
        self.last_call = 0
        self.newest: _Call | None = None
        """The call that may not have begun yet."""
        self.audio: dict[str, Any] = {}


class StreamReader(BlockReader):
    """Reads the chunks of one stream."""

    def __init__(self, dialect: Any, chat: Chat) -> None:
        super().__init__(dialect)
        self.chat = chat
        self.fields = {"content", "refusal", *chat.thinking_fields}
        self.choices: dict[int, _Choice] = {}
        self.notes: dict[str, Any] = {}
        self.ids = Calls()

    def read(self, chunk: Json) -> list[ir.StreamEvent]:
        """Read one chunk; anything that is no chunk is kept."""
        if type(chunk) is not dict:
            return [ir.Kept(chunk)]
        out: list[ir.StreamEvent] = []
        error = chunk.get("error")
        failed: list[ir.StreamEvent] = [failure(error, {"error": error}, "code")] if error else []
        choices = chunk.get("choices")
        if failed and not choices:
            return failed
        if chunk.get("object") == "chat.completion":
            self.ended = True  # a gateway that answers at once although a stream was asked for
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
        """Read a content that is a list of blocks, which some gateways stream."""
        for value in parts:
            part = self.chat.blocks.read(value, f"/choices/{state.number}/delta/content")
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
            call = None  # another one in the place of a whole one: a gateway that counts them all as 0
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
            # A call whose arguments are not whole yet may go on in turns with this one.
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
        """End what is open; a sound, which comes in pieces of all its members, is said whole here."""
        out: list[ir.StreamEvent] = []
        states = [state for number, state in self.choices.items() if choice in (None, number)]
        for state in states:
            if state.newest is not None:
                self._begin_call(state, state.newest, out)
        out += super().end_all(choice)
        for state in states:
            if state.audio:
                audio, state.audio = state.audio, {}
                part = self.chat.read_sound(audio, f"/choices/{state.number}/delta/audio")
                out += [*self.begin("audio", part, state.number), *self.end("audio")]
        return out


# Streams, written -----------------------------------------------------------------------------------------------------


class StreamWriter(BlockWriter):
    """Templates of the family's chunks."""

    has_choices = True

    def __init__(self, dialect: Any, source: str, chat: Chat) -> None:
        super().__init__(dialect, source)
        self.chat = chat
        self.counts: dict[int, int] = {}
        self.roles: set[int] = set()

    def _chunk(self, choices: list[Json], **more: Any) -> Json:
        began = self.sum.began
        return {
            "id": began.id or "chatcmpl-translated", "object": "chat.completion.chunk",
            "created": int(began.created or 0), "model": began.model or "unknown", "choices": choices, **more,
        }  # fmt: skip

    def _delta(self, choice: int, delta: dict[str, Any], **more: Any) -> list[Json]:
        """Write a delta; the first of a choice says the role."""
        head = {} if choice in self.roles else {"role": "assistant"}
        self.roles.add(choice)
        return [self._chunk([{"index": choice, "delta": {**head, **delta}, "finish_reason": None, **more}])]

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        if isinstance(part, ir.Thinking):
            field = self.opened[key] = self.chat.thinking_answer
            if self.once("thinking"):
                self.ledger.degrade(part.at, "thinking", f"thinking stands in {field}")
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

    def noted(self, event: ir.Noted) -> list[Json]:
        if event.choice is None:
            return [self._chunk([], **{event.key: event.value})]
        if event.at_message:
            return self._delta(event.choice, {event.key: event.value})
        return self._delta(event.choice, {}, **{event.key: event.value})
