"""A session: a conversation over any backend, in which every turn is an order with a receipt.

The caller pulls: nothing is read from the host faster than its events are taken. Nothing is tried again here: the
host owns retries, because only it knows what a request had already done.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, Unpack, overload

import anyio
import anyio.to_thread
import msgspec
from msgspec.structs import replace

from backplane.contract.approval import Decision, misfit
from backplane.contract.conversation import (
    AgentMessage,
    Message,
    SessionFile,
    SessionTurn,
    StopReason,
    TokenUsage,
    ToolResultMessage,
    UserMessage,
    usage_together,
)
from backplane.contract.events import AgentEvent, Approval, ApprovalAnswered, AssistantDelta, ToolCall
from backplane.contract.receipt import Receipt
from backplane.contract.work import PolicyProfile
from backplane.errors import BackplaneError, ConfigError, StoreError, require_type
from backplane.policy.rules import tightened
from backplane.protocol.messages import Events
from backplane.providers import reading
from backplane.providers.failures import ProviderError
from backplane.providers.reading import CUT_OFF
from backplane.providers.tools import Mailbox, Tool, Toolset
from backplane.providers.turns import Native, SessionConfig, Wanted, compose, shaped
from backplane.runtime.options import RunOptions, WaitOptions, check_names, hand_event
from backplane.runtime.orders import answer_of, read_policy
from backplane.runtime.run import Run, ValueT

if TYPE_CHECKING:
    from backplane.providers.registry import Provider, ProviderCapabilities
    from backplane.providers.store import Saved

Said = str | UserMessage | ToolResultMessage | Sequence[ToolResultMessage]
"""A message to an agent: a text, a message with images, or the results of calls that were handed to the program."""

_SAID: Final[Any] = (
    str | UserMessage | ToolResultMessage | Annotated[list[ToolResultMessage], msgspec.Meta(min_length=1)]
)
"""The types of `Said` in a form that `msgspec.convert` accepts."""


class TurnOutcome(msgspec.Struct, Generic[ValueT], frozen=True, kw_only=True):
    """The end of a turn: the last value of a session's stream."""

    message: AgentMessage
    """The agent's last message; the history has all of them."""
    stop_reason: StopReason
    usage: TokenUsage
    """Usage of this turn; unknown while calls are handed to the caller, as the turn goes on then."""
    receipt: Receipt | None
    """The turn's sealed receipt; None while calls are handed to the caller, as the turn goes on then."""
    error: ProviderError | None = None
    """Why the turn failed; None if it did not."""
    output: Any = None
    """The type or JSON Schema that the answer was to have; None if the turn asked for no shape."""

    @property
    def text(self) -> str:
        """The text of the agent's last message."""
        return self.message.content

    @property
    def value(self) -> ValueT:
        """The structured answer, as the `output` type that was asked for; None if there is none.

        Raises:
            ConfigError: `validation_failed`, the answer is not of that type.
        """
        value: ValueT = answer_of(self.receipt, self.output) if self.receipt is not None else None  # type: ignore[assignment]
        return value

    def check(self) -> TurnOutcome[ValueT]:
        """Return this turn if it did not fail. Raises ProviderError, a BackplaneError with a hint."""
        if self.error is not None:
            raise self.error
        return self


class TurnOptions(RunOptions, WaitOptions, total=False):
    """Options of one turn, as arguments of `Session.send_message` and `run`: those of `backplane.run`.

    A `model` also applies to later turns. A `policy` only tightens the session's. `tools` and `hooks` are added to the
    session's own; each other option replaces the session's.
    """


@dataclass(kw_only=True)
class _Turn:
    """A turn under way."""

    message: UserMessage
    run_id: str
    tools: Toolset
    system: str | None
    """The session's system prompt when the turn began; None if there was none."""
    given: TurnOptions
    asks: bool
    """True if approvals wait for `Session.answer`."""
    transcript: reading.Transcript = field(default_factory=reading.Transcript)
    calls: dict[str, str] = field(default_factory=dict)
    """Calls that the caller runs and whose results are missing: id → name."""
    waiting: dict[str, Approval] = field(default_factory=dict)
    """Approvals in the stream that have no answer yet, by id."""
    answers: Mailbox[Decision] = field(default_factory=Mailbox)
    run: Run = field(init=False)
    batches: AsyncIterator[Events] = field(init=False)
    block: AbstractAsyncContextManager[Run] = field(init=False)
    """The context manager of the run; its exit ends the run."""
    is_interrupted: bool = False
    outcome: TurnOutcome | None = None
    """The end of the turn; None while it is under way."""

    def take(self, event: AgentEvent) -> AgentEvent:
        """Add an event, and return it with the ids of calls that the messages have."""
        event = self.transcript.take(event)
        if type(event) is AssistantDelta:  # Nearly all events are of this type.
            return event
        if isinstance(event, Approval) and self.asks:
            self.waiting[str(event.body.get("id"))] = event
            if self.is_interrupted:
                self.deny_all()
        elif isinstance(event, ApprovalAnswered):
            self.waiting.pop(str(event.body.get("id")), None)
        elif isinstance(event, ToolCall) and (name := reading.function_of(event.tool_name)) in self.tools.handed:
            self.calls[str(event.tool_use_id)] = name
        return event

    def deny_all(self) -> None:
        """Deny all waiting approvals, as the turn was interrupted."""
        while self.waiting:
            self.answers.send(self.waiting.popitem()[0], Decision("deny", "the user interrupted"))

    def messages(self) -> tuple[Message, ...]:
        """Return the messages so far."""
        return (self.message, *self.transcript.messages())

    def end(self, stop: StopReason, usage: TokenUsage, **members: Any) -> TurnOutcome:
        """Return the outcome of the turn, or of its part up to calls that the caller runs."""
        output = self.given.get("output")
        return TurnOutcome(message=self.transcript.last(), stop_reason=stop, usage=usage, output=output, **members)


class Session:
    """A conversation. Use it as an async context manager, or call `close`.

    One task at a time begins, reads or ends a turn; a call of another meanwhile is refused (`config_invalid`). `close`,
    `interrupt`, `answer` and `send_input` may be called by any task.

    Attributes:
        file: the session as it is saved.
        receipt: receipt of the last turn; None if there is none.
    """

    def __init__(self, provider: Provider, config: SessionConfig, saved: Saved | None, file: SessionFile) -> None:
        self._config, self._provider, self._saved = config, provider, saved
        self._tools = Toolset(config.tools)
        self._policy = read_policy(file.policy or config.policy or provider.plane.settings.policy or PolicyProfile())
        self.file = replace(file, policy=self._policy)
        self.receipt: Receipt | None = None
        self._turn: _Turn | None = None
        self._lock = anyio.Lock(fast_acquire=True)
        """Locked by the task that begins, reads or ends a turn."""
        self._native: Native | None = None
        self._initial = config.initial_prompt
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._is_closed = False
        provider.plane.above.add(self)

    @property
    def id(self) -> str:
        """Id of the session; its file has this name."""
        return self.file.id

    @property
    def provider(self) -> str:
        """Name of the backend."""
        return self.file.provider

    @property
    def model(self) -> str | None:
        """The model that is asked for; None is the backend's own choice."""
        return self.file.model

    @property
    def losses(self) -> tuple[str, ...]:
        """The parts that could not be carried unchanged, each once: `dropped: …` or `emulated: …`."""
        return self.file.losses

    @property
    def keeps_conversations(self) -> bool:
        """True if the provider keeps the conversation itself; else each order carries the history (emulated)."""
        return self._provider.can.keeps_in(self.file.mode)

    @property
    def turns_completed(self) -> int:
        """Number of turns that ended without a failure or an interrupt."""
        return sum(turn.stop_reason not in (None, *CUT_OFF) for turn in self.file.turns)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "a turn is under way" if self._turn is not None else "at rest"
        return f"<Session {self.id} with {self.provider!r}, turns: {len(self.file.turns)}, {state}>"

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Settings and history ---------------------------------------------------------------------------------------------

    def set_model(self, model: str | None) -> None:
        """Use another model from the next turn on; None is the backend's own choice."""
        self.file = replace(self.file, model=model)

    def set_tools(self, tools: Sequence[Tool]) -> None:
        """Give the agent other tools from the next turn on. Raises ConfigError: `config_invalid`, one is no tool."""
        self._tools = Toolset(tools)

    def set_system_prompt(self, prompt: str | None) -> None:
        """Use another system prompt from the next turn on; None removes it.

        A provider without a setting for the prompt begins a new conversation then, which has the history.
        """
        self.file = replace(self.file, system_prompt=prompt)

    def get_history(self) -> tuple[Message, ...]:
        """Return the messages, oldest first, with those of a turn under way."""
        turns = self.file.turns[self.file.cleared :]
        if self._turn is not None:
            turns = (*turns[:-1], replace(turns[-1], messages=self._turn.messages()))
        return tuple(message for turn in turns for message in turn.messages)

    def clear_history(self) -> None:
        """Forget the messages; the receipts stay. Raises ConfigError: `config_invalid`, a turn is under way."""
        with self._alone():
            if self._turn is not None:
                raise _under_way()
            self.file, self._native = replace(self.file, cleared=len(self.file.turns)), None

    def get_usage(self) -> TokenUsage:
        """Return the sum of all turns' usage; `is_at_least` says that an unknown one is left out."""
        return usage_together([turn.usage for turn in self.file.turns if turn.stop_reason is not None])

    def capabilities(self) -> ProviderCapabilities:
        """Return the provider's abilities."""
        return self._provider.capabilities()

    async def save(self) -> None:
        """Write the session's file; every turn does it by itself.

        Raises:
            ConfigError: `config_invalid`, the session is closed.
            StoreError: `receipt_store_failed`.
        """
        if self._saved is not None:
            await anyio.to_thread.run_sync(self._saved.write, self.file, self._provider.backend.secrets)

    # A turn from outside ----------------------------------------------------------------------------------------------

    async def send_message(
        self, message: Said, **given: Unpack[TurnOptions]
    ) -> AsyncGenerator[AgentEvent | TurnOutcome, None]:
        """Send a message, or results of calls that the program ran, and iterate over the events of the run.

        The last value is a `TurnOutcome`. With the session's `on_ask` set to `stream`, each `Approval` in the stream
        waits for `answer`. The next call ends a stream that is left early; reading on in it yields its outcome.

        Args:
            given: `TurnOptions`: those of `backplane.run`, for this turn alone; a `model` also holds for later turns,
                and a `policy` only tightens. `output` is the shape of the answer, `TurnOutcome.value`.

        Raises:
            TypeError: an argument is no member of `TurnOptions`.
            ConfigError: `config_invalid`: the session is closed, another task is inside a call of it, a result belongs
                to no call, an argument has a wrong type, or the policy allows more than the session's.
        """
        check_names(given, "on_event")
        require_type(given.get("on_event"), Callable | None, "`on_event`", "a function from an event")
        said = shaped(message, _SAID, "the message", "a text, a UserMessage, or ToolResultMessage values")
        with self._alone():
            if isinstance(said, str | UserMessage):
                turn = await self._begin(UserMessage(content=said) if isinstance(said, str) else said, given)
            else:
                turn = self._resumed([said] if isinstance(said, ToolResultMessage) else said)
        while turn.outcome is None and not turn.calls:
            events: list[AgentEvent] = []
            async with self._lock:
                if turn.outcome is None:
                    events = await self._pull(turn)
            for event in events:
                yield event
        yield turn.outcome or turn.end("tool_use", TokenUsage(), receipt=None)

    @overload
    async def run(
        self, message: Said, *, output: type[ValueT], **given: Unpack[WaitOptions]
    ) -> TurnOutcome[ValueT]: ...
    @overload
    async def run(self, message: Said, **given: Unpack[TurnOptions]) -> TurnOutcome: ...
    async def run(self, message: Said, **given: Any) -> TurnOutcome[Any]:
        """Send a message and wait for the end of the turn; arguments and errors as `send_message`."""
        last = [event async for event in self.send_message(message, **given) if isinstance(event, TurnOutcome)]
        return last[0]

    def awaits_answer(self, id: str) -> bool:
        """Return True if the approval with this id waits for `answer`."""
        return self._turn is not None and id in self._turn.waiting

    def answer(self, id: str, decision: Decision) -> None:
        """Answer an `Approval` of the stream, in a session or turn whose `on_ask` is `stream`.

        Args:
            id: `body["id"]` of the approval.

        Raises:
            ConfigError: `config_invalid`, no approval with this id waits, or the decision does not fit it.
        """
        if self._turn is None or not self.awaits_answer(id):
            fact = f"no approval {id[:80]!r} waits for an answer"
            raise ConfigError("config_invalid", fact, hint='take the id of an Approval; on_ask has to be "stream"')
        asked = self._turn.waiting[id]
        if why := misfit(decision, asked.kind, asked.body.get("input", msgspec.UNSET)):
            raise ConfigError("config_invalid", why, hint="allow it, or deny it with a reason")
        del self._turn.waiting[id]
        self._turn.answers.send(id, decision)

    def send_input(self, text: str) -> None:
        """Send words to the turn under way, for agents that take them in the middle of a turn.

        Raises:
            ConfigError: `config_invalid`, no turn is under way.
            ProtocolError: `protocol_unexpected_message`, the agent takes no words before the end of its turn.
        """
        if self._turn is None:
            raise ConfigError("config_invalid", "no turn is under way", hint="begin one with send_message")
        self._turn.run.input(text)

    async def interrupt(self) -> None:
        """Stop the turn, not the session; the stream still yields the turn's last events."""
        turn = self._turn
        if turn is None:
            return
        turn.is_interrupted = True
        turn.deny_all()
        try:
            turn.run.interrupt()
        except BackplaneError:  # Its host did not announce it, or the run has ended.
            await turn.run.cancel("interrupted by the user")

    async def close(self) -> None:
        """End the session: cancel a turn under way, whose stream then ends. The session's file stays."""
        if self._is_closed:
            return
        self._is_closed = True
        # A caller that is cancelled waits, too, so that the turn has its receipt when the session is resumed.
        with anyio.CancelScope(shield=True):
            try:
                if self._turn is not None:
                    await self._turn.run.cancel("the session was closed")
                async with self._lock:
                    await self._abandon()
            finally:
                await anyio.to_thread.run_sync(self._release)

    def _release(self) -> None:
        if self._saved is not None:
            self._saved.close()
        if self._folder is not None:
            self._folder.cleanup()

    # Another provider, another process --------------------------------------------------------------------------------

    async def handover(self, provider: Provider, *, model: str | None = None) -> tuple[str, ...]:
        """Continue with another provider; return the losses that are known before the next turn.

        The next turn has the whole transcript; calls without a recorded result stand first in it, as a question.

        Args:
            model: model of the new provider; None is its own choice, as the former model's name means nothing to it.

        Raises:
            ConfigError: `config_invalid`, the session is closed, or another task is inside a call of it.
            BackendError, ProtocolError: as `Provider.create_session`.
        """
        with self._alone():
            self._require_open()
            await self._abandon()
            await provider.prepare()
            provider.plane.above.add(self)
            before = self.losses
            if self._native is not None:
                self._lose(OWN_STATE)
            if self.model and model is None:
                self._lose(f"dropped: model {self.model}")
            self._provider, self._native = provider, None
            self.file = replace(self.file, provider=provider.name, model=model)
            self._lose(*compose(self._wanted(UserMessage(content="…"), self._tools))[1])
            if self.file.turns:  # Else it is stored with its first message.
                await self.save()
            return tuple(loss for loss in self.losses if loss not in before)

    def take_up(self, saved: SessionFile, *, copied: bool) -> None:
        """Continue the provider's own conversation, if it keeps one.

        Args:
            saved: the session without the settings that were given when it was resumed.
            copied: continue a copy of that conversation.
        """
        can, turns = self._provider.can, self.file.turns[self.file.cleared :]
        id = turns[-1].conversation if turns and turns[-1].provider == self.provider else None
        if id and can.host is not None and not can.keeps_in(self.file.mode):
            self._lose(*([OWN_STATE] if saved.mode != self.file.mode else ()))
        elif id and (can.forks or not copied):
            self._native = Native(id, saved.system_prompt or None, copied)

    # A turn from inside -----------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._is_closed:
            raise ConfigError("config_invalid", "the session is closed", hint="resume it by its session_id")

    @contextmanager
    def _alone(self) -> Any:
        """Lock the session; refuse the call while another task has the lock, as two readers would split the events."""
        try:
            self._lock.acquire_nowait()
        except anyio.WouldBlock:
            raise _under_way() from None
        try:
            yield
        finally:
            self._lock.release()

    def _lose(self, *losses: str) -> None:
        self.file = replace(self.file, losses=tuple(dict.fromkeys((*self.losses, *losses))))

    def _note(self, **members: Any) -> None:
        """Change the last turn of the session's file."""
        *before, last = self.file.turns
        self.file = replace(self.file, turns=(*before, replace(last, **members)))

    def _resumed(self, results: Sequence[ToolResultMessage]) -> _Turn:
        """Give results to the turn under way."""
        turn = self._turn
        for result in results:
            if turn is None or result.tool_call_id not in turn.calls:
                fact = f"no call {result.tool_call_id[:80]!r} waits for a result"
                hint = "the outcome `tool_use` names the calls of tools without a handler"
                raise ConfigError("config_invalid", fact, hint=hint)
            turn.tools.results.send(turn.calls.pop(result.tool_call_id), result)
        assert turn is not None, "there is at least one result"
        return turn

    async def _begin(self, message: UserMessage, given: TurnOptions) -> _Turn:
        """Start a turn after the one under way, if any, has been ended."""
        self._require_open()
        await self._abandon()
        await self._provider.prepare()
        if (model := given.get("model")) is not None:
            self.set_model(model)
        await self._carry_folder()
        message = replace(message, content="\n\n".join(filter(None, (self._initial, message.content))))
        run_id, tools = str(uuid.uuid4()), self._tools.with_more(given.get("tools", ()))
        asks = self._config.on_ask == "stream" and given.get("on_ask") is None
        system, can = self.file.system_prompt or None, self._provider.can
        if self._native is not None and self._native.system != system and can.reads and "system" not in can.heeds:
            self._native = None  # The provider's own conversation has another system prompt among its words.
            self._lose(OWN_STATE)
        turn = _Turn(message=message, run_id=run_id, tools=tools, system=system, given=given, asks=asks)
        begun = SessionTurn(run_id=run_id, provider=self.provider, model=self.model, messages=(message,))
        before, saved = self.file, self._saved
        is_new = saved is not None and not saved.path.exists()
        self.file = replace(before, turns=(*before.turns, begun))
        try:
            await self.save()  # First: after a crash, the store can be asked how the run ended.
            await self._start(turn)
        except BaseException:
            self.file = before
            with anyio.CancelScope(shield=True):
                if saved is not None and is_new:
                    await anyio.to_thread.run_sync(saved.remove)
                else:
                    await self.save()
            raise
        self._initial, self._turn = None, turn
        return turn

    async def _start(self, turn: _Turn) -> None:
        """Start the order of a turn."""
        given, policy, plane = turn.given, turn.given.get("policy"), self._provider.plane
        own: Any = {name: value for name, value in given.items() if name not in ("model", "on_event")}
        own["root"] = given.get("root") or self.file.root or await self._own_folder()
        own["policy"] = self._policy if policy is None else tightened(self._policy, read_policy(policy))
        own["tools"] = turn.tools.offered
        own["hooks"] = (*self._config.hooks, *given.get("hooks", ()))
        on_ask = given.get("on_ask") or self._config.on_ask
        own["on_ask"] = (lambda asked: turn.answers.receive(str(asked.body.get("id")))) if turn.asks else on_ask
        order, losses = compose(self._wanted(turn.message, turn.tools))
        self._lose(*losses)
        turn.block = plane.start(order, self._provider.backend, run_id=turn.run_id, **own)
        turn.run = await turn.block.__aenter__()
        turn.batches = aiter(turn.run.batches())

    def _wanted(self, message: UserMessage, tools: Toolset) -> Wanted:
        can, native = self._provider.can, self._native
        return Wanted(file=self.file, message=message, can=can, native=native, names=tools.names)

    async def _own_folder(self) -> str:
        if self._folder is None:
            make = partial(tempfile.TemporaryDirectory[str], prefix="backplane-session-", ignore_cleanup_errors=True)
            self._folder = await anyio.to_thread.run_sync(make)
        return self._folder.name

    async def _carry_folder(self) -> None:
        """Apply the changes of the last turn, if it was cut off; list them as lost if they do not fit."""
        last = self.file.turns[-1] if self.file.turns else None
        if last is None or last.run_id is None or last.carried or last.stop_reason not in CUT_OFF:
            return
        try:
            await self._provider.plane.apply(last.run_id)
        except BackplaneError as error:
            if error.code != "execution_workspace_error" or "applied already" not in error.message:
                self._lose(f"dropped: the changes of run {last.run_id[:8]}, {error.message[:200]}")
                return
        self._note(carried=True)

    async def _abandon(self) -> None:
        """End the turn under way, whose reader has left."""
        turn = self._turn
        if turn is None:
            return
        try:
            await turn.run.cancel("its reader has left")
            while turn.outcome is None:
                await self._pull(turn)
        except anyio.get_cancelled_exc_class():
            if turn.outcome is None:
                await self._end(turn)
            raise

    async def _pull(self, turn: _Turn) -> list[AgentEvent]:
        """Return the next events of a turn; at its end, set its outcome."""
        batch = await anext(turn.batches, None)
        if batch is None:
            await self._end(turn)
            return []
        events = list(map(turn.take, batch.events))
        if (on_event := turn.given.get("on_event")) is not None:
            for event in events:
                await hand_event(on_event, event)
        return events

    async def _end(self, turn: _Turn) -> None:
        """Close a turn whose run has ended, and keep its messages."""
        try:
            await turn.block.__aexit__(None, None, None)
        finally:
            self._turn = None
            turn.outcome = self._ended(turn)
            with anyio.CancelScope(shield=True):
                await self.save()

    def _ended(self, turn: _Turn) -> TurnOutcome:
        run, transcript = turn.run, turn.transcript
        receipt = run.receipt if run.is_sealed else None
        stop: StopReason = "error" if receipt is None else reading.stop_of(receipt, transcript.stop)
        transcript.end(is_cut_off=stop in CUT_OFF)
        noted: dict[str, Any] = {"messages": turn.messages()}
        error = run.error
        if receipt is None:  # It could not be stored; the next start of a control plane seals the run.
            error = error or StoreError("receipt_store_failed", f"run {run.id} ended without a receipt")
        else:
            self.receipt = receipt
            if turn.is_interrupted and stop == "error" and receipt.outcome == "partial":
                stop = "user_interrupt"
            if self.keeps_conversations and transcript.conversation is not None:
                self._native = Native(transcript.conversation, turn.system)
            noted |= reading.noted(receipt, stop, self.file)
            noted["conversation"] = self._native.id if self._native is not None else None
            if stop not in CUT_OFF and not noted["carried"]:
                why, short = reading.stays_in_patch(receipt), run.id[:8]
                self._lose(f"dropped: the changes of run {short}, {why}; to have them: backplane apply {short}")
        self._note(**noted, stop_reason=stop)
        failed = ProviderError(self.provider, error) if stop == "error" and error is not None else None
        return turn.end(stop, self.file.turns[-1].usage, receipt=receipt, error=failed)


def _under_way() -> ConfigError:
    fact = "a turn of this session is under way"
    return ConfigError("config_invalid", fact, hint="read it to its end, or `await session.interrupt()`")


OWN_STATE: Final = "dropped: the provider's own state of the conversation"
