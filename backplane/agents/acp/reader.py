"""Translates the session updates of an ACP agent to events of the contract.

Agents announce a tool call in several updates, in any order; some only ask for permission and never announce it. A call
is reported once, when its input is known, and its result once; an unknown update is kept unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Final

import msgspec

from backplane.agents.calls import OpenCall
from backplane.agents.events import exit_code, is_count, mapping, mappings, plain_command
from backplane.agents.gate import ToolRequest, command_of
from backplane.agents.gemini.record import Record
from backplane.agents.reader import EventReader as BaseReader
from backplane.agents.reader import counts_of
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import Usage
from backplane.dialects.ir import TokenCounts
from backplane.policy.paths import SPELLINGS, TOOLS
from backplane.protocol.jsonrpc import Notification

UPDATE: Final = "session/update"
NEUTRAL: Final[Mapping[str, str]] = {
    "read": "read_file", "edit": "edit_file", "delete": "edit_file", "move": "edit_file", "search": "grep",
    "execute": "bash", "fetch": "web_fetch", "think": "think", "switch_mode": "switch_mode", "other": "other",
}  # fmt: skip
"""Kind of a call in the protocol → the neutral tool name of rules, for a call without a better name."""

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
    """True if the agent gave the tool's name in a member or in the call's id; otherwise `tool` is the call's title."""
    output: Json = None
    text: str = ""
    """Latest text of the call's content."""
    reported: str = ""
    """The part of a running command's output that was reported."""
    paths: list[str] = msgspec.field(default_factory=list)
    """Files in the call's diffs."""
    places: list[str] = msgspec.field(default_factory=list)
    """Files in the call's `locations`."""
    is_said: bool = False
    """True if the call was reported."""

    def add(self, update: Mapping[str, Any]) -> None:
        """Add the input, output, text and files in an update to the call."""
        if isinstance(update.get("rawInput"), dict):
            self.input = {**mapping(self.input), **update["rawInput"]}
            if isinstance(self.input.get("command"), list):
                self.input["command"] = plain_command(self.input["command"])
        if "rawOutput" in update:
            self.output = update["rawOutput"]
        text = texts(update.get("content"))
        if text != mapping(self.input).get("description"):  # Grok sends a command's description before its output.
            self.text = text or self.text
        diffs = [block for block in mappings(update.get("content")) if block.get("type") == "diff"]
        self.paths += [block["path"] for block in diffs if isinstance(block.get("path"), str)]
        self.places += [row["path"] for row in mappings(update.get("locations")) if isinstance(row.get("path"), str)]

    def take_name(self, update: Mapping[str, Any]) -> None:
        """Read the tool's name from an update: from `_meta`, from the call's id, else from its title."""
        title, meta = update.get("title"), mapping(update.get("_meta"))
        name = next((one["toolName"] for one in (meta, *map(mapping, meta.values())) if "toolName" in one), None)
        for candidate in (name, _named_by(self.id), title if title != mapping(self.input).get("command") else None):
            if not self.is_named and isinstance(candidate, str) and _NAME.fullmatch(candidate):
                self.is_named = candidate is not title
                self.tool = candidate if self.is_named else self.tool or candidate

    def name_places(self) -> None:
        """Add every file that the call changes to its input, because rules check only the input."""
        places = [*self.paths, *self.places]
        if not self.input and places:
            self.input = {"path": places[0]}
        named = [value for value in mapping(self.input).values() if isinstance(value, str)]
        missing = [path for path in dict.fromkeys(places) if path not in named]
        if missing and self.kind in _WRITING:
            self.input = {**mapping(self.input), "changed_paths": missing}


class EventReader(BaseReader):
    """Reads the updates of a session.

    Args:
        now: returns the time of an event.
        root: the workspace's folder; paths below it are reported relative to it.
        tools: the agent's names of tools → neutral ones.
        servers: names of MCP servers, from which their tools are recognised.
        record: the agent's own record of requests and tools, if it has more than the protocol; else None.
        name_of: returns the name of a call in events.
    """

    SILENT = (
        "available_commands_update", "current_mode_update", "config_option_update", "session_info_update",
        "user_message_chunk",
    )  # fmt: skip

    def __init__(
        self,
        now: Callable[[], str],
        root: str,
        tools: Mapping[str, str],
        *,
        servers: Collection[str] = (),
        record: Record | None = None,
        name_of: Callable[[ToolRequest], str] = lambda request: request.name,
    ) -> None:
        super().__init__(now, root, tools)
        self._servers, self._record, self._name_of = servers, record, name_of
        self._calls: dict[str, AcpCall] = {}
        self._has_results = False
        """True if results of tools have come since the model's last output."""
        self.is_history = False
        """True while the agent replays an older conversation, which is no part of this run."""
        self.left_out = 0
        """Number of messages that were ignored: replayed history, and anything but a session update."""
        self._unread: list[tuple[AcpCall, bool]] = []
        """Finished calls whose output is not in the record yet, each with True if it failed."""

    def begin(self) -> None:
        """Begin another turn of the same session."""
        super().begin()
        self._has_results = False

    def read(self, message: Notification) -> list[AgentEvent]:
        """Read one notification."""
        update = message.params.get("update")
        if message.method != UPDATE or self.is_history or not isinstance(update, dict):
            self.left_out += 1
            return []
        kind = str(update.get("sessionUpdate"))
        recorded = [] if kind in self.SILENT else self.recorded()
        return [*recorded, *self._read(kind, update)]

    # The model --------------------------------------------------------------------------------------------------------

    def _words(self, update: dict[str, Any]) -> list[AgentEvent]:
        """Return the events of a piece of an answer, or of thinking."""
        usage = read_usage(mapping(update.get("_meta")).get("usage"))
        events = [] if usage is None else self.count(usage)
        text = mapping(update.get("content")).get("text")
        if not isinstance(text, str):
            return [*events, self._make.kept("part of a message that is no text", update)]
        if not text:
            return events
        events += self._turn()
        if update["sessionUpdate"] == "agent_thought_chunk":
            return [*events, *self._thoughts(text)]
        return [*events, *self._piece(text)]

    def _turn(self) -> list[AgentEvent]:
        """Return an event for the end of a model's turn, if results of tools came before this update."""
        had, self._has_results = self._has_results, False
        return [self._make.turn("tool_use")] if had else []

    def _context(self, update: dict[str, Any]) -> list[AgentEvent]:
        body = {name: update[name] for name in ("used", "size", "cost") if name in update}
        return [self._make.carried("usage", {"context": body}, "the agent reported its use of the context")]

    def _plan(self, update: dict[str, Any]) -> list[AgentEvent]:
        return [self._make.carried("task", {"plan": update.get("entries")}, "the agent reported its plan")]

    def _message(self, text: Json = None) -> list[AgentEvent]:
        """Report the message made of the pieces so far, if there is one."""
        whole = "".join(self._pieces)
        said, kept = self._record.words() if self._record is not None and whole else "", whole.rstrip()
        if not said or said == kept or not kept.endswith(said):
            return super()._message()
        # The agent silently repeated its request, so earlier text is not part of the answer.
        body: dict[str, Json] = {"reason": "asked_again", "taken_back": len(whole)}
        again = self._make.carried("retry", body, "the agent asked its model again")
        return [again, *super()._message(whole[len(kept) - len(said) :])]

    def failed_request(self, words: str, *, asks_anew: bool) -> AgentEvent:
        """Report a request that failed.

        Args:
            asks_anew: True if the agent requests the whole answer again, so that the text until now does not count.
        """
        chars = self._clear() if asks_anew else 0
        body: dict[str, Json] = {"message": words, **({"taken_back": chars} if chars else {})}
        return self._make.carried("retry", body, f"the model's service failed: {words}")

    def used(self) -> Usage:
        # Some agents send usage for each request, some for each turn, so the number of requests is unknown.
        usage = self.spent.usage()
        return usage if self._record is not None else msgspec.structs.replace(usage, request_units=None)

    # The agent's own record -------------------------------------------------------------------------------------------

    def recorded(self) -> list[AgentEvent]:
        """Report new usage and outputs from the agent's record, which it writes before its next model request."""
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

    @property
    def is_broken(self) -> bool:
        """True if the turn has text, but by the agent's record the model's answer is missing or was cut off."""
        return self._record is not None and self._record.is_broken and bool("".join(self._pieces).strip())

    # Tools ------------------------------------------------------------------------------------------------------------

    def _tool(self, update: dict[str, Any]) -> list[AgentEvent]:
        fresh = update.get("toolCallId") not in self._calls
        call, status = self._known(update), update.get("status")
        events, failed = self._turn() if fresh else [], status == "failed"
        if status in ("completed", "failed"):
            events += self._say(call)
            if self._record is not None and call.id not in self._record.outputs and call.id in self.calls.open:
                self._unread.append((call, failed))
                return events
            return [*events, *self._ended(call, failed)]
        if status == "in_progress" and call.input:
            events += self._say(call)
        return [*events, *self._progress(call)]

    def _known(self, update: dict[str, Any]) -> AcpCall:
        """Return the call with this update's id, after adding the update to it."""
        id, kind = str(update.get("toolCallId")), update.get("kind")
        call = self._calls.setdefault(id, AcpCall(id, "", "", {}))
        # A permission request may have the kind "other" for a call whose kind is known, and may add to a reported call.
        call.kind = kind if isinstance(kind, str) and kind != "other" else call.kind
        call.add(update)
        call.take_name(update)
        if command_of(call.input) is not None and not call.is_named and self._server_tool(call) is None:
            call.kind = "execute"  # A call with a command is `execute`, even if the agent reports `cat` as `read`.
        return call

    def asked(self, tool_call: dict[str, Any]) -> tuple[AcpCall, list[AgentEvent]]:
        """Return the call in a permission request, and the events to emit before it is decided."""
        known = self._calls.get(str(tool_call.get("toolCallId")))
        recorded = self.recorded()
        text = known.text if known is not None else ""
        call = self._known(tool_call)
        call.text = text  # The text of a permission request is no output of the tool.
        if not call.input and isinstance(title := tool_call.get("title"), str):
            # Without an input, the call's title and first path are its input.
            call.input = {"command" if call.kind == "execute" else "title": title}
            if places := [*call.paths, *call.places]:
                call.input["path"] = places[0]
        call.name_places()
        return call, [*recorded, *(self._turn() if known is None else []), *self._say(call)]

    def _say(self, call: AcpCall) -> list[AgentEvent]:
        """Report the call, once."""
        if call.is_said:
            return []
        call.is_said = True
        self.goes_on = self._record is not None
        call.name_places()
        call.name = self._name_of(self.request(call))
        return [*self._message(), *self._call(call)]

    def request(self, call: AcpCall) -> ToolRequest:
        """Return the call as a request of the gate."""
        neutral = self.neutral(call)
        return ToolRequest(
            id=call.id, tool=call.tool or neutral, name=call.name or neutral, input=call.input, neutral=(neutral,)
        )

    def neutral(self, call: AcpCall) -> str:
        """Return the name that rules and hooks use for a call; the kind decides, the title only within the kind."""
        own = call.tool
        known = self._server_tool(call) or self._tools.get(own) or SPELLINGS.get(own, own if own in TOOLS else None)
        of_kind = _OF_KIND.get(call.kind)
        if of_kind is None or (known is not None and (call.is_named or known in of_kind or known.startswith("mcp__"))):
            return known or own or NEUTRAL.get(call.kind, "other")
        return NEUTRAL[call.kind]

    def _server_tool(self, call: AcpCall) -> str | None:
        """Return `mcp__SERVER__TOOL` for the tool of an MCP server, however the agent joins the two names."""
        for server in self._servers:
            for beginning in (f"mcp__{server}__", f"mcp_{server}_", f"{server}_", f"{server}."):
                if call.tool.startswith(beginning):
                    return f"mcp__{server}__{call.tool.removeprefix(beginning)}"
        return None

    def _progress(self, call: AcpCall) -> list[AgentEvent]:
        """Report the new output of a running command."""
        if call.kind != "execute" or not call.is_said or not call.text.startswith(call.reported):
            return []
        news, call.reported = call.text[len(call.reported) :], call.text
        return self.calls.output(news)

    def _ended(self, call: AcpCall, failed: bool) -> list[AgentEvent]:
        """Return the events that end a call, with its output from the agent's record if that has it."""
        said = self._record.outputs.pop(call.id, None) if self._record is not None else None
        if said is not None:
            call.output = {"output": said.text, "exitCode": said.exit_code}
        text, paths = texts_of(call), []
        if call.kind in _WRITING and not failed:
            paths = call.paths or call.places or _paths(call.input)
        ran = (exit_code_of(call.output), text) if call.kind == "execute" else None
        changes = [(path, f"{call.name} by the agent") for path in dict.fromkeys(paths)]
        return self._result(self.calls.end(call.id, text or call.output, failed=failed, ran=ran, changes=changes))

    def refuse(self, call: AcpCall, reason: str) -> list[AgentEvent]:
        """Report the result of a call that was not allowed."""
        return self._result(self.calls.end(call.id, f"policy_denied: {reason}", failed=True))

    def _result(self, ended: list[AgentEvent]) -> list[AgentEvent]:
        if ended:
            self._has_results, self.spoke = True, False
        return ended

    # Ends -------------------------------------------------------------------------------------------------------------

    def end(self, stop_reason: str) -> list[AgentEvent]:
        """Return the events that end the turn; a call that is still open gets its result.

        Some agents never report the end of a tool whose result the model has used in its answer.
        """
        recorded, self.goes_on = self.recorded(), False
        return [*recorded, *self.close(), self._make.turn(stop_reason)]

    def close(self) -> list[AgentEvent]:
        """Report the unfinished message, and results of open calls."""
        events, spoke = self.recorded(), self.spoke
        events += self._message()
        self.spoke = spoke  # False if a result came after this text.
        if self.goes_on:  # A turn that was cut off after its calls counts as a whole turn.
            self.goes_on = False
            events.append(self._make.turn("tool_use"))
        return [*events, *self.calls.close()]

    READS: ClassVar = {
        "agent_message_chunk": _words,
        "agent_thought_chunk": _words,
        "tool_call": _tool,
        "tool_call_update": _tool,
        "usage_update": _context,
        "plan": _plan,
    }


def _named_by(id: str) -> str | None:
    """Return the tool's name in a call's id, `NAME__call_…` or `NAME__NAME_…`; None if the id has none."""
    name, _, rest = id.partition("__")
    return name if rest.startswith(("call_", f"{name}_")) else None


def texts(content: Json) -> str:
    """Return the text in a call's content blocks."""
    parts = [mapping(block.get("content")).get("text") for block in mappings(content)]
    return "".join(part for part in parts if isinstance(part, str))


def texts_of(call: AcpCall) -> str:
    for name in ("output", "aggregated_output", "formatted_output", "error", "text"):
        text = mapping(call.output).get(name)
        if isinstance(text, str) and text:
            return text
    return call.output if isinstance(call.output, str) and call.output else call.text


def exit_code_of(output: Json) -> int | None:
    """Return a command's exit code from any of the members that agents use; None if there is none."""
    places = (mapping(output), mapping(mapping(output).get("metadata")))
    codes = (exit_code(place.get(name)) for place in places for name in ("exit", "exit_code", "exitCode"))
    return next((code for code in codes if code is not None), None)


def _paths(tool_input: Json) -> list[str]:
    return [value for name in _PATH_NAMES if isinstance(value := mapping(tool_input).get(name), str)][:1]


def read_usage(usage: Json) -> TokenCounts | None:
    """Read an agent's token counters; return None if they are missing or all zero.

    Some agents include cached tokens and thinking in input and output, others do not: the total shows which.
    """
    told = {_SNAKE.get(name, name): count for name, count in mapping(usage).items()}
    counts, total = counts_of([told], _COUNTERS), told.get("totalTokens", "")
    input, output, thought = counts.input, counts.output, counts.reasoning or 0
    cached = (counts.cache_read or 0) + (counts.cache_write or 0)
    if is_count(total) and input is not None and output is not None:
        more = total - input - output
        input += cached if more in (cached, cached + thought) else 0
        output += thought if more in (thought, cached + thought) else 0
    # An agent that does not know its usage sends zeros.
    is_known = any((input, output, cached, thought))
    return msgspec.structs.replace(counts, input=input, output=output) if is_known else None


_SNAKE: Final = {"input_tokens": "inputTokens", "output_tokens": "outputTokens"}
_COUNTERS: Final = {
    "input": ("inputTokens",), "output": ("outputTokens",), "cache_read": ("cachedReadTokens",),
    "cache_write": ("cachedWriteTokens",), "reasoning": ("thoughtTokens",),
}  # fmt: skip
