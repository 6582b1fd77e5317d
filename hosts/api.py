"""An agent over a model's API: asks the model, runs the tools it calls, and asks again until it is done.

The tools are ours (`backplane.tools`), under the policy through the kit's question; the model is
reached by `backplane.upstream.completion`. Which service it is stands in the variable `OPTIONS`, see
`backplane.upstream.presets`; what an order says beside the contract's own fields, under `config.vendor.api`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backplane.contract.capability import EMULATED, NATIVE
from backplane.contract.events import AgentEvent
from backplane.errors import BackendError, ConfigError, ContractError
from backplane.host import Done, Host, HostRun, main
from backplane.upstream.presets import OPTIONS, VARIABLE, Service, read_options

if TYPE_CHECKING:
    from backplane.ir import Conversation, Message, ToolResult, ToolUse, Usage
    from backplane.tools import Result, Toolbox
    from backplane.tools.mcp import Servers
    from backplane.tools.structured import Shape
    from backplane.upstream.completion import Model, Turn
    from backplane.upstream.cost import Price, Spent

HOST: Final = Host(
    id="api",
    capabilities={
        **dict.fromkeys(("streaming", "tool_use", "function_calling", "system_message", "max_tokens"), NATIVE),
        **dict.fromkeys(
            ("tool_read", "tool_write", "tool_edit", "tool_bash", "tool_glob", "tool_grep", "tool_web_fetch"), EMULATED
        ),
        **dict.fromkeys(("tool_ask_user", "structured_output_json_schema", "mcp_client"), EMULATED),
    },
    heeds=("model", "max_turns", "max_budget_usd", "context", "mcp_servers", "output_schema"),
)

TURNS_MAX: Final = 250
"""Turns where the order names no limit; long tasks take fifty, and a loop has to end."""

CALLS_MAX: Final = 64
"""Calls of one turn that are run; models make a dozen, and the others are answered as too many."""

REPAIRS_MAX: Final = 2
"""Tries to correct an answer of the wrong shape; who needs a third does not find it."""

CONTEXT_CHARS_MAX: Final = 64 * 1024
"""Of one context file that is shown at once; the model reads on by itself."""

CONTEXT_FILES_MAX: Final = 50
"""Context files shown; further ones are named."""

PARAMETERS: Final = (
    "max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "frequency_penalty", "presence_penalty",
    "reasoning_effort", "reasoning_budget", "reasoning_shown", "verbosity", "service_tier",
)  # fmt: skip
"""What `config.vendor.api` may set, beside `system`; the others belong to the loop."""

MARKED: Final = frozenset({"claude"})
"""Dialects whose services keep a prompt only up to a mark; the others do so by themselves, or not at all."""

SYSTEM: Final = (
    "You do software work in a folder, the workspace, with the tools you are given. Paths are relative to its root. "
    "Look before you change something, change only what the task needs, and check your work by running what the "
    "workspace offers for that. Calls that do not depend on each other can be made at once. A call that is refused "
    "stays refused: find another way or say what is in the way. When you are done, say shortly what you did."
)


# What a run is asked --------------------------------------------------------------------------------------------------


class Task(msgspec.Struct, frozen=True):
    """What the order says, checked before anything is asked."""

    model: str
    parameters: dict[str, Any]
    system: str
    shape: Shape | None
    price: Price | None
    turns_max: int
    budget_micros: int | None


def read_task(run: HostRun, service: Service) -> Task:
    """Read the order.

    Raises:
        ConfigError: `config_invalid`, there is no model, a parameter is none, or a budget cannot be held.
    """
    from backplane.tools.structured import Shape
    from backplane.upstream.cost import micros, price_of, read_price

    config = run.order.config
    model = config.model or service.model
    if not model:
        raise ConfigError("config_invalid", "no model is named", hint='--model NAME, or options = {model = "…"}')
    own = config.vendor.get("api", {})
    allowed = {*PARAMETERS, "system"}
    if not isinstance(own, dict) or not set(own) <= allowed:
        unknown = sorted(set(own) - allowed) if isinstance(own, dict) else ["api"]
        raise ConfigError("config_invalid", f"config.vendor.api: {unknown[0]!r}", hint=", ".join(sorted(allowed)))
    price = read_price(service.prices, "options.prices") if service.prices is not None else None
    price = price or (price_of(model) if service.listed else None)
    budget = config.max_budget_usd
    if budget is not None and price is None:
        fact = f"max_budget_usd cannot be held: what {model!r} costs here is not known"
        raise ConfigError("config_invalid", fact, hint="options = {prices = {input = …, output = …}}, in dollars")
    schema = run.order.abp("output_schema")
    shape = None if schema is None else Shape(schema)
    words = (SYSTEM, own.get("system"), shape.request() if shape is not None else None)
    parameters = {name: value for name, value in own.items() if name != "system"}
    if service.max_output_tokens is not None:
        parameters = {"max_tokens": service.max_output_tokens, **parameters}
    return Task(
        model=model,
        parameters=parameters,
        system="\n\n".join(str(part) for part in words if part),
        shape=shape,
        price=price,
        turns_max=TURNS_MAX if config.max_turns is None else config.max_turns,
        budget_micros=None if budget is None else micros(Decimal(str(budget))),
    )


def conversation_of(run: HostRun, task: Task, dialect: str, toolbox: Toolbox, servers: Servers) -> Conversation:
    """The first request: rules, task, context and tools."""
    from backplane.ir import Conversation, Message, Text
    from backplane.tools import SPECS

    blocks = [run.order.task, *(f"{snippet.name}:\n{snippet.content}" for snippet in run.order.context.snippets)]
    blocks += [_shown(toolbox, path) for path in run.order.context.files[:CONTEXT_FILES_MAX]]
    if len(run.order.context.files) > CONTEXT_FILES_MAX:
        blocks.append("Also to look at: " + ", ".join(run.order.context.files[CONTEXT_FILES_MAX:]))
    return Conversation(
        dialect=dialect,
        model=task.model,
        messages=(
            Message(role="system", parts=(Text(text=task.system),), flat=True),
            Message(role="user", parts=(Text(text="\n\n".join(blocks)),), flat=True),
        ),
        tools=(*SPECS, *servers.specs),
        options=task.parameters,
    )


def _shown(toolbox: Toolbox, path: str) -> str:
    from backplane.tools.places import Refused

    try:
        text = toolbox.tree.read(path).decode()
    except (Refused, UnicodeDecodeError) as error:
        return f"{path}: not shown ({error if isinstance(error, Refused) else 'no text'})"
    cut = "" if len(text) <= CONTEXT_CHARS_MAX else f"\n[cut; the file has {len(text)} characters]"
    return f"{path}:\n{text[:CONTEXT_CHARS_MAX]}{cut}"


# The loop -------------------------------------------------------------------------------------------------------------


class Agent:
    """One run: turns of the model, and the calls between them."""

    def __init__(self, run: HostRun, model: Model, toolbox: Toolbox, servers: Servers, task: Task) -> None:
        from backplane.upstream.cost import Spent

        self.run = run
        self.model = model
        self.toolbox = toolbox
        self.servers = servers
        self.task = task
        self.spent = Spent()
        self.reported: dict[str, Any] = {}
        self.repairs = 0
        self.named: str | None = None
        """The model as the service calls it."""
        self.structured: list[Any] = []

    async def work(self, conversation: Conversation) -> Done:
        """Turn after turn until the model has answered, or a limit is reached."""
        for number in range(1, self.task.turns_max + 1):
            turn = await self.model.ask(_marked(conversation), self._hear, now=self.run.now)
            await self._count(turn)
            if turn.text:
                await self.run.message(turn.text)
            limit = self._limit(number, turn)
            if limit is not None:
                await self._answers(turn.calls, f"not run: {limit[1]}")
                return await self._stopped(*limit)
            more = await self._go_on(turn)
            if more is None:
                return await self._done(turn)
            conversation = _with(conversation, turn.message, *more)
        return await self._stopped("max_turns", f"the limit of {self.task.turns_max} turns")

    async def _hear(self, event: AgentEvent) -> None:
        """Pass on what a turn says; counters become those of the whole run."""
        body = event.ext.get("usage") if isinstance(event.ext, dict) else None
        if isinstance(body, dict):
            await self._report(self.spent.plus(_usage(body), self.task.price))
        else:
            await self.run.emit(event)

    async def _count(self, turn: Turn) -> None:
        self.spent = self.spent.plus(turn.usage, self.task.price)
        self.named = turn.model or self.named
        await self._report(self.spent)

    async def _report(self, spent: Spent) -> None:
        counters = msgspec.to_builtins(spent.usage())
        known = {name: value for name, value in counters.items() if value is not None}
        if known == self.reported:
            return
        self.reported = known
        await self.run.carry("usage", known, f"{spent.input or 0} tokens in, {spent.output or 0} out so far")

    def _limit(self, number: int, turn: Turn) -> tuple[str, str] | None:
        """The limit that ends the run now, as a reason and in words."""
        budget, cost = self.task.budget_micros, self.spent.micros
        if budget is not None and cost is None:
            return "budget", "what this costs is not known any more, so the budget cannot be held (max_budget_usd)"
        if budget is not None and cost is not None and cost > budget:
            return "budget", f"{cost / 1e6:g} USD spent of {budget / 1e6:g} (max_budget_usd)"
        if number == self.task.turns_max and turn.calls:
            return "max_turns", f"the limit of {number} turns (max_turns)"
        return None

    async def _go_on(self, turn: Turn) -> tuple[Message, ...] | None:
        """What the model is told next; None when it is done."""
        from backplane.ir import Message, Text

        if turn.calls:
            return (Message(role="tool", parts=tuple(await self._answers(turn.calls))),)
        if turn.stop == "pause":
            return ()
        if turn.stop in ("refusal", "content_filter"):
            fact = f"the model's service withheld the answer ({turn.stop_raw or turn.stop})"
            raise BackendError("backend_content_filtered", fact, hint="say the task in other words")
        if self.task.shape is None:
            return None
        value, fault = self.task.shape.read(turn.text)
        if fault is None:
            self.structured = [value]
            return None
        if self.repairs == REPAIRS_MAX:
            fact = f"the answer still does not match the output schema after {REPAIRS_MAX} repairs: {fault}"
            raise ContractError("validation_failed", fact, hint="loosen the schema or take another model")
        self.repairs += 1
        await self.run.warn(f"the answer does not match the output schema, repair {self.repairs}: {fault}")
        words = (
            f"This does not satisfy the JSON Schema:\n{fault}\nAnswer with the corrected JSON value and nothing else."
        )
        return (Message(role="user", parts=(Text(text=words),), flat=True),)

    async def _answers(self, calls: tuple[ToolUse, ...], refused: str | None = None) -> list[ToolResult]:
        """Every call has its answer, in the order of the calls."""
        answers = []
        for number, call in enumerate(calls):
            why = refused or (f"not run: more than {CALLS_MAX} calls at once" if number >= CALLS_MAX else None)
            answers.append(await self._answer(call, why))
        return answers

    async def _answer(self, call: ToolUse, refused: str | None) -> ToolResult:
        from backplane.ir import Text, ToolResult
        from backplane.tools import Result

        result = Result(refused, is_error=True) if refused is not None else await self._call(call)
        await self.run.tool_result(call.name, result.text, is_error=result.is_error, id=call.id)
        return ToolResult(id=call.id, content=(Text(text=result.text),), is_error=result.is_error, flat=True)

    async def _call(self, call: ToolUse) -> Result:
        from backplane.tools import Result

        name, input, root = call.name, call.input, self.toolbox.tree.root
        command = input.get("command") if name == "bash" and isinstance(input, dict) else None
        verdict = await self.run.may(name, input, command=command if isinstance(command, str) else None, cwd=root)
        if verdict.decision == "deny":
            return Result(f"policy_denied: {verdict.reason}", is_error=True)
        if verdict.decision == "modify" and verdict.input is not msgspec.UNSET:
            input = verdict.input
            denied = self._denied(name, input)
            if denied is not None:
                return denied
        result = await (self.servers.call(name, input) if name in self.servers else self.toolbox.run(name, input))
        if result.ran is not None:
            await self.run.command_executed(result.ran.command, result.ran.exit_code, result.ran.output)
        for change in result.changes:
            await self.run.file_changed(change.path, change.summary)
        return await self._seen(name, input, result)

    def _denied(self, name: str, input: Any) -> Result | None:
        from backplane.tools import Result

        root = self.toolbox.tree.root
        decision = self.run.policy.decide_tool_call(name, input, root=root, cwd=root)
        return Result(f"policy_denied: {decision.reason}", is_error=True) if decision.allowed == "deny" else None

    async def _seen(self, name: str, input: Any, result: Result) -> Result:
        """Let hooks look at a result before the model does."""
        text, is_error = await self.run.shown(name, input, result.text, is_error=result.is_error)
        return msgspec.structs.replace(result, text=str(text), is_error=is_error)

    # Ends.

    async def _stopped(self, reason: str, words: str) -> Done:
        # A turn more than there may be: that is how a control plane learns which limit it was.
        if reason == "max_turns":
            await self.run.carry("turn", {"stop_reason": reason}, words)
        await self.run.error(words, "policy_denied")
        return self._ended("partial")

    async def _done(self, turn: Turn) -> Done:
        if turn.stop == "max_tokens":
            await self.run.error("the answer was cut at the limit of its length (max_tokens)")
            return self._ended("partial")
        if not turn.text:
            await self.run.error("the model ended without an answer")
            return self._ended("partial")
        return self._ended("complete")

    def _ended(self, outcome: Any) -> Done:
        task, price = self.task, self.task.price
        raw: dict[str, Any] = {
            "model": self.named or task.model,
            "protocol": self.model.protocol,
            "turns": self.spent.requests,
        }
        if price is not None:
            raw["cost"] = {"usd_micros": self.spent.micros, "source": price.source, "read_on": price.read_on or None}
        if self.structured:
            raw["structured_output"] = self.structured[0]
        return Done(outcome=outcome, usage=self.spent.usage(), usage_raw=raw)


def _with(conversation: Conversation, *messages: Message) -> Conversation:
    return msgspec.structs.replace(conversation, messages=(*conversation.messages, *messages))


def _marked(conversation: Conversation) -> Conversation:
    """Let a service that keeps only what it is told to keep all that was said so far: the next turn repeats it."""
    if conversation.dialect not in MARKED:
        return conversation
    first, *between, last = conversation.messages
    # What an answer ends in may take no mark; one that was paused is only gone on with.
    end = last if last.role == "assistant" else _kept(last)
    return msgspec.structs.replace(conversation, messages=(_kept(first), *between, end))


def _kept(message: Message) -> Message:
    *parts, last = message.parts
    return msgspec.structs.replace(message, parts=(*parts, msgspec.structs.replace(last, cache={})))


def _usage(body: Mapping[str, Any]) -> Usage:
    from backplane.ir import Usage

    return Usage(
        input=body.get("input_tokens"),
        output=body.get("output_tokens"),
        cache_read=body.get("cache_read_tokens"),
        cache_write=body.get("cache_write_tokens"),
    )


# The host -------------------------------------------------------------------------------------------------------------


def work_of(read: Callable[[], tuple[Service, dict[str, str]]]) -> Callable[[HostRun], Awaitable[Done]]:
    """The work of a host that speaks with one service.

    Args:
        read: gives the service and the values of its variables; asked at the beginning of each run.
    """

    async def work(run: HostRun) -> Done:
        # Loaded now and not at the start: the hello need not wait for them.
        from backplane.agents.order import server_rows
        from backplane.config import child_environment
        from backplane.tools import Toolbox
        from backplane.tools.keys import without
        from backplane.tools.mcp import open_servers
        from backplane.upstream.client import Upstream
        from backplane.upstream.completion import Model
        from backplane.upstream.endpoint import PROTOCOLS, Endpoint

        service, keys = read()
        task = read_task(run, service)
        key = keys.get(service.key_env or "")
        endpoint = Endpoint(
            protocol=service.protocol,
            base_url=service.base_url,
            api_key=key,
            headers={name: _filled(value, keys) for name, value in service.headers.items()},
            key_in_query=service.key_in_query,
            query=service.query,
            connect_s=service.connect_s,
            first_byte_s=service.first_byte_s,
            idle_s=service.idle_s,
        )
        root, env = run.order.workspace.root, without(child_environment({}, run.order.config.env, os.environ), keys)
        toolbox = Toolbox(
            root,
            run.policy,
            env=env,
            hear=lambda text: _heard(run, text),
            ask_user=lambda question, options: _asked(run, question, options),
            grace_s=lambda: run.grace_s,
        )
        dialect = PROTOCOLS[service.protocol].dialect
        async with (
            Upstream(endpoint) as upstream,
            open_servers(server_rows(run, ()), env=env, cwd=root, warn=run.warn) as servers,
        ):
            conversation = conversation_of(run, task, dialect, toolbox, servers)
            model = Model(upstream, parallel=service.parallel_tools, stream=service.stream, may_cut=service.may_cut)
            return await Agent(run, model, toolbox, servers, task).work(conversation)

    return work


def _filled(value: str, keys: Mapping[str, str]) -> str:
    return VARIABLE.sub(lambda found: keys.get(found[1], ""), value)


async def _heard(run: HostRun, text: str) -> None:
    last = text.rstrip("\n").rpartition("\n")[2][:200]
    await run.carry("output", {"stream": "stdout", "text": text}, last if text else "the command still runs")


async def _asked(run: HostRun, question: str, options: tuple[str, ...]) -> str:
    verdict = await run.ask_user(question, options=options)
    if verdict.decision == "deny":
        return verdict.text or f"no answer: {verdict.reason or 'nobody is there'}; decide by yourself"
    return verdict.text or verdict.decision


@functools.cache
def read_own() -> tuple[Service, dict[str, str]]:
    """The service that this process was started for, and its keys, which then stand nowhere else."""
    from backplane.tools.keys import take

    service = read_options(msgspec.json.decode(os.environ.get(OPTIONS, "{}")), "the options")
    return service, take(service.variables)


if __name__ == "__main__":
    main(HOST, work_of(read_own))
