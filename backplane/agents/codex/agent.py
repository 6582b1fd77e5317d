"""Drives Codex's app-server: a thread, its turns, input within a turn, approvals, interrupts.

Codex asks before each patch, and before each command that it does not consider harmless. If an order needs an approval
of every command, our hook asks about the others.
"""

from __future__ import annotations

import re
from typing import Any, Final

import anyio
import msgspec

from backplane.agents import hook
from backplane.agents.agent import Agent as BaseAgent
from backplane.agents.agent import Ending, failed, id_of
from backplane.agents.calls import OpenCall
from backplane.agents.codex import answers
from backplane.agents.codex.reader import EventReader, TurnEnd
from backplane.agents.codex.start import needs_hook, thread_of
from backplane.agents.events import is_count, mapping, mappings
from backplane.agents.hooked import Hooked, hook_answer
from backplane.agents.order import require_price
from backplane.agents.session import AgentRun
from backplane.agents.start import AgentStart
from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.protocol.jsonrpc import Request, RpcError
from backplane.upstream.prices import price_of
from backplane.upstream.rewrites import is_strict

OFFER: Final[dict[str, Any]] = {
    "clientInfo": {"name": "backplane", "version": "0.1.0"},
    "capabilities": {"experimentalApi": True},
}
"""Parameters of `initialize`: our name, and that we support the experimental parts of the protocol."""

SERVERS_S: Final = 30.0
"""Seconds to wait for all MCP servers; then the first turn begins. Codex itself gives up on a server after 10 s."""


class Agent(BaseAgent):
    """The agent of one run."""

    reader: EventReader

    def __init__(self, session: AgentRun, begun: AgentStart) -> None:
        super().__init__(session, EventReader(session.run.now, session.root))
        self.connect(begun)
        self.hooked = Hooked(begun.env[hook.SOCKET], self._hook) if needs_hook(begun) else None
        self._opening, schema = thread_of(begun), session.run.order.abp("output_schema")
        is_sent = isinstance(schema, dict) and is_strict(schema)
        self._turn_members: dict[str, Json] = {"outputSchema": schema} if is_sent else {}
        self._is_listed = begun.row.own_state or begun.row.base_url == "https://api.openai.com/v1"
        """True if the model's list price applies, because the service is the vendor's own."""
        self._model = ""

    @staticmethod
    def image(media_type: str, data: str) -> Json:
        return {"type": "image", "url": f"data:{media_type};base64,{data}"}

    # Opening ----------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Agree on the protocol, experimental parts included, and open the thread."""
        if self.hooked is not None:
            await self.session.tasks.start(self.hooked.run)
        agent = await self.must("initialize", OFFER)
        await self.pipe.notify("initialized", {})
        if self.hooked is not None:
            await self._trust_hook()
        method, params = self._opening
        said = await self.must(method, params)
        thread = mapping(said.get("thread"))
        self.reader.thread, self._model = id_of(thread.get("id"), method, "thread"), str(said.get("model"))
        spec = self.session.spec
        self.reader.price = spec.price or (price_of(self._model) if self._is_listed else None)
        require_price(self.session.run, self.reader.price, repr(self._model))
        more = {"version": thread.get("cliVersion"), "kept": self.begun.is_kept, "agent": agent.get("userAgent")}
        await self.session.announce(self.reader.thread, model=self._model, **more)
        if method != "thread/start" and "developerInstructions" in params:
            await self.session.run.warn("config.vendor.codex.system is told where a conversation begins, and not again")
        # Wait for the MCP servers: tools that are not ready when a turn begins are missing for the whole turn.
        servers = self.begun.servers().keys()
        with anyio.move_on_after(SERVERS_S):
            await self.until(lambda: servers <= self.reader.settled)

    # A turn -----------------------------------------------------------------------------------------------------------

    async def say(self, words: Json) -> Ending:
        ends, number = self.reader.ends, len(self.reader.ends)
        params = {"threadId": self.reader.thread, "input": _text(words), **self._turn_members}
        id_of(mapping((await self.must("turn/start", params)).get("turn")).get("id"), "turn/start", "turn")
        await self.until(lambda: len(ends) > number)
        return self._ended(ends[-1])

    async def add(self, text: str) -> bool:
        turn = self.reader.current
        if not turn or any(end.turn == turn for end in self.reader.ends):
            return False
        params = {"threadId": self.reader.thread, "expectedTurnId": turn, "input": _text(text)}
        return await self.call("turn/steer", **params) is None

    async def stop(self) -> bool:
        """Stop the turn, and every command that still runs."""
        turn, thread = self.reader.current, self.reader.thread
        if turn:
            await self.call("turn/interrupt", threadId=thread, turnId=turn)
            await self.call("thread/backgroundTerminals/clean", threadId=thread)
        return bool(turn)

    def _ended(self, end: TurnEnd) -> Ending:
        if end.status == "failed":
            code = self.session.code_of(end.message, end.info, status=status_of(end.info, end.message))
            return failed(code, plain(end.message) or "the turn failed")
        if end.status != "completed":
            words = f"the turn ended as {end.status}: {end.message}"
            return Ending(outcome="partial", words=words, stopped=end.status == "interrupted")
        return self.judge()

    # Its questions ----------------------------------------------------------------------------------------------------

    async def _trust_hook(self) -> None:
        """Make the agent trust our hook, by its hash, and no other. Raises BackendError: the hook is not trusted."""
        rows = await self._our_hooks()
        trusted = {str(row.get("key")): {"trusted_hash": row.get("currentHash")} for row in rows}
        edit = {"keyPath": "hooks.state", "value": trusted, "mergeStrategy": "upsert"}
        await self.must("config/batchWrite", {"edits": [edit], "reloadUserConfig": True})
        rows = await self._our_hooks()
        if not rows or any(row.get("trustStatus") != "trusted" for row in rows):
            raise BackendError("backend_unavailable", "the agent does not trust our hook, so it would not ask us")

    async def _our_hooks(self) -> list[dict[str, Any]]:
        found = mappings((await self.must("hooks/list", {"cwds": [self.session.root]})).get("data"))
        return [row for each in found for row in mappings(each.get("hooks")) if row.get("source") == "sessionFlags"]

    async def _hook(self, said: dict[str, Any]) -> Json:
        return await self.session.attend(self._before(answers.read_hook(said, self.session.root)), None)

    async def _before(self, call: OpenCall) -> Json:
        """Decide about a command or MCP tool; if denied, end it here, because Codex reports no item for it."""
        refused = (await self.decide(self.reader.begin_call(call), call.request())).refused
        if refused is not None:
            await self.session.emit(self.reader.calls.end(call.id, None, failed=True))
        # Without a decision Codex still requests the approval that it would without the hook.
        return {} if refused is None else hook_answer(refused)

    async def reply(self, request: Request) -> Json | RpcError:
        if request.method == answers.PEOPLE:
            return await self._people(request.params)
        question = answers.read_question(request.method, request.params, self.reader.calls, self.session.root)
        if question is None:
            return await super().reply(request)
        return answers.answer(request.method, (await self.session.gate.decide(question)).refused)

    async def _people(self, params: dict[str, Any]) -> Json:
        """Ask the user the agent's questions; return the answers."""
        given: dict[str, Json] = {}
        for row in mappings(params.get("questions")):
            labels = (one.get("label") for one in mappings(row.get("options")))
            _, text = await self.session.ask_person(row.get("question"), labels)
            given[str(row.get("id"))] = {"answers": [text]}
        return {"answers": given}

    def raw(self) -> dict[str, Json]:
        return {"model": self._model, "session_id": self.reader.thread, "requests": self.reader.spent.requests}


def plain(words: str) -> str:
    """Return the message in a service's JSON error, which the agent may pass on unchanged; any other text as it is."""
    try:
        said = mapping(msgspec.json.decode(words))
    except (ValueError, RecursionError):
        return words
    told = mapping(said.get("error", said)).get("message")
    return told if isinstance(told, str) and told else words


def status_of(info: Json, words: str) -> int | None:
    """Return the HTTP status of the service's answer, from its member or from Codex's error text; None without one."""
    status = mapping(next(iter(mapping(info).values()), None)).get("httpStatusCode")
    if isinstance(status, int) and is_count(status):
        return status
    own = _OWN_SENTENCE.match(words)
    return int(own[1]) if own is not None else None


_OWN_SENTENCE: Final = re.compile(r"unexpected status (\d{3}) ")


def _text(words: Json) -> list[Json]:
    return words if isinstance(words, list) else [{"type": "text", "text": words}]
