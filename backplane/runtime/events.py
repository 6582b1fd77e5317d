"""Journals a run's events and passes them on to the run's reader, which may be one read behind."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Self

import anyio

from backplane.contract.canonical import Json, timestamp_at
from backplane.contract.events import AgentEvent, carried, carry
from backplane.errors import BackplaneError, ConfigError
from backplane.process.aio import Flag, asyncio_task
from backplane.protocol.messages import Events
from backplane.receipts.state import OWN_LINES_MAX, RunState
from backplane.runtime.ending import RunEnding
from backplane.runtime.place import RunPlace

READER_LOOK_S: Final = 0.05
"""Seconds between two checks by `Run.wait` whether another task still reads the events."""

AHEAD: Final = 1
"""Limit of reads of the host's output that wait for the run's reader; a slow reader slows the host down."""


class EventStream:
    """Holds the events that no reader has taken yet.

    Attributes:
        ended: set once the last event has been added and the run is sealed.
        rest: the events of the last batch that no iterator over single events has given yet.
    """

    def __init__(self) -> None:
        self.ended = Flag()
        self._batches: deque[Events] = deque()
        self.rest: Iterator[AgentEvent] = iter(())
        self._changed: anyio.Event | None = None
        """Set at the next change; None if no task waits for one."""
        self._is_dropped = False
        self._readers: list[weakref.ref[RunReader]] = []
        """Iterators over the events; one that is no longer referenced elsewhere is ignored."""

    def add(self, batches: Iterable[Events]) -> None:
        """Add events without a wait for the reader."""
        if not self._is_dropped:
            self._batches.extend(batches)
        self.wake()

    async def taken(self, unless: Callable[[], bool] = bool) -> None:
        """Wait until at most `AHEAD` batches are unread, or `unless` returns True; the caller calls `wake` for that."""
        while len(self._batches) > AHEAD and not unless():
            await self._change_comes()

    def drop(self) -> None:
        """Discard all waiting and future events, so that the run does not wait for a reader."""
        self._is_dropped = True
        self._clear()

    def _clear(self) -> None:
        self._batches.clear()
        self.rest = iter(())
        self.wake()

    def close(self) -> None:
        """End the stream; the events in it can still be read."""
        self.ended.set()
        self.wake()

    def wake(self) -> None:
        """Make every task that waits for a change check again."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def _change_comes(self) -> None:
        self._changed = self._changed or anyio.Event()
        await self._changed.wait()

    def is_read_elsewhere(self) -> bool:
        """Return True if a task that still runs, and is not the current one, iterates over the events."""
        return any((reader := known()) is not None and reader.is_elsewhere() for known in self._readers)

    def add_reader(self, reader: RunReader) -> None:
        """Remember an iterator as long as it is referenced elsewhere."""
        self._readers = [*(known for known in self._readers if known() is not None), weakref.ref(reader)]

    async def drained(self) -> None:
        """Wait for the end of the run; discard its events if no other task reads them."""
        while not self.ended.is_set():
            if self.is_read_elsewhere():
                with anyio.move_on_after(READER_LOOK_S):
                    await self.ended.wait()
            else:
                self._clear()
                await self._change_comes()
        if not self.is_read_elsewhere():
            self._clear()

    async def next(self) -> Events:
        """Wait for the next events and return them. Raises StopAsyncIteration: the run has ended."""
        while True:
            while not self._batches:
                if self.ended.is_set():
                    raise StopAsyncIteration
                await self._change_comes()
            batch = self._batches.popleft()
            self.wake()
            if batch.events:
                return batch


class RunReader:
    """An iterator over a run's events; it remembers the task that made it."""

    def __init__(self, stream: EventStream, run_id: str) -> None:
        if stream.is_read_elsewhere():
            fact = f"another task iterates over run {run_id}"
            hint = "read it in one task; others may `await run.wait()` meanwhile"
            raise ConfigError("config_invalid", fact, hint=hint)
        self._stream, self._next = stream, stream.next
        self._task_id, self._task = anyio.get_current_task().id, asyncio_task()
        stream.add_reader(self)

    def __aiter__(self) -> Self:
        return self

    def is_elsewhere(self) -> bool:
        """Return True if another task made this iterator and still runs; under trio, an ended task counts, too."""
        has_ended = self._task is not None and self._task.done()
        return not has_ended and self._task_id != anyio.get_current_task().id


class RunEvents(RunReader):
    """Iterates over a run's events, one at a time."""

    async def __anext__(self) -> AgentEvent:
        while True:
            for event in self._stream.rest:
                return event
            self._stream.rest = iter((await self._next()).events)


class RunBatches(RunReader):
    """Iterates over a run's events in groups, as they arrived."""

    async def __anext__(self) -> Events:
        return await self._next()


class RunRecord:
    """Journals the events of a run, passes them to its reader and folds them into its facts, in this order."""

    def __init__(self, facts: RunState, ending: RunEnding, place: RunPlace, stream: EventStream) -> None:
        self._facts = facts
        self._ending = ending
        self.place = place
        self._stream = stream

    def own(self, name: str, body: Json, message: str) -> Events:
        """Make an event of the control plane, a warning with `body` in `ext[name]`; secrets in it are redacted."""
        facts = self._facts
        event = carried(carry(name, body, ts=now(), message=message))
        made = Events.of(facts.run_id, [event], ours=True)
        if facts.redactor.found(made.lines):
            event, count = facts.redactor.event(event)
            facts.counts["redacted"] += count
            made = Events.of(facts.run_id, [event], ours=True)
        return made

    def report(self, name: str, body: Json, message: str) -> None:
        """Add an event of the control plane, unless the host's last message has come."""
        if not self._ending.over.is_set():
            self.add([self.own(name, body, message)])

    def add(self, batches: list[Events]) -> None:
        """Add events; end the run if the journal cannot be written, as lost events could not be shown later."""
        journal = self.place.journal
        if journal is None or not batches:
            return
        lines, count, at = b"", 0, journal.count
        for batch in batches:  # Usually one; batches are not merged, which would copy their bytes.
            lines += batch.lines
            count += len(batch.events)
        if not lines:
            return
        try:
            journal.append(lines, count)
        except BackplaneError as error:
            self._ending.lose_journal(error)
            return
        self._stream.add(batches)  # The reader gets journalled events even if the code below raises.
        for batch in batches:
            if not batch.ours:
                self._facts.fold_claims(batch.events, at)
            elif len(self._facts.own_lines) < OWN_LINES_MAX:
                self._facts.own_lines.append(at)
            at += len(batch.events)


def now() -> str:
    """Return the present time in the contract's format."""
    return timestamp_at(time.time_ns())
