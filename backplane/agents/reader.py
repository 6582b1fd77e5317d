"""Base class of the readers of agents' messages; tracks calls, pieces of an answer, tokens and failures. Pure."""

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
"""Maximum characters of an agent's text in a warning; the rest is cut."""
GONE: Final = frozenset({"failed", "cancelled", "error", "disconnected", "disabled", "needs-auth"})
"""States of an MCP server that is not available."""
NAMES: Final = ("name", "server", "serverName")
"""Members in which agents name an MCP server."""


class TurnFailure(msgspec.Struct, frozen=True):
    """Why a turn failed, as reported by the agent."""

    words: str
    label: str = ""
    """The agent's own name for the failure; empty without one."""
    status: int | None = None
    """HTTP status of the model's service; None if unknown."""


class EventReader:
    """Translates an agent's messages to events of the contract.

    A vendor's reader has a method for each kind of message, listed in `READS`.

    Args:
        now: returns the time of an event.
        root: the workspace's folder; paths below it are reported relative to it.
        tools: names of tools in place of `TOOLS`.
        shows: True if hooks see results before they are reported.
    """

    READS: ClassVar[dict[str, Callable[[Any, dict[str, Any]], list[AgentEvent]]]] = {}
    """Kind of a message → method that reads it."""
    SILENT: ClassVar[tuple[str, ...]] = ()
    """Prefixes of kinds that are ignored: they do not concern the work, or repeat another message."""
    TOOLS: ClassVar[Mapping[str, str]] = {}
    """The agent's names of tools → the contract's."""
    OF_MODEL: ClassVar[tuple[str, ...]] = ()
    """Kinds of a model's own messages; those of a sub-agent are no answer of the run."""
    QUIET: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of words; a warning that contains a whole group is not reported."""

    def __init__(
        self, now: Callable[[], str], root: str, tools: Mapping[str, str] | None = None, *, shows: bool = False
    ) -> None:
        self._make, self._root, self._tools = EventFactory(now, root), root, tools or self.TOOLS
        self.price: Price | None = None
        self.spent = Spent()
        """Tokens and cost of the run so far; empty if the agent itself enforces the limits."""
        self.calls = OpenCalls(self._make, shows=shows)
        self.goes_on = False
        """True if another request to the model follows the last one."""
        self.acted = self.spoke = False
        """`acted`: True if a tool was called in this turn. `spoke`: True if text of an answer came, and no tool call or
        result after it."""
        self.text = ""
        """Text of the agent's last message; empty before the first one."""
        self.failure: TurnFailure | None = None
        self.is_retry = False
        """True if the last message reported a request that failed and is repeated."""
        self.resets_at: float | None = None
        """Unix time at which the service takes requests again, from the agent's last report of a limit, if any."""
        self._pieces: list[str] = []
        self._chars = 0
        """Characters of `_pieces`, the pieces of an answer that are in no message yet."""
        self._of: str | None = None
        """Id of the message that the pieces belong to."""
        self._thought_ids: set[Json] = set()
        """Ids of thoughts whose pieces were reported."""

    def begin(self) -> None:
        """Begin another turn: reset what its outcome depends on."""
        self.acted = self.spoke = False
        self.failure, self.text = None, ""

    @property
    def at_work(self) -> bool:
        """True if a tool runs."""
        return bool(self.calls.open)

    def read(self, message: Notification) -> list[AgentEvent]:
        """Return the events of one message; a message of an unknown kind is kept unchanged."""
        return self._read(message.method, message.params)

    def _read(self, kind: str, data: dict[str, Any], subagent: Json = None) -> list[AgentEvent]:
        """Read a message of this kind; `subagent` is the id of the sub-agent that it is about."""
        if subagent is not None and kind in self.OF_MODEL:
            is_part = kind.endswith(("delta", "updated"))
            return [] if is_part else [self._make.kept(f"{kind} of a sub-agent", data)]
        read = self.READS.get(kind)
        if read is not None:
            return read(self, data)
        return [] if kind.startswith(self.SILENT) else [self._make.kept(kind, data)]

    def _failed(self, words: Json, label: Json, status: Json) -> None:
        """Store why the turn failed, as reported by the agent."""
        known = status if is_count(status) else None
        self.failure = TurnFailure(str(words or "the turn failed"), str(label), known)

    # The model --------------------------------------------------------------------------------------------------------

    def _piece(self, text: Json, of: str = "") -> list[AgentEvent]:
        """Report a piece of an answer; `of` is the id of its message."""
        if not isinstance(text, str) or not text:
            return []
        broken = self.take_back(of)
        self._pieces.append(text)
        self._chars, self._of, self.spoke = self._chars + len(text), of, True
        return [*broken, self._make.delta(text)]

    def _message(self, text: Json = None) -> list[AgentEvent]:
        """Report a whole message: its text, or else the pieces so far; nothing if that is empty."""
        words = "".join(self._pieces) if text is None else text
        if not isinstance(words, str) or not words:
            return []
        self._clear()
        self.text, self.spoke = words, True
        return [self._make.message(words)]

    def take_back(self, of: str | None = None) -> list[AgentEvent]:
        """Report that an unfinished message's text does not count, if another message begins or `of` is None."""
        is_left = self._chars and (of is None or self._of != of)
        return [self._make.taken_back(self._clear())] if is_left else []

    def _clear(self) -> int:
        """Discard the pieces that are in no message yet; return how many characters they had."""
        chars, self._chars, self._pieces = self._chars, 0, []
        self.spoke = self.spoke and not chars
        return chars

    def _thoughts(self, text: Json, of: Json = None) -> list[AgentEvent]:
        """Report a piece of a thought; `of` is the thought's id, if it comes again as a whole."""
        self._thought_ids.add(of)
        return [self._make.thought(text)] if isinstance(text, str) and text else []

    def _whole_thought(self, text: Json, of: Json, **more: str) -> list[AgentEvent]:
        """Report a whole thought, unless its pieces were reported."""
        is_new = of not in self._thought_ids and isinstance(text, str) and text
        return [self._make.thought(str(text), **more)] if is_new else []

    def _retried(self, words: str, **body: Json) -> list[AgentEvent]:
        """Report that the model request is repeated; the pieces of its answer so far do not count."""
        self.is_retry = True
        if self._chars:
            body["taken_back"] = self._clear()
        return [self._make.carried("retry", body, f"the model is asked again: {words[:200]}")]

    def count(self, counts: TokenCounts | None) -> list[AgentEvent]:
        """Add the tokens of one request; a counter that is missing is unknown from then on."""
        self.spent = self.spent.plus(counts, self.price)
        return [self._make.used(self.used())]

    def used(self) -> Usage:
        return self.spent.usage()

    # Tools ------------------------------------------------------------------------------------------------------------

    def name(self, tool: str) -> str:
        """Return a tool's name as the contract calls it."""
        return self._tools.get(tool, tool)

    def _call(self, call: OpenCall, parent: str | None = None) -> list[AgentEvent]:
        """Report the start of a call."""
        self.acted, self.spoke = True, False
        return self.calls.begin(call, parent)

    def close(self) -> list[AgentEvent]:
        """Return the events that remain at the end of the run: results of open calls."""
        return self.calls.close()

    # Warnings ---------------------------------------------------------------------------------------------------------

    def _warned(self, data: dict[str, Any]) -> list[AgentEvent]:
        words = str(data.get("message") or data.get("summary") or "")
        is_quiet = any(all(word in words for word in known) for known in self.QUIET)
        return [self._make.warning(f"the agent warns: {words[:WORDS_CHARS_MAX]}")] if words and not is_quiet else []

    def _server(self, data: dict[str, Any]) -> list[AgentEvent]:
        """Report that an MCP server is not available; the agent works without it."""
        status = data.get("status")
        if status not in GONE:
            return []
        name = next((data[one] for one in NAMES if data.get(one)), None)
        return [self._make.gone(name, data.get("error") or status)]


def counts_of(rows: Iterable[Mapping[str, Any]], names: Mapping[str, tuple[str, ...]]) -> TokenCounts:
    """Map an agent's counters to the contract's.

    Args:
        rows: objects with counters, which are added up.
        names: our counter → the agent's counters whose sum it is; unknown if no row has any of them.
    """
    given = list(rows)
    known = {
        ours: [row[one] for row in given for one in theirs if is_count(row.get(one))] for ours, theirs in names.items()
    }
    return TokenCounts(**{ours: sum(counts) for ours, counts in known.items() if counts})
