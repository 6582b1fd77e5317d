"""The Chat Completions family, read and written by tables; what sets its dialects apart is in their `Flavour`.

Messages have members for what an assistant says (thinking, text, refusal, sound, calls); streams are in `chat_stream`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane import ir
from backplane.contract.canonical import Json
from backplane.dialects import codec
from backplane.dialects.codec import (
    EFFORT_BUDGETS,
    FORMAT_MEMBERS,
    NUMBER,
    Block,
    Blocks,
    Calls,
    Kin,
    Ledger,
    Members,
    Option,
    Writer,
    arguments_text,
    calls_of,
    effort_of,
    is_own_raw,
    is_plain,
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
from backplane.dialects.vendor import write_tools

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

ENDINGS: Final = Endings(STOPS, STOP_WORDS)
OWN_STOPS: Final = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
EFFORTS: Final = frozenset(EFFORT_BUDGETS)
DETAILS: Final = frozenset({"auto", "low", "high"})
AUDIO_FORMATS: Final = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/wave": "wav", "audio/mpeg": "mp3",
                        "audio/mp3": "mp3"}  # fmt: skip
"""Media type → the only two formats that the server takes, by name (platform.openai.com, audio, 2026-11)."""
AUDIO_TYPES: Final = {"mp3": "audio/mpeg"}

OPTIONS: Final = (
    Option("temperature", "temperature", NUMBER),
    Option("top_p", "top_p", NUMBER),
    Option("seed", "seed", (int,)),
    Option("frequency_penalty", "frequency_penalty", NUMBER),
    Option("presence_penalty", "presence_penalty", NUMBER),
    Option("n", "n", (int,)),
    Option("logprobs", "logprobs", (bool,)),
    Option("top_logprobs", "top_logprobs", (int,)),
    Option("stream", "stream", (bool,)),
    Option("parallel_tool_calls", "parallel_tool_calls", (bool,)),
    Option("user", "user"),
    Option("reasoning_effort", "reasoning_effort", known=EFFORTS),
    Option("verbosity", "verbosity", known=frozenset({"low", "medium", "high"})),
    Option("service_tier", "service_tier",
           known=frozenset({"auto", "default", "flex", "scale", "priority", "fast"})),
    Option("metadata", "metadata", (dict,)),
    Option("max_completion_tokens", "max_tokens", (int,), least=1),
    Option("max_tokens", "max_tokens", (int,), least=1),
    Option("stop", "stop", (list,)),
)  # fmt: skip

MEMBERS: Final[dict[str, type[Any]]] = {
    "tool_calls": list, "annotations": list, "audio": dict, "logprobs": dict, "system_fingerprint": str,
    "function_call": dict, "logit_bias": dict, "store": bool, "stream_options": dict, "prediction": dict,
    "modalities": list, "prompt_cache_key": str, "safety_identifier": str, "functions": list,
    "prompt_tokens_details/audio_tokens": int, "completion_tokens_details/audio_tokens": int,
    "completion_tokens_details/accepted_prediction_tokens": int,
    "completion_tokens_details/rejected_prediction_tokens": int, "expires_at": int,
}  # fmt: skip
"""Members that every flavour of the family takes from its sisters, and the type that they must have for it."""

USAGE: Final = {
    "prompt_tokens": "input", "completion_tokens": "output", "prompt_tokens_details/cached_tokens": "cache_read",
    "prompt_tokens_details/cache_write_tokens": "cache_write",
    "completion_tokens_details/reasoning_tokens": "reasoning",
}  # fmt: skip
CACHED_ON_TOP: Final = {
    "cached_tokens" if field == "cache_read" else path: field for path, field in USAGE.items()
}  # fmt: skip
PLACES: Final = {
    **{row.name: row.path.partition("/")[0] for row in OPTIONS},
    **{field: path for path, field in USAGE.items()}, "id": "id", "model": "model", "created": "created",
    "usage": "usage", "cache": "cache_control", "max_tokens": "max_completion_tokens",
    "response_format": "response_format", "tool_choice": "tool_choice", "candidates": "choices",
}  # fmt: skip
TOOL: Final = {"name": "name", "description": "description", "schema": "parameters", "strict": "strict"}
"""Field of a tool → its member."""

LIMITS: Final = Limits(call_id=Spelling(most=40), tool_name=Spelling("[a-zA-Z0-9_-]", 64))
"""platform.openai.com, chat/create: names of tools and lengths of ids, read 2026-11."""


class Flavour(msgspec.Struct, frozen=True):
    """What sets one dialect of the family apart."""

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
    special: tuple[tuple[str, Writer], ...] = ()
    unknown_options: frozenset[str] = frozenset()
    kin: Kin = {}


# Blocks of a content list ---------------------------------------------------------------------------------------------


def _write_url(part: ir.Media, out: dict[str, Any], ledger: Ledger) -> bool:
    body = out[out["type"]]
    if part.detail not in DETAILS and not ledger.is_home:
        body.pop("detail", None)
    return ledger.is_home or part.kind == "image"  # the SDK that Kimi names as its own has no word for films


def read_audio(members: Members, fields: dict[str, Any]) -> bool:
    """Read the format of a sound, which is said by name."""
    form = fields.pop("media_type")
    fields["media_type"] = AUDIO_TYPES.get(form, f"audio/{form}")
    return True


def _write_audio(part: ir.Media, out: dict[str, Any], ledger: Ledger) -> bool:
    form = AUDIO_FORMATS.get(part.media_type or "audio/wav")
    if form is None and ledger.is_home:
        form = (part.media_type or "").partition("/")[2]
    if form is None:
        return False
    out["input_audio"]["format"] = form
    return True


def _read_file(members: Members, fields: dict[str, Any]) -> bool:
    if "url" in fields:  # base64 without the head of a data URL
        fields["data"] = fields.pop("url")
    return ("data" in fields) != ("file_id" in fields)


def _write_file(part: ir.Media, out: dict[str, Any], ledger: Ledger) -> bool:
    body = out.setdefault("file", {})
    if part.data is None:
        body.pop("file_data", None)
        if part.file_id is None or (ledger.source not in ("openai", "codex", "copilot") and not ledger.is_home):
            return False
    else:
        body.pop("file_id", None)
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


def blocks_of(name: str) -> Blocks:
    """Return the family's table of blocks."""
    urls = {"image_url/url!": "address", "image_url/detail": "detail"}
    films = {"video_url/url!": "address", "video_url/detail": "detail"}
    return Blocks(name, (
        Block("text", ir.Text, {"text!": "text"}),
        Block("refusal", ir.Refusal, {"refusal!": "text"}),
        Block("image_url", ir.Media, urls, {"kind": "image"}, write=_write_url),
        Block("video_url", ir.Media, films, {"kind": "video"}, write=_write_url),
        Block("input_audio", ir.Media, {"input_audio/data!": "data", "input_audio/format!": "media_type"},
              {"kind": "audio"}, read=read_audio, write=_write_audio),
        Block("file", ir.Media, {"file/file_data": "address", "file/file_id": "file_id", "file/filename": "name"},
              {"kind": "document"}, read=_read_file, write=_write_file),
        Block("thinking", ir.Thinking, {"thinking!": "text"}, types={"text": (str, list)}, read=_read_thoughts,
              is_written=False),
    ), cache="cache_control")  # fmt: skip


class Chat:
    """The functions of one flavour."""

    def __init__(self, flavour: Flavour) -> None:
        self.flavour = flavour
        self.name = flavour.name
        self.blocks = blocks_of(flavour.name)

    # Messages, read

    def read_part(self, value: Json, at: str) -> ir.Part:
        """Read one member of a content list."""
        found = self.blocks.read(value, at)
        if found is None and kind_of(value) == "image_url" and type(value.get("image_url")) is str:
            found = self.blocks.read({**value, "image_url": {"url": value["image_url"]}}, at)
            found = None if found is None else msgspec.structs.replace(found, raw=value)
        return found or ir.Opaque(dialect=self.name, label=str(kind_of(value)), payload=value, at=at, raw=value)

    def read_message(self, value: Json, at: str, calls: Calls) -> ir.Message:
        """Read one message; its role may be old, or missing."""
        members = Members(value, at)
        native_role = members.take("role")
        role = ROLES.get(native_role or "", "user")
        name = members.take("name")
        if role == "tool":
            return self._read_result(members, value, native_role, name, calls)
        parts, flat = read_content(members, "content", self.read_part)
        if role == "assistant":
            parts = self._read_assistant(members, parts, at, calls)
        return ir.Message(
            role=role, parts=parts, native_role=native_role, name=name, flat=flat, at=at, ext=members.ext(self.name),
            raw=value,
        )  # fmt: skip

    def _read_assistant(
        self, members: Members, content: tuple[ir.Part, ...], at: str, calls: Calls
    ) -> tuple[ir.Part, ...]:
        """Put an assistant's members in the order in which they were said: thinking, text, refusal, sound, calls."""
        parts: list[ir.Part] = []
        for field in self.flavour.thinking_fields:
            if not parts and (text := members.take(field)) is not None:
                proof = members.take(self.flavour.signature_field) if self.flavour.signature_field else None
                proof_at = f"{at}/{self.flavour.signature_field}" if proof is not None else ""
                parts.append(
                    ir.Thinking(text=text, field=field, signature=proof, signature_at=proof_at, at=f"{at}/{field}")
                )
        parts += content
        if (refusal := members.take("refusal")) is not None:
            parts.append(ir.Refusal(text=refusal, at=f"{at}/refusal"))
        if members.rest.get("audio") is not None and (audio := members.take("audio", dict)) is not None:
            inner = Members(audio, f"{at}/audio")
            parts.append(ir.Media(
                kind="audio", file_id=inner.take("id"), data=inner.take("data"), transcript=inner.take("transcript"),
                at=inner.at, ext=inner.ext(self.name),
            ))  # fmt: skip
        if (old := members.take("function_call", dict)) is not None:
            parts.append(self._read_old_call(old, f"{at}/function_call", calls))
        if members.rest.get("tool_calls"):
            found = members.take("tool_calls", list) or ()
            parts += [self.read_call(call, f"{at}/tool_calls/{place}", calls) for place, call in enumerate(found)]
        if members.rest.get("annotations"):
            self._cite(parts, members)
        return tuple(parts)

    def _read_old_call(self, value: dict[str, Any], at: str, calls: Calls) -> ir.Part:
        members = Members(value, at)
        name, text = members.take("name") or "", members.take("arguments")
        return ir.ToolUse(
            id=calls.make(name), id_made=True, name=name, text=text, input=read_arguments(text or ""), at=at,
            ext=members.ext(self.name), raw=value,
        )  # fmt: skip

    def read_call(self, value: Json, at: str, calls: Calls) -> ir.Part:
        """Read one call of the list."""
        kind = kind_of(value) if type(value) is not dict or "type" in value else "function"
        inner = value.get(kind) if kind in ("function", "custom") else None
        if type(inner) is not dict or type(inner.get("name")) is not str:
            return ir.Opaque(dialect=self.name, label=f"call of type {kind}", payload=value, at=at, raw=value)
        members = Members(value, at)
        members.rest.pop("type", None)
        name, key = members.take(f"{kind}/name"), "arguments" if kind == "function" else "input"
        found = members.take(f"{kind}/{key}", str, *((dict,) if kind == "function" else ()))
        text = found if type(found) is str else None
        if type(found) is dict:  # some gateways send the object itself
            argued: Json = found
        else:
            argued = (text or "") if kind == "custom" else read_arguments(text or "")
        call_id = members.take("id") if members.rest.get("id") else None
        return ir.ToolUse(
            id=call_id or calls.make(name), id_made=not call_id, name=name, input=argued, text=text,
            kind="custom" if kind == "custom" else "function", at=at, ext=members.ext(self.name), raw=value,
        )  # fmt: skip

    def _cite(self, parts: list[ir.Part], members: Members) -> None:
        """Hang annotations on the message's text; they stay members where there is no single text."""
        places = [place for place, part in enumerate(parts) if type(part) is ir.Text]
        found = members.rest["annotations"]
        if len(places) != 1 or type(found) is not list or not all(
            type(one) is dict and one.get("type") == "url_citation" and type(one.get("url_citation")) is dict
            for one in found
        ):  # fmt: skip
            return
        del members.rest["annotations"]
        citations = []
        for place, one in enumerate(found):
            outer = Members(one, f"{members.at}/annotations/{place}")
            del outer.rest["type"]
            citations.append(ir.Citation(
                kind="url", url=outer.take("url_citation/url"), title=outer.take("url_citation/title"),
                start=outer.take("url_citation/start_index", int), end=outer.take("url_citation/end_index", int),
                at=outer.at, ext=outer.ext(self.name), raw=one,
            ))  # fmt: skip
        parts[places[0]] = msgspec.structs.replace(parts[places[0]], citations=tuple(citations))

    def _read_result(
        self, members: Members, value: Json, native_role: str | None, name: str | None, calls: Calls
    ) -> ir.Message:
        call_id = members.take("tool_call_id")
        content, flat = read_content(members, "content", self.read_part)
        result = ir.ToolResult(
            id=calls.answer(name or "") if call_id is None else call_id, id_made=call_id is None, name=name,
            content=content, flat=flat, at=members.at, ext=members.ext(self.name),
        )  # fmt: skip
        return ir.Message(role="tool", parts=(result,), native_role=native_role, at=members.at, raw=value)

    # Messages, written

    def write_messages(self, messages: tuple[ir.Message, ...], ledger: Ledger) -> list[Json]:
        """Write the messages; results leave a mixed message and come first, each as a message of its own.

        What only a user may show moves out of the results into a message after the last of them: between a call and
        its result no other message may stand.
        """
        out: list[Json] = []
        shown: list[Json] = []
        for message in messages:
            if unchanged(message, ledger, lambda: self.read_message(message.raw, message.at, calls_of(message))):  # noqa: B023
                out.append(message.raw)
                continue
            results = [part for part in message.parts if isinstance(part, ir.ToolResult)]
            others = tuple(part for part in message.parts if not isinstance(part, ir.ToolResult))
            if results and others and not isinstance(message.parts[0], ir.ToolResult):
                ledger.degrade(message.at, "order", "results come before the rest of their message")
            out += [self._write_result(self._show(result, shown, ledger), message, ledger) for result in results]
            if results:
                if not others:
                    put_ext(message, out[-1] if type(out[-1]) is dict else {}, ledger)
                    continue
                flat = None if is_plain(others) else message.flat
                message = msgspec.structs.replace(message, role="user", parts=others, native_role=None, flat=flat)
            if shown:
                out.append({"role": "user", "content": shown})
                shown = []
            out.append(self._write_message(message, ledger))
        return [*out, {"role": "user", "content": shown}] if shown else out

    def _show(self, result: ir.ToolResult, shown: list[Json], ledger: Ledger) -> ir.ToolResult:
        """Move what is no text out of a result into `shown`, after the id of its call; return what remains."""
        if ledger.is_home or all(isinstance(part, ir.Text) for part in result.content):
            return result
        moved: list[Json] = []
        rest: list[ir.Part] = []
        for part in result.content:
            if not isinstance(part, ir.Media) or part.text is not None:
                rest.append(part)
            elif (written := self.write_part(part, ledger)) is not None:
                ledger.degrade(part.at, "media", "a result takes only text here: it moved to a user's message after it")
                moved.append(written)
        if moved:
            shown += [{"type": "text", "text": f"From the result of {result.id}:"}, *moved]
        return msgspec.structs.replace(result, content=tuple(rest))

    def _write_result(self, result: ir.ToolResult, message: ir.Message, ledger: Ledger) -> Json:
        is_old = message.native_role == "function" and message.role == "tool" and ledger.is_home
        out: dict[str, Any] = {"role": "function" if is_old else "tool"}
        if not (result.id_made and ledger.is_home):
            out["tool_call_id"] = result.id
        if result.name is not None and (ledger.is_home or ledger.kin.get(ledger.source)):
            out["name"] = result.name
        texts = all(type(part) is ir.Text for part in result.content)
        if result.flat is False and (ledger.is_home or (len(result.content) > 1 and texts)):
            out["content"] = self._write_list(result.content, ledger)
        else:
            out["content"] = result_text(result, ledger)
        put_ext(result, out, ledger)
        for part in () if result.flat is False else result.content:
            put_ext(part, {}, ledger)
        return out

    def _write_message(self, message: ir.Message, ledger: Ledger) -> Json:
        native = message.native_role
        is_known = native in self.flavour.roles and ROLES.get(native or "") == message.role != "tool"
        is_own = ledger.is_home and native is not None and ROLES.get(native, "user") == message.role
        out: dict[str, Any] = {"role": native if is_known or is_own else message.role}
        if message.role == "tool" and not ledger.is_home:
            out["role"] = "user"  # only a result may speak as a tool
        if message.name is not None:
            out["name"] = message.name
        if message.role == "assistant":
            self.write_assistant(message, out, ledger, is_answer=False)
        else:
            content = self._write_content(message.parts, message.flat, ledger)
            out["content"] = content if content or ledger.is_home else ""
        put_ext(message, out, ledger)
        return out

    def _write_content(self, parts: tuple[ir.Part, ...], flat: bool | None, ledger: Ledger) -> Json:
        if not parts:
            return [] if flat is False else None
        if flat is not False and is_plain(parts):
            put_ext(parts[0], {}, ledger)
            return parts[0].text  # type: ignore[attr-defined]
        return self._write_list(parts, ledger)

    def _write_list(self, parts: tuple[ir.Part, ...], ledger: Ledger) -> list[Json]:
        out: list[Json] = []
        for part in parts:
            if is_own_raw(part, ledger):
                out.append(part.payload)  # type: ignore[attr-defined]
            elif (written := self.write_part(part, ledger)) is not None:
                out.append(written)
        return out

    def write_part(self, part: ir.Part, ledger: Ledger) -> Json:
        """Write one member of a content list; None where the target has no word for it."""
        if unchanged(part, ledger, lambda: self.read_part(part.raw, part.at)):
            return part.raw
        if isinstance(part, ir.Media) and not ledger.is_home:
            if part.text is not None:
                ledger.degrade(part.at, "media", "a document of plain text became a text")
                return {"type": "text", "text": part.text}
            is_address = part.kind == "image" and part.data is None and not self.flavour.has_image_urls
            if is_address or (part.kind == "document" and not self.flavour.has_files):
                lose_part(part, ledger)
                return None
        found = self.blocks.write(part, ledger)
        if found is None:
            lose_part(part, ledger)
        return found

    def write_assistant(self, message: ir.Message, out: dict[str, Any], ledger: Ledger, *, is_answer: bool) -> None:
        """Write what an assistant said: thinking, text, refusal and calls are members of their own."""
        content: list[ir.Part] = []
        calls: list[Json] = []
        for part in message.parts:
            if isinstance(part, ir.ToolUse):
                self._write_call(part, out, calls, ledger)
            elif isinstance(part, ir.Thinking) and not (part.raw is not None and ledger.is_home):
                self._write_thinking(part, out, ledger, is_answer=is_answer)
            elif isinstance(part, ir.Refusal) and (part.raw is None or not ledger.is_home):
                out["refusal"] = out.get("refusal", "") + part.text
                put_ext(part, {}, ledger)
            elif isinstance(part, ir.Media) and part.kind == "audio" and (part.file_id or part.transcript):
                self._write_spoken(part, out, ledger)
            elif isinstance(part, ir.Media) and part.text is None and not ledger.is_home:
                lose_part(part, ledger, "an assistant says only text here")
            elif isinstance(part, ir.Opaque) and part.label.startswith("call of type") and ledger.is_home:
                calls.append(part.payload)
            else:
                content.append(part)
        self._write_said(tuple(content), message, out, ledger, is_answer=is_answer)
        if calls:
            out["tool_calls"] = calls
        if "content" not in out and not ledger.is_home:
            out["content"] = None if calls or is_answer or "refusal" in out else ""

    def _write_said(
        self, parts: tuple[ir.Part, ...], message: ir.Message, out: dict[str, Any], ledger: Ledger, *, is_answer: bool
    ) -> None:
        is_list = ledger.is_home and message.flat is False
        if not is_answer or is_list:
            content = self._write_content(parts, message.flat, ledger)
            # A service refuses an empty list; one is written only where one was read.
            if content or content == "" or (is_list and content is not None):
                out["content"] = content
            return
        texts: list[str] = []
        for part in parts:
            if type(part) is ir.Text:
                self._write_citations(part, sum(map(len, texts)), out, ledger)
                texts.append(part.text)
                put_ext(part, {}, ledger)
            else:
                lose_part(part, ledger)
        if texts:
            out["content"] = "".join(texts)

    def _write_citations(self, part: ir.Text, begin: int, out: dict[str, Any], ledger: Ledger) -> None:
        for citation in part.citations:
            if (body := address_citation(citation, part, ledger, begin)) is not None:
                annotation: dict[str, Any] = {"type": "url_citation", "url_citation": body}
                put_ext(citation, annotation, ledger)
                out.setdefault("annotations", []).append(annotation)

    def _write_spoken(self, part: ir.Media, out: dict[str, Any], ledger: Ledger) -> None:
        pairs = (("id", part.file_id), ("data", part.data), ("transcript", part.transcript))
        out["audio"] = {key: value for key, value in pairs if value is not None}
        put_ext(part, out["audio"], ledger)

    def _write_thinking(self, part: ir.Thinking, out: dict[str, Any], ledger: Ledger, *, is_answer: bool) -> None:
        field = self.flavour.thinking_answer if is_answer else self.flavour.thinking_request
        if ledger.is_home:
            field = part.field or field or self.flavour.thinking_answer
        if part.redacted is not None or field is None:
            lose_part(part, ledger)
            return
        if not ledger.is_home:
            ledger.degrade(part.at, "thinking", f"thinking stands in {field}")
        out[field] = out.get(field, "") + part.text
        if part.signature is not None and self.flavour.signature_field is not None and ledger.is_home:
            out[self.flavour.signature_field] = part.signature
        put_ext(part, {}, ledger)

    def _write_call(self, part: ir.ToolUse, out: dict[str, Any], calls: list[Json], ledger: Ledger) -> None:
        if ledger.is_home and part.at.endswith("/function_call"):
            out["function_call"] = {"name": part.name, "arguments": arguments_text(part)}
            put_ext(part, out["function_call"], ledger)
            return
        if unchanged(part, ledger, lambda: self.read_call(part.raw, part.at, Calls([part.id]))):
            calls.append(part.raw)
            return
        body = {"name": part.name, "arguments" if part.kind == "function" else "input": arguments_text(part)}
        call: dict[str, Any] = {"type": part.kind, part.kind: body}
        if not (part.id_made and ledger.is_home):
            call["id"] = part.id
        put_ext(part, call, ledger)
        calls.append(call)

    # Requests

    def read_request(self, request: Json, ledger: Ledger, calls: Calls) -> ir.Conversation:
        """Read a request. Raises `TranslationError` `dialect_mapping_failed`, it has no list of messages."""
        members = Members(request, "")
        found = members.need("messages")
        messages = tuple(self.read_message(message, f"/messages/{place}", calls) for place, message in enumerate(found))
        options: dict[str, Any] = {}
        places: dict[str, str] = {}
        read_options(members, OPTIONS, options, places)
        if (text := members.take("stop")) is not None:
            options["stop"], places["stop"] = [text], "/stop"
        read_choice(members, options, places)
        read_format(members, options, places)
        return ir.Conversation(
            dialect=self.name, messages=messages, model=members.take("model"), options=options,
            tools=codec.take_tools(members, self.read_tool),
            options_at=places, ext=members.ext(self.name),
        )  # fmt: skip

    def write_request(self, conversation: ir.Conversation, ledger: Ledger) -> dict[str, Any]:
        """Write a request."""
        out: dict[str, Any] = {"messages": self.write_messages(conversation.messages, ledger)}
        if conversation.model is not None:
            out["model"] = conversation.model
        if tools := write_tools(conversation.tools, ledger, self.write_tool):
            out["tools"] = tools
        unknown = self.flavour.unknown_options
        other = "max_tokens" if self.flavour.max_tokens == "max_completion_tokens" else "max_completion_tokens"
        if conversation.options_at.get("max_tokens") == f"/{other}" and ledger.is_home:
            other = self.flavour.max_tokens
        table = tuple(row for row in OPTIONS if row.name not in unknown and row.path != other)
        write_options(conversation, out, ledger, table, {**self._special(conversation), **dict(self.flavour.special)})
        put_ext(conversation, out, ledger)
        if not ledger.is_home:
            require(out, {"model": "unknown"})
        return out

    def _special(self, conversation: ir.Conversation) -> dict[str, Writer]:
        def choice(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
            if value["mode"] != "tool":
                out["tool_choice"] = value["mode"]
            elif (kind := chosen_kind(value, conversation, ledger, at)) is not None:
                kind = "custom" if kind == "custom" else "function"
                out["tool_choice"] = {"type": kind, kind: {"name": value["name"]}}

        return {"tool_choice": choice, "response_format": _write_format, "reasoning_budget": _write_budget,
                **({} if "metadata" in self.flavour.unknown_options else {"metadata": write_metadata})}  # fmt: skip

    def read_tool(self, tool: Json, at: str) -> ir.ToolSpec:
        """Read one tool definition; a type that only the vendor runs becomes kind `server`."""
        kind = kind_of(tool)
        inner = tool.get(kind) if kind in ("function", "custom") else None
        if type(inner) is not dict or type(inner.get("name")) is not str:
            return ir.ToolSpec(name=_server_name(tool), kind="server", payload=tool, at=at)
        paths = {field: f"{kind}/{name}" for field, name in TOOL.items()}
        return codec.read_tool(tool, at, self.name, paths, kind, cache=True)

    def write_tool(self, tool: ir.ToolSpec, ledger: Ledger) -> Json:
        """Write one tool definition."""
        if unchanged(tool, ledger, lambda: self.read_tool(tool.raw, tool.at)):
            return tool.raw
        out: dict[str, Any] = {"type": tool.kind, tool.kind: {}}
        if tool.cache is not None and ledger.is_home:
            out["cache_control"] = {"type": "ephemeral", **tool.cache}
        return codec.write_tool(tool, out, ledger, {field: f"{tool.kind}/{name}" for field, name in TOOL.items()})

    # Answers

    def read_answer(self, response: Json, ledger: Ledger, calls: Calls) -> ir.Answer:
        """Read a response; a body that only says an error becomes an answer without candidates."""
        members = Members(response, "")
        rest = members.rest
        if rest.get("choices") is None and ("error" in rest or rest.get("object") == "error"):
            return failed_answer(self.name, members, rest.get("message"))
        found = members.need("choices")
        candidates = tuple(self._read_choice(choice, place, calls) for place, choice in enumerate(found))
        members.skip("object", "chat.completion")
        usage = codec.take_usage(members, self.read_usage)
        return ir.Answer(
            dialect=self.name, id=members.take("id"), model=members.take("model"),
            created=members.take("created", *NUMBER), candidates=candidates, usage=usage, ext=members.ext(self.name),
        )  # fmt: skip

    def _read_choice(self, choice: Json, place: int, calls: Calls) -> ir.Candidate:
        at = f"/choices/{place}"
        members = Members(choice, at)
        members.skip("index", place)
        body = members.take("message", dict) or {}
        message = self.read_message({"role": "assistant", **body}, f"{at}/message", calls)
        raw = members.take("finish_reason")
        return ir.Candidate(
            message=message, stop=ENDINGS.read(raw, message.parts), stop_raw=raw, stop_at=f"{at}/finish_reason", at=at,
            ext=members.ext(self.name), raw=choice,
        )  # fmt: skip

    def read_usage(self, usage: dict[str, Any], at: str) -> ir.Usage:
        """Read token counters; the family's input includes what the cache gave."""
        on_top = "cached_tokens" in usage and "cached_tokens" not in (usage.get("prompt_tokens_details") or {})
        return codec.read_counters(usage, at, self.name, CACHED_ON_TOP if on_top else USAGE)

    def write_answer(self, answer: ir.Answer, ledger: Ledger) -> dict[str, Any]:
        """Write a response."""
        out: dict[str, Any] = {}
        if answer.error is not None and not answer.candidates:
            return failed_body(answer, ledger, {**OPENAI_ERROR, "message": answer.error})
        for key, value in (("id", answer.id), ("created", answer.created), ("model", answer.model)):
            if value is not None:
                out[key] = int(value) if key == "created" and not ledger.is_home else value
        out["choices"] = [
            self._write_choice(candidate, place, ledger) for place, candidate in enumerate(answer.candidates)
        ]
        if answer.usage is not None:
            out["usage"] = self.write_usage(answer.usage, ledger)
        put_ext(answer, out, ledger)
        out.setdefault("object", "chat.completion")
        if not ledger.is_home:
            require(out, {"id": "chatcmpl-translated", "created": 0, "model": "unknown"})
        return out

    def _write_choice(self, candidate: ir.Candidate, place: int, ledger: Ledger) -> Json:
        source = candidate.message
        message: dict[str, Any] = {} if source.name is None else {"name": source.name}
        self.write_assistant(source, message, ledger, is_answer=True)
        put_ext(source, message, ledger)
        native = source.native_role if ledger.is_home else None
        message.setdefault("role", native if native is not None else "assistant")
        choice: dict[str, Any] = {"message": message, "index": place}
        takes_raw = ledger.source in ledger.kin and candidate.stop_raw in OWN_STOPS
        if (word := ENDINGS.write(candidate, ledger, takes_raw=takes_raw)) is not None:
            choice["finish_reason"] = word
        put_ext(candidate, choice, ledger)
        if not ledger.is_home:
            _keep_valid(choice, candidate, ledger)
        return choice

    def write_usage(self, usage: ir.Usage, ledger: Ledger) -> Json:
        """Write token counters."""
        table = CACHED_ON_TOP if self.flavour.cached_tokens_on_top else USAGE
        out = codec.write_counters(usage, ledger, table, ("input", "output"))
        out.setdefault("total_tokens", (usage.input or 0) + (usage.output or 0))
        return out


def read_choice(members: Members, options: dict[str, Any], places: dict[str, str]) -> None:
    """Take which tool the model has to call."""
    choice = members.rest.get("tool_choice")
    if type(choice) is str and choice in ("auto", "none", "required"):
        options["tool_choice"] = {"mode": choice}
    elif type(choice) is dict and (kind := kind_of(choice)) in ("function", "custom"):
        inner = choice.get(kind) if kind in choice else {key: choice[key] for key in choice if key != "type"}
        is_named = type(inner) is dict and list(inner) == ["name"] and type(inner["name"]) is str
        if len(choice) != 2 or type(inner) is not dict or not is_named:
            return
        options["tool_choice"] = {"mode": "tool", "name": inner["name"], "kind": kind}
    else:
        return
    del members.rest["tool_choice"]
    places["tool_choice"] = "/tool_choice"


def form_of(found: Json, body: Json) -> dict[str, Any] | None:
    """Read the form of an answer as OpenAI says it; `body` is what is said of a schema."""
    if found == {"type": "text"}:
        return {"type": "text"}
    if found == {"type": "json_object"}:
        return {"type": "json"}
    if kind_of(found) != "json_schema" or type(body) is not dict:
        return None
    if any(key not in FORMAT_MEMBERS or value is None for key, value in body.items()):
        return None
    return {**body, "type": "schema"}


def form_words(value: dict[str, Any], ledger: Ledger) -> tuple[str, dict[str, Any]]:
    """Return OpenAI's word for the form of an answer, and what is said of its schema."""
    if value["type"] != "schema":
        return ("json_object" if value["type"] == "json" else "text"), {}
    body: dict[str, Any] = {key: value[key] for key in FORMAT_MEMBERS if key in value}
    if not ledger.is_home:
        body.setdefault("name", "answer")
    return "json_schema", body


def read_format(members: Members, options: dict[str, Any], places: dict[str, str]) -> None:
    """Take the form that the answer must have."""
    found = members.rest.get("response_format")
    body = found.get("json_schema") if type(found) is dict and len(found) == 2 else None
    form = form_of(found, body)
    if form is not None:
        del members.rest["response_format"]
        options["response_format"] = form
        places["response_format"] = "/response_format" + ("/json_schema" if form["type"] == "schema" else "")


def _write_format(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    word, body = form_words(value, ledger)
    out["response_format"] = {"type": word, word: body} if word == "json_schema" else {"type": word}


def _write_budget(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if "reasoning_effort" in out:
        ledger.drop(at, "option", "the target has the effort in words only", value)
        return
    out["reasoning_effort"] = effort_of(value)
    ledger.degrade(at, "option_value", f"tokens for thinking became the word {effort_of(value)}", value)


def write_metadata(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    """Write the caller's labels, which are texts at OpenAI."""
    if ledger.is_home or all(type(label) is str for label in value.values()):
        out["metadata"] = value
    else:
        ledger.drop(at, "option_value", "labels are texts here", value)


def _server_name(tool: Json) -> str:
    if type(tool) is not dict:
        return "unreadable"
    inner = tool.get("function")
    return str(inner.get("name") if type(inner) is dict else tool.get("type", "unnamed"))


def _keep_valid(choice: dict[str, Any], source: ir.Candidate, ledger: Ledger) -> None:
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
