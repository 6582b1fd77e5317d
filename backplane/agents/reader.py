"""Base of the readers of agents' messages: calls, pieces of an answer, tokens, failures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final

import msgspec

from backplane.agents.calls import OpenCall, OpenCalls
from backplane.agents.events import EventFactory, is_count
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import Usage
from backplane.dialects.ir import TokenCounts
from backplane.protocol.jsonrpc import Notification
from backplane.upstream.cost import Price, Spent

WORDS_CHARS_MAX: Final = 500
"""Most characters of an agent's words in a warning or a retry."""
GONE: Final = frozenset({"failed", "cancelled", "error", "disconnected", "disabled", "needs-auth"})
"""States of an MCP server that the run has to do without."""
NAMES: Final = ("name", "server", "serverName")
"""Members in which they name it."""


class TurnFailure(msgspec.Struct, frozen=True):
    """Why a turn failed, by the agent's own account."""

    words: str
    label: str = ""
    """The agent's own word for it."""
    status: int | None = None
    """HTTP status of the model's service."""


class EventReader:
    """Reader of an agent's messages: it makes events of the contract.

    A vendor's reader has its kinds of messages in `READS`, and what each of them means.

    Args:
        now: gives the time of an event.
        root: of the workspace; paths below it are reported relative to it.
        tools: the agent's names of tools → the contract's.
        shows: hooks see results before they are reported.
    """

    READS: ClassVar[dict[str, Callable[[Any, dict[str, Any]], list[AgentEvent]]]] = {}
    """Kind of a message → what reads it."""
    SILENT: ClassVar[tuple[str, ...]] = ()
    """Beginnings of kinds that say nothing about the work, or repeat what another says."""
    QUIET: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Words that stand together in warnings that nobody needs."""

    def __init__(
        self, now: Callable[[], str], root: str, tools: Mapping[str, str] | None = None, *, shows: bool = False
    ) -> None:
        self._make, self._root, self._tools = EventFactory(now, root), root, tools or {}
        self.price: Price | None = None
        self.spent = Spent()
        """Tokens and cost of the run so far; empty if the agent itself holds the limits."""
        self.calls = OpenCalls(self._make, shows=shows)
        self.goes_on = False
        """True if another request to the model follows the last one."""
        self.acted = self.spoke = False
        """True if there was a call; if the last thing that happened was a message."""
        self.text = ""
        """The last message."""
        self.failure: TurnFailure | None = None
        self.resets_at: float | None = None
        """Unix time at which the service takes requests again, by the agent's last word about a limit."""
        self._pieces: list[str] = []
        self._chars = 0
        """Pieces of an answer that stand in no message yet, and how many characters they have."""
        self._of: str | None = None
        """Id of the message that they belong to."""

    def begin(self) -> None:
        """Begin another turn, whose end is judged by itself."""
        self.acted = self.spoke = False
        self.failure, self.text = None, ""

    @property
    def at_work(self) -> bool:
        """Return True if a tool runs."""
        return bool(self.calls.open)

    def read(self, message: Notification) -> list[AgentEvent]:
        """Read one message; what the contract has no word for is kept as it came."""
        return self._read(message.method, message.params)

    def _read(self, kind: str, data: dict[str, Any]) -> list[AgentEvent]:
        read = self.READS.get(kind)
        if read is not None:
            return read(self, data)
        return [] if kind.startswith(self.SILENT) else [self._make.kept(kind, data)]

    def _failed(self, words: Json, label: Json, status: Json) -> None:
        """Note why the turn failed, by the agent's own account."""
        known = status if is_count(status) else None
        self.failure = TurnFailure(str(words or "the turn failed"), str(label), known)

    # The model --------------------------------------------------------------------------------------------------------

    def _piece(self, text: Json, of: str = "") -> list[AgentEvent]:
        """Report a piece of an answer, `of` the message that it belongs to."""
        if not isinstance(text, str) or not text:
            return []
        broken = self._take_back(of)
        self._pieces.append(text)
        self._chars, self._of = self._chars + len(text), of
        return [*broken, self._make.delta(text)]

    def _message(self, text: Json = None) -> list[AgentEvent]:
        """Report a whole message: its text, or else the pieces that came; nothing if there are no words."""
        words = "".join(self._pieces) if text is None else text
        if not isinstance(words, str) or not words:
            return []
        self._clear()
        self.text, self.spoke = words, True
        return [self._make.message(words)]

    def _take_back(self, of: str | None = None) -> list[AgentEvent]:
        """Take back the words of a message that never became whole, when another takes its place or none follows."""
        is_left = self._chars and (of is None or self._of != of)
        return [self._make.taken_back(self._clear())] if is_left else []

    def _clear(self) -> int:
        """Forget the pieces of an answer; return how many characters they had."""
        chars, self._chars, self._pieces = self._chars, 0, []
        return chars

    def _thoughts(self, text: Json) -> list[AgentEvent]:
        return [self._make.thought(text)] if isinstance(text, str) and text else []

    def _retried(self, words: str, **body: Json) -> list[AgentEvent]:
        """Report that the model is asked again; what came of its answer does not count."""
        if self._chars:
            body["taken_back"] = self._clear()
        return [self._make.carried("retry", body, f"the model is asked again: {words[:200]}")]

    def count(self, counts: TokenCounts | None) -> list[AgentEvent]:
        """Add what one request took; what it does not say is unknown from then on."""
        self.spent = self.spent.plus(counts, self.price)
        return [self._make.used(self.used())]

    def used(self) -> Usage:
        return self.spent.usage()

    # Tools ------------------------------------------------------------------------------------------------------------

    def name(self, tool: str) -> str:
        """Return a tool's name as the contract calls it."""
        return self._tools.get(tool, tool)

    def _call(self, call: OpenCall, parent: str | None = None) -> list[AgentEvent]:
        """Report a call that began."""
        self.acted, self.spoke = True, False
        return self.calls.begin(call, parent)

    def close(self) -> list[AgentEvent]:
        """Return what is still to be reported at the end of the run: results of open calls."""
        return self.calls.close()

    # Words ------------------------------------------------------------------------------------------------------------

    def _warned(self, data: dict[str, Any]) -> list[AgentEvent]:
        words = str(data.get("message") or data.get("summary") or "")
        is_quiet = any(all(word in words for word in known) for known in self.QUIET)
        return [self._make.warning(f"the agent warns: {words[:WORDS_CHARS_MAX]}")] if words and not is_quiet else []

    def _server(self, data: dict[str, Any]) -> list[AgentEvent]:
        """Report that an MCP server is not there: the agent goes to work all the same."""
        status = data.get("status")
        if status not in GONE:
            return []
        name = next((data[one] for one in NAMES if data.get(one)), None)
        return [self._make.gone(name, data.get("error") or status)]


def counts_of(rows: Iterable[Mapping[str, Any]], names: Mapping[str, tuple[str, ...]]) -> TokenCounts:
    """Map an agent's counters to the contract's.

    Args:
        rows: objects with counters, which are added up.
        names: our counter → the agent's whose sum it is; it is unknown if no row has one of them.
    """
    given = list(rows)
    known = {
        ours: [row[one] for row in given for one in theirs if is_count(row.get(one))] for ours, theirs in names.items()
    }
    return TokenCounts(**{ours: sum(counts) for ours, counts in known.items() if counts})
