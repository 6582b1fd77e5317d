"""One conversation with the scripted model server, as a test sees it: what was asked, heard and answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import anyio

from backplane.contract.canonical import timestamp_at
from backplane.contract.events import AgentEvent, AssistantDelta, ToolCall, Warned
from backplane.dialects.ir import Conversation, Media, Message, Text, ToolOutput, ToolSpec, ToolUse
from backplane.testing import PROTOCOLS, ModelServer, ProtocolName, RecordedRequest, Turn
from backplane.upstream.client import Upstream
from backplane.upstream.completion import ModelClient
from backplane.upstream.completion import ModelTurn as Answered
from backplane.upstream.endpoint import PROTOCOLS as TABLE
from backplane.upstream.endpoint import Endpoint
from backplane.upstream.failure import UpstreamError

KEY: Final = "sk-test-0123456789abcdef"
READ: Final = ToolSpec(
    name="read", description="Reads a file.", schema={"type": "object", "properties": {"path": {"type": "string"}}}
)
BOUND_S: Final = 60.0
"""No conversation of a test takes a second; under load nothing may take a minute."""

__all__ = ["KEY", "PROTOCOLS", "READ", "Talk", "conversation", "endpoint", "picture", "talk", "worked"]


@dataclass
class Talk:
    """What came of one or more turns."""

    turns: list[Answered] = field(default_factory=list)
    error: UpstreamError | None = None
    heard: list[AgentEvent] = field(default_factory=list)
    requests: tuple[RecordedRequest, ...] = ()
    unscripted: Any = ()

    @property
    def turn(self) -> Answered:
        """The last answer."""
        assert self.error is None, self.error
        return self.turns[-1]

    @property
    def failed(self) -> UpstreamError:
        assert self.error is not None, "no error came"
        return self.error

    @property
    def said(self) -> str:
        """All text that was handed on, thinking not included."""
        return "".join(event.text for event in self.heard if type(event) is AssistantDelta)

    @property
    def calls(self) -> list[ToolCall]:
        return [event for event in self.heard if isinstance(event, ToolCall)]

    def carried(self, name: str) -> list[dict[str, Any]]:
        """The bodies of what rides in `ext[name]`."""
        return [event.ext[name] for event in self.heard if isinstance(event, Warned)
                and isinstance(event.ext, dict) and name in event.ext]  # fmt: skip

    @property
    def bodies(self) -> list[dict[str, Any]]:
        found = [request.body for request in self.requests]
        return [body for body in found if isinstance(body, dict)]


def endpoint(server: ModelServer, protocol: Any, **settings: Any) -> Endpoint:
    base: dict[str, Any] = {"base_url": server.base_url(cast(ProtocolName, protocol)), "api_key": KEY, "backoff_ms": 1}
    return Endpoint(protocol=protocol, **{**base, **settings})


def conversation(protocol: str, *messages: Message, **members: Any) -> Conversation:
    """A first request; a few words of the user where nothing else is said."""
    said = messages or (Message(role="user", parts=(Text(text="hello"),)),)
    if protocol == "anthropic":
        # That service must be told; what a turn has to fill in itself is a loss.
        members["options"] = {"max_tokens": 1000, **members.get("options", {})}
    return Conversation(dialect=TABLE[protocol].dialect, model="scripted-model", messages=said, **members)


def picture() -> Message:
    image = Media(kind="image", media_type="image/png", data="iVBORw0KGgo=")
    return Message(role="user", parts=(Text(text="look"), image))


def worked() -> tuple[Message, ...]:
    """A conversation in which a tool was called and answered."""
    call = ToolUse(id="call_a", name="read", input={"path": "a"})
    result = ToolOutput(id="call_a", content=(Text(text="content of a"),))
    return (
        Message(role="user", parts=(Text(text="read a"),)),
        Message(role="assistant", parts=(Text(text="I read."), call)),
        Message(role="tool", parts=(result,)),
    )


def talk(
    protocol: str, script: Sequence[Turn], *asked: Conversation, parallel: bool = True, stream: bool = True,
    backend: str = "asyncio", **settings: Any,
) -> Talk:  # fmt: skip
    """Play a script to one model that is asked each conversation in turn."""
    done = Talk()

    async def hear(event: AgentEvent) -> None:
        done.heard.append(event)

    async def ask(server: ModelServer) -> None:
        with anyio.fail_after(BOUND_S):
            async with Upstream(endpoint(server, protocol, **settings)) as up:
                model = ModelClient(up, parallel=parallel, stream=stream)
                for one in asked or (conversation(protocol),):
                    done.turns.append(await model.ask(one, hear, lambda: timestamp_at(time.time_ns())))

    with ModelServer(list(script)) as server:
        try:
            anyio.run(ask, server, backend=backend)
        except UpstreamError as error:
            done.error = error
        done.requests, done.unscripted = server.requests, server.unscripted
    return done
