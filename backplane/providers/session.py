"""A session: a conversation over any backend, in which every turn is an order with a receipt.

The caller pulls: nothing is read from the host faster than its events are taken. Nothing is tried again here: the
host owns retries, because only it knows what a request had already done.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Unpack

import anyio
import anyio.to_thread
import msgspec
from msgspec.structs import replace

from backplane.contract.approval import Decision, misfit
from backplane.contract.canonical import timestamp_at
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
from backplane.providers import reading
from backplane.providers.failures import ProviderError
from backplane.providers.orders import INPUT, INTERRUPT, KEPT, SessionConfig, Wanted, compose, shaped, tightened
from backplane.providers.tools import Tool, Toolset
from backplane.runtime.functions import served
from backplane.runtime.options import (
    OnEvent,
    RunOptions,
    WaitOptions,
    check_callbacks,
    check_names,
    hand_event,
)
from backplane.runtime.orders import answer_of, make_order, read_policy
from backplane.runtime.run import Run

if TYPE_CHECKING:
    from backplane.providers.registry import Provider, ProviderCapabilities
    from backplane.providers.store import Saved

Said = str | UserMessage | ToolResultMessage | Sequence[ToolResultMessage]
"""A message to an agent: words, or the results of calls that were handed to the program."""

_Results = Annotated[list[ToolResultMessage], msgspec.Meta(min_length=1)]
_SAID: Final[Any] = str | UserMessage | ToolResultMessage | _Results
"""The same for `msgspec.convert`."""


class TurnOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a turn: the last value of a session's stream."""

    message: AgentMessage
    """The agent's last message; the history has all of them."""
    stop_reason: StopReason
    usage: TokenUsage
    """Usage of this turn; unknown while calls are handed to the caller, as the turn goes on then."""
    receipt: Receipt | None
    """None while calls are handed to the caller."""
    error: ProviderError | None = None
    """Why the turn failed; None if it did not."""
    output: Any = None
    """The shape that was asked for."""

    @property
    def text(self) -> str:
        """The text of the last message."""
        return self.message.content

    @property
    def value(self) -> Any:
        """The structured answer, as the `output` type that was asked for; None when none was given.

        Raises:
            ConfigError: `validation_failed`, the answer is none of that type.
        """
        return None if self.receipt is None else answer_of(self.receipt, self.output)

    def check(self) -> TurnOutcome:
        """Return this turn if it did not fail. Raises ProviderError, a BackplaneError with a hint."""
        if self.error is not None:
            raise self.error
        return self


class TurnOptions(RunOptions, WaitOptions, total=False):
    """Options of one turn, as arguments of `Session.send_message` and `run`: those of `backplane.run`.

    A `model` also holds for later turns. A `policy` only tightens the session's. `tools` and `hooks` come beside the
    session's own; the other options go before those of the session.
    """


_OF_SESSION: Final = ("model", "root", "policy", "output", "tools", "on_event")
"""Options of a turn that the session itself reads; its run gets the others."""


@dataclass(kw_only=True)
class _Open:
    """A turn under way."""

    block: AbstractAsyncContextManager[Run]
    run: Run
    said: UserMessage
    """The user's message."""
    tools: Toolset
    """Tools that this turn was begun with; likewise `system`, its system prompt."""
    system: str | None
    output: Any
    """The shape that its answer is to have."""
    on_event: OnEvent | None
    transcript: reading.Transcript = field(default_factory=reading.Transcript)
    rest: Iterator[AgentEvent] = field(default_factory=lambda: iter(()))
    """Events that were read and not yielded, as the caller has to run a tool first."""
    calls: dict[str, str] = field(default_factory=dict)
    """Calls that the caller runs, without their results: id → name."""
    ended: tuple[ProviderError | None, StopReason] | None = None
    """The failure or None, and why the turn stopped; None while it is under way."""
    asks: bool = False
    """Approvals wait for `Session.answer`."""
    interrupted: bool = False
    """True once the user has interrupted it."""
    left: bool = False
    """True once a later call has ended it."""

    def __post_init__(self) -> None:
        self.batches = self.run.batches()


@dataclass
class _Asked:
    """An approval that waits for `Session.answer`."""

    approval: Approval
    answer: Decision | None = None
    answered: anyio.Event = field(default_factory=anyio.Event)

    def give(self, decision: Decision) -> None:
        """Answer it, once."""
        self.answer = self.answer or decision
        self.answered.set()


class Session:
    """A conversation. Use it as an async context manager, or call `close`.

    One task at a time begins, reads or ends a turn; a call of another meanwhile is refused (`config_invalid`). `close`,
    `interrupt`, `answer` and `send_input` may be called by any task.

    Attributes:
        id: of the session; its file has this name.
        losses: the parts that could not be carried unchanged, each once: `dropped: …` or `emulated: …`.
    """

    def __init__(self, provider: Provider, config: SessionConfig, saved: Saved | None, file: SessionFile) -> None:
        # The file has the settings that are saved; the configuration has functions, which no file can hold.
        self._config = replace(config, **{name: getattr(file, name) for name in KEPT})
        self._provider, self._saved = provider, saved
        self._tools = Toolset(config.tools)
        self._policy = read_policy(file.policy or config.policy or provider.plane.settings.policy or PolicyProfile())
        self._file = replace(file, policy=self._policy)
        self._open: _Open | None = None
        self._lock = anyio.Lock()
        """Has the task that begins, reads or ends a turn."""
        self._waiting: dict[str, _Asked] = {}
        """Id → approval of the turn under way that waits for an answer."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._native: str | None = None
        self._forks = self._closed = False
        self._system_told: str | None = None
        """The system prompt that the provider's own conversation has, in words."""
        self._initial = config.initial_prompt
        self._fresh = True
        """True until a turn has come to its end in this process: an earlier turn may have been cut off."""
        self._carries = _carries(file)
        """If the last turn was cut off, its changes are put into the folder before the next."""
        self.receipt: Receipt | None = None
        """Receipt of the last turn."""
        self._output: Any = None
        provider.plane.above.add(self)

    @property
    def id(self) -> str:
        return self._file.id

    @property
    def provider(self) -> str:
        """Name of the backend."""
        return self._provider.name

    @property
    def model(self) -> str | None:
        """The model that is asked for; None is the backend's own choice."""
        return self._config.model

    @property
    def losses(self) -> tuple[str, ...]:
        return self._file.losses

    @property
    def file(self) -> SessionFile:
        """The session as it is saved."""
        return self._file

    @property
    def value(self) -> Any:
        """The structured answer of the last turn that has ended, as `TurnOutcome.value`."""
        return None if self.receipt is None else answer_of(self.receipt, self._output)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "a turn is under way" if self._open is not None else "at rest"
        return f"<Session {self.id} with {self.provider!r}, turns: {len(self._file.turns)}, {state}>"

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # What it is set to ------------------------------------------------------------------------------------------------

    def set_model(self, model: str | None) -> None:
        """Use another model from the next turn on; None is the backend's own choice."""
        self._config = replace(self._config, model=model)
        self._file = replace(self._file, model=model)

    def set_tools(self, tools: Sequence[Tool]) -> None:
        """Give the agent other tools from the next turn on.

        Raises:
            ConfigError: `config_invalid`, one cannot be a tool, or two have one name.
        """
        self._tools = Toolset(tools)

    def set_system_prompt(self, prompt: str | None) -> None:
        """Give the agent another system prompt from the next turn on; None takes it away.

        A provider that gets it as words keeps the earlier one in its conversation; the next turn revokes that.
        """
        self._config = replace(self._config, system_prompt=prompt)
        self._file = replace(self._file, system_prompt=prompt)

    def get_history(self) -> tuple[Message, ...]:
        """Return the messages, oldest first, with those of a turn under way."""
        turns = self._file.turns[self._file.cleared :]
        if self._open is not None:
            turns = (*turns[:-1], replace(turns[-1], messages=self._said(self._open)))
        return tuple(message for turn in turns for message in turn.messages)

    def clear_history(self) -> None:
        """Forget the messages, so that the agent does not know them. The receipts stay.

        Raises:
            ConfigError: `config_invalid`, a turn is under way.
        """
        self._require_rest()
        self._file = replace(self._file, cleared=len(self._file.turns))
        self._native = self._system_told = None

    def get_usage(self) -> TokenUsage:
        """Return the sum of all turns' usage; `is_at_least` says that an unknown one is left out."""
        return usage_together([turn.usage for turn in self._file.turns if turn.stop_reason is not None])

    @property
    def keeps_conversations(self) -> bool:
        """True if the provider keeps the conversation itself; else each order carries the history (emulated)."""
        return self._provider.can.keeps_in(self._file.mode)

    def capabilities(self) -> ProviderCapabilities:
        """Return what the provider can."""
        return self._provider.capabilities()

    @property
    def turns_completed(self) -> int:
        """Turns that ended and did not fail."""
        return sum(turn.stop_reason not in (None, "error", "user_interrupt") for turn in self._file.turns)

    # What is sent and answered ----------------------------------------------------------------------------------------

    def send_message(self, message: Said, **given: Unpack[TurnOptions]) -> AsyncIterator[AgentEvent | TurnOutcome]:
        """Send a message, or the results of calls that the program ran, and iterate over the run's events.

        The last value is a `TurnOutcome`. With the session's `on_ask` set to `stream`, each `Approval` in the stream
        waits for `answer`. A stream that is left early is ended in order by the next call; reading on in it then is
        refused.

        Args:
            given: `TurnOptions`: those of `backplane.run`, for this turn alone; a `model` also holds for later turns,
                and a `policy` only tightens. `output` is the shape of the answer, `session.value`.

        Raises:
            TypeError: an argument is none of these.
            ConfigError: `config_invalid`, from the first event on: the session is closed, another task is inside a
                call of it, a result belongs to no call, or the policy allows more than the session's.
            BackendError: `capability_unsupported`, the provider cannot take the session's tools.
        """
        check_names(given, "on_event")
        require_type(given.get("on_event"), Callable | None, "`on_event`", "a function from an event")
        check_callbacks(given.get("on_ask"), given.get("hooks", ()))
        return self._stream(message, given)

    async def _stream(self, message: Said, given: TurnOptions) -> AsyncGenerator[AgentEvent | TurnOutcome, None]:
        await self._say(message, given)
        open, stop = self._open, None
        assert open is not None
        while stop is None:
            taken, failure, stop = await self._more(open)
            for event in taken:
                yield event
        goes_on = stop == "tool_use"
        yield TurnOutcome(
            message=open.transcript.last(),
            stop_reason=stop,
            usage=TokenUsage() if goes_on else self._file.turns[-1].usage,
            receipt=None if goes_on else self.receipt,
            error=failure,
            output=open.output,
        )

    def awaits_answer(self, id: str) -> bool:
        """Return True if the approval with this id waits for `answer`."""
        return id in self._waiting and self._waiting[id].answer is None

    def answer(self, id: str, decision: Decision) -> None:
        """Answer an `Approval` of the stream, whose `on_ask` is `stream`.

        Args:
            id: `body["id"]` of the approval.

        Raises:
            ConfigError: `config_invalid`, no approval with this id waits, or the decision does not fit it.
        """
        if not self.awaits_answer(id):
            fact = f"no approval {id[:80]!r} waits for an answer"
            raise ConfigError("config_invalid", fact, hint='take the id of an Approval; on_ask has to be "stream"')
        waiting = self._waiting[id]
        if why := misfit(decision, waiting.approval.kind, waiting.approval.body.get("input", msgspec.UNSET)):
            raise ConfigError("config_invalid", why, hint="allow it, or deny it with a reason")
        waiting.give(decision)

    def send_input(self, text: str) -> None:
        """Send words to the turn under way, for agents that take them in the middle of a turn.

        Raises:
            ConfigError: `config_invalid`, no turn is under way, or the agent takes no words before its end.
        """
        if self._open is None:
            raise ConfigError("config_invalid", "no turn is under way", hint="begin one with send_message")
        if INPUT not in self._provider.can.extensions:
            raise _under_way()
        self._open.run.input(text)

    async def run(self, message: Said, **given: Unpack[TurnOptions]) -> TurnOutcome:
        """Send a message and wait for the end of the turn; arguments and errors as `send_message`."""
        last = [event async for event in self.send_message(message, **given) if isinstance(event, TurnOutcome)]
        return last[0]

    async def interrupt(self) -> None:
        """Stop the turn and not the session; read on for the turn's last events."""
        if self._open is None:
            return
        self._open.interrupted = True
        for waiting in self._waiting.values():
            waiting.give(Decision("deny", "the user interrupted"))
        if INTERRUPT in self._provider.can.extensions and not self._open.run.is_ending:
            try:
                self._open.run.interrupt()
            except BackplaneError:  # Not announced by this one, or over already.
                await self._open.run.cancel("interrupted by the user")
        else:
            await self._open.run.cancel("interrupted by the user")

    async def close(self) -> None:
        """End the session in order: cancel a turn under way, whose stream then ends. The session's file stays."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._open is not None:
                await self._open.run.cancel("the session was closed")
            try:
                self._lock.acquire_nowait()  # Without a wait: this may be a task that is cancelled.
            except anyio.WouldBlock:
                await self._lock.acquire()
            try:
                await self._abandon()
            finally:
                self._lock.release()
        finally:
            with anyio.CancelScope(shield=True):
                if self._saved is not None:
                    await anyio.to_thread.run_sync(self._saved.close)
                if self._folder is not None:
                    await anyio.to_thread.run_sync(self._folder.cleanup)

    async def save(self) -> None:
        """Write the session's file; every turn does it by itself.

        Raises:
            ConfigError: `config_invalid`, the session is closed.
            StoreError: `receipt_store_failed`.
        """
        if self._saved is not None:
            await anyio.to_thread.run_sync(self._saved.write, self._file, self._provider.backend.secrets)

    async def handover(self, provider: Provider, *, model: str | None = None) -> tuple[str, ...]:
        """Go on with another provider; return what cannot be carried to it, as far as it is known before the turn.

        The next turn has the whole transcript; calls without a recorded result stand first in it, as a question.

        Args:
            model: None is the provider's own choice, as names of models mean nothing elsewhere.

        Raises:
            ConfigError: `config_invalid`, the session is closed, or another task is inside a call of it.
            BackendError, ProtocolError: as `Provider.create_session`.
        """
        with self._alone():
            return await self._hand_over(provider, model)

    async def _hand_over(self, provider: Provider, model: str | None) -> tuple[str, ...]:
        self._require_open()
        await self._leave()
        await provider.prepare()
        provider.plane.above.add(self)
        losses = [OWN_STATE] if self._native else []
        losses += [f"dropped: model {self.model}"] if self.model and model is None else []
        self._provider, self._native = provider, None
        self._system_told, self._fresh = None, True
        self._config = replace(self._config, model=model)
        self._file = replace(self._file, provider=provider.name, model=model)
        before = self.losses
        wanted = self._wanted(UserMessage(content="…"), PolicyProfile(), "/", None)
        for loss in (*losses, *compose(wanted).losses):
            self._lose(loss)
        await self.save()
        return tuple(loss for loss in self.losses if loss not in before)

    def goes_on(self, saved: SessionFile, *, copied: bool) -> None:
        """Take up what was saved: the provider's own conversation, where it keeps one.

        Args:
            saved: the session without what was given when it was gone on with.
            copied: go on with a copy of that conversation.
        """
        self._carries = _carries(saved)
        turns = self._file.turns[self._file.cleared :]
        native = turns[-1].conversation if turns and turns[-1].provider == self.provider else None
        can = self._provider.can
        if native and saved.mode != self._file.mode and can.host is not None and not can.keeps_in(self._file.mode):
            self._lose(OWN_STATE)
            native = None
        self._native = None if copied and not can.forks else native
        self._forks = copied and self._native is not None
        self._system_told = saved.system_prompt or None if self._native is not None else None

    # A turn -----------------------------------------------------------------------------------------------------------

    def _said(self, open: _Open) -> tuple[Message, ...]:
        return (open.said, *open.transcript.messages())

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("config_invalid", "the session is closed", hint="resume it by its session_id")

    def _require_rest(self) -> None:
        if self._open is not None or self._lock.locked():
            raise _under_way()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Begin, read or end a turn; refuse it while another task does, as they would take each other's events."""
        try:
            self._lock.acquire_nowait()
        except anyio.WouldBlock:
            raise _under_way() from None
        try:
            yield
        finally:
            self._lock.release()

    def _lose(self, loss: str) -> None:
        if loss not in self.losses:
            self._file = replace(self._file, losses=(*self.losses, loss))

    async def _say(self, message: Said, given: TurnOptions) -> None:
        said = shaped(message, _SAID, "the message", "a text, a UserMessage, or ToolResultMessage values")
        with self._alone():
            if isinstance(said, str | UserMessage):
                await self._start(UserMessage(content=said) if isinstance(said, str) else said, given)
                return
            for result in (said,) if isinstance(said, ToolResultMessage) else said:
                self._give(result)

    def _give(self, result: ToolResultMessage) -> None:
        open = self._open
        name = open.calls.pop(result.tool_call_id, None) if open is not None else None
        if open is None or name is None:
            fact = f"no call {result.tool_call_id[:80]!r} waits for a result"
            raise ConfigError("config_invalid", fact, hint="`tool_use_end` names the calls of tools without a handler")
        open.tools.give(name, result)

    async def _start(self, said: UserMessage, given: TurnOptions) -> None:
        self._require_open()
        await self._leave()
        await self._provider.prepare()
        said = replace(said, content="\n\n".join(part for part in (self._initial, said.content) if part))
        model, policy, output = given.get("model"), given.get("policy"), given.get("output")
        if model is not None and model != self.model:
            self.set_model(model)
        await self._carry_folder()
        whole = self._policy if policy is None else tightened(self._policy, read_policy(policy))
        where = os.fspath(given.get("root") or self._config.root or await self._own_folder())
        run_id = str(uuid.uuid4())
        tools, system = self._tools.with_more(given.get("tools", ())), self._config.system_prompt or None
        of_run: Any = {name: value for name, value in given.items() if name not in _OF_SESSION}
        block = self._started(said, whole, where, run_id, tools, output, of_run)
        turn = SessionTurn(run_id=run_id, provider=self.provider, model=self.model, messages=(said,))
        before = self._file
        self._file = replace(self._file, turns=(*self._file.turns, turn))
        try:
            await self.save()  # First: after a crash, the store can be asked how the run ended.
            run = await block.__aenter__()
        except BaseException:
            self._file = before
            with anyio.CancelScope(shield=True):
                await self.save()
            raise
        self._initial = None
        self._waiting = {}
        on_event, asks = given.get("on_event"), self._config.on_ask == "stream" and given.get("on_ask") is None
        self._open = _Open(
            block=block, run=run, said=said, tools=tools, system=system, output=output, on_event=on_event, asks=asks
        )

    async def _own_folder(self) -> str:
        if self._folder is None:
            make = partial(tempfile.TemporaryDirectory[str], prefix="backplane-session-", ignore_cleanup_errors=True)
            self._folder = await anyio.to_thread.run_sync(make)
        return self._folder.name

    async def _carry_folder(self) -> None:
        """Apply the changes of a turn that was cut off, or mark it as not carried."""
        carries, self._carries = self._carries, _carries(self._file)
        last = self._file.turns[-1] if self._file.turns else None
        if not self._fresh or last is None or last.stop_reason not in _CUT_OFF:
            return
        if not carries or last.run_id is None:
            return
        try:
            await self._provider.plane.apply(last.run_id)
        except BackplaneError as error:
            if error.code != "execution_workspace_error" or "applied already" not in error.message:
                self._lose(f"dropped: the changes of run {last.run_id[:8]}, {error.message[:200]}")
                last = replace(last, carried=False)
                self._file = replace(self._file, turns=(*self._file.turns[:-1], last))

    @asynccontextmanager
    async def _started(
        self,
        said: UserMessage,
        policy: PolicyProfile,
        root: str,
        run_id: str,
        tools: Toolset,
        output: Any,
        given: RunOptions,
    ) -> AsyncIterator[Run]:
        config, plane = self._config, self._provider.plane
        async with AsyncExitStack() as opened:
            row = None
            if tools.offered:
                row = await opened.enter_async_context(served(tools.offered, self._provider.backend.secrets))
            composed = compose(self._wanted(said, policy, root, row, tools.names))
            for loss in composed.losses:
                self._lose(loss)
            order = make_order(composed.order, output=output)
            on_ask = self._on_ask if config.on_ask == "stream" else config.on_ask
            own: RunOptions = {
                **given,
                "on_ask": given.get("on_ask") or on_ask,
                "hooks": (*config.hooks, *given.get("hooks", ())),
            }
            starting = plane.start(order, self._provider.backend, run_id=run_id, **own)
            yield await opened.enter_async_context(starting)

    def _wanted(
        self, said: UserMessage, policy: PolicyProfile, root: str, row: Any, names: frozenset[str] = frozenset()
    ) -> Wanted:
        turns = tuple(turn for turn in self._file.turns[self._file.cleared :] if turn.stop_reason is not None)
        last = next((turn for turn in reversed(turns) if turn.receipt_sha256 is not None), None)
        parent = {"session": self.id} | (
            {"run_id": last.run_id, "receipt_sha256": last.receipt_sha256} if last is not None else {}
        )
        return Wanted(
            config=self._config,
            words=said.content,
            images=said.images,
            can=self._provider.can,
            provider=self.provider,
            turns=turns,
            native=self._native,
            forks=self._forks,
            system_told=self._system_told,
            parent=parent,
            tools=row,
            names=names or self._tools.names,
            root=root,
            policy=policy,
            fresh=self._fresh,
        )

    async def _leave(self) -> None:
        """End the turn under way, as another one is to begin."""
        if self._open is not None:
            self._open.left = True
        await self._abandon()

    async def _abandon(self) -> None:
        """End a turn that its reader has left."""
        open = self._open
        if open is None:
            return
        try:
            await open.run.cancel("its reader has left")
            while open.ended is None:
                await self._pull(open)
        except anyio.get_cancelled_exc_class():
            if self._open is open:
                await self._end(open)
            raise

    async def _more(self, open: _Open) -> tuple[list[AgentEvent], ProviderError | None, StopReason | None]:
        """The next events of a turn; with why it stopped where it did.

        Raises:
            ConfigError: `config_invalid`, a later call has ended it, or another task is inside a call.
        """
        if self._closed:
            async with self._lock:  # The end of the turn is known then.
                pass
        if open.left:
            fact = "the turn of this stream was ended by a later call"
            raise ConfigError("config_invalid", fact, hint="read a stream to its end before the next call")
        if open.ended is not None:
            return [], *open.ended
        with self._alone():
            return await self._pull(open)

    async def _pull(self, open: _Open) -> tuple[list[AgentEvent], ProviderError | None, StopReason | None]:
        taken: list[AgentEvent] = []
        for event in open.rest:
            is_piece = type(event) is AssistantDelta  # Nearly all are, and their message repeats them.
            event = event if is_piece else open.transcript.take(event)
            taken.append(event)
            if open.on_event is not None:
                await hand_event(open.on_event, event)
            if is_piece:
                continue
            if isinstance(event, Approval) and open.asks:
                self._waiting.setdefault(str(event.body.get("id")), _Asked(event))
            elif isinstance(event, ApprovalAnswered):
                self._waiting.pop(str(event.body.get("id")), None)
            elif open.tools.handed and reading.handed(event, open.tools.handed):
                assert isinstance(event, ToolCall)
                open.calls[str(event.tool_use_id)] = reading.own_name(event.tool_name)
                return taken, None, "tool_use"
        if taken:
            return taken, None, None
        async for batch in open.batches:
            open.rest = iter(batch.events)
            return [], None, None
        return [], *await self._end(open)

    async def _end(self, open: _Open) -> tuple[ProviderError | None, StopReason]:
        """Close a turn that has ended, and keep its messages."""
        run = open.run
        try:
            await open.block.__aexit__(None, None, None)
        finally:
            self._open = None
            failure = self._keep(open, run) if run.is_sealed else self._lost(open, run)
            stop = self._file.turns[-1].stop_reason or "error"
            self._fresh = stop in _CUT_OFF
            open.ended = failure, stop
            with anyio.CancelScope(shield=True):
                await self.save()
        return open.ended

    def _lost(self, open: _Open, run: Run) -> ProviderError:
        """Note a turn whose receipt could not be stored; the next start of a control plane seals it."""
        self._note(open, stop_reason="error")
        fact = f"run {run.id} ended without a receipt"
        return ProviderError(self.provider, run.end_error or StoreError("receipt_store_failed", fact))

    def _keep(self, open: _Open, run: Run) -> ProviderError | None:
        self.receipt, self._output = run.receipt, open.output
        receipt = self.receipt
        stop = reading.stop_of(receipt, open.transcript.stop)
        if open.interrupted and stop == "error" and receipt.outcome == "partial":
            stop = "user_interrupt"
        cause = reading.failure_of(receipt, run.end_error) if stop == "error" else None
        if self._provider.can.keeps_in(self._file.mode) and open.transcript.conversation is not None:
            self._native, self._forks = open.transcript.conversation, False
            self._system_told = open.system
        usage = reading.usage_of(receipt)
        sha256 = receipt.receipt_sha256
        carried = True
        if stop not in _CUT_OFF and _carries(self._file) and (why := reading.stays_in_patch(receipt)):
            carried = False
            self._lose(f"dropped: the changes of run {run.id[:8]}, {why}; to have them: backplane apply {run.id[:8]}")
        self._note(
            open, stop_reason=stop, receipt_sha256=sha256, usage=usage, conversation=self._native, carried=carried
        )
        return ProviderError(self.provider, cause) if cause is not None else None

    def _note(self, open: _Open, **ended: Any) -> None:
        """Note in the session how its last turn ended."""
        *before, last = self._file.turns
        turn = replace(last, messages=self._said(open), **ended)
        self._file = replace(self._file, turns=(*before, turn))

    async def _on_ask(self, asked: Approval) -> Decision:
        """Wait for `answer`; the run's own limit bounds the wait."""
        waiting = self._waiting.setdefault(str(asked.body.get("id")), _Asked(asked))
        await waiting.answered.wait()
        assert waiting.answer is not None
        return waiting.answer


def _under_way() -> ConfigError:
    fact = "a turn of this session is under way"
    return ConfigError("config_invalid", fact, hint="read it to its end, or `await session.interrupt()`")


OWN_STATE: Final = "dropped: the provider's own state of the conversation"


_CUT_OFF: Final = ("error", "user_interrupt")
"""Ends of a turn after which what it has changed goes into the folder before the next turn."""


def _carries(file: SessionFile) -> bool:
    """Return True if the changes of a turn that was cut off are put into the folder."""
    return file.mode == "staged" and file.lane == "workspace_first"


def new_file(config: SessionConfig, provider: str, parent: str | None = None) -> SessionFile:
    """Return the file of a session without messages."""
    return SessionFile(
        format="backplane.session",
        version=1,
        id=str(uuid.uuid4()),
        created_at=timestamp_at(time.time_ns()),
        provider=provider,
        parent=parent,
        **{name: getattr(config, name) for name in KEPT if getattr(config, name) is not None},
    )
