"""Base class of the drivers of vendors' agents, and the outcome of a turn.

To add an agent, write `NAME/start.py`, `NAME/agent.py` and `NAME/reader.py`. `Agent.connect` talks to a program that
speaks JSON-RPC; for another framing of lines, write another `protocol.jsonrpc.Peer`; pass messages from REST or a
WebSocket to `Agent.hear`. A row of `hosts/agents.toml` has the rest. `session.AgentRun` calls these functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from backplane.agents.limits import GO_ON
from backplane.agents.reader import EventReader
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.errors import BackendError
from backplane.process.jsonrpc import Pipe
from backplane.protocol.jsonrpc import METHOD_NOT_FOUND, Notification, Peer, Request, RpcError

if TYPE_CHECKING:
    from backplane.agents.gate import ToolRequest, ToolVerdict
    from backplane.agents.order import RunSpec
    from backplane.agents.session import AgentRun
    from backplane.agents.start import AgentStart

WORDS_CHARS_MAX: Final = 2000
"""Maximum characters of an agent's error text, the rest is cut: a service's answer may be a whole page."""
WORDLESS: Final = "the agent ended without a word"


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a turn, computed from the agent's events; its own success flag alone does not count."""

    outcome: Literal["complete", "partial", "failed"] = "complete"
    words: str = ""
    """Text of the error; empty without one."""
    code: str | None = None
    """Error code of the turn; None if it has none."""
    note: str = ""
    """Text of a warning; empty without one."""
    limit: str = ""
    """The contract's name of the limit that ended the turn; empty without one."""
    stopped: bool = False
    """True if an interruption may be the reason for this outcome."""
    text: str | None = None
    """The answer, which is checked against the order's schema; None without one."""


STOPPED: Final = Ending(outcome="partial", stopped=True)


def failed(code: str, words: str, *, stopped: bool = False) -> Ending:
    return Ending(outcome="failed", code=code, words=words, stopped=stopped)


def limited(limit: str, words: str) -> Ending:
    return Ending(outcome="partial", code="policy_denied", words=words, limit=limit)


def ended_by_itself(reason: object) -> Ending:
    """Return the outcome of a turn that the agent ended for a reason of its own."""
    return Ending(outcome="partial", note=f"the agent stopped by itself: {str(reason)[:WORDS_CHARS_MAX]}")


class Agent:
    """One vendor's agent in one run."""

    keeps_calls = True
    """True if passthrough also keeps the agent's JSON-RPC requests and responses."""
    is_ours = False
    """True for our own agent: an answer that does not match its schema is then an error of the run itself."""
    withdrawn: Json | RpcError = RpcError(0, "the question was withdrawn")
    """Answer to a question whose turn was stopped."""
    answer_s = 60.0
    """Seconds for an answer to a call: half a second is usual, a cold disk under load needs more."""
    login_code: int | None = None
    """JSON-RPC error code that means "log in first"; None if the protocol has none."""
    begun: AgentStart
    pipe: Pipe

    def __init__(self, session: AgentRun, reader: EventReader) -> None:
        self.session, self.reader = session, reader
        reader.price, reader.calls.verdicts = session.spec.price, session.verdicts

    def connect(self, begun: AgentStart, peer: Peer | None = None) -> None:
        """Connect to the agent's program: its notifications go to `hear`, its requests to `answer`."""
        self.begun, child, watch = begun, begun.child, self.session.watch
        self.pipe = Pipe(
            child.stdin, child.stdout, answer=self.answer, hear=self.hear, watch=watch, peer=peer or Peer()
        )

    # Functions that a vendor's driver overrides -----------------------------------------------------------------------

    @classmethod
    def spec(cls, begun: AgentStart) -> RunSpec:
        """Return the order in the form for this agent. Raises ConfigError, BackendError."""
        return begun.spec(cls.image)

    @staticmethod
    def image(media_type: str, data: str) -> Json:
        """Return an image, given in Base64, as a block of a message."""
        raise NotImplementedError

    async def hear(self, message: Notification) -> None:
        """Take a message of the agent."""
        await self.session.hear(message)

    async def open(self) -> None:
        """Agree on the protocol, and open the conversation. Raises BackendError, ConfigError."""

    async def say(self, words: Json) -> Ending:
        """Send a message, and wait for the end of its turn. Raises BackendError: `backend_crashed`."""
        raise NotImplementedError

    async def add(self, text: str) -> bool:
        """Add the user's text to the current turn; return False if it has to wait for the turn's end."""
        return False

    async def stop(self) -> bool:
        """Stop the current turn; return False if the agent cannot stop one."""
        return False

    async def reply(self, request: Request) -> Json | RpcError:
        """Answer a request of the agent."""
        return RpcError(METHOD_NOT_FOUND, f"this host answers no {request.method}")

    def raw(self) -> dict[str, Json]:
        """Return the agent's own members for the receipt's raw usage."""
        return {}

    # Functions that all drivers share ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read the agent's messages until its output ends."""
        await self.pipe.run()

    async def again(self, words: Json, *, acted: bool) -> Ending:
        """Repeat a turn that a limit of the service ended, in the agent's own conversation.

        Args:
            acted: True if the agent has called a tool; the message is then not repeated, as its effect could be double.
        """
        return await self.say(GO_ON if acted else words)

    def reset_s(self, error: BackendError | None) -> float | None:
        """Return the seconds until the service takes requests again; None if it named no time.

        Args:
            error: the failure that ended the turn; None if the agent reported it.
        """
        at = self.reader.resets_at
        return None if at is None else at - time.time()

    async def answer(self, request: Request) -> Json | RpcError:
        """Answer a request; if its turn is stopped, return `withdrawn`."""
        return await self.session.attend(self.reply(request), self.withdrawn)

    async def decide(self, events: Iterable[AgentEvent], request: ToolRequest) -> ToolVerdict:
        """Report a call that the agent asks about, if it is new, and decide whether it may run."""
        await self.session.emit(events)
        self.session.hold_limits()
        return await self.session.gate.decide(request)

    async def call(self, method: str, **params: Json) -> RpcError | None:
        """Call a method whose result does not matter; return its error, or None."""
        return (await self.pipe.call(method, params, timeout_s=self.answer_s)).fault

    async def must(self, method: str, params: Json) -> dict[str, Any]:
        """Call a method that must succeed; return its result. Raises BackendError."""
        reply = await self.pipe.call(method, params, timeout_s=self.answer_s)
        if (fault := reply.fault) is not None:
            if fault.gone:
                raise BackendError("backend_crashed", f"the agent's program ended before it answered {method}")
            # Some error messages list every method there is.
            fact = f"the agent refused {method}: {fault.message[:WORDS_CHARS_MAX]}"
            if fault.code == self.login_code:
                fix = "log in with the agent's own program, or give its key"
                raise BackendError("backend_auth_failed", fact, hint=fix)
            raise BackendError("backend_unavailable", fact)
        if not isinstance(reply.result, dict):
            raise BackendError("contract_schema_violation", f"the agent's answer to {method} is no object")
        return reply.result

    async def until(self, is_over: Callable[[], object]) -> None:
        """Wait until `is_over` returns true, checked after each message. Raises BackendError: `backend_crashed`."""
        while not is_over():
            if self.session.ended:
                raise BackendError("backend_crashed", "the agent's program ended in the middle of its work")
            await self.session.change()

    def judge(self) -> Ending:
        """Return the outcome of a turn that has ended, computed from what the reader saw."""
        reader, failure = self.reader, self.reader.failure
        if failure is not None:
            code = self.session.code_of(failure.words, failure.label, status=failure.status)
            return failed(code, failure.words)
        return Ending(text=reader.text) if reader.spoke else silent(acted=reader.acted)


def silent(*, acted: bool) -> Ending:
    """Return the outcome of a turn without text: failed, but partial with a warning if the agent called a tool."""
    return Ending(outcome="partial", note=WORDLESS) if acted else failed("backend_unavailable", WORDLESS)


def require_version(said: Json, ours: int) -> None:
    """Refuse another version of the protocol. Raises BackendError: `protocol_version_mismatch`."""
    if said != ours:
        raise BackendError("protocol_version_mismatch", f"the agent speaks protocol version {said}, not {ours}")


def id_of(said: Json, method: str, what: str) -> str:
    """Return the id in an agent's answer. Raises BackendError: `contract_schema_violation`, it is no text."""
    if not isinstance(said, str):
        raise BackendError("contract_schema_violation", f"the agent's answer to {method} names no {what}")
    return said
