"""Convert answers and streams to the contract's agent events, and orders to conversations.

The time of the events is an argument; no clock is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from backplane.contract import events
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.contract.work import WorkOrder
from backplane.dialects import ir
from backplane.dialects.streams import Accumulator, BlockReader
from backplane.errors import ConfigError

EPOCH: Final = "1970-01-01T00:00:00Z"
"""Time of an event if the caller gives none; a host sets its own."""


class State:
    """Has the reader of one stream and the answer so far, to translate the stream to agent events.

    Args:
        now: time of the events; may be changed before each chunk.
    """

    def __init__(self, dialect: str, reader: BlockReader, now: str = EPOCH) -> None:
        self.reader = reader
        self.now = now
        self.sum = Accumulator(dialect)


def end_events(state: State) -> list[AgentEvent]:
    """Return the agent events of the stream's end, also for blocks that are still open."""
    return say(state.reader.finish(), state)


def say(found: list[ir.StreamEvent], state: State) -> list[AgentEvent]:
    """Convert stream events to agent events; a call becomes one event when its arguments are complete."""
    out: list[AgentEvent] = []
    for event in found:
        state.sum.add(event)
        if type(event) is ir.PartDelta:
            if event.field == "text":
                block = state.sum.blocks.get((event.choice, event.index))
                if block is not None and type(block.part) is ir.Thinking:
                    out.append(_reasoning(event.text, None, state.now))
                else:
                    out.append(events.AssistantDelta(ts=state.now, text=event.text))
            continue
        made = _one(event, state)
        if made is not None:
            out.append(made)
    return out


def _one(event: ir.StreamEvent, state: State) -> AgentEvent | None:
    now = state.now
    if isinstance(event, ir.PartStarted):
        text = getattr(event.part, "text", None)
        if isinstance(event.part, ir.Thinking) and text:
            return _reasoning(text, None, now)
        if isinstance(event.part, ir.Text | ir.Refusal) and text:
            return events.AssistantDelta(ts=now, text=text)
        return None
    if isinstance(event, ir.PartStopped):
        part = state.sum.part(event.choice, event.index)
        if isinstance(part, ir.ToolUse):
            return _call(part, now)
        if isinstance(part, ir.Thinking) and (part.signature is not None or part.redacted is not None):
            return _reasoning("", part.signature, now, part.redacted)
        return None
    if isinstance(event, ir.Began):
        return (
            events.RunStarted(ts=now, message=f"model {event.model or 'unknown'}") if event.id or event.model else None
        )
    if isinstance(event, ir.UsageSeen):
        return usage_event(event.usage, now)
    if isinstance(event, ir.Stopped):
        return events.carry("turn", {"stop_reason": event.stop}, ts=now, message=f"the turn ended: {event.stop}")
    if isinstance(event, ir.StreamFailed):
        return events.Failed(ts=now, message=event.message, error_code="backend_unavailable")
    if isinstance(event, ir.StreamEnded):
        return events.RunCompleted(ts=now, message="the answer is complete")
    return None


def _reasoning(text: str, signature: str | None, now: str, redacted: str | None = None) -> AgentEvent:
    body: dict[str, Any] = {"text": text}
    body |= {name: proof for name, proof in (("signature", signature), ("redacted", redacted)) if proof is not None}
    return events.Reasoning(ts=now, text="", ext={"reasoning": body})


def _call(part: ir.ToolUse, now: str) -> AgentEvent:
    proof: Any = {} if part.signature is None else {"ext": {"signature": part.signature}}
    return events.ToolCall(ts=now, tool_name=part.name, input=part.input, tool_use_id=part.id, **proof)


def usage_event(usage: ir.TokenCounts, now: str) -> AgentEvent:
    """Return a usage event with the contract's names of the counters; they follow the rule of `ir.TokenCounts`."""
    pairs = (
        ("input_tokens", usage.input), ("output_tokens", usage.output), ("cache_read_tokens", usage.cache_read),
        ("cache_write_tokens", usage.cache_write), ("reasoning_tokens", usage.reasoning),
    )  # fmt: skip
    body = {name: value for name, value in pairs if value is not None}
    words = f"{usage.input or 0} tokens in, {usage.output or 0} out"
    return events.carry("usage", body, ts=now, message=words)


def answer_events(answer: ir.Answer, now: str = EPOCH) -> list[AgentEvent]:
    """Convert a whole answer to events: its blocks in order, then its token counts, then the end of the turn."""
    if answer.error is not None and not answer.candidates:
        return [events.Failed(ts=now, message=answer.error, error_code="backend_unavailable")]
    out: list[AgentEvent] = []
    for candidate in answer.candidates[:1]:
        out += [made for part in candidate.message.parts if (made := _whole(part, now)) is not None]
    if answer.usage is not None:
        out.append(usage_event(answer.usage, now))
    for candidate in answer.candidates[:1]:
        if candidate.stop is not None:
            body = {"stop_reason": candidate.stop}
            out.append(events.carry("turn", body, ts=now, message=f"the turn ended: {candidate.stop}"))
    return out


def _whole(part: ir.Part, now: str) -> AgentEvent | None:
    if isinstance(part, ir.Text | ir.Refusal):
        return events.AssistantMessage(ts=now, text=part.text)
    if isinstance(part, ir.Thinking):
        return _reasoning(part.text, part.signature, now, part.redacted)
    if isinstance(part, ir.ToolUse):
        return _call(part, now)
    if isinstance(part, ir.NativePart) and part.is_tool:
        return events.Warned(ts=now, message=f"the vendor ran {part.label} itself", ext={"raw_message": part.payload})
    if isinstance(part, ir.Media):
        return events.Warned(ts=now, message=f"the answer holds {part.kind} of type {part.media_type or 'unknown'}")
    return None


def order_conversation(
    order: WorkOrder, config: Mapping[str, Json], dialect: str, defaults: Mapping[str, Json]
) -> ir.Conversation:
    """Return the first request of an order.

    Args:
        config: `model`, `system`, `tools` (a list of name, description, schema) and any of `ir.OPTIONS`;
            missing settings come from the order, then from `defaults`.

    Raises:
        ConfigError: `config_invalid`, an unknown key.
    """
    settings = {**defaults, **config}
    if order.config.model is not None and "model" not in config:
        settings["model"] = order.config.model
    model, system, tools = settings.pop("model", None), settings.pop("system", None), settings.pop("tools", ())
    unknown = sorted(set(settings) - set(ir.OPTIONS))
    if unknown:
        raise ConfigError("config_invalid", f"no parameter {unknown[0]!r}", hint=f"there are {', '.join(ir.OPTIONS)}")
    messages = [ir.Message(role="system", parts=(ir.Text(text=system),))] if system else []
    messages.append(ir.Message(role="user", parts=(ir.Text(text=order_text(order)),)))
    return ir.Conversation(
        dialect=dialect, messages=tuple(messages), model=model, options=settings,
        tools=tuple(ir.ToolSpec(**tool) for tool in tools),
    )  # fmt: skip


def order_text(order: WorkOrder) -> str:
    """Return the task and the order's context as one text."""
    blocks = [order.task]
    blocks += [f"{snippet.name}:\n{snippet.content}" for snippet in order.context.snippets]
    if order.context.files:
        blocks.append("Files to look at: " + ", ".join(order.context.files))
    return "\n\n".join(blocks)
