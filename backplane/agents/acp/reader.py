"""Reader of a session's updates: it makes events of the contract.

Agents announce a call in pieces, in any order, and some ask first and announce never. A call is told once, when its
input is known, and its result once; what the protocol has no word for is kept as it came.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from backplane.agents.calls import OpenCall
from backplane.agents.events import exit_code, is_count, mapping, mappings, plain_command
from backplane.agents.gate import command_of
from backplane.agents.gemini.record import Record
from backplane.agents.reader import EventReader as BaseReader
from backplane.agents.rows import Notice
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import Usage
from backplane.dialects.ir import TokenCounts
from backplane.policy.paths import SPELLINGS, TOOLS
from backplane.protocol.jsonrpc import Notification

UPDATE: Final = "session/update"
MESSAGE_CHARS_MAX: Final = 4 * 1024 * 1024
"""Most text of one message; a line has room for it. What is said beyond it is another message."""

NOTICE_CHARS_MAX: Final = 2000
"""Characters of an agent's own words among its model's."""

SILENT: Final = frozenset(
    {"available_commands_update", "current_mode_update", "config_option_update", "session_info_update",
     "user_message_chunk"}
)  # fmt: skip
"""Updates that say nothing about the work."""

NEUTRAL: Final[Mapping[str, str]] = {
    "read": "read_file", "edit": "edit_file", "delete": "edit_file", "move": "edit_file", "search": "grep",
    "execute": "bash", "fetch": "web_fetch", "think": "think", "switch_mode": "switch_mode", "other": "other",
}  # fmt: skip
"""Kinds of the protocol → the names that rules know, for an agent that says no better one."""

_WRITING: Final = frozenset({"edit", "delete", "move"})
_OF_KIND: Final[Mapping[str, frozenset[str]]] = {
    "read": frozenset({"read_file", "list_files"}),
    **dict.fromkeys(_WRITING, frozenset({"edit_file", "write_file", "multi_edit", "apply_patch"})),
    "search": frozenset({"grep", "glob", "list_files", "web_search"}),
    "execute": frozenset({"bash"}),
    "fetch": frozenset({"web_fetch", "web_search"}),
}
"""Kind of a call → the neutral tools that it may be; the call's title only chooses among them."""
_PATH_NAMES: Final = ("filePath", "file_path", "filepath", "path", "absolute_path")
_NAME: Final = re.compile(r"[A-Za-z_][\w.-]{0,127}")


class AcpCall(OpenCall, kw_only=True):
    """One tool call as known so far; `tool` is empty while the agent gives only a kind."""

    kind: str = "other"
    is_named: bool = False
    """The agent named the tool in a member for it; otherwise `tool` is the call's title."""
    output: Json = None
    text: str = ""
    """Latest text of its content."""
    reported: str = ""
    """The part of a running command's output that was reported."""
    paths: list[str] = msgspec.field(default_factory=list)
    places: list[str] = msgspec.field(default_factory=list)
    is_said: bool = False

    def name_places(self) -> None:
        """Have its input name every file that it is said to change: rules look at nothing else."""
        named = [value for value in mapping(self.input).values() if isinstance(value, str)]
        missing = [path for path in dict.fromkeys((*self.paths, *self.places)) if path not in named]
        if missing and self.kind in _WRITING:
            self.input = {**mapping(self.input), "changed_paths": missing}


class EventReader(BaseReader):
    """Reads the updates of a session.

    Args:
        now: gives the time of an event.
        root: of the workspace; paths below it are told relative to it.
        tools: the agent's names of tools → neutral ones.
        notices: what the agent says itself among the words of its model.
        servers: names of MCP servers, by which their tools are known.
        record: the agent's own, where that says more of its requests and tools than the protocol does.
        by_own_word: takes a tool's own and neutral name; True if a rule of the policy names the own one alone.
    """

    def __init__(
        self,
        now: Callable[[], str],
        root: str,
        tools: Mapping[str, str],
        notices: Sequence[Notice] = (),
        record: Record | None = None,
        servers: Collection[str] = (),
        by_own_word: Callable[[str, str], bool] = lambda own, neutral: False,
    ) -> None:
        super().__init__(now, root, tools)
        self._servers = servers
        self._by_own_word = by_own_word
        self._calls: dict[str, AcpCall] = {}
        self._text: list[str] = []
        self._text_chars = 0
        self._results_since_output = self._calls_since_words = False
        self.answered = self.denied = False
        """True if there was an answer in words; if a call was denied."""
        self.is_history = False
        """True while the agent replays an older conversation, which is no part of this run."""
        self.ever_acted = False
        """True if there was a tool call in any turn."""
        self.last_words = ""
        self._notices = [(re.compile(row.says, re.DOTALL), row) for row in notices if row.says]
        self.silent = next((row.code for row in notices if not row.says), None)
        """Code of a turn that ends after a tool and without a word; None if that is no failure."""
        self._record = record
        self._unread: list[tuple[AcpCall, bool]] = []
        """Calls that are over and whose output the record did not have yet, and whether they failed."""
        self.left_out = 0
        """Updates of an older conversation."""
        self._held: tuple[str, str] | None = None
        """The latest chunk, where it may be a failure's, and its code: what follows says whether it was."""

    def begin(self) -> None:
        """Begin another turn of the same session."""
        super().begin()
        self.answered = self.denied = self._results_since_output = self._calls_since_words = False
        self.last_words = ""

    @property
    def closed_with_words(self) -> bool:
        """Return True if the last thing that happened was an answer, not a tool's result."""
        return self.answered and not self._results_since_output

    def read(self, message: Notification) -> list[AgentEvent]:
        """Read one notification."""
        update = message.params.get("update")
        if message.method != UPDATE or self.is_history or not isinstance(update, dict):
            self.left_out += 1
            return []
        kind = update.get("sessionUpdate")
        if kind in SILENT:
            return []
        return [*self.recorded(), *self._update(kind, update)]

    def _update(self, kind: Json, update: dict[str, Any]) -> list[AgentEvent]:
        if kind in ("agent_message_chunk", "agent_thought_chunk"):
            return self._chunk(update, kind == "agent_thought_chunk")
        if kind in ("tool_call", "tool_call_update"):
            return self._tool(update)
        if kind == "usage_update":
            body = {name: update.get(name) for name in ("used", "size", "cost") if name in update}
            return [self._make.carried("usage", {"context": body}, "the agent told its use of the context")]
        if kind == "plan":
            return [self._make.carried("task", {"plan": update.get("entries")}, "the agent told its plan")]
        return [self._make.kept(kind, update)]

    def _chunk(self, update: dict[str, Any], thought: bool) -> list[AgentEvent]:
        events = self._note_usage(update)
        content = update.get("content")
        text = content.get("text") if isinstance(content, dict) else None
        if not isinstance(text, str):
            return [*events, self._make.kept("part of a message that is no text", update)]
        if not text:
            return events
        if thought:
            return [*events, *self._turn(), self._make.thought(text)]
        notice = next((row for says, row in self._notices if says.match(text[:NOTICE_CHARS_MAX])), None)
        return [*events, *(self._words(text) if notice is None else self._notice(text, notice))]

    def _words(self, text: str) -> list[AgentEvent]:
        """Words of the model; so were those before them that looked like a failure."""
        held, self._held = self._held, None
        events = self._turn() if held is None else self._words(held[0])
        if self._text_chars + len(text) > MESSAGE_CHARS_MAX:
            events += self.message()
        self.answered, self._calls_since_words = True, False
        self._text_chars += len(text)
        self._text.append(text)
        return [*events, self._make.delta(text)]

    def _notice(self, text: str, notice: Notice) -> list[AgentEvent]:
        """Words of the agent itself; those of a failure wait, as an answer may begin like one."""
        held, self._held = self._held, None
        events: list[AgentEvent] = [] if held is None else [self._noted(held[0])]
        if notice.code is not None:
            self._held = (text, notice.code)
            return events
        if not notice.retry:
            return [*events, self._noted(text)]
        words = text[:NOTICE_CHARS_MAX]
        return [*events, self._retry(words, f"the model is asked again: {words[:200]}", taken_back=self._clear())]

    def failed_request(self, words: str, *, asks_anew: bool) -> AgentEvent:
        """Report a request that failed.

        Args:
            asks_anew: the agent asks for the whole answer again, so that its words until now do not count.
        """
        return self._retry(words, f"the model's service failed: {words}", taken_back=self._clear() if asks_anew else 0)

    def _retry(self, words: str, message: str, *, taken_back: int) -> AgentEvent:
        body: dict[str, Json] = {"message": words, **({"taken_back": taken_back} if taken_back else {})}
        return self._make.carried("retry", body, message)

    def _clear(self) -> int:
        """Leave out the words since the last message; returns how many characters they had."""
        chars = self._text_chars
        self.answered = self.answered and not chars
        self._text, self._text_chars = [], 0
        return chars

    def _noted(self, text: str) -> AgentEvent:
        return self._make.warning(f"the agent says: {text[:NOTICE_CHARS_MAX]}")

    def take_failure(self, *, counted: bool) -> tuple[str, str] | None:
        """Return the code and the words of the turn's failure, None without one. Call it before `end`.

        Args:
            counted: the agent told what the turn used. Without a call in it, the model has answered then.
        """
        held = self._held
        if held is None or (counted and not self.acted):
            return None
        self._held = None
        return held[1], held[0][:NOTICE_CHARS_MAX]

    def _note_usage(self, update: dict[str, Any]) -> list[AgentEvent]:
        usage = read_usage(mapping(update.get("_meta")).get("usage"))
        return [] if usage is None else self.count(usage)

    def used(self) -> Usage:
        # Some updates count a call and some a turn, so the number of requests is unknown.
        usage = self.spent.usage()
        return usage if self._record is not None else msgspec.structs.replace(usage, request_units=None)

    def _turn(self) -> list[AgentEvent]:
        """The end of a turn of the model: something new comes after results went in."""
        if not self._results_since_output:
            return []
        self._results_since_output = False
        return [self._make.turn("tool_use")]

    def _tool(self, update: dict[str, Any]) -> list[AgentEvent]:
        fresh = update.get("toolCallId") not in self._calls
        call = self._known(update)
        events = self._turn() if fresh else []
        status = update.get("status")
        if status in ("completed", "failed"):
            events += self.say(call)
            if self._record is not None and call.id not in self._record.outputs and call.id in self.calls.open:
                self._unread.append((call, status == "failed"))
                return events
            return [*events, *self._ended(call, status == "failed")]
        if status == "in_progress" and call.input:
            events += self.say(call)
        return [*events, *self._progress(call)]

    def recorded(self) -> list[AgentEvent]:
        """Report what is new in the agent's own record, which it writes before it asks its model again."""
        record = self._record
        if record is None:
            return []
        record.read()
        events: list[AgentEvent] = []
        for usage in record.requests:
            self.goes_on = False
            events += self.count(usage)
        record.requests.clear()
        waiting, self._unread = self._unread, []
        return [*events, *(event for call, failed in waiting for event in self._ended(call, failed))]

    def _ended(self, call: AcpCall, failed: bool) -> list[AgentEvent]:
        """The end of a call, with what the record says of it."""
        said = self._record.outputs.pop(call.id, None) if self._record is not None else None
        if said is not None:
            call.output = {"output": said.text, "exitCode": said.exit_code}
        return self._end(call, failed)

    def _known(self, update: dict[str, Any]) -> AcpCall:
        """The call an update speaks of, with what it adds."""
        id = str(update.get("toolCallId"))
        call = self._calls.get(id) or AcpCall(id, "", "", {})
        self._calls[id] = call
        title, kind = update.get("title"), update.get("kind")
        meta = mapping(update.get("_meta"))
        name = next((one["toolName"] for one in (meta, *map(mapping, meta.values())) if "toolName" in one), None)
        prefix = _named_by(id)
        # A request may say "other" of a call whose kind is known; and it may add to a call that was reported.
        call.kind = kind if isinstance(kind, str) and kind != "other" else call.kind
        if isinstance(update.get("rawInput"), dict):
            call.input = {**call.input, **update["rawInput"]}
            if isinstance(call.input.get("command"), list):
                call.input["command"] = plain_command(call.input["command"])
        for candidate in (name, prefix, title if title != call.input.get("command") else None):
            if not call.is_named and isinstance(candidate, str) and _NAME.fullmatch(candidate):
                call.is_named = candidate is not title
                call.tool = candidate if call.is_named else call.tool or candidate
        if command_of(call.input) is not None and not call.is_named and self._server_tool(call) is None:
            call.kind = "execute"  # Whatever the agent takes the command for: `cat` is none the less one.
        if "rawOutput" in update:
            call.output = update["rawOutput"]
        text = texts(update.get("content"))
        if text != call.input.get("description"):  # Grok shows it of a command before it runs.
            call.text = text or call.text
        diffs = [block for block in mappings(update.get("content")) if block.get("type") == "diff"]
        call.paths += [block["path"] for block in diffs if isinstance(block.get("path"), str)]
        places = mappings(update.get("locations"))
        call.places += [place["path"] for place in places if isinstance(place.get("path"), str)]
        return call

    def asked(self, tool_call: dict[str, Any]) -> tuple[AcpCall, list[AgentEvent]]:
        """Return the call in a permission request, and the events to emit before it is decided."""
        fresh = str(tool_call.get("toolCallId")) not in self._calls
        known = self._calls.get(str(tool_call.get("toolCallId")))
        recorded = self.recorded()
        text = known.text if known is not None else ""
        call = self._known(tool_call)
        call.text = text  # What a question says is no output of the tool.
        if not call.input:
            # An agent that shows no input shows at least what it is about.
            title = tool_call.get("title")
            key = "command" if call.kind == "execute" else "title"
            call.input = {key: title} if isinstance(title, str) else {}
            paths = [*call.paths, *call.places]
            if paths:
                call.input["path"] = paths[0]
        call.name_places()
        return call, [*recorded, *(self._turn() if fresh else []), *self.say(call)]

    def say(self, call: AcpCall) -> list[AgentEvent]:
        """Report the call, once."""
        if call.is_said:
            return []
        call.is_said = self.acted = self.ever_acted = self._calls_since_words = True
        self.goes_on = self._record is not None
        if not call.input and (paths := [*call.paths, *call.places]):
            call.input = {"path": paths[0]}
        call.name_places()
        call.name = self.name_of(call)
        return [*self.message(), *self.calls.begin(call)]

    def deny(self, call: AcpCall, reason: str) -> list[AgentEvent]:
        """Report the result of a call that was not allowed."""
        self.denied = True
        return self._close(call, f"policy_denied: {reason}", failed=True)

    def name_of(self, call: AcpCall) -> str:
        """Return the tool's name in events: `mcp__SERVER__TOOL`, the neutral name, or the agent's own.

        The agent's own name is used if a rule names only that, or if the tool has no neutral name.
        """
        neutral = self.neutral(call)
        return call.tool if call.tool and self._by_own_word(call.tool, neutral) else neutral

    def neutral(self, call: AcpCall) -> str:
        """Return the name that rules and hooks use for a call; its kind decides, never its title."""
        own = call.tool
        known = self._server_tool(call) or self._tools.get(own) or SPELLINGS.get(own, own if own in TOOLS else None)
        of_kind = _OF_KIND.get(call.kind)
        if of_kind is None or (known is not None and (call.is_named or known in of_kind or known.startswith("mcp__"))):
            return known or own or NEUTRAL.get(call.kind, "other")
        return NEUTRAL[call.kind]

    def _server_tool(self, call: AcpCall) -> str | None:
        """Return `mcp__SERVER__TOOL` for the tool of an MCP server, however the agent joins the two names."""
        own = call.tool
        for server in self._servers:
            for beginning in (f"mcp__{server}__", f"mcp_{server}_", f"{server}_", f"{server}."):
                if own.startswith(beginning):
                    return f"mcp__{server}__{own.removeprefix(beginning)}"
        return None

    def message(self) -> list[AgentEvent]:
        """Report the message whose deltas were emitted, if there is one."""
        held, self._held = self._held, None
        events = [] if held is None else self._words(held[0])
        if not self._text:
            return events
        self.last_words, self._text, self._text_chars = "".join(self._text), [], 0
        said, whole = self._record.words() if self._record is not None else "", self.last_words.rstrip()
        if said and said != whole and whole.endswith(said):
            # It asked its model again without a word of it: what came before is no part of the answer.
            body: dict[str, Json] = {"reason": "asked_again", "taken_back": len(self.last_words)}
            events.append(self._make.carried("retry", body, "the agent asked its model again"))
            self.last_words = self.last_words[len(whole) - len(said) :]
        return [*events, self._make.message(self.last_words)]

    def take_back(self) -> list[AgentEvent]:
        """Return an event that takes back the text of an unfinished answer; none if there is no such text."""
        chars, self._text, self._text_chars, self.answered = self._text_chars, [], 0, False
        body: dict[str, Json] = {"reason": "broken_stream", "taken_back": chars}
        return [self._make.carried("retry", body, "the stream of the model's answer broke")] if chars else []

    @property
    def is_broken(self) -> bool:
        """Return True if the turn ended with text that is no answer in the agent's record, or one without tokens."""
        record = self._record
        if record is None or not record.is_there or not "".join(self._text).strip():
            return False
        return record.is_unended or not record.has_words

    def end(self, stop_reason: str) -> list[AgentEvent]:
        """The end of the turn; a call that is still open gets its result.

        Some agents answer and never tell the end of a tool whose result the model had: the answer came last then.
        """
        recorded, self.goes_on = self.recorded(), False
        last = self._results_since_output or self._calls_since_words
        events, self._results_since_output = [*recorded, *self.close()], last
        return [*events, self._make.turn(stop_reason)]

    def close(self) -> list[AgentEvent]:
        """Report what is left at the end: the message that was begun, and results of open calls."""
        events = [*self.recorded(), *self.message()]
        if self.goes_on:  # A turn that was cut off after its calls counts as one.
            self.goes_on = False
            events.append(self._make.turn("tool_use"))
        left = self.calls.close()
        self._results_since_output = self._results_since_output or bool(left)
        return [*events, *left]

    def _progress(self, call: AcpCall) -> list[AgentEvent]:
        """Report the new output of a running command."""
        if call.kind != "execute" or not call.is_said or not call.text.startswith(call.reported):
            return []
        news, call.reported = call.text[len(call.reported) :], call.text
        return self.calls.output(news)

    def _end(self, call: AcpCall, failed: bool) -> list[AgentEvent]:
        text, paths = texts_of(call), dict[str, None]()
        if call.kind in _WRITING and not failed:
            paths = dict.fromkeys(call.paths or call.places or _paths(call.input))
        ran = (exit_code_of(call.output), text) if call.kind == "execute" else None
        changes = [(path, f"{call.name} by the agent") for path in paths]
        return self._close(call, text or call.output, failed=failed, ran=ran, changes=changes)

    def _close(self, call: AcpCall, output: Json, **more: Any) -> list[AgentEvent]:
        ended = self.calls.end(call.id, output, **more)
        self._results_since_output = self._results_since_output or bool(ended)
        return ended


def _named_by(id: str) -> str | None:
    """The tool's name in a call's id, where an agent puts it: `NAME__call_…`, `NAME__NAME_…`."""
    name, _, rest = id.partition("__")
    return name if rest.startswith(("call_", f"{name}_")) else None


def texts(content: Json) -> str:
    """The text in a call's content blocks."""
    parts = [mapping(block.get("content")).get("text") for block in mappings(content)]
    return "".join(part for part in parts if isinstance(part, str))


def texts_of(call: AcpCall) -> str:
    for name in ("output", "aggregated_output", "formatted_output", "error", "text"):
        text = mapping(call.output).get(name)
        if isinstance(text, str) and text:
            return text
    return call.output if isinstance(call.output, str) and call.output else call.text


def exit_code_of(output: Json) -> int | None:
    """A command's exit code, from whichever place an agent puts it; None when it is not said."""
    places = (mapping(output), mapping(mapping(output).get("metadata")))
    codes = (exit_code(place.get(name)) for place in places for name in ("exit", "exit_code", "exitCode"))
    return next((code for code in codes if code is not None), None)


def _paths(tool_input: Json) -> list[str]:
    return [value for name in _PATH_NAMES if isinstance(value := mapping(tool_input).get(name), str)][:1]


def read_usage(usage: Json) -> TokenCounts | None:
    """Read the counters that an agent prints; return None if it prints none.

    Some agents count cached tokens and thinking beside input and output, others in them: the total tells.
    """
    told = mapping(usage)
    counters = {
        ours: told[theirs] for ours, names in _COUNTERS.items() for theirs in names if is_count(told.get(theirs))
    }
    total = told.get("totalTokens")
    if is_count(total) and "input" in counters and "output" in counters:
        cached = counters.get("cache_read", 0) + counters.get("cache_write", 0)
        thought = counters.get("reasoning", 0)
        more = total - counters["input"] - counters["output"]
        counters["input"] += cached if more in (cached, cached + thought) else 0
        counters["output"] += thought if more in (thought, cached + thought) else 0
    # An agent that knows nothing prints zeros.
    return TokenCounts(**counters) if any(counters.values()) else None


_COUNTERS: Final = {
    "input": ("inputTokens", "input_tokens"),
    "output": ("outputTokens", "output_tokens"),
    "cache_read": ("cachedReadTokens",),
    "cache_write": ("cachedWriteTokens",),
    "reasoning": ("thoughtTokens",),
}
