"""Our own agent: sends requests to a model's API and runs the tools that it calls, until the model has answered.

The tools are those of `backplane.tools`; the control plane decides about each call. `upstream.completion` sends the
requests. The variable `presets.OPTIONS` has the service's options; an order's own settings are in `config.vendor.api`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from backplane.agents.agent import Agent as BaseAgent
from backplane.agents.agent import Ending, limited
from backplane.agents.gate import ToolRequest
from backplane.agents.order import (
    RunSpec,
    asked_at,
    budget_of,
    read_history,
    read_images,
    require_price,
    sampling_of,
    server_rows,
    shape_of,
    snippets,
)
from backplane.agents.program import first_of
from backplane.agents.reader import EventReader, counts_of
from backplane.agents.session import AgentRun
from backplane.config import child_environment
from backplane.contract import receipt
from backplane.contract.canonical import Json
from backplane.contract.conversation import Image
from backplane.contract.events import AgentEvent, AssistantMessage
from backplane.dialects.history import user_message
from backplane.dialects.ir import Conversation, Message, Text, ToolOutput, ToolUse
from backplane.errors import BackendError, ConfigError
from backplane.host import Done, HostRun
from backplane.tools import SPECS, CallResult, Toolbox
from backplane.tools.keys import take, without
from backplane.tools.mcp import Servers, open_servers
from backplane.tools.places import ToolRefused
from backplane.tools.specs import BY_NAME, no_tool
from backplane.upstream.client import Upstream
from backplane.upstream.completion import ModelClient, ModelTurn
from backplane.upstream.cost import HIDDEN_TOKENS, MICROS, Spent, most, read_price
from backplane.upstream.endpoint import Endpoint, with_keys
from backplane.upstream.failure import UpstreamError
from backplane.upstream.presets import OPTIONS, read_options
from backplane.upstream.prices import price_of

TURNS_MAX: Final = 250
"""Maximum turns if the order has no limit; long tasks take fifty, and a loop must end."""

OUTPUT_TOKENS: Final = 16_384
"""Maximum tokens of an answer under a reserved budget if the order sets no `max_tokens`: what most models allow.
Without a limit, a call has no highest price."""

OUTPUT_TOKENS_MIN: Final = 256
"""Minimum tokens for an answer that make a call worthwhile; if the budget leaves less, the run ends before the call."""

RESERVED: Final = (
    "a call was made only where the most it could cost was left: each byte of its request as a token of input, and "
    "max_tokens of output; a call of unknown cost counts as that most"
)

CONTEXT_CHARS_MAX: Final = 64 * 1024
"""Maximum characters of a context file in the prompt; the model can read the rest with a tool."""

PARAMETERS: Final = (
    "max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "frequency_penalty", "presence_penalty",
    "reasoning_effort", "reasoning_budget", "reasoning_shown", "verbosity", "service_tier",
)  # fmt: skip
"""Parameters of the model that `config.vendor.api` may set, in addition to the members in `OWN`."""

OWN: Final = ("system", "without_tools")
"""Members of `config.vendor.api` that are not parameters of the model."""

NO_TOOLS: Final = (
    "the service took no tools, so the model could neither read nor change files; "
    "set config.vendor.api.without_tools = true if such a run may be complete"
)

_COUNTERS: Final = {
    "input": ("input_tokens",), "output": ("output_tokens",), "cache_read": ("cache_read_tokens",),
    "cache_write": ("cache_write_tokens",),
}  # fmt: skip

MARKED: Final = frozenset({"claude"})
"""Dialects whose services cache a prompt only up to a mark; the others do so by themselves, or not at all."""

SYSTEM: Final = (
    "You do software work in a folder, the workspace, with the tools you are given. Paths are relative to its root. "
    "Look before you change something, change only what the task needs, and check your work by running what the "
    "workspace offers for that. Calls that do not depend on each other can be made at once. A call that is refused "
    "stays refused: find another way or say what is in the way. When you are done, say shortly what you did."
)


# The order ------------------------------------------------------------------------------------------------------------


class Task(msgspec.Struct, frozen=True):
    """An order, checked before the first request."""

    conversation: Conversation
    """The model, its parameters, system text and tools, and the messages before this order."""
    spec: RunSpec
    reserved: bool = False
    """True if the order has a share of a parent's budget, or a token budget: then a call is made only if what is left
    covers its highest cost."""
    budget_tokens: int | None = None
    """Maximum tokens of the whole run; None without a limit."""
    images: tuple[Image, ...] = ()
    """Images to send with the task."""
    without_tools: bool = False
    """True if a run without tools, at a service that takes none, may be complete."""


def read_task(run: HostRun, service: Endpoint, toolbox: Toolbox) -> Task:
    """Read the order.

    Raises:
        ConfigError: `config_invalid`, no model is named, a parameter is unknown, or a budget cannot be enforced.
    """
    config = run.order.config
    model = config.model or service.model
    if not model:
        raise ConfigError("config_invalid", "no model is named", hint='--model NAME, or options = {model = "…"}')
    own, allowed = config.vendor.get("api", {}), {*PARAMETERS, *OWN}
    unknown = sorted(set(own) - allowed) if isinstance(own, dict) else ["api"]
    if unknown:
        raise ConfigError("config_invalid", f"config.vendor.api: {unknown[0]!r}", hint=", ".join(sorted(allowed)))
    price = price_of(model) if service.listed else None
    if service.prices is not None:
        price = read_price(service.prices, "options.prices")
    require_price(run, price, repr(model))
    tokens = run.order.abp("budget_tokens")
    if tokens is not None and not isinstance(tokens, int):
        raise ConfigError("config_invalid", "config.vendor.abp.budget_tokens", hint="give a whole number of tokens")
    shape = shape_of(run)
    words = (SYSTEM, own.get("system"), run.order.abp("system"), shape.request() if shape is not None else None)
    system = Text(text="\n\n".join(str(part) for part in words if part))
    limit = {} if service.max_output_tokens is None else {"max_tokens": service.max_output_tokens}
    parameters = {name: value for name, value in own.items() if name not in OWN} | sampling_of(run)
    messages = (Message(role="system", parts=(system,)), *read_history(run))
    return Task(
        conversation=Conversation(dialect="", model=model, options={**limit, **parameters}, messages=messages),
        spec=RunSpec(
            prompt=prompt_of(run, toolbox),
            shape=shape,
            price=price,
            budget_micros=budget_of(run),
            turns_max=TURNS_MAX if config.max_turns is None else config.max_turns,
        ),
        reserved=isinstance(run.order.abp("parent"), str) or tokens is not None,
        budget_tokens=tokens,
        images=read_images(run),
        without_tools=own.get("without_tools") is True,
    )


def prompt_of(run: HostRun, toolbox: Toolbox) -> str:
    """Return the prompt: the order's task, snippets and files."""
    return "\n\n".join([run.order.task, *snippets(run), *(_shown(toolbox, path) for path in run.order.context.files)])


def _shown(toolbox: Toolbox, path: str) -> str:
    try:
        text = toolbox.tree.read(path).decode()
    except (ToolRefused, UnicodeDecodeError) as error:
        return f"{path}: not shown ({error if isinstance(error, ToolRefused) else 'no text'})"
    cut = "" if len(text) <= CONTEXT_CHARS_MAX else f"\n[cut; the file has {len(text)} characters]"
    return f"{path}:\n{text[:CONTEXT_CHARS_MAX]}{cut}"


# The loop -------------------------------------------------------------------------------------------------------------


class Account(EventReader):
    """Counts the usage of model calls; the agent itself reports everything else."""

    has_called = False
    """True if a model call was begun; even a failed one may have cost something."""

    def used(self) -> receipt.Usage:
        if not self.has_called:
            return receipt.Usage(input_tokens=0, output_tokens=0, request_units=0, estimated_cost_usd=0.0)
        return super().used()


class Agent(BaseAgent):
    """Our own agent in one run: it sends requests to the model, and runs the tools that the model calls."""

    keeps_calls = False
    is_ours = True
    reader: Account

    def __init__(self, session: AgentRun, task: Task, model: ModelClient, toolbox: Toolbox, servers: Servers) -> None:
        super().__init__(session, Account(session.run.now, toolbox.tree.root))
        self.model, self.toolbox, self.servers, self.task = model, toolbox, servers, task
        self._most: dict[str, int | None] = {"usd_micros": 0 if task.spec.price is not None else None, "tokens": 0}
        """Most that the calls so far can have cost, in dollars and tokens; None if the model has no price."""
        self._run = session.run
        model.keeps_limit = task.reserved
        tools = (*SPECS, *servers.specs)
        self._conversation = msgspec.structs.replace(task.conversation, dialect=model.dialect, tools=tools)
        self._images = task.images
        """Images that are not sent yet."""
        self._reported: dict[str, Any] = {}
        self._named: str | None = None
        """The service's name of the model; None before the first answer."""

    async def run(self) -> None:
        """Return at once: this agent has no process whose messages could be read."""

    async def say(self, words: Json) -> Ending:
        """Send requests to the model, and run its tool calls, until it has answered or a limit is reached."""
        images, self._images = self._images, ()
        self._add(user_message(str(words), images))
        return await self._go_on()

    async def again(self, words: Json, *, acted: bool) -> Ending:
        """Repeat the request with the conversation so far; no message or tool call is repeated."""
        return await self._go_on()

    def reset_s(self, error: BackendError | None) -> float | None:
        return error.failure.retry_after_s if isinstance(error, UpstreamError) else None

    async def _go_on(self) -> Ending:
        turns_max = self.session.spec.turns_max or 0
        while self.reader.spent.requests < turns_max:
            conversation = _marked(self._conversation)
            worst: dict[str, int | None] = {}
            if self.task.reserved:
                sent = self.model.request_bytes(conversation) + HIDDEN_TOKENS
                room, why = self._room(conversation, sent)
                if why:
                    await self._report(self.reader.used())  # The control plane needs the usage before the `final`.
                    return limited("budget", why)
                options = {**conversation.options, "max_tokens": room}
                conversation = msgspec.structs.replace(conversation, options=options)
                worst = self._worst(sent, room)
            self.reader.has_called = True
            longest = int(conversation.options.get("max_tokens") or OUTPUT_TOKENS)
            self.model.on_lost = functools.partial(self._lost, longest)
            turn = await self.model.ask(conversation, self._hear, now=self._run.now)
            await self._count(turn, worst)
            self._add(turn.message)
            if turn.text or turn.proof is not None:
                await self._run.emit(_said(turn, self._run.now()))
            self.reader.goes_on = bool(turn.calls)
            limit = self.session.limit()
            results = [await self._result(call, limit) for call in turn.calls]
            if limit is not None:
                return limit
            if results:
                self._add(Message(role="tool", parts=tuple(results)))
            elif turn.stop != "pause":
                return self._ended(turn)
        return limited("max_turns", f"the limit of {turns_max} turns")

    def _add(self, message: Message) -> None:
        messages = (*self._conversation.messages, message)
        self._conversation = msgspec.structs.replace(self._conversation, messages=messages)

    def _ended(self, turn: ModelTurn) -> Ending:
        if turn.stop in ("refusal", "content_filter"):
            fact = f"the model's service withheld the answer ({turn.stop_raw or turn.stop})"
            raise BackendError("backend_content_filtered", fact, hint="say the task in other words")
        if turn.stop == "max_tokens":
            words = "the answer was cut at the limit of its length (max_tokens)"
        elif self.model.has_lost_tools and not self.task.without_tools:
            words = NO_TOOLS
        else:
            words = "" if turn.text else "the model ended without an answer"
        return Ending(outcome="partial" if words else "complete", words=words, text=turn.text)

    # Cost -------------------------------------------------------------------------------------------------------------

    def _room(self, conversation: Conversation, sent: int) -> tuple[int, str]:
        """Return the maximum tokens of the next answer, so that its call costs no more than the rest of the budget.

        Args:
            sent: maximum tokens of the request.

        Returns:
            The tokens, and why the call must not be made (empty if it may).
        """
        budget, tokens, price = self.task.spec.budget_micros, self.task.budget_tokens, self.task.spec.price
        room = int(conversation.options.get("max_tokens") or OUTPUT_TOKENS)
        least = min(room, OUTPUT_TOKENS_MIN)
        if budget is not None and price is not None:
            left, a_million = budget - (self._most["usd_micros"] or 0), most(price, 0, MICROS)
            free = left - most(price, sent, 0)
            room = min(room, free * MICROS // a_million if a_million else room if free >= 0 else 0)
            if room < least:
                return 0, f"{left / MICROS:g} USD are left, and the next call could cost more (max_budget_usd)"
        if tokens is not None:
            left = tokens - (self._most["tokens"] or 0)
            room = min(room, left - sent)
            if room < least:
                return 0, f"{left} tokens are left, and the next call could use more (budget_tokens)"
        return room, ""

    def _worst(self, sent: int, room: int) -> dict[str, int | None]:
        """Return the highest cost of a call."""
        price = self.task.spec.price
        return {"usd_micros": None if price is None else most(price, sent, room), "tokens": sent + room}

    def _spend(self, costs: Mapping[str, int | None]) -> None:
        """Add a call's money and tokens to the highest possible totals; one unknown value makes its total unknown."""
        for name, more in costs.items():
            so_far = self._most[name]
            self._most[name] = None if so_far is None or more is None else so_far + more

    async def _count(self, turn: ModelTurn, worst: Mapping[str, int | None]) -> None:
        one = Spent().plus(turn.usage, self.task.spec.price)
        tokens = None if one.input is None or one.output is None else one.input + one.output
        known = {"usd_micros": one.micros, "tokens": tokens}
        self._spend({name: worst.get(name) if cost is None else cost for name, cost in known.items()})
        self.reader.spent = self.reader.spent.plus(turn.usage, self.task.spec.price)
        self._named = turn.model or self._named
        await self._report(self.reader.spent.usage())

    async def _lost(self, longest: int, request: dict[str, Any]) -> bool:
        """Count a call whose answer was lost with its highest cost; return True if it may be repeated."""
        worst = self._worst(len(msgspec.json.encode(request)) + HIDDEN_TOKENS, longest)
        self._spend(worst)
        self.reader.spent = self.reader.spent.plus_lost(worst["usd_micros"])
        await self._report(self.reader.spent.usage())
        limits = {"usd_micros": self.task.spec.budget_micros, "tokens": self.task.budget_tokens}
        for name, limit in limits.items():
            used, again = self._most[name], worst[name] if self.task.reserved else 0
            if limit is not None and (used is None or used + (again or 0) > limit):
                return False
        return True

    async def _hear(self, event: AgentEvent) -> None:
        """Emit an event of a turn; in place of its counters, report those of the whole run."""
        body = event.ext.get("usage") if isinstance(event.ext, dict) else None
        if isinstance(body, dict):
            counts = counts_of([body], _COUNTERS)
            await self._report(self.reader.spent.plus(counts, self.task.spec.price).usage())
        else:
            await self._run.emit(event)

    async def _report(self, usage: receipt.Usage) -> None:
        counters = msgspec.to_builtins(usage)
        known = {name: value for name, value in counters.items() if value is not None}
        if known != self._reported:
            self._reported = known
            words = f"{usage.input_tokens or 0} tokens in, {usage.output_tokens or 0} out so far"
            await self._run.carry("usage", known, words)

    def raw(self) -> dict[str, Json]:
        price, spent = self.task.spec.price, self.reader.spent
        raw: dict[str, Json] = {
            "model": self._named or self._conversation.model,
            "protocol": self.model.protocol,
            "turns": spent.requests,
        }
        if price is not None:
            raw["cost"] = {"usd_micros": spent.micros, "source": price.source, "read_on": price.read_on or None}
        if self.task.reserved:
            raw["budget_rule"] = RESERVED
        return raw

    # Tools ------------------------------------------------------------------------------------------------------------

    async def _result(self, call: ToolUse, limit: Ending | None) -> ToolOutput:
        """Run a call, unless a limit of the run is reached, and report its result."""
        if limit is None:
            result = await self._call(call)
        else:
            result = CallResult(f"not run: {limit.words}", is_error=True)
        await self._run.tool_result(call.name, result.text, is_error=result.is_error, id=call.id)
        return ToolOutput(id=call.id, content=(Text(text=result.text),), is_error=result.is_error)

    async def _call(self, call: ToolUse) -> CallResult:
        name = call.name
        request = ToolRequest(id=call.id, tool=name, name=name, input=call.input, takes_input=True)
        verdict = await self.session.gate.decide(request)
        self.session.verdicts.pop(call.id, None)  # Services may give a later call the same id.
        if verdict.refused is not None:
            return CallResult(f"policy_denied: {verdict.refused}", is_error=True)
        input = verdict.input
        if name in self.servers:
            result = await self.servers.call(name, input)
        elif name in BY_NAME:
            result = await self.toolbox.run(name, input)
        else:
            result = CallResult(no_tool(name, [*BY_NAME, *(spec.name for spec in self.servers.specs)]), is_error=True)
        if result.ran is not None:
            await self._run.command_executed(result.ran.command, result.ran.exit_code, result.ran.output)
        for change in result.changes:
            await self._run.file_changed(change.path, change.summary)
        # Hooks see a result before the model does.
        text, is_error = await self._run.shown(name, input, result.text, id=call.id, is_error=result.is_error)
        return msgspec.structs.replace(result, text=str(text), is_error=is_error)


def _marked(conversation: Conversation) -> Conversation:
    """Mark the conversation's end for a service that caches up to a mark, because the next turn sends it again."""
    if conversation.dialect not in MARKED:
        return conversation
    first, *between, last = conversation.messages
    # An answer at the end may not have a mark; that occurs only if a paused answer is continued.
    end = last if last.role == "assistant" else _kept(last)
    return msgspec.structs.replace(conversation, messages=(_kept(first), *between, end))


def _kept(message: Message) -> Message:
    *parts, last = message.parts
    return msgspec.structs.replace(message, parts=(*parts, msgspec.structs.replace(last, cache={})))


def _said(turn: ModelTurn, now: str) -> AgentEvent:
    proof: Any = {} if turn.proof is None else {"ext": {"signature": turn.proof}}
    return AssistantMessage(ts=now, text=turn.text, **proof)


# The run --------------------------------------------------------------------------------------------------------------


@functools.cache
def _own_service() -> tuple[Endpoint, dict[str, str]]:
    """Return the service in this process's options, and its keys, which are removed from the environment."""
    service = read_options(msgspec.json.decode(os.environ.get(OPTIONS, "{}")), "the options")
    return service, take(service.variables)


async def drive(run: HostRun) -> Done:
    """Run the order with a model of this process's service."""
    service, keys = _own_service()
    root, env = run.order.workspace.root, without(child_environment({}, run.order.config.env, os.environ), keys)

    async def hear(text: str) -> None:
        last = text.rstrip("\n").rpartition("\n")[2][:200]
        await run.carry("output", {"stream": "stdout", "text": text}, last if text else "the command still runs")

    async def warn(name: str, words: str) -> None:
        await run.carry("absent_server", {"name": name}, words)

    async def ask(question: str, options: tuple[str, ...]) -> str:
        return (await session.ask_person(question, options))[1]

    toolbox = Toolbox(root, run.policy, env=env, hear=hear, ask_user=ask, grace_s=lambda: run.grace_s)
    task = read_task(run, service, toolbox)
    endpoint = msgspec.structs.replace(
        with_keys(service, keys), base_url=asked_at(service.base_url) or service.base_url
    )
    async with (
        Upstream(endpoint) as upstream,
        open_servers(server_rows(run, (), timed=True), env=env, cwd=root, warn=warn) as servers,
    ):
        model = ModelClient(upstream, parallel=service.parallel_tools, stream=service.stream, dialect=service.dialect)
        session = AgentRun(run, task.spec, lambda session: Agent(session, task, model, toolbox, servers))
        try:
            return await session.go()
        except BaseExceptionGroup as group:
            raise first_of(group) from group
