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
from backplane.agents.failures import code_of
from backplane.agents.session import AgentRun, Ending, failed, result_of, silent
from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.protocol.jsonrpc import METHOD_NOT_FOUND, FramedPeer, Notification, Request, RpcError

if TYPE_CHECKING:
    from backplane.process import Child

PROTOCOL_VERSION: Final = 3
ANSWER_S: Final = 60.0
"""For an answer to a call: half a second is usual; a first start unpacks 235 MB."""
WITHDRAWN: Final = RpcError(0, "the question was withdrawn")
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


class Agent:
    """The agent of one run."""

    keeps_calls, is_ours = True, False

    def __init__(self, session: AgentRun, options: Options, child: Child) -> None:
        self.session, self.options = session, options
        self.reader = EventReader(session.run.now, session.root, options.tools, shows=options.shows)
        self.reader.price = session.spec.price
        self.pipe = session.pipe(child, self, hear=self.hear, peer=FramedPeer())
        self._id, self._version = "", ""
        self._tasks: anyio.abc.TaskGroup | None = None

    async def run(self) -> None:
        await self.pipe.run()

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
        said = await self._must("connect", {"supportedTaskKinds": ["agent", "client", "shell"]})
        if said.get("protocolVersion") != PROTOCOL_VERSION:
            fact = f"the agent speaks protocol version {said.get('protocolVersion')}, not {PROTOCOL_VERSION}"
            raise BackendError("protocol_version_mismatch", fact)
        self._version, asked = str(said.get("version")), self.session.spec.conversation
        method, params = "session.create", {**self.options.session, "sessionId": asked.wanted or str(uuid.uuid4())}
        if asked.fork is not None:
            forked = await self._must("sessions.fork", {"sessionId": asked.fork})
            params["sessionId"] = str(forked.get("sessionId"))
        if asked.wanted is not None:
            method = "session.resume"
        opened = await self._must(method, params)
        if not isinstance(opened.get("sessionId"), str):
            raise BackendError("contract_schema_violation", f"the agent's answer to {method} names no session")
        self._id = opened["sessionId"]
        model = mapping(opened.get("modelState")).get("modelId")
        await self.session.announce(self._id, model=model, version=self._version, kept=self.options.is_kept)

    async def _must(self, method: str, params: Json) -> dict[str, Any]:
        """Ask for something that has to be had. Raises BackendError."""
        return result_of(await self.pipe.call(method, params, timeout_s=ANSWER_S), method)

    # A turn -----------------------------------------------------------------------------------------------------------

    async def say(self, words: Json) -> Ending:
        reader = self.reader
        reader.begin()
        said: dict[str, Json] = {"prompt": words}
        if isinstance(words, list):
            text, *shown = words
            said = {"prompt": mapping(text).get("text"), "attachments": shown}
        await self._must("session.send", {"sessionId": self._id, **said, **self.options.turn})
        while not reader.idle:
            if self.session.ended:
                raise BackendError("backend_crashed", "the agent's program ended in the middle of its work")
            await self.session.change()
        return self._ended()

    async def add(self, text: str) -> bool:
        params = {"sessionId": self._id, "prompt": text, "mode": "immediate"}
        return not self.reader.idle and (await self.pipe.call("session.send", params, timeout_s=ANSWER_S)).fault is None

    async def stop(self) -> bool:
        self.reader.aborted = True
        await self.pipe.call("session.abort", {"sessionId": self._id}, timeout_s=ANSWER_S)
        return True

    def _ended(self) -> Ending:
        reader = self.reader
        failure = reader.failure
        if reader.aborted:
            return Ending(outcome="partial", stopped=True)
        if failure is not None:
            return failed(code_of(failure.words, failure.label, status=failure.status), failure.words)
        if not reader.spoke:
            return silent(None if reader.acted else "backend_unavailable")
        return Ending(text=reader.text)

    # Its questions ----------------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> Json | RpcError:
        return await self.session.attend(self._answer(request), WITHDRAWN)

    async def _answer(self, request: Request) -> Json | RpcError:
        if request.method == "userInput.request":
            return await self._people(request.params)
        if request.method != "hooks.invoke":
            return RpcError(METHOD_NOT_FOUND, f"this host answers no {request.method}")
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
        id = self.reader.find(tool, input, decided=False)
        call = self.reader.calls.get(id or "")
        name = call.name if call is not None else self.reader.name(tool, {})
        refused, input = await self._decide(tool, name, input)
        if call is not None:
            call.is_decided = True
            call.denied = None if refused is None else f"policy_denied: {refused}"
        if refused is not None:
            return {"permissionDecision": "deny", "permissionDecisionReason": refused}
        if call is not None and input != call.input:
            call.input = input
            return {"permissionDecision": "allow", "modifiedArgs": input}
        return {"permissionDecision": "allow"}

    async def _decide(self, tool: str, name: str, input: Json) -> tuple[str | None, Json]:
        """Why a call may not run, None when it may; and its input as it is to run."""
        denied = self.session.denied(tool, name, input)
        verdict = await self.session.may(name, input, denied)
        if verdict.decision == "deny":
            return verdict.reason or "denied", input
        if verdict.decision == "modify":
            denied = self.session.denied(tool, name, verdict.input)
            return (None, verdict.input) if denied is None else (denied.reason, input)
        return None, input

    async def _after(self, input: dict[str, Any]) -> Json:
        """Let those look at a result who are to see it before the model does."""
        id = self.reader.find(str(input.get("toolName")), input.get("toolArgs"), decided=True)
        call = self.reader.calls.get(id or "")
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
        refused: str | None = None
        if call is None:
            refused = f"this run grants no {str(request.get('kind'))[:40]} beside its tools' calls"
        elif not call.is_decided:
            call.is_decided = True
            refused, _ = await self._decide(call.tool, call.name, call.input)
            call.denied = None if refused is None else f"policy_denied: {refused}"
        elif call.denied is not None:
            refused = call.denied
        result = APPROVED if refused is None else {"kind": "reject", "feedback": refused}
        params = {"sessionId": self._id, "requestId": asked.get("requestId"), "result": result}
        await self.pipe.call("session.permissions.handlePendingPermissionRequest", params, timeout_s=ANSWER_S)

    def raw(self) -> dict[str, Json]:
        return {"session_id": self._id, "version": self._version, "requests": self.reader.spent.requests}


def image_block(media_type: str, data: str) -> Json:
    return {"type": "blob", "mimeType": media_type, "data": data}
