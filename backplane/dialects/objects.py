"""Chunks that a vendor's SDK has made objects of: the frequent ones are read by their members, the rest as JSON.

For callers who keep the SDK as transport. No SDK is imported: the objects say by their members what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, AssistantDelta
from backplane.dialects import dialect
from backplane.dialects.agent_events import State
from backplane.dialects.ir import Text


def map_object(name: str, found: Any, state: State) -> list[AgentEvent]:
    """Say one object of an SDK's stream as agent events.

    Args:
        name: the dialect.
        found: what the SDK's stream gave; anything with `model_dump`.
        state: the dialect's `StreamState`.

    Raises:
        TranslationError: `dialect_unknown`.
    """
    quick = QUICK.get(name)
    block = None if quick is None else _open_text(state)
    if quick is not None and block is not None and (text := quick(found, state)) is not None:
        out: list[AgentEvent] = []
        if text:
            block.texts.append(text)
            out.append(AssistantDelta(ts=state.now, text=text))
        return out + _counted(found, state) if name == "gemini" else out
    mapped: list[AgentEvent] = dialect(name).map_stream_event(as_json(found), state)
    state.last = found
    return mapped


def as_json(found: Any) -> Json:
    """Return the JSON that an SDK's object was made from, as far as it kept it."""
    return found.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _open_text(state: State) -> Any:
    """Return the one block that is open and is a text; None where that is not so plain."""
    blocks = state.sum.blocks
    if len(blocks) != 1:
        return None
    ((_, block),) = blocks.items()
    # The first piece goes the long way, so that the reader knows that something was said.
    return block if type(block.part) is Text and block.whole is None and block.texts else None


def _chat(found: Any, state: State) -> str | None:
    choices = getattr(found, "choices", None)
    if not choices or len(choices) != 1 or found.usage is not None:
        return None
    choice = choices[0]
    delta = choice.delta
    if delta is None:
        return None
    text = delta.content
    if choice.finish_reason is not None or delta.tool_calls or delta.model_extra or choice.index:
        return None
    return text if type(text) is str and text else None


def _messages(found: Any, state: State) -> str | None:
    if found.type != "content_block_delta":
        return None
    delta = found.delta
    return delta.text if delta.type == "text_delta" and found.index == 0 else None


def _responses(found: Any, state: State) -> str | None:
    if found.type != "response.output_text.delta":
        return None
    text: str | None = state.reader.go_on(found.delta)  # type: ignore[attr-defined]
    return text


CHUNK: Final = frozenset({"candidates", "usage_metadata", "model_version", "response_id", "sdk_http_response"})
CANDIDATE: Final = frozenset({"content", "index"})
CONTENT: Final = frozenset({"parts", "role"})
PART: Final = frozenset({"text"})
"""Members of a chunk of Gemini's that only continues a text; what stands beside them is read the long way."""


def _gemini(found: Any, state: State) -> str | None:
    candidates = found.candidates
    if not candidates or len(candidates) != 1 or not found.model_fields_set <= CHUNK:
        return None
    candidate = candidates[0]
    content = candidate.content
    if content is None or not candidate.model_fields_set <= CANDIDATE or candidate.index:
        return None
    parts = content.parts
    if not parts or len(parts) != 1 or parts[0].model_fields_set != PART or not content.model_fields_set <= CONTENT:
        return None
    text: str | None = state.reader.go_on(parts[0].text)  # type: ignore[attr-defined]
    return text


def _counted(found: Any, state: State) -> list[AgentEvent]:
    """Say the counters that every chunk repeats, where they are not those of the last one."""
    usage, before = found.usage_metadata, state.last.usage_metadata
    # The members themselves are compared: the objects' own comparison costs more than all the rest.
    if usage is None or (before is not None and usage.__dict__ == before.__dict__):
        return []
    state.last = found
    return dialect("gemini").map_stream_event({"usageMetadata": as_json(usage)}, state)  # type: ignore[no-any-return]


QUICK: Final[dict[str, Callable[[Any, State], str | None]]] = {
    "openai": _chat,
    "kimi": _chat,
    "copilot": _chat,
    "claude": _messages,
    "codex": _responses,
    "gemini": _gemini,
}
"""Dialect → the text of an object that only continues a text; the first vendors' SDKs put thinking elsewhere."""
