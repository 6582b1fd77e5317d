"""A session: a conversation over any backend, in which every turn is an order with a receipt.

The caller pulls: nothing is read from the host faster than its events are taken. Nothing is tried again here: the
host owns retries, because only it knows what a request had already done.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, TypeVar, Unpack

import anyio
import anyio.to_thread
import msgspec
from msgspec.structs import replace

from backplane.contract.approval import Decision
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
from backplane.errors import BackendError, BackplaneError, ConfigError, StoreError, require_type
from backplane.process.aio import OwnTask
from backplane.providers import reading, unified
from backplane.providers.events import ErrorEvent, MessageDoneEvent, StreamEvent
from backplane.providers.failures import ProviderError
from backplane.providers.orders import INPUT, INTERRUPT, KEPT, SessionConfig, Wanted, compose, shaped, tightened
from backplane.providers.tools import Tool, Toolset
from backplane.runtime.functions import served
from backplane.runtime.options import (
    AllOptions,
    OnEvent,
    RunOptions,
    check_callbacks,
    check_names,
    hand_event,
)
from backplane.runtime.orders import answer_of, make_order, read_policy
from backplane.runtime.run import Run

if TYPE_CHECKING:
    from backplane.providers.registry import Provider
    from backplane.providers.store import Saved

EventT = TypeVar("EventT")

_Results = Annotated[list[ToolResultMessage], msgspec.Meta(min_length=1)]
_SAID: Final[Any] = str | UserMessage | ToolResultMessage | _Results
"""What `send_message` takes."""


class TurnOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that was waited for."""

    text: str
    """The agent's last message."""
    message: AgentMessage
    stop_reason: StopReason
    usage: TokenUsage
    receipt: Receipt | None
    """None while calls are handed to the caller, as the turn goes on then."""
    error: ProviderError | None = None
    output: Any = None
    """The shape that was asked for."""

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


class TurnOptions(AllOptions, total=False):
    """What holds for one turn, as arguments of `Session.send_message` and `run`: those of `backplane.run`.

    A `model` also holds for later turns. A `policy` only tightens the session's. `tools` and `hooks` come beside the
    session's own; the other options go before those of the session.
    """


_OF_SESSION: Final = ("model", "root", "policy", "output", "tools", "on_event")
"""Options of a turn that the session itself reads; its run gets the others."""


class _Open:
    """A turn under way."""

    def __init__(self, block: OwnTask[Run], run: Run, said: UserMessage, tools: Toolset, system: str | None) -> None:
        self.block, self.run = block, run
        self.system = system
        """The system prompt that it was begun with."""
        self.output: Any = None
        """The shape that its answer is to have."""
        self.on_event: OnEvent | None = None
        self.said = said
        """What the user said."""
        self.tools = tools
        """Those that this turn was begun with."""
        self.transcript = reading.Transcript()
        self.batches = run.batches()
        self.rest: Iterator[AgentEvent] = iter(())
        """What was read and is not told yet, as the caller has to run a tool first."""
        self.calls: dict[str, str] = {}
        """Calls that the caller runs, without their results: id → name."""
        self.answers: dict[str, tuple[anyio.Event, list[Decision]]] = {}
        """Approvals that wait for `send_input`."""
        self.ended: tuple[ProviderError | None, StopReason] | None = None
        """How it failed, if it did, and why it stopped; None while it is under way."""
        self.interrupted = False
        """The user has interrupted it."""
        self.left = False
        """A later call has ended it."""

    def waiting(self, id: str) -> tuple[anyio.Event, list[Decision]]:
        """The answer to come to one of them."""
        return self.answers.setdefault(id, (anyio.Event(), []))


class Session:
    """A conversation. Use it as an async context manager, or call `close`.

    One task at a time begins, reads or ends a turn; a call of another meanwhile is refused (`config_invalid`). `close`,
    `interrupt` and answers by `send_input` may come from any.

    Attributes:
        id: of the session; its file has this name.
        losses: what could not be carried as it was, each told once: `dropped: …` or `emulated: …`.
    """

    def __init__(self, provider: Provider, config: SessionConfig, saved: Saved | None, file: SessionFile) -> None:
        # What a session is, its file says; the configuration has what no file can hold.
        self._config = replace(config, **{name: getattr(file, name) for name in KEPT})
        self._provider, self._saved = provider, saved
        self._tools = Toolset(config.tools)
        self._policy = read_policy(file.policy or config.policy or provider.plane.settings.policy or PolicyProfile())
        self._file = replace(file, policy=self._policy)
        self._open: _Open | None = None
        self._inside = False
        """A task begins, reads or ends a turn."""
        self._came_out: anyio.Event | None = None
        """For who waits until that task has come out."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._native: str | None = None
        self._forks = self._closed = False
        self._system_told: str | None = None
        """The system prompt that the provider's own conversation has, in words."""
        self._initial = config.initial_prompt
        self._told_start = self._asks = False
        self._fresh = True
        """No turn has come to its end in this process: an earlier one may have been cut off."""
        self._carries = _carries(file)
        """Where the last turn was cut off, its work is to be put into the folder."""
        self.receipt: Receipt | None = None
        """Of the last turn."""
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
        """As it was asked for; None is the backend's own choice."""
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

        A provider that is told it in words has the earlier one in its conversation, and is told that it is replaced.
        """
        self._config = replace(self._config, system_prompt=prompt)
        self._file = replace(self._file, system_prompt=prompt)

    def get_history(self) -> tuple[Message, ...]:
        """Return what was said, oldest first; also what a turn under way has said so far."""
        turns = self._file.turns[self._file.cleared :]
        if self._open is not None:
            turns = (*turns[:-1], replace(turns[-1], messages=self._said(self._open)))
        return tuple(message for turn in turns for message in turn.messages)

    def clear_history(self) -> None:
        """Begin anew: the agent knows nothing of what was said. The receipts stay.

        Raises:
            ConfigError: `config_invalid`, a turn is under way.
        """
        self._require_rest()
        self._file = replace(self._file, cleared=len(self._file.turns))
        self._native = self._system_told = None

    def get_usage(self) -> TokenUsage:
        """Return the sum of all turns' usage; `is_at_least` says that an unknown one is left out."""
        return usage_together([turn.usage for turn in self._file.turns if turn.stop_reason is not None])

    def metadata(self) -> unified.SessionMetadata:
        """Return what the session is."""
        return unified.SessionMetadata(
            session_id=self.id,
            provider=self.provider,
            created_at=self._file.created_at,
            model=self.model,
            capabilities=self._provider.capabilities(),
            turns_completed=self.turns_completed,
            keeps_conversations=self._provider.can.keeps_in(self._file.mode),
        )

    @property
    def turns_completed(self) -> int:
        """Turns that ended and did not fail."""
        return sum(turn.stop_reason not in (None, "error", "user_interrupt") for turn in self._file.turns)

    # The first interface ----------------------------------------------------------------------------------------------

    def send_message(
        self,
        message: str | UserMessage | ToolResultMessage | Sequence[ToolResultMessage],
        **given: Unpack[TurnOptions],
    ) -> Stream[StreamEvent]:
        """Say something, and iterate over what comes; results of calls that were handed to you go on with the turn.

        A stream that is left early is ended in order by the next call; whoever reads on in it then is refused. A
        failure of the turn is an `error` event.

        Args:
            given: `TurnOptions`: those of `backplane.run`, for this turn alone; a `model` also holds for later turns,
                and a `policy` only tightens. `output` is the shape of the answer, `session.value`.

        Raises:
            TypeError: an argument is none of these.
            ConfigError: `config_invalid`, from the first event on: the session is closed, another task is inside a
                call of it, a result belongs to no call, or the policy allows more than the session's.
            BackendError: `capability_unsupported`, the provider cannot take the session's tools.
        """
        reader = reading.StreamEventReader(self.provider)
        return Stream(self, self._saying(message, given), reader.read, self._done)

    def send_for_events(
        self, message: str | UserMessage, **given: Unpack[TurnOptions]
    ) -> Stream[AgentEvent | ErrorEvent | MessageDoneEvent]:
        """Say something as `send_message`, and iterate over the run's own events, with the same two at the end."""
        return Stream(self, self._saying(message, given), list, self._done)

    def _saying(self, message: Any, given: TurnOptions) -> Callable[[], Any]:
        check_names(given, "on_event")
        require_type(given.get("on_event"), Callable | None, "`on_event`", "a function from an event")
        check_callbacks(given.get("on_ask"), given.get("hooks", ()))
        return partial(self._say, message, given)

    def _done(self, open: _Open, failure: ProviderError | None, stop: StopReason) -> list[Any]:
        """Return the last events of a turn."""
        last, used = open.transcript.last(), TokenUsage() if stop == "tool_use" else self._file.turns[-1].usage
        ended = MessageDoneEvent(message=last, usage=used, stop_reason=stop)
        return [ErrorEvent(error=failure), ended] if failure is not None else [ended]

    async def run(
        self,
        message: str | UserMessage | ToolResultMessage | Sequence[ToolResultMessage],
        **given: Unpack[TurnOptions],
    ) -> TurnOutcome:
        """Say something and wait for the end of the turn; arguments and errors as `send_message`."""
        failure: ProviderError | None = None
        async for event in self.send_message(message, **given):
            if isinstance(event, ErrorEvent):
                failure = event.error
            elif isinstance(event, MessageDoneEvent):
                return TurnOutcome(
                    text=event.message.content,
                    message=event.message,
                    stop_reason=event.stop_reason,
                    usage=event.usage,
                    receipt=None if event.stop_reason == "tool_use" else self.receipt,
                    error=failure if event.stop_reason == "error" else None,
                    output=self._output,
                )
        raise BackendError("internal", "a turn ended without its last event")

    # The second interface ---------------------------------------------------------------------------------------------

    async def send_input(self, input: unified.UserInput | str) -> None:
        """Say something, or answer a request; what comes is read by `receive_events`.

        Raises:
            ConfigError: `config_invalid`, a turn is under way, or no request of this id waits.
            BackendError: `capability_unsupported`, a patch cannot be modified.
        """
        if isinstance(input, unified.ToolApproval | unified.PatchApproval):
            self._answer(input)
            return
        if isinstance(input, unified.Review):
            self._lose("emulated: review, it is asked for in words")
            words = f"Review the changes in this folder, and change nothing. {input.text}".rstrip()
        else:
            try:
                words = input if isinstance(input, str) else input.words()
            except (AttributeError, TypeError) as error:
                fact = f"the input cannot be said in words: {error}"
                raise ConfigError("config_invalid", fact, hint="a text, or one of `unified.UserInput`") from error
        if self._open is None:
            await self._begin(UserMessage(content=words), {}, asks=True)
            return
        if INPUT not in self._provider.can.extensions:
            self._require_rest()
        self._open.run.input(words)

    def receive_events(self) -> Stream[unified.UnifiedEvent]:
        """Iterate over what the turn under way tells, to its `TurnComplete`; nothing comes while none is.

        Requests for approval wait for `send_input` while this is read, unless the session has an `on_ask`.
        """
        reader = reading.UnifiedReader(self.provider, lambda id: self._open is not None and id in self._open.answers)

        def done(open: _Open, failure: ProviderError | None, stop: StopReason) -> list[unified.UnifiedEvent]:
            ended: list[unified.UnifiedEvent] = [unified.TurnComplete(stop_reason=stop)]
            if failure is None:
                return ended
            kind, recoverable = failure.error_type, failure.recoverable
            return [unified.Error(message=failure.message, error_type=kind, recoverable=recoverable), *ended]

        async def begin() -> list[unified.UnifiedEvent]:
            if self._open is None and self._initial is not None:
                await self._begin(UserMessage(content=""), {}, asks=True)
            told, self._told_start = self._told_start, True
            return [] if told else [unified.SessionStarted(session_id=self.id, provider=self.provider)]

        return Stream(self, begin, reader.read, done)

    async def interrupt(self) -> None:
        """Stop the turn and not the session; go on reading for its last events."""
        if self._open is None:
            return
        self._open.interrupted = True
        for event, answers in self._open.answers.values():
            answers.append(Decision("deny", "the user interrupted"))
            event.set()
        if INTERRUPT in self._provider.can.extensions and not self._open.run.is_ending:
            try:
                self._open.run.interrupt()
            except BackplaneError:  # Not announced by this one, or over already.
                await self._open.run.cancel("interrupted by the user")
        else:
            await self._open.run.cancel("interrupted by the user")

    async def close(self) -> None:
        """End the session in order: a turn under way is cancelled, and who reads it gets its end; its file stays."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._open is not None:
                await self._open.run.cancel("the session was closed")
            await self._until_out()
            with self._alone():
                await self._abandon()
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
        if self._open is not None:
            raise _under_way()
        self._require_out()

    def _require_out(self) -> None:
        if self._inside:
            raise _under_way()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Begin, read or end a turn, which no other task does then: they would take each other's events."""
        self._require_out()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            if self._came_out is not None:
                self._came_out.set()
                self._came_out = None

    async def _until_out(self) -> None:
        while self._inside:
            self._came_out = self._came_out or anyio.Event()
            await self._came_out.wait()

    def _lose(self, loss: str) -> None:
        if loss not in self.losses:
            self._file = replace(self._file, losses=(*self.losses, loss))

    async def _say(
        self,
        message: str | UserMessage | ToolResultMessage | Sequence[ToolResultMessage],
        given: TurnOptions,
    ) -> list[Any]:
        said = shaped(message, _SAID, "the message", "a text, a UserMessage, or ToolResultMessage values")
        if isinstance(said, str | UserMessage):
            await self._begin(UserMessage(content=said) if isinstance(said, str) else said, given)
        else:
            for result in (said,) if isinstance(said, ToolResultMessage) else said:
                self._give(result)
        return []

    def _give(self, result: ToolResultMessage) -> None:
        self._require_out()
        open = self._open
        name = open.calls.pop(result.tool_call_id, None) if open is not None else None
        if open is None or name is None:
            fact = f"no call {result.tool_call_id[:80]!r} waits for a result"
            raise ConfigError("config_invalid", fact, hint="`tool_use_end` names the calls of tools without a handler")
        open.tools.give(name, result)

    async def _begin(self, said: UserMessage, given: TurnOptions, *, asks: bool = False) -> None:
        with self._alone():
            await self._start(said, given, asks)

    async def _start(self, said: UserMessage, given: TurnOptions, asks: bool) -> None:
        self._require_open()
        await self._leave()
        await self._provider.prepare()
        said = replace(said, content="\n\n".join(part for part in (self._initial, said.content) if part))
        self._asks = asks
        model, policy, output = given.get("model"), given.get("policy"), given.get("output")
        if model is not None and model != self.model:
            self.set_model(model)
        await self._carry_folder()
        whole = self._policy if policy is None else tightened(self._policy, read_policy(policy))
        where = os.fspath(given.get("root") or self._config.root or await self._own_folder())
        run_id = str(uuid.uuid4())
        tools, system = self._tools.with_more(given.get("tools", ())), self._config.system_prompt or None
        of_run: Any = {name: value for name, value in given.items() if name not in _OF_SESSION}
        block = OwnTask(self._started(said, whole, where, run_id, tools, output, of_run))
        turn = SessionTurn(run_id=run_id, provider=self.provider, model=self.model, messages=(said,))
        before = self._file
        self._file = replace(self._file, turns=(*self._file.turns, turn))
        try:
            await self.save()  # First: whoever finds it after a crash can ask the store what became of the run.
            run = await block.__aenter__()
        except BaseException:
            self._file = before
            with anyio.CancelScope(shield=True):
                await self.save()
            raise
        self._initial = None
        self._open = _Open(block, run, said, tools, system)
        self._open.output, self._open.on_event = output, given.get("on_event")

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
            own: RunOptions = {
                **given,
                "on_ask": given.get("on_ask") or config.on_ask or (self._on_ask if self._asks else None),
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
            await self._until_out()
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
            taken.append(event)
            if open.on_event is not None:
                await hand_event(open.on_event, event)
            if type(event) is AssistantDelta:  # Nearly all of them, and their message says it all again.
                continue
            open.transcript.take(event)
            if open.tools.handed and reading.handed(event, open.tools.handed):
                assert isinstance(event, ToolCall)
                open.calls[event.tool_use_id or event.tool_name] = reading.own_name(event.tool_name)
                return taken, None, "tool_use"
        if taken:
            return taken, None, None
        async for batch in open.batches:
            open.rest = iter(batch.events)
            if self._asks:
                self._note_asked(open, batch.events)
            return [], None, None
        return [], *await self._end(open)

    def _note_asked(self, open: _Open, batch: Sequence[AgentEvent]) -> None:
        """Expect answers to the approvals that the policy did not decide at once."""
        decided = {str(event.body.get("id")) for event in batch if isinstance(event, ApprovalAnswered)}
        for event in batch:
            if isinstance(event, Approval) and self._config.on_ask is None:
                id = str(event.body.get("id"))
                if id not in decided:
                    open.waiting(id)

    async def _end(self, open: _Open) -> tuple[ProviderError | None, StopReason]:
        """Close a turn that has ended, and keep what was said in it."""
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

    # Approvals --------------------------------------------------------------------------------------------------------

    async def _on_ask(self, asked: Approval) -> Decision:
        """Wait for `send_input`, where somebody reads `receive_events`; the run's own limit bounds the wait."""
        id, open = str(asked.body.get("id")), self._open
        if open is None:
            return Decision("deny", "the turn is over")
        event, answers = open.waiting(id)
        await event.wait()
        open.answers.pop(id, None)
        return answers[0]

    def _answer(self, input: unified.ToolApproval | unified.PatchApproval) -> None:
        if isinstance(input, unified.PatchApproval) and input.decision == "modify":
            fact = "a patch cannot be modified: no host takes a changed one"
            raise BackendError("capability_unsupported", fact, hint="reject it, and say in words what to change")
        waiting = self._open.answers.get(input.request_id) if self._open is not None else None
        if waiting is None or waiting[1]:
            fact = f"no request {input.request_id[:80]!r} waits for an answer"
            raise ConfigError("config_invalid", fact, hint="`request_id` is that of the event; each is answered once")
        event, answers = waiting
        answers.append(_decision(input))
        event.set()


def _decision(input: unified.ToolApproval | unified.PatchApproval) -> Decision:
    if isinstance(input, unified.PatchApproval):
        return Decision("allow" if input.decision == "accept" else "deny", input.reason)
    if not input.approved:
        return Decision("deny", input.reason)
    if input.modified_input is not msgspec.UNSET:
        return Decision("modify", input.reason, input.modified_input)
    return Decision("allow", input.reason, text=input.text, remember=input.remember)


class Stream(Generic[EventT]):
    """What one turn tells, in the words of one interface."""

    __slots__ = ("_begin", "_done", "_over", "_read", "_rest", "_session", "_turn")

    def __init__(
        self,
        session: Session,
        begin: Callable[[], Any],
        read: Callable[[list[AgentEvent]], list[EventT]],
        done: Callable[[_Open, ProviderError | None, StopReason], list[EventT]],
    ) -> None:
        self._session = session
        self._begin: Callable[[], Any] | None = begin
        self._read, self._done = read, done
        self._rest: Iterator[EventT] = iter(())
        self._over = False
        self._turn: _Open | None = None

    def __aiter__(self) -> Stream[EventT]:
        return self

    async def __anext__(self) -> EventT:
        while True:
            for event in self._rest:
                return event
            if self._over:
                raise StopAsyncIteration
            if self._begin is not None:
                begin, self._begin = self._begin, None
                self._rest = iter(await begin())
                self._turn = self._session._open
                continue
            self._rest = iter(await self._next())

    async def _next(self) -> list[EventT]:
        if self._turn is None:
            self._over = True
            return []
        taken, failure, stop = await self._session._more(self._turn)
        out = self._read(taken)
        if stop is not None:
            self._over = True
            out += self._done(self._turn, failure, stop)
        return out


def _under_way() -> ConfigError:
    fact = "a turn of this session is under way"
    return ConfigError("config_invalid", fact, hint="read it to its end, or `await session.interrupt()`")


OWN_STATE: Final = "dropped: the provider's own state of the conversation"


_CUT_OFF: Final = ("error", "user_interrupt")
"""Ends of a turn after which what it has changed goes into the folder before the next turn."""


def _carries(file: SessionFile) -> bool:
    """Whether what a turn has done that was cut off goes into the folder."""
    return file.mode == "staged" and file.lane == "workspace_first"


def new_file(config: SessionConfig, provider: str, parent: str | None = None) -> SessionFile:
    """Return the file of a session that has said nothing yet."""
    return SessionFile(
        format="backplane.session",
        version=1,
        id=str(uuid.uuid4()),
        created_at=timestamp_at(time.time_ns()),
        provider=provider,
        parent=parent,
        **{name: getattr(config, name) for name in KEPT if getattr(config, name) is not None},
    )
