"""Drives Copilot's headless server: a session, prompts, hooks before and after its tools, questions, an abort.

The agent's hook asks the control plane about every tool call before it runs; the answer may change the input. A
permission request without a hook gets the verdict of its call, and is refused if it has none. `start` has the program's
command and environment.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

from backplane.agents.agent import STOPPED, Ending, id_of, require_version
from backplane.agents.agent import Agent as BaseAgent
from backplane.agents.calls import OpenCall
from backplane.agents.copilot.reader import EVENT, EventReader
from backplane.agents.copilot.start import address_of
from backplane.agents.events import mapping
from backplane.agents.order import RunSpec, require_price
from backplane.agents.session import AgentRun
from backplane.agents.start import AgentStart
from backplane.contract.canonical import Json
from backplane.protocol.jsonrpc import FramedPeer, Notification, Request, RpcError
from backplane.upstream.rewrites import is_strict

PROTOCOL_VERSION: Final = 3
SETTINGS: Final = ("effort", "system")
"""Settings of an order under `config.vendor.copilot`."""
APPROVED: Final = {"kind": "approve-once"}


class Agent(BaseAgent):
    """The agent of one run."""

    reader: EventReader

    def __init__(self, session: AgentRun, begun: AgentStart) -> None:
        self._shows = "post_tool" in begun.hooks
        super().__init__(session, EventReader(session.run.now, session.root, shows=self._shows))
        self.connect(begun, FramedPeer())
        self._opening, self._turn = session_of(begun), turn_of(begun)
        self._id, self._version = "", ""

    @classmethod
    def spec(cls, begun: AgentStart) -> RunSpec:
        require_price(begun.run, begun.row.prices, repr(begun.model))
        return super().spec(begun)

    @staticmethod
    def image(media_type: str, data: str) -> Json:
        return {"type": "blob", "mimeType": media_type, "data": data}

    async def hear(self, message: Notification) -> None:
        await self.session.hear(message)
        event = mapping(message.params.get("event")) if message.method == EVENT else {}
        if event.get("type") == "permission.requested":
            self.session.tasks.start_soon(self._permit, mapping(event.get("data")))

    # Opening ----------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Agree on the protocol, and open the session."""
        said = await self.must("connect", {"supportedTaskKinds": ["agent", "client", "shell"]})
        require_version(said.get("protocolVersion"), PROTOCOL_VERSION)
        self._version, asked, id = str(said.get("version")), self.begun.conversation, str(uuid.uuid4())
        if asked.fork is not None:
            id = str((await self.must("sessions.fork", {"sessionId": asked.fork})).get("sessionId"))
        method = "session.create" if asked.wanted is None else "session.resume"
        opened = await self.must(method, {**self._opening, "sessionId": asked.resume or id})
        self._id = id_of(opened.get("sessionId"), method, "session")
        model = mapping(opened.get("modelState")).get("modelId")
        await self.session.announce(self._id, model=model, version=self._version, kept=self.begun.is_kept)

    # A turn -----------------------------------------------------------------------------------------------------------

    async def say(self, words: Json) -> Ending:
        self.reader.begin()
        text, *shown = words if isinstance(words, list) else [{"text": words}]
        said = {"prompt": mapping(text).get("text"), **({"attachments": shown} if shown else {})}
        await self.must("session.send", {"sessionId": self._id, **said, **self._turn})
        await self.until(lambda: self.reader.idle)
        return STOPPED if self.reader.aborted else self.judge()

    async def add(self, text: str) -> bool:
        if self.reader.idle:
            return False
        return await self.call("session.send", sessionId=self._id, prompt=text, mode="immediate") is None

    async def stop(self) -> bool:
        self.reader.aborted = True
        await self.call("session.abort", sessionId=self._id)
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
        if kind in ("postToolUse", "postToolUseFailure") and self._shows:
            return {"output": await self._after(input)}
        return {}

    async def _people(self, params: dict[str, Any]) -> Json:
        """Ask the user the agent's question; return the answer."""
        choices = params.get("choices") or ()
        _, answer = await self.session.ask_person(params.get("question"), choices)
        return {"answer": answer, "wasFreeform": answer not in choices}

    async def _before(self, tool: str, input: Json) -> Json:
        """Decide about a call before it runs."""
        call = self.reader.find(tool, input, decided=False) or OpenCall("", tool, self.reader.name(tool), input)
        verdict = await self.session.gate.decide(call.request(takes_input=True))
        if verdict.refused is not None:
            return {"permissionDecision": "deny", "permissionDecisionReason": verdict.refused}
        changed = {} if verdict.input == input else {"modifiedArgs": verdict.input}
        return {"permissionDecision": "allow", **changed}

    async def _after(self, input: dict[str, Any]) -> Json:
        """Show hooks a result before the model sees it."""
        call = self.reader.find(str(input.get("toolName")), input.get("toolArgs"), decided=True)
        if call is None:
            return {}
        failure = {"textResultForLlm": str(input.get("error")), "resultType": "failure"}
        result = mapping(input.get("toolResult")) or failure
        text, is_failed = str(result.get("textResultForLlm") or ""), result.get("resultType") != "success"
        ran_with = self.reader.calls.input_of(call)
        shown, is_error = await self.session.run.shown(call.name, ran_with, text, id=call.id, is_error=is_failed)
        call.shown = (str(shown), is_error)
        if (shown, is_error) == (text, is_failed):
            return {}
        kind = "failure" if is_error else "success"
        return {"modifiedResult": {"textResultForLlm": str(shown), "resultType": kind}}

    async def _permit(self, asked: dict[str, Any]) -> None:
        """Answer a permission request that had no hook: allow it only if it belongs to a call that is allowed."""
        request = mapping(asked.get("permissionRequest"))
        call = self.reader.calls.open.get(str(request.get("toolCallId")))
        if call is None:
            refused: str | None = f"this run grants no {str(request.get('kind'))[:40]} beside its tools' calls"
        else:
            refused = (await self.session.gate.decide(call.request(takes_input=True))).refused
        result = APPROVED if refused is None else {"kind": "reject", "feedback": refused}
        params = {"sessionId": self._id, "requestId": asked.get("requestId"), "result": result}
        await self.call("session.permissions.handlePendingPermissionRequest", **params)

    def raw(self) -> dict[str, Json]:
        return {"session_id": self._id, "version": self._version, "requests": self.reader.spent.requests}


# The order in the session's form --------------------------------------------------------------------------------------


def session_of(begun: AgentStart) -> dict[str, Any]:
    """Return the order as parameters of the call that opens the session. Raises ConfigError."""
    own, row = begun.settings(SETTINGS), begun.row
    local, remote = ({"type": kind, "tools": ["*"]} for kind in ("local", "http"))
    provider = {
        "type": row.service,
        "baseUrl": address_of(begun),
        "apiKey": begun.env.get("COPILOT_PROVIDER_API_KEY"),
        "wireApi": row.wire_api if row.service != "anthropic" else None,
    }
    return _given(
        {
            "model": begun.model,
            "workingDirectory": begun.root,
            # Without an address the agent's own service is used.
            "provider": _given(provider) if row.base_url is not None else None,
            "mcpServers": begun.servers(local=local, remote=remote) or None,
            "reasoningEffort": own.get("effort"),
            "systemMessage": {"mode": "append", "content": own["system"]} if own.get("system") else None,
            "hooks": True,
            "requestPermission": True,
            "requestUserInput": True,
            "streaming": True,
            "includeSubAgentStreamingEvents": False,
            "enableSessionTelemetry": False,
            # Commands in the workspace's own settings would run without approval.
            "enableFileHooks": False,
            "enableConfigDiscovery": False,
            "envValueMode": "direct",
        }
    )


def _given(members: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


def turn_of(begun: AgentStart) -> dict[str, Any]:
    """Return the members of every message: the answer's schema, if the model's service supports it."""
    schema = begun.run.order.abp("output_schema")
    if not (isinstance(schema, dict) and is_strict(schema)) or begun.row.service == "anthropic":
        return {}
    shape = {"name": "response", "strict": True, "schema": schema}
    return {"responseFormat": {"type": "json_schema", "jsonSchema": shape}}
