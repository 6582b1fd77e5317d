"""Copilot's headless server: one session, words in it, hooks before and after its tools, questions, an abort.

Every tool call is put to the control plane by the agent's hook before it runs, with an input that may be changed; what
the agent asks for beside that, without a hook, is decided by the call that it belongs to, and refused where there is
none. What its program is told beside that is its host's affair.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import anyio.abc
import msgspec

from backplane.agents.copilot.reader import EVENT, EventReader
from backplane.agents.events import mapping
from backplane.agents.reader import OpenCall
from backplane.agents.session import Agent as BaseAgent
from backplane.agents.session import AgentRun, Ending, id_of
from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.protocol.jsonrpc import FramedPeer, Notification, Request, RpcError

if TYPE_CHECKING:
    from backplane.process.child import Child

PROTOCOL_VERSION: Final = 3
APPROVED: Final = {"kind": "approve-once"}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What this agent alone is asked."""

    session: dict[str, Any]
    """Members of the call that opens the session."""
    turn: dict[str, Any]
    """Members of every message of the user."""
    tools: Mapping[str, str]
    """The agent's names of tools → the contract's."""
    is_kept: bool
    """Whether the conversation outlives the run."""
    shows: bool = False
    """Whether results are to be seen before the model sees them."""


class Agent(BaseAgent):
    """The agent of one run."""

    reader: EventReader

    def __init__(self, session: AgentRun, options: Options, child: Child) -> None:
        self.options = options
        super().__init__(session, EventReader(session.run.now, session.root, options.tools, shows=options.shows))
        self.pipe = session.pipe(child, self, hear=self.hear, peer=FramedPeer())
        self._id, self._version = "", ""
        self._tasks: anyio.abc.TaskGroup | None = None

    async def hear(self, message: Notification) -> None:
        event = mapping(message.params.get("event")) if message.method == EVENT else {}
        # Trying again in vain is no sign of life.
        await self.session.hear(message, is_sign=event.get("type") != "assistant.turn_retry")
        if event.get("type") == "permission.requested" and self._tasks is not None:
            self._tasks.start_soon(self._permit, mapping(event.get("data")))

    # Opening ----------------------------------------------------------------------------------------------------------

    async def open(self, tasks: anyio.abc.TaskGroup) -> None:
        """Agree on the protocol, and open the session."""
        self._tasks = tasks
        said = await self.must("connect", {"supportedTaskKinds": ["agent", "client", "shell"]})
        if said.get("protocolVersion") != PROTOCOL_VERSION:
            fact = f"the agent speaks protocol version {said.get('protocolVersion')}, not {PROTOCOL_VERSION}"
            raise BackendError("protocol_version_mismatch", fact)
        self._version, asked = str(said.get("version")), self.session.spec.conversation
        method, params = "session.create", {**self.options.session, "sessionId": asked.wanted or str(uuid.uuid4())}
        if asked.fork is not None:
            forked = await self.must("sessions.fork", {"sessionId": asked.fork})
            params["sessionId"] = str(forked.get("sessionId"))
        if asked.wanted is not None:
            method = "session.resume"
        opened = await self.must(method, params)
        self._id = id_of(opened.get("sessionId"), method, "session")
        model = mapping(opened.get("modelState")).get("modelId")
        await self.session.announce(self._id, model=model, version=self._version, kept=self.options.is_kept)

    # A turn -----------------------------------------------------------------------------------------------------------

    async def say(self, words: Json) -> Ending:
        self.reader.begin()
        said: dict[str, Json] = {"prompt": words}
        if isinstance(words, list):
            text, *shown = words
            said = {"prompt": mapping(text).get("text"), "attachments": shown}
        await self.must("session.send", {"sessionId": self._id, **said, **self.options.turn})
        await self.until(lambda: self.reader.idle)
        return Ending(outcome="partial", stopped=True) if self.reader.aborted else self.judge()

    async def add(self, text: str) -> bool:
        params = {"sessionId": self._id, "prompt": text, "mode": "immediate"}
        if self.reader.idle:
            return False
        return (await self.pipe.call("session.send", params, timeout_s=self.answer_s)).fault is None

    async def stop(self) -> bool:
        self.reader.aborted = True
        await self.pipe.call("session.abort", {"sessionId": self._id}, timeout_s=self.answer_s)
        return True

    # Its questions ----------------------------------------------------------------------------------------------------

    async def reply(self, request: Request) -> Json | RpcError:
        if request.method == "userInput.request":
            return await self._people(request.params)
        if request.method != "hooks.invoke":
            return await super().reply(request)
        kind, input = request.params.get("hookType"), mapping(request.params.get("input"))
        if kind == "preToolUse":
            return {"output": await self._before(str(input.get("toolName")), input.get("toolArgs"))}
        if kind in ("postToolUse", "postToolUseFailure") and self.options.shows:
            return {"output": await self._after(input)}
        return {}

    async def _people(self, params: dict[str, Any]) -> Json:
        """Put the agent's question to a person."""
        choices = tuple(one for one in params.get("choices") or () if isinstance(one, str))
        _, answer = await self.session.ask_person(str(params.get("question")), choices)
        return {"answer": answer, "wasFreeform": answer not in choices}

    async def _before(self, tool: str, input: Json) -> Json:
        """Decide about a call before it runs."""
        call = self.reader.find(tool, input, decided=False) or OpenCall(tool, self.reader.name(tool), input)
        refused = await self.session.decide_open(call, takes_input=True)
        if refused is not None:
            return {"permissionDecision": "deny", "permissionDecisionReason": refused}
        changed = {} if call.input == input else {"modifiedArgs": call.input}
        return {"permissionDecision": "allow", **changed}

    async def _after(self, input: dict[str, Any]) -> Json:
        """Let those look at a result who are to see it before the model does."""
        call = self.reader.find(str(input.get("toolName")), input.get("toolArgs"), decided=True)
        if call is None or call.denied is not None:
            return {}
        result = mapping(input.get("toolResult")) or {
            "textResultForLlm": str(input.get("error")),
            "resultType": "failure",
        }
        text, is_failed = str(result.get("textResultForLlm") or ""), result.get("resultType") != "success"
        shown, is_error = await self.session.run.shown(call.name, call.input, text, is_error=is_failed)
        call.shown = (str(shown), is_error)
        if (shown, is_error) == (text, is_failed):
            return {}
        kind = "failure" if is_error else "success"
        return {"modifiedResult": {"textResultForLlm": str(shown), "resultType": kind}}

    async def _permit(self, asked: dict[str, Any]) -> None:
        """Answer for a permission that no hook was asked about: a call that was allowed may do what it needs."""
        request = mapping(asked.get("permissionRequest"))
        call = self.reader.calls.get(str(request.get("toolCallId")))
        if call is None:
            refused: str | None = f"this run grants no {str(request.get('kind'))[:40]} beside its tools' calls"
        else:
            refused = await self.session.decide_open(call, takes_input=True)
        result = APPROVED if refused is None else {"kind": "reject", "feedback": refused}
        params = {"sessionId": self._id, "requestId": asked.get("requestId"), "result": result}
        await self.pipe.call("session.permissions.handlePendingPermissionRequest", params, timeout_s=self.answer_s)

    def raw(self) -> dict[str, Json]:
        return {"session_id": self._id, "version": self._version, "requests": self.reader.spent.requests}


def image_block(media_type: str, data: str) -> Json:
    return {"type": "blob", "mimeType": media_type, "data": data}
