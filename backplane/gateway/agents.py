"""A whole agent as a model: a request becomes a run in a configured folder, and the run's events become the answer.

The agent works in a copy of the folder. If it made a patch, the answer ends with the command that applies it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from backplane.config import GatewayAgentSettings
from backplane.contract.events import AgentEvent, AssistantDelta, AssistantMessage, Reasoning, ToolCall
from backplane.dialects import check_losses, dialect
from backplane.dialects.ir import (
    Began,
    Conversation,
    Loss,
    Message,
    PartDelta,
    PartStarted,
    PartStopped,
    Stopped,
    StreamEnded,
    StreamEvent,
    StreamFailed,
    Text,
    Thinking,
    TokenCounts,
    UsageSeen,
)
from backplane.errors import BackplaneError, ConfigError, TranslationError
from backplane.gateway.answers import date
from backplane.gateway.exchange import ExchangeReport, ReplySink
from backplane.gateway.frames import encode
from backplane.gateway.fronts import ClientCall, stream_of
from backplane.gateway.routes import AgentTarget, Answering
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from backplane.upstream.cost import MICROS

PREFIX: Final = "agent/"
"""Prefix of an agent's name as a model."""
NAME: Final = "agent"
"""Name of the events' dialect in losses."""
TOOL_CHARS: Final = 200
"""Maximum length of a tool call as it is shown among the thinking."""


def agent_targets(plane: ControlPlane, agents: Mapping[str, GatewayAgentSettings]) -> dict[str, AgentTarget]:
    """Return the agents as targets, by their names as models.

    Raises:
        ConfigError: `config_invalid`, an agent's folder does not exist.
        BackendError: `backend_not_found`, an agent's backend does not exist.
    """

    def target(name: str, row: GatewayAgentSettings) -> AgentTarget:
        backend, model = row.backend or name, f"{PREFIX}{name}"
        plane.find_backend(backend)
        if not os.path.isdir(row.root):
            fact = f"gateway.agents.{name}: there is no folder {row.root!r}"
            raise ConfigError("config_invalid", fact, hint="name the folder that the agent works on in `root`")

        def work(call: ClientCall, document: dict[str, Any], body: bytes) -> AgentExchange:
            return AgentExchange(plane, row, backend, call, document, body)

        return AgentTarget(backend=backend, model=model, work=work)

    return {f"{PREFIX}{name}": target(name, row) for name, row in agents.items()}


class AgentExchange:
    """One request that an agent answers."""

    def __init__(
        self, plane: ControlPlane, row: GatewayAgentSettings, backend: str, call: ClientCall,
        document: dict[str, Any], body: bytes,
    ) -> None:  # fmt: skip
        self.call, self.document, self.size = call, document, len(body)
        self.stream, self.longest = stream_of(call, document), None
        self.report = ExchangeReport()
        self._plane, self._row, self._backend = plane, row, backend

    async def run(self, targets: Sequence[Answering], reply: ReplySink) -> None:
        """Run the agent, and send its events as an answer.

        Raises:
            TranslationError: the request has no text of a user, continues a stored answer, or has parts that an agent
                does not get while `gateway.losses` is `fail`.
            BackplaneError: the run could not be started, or it failed before any of its answer was sent.
        """
        self.report.target = targets[0]
        if self.document.get("previous_response_id") is not None:
            raise TranslationError("dialect_mapping_failed", "an agent keeps no answers; send the whole conversation")
        conversation = self.call.front.read(self.document).value
        self.report.losses = tuple(_lost(conversation))
        if self._plane.settings.gateway.losses == "fail":
            check_losses(self.report.losses, "fail")
        losses = ("x-backplane-losses", str(len(self.report.losses)))
        reply.expect([("content-type", self.call.kind), losses])
        given: Any = {"root": self._row.root, "policy": self._row.policy, "model": self._row.model}
        async with self._plane.start(task_of(conversation), self._backend, **given) as run:
            self.report.was_asked = True
            answer = _Answer(self.call, self.document, targets[0].model, run.id, stream=self.stream)
            kind = self.call.kind if self.stream else "application/json"
            head = [("content-type", kind), ("x-backplane-run", run.id), losses]
            async for event in run:
                if (data := answer.take(event)) and self.stream:
                    await reply.begin(200, head)
                    await reply.piece(data)
            await run.wait()
        self._note(run)
        if run.error is not None:
            if not reply.has_content:
                raise run.error
            await reply.piece(answer.fail(run.error))
            return
        data = answer.end(_last_words(run), self.report.tokens)
        if self.stream:
            await reply.begin(200, head)
            await reply.piece(data)
        else:
            await reply.whole(200, head, data)

    def _note(self, run: Run) -> None:
        """Copy the run's tokens, cost and failure into the report."""
        usage = run.stored.usage
        if usage.input_tokens is not None and usage.output_tokens is not None:  # Otherwise they would be shown as 0.
            self.report.tokens = TokenCounts(
                input=usage.input_tokens, output=usage.output_tokens, cache_read=usage.cache_read_tokens,
                cache_write=usage.cache_write_tokens,
            )  # fmt: skip
        cost = usage.estimated_cost_usd
        self.report.cost = None if cost is None else round(cost * MICROS)
        self.report.failure = None if run.error is None else run.error.message


def task_of(conversation: Conversation) -> str:
    """Return a task for an agent: the user's last message, after the text of all messages before it.

    Raises:
        TranslationError: `dialect_mapping_failed`, no message of a user has text.
    """
    said = [(message.role, _text(message)) for message in conversation.messages]
    said = [(role, text) for role, text in said if text.strip()]
    last = next((place for place in range(len(said) - 1, -1, -1) if said[place][0] == "user"), None)
    if last is None:
        raise TranslationError("dialect_mapping_failed", "the request has no words of a user")
    before = [f"{role}: {text}" for role, text in said[:last]]
    task = said[last][1]
    return "\n\n".join(["The conversation so far:", *before, "Now do this:", task]) if before else task


def _text(message: Message) -> str:
    return "\n".join(part.text for part in message.parts if isinstance(part, Text))


def _lost(conversation: Conversation) -> list[Loss]:
    """Return a loss for each tool, part and option of a request that an agent does not get."""
    found = [(tool.at, "tool", "an agent has tools of its own") for tool in conversation.tools]
    found += [
        (part.at, "part", "only words go to an agent")
        for message in conversation.messages
        for part in message.parts
        if not isinstance(part, Text | Thinking)
    ]
    found += [(f"/{name}", "option", "an agent chooses it itself") for name in conversation.options if name != "stream"]
    return [
        Loss(path=at, dialect=conversation.dialect, target=NAME, kind="dropped", code=code, reason=reason)
        for at, code, reason in found
    ]


def _last_words(run: Run) -> str:
    """Return the commands to show after an answer: `why` if the run is not complete, `apply` if it has a patch."""
    outcome = run.stored.outcome
    why = "" if outcome == "complete" else f"\n\nThe run ended as {outcome}: backplane why {run.id}"
    return why + (f"\n\nbackplane apply {run.id}" if run.patch is not None else "")


class _Answer:
    """Writes a run's events as an answer in the client's dialect; reasoning and tool calls become thinking."""

    def __init__(self, call: ClientCall, document: dict[str, Any], model: str, id: str, *, stream: bool) -> None:
        self._stream, self._front = stream, call.front
        self._writer = call.front.writer(NAME, document)
        self._began = Began(id=id, model=model)
        self._index, self._open = -1, ""
        self._in_pieces = False
        self._now_s = int(time.time())
        self.has_words = False
        self._frames = call.frames()

    def take(self, event: AgentEvent) -> bytes:
        """Return the bytes that an event adds to a stream."""
        if isinstance(event, Reasoning):
            return self._more("thinking", event.reasoning)
        if isinstance(event, AssistantDelta):
            self._in_pieces = True
            return self._more("text", event.text)
        if isinstance(event, AssistantMessage):
            was_shown, self._in_pieces = self._in_pieces, False
            return b"" if was_shown else self._more("text", event.text)
        if isinstance(event, ToolCall):
            return self._more("thinking", f"\n[{event.tool_name} {event.input}]"[:TOOL_CHARS] + "\n")
        return b""

    def end(self, words: str, tokens: TokenCounts | None) -> bytes:
        """Return the last bytes of a stream, or the whole answer if it is not streamed.

        Args:
            words: text to add at the end; may be empty.
            tokens: the run's counters; None is unknown.
        """
        out = self._more("text", words) if words or not self.has_words else b""
        events: list[StreamEvent] = [PartStopped(self._index) if self._open else self._began]
        events += [UsageSeen(tokens)] if tokens is not None else []
        out += self._write([*events, Stopped(stop="end"), StreamEnded()])
        if self._stream:
            return out + self._frames.end()
        whole = dialect(self._front.dialect).response_from_ir(self._writer.sum.answer()).value
        date(whole, self._now_s)
        return encode(whole)

    def fail(self, error: BackplaneError) -> bytes:
        """Return the last bytes of a stream whose run failed."""
        events: list[StreamEvent] = [PartStopped(self._index)] if self._open else []
        return self._write([*events, StreamFailed(error.message, error.code)]) + self._frames.end(has_failed=True)

    def _more(self, kind: str, text: str) -> bytes:
        """Return the bytes for more text; a change between text and thinking begins a new block."""
        if not text:
            return b""
        self.has_words = self.has_words or kind == "text"
        events: list[StreamEvent] = [] if self._index >= 0 else [self._began]
        if self._open != kind:
            events += [PartStopped(self._index)] if self._open else []
            self._index, self._open = self._index + 1, kind
            events.append(PartStarted(self._index, Text(text="") if kind == "text" else Thinking(text="")))
        return self._write([*events, PartDelta(self._index, text)])

    def _write(self, events: Sequence[StreamEvent]) -> bytes:
        chunks = [chunk for event in events for chunk in self._writer.write(event)]
        for chunk in chunks:
            date(chunk, self._now_s)
        return self._frames.write(chunks) if self._stream else b""
