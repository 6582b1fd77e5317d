"""One run with such an agent, from the first word to the judged end: the session, the prompts, its questions.

What the protocol has no word for is done here: the shape of an answer is checked, words that come during a turn wait
for its end. Starting the program and what is particular to it are a host's affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec

from backplane.agents.acp.client import Client, Session
from backplane.agents.acp.failure import code_of, said
from backplane.agents.acp.notices import Row
from backplane.agents.acp.story import NEUTRAL, Call, Story, read_usage, total
from backplane.agents.order import Asked, Place, keep_name
from backplane.agents.session import AGAIN, Silence, answered, passed_through, record_denied, wind_up
from backplane.contract.canonical import Json
from backplane.contract.receipt import Usage
from backplane.errors import BackendError, ConfigError
from backplane.host import Done, HostRun
from backplane.policy.paths import TOOLS
from backplane.protocol.jsonrpc import Malformed, Notification, Received, Reply, Request
from backplane.upstream.cost import Price

if TYPE_CHECKING:
    from backplane.tools.structured import Shape

SETTLE_S: Final = 0.1
"""After the answer to a prompt: updates that were sent before it may still come."""

UNCOUNTED: Final = "what this costs is not known any more, so the budget cannot be held (max_budget_usd)"

WITHDRAWN: Final = "the turn was stopped before anybody had answered"


class Ways(msgspec.Struct, frozen=True):
    """What a host says of its agent and of this run."""

    prompt: tuple[Json, ...]
    """Blocks."""
    tools: Mapping[str, str]
    """The agent's names of tools → neutral ones."""
    spoken: Mapping[str, str]
    """Those of them that are told by the neutral name."""
    servers: tuple[dict[str, Any], ...]
    mode: str | None
    """Set when the session is open, where the agent has it."""
    model: str | None
    """Set over the protocol; None where it was named otherwise, or nowhere."""
    configured: bool
    """Whether the model stands in the agent's configuration, too: an agent that offers none may have it."""
    usage: str
    """Where the agent tells its tokens: chunks (one a model call), quota or turn (at a turn's end), last_call, none."""
    silence_s: int
    asked: Asked
    place: Place
    shape: Shape | None
    price: Price | None
    notices: Sequence[Row] = ()
    """What the agent says itself among the words of its model."""


class Turn:
    """One run: the agent's program, its session, and what is said in it."""

    def __init__(self, run: HostRun, ways: Ways, write_fd: int, read_fd: int) -> None:
        self.run, self.ways = run, ways
        self.root = run.order.workspace.root
        self.story: Story = Story(run.now, self.root, ways.spoken, ways.price, ways.notices)
        self.client: Client = Client(write_fd, read_fd, update=self.update, permit=self.permit, watch=self.watch_line)
        self.raw = run.order.abp("mode") == "passthrough"
        self.line = b""
        self.session: Session | None = None
        self.cancelled = self.stopping = False
        self.prompting = False
        """Whether a turn goes on."""
        self.waiting: list[str] = []
        """Words of the user that came meanwhile."""
        self.reply = Reply(0)
        """To the last prompt."""
        self.failure: tuple[str, str] | None = None
        """Code and words of the failure that the last turn ended with, though the agent calls it an end."""
        self.used: list[Usage] = []
        """One a turn."""
        self.acted = False
        self.asking: set[anyio.CancelScope] = set()
        self.over = anyio.Event()
        self.silence = Silence(
            run, ways.silence_s, at_work=lambda: self.story.open_calls, asking=lambda: bool(self.asking)
        )

    # What the agent says and asks -------------------------------------------------------------------------------------

    async def watch_line(self, line: bytes, received: Received) -> None:
        """Keep what is not heard: in passthrough every message of the agent, and that there was a line that is none."""
        self.line = line
        if not self.raw or (isinstance(received, Notification) and received.method == "session/update"):
            return
        if isinstance(received, Malformed):
            await self.run.warn(f"the agent wrote a line that is no message: {received.evidence!r}")
            return
        kind = received.method if isinstance(received, Request | Notification) else "an answer"
        for event in passed_through(self.run, [], msgspec.json.decode(line), line, kind[:80]):
            await self.run.emit(event)

    async def update(self, update: Json) -> None:
        """Tell what the agent told; what it tells of an older conversation is no part of this run."""
        self.silence.heard()
        history = self.session is None and self.ways.asked.wanted is not None
        events = [] if history else self.story.update(update)
        if self.raw:
            events = passed_through(self.run, events, msgspec.json.decode(self.line), self.line, "session/update")
        for event in events:
            await self.run.emit(event)
        if self.story.usages and self._lost_count():
            self.silence.scope.cancel()

    def _lost_count(self) -> bool:
        """Whether there is a budget, and it is not known what the run costs."""
        return self.run.order.config.max_budget_usd is not None and self.story.spent.estimated_cost_usd is None

    async def permit(self, tool_call: dict[str, Any]) -> bool | None:
        """Put a question of the agent to the policy and whoever holds it."""
        call, events = self.story.asked(tool_call)
        for event in events:
            await self.run.emit(event)
        refused: str | None = WITHDRAWN
        if not self.stopping:
            with anyio.CancelScope() as scope:
                self.asking.add(scope)
                try:
                    refused = await self._may(call)
                finally:
                    self.asking.discard(scope)
                    self.silence.heard()
        for event in [] if refused is None else self.story.deny(call, refused):
            await self.run.emit(event)
        return None if refused == WITHDRAWN else refused is None

    async def _may(self, call: Call) -> str | None:
        """Why a call may not run; None when it may."""
        name = self.story.name(call)
        own = call.name or name
        # By every name that the tool has; the control plane is told one of them.
        neutral = self.ways.tools.get(own) or (own if own in TOOLS else NEUTRAL.get(call.kind, own))
        decision = self.run.policy.decide_tool_call(
            own, call.input, root=self.root, cwd=self.root, aliases={own: neutral}
        )
        if decision.allowed == "deny":
            await record_denied(self.run, name, call.input)
            return decision.reason
        if self.run.policy.decide_tool_call(name, call.input, root=self.root).allowed != decision.allowed:
            name = neutral  # What is told above has to be decided there as it is here.
        verdict = await self.run.may(name, call.input, command=call.command, cwd=self.root)
        if verdict.decision == "modify":
            return "the input was changed, and this agent takes no other input than its own"
        return verdict.reason or "denied" if verdict.decision == "deny" else None

    # What is said to it meanwhile -------------------------------------------------------------------------------------

    async def cancel(self) -> None:
        """End the run in order: the agent first, and when it does not, its program."""
        self.cancelled = True
        await wind_up(self.run, self._stop if self.session is not None else None, self.over)

    async def more(self, text: str) -> None:
        """Words of the user while the agent works: the protocol has no place for them in a turn, so they wait."""
        self.waiting.append(text)

    async def interrupt(self) -> None:
        """Stop the turn, or the one that would come next; what waits to be said to the agent is said then."""
        await self._stop()

    async def _stop(self) -> None:
        self.stopping = True
        for scope in list(self.asking):
            scope.cancel()
        if self.session is not None and self.prompting:
            await self.client.cancel(self.session.id)

    # The run ----------------------------------------------------------------------------------------------------------

    async def go(self) -> Done:
        """From the first word to the agent to the end of its work."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.client.run)
            self.session = await self._open()
            self.silence.heard()
            tasks.start_soon(self.silence.watch)
            whole: Done | None = None
            with self.silence.scope:
                whole = await self._work(self.session)
            done = await self._held(whole)
            tasks.cancel_scope.cancel()
        self.over.set()
        return done

    async def _held(self, whole: Done | None) -> Done:
        """The end, where neither silence nor a budget made another one."""
        if self.silence.broken:
            return await self._failed("backend_timeout", self.silence.words)
        if whole is not None and (whole.outcome != "complete" or not self._lost_count()):
            return whole
        await self.run.error(UNCOUNTED, "policy_denied")
        return self._done("partial")

    async def _open(self) -> Session:
        """Agree on the protocol, open the session, and set what the order asks for."""
        await self.client.initialize("backplane", "0.1.0")
        session = await self._session()
        asked = self.ways.asked
        names = {"resumed": asked.resume, "forked": asked.fork}
        body = {"id": session.id, "agent": self.client.agent.get("agentInfo"), "kept": asked.kept}
        body |= {name: id for name, id in names.items() if id is not None}
        await self.run.carry("session", body, f"session {session.id}")
        mode, model = self.ways.mode, self.ways.model
        if mode and mode in session.modes and session.mode != mode:
            fault = await self.client.set("session/set_mode", session.id, modeId=mode)
            if fault is not None:
                raise BackendError("capability_unsupported", f"the agent's mode cannot be set: {fault.message}")
        if model is not None:
            await self._set_model(session, model)
        return session

    async def _session(self) -> Session:
        asked, servers = self.ways.asked, list(self.ways.servers)
        if any("url" in server for server in servers) and not self.client.can("mcpCapabilities", "http"):
            raise BackendError("capability_unsupported", "this agent reaches no MCP server by its address")
        if asked.wanted is None:
            session = await self.client.new_session(self.root, servers)
        else:
            session = await self._go_on(asked, servers)
        if asked.kept:
            keep_name(self.ways.place, session.id, self.root)
        return session

    async def _go_on(self, asked: Asked, servers: list[Any]) -> Session:
        """The conversation that is there already. Raises BackendError, ConfigError."""
        assert asked.wanted is not None
        method = self.client.way_on(fork=asked.fork is not None)
        if method is None:
            word = "fork" if asked.fork is not None else "resume"
            raise BackendError("capability_unsupported", f"this agent says that it cannot {word} a conversation")
        session, fault = await self.client.old_session(method, asked.wanted, self.root, servers)
        if session is None:
            why = said(fault) if fault is not None else "it names no session"
            raise ConfigError("config_invalid", f"the agent cannot go on with conversation {asked.wanted}: {why}")
        return session

    async def _set_model(self, session: Session, model: str) -> None:
        offers = (*session.options.get("model", ()), *session.models)
        if model == session.model or (self.ways.configured and not offers):
            return
        if model in session.options.get("model", ()):
            fault = await self.client.set("session/set_config_option", session.id, configId="model", value=model)
        elif model in session.models:
            fault = await self.client.set("session/set_model", session.id, modelId=model)
        else:
            offered = ", ".join(offers[:20]) or "none by name"
            raise BackendError("backend_model_not_found", f"the agent has no model {model!r}", hint=f"it has {offered}")
        if fault is not None:
            raise BackendError("backend_model_not_found", f"the model {model!r} cannot be set: {fault.message}")

    async def _work(self, session: Session) -> Done:
        async def say(fault: str | None) -> str | None:
            again = [text_block(AGAIN.format(fault=fault))]
            await self._prompt(session, list(self.ways.prompt) if fault is None else again)
            while self.waiting and self.reply.fault is None and self.failure is None and not self.cancelled:
                await self._prompt(session, [text_block(self.waiting.pop(0))])
            whole = self._stop_reason == "end_turn" and self.story.closed_with_words and not self.cancelled
            whole = whole and self.failure is None
            return self.story.last_words if whole else None

        value, fault = await answered(self.run, self.ways.shape, say)
        return await self._ended(fault, value)

    @property
    def _result(self) -> dict[str, Any]:
        return self.reply.result if isinstance(self.reply.result, dict) else {}

    @property
    def _stop_reason(self) -> str:
        return str(self._result.get("stopReason"))

    async def _prompt(self, session: Session, blocks: list[Json]) -> None:
        """One turn to its end."""
        if self.stopping:
            # Before it began; what is said after that is said.
            self.stopping, self.reply = self.cancelled, Reply(0, {"stopReason": "cancelled"})
            self.failure = None
            return
        self.story.begin()
        self.prompting = True
        self.reply = await self.client.prompt(session.id, blocks)
        await anyio.sleep(SETTLE_S)
        self.acted = self.acted or self.story.acted
        if self.reply.fault is None:
            counted = isinstance(self._result.get("usage"), dict)
            self.failure = self.story.failure(counted=counted) if self._stop_reason == "end_turn" else None
            for event in self.story.end(self._stop_reason):
                await self.run.emit(event)
            self.used.append(used_in(self.ways.usage, self._result, self.story.acted))
        self.prompting, self.stopping = False, self.cancelled

    async def _ended(self, fault: str | None, value: Json) -> Done:
        """Judge a run by all that the agent says, not by its word for the end."""
        refused = self.reply.fault
        if refused is not None and refused.gone:
            raise BackendError("backend_crashed", "the agent's program ended in the middle of its turn")
        if refused is not None:
            return await self._failed(code_of(refused.code, said(refused)), said(refused))
        stop, unanswered = self._stop_reason, not self.story.closed_with_words
        if stop == "cancelled" or self.cancelled:
            return self._done("partial")
        if self.failure is not None:
            return await self._failed(*self.failure)
        if stop == "refusal":
            return await self._failed("backend_content_filtered", "the model refused to go on")
        if fault is not None:
            return await self._failed("validation_failed", fault)
        code = "backend_unavailable" if not self.acted else None if self.story.denied else self.story.notices.silent
        if stop == "end_turn" and unanswered and code is not None:
            silent = "the agent ended its turn without a word: so it hides a failure of its model"
            return await self._failed(code, silent)
        if stop == "end_turn" and unanswered:
            await self.run.warn("the agent ended its turn after a tool and without a word")
        if stop != "end_turn" or unanswered:
            return self._done("partial")
        return self._done("complete", {} if self.ways.shape is None else {"structured_output": value})

    async def _failed(self, code: str, words: str) -> Done:
        for event in self.story.message():
            await self.run.emit(event)
        await self.run.error(words, code)
        return self._done("failed", {"error": words})

    def _done(self, outcome: Any, raw: dict[str, Json] | None = None) -> Done:
        kept = {name: self._result[name] for name in ("usage", "_meta", "stopReason") if name in self._result}
        usage = self.story.spent if self.ways.usage == "chunks" else total(self.used, strict=True)
        return Done(outcome=outcome, usage=Usage() if outcome == "failed" else usage, usage_raw={**kept, **(raw or {})})


def text_block(text: str) -> Json:
    return {"type": "text", "text": text}


def used_in(where: str, result: dict[str, Any], acted: bool) -> Usage:
    """Tokens of one turn, from where this agent tells them; what it tells of a part alone stays unknown."""
    meta = result.get("_meta")
    quota = meta.get("quota") if isinstance(meta, dict) else None
    if where == "quota" and isinstance(quota, dict):
        return read_usage(quota.get("token_count")) or Usage()
    if where == "turn" or (where == "last_call" and not acted):
        return read_usage(result.get("usage")) or Usage()
    return Usage()
