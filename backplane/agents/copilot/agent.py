"""Drives Copilot's headless server: a session, prompts, hooks before and after its tools, questions, an abort.

The agent's hook asks the control plane about every tool call before it runs; the answer may change the input. A
permission request without a hook gets the verdict of its call, and is refused if it has none. `start` has the program's
command and environment.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Final

from backplane.agents.calls import OpenCall
from backplane.agents.copilot.reader import EVENT, EventReader
from backplane.agents.copilot.start import address_of, model_of
from backplane.agents.events import mapping
from backplane.agents.order import RunSpec, hook_events, own_settings, require_price, server_rows
from backplane.agents.program import BegunProgram
from backplane.agents.rows import AgentRow
from backplane.agents.session import Agent as BaseAgent
from backplane.agents.session import AgentRun, Ending, id_of
from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.host import Given, HostRun
from backplane.protocol.jsonrpc import FramedPeer, Notification, Request, RpcError
from backplane.upstream.rewrites import is_strict

if TYPE_CHECKING:
    from backplane.process.child import Child

PROTOCOL_VERSION: Final = 3
SETTINGS: Final = ("effort", "system")
"""Settings of an order under `config.vendor.copilot`."""
TOOLS: Final = {
    "view": "read_file", "create": "write_file", "edit": "edit_file", "apply_patch": "edit_file", "rg": "grep",
}  # fmt: skip
APPROVED: Final = {"kind": "approve-once"}


class Agent(BaseAgent):
    """The agent of one run."""

    reader: EventReader

    def __init__(self, session: AgentRun, row: AgentRow, child: Child, begun: BegunProgram) -> None:
        self._shows = "post_tool" in hook_events(session.run)
        super().__init__(session, EventReader(session.run.now, session.root, TOOLS, shows=self._shows))
        self._opening, self._turn = session_of(session.run, row, begun.env), turn_of(session.run, row)
        self._is_kept = session.spec.conversation.kept or row.own_state
        self.pipe = session.pipe(child, self, hear=self.hear, peer=FramedPeer())
        self._id, self._version = "", ""

    @classmethod
    def spec(cls, row: AgentRow, run: HostRun) -> RunSpec:
        require_price(run, row.prices, repr(model_of(run, row)))
        return super().spec(row, run)

    @staticmethod
    def image(media_type: str, data: str) -> Json:
        return {"type": "blob", "mimeType": media_type, "data": data}

    async def hear(self, message: Notification) -> None:
        event = mapping(message.params.get("event")) if message.method == EVENT else {}
        # A failed request that is retried is no sign of life.
        await self.session.hear(message, is_sign=event.get("type") != "assistant.turn_retry")
        if event.get("type") == "permission.requested":
            self.session.tasks.start_soon(self._permit, mapping(event.get("data")))

    # Opening ----------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Agree on the protocol, and open the session."""
        said = await self.must("connect", {"supportedTaskKinds": ["agent", "client", "shell"]})
        if said.get("protocolVersion") != PROTOCOL_VERSION:
            fact = f"the agent speaks protocol version {said.get('protocolVersion')}, not {PROTOCOL_VERSION}"
            raise BackendError("protocol_version_mismatch", fact)
        self._version, asked = str(said.get("version")), self.session.spec.conversation
        method, params = "session.create", {**self._opening, "sessionId": asked.wanted or str(uuid.uuid4())}
        if asked.fork is not None:
            forked = await self.must("sessions.fork", {"sessionId": asked.fork})
            params["sessionId"] = str(forked.get("sessionId"))
        if asked.wanted is not None:
            method = "session.resume"
        opened = await self.must(method, params)
        self._id = id_of(opened.get("sessionId"), method, "session")
        model = mapping(opened.get("modelState")).get("modelId")
        await self.session.announce(self._id, model=model, version=self._version, kept=self._is_kept)

    # A turn -----------------------------------------------------------------------------------------------------------

    async def say(self, words: Json) -> Ending:
        self.reader.begin()
        said: dict[str, Json] = {"prompt": words}
        if isinstance(words, list):
            text, *shown = words
            said = {"prompt": mapping(text).get("text"), "attachments": shown}
        await self.must("session.send", {"sessionId": self._id, **said, **self._turn})
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
        if kind in ("postToolUse", "postToolUseFailure") and self._shows:
            return {"output": await self._after(input)}
        return {}

    async def _people(self, params: dict[str, Any]) -> Json:
        """Ask the user the agent's question; return the answer."""
        choices = tuple(one for one in params.get("choices") or () if isinstance(one, str))
        _, answer = await self.session.ask_person(str(params.get("question")), choices)
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
        result = mapping(input.get("toolResult")) or {
            "textResultForLlm": str(input.get("error")),
            "resultType": "failure",
        }
        text, is_failed = str(result.get("textResultForLlm") or ""), result.get("resultType") != "success"
        shown, is_error = await self.session.run.shown(
            call.name, self.reader.calls.input_of(call), text, id=call.id, is_error=is_failed
        )
        call.shown = (str(shown), is_error)
        if (shown, is_error) == (text, is_failed):
            return {}
        kind = "failure" if is_error else "success"
        return {"modifiedResult": {"textResultForLlm": str(shown), "resultType": kind}}

    async def _permit(self, asked: dict[str, Any]) -> None:
        """Answer a permission request that had no hook: it is granted if its call was allowed."""
        request = mapping(asked.get("permissionRequest"))
        call = self.reader.calls.open.get(str(request.get("toolCallId")))
        if call is None:
            refused: str | None = f"this run grants no {str(request.get('kind'))[:40]} beside its tools' calls"
        else:
            refused = (await self.session.gate.decide(call.request(takes_input=True))).refused
        result = APPROVED if refused is None else {"kind": "reject", "feedback": refused}
        params = {"sessionId": self._id, "requestId": asked.get("requestId"), "result": result}
        await self.pipe.call("session.permissions.handlePendingPermissionRequest", params, timeout_s=self.answer_s)

    def raw(self) -> dict[str, Json]:
        return {"session_id": self._id, "version": self._version, "requests": self.reader.spent.requests}


# The order in the session's words -------------------------------------------------------------------------------------


def session_of(run: Given, options: AgentRow, env: dict[str, str]) -> dict[str, Any]:
    """Return the order as parameters of the call that opens the session. Raises ConfigError."""
    own = own_settings(run, "copilot", SETTINGS)
    local, remote = ({"type": kind, "tools": ["*"]} for kind in ("local", "http"))
    servers = server_rows(run, options.mcp_servers, local=local, remote=remote)
    params: dict[str, Any] = {
        "model": model_of(run, options),
        "workingDirectory": run.order.workspace.root,
        "provider": provider_of(options, env),
        "mcpServers": servers or None,
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
    return {name: value for name, value in params.items() if value is not None}


def provider_of(options: AgentRow, env: dict[str, str]) -> dict[str, Any] | None:
    """Return the user's own model service as a parameter of the session; None for the agent's service."""
    if options.base_url is None:
        return None
    made = {
        "type": options.service,
        "baseUrl": address_of(options),
        "apiKey": env.get("COPILOT_PROVIDER_API_KEY"),
    }
    if options.service != "anthropic":
        made["wireApi"] = options.wire_api
    return {name: value for name, value in made.items() if value is not None}


def turn_of(run: Given, options: AgentRow) -> dict[str, Any]:
    """Return the members of every message: the answer's schema, if the model's service supports it."""
    schema = run.order.abp("output_schema")
    if not (isinstance(schema, dict) and is_strict(schema)) or options.service == "anthropic":
        return {}
    shape = {"name": "response", "strict": True, "schema": schema}
    return {"responseFormat": {"type": "json_schema", "jsonSchema": shape}}
