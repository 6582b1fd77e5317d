"""The vendors' own SDKs as referees: whether a document is valid, and what a stream adds up to.

Absent SDKs make a skip with the counted reason `needs openai SDK`; nothing of ours judges itself here. The made-up
vendor's SDK is its page as types.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import warnings
from typing import Any

import pytest

FAMILY = {"openai": "chat", "kimi": "chat", "copilot": "chat", "claude": "claude", "gemini": "gemini", "codex": "codex"}
SDK_OF = {"chat": "openai", "codex": "openai", "claude": "anthropic", "gemini": "google.genai"}


def sdk(name: str) -> Any:
    """Load a module of an SDK; these are not installed where the types are checked."""
    return importlib.import_module(name)


def have(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def need(*dialects: str) -> None:
    """Skip the test unless the SDKs of these dialects are here."""
    for dialect in dialects:
        name = SDK_OF[FAMILY[dialect]]
        if not have(name):
            pytest.skip(f"needs {name} SDK: not installed (python3 xtask.py referees)")


# Validity -------------------------------------------------------------------------------------------------------------


@functools.cache
def _adapter(family: str) -> Any:
    pydantic = sdk("pydantic")

    if family == "chat":
        CompletionCreateParamsNonStreaming = sdk(
            "openai.types.chat.completion_create_params"
        ).CompletionCreateParamsNonStreaming
        CompletionCreateParamsStreaming = sdk(
            "openai.types.chat.completion_create_params"
        ).CompletionCreateParamsStreaming

        return pydantic.TypeAdapter(CompletionCreateParamsStreaming | CompletionCreateParamsNonStreaming)
    if family == "codex":
        ResponseCreateParamsNonStreaming = sdk(
            "openai.types.responses.response_create_params"
        ).ResponseCreateParamsNonStreaming
        ResponseCreateParamsStreaming = sdk(
            "openai.types.responses.response_create_params"
        ).ResponseCreateParamsStreaming

        return pydantic.TypeAdapter(ResponseCreateParamsStreaming | ResponseCreateParamsNonStreaming)
    MessageCreateParamsNonStreaming = sdk("anthropic.types.message_create_params").MessageCreateParamsNonStreaming
    MessageCreateParamsStreaming = sdk("anthropic.types.message_create_params").MessageCreateParamsStreaming

    return pydantic.TypeAdapter(MessageCreateParamsStreaming | MessageCreateParamsNonStreaming)


def invalid(dialect: str, kind: str, document: Any) -> str | None:
    """Return why the vendor's own types refuse a document, None when they take it."""
    family = FAMILY[dialect]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind == "response":
                _answer_type(family).model_validate_json(json.dumps(document))
            elif family == "gemini":
                _check_gemini(document)
            else:
                _consume(_adapter(family).validate_python(without_films(document) if dialect == "kimi" else document))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:400]}"
    return None


def without_films(document: Any) -> Any:
    """Leave out what Kimi's page has beside the SDK that it recommends: films as data or by a file's id.

    platform.kimi.ai, docs/api/chat, read 2026-11.
    """
    messages = []
    for message in document["messages"]:
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": [block for block in content if not is_film(block)]}
        messages.append(message)
    return {**document, "messages": messages}


def is_film(block: dict[str, Any]) -> bool:
    return block["type"] == "video_url" and str(block["video_url"]["url"]).startswith(("data:video/", "ms://"))


@functools.cache
def _chunk_adapter(family: str) -> Any:
    types = {
        "chat": ("openai.types.chat", "ChatCompletionChunk"),
        "codex": ("openai.types.responses", "ResponseStreamEvent"),
        "claude": ("anthropic.types", "RawMessageStreamEvent"),
        "gemini": ("google.genai.types", "GenerateContentResponse"),
    }
    module, name = types[family]
    return sdk("pydantic").TypeAdapter(getattr(sdk(module), name))


def invalid_chunk(dialect: str, chunk: Any) -> str | None:
    """Return why the vendor's types refuse a chunk; errors have no type there."""
    family = FAMILY[dialect]
    if "error" in chunk and (family != "codex" or chunk.get("type") == "error"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _chunk_adapter(family).validate_json(json.dumps(chunk))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


def _consume(value: Any) -> None:
    """Walk a validated value: lists of typed dicts are only checked when they are read."""
    if isinstance(value, dict):
        for inner in value.values():
            _consume(inner)
    elif not isinstance(value, str | bytes) and hasattr(value, "__iter__"):
        for inner in value:
            _consume(inner)


def _answer_type(family: str) -> Any:
    if family == "chat":
        return sdk("openai.types.chat").ChatCompletion

    if family == "codex":
        return sdk("openai.types.responses").Response

    if family == "claude":
        return sdk("anthropic.types").Message

    return sdk("google.genai.types").GenerateContentResponse


def _check_gemini(document: dict[str, Any]) -> None:
    types = sdk("google.genai.types")

    members: dict[str, Any] = {
        "contents": types.Content, "systemInstruction": types.Content, "tools": types.Tool,
        "toolConfig": types.ToolConfig, "generationConfig": types.GenerationConfig,
        "safetySettings": types.SafetySetting,
    }  # fmt: skip
    for key, value in document.items():
        if key in ("model", "cachedContent", "labels"):
            continue
        for one in value if isinstance(value, list) else [value]:
            members[key].model_validate_json(json.dumps(one))


# What a stream adds up to ---------------------------------------------------------------------------------------------


class Refused(Exception):
    """The referee cannot read this stream."""


def facts(dialect: str, chunks: list[Any]) -> dict[str, Any]:
    """Let the vendor's accumulator add a stream up; return text, thinking, refusal, calls, counters, stop.

    Raises:
        Refused: the accumulator fails on it.
    """
    add = globals()[f"_{FAMILY[dialect]}_facts"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: dict[str, Any] = add(chunks)
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    return found


def _clean(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) and value else {}
    except ValueError:
        return value


def _chat_facts(chunks: list[Any]) -> dict[str, Any]:
    construct_type_unchecked = sdk("openai._models").construct_type_unchecked
    ChatCompletionStreamState = sdk("openai.lib.streaming.chat._completions").ChatCompletionStreamState
    ChatCompletionChunk = sdk("openai.types.chat").ChatCompletionChunk

    state: Any = ChatCompletionStreamState()
    usage: Any = None
    for chunk in chunks:
        if "sse_event" in chunk or ("error" in chunk and not chunk.get("choices")):
            continue
        state.handle_chunk(construct_type_unchecked(type_=ChatCompletionChunk, value=chunk))
        usage = chunk.get("usage") or next((c["usage"] for c in chunk["choices"] if c.get("usage")), usage)
    choice = state.current_completion_snapshot.choices[0]
    message = choice.message
    extra = message.model_extra or {}
    calls = [(call.id, call.function.name, _clean(call.function.arguments)) for call in message.tool_calls or ()]
    old = message.function_call
    if old is not None:
        calls.append((None, old.name, _clean(old.arguments)))
    return {
        "text": message.content or "",
        "thinking": next((extra[k] for k in ("reasoning_content", "reasoning", "reasoning_text") if extra.get(k)), ""),
        "refusal": message.refusal or "",
        "calls": calls,
        "usage": chat_usage(usage),
        "stop": choice.finish_reason,
    }


def chat_usage(usage: Any) -> Any:
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens", usage.get("cached_tokens"))
    return (
        usage.get("prompt_tokens"),
        usage.get("completion_tokens"),
        cached or 0,
        details.get("cache_write_tokens") or 0,
    )


def _claude_facts(chunks: list[Any]) -> dict[str, Any]:
    construct_type_unchecked = sdk("anthropic._models").construct_type_unchecked
    accumulate_event = sdk("anthropic.lib.streaming._messages").accumulate_event
    RawMessageStreamEvent = sdk("anthropic.types").RawMessageStreamEvent

    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for chunk in chunks:
        if chunk.get("type") in ("ping", "error"):
            continue
        event: Any = construct_type_unchecked(type_=RawMessageStreamEvent, value=chunk)
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    blocks = snapshot.content
    usage = snapshot.usage
    return {
        "text": "".join(block.text for block in blocks if block.type == "text"),
        "thinking": "".join(block.thinking for block in blocks if block.type == "thinking"),
        "refusal": "",
        "calls": [(block.id, block.name, block.input or {}) for block in blocks if block.type == "tool_use"],
        "usage": (
            usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0),
            usage.output_tokens, usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0,
        ),
        "stop": snapshot.stop_reason,
    }  # fmt: skip


def _gemini_facts(chunks: list[Any]) -> dict[str, Any]:
    GenerateContentResponse = sdk("google.genai.types").GenerateContentResponse

    out: dict[str, Any] = {"text": "", "thinking": "", "refusal": "", "calls": [], "usage": None, "stop": None}
    for chunk in chunks:
        if "error" in chunk:
            continue
        answer = GenerateContentResponse.model_validate_json(json.dumps(chunk))
        for candidate in [one for one in answer.candidates or () if not one.index]:
            for part in (candidate.content.parts if candidate.content else None) or ():
                if part.text:
                    out["thinking" if part.thought else "text"] += part.text
                if part.function_call is not None:
                    out["calls"].append(part.function_call)
            if candidate.finish_reason is not None:
                out["stop"] = candidate.finish_reason.value
        usage = answer.usage_metadata
        if usage is not None:
            out["usage"] = (
                (usage.prompt_token_count or 0) + (usage.tool_use_prompt_token_count or 0),
                (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0),
                usage.cached_content_token_count or 0, 0,
            )  # fmt: skip
    out["calls"] = _gemini_calls(out["calls"])
    return out


def _gemini_calls(found: list[Any]) -> list[Any]:
    """Add up calls whose arguments come in pieces, as the vendor's documentation says."""
    calls: list[Any] = []
    for call in found:
        if call.name:
            calls.append([call.id, call.name, dict(call.args or {})])
        for piece in call.partial_args or ():
            value = next((v for v in (piece.string_value, piece.number_value, piece.bool_value) if v is not None), None)
            _reach(calls[-1][2], (piece.json_path or "").removeprefix("$.").replace("[", ".[").split("."), value)
    return [tuple(call) for call in calls]


def _reach(inner: Any, steps: list[str], value: Any) -> None:
    for place, step in enumerate(steps):
        key: Any = int(step[1:-1]) if step.startswith("[") else step
        is_last = place + 1 == len(steps)
        empty: Any = [] if not is_last and steps[place + 1].startswith("[") else {}
        if isinstance(inner, list):
            inner.extend([None] * (key + 1 - len(inner)))
            before = inner[key]
        else:
            before = inner.get(key)
        if is_last:
            inner[key] = before + value if isinstance(before, str) and isinstance(value, str) else value
        else:
            inner[key] = before if before is not None else empty
            inner = inner[key]


def _codex_facts(chunks: list[Any]) -> dict[str, Any]:
    construct_type_unchecked = sdk("openai._models").construct_type_unchecked
    omit = sdk("openai._types").omit
    ResponseStreamState = sdk("openai.lib.streaming.responses._responses").ResponseStreamState
    ResponseStreamEvent = sdk("openai.types.responses").ResponseStreamEvent

    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    last: Any = None
    for chunk in chunks:
        event: Any = construct_type_unchecked(type_=ResponseStreamEvent, value=chunk)
        for done in state.handle_event(event):
            last = done
    response: Any = state._completed_response or getattr(last, "response", None)
    return response_facts(json.loads(response.model_dump_json(warnings=False)))


def response_facts(response: dict[str, Any]) -> dict[str, Any]:
    """The same of a whole Responses answer: the last event is the judge of a stream that the referee refuses."""
    out: dict[str, Any] = {"text": "", "thinking": "", "refusal": "", "calls": []}
    for item in response["output"]:
        for part in item.get("content") or ():
            if part["type"] == "output_text":
                out["text"] += part["text"]
            elif part["type"] == "refusal":
                out["refusal"] += part["refusal"]
            elif part["type"] == "reasoning_text" and not item.get("summary"):
                out["thinking"] += part["text"]
        out["thinking"] += "\n\n".join(part["text"] for part in item.get("summary") or ())
        if item["type"] == "function_call":
            out["calls"].append((item["call_id"], item["name"], _clean(item["arguments"])))
        elif item["type"] == "custom_tool_call":
            out["calls"].append((item["call_id"], item["name"], item["input"]))
    usage = response.get("usage")
    details = (usage or {}).get("input_tokens_details") or {}
    out["usage"] = usage and (
        usage["input_tokens"], usage["output_tokens"], details.get("cached_tokens") or 0,
        details.get("cache_write_tokens") or 0,
    )  # fmt: skip
    reason = (response.get("incomplete_details") or {}).get("reason")
    out["stop"] = f"{response.get('status')}:{reason}" if reason else response.get("status")
    return out
