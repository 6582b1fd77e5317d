"""Chunks that a vendor's SDK has made objects of: the frequent ones are read by their members, the rest as JSON.

For callers who keep the SDK as transport. No SDK is imported: the objects say by their members what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, AssistantDelta
from backplane.dialects import dialect
from backplane.dialects._events import State
from backplane.ir import Text


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
    text = None if quick is None else quick(found)
    if text is not None and (made := _continued(text, state)) is not None:
        return made
    mapped: list[AgentEvent] = dialect(name).map_stream_event(as_json(found), state)
    return mapped


def as_json(found: Any) -> Json:
    """Return the JSON that an SDK's object was made from, as far as it kept it."""
    return found.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _continued(text: str, state: State) -> list[AgentEvent] | None:
    """More text of the one block that is open; None where that is not so plain."""
    blocks = state.sum.blocks
    if len(blocks) != 1:
        return None
    ((_, block),) = blocks.items()
    # The first piece goes the long way, so that the reader knows that something was said.
    if type(block.part) is not Text or block.whole is not None or not block.texts:
        return None
    block.texts.append(text)
    return [AssistantDelta(ts=state.now, text=text)]


def _chat(found: Any) -> str | None:
    choices = getattr(found, "choices", None)
    if not choices or len(choices) != 1 or found.usage is not None:
        return None
    choice = choices[0]
    delta = choice.delta
    text = delta.content
    if choice.finish_reason is not None or delta.tool_calls or delta.model_extra or choice.index:
        return None
    return text if type(text) is str and text else None


def _messages(found: Any) -> str | None:
    if found.type != "content_block_delta":
        return None
    delta = found.delta
    return delta.text if delta.type == "text_delta" and found.index == 0 else None


def _responses(found: Any) -> str | None:
    return found.delta if found.type == "response.output_text.delta" else None


QUICK: Final[dict[str, Callable[[Any], str | None]]] = {
    "openai": _chat,
    "kimi": _chat,
    "copilot": _chat,
    "claude": _messages,
    "codex": _responses,
}
"""Dialect → the text of an object that only continues a text; the first vendors' SDKs put thinking elsewhere."""
