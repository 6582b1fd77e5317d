"""The pipe to such an agent: threads and turns out, its notifications and questions in.

What a notification means, and what a question is answered with, is not known here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio

from backplane.agents.codex.opening import OFFER
from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.process.jsonrpc import Pipe
from backplane.protocol.jsonrpc import Fault, Notification, Received, Reply, Request

ANSWER_S: Final = 60.0
"""For an answer to a call: half a second is usual, a cold disk under load needs more."""

Hear = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Takes a notification: method and params; while it works nothing more is read."""
Answer = Callable[[str, dict[str, Any]], Awaitable[Json | Fault]]
"""Answers a question: method and params."""


class Client:
    """One agent behind a pipe; `run` must be running while it is used. The descriptors stay the caller's to close.

    Args:
        watch: told of every line and what it is, before it is heard or answered.
        said: what is on its way already, see `Pipe`.
    """

    def __init__(
        self,
        write_fd: int,
        read_fd: int,
        *,
        hear: Hear,
        answer: Answer,
        watch: Callable[[bytes, Received], Awaitable[None]],
        said: bytes = b"",
    ) -> None:
        self._hear, self._answer = hear, answer
        self._pipe = Pipe(write_fd, read_fd, answer=self._asked, hear=self._told, watch=watch, said=said)
        self._open: set[anyio.CancelScope] = set()
        self.ended = anyio.Event()
        """The agent says nothing more."""

    async def run(self) -> None:
        """Read until the agent closes its output."""
        await self._pipe.run()
        self.ended.set()

    async def initialize(self) -> dict[str, Any]:
        """Agree on the protocol, experimental parts included; raises BackendError."""
        said = await self.must("initialize", OFFER)
        await self._pipe.notify("initialized", {})
        return said

    async def thread(self, method: str, params: dict[str, Json]) -> tuple[dict[str, Any], str]:
        """Open a thread: `thread/start`, `thread/resume`, `thread/fork`. Raises BackendError.

        Returns:
            Its description, with an id, and the model.
        """
        said = await self.must(method, params)
        thread = said.get("thread")
        if not isinstance(thread, dict) or not isinstance(thread.get("id"), str):
            raise BackendError("contract_schema_violation", f"the agent's answer to {method} names no thread")
        return thread, str(said.get("model"))

    async def turn(self, thread: str, text: str, **params: Json) -> str:
        """Begin a turn with words of the user; its id. Raises BackendError."""
        turn = (await self.must("turn/start", {"threadId": thread, "input": _said(text), **params})).get("turn")
        if not isinstance(turn, dict) or not isinstance(turn.get("id"), str):
            raise BackendError("contract_schema_violation", "the agent's answer to turn/start names no turn")
        return str(turn["id"])

    async def steer(self, thread: str, turn: str, text: str) -> Fault | None:
        """Give a turn that goes on more words of the user."""
        params: Json = {"threadId": thread, "expectedTurnId": turn, "input": _said(text)}
        return (await self.call("turn/steer", params)).fault

    async def interrupt(self, thread: str, turn: str) -> None:
        """End the turn and every command that goes on."""
        await self.call("turn/interrupt", {"threadId": thread, "turnId": turn})
        await self.call("thread/backgroundTerminals/clean", {"threadId": thread})

    async def call(self, method: str, params: Json) -> Reply:
        """Ask for something; a refusal is a reply. Raises BackendError: `backend_timeout`."""
        return await self._pipe.call(method, params, timeout_s=ANSWER_S)

    async def must(self, method: str, params: Json) -> dict[str, Any]:
        """Ask for something that has to be had. Raises BackendError."""
        reply = await self.call(method, params)
        if reply.fault is not None and reply.fault.gone:
            raise BackendError("backend_crashed", f"the agent's program ended before it answered {method}")
        if reply.fault is not None:
            raise BackendError("backend_unavailable", f"the agent refused {method}: {reply.fault.message[:WORDS_MAX]}")
        return reply.result if isinstance(reply.result, dict) else {}

    def withdraw(self) -> None:
        """Answer no open question any more."""
        for scope in list(self._open):
            scope.cancel()

    @property
    def asking(self) -> bool:
        """Whether a question of the agent is open."""
        return bool(self._open)

    async def _told(self, told: Notification) -> None:
        await self._hear(told.method, told.params)

    async def _asked(self, asked: Request) -> Json | Fault:
        with anyio.CancelScope() as scope:
            self._open.add(scope)
            try:
                return await self._answer(asked.method, asked.params)
            finally:
                self._open.discard(scope)
        return Fault(0, "the question was withdrawn")


WORDS_MAX: Final = 2000
"""Of a refusal's words: some refusals list every method there is."""


def _said(text: str) -> list[Json]:
    return [{"type": "text", "text": text}]
