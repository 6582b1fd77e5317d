"""Records the calls of a run, each with the question about it and the answer. Pure.

Asks, answers and events go in; the calls that ran without an answer, or against it, come out. An answer counts for
one call: the one that its ask names by `tool_use_id`, else one of the same tool with the same input. Of ids, inputs,
commands and paths only hashes are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from hashlib import blake2b
from typing import Final, Literal

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.policy.paths import TOOLS
from backplane.policy.rules import TOOL_NAME_CHARS_MAX, tool_names

CALLS_MAX: Final = 10_000
"""Maximum number of open calls and asks, under a kilobyte each; agents have some dozens. Further calls count as not
asked about."""

ENDED_MAX: Final = 1000
"""Number of calls kept after their result, for further pieces of it and for commands that are reported later."""

FILES_MAX: Final = 10_000
"""Maximum number of files kept for all calls, of denied and of allowed changes; agents change some dozens in a run.
Calls beyond that count as not asked about."""

PARTS_MAX: Final = 16
"""Maximum number of members of an input that are compared one by one; tools have some five."""

OPAQUE_MAX: Final = 8
"""Maximum number of tool names in a receipt's gap."""

BREACHES_MAX: Final = 100
"""Maximum number of listed calls that were made against their answer; all are counted."""

PATCH_TOOL: Final = "apply_patch"
"""Tool of an ask about a patch."""

Answered = Literal["", "open", "allow", "deny"]
"""The answer to the question about a call: empty without a question, `open` until it is answered."""

Key = tuple[str, bytes | str | tuple[str, bytes]]
"""A key of a call: `id`, `tool`, `input` (with the tool), `command` or `patch` (one of its paths). `not input` and `not
command` find a call by the input that an answer has replaced."""

_FIRST_DONE: Final[tuple[Answered, ...]] = ("allow", "", "open", "deny")
"""Order in which calls are chosen for a successful result without an id: allowed calls first."""

_FIRST_FAILED: Final[tuple[Answered, ...]] = ("deny", "open", "", "allow")


class CallRecord(msgspec.Struct, eq=False, kw_only=True):
    """One call, or one question about a call that the host has not reported yet."""

    tool: str
    id: bytes | None = None
    reported: bytes | None = None
    """Hash of its input in the event `tool_call`; None before the event."""
    reported_parts: frozenset[bytes] = frozenset()
    """Hashes of the members of its input in the event."""
    may: bytes | None = None
    """Hash of the input with which it may run: that of the ask, or of the answer that changed it; None if unknown."""
    may_parts: frozenset[bytes] = frozenset()
    """Hashes of the members of the input with which it may run."""
    is_changed: bool = False
    """True if an answer changed its input."""
    asked_as: str = ""
    """Tool that the ask named; empty without an ask."""
    shown_as: str = ""
    """Tool that the answered ask about its result named; empty if there is none."""
    answer: Answered = ""
    by_id: bool = False
    """True if the ask named the call by its id."""
    files: tuple[bytes, ...] = ()
    """Hashes of the paths that it would change, relative to the root."""
    began_at: int = 0
    """Number of its first message among all messages about calls. The next four count alike; 0 until they come."""
    reported_at: int = 0
    asked_at: int = 0
    answered_at: int = 0
    ended_at: int = 0
    done: bool = False
    """True if it was carried out: its result is no error, its command ran, or its file changed."""
    failed: bool = False
    """True if the result with its id is an error."""
    ran: bool = False
    """True if the host has reported its command."""
    ignores_change: bool = False
    """True if an answer changed the input, and the host reported the call with another one."""
    keys: list[Key] = []

    @property
    def is_allowed(self) -> bool:
        """Return whether the call was allowed, and the ask named the call's tool."""
        if self.answer != "allow" or not self.asked_as:
            return self.answer == "allow"
        return self.tool == neutral(self.asked_as) or (
            self.asked_as == PATCH_TOOL and self.tool in TOOLS and TOOLS[self.tool].writes
        )


class CallBook:
    """Records all calls of one run."""

    def __init__(self) -> None:
        self.asked = self.allowed = self.denied = self.denied_then_done = self.modified = 0
        self._breaches: list[tuple[CallRecord, str]] = []
        self.unasked_tools: set[str] = set()
        """Tools that ran without a question before."""
        self.is_full = False
        """True if there were more calls or files than can be kept."""
        self.unasked = 0
        """Number of ended calls, commands and results without an earlier question."""
        self._opaque: dict[str, None] = {}
        self._calls: dict[Key, list[CallRecord]] = {}
        self._live: dict[int, CallRecord] = {}
        self._ended: deque[CallRecord] = deque()
        self._asks: dict[str, tuple[CallRecord, bool]] = {}
        """Id of an open ask → its call, and True if the ask is about the call's result."""
        self._files = 0
        """Number of files of all kept calls."""
        self._denied_files: dict[bytes, CallRecord] = {}
        self._allowed_files: set[bytes] = set()
        self._now = 0

    # Asks -------------------------------------------------------------------------------------------------------------

    def ask(self, ask_id: str, name: str, input: Json, *, id: str | None = None, files: Collection[str] = ()) -> None:
        """Note a question about a tool's call."""
        tool, wanted, parts = neutral(name), _hash(input), _parts(input)
        call = self._to_ask(tool, wanted, parts, id) or self._begin(tool, id)
        self._open(ask_id, call, name, self._hashes(files), by_id=id is not None)
        call.may, call.may_parts, call.is_changed = wanted, parts, False
        self._index(call, ("input", (tool, wanted)), *_commands(input))

    def ask_patch(self, ask_id: str, files: Collection[str], *, id: str | None = None) -> None:
        """Note a question about a patch, which is also about a call that changes no other files."""
        hashes = self._hashes(files)
        named = self._open_at(("id", _hash(id))) if id is not None else []
        changing = [one for path in hashes for one in self._open_at(("patch", path)) if {*one.files} <= {*hashes}]
        found = [*named[:1], *(one for one in changing if not one.answer)]
        call = found[0] if found else self._begin(PATCH_TOOL, id)
        self._open(ask_id, call, PATCH_TOOL, hashes, by_id=id is not None)
        self._index(call, *(("patch", path) for path in call.files))

    def ask_result(self, ask_id: str, name: str, input: Json, *, id: str | None = None) -> None:
        """Note a question about a call's result."""
        tool = neutral(name)
        named = self._open_at(("id", _hash(id))) if id is not None else []
        same = [] if id is not None else self._at(("input", (tool, _hash(input))))
        found = [*named, *(one for one in (*same, *self._open_at(("tool", tool))) if not one.shown_as)]
        if found:
            self._asks[ask_id] = (found[0], True)

    def answer(self, ask_id: str, name: str, decision: str, input: Json | msgspec.UnsetType = msgspec.UNSET) -> None:
        """Note an answer.

        Args:
            name: name of the ask's tool.
            input: the new input or output, with `modify`.
        """
        call, is_about_result = self._asks.pop(ask_id, (None, False))
        if call is None:
            return
        if is_about_result:
            call.shown_as = name if decision != "deny" else ""
            return
        call.answered_at = self._tick()
        if decision == "deny":
            self._deny(call)
            return
        self.allowed += 1
        call.answer = "allow"
        self._allowed_files.update(call.files[: FILES_MAX - len(self._allowed_files)])
        if decision == "modify" and input is not msgspec.UNSET:
            self._change(call, input)

    def _deny(self, call: CallRecord) -> None:
        self.denied += 1
        call.answer = "deny"
        self._denied_files.update(dict.fromkeys(call.files[: FILES_MAX - len(self._denied_files)], call))
        # If an allowed call did not run and the agent asks again for the same, the new answer replaces the old one.
        for other in self._at(("input", (call.tool, call.may or b""))):
            is_older = other is not call and other.reported is None and not other.by_id
            if is_older and other.answer == "allow" and other.answered_at < call.asked_at:
                other.answer = "deny"

    def _change(self, call: CallRecord, input: Json) -> None:
        """Set another input for the call, with which it must run."""
        self.modified += 1
        was = [key for key in call.keys if key[0] == "command" or (key[0] == "input" and call.reported is None)]
        self._unindex(call, was)
        self._index(call, *((f"not {kind}", value) for kind, value in was))
        wanted = _hash(input)
        call.is_changed = call.is_changed or call.may != wanted
        call.may, call.may_parts = wanted, _parts(input)
        self._index(call, ("input", (call.tool, wanted)), *_commands(input))

    def _open(self, ask_id: str, call: CallRecord, name: str, files: tuple[bytes, ...], *, by_id: bool) -> None:
        self.asked += 1
        call.asked_at, call.by_id = self._tick(), by_id
        call.answer, call.asked_as = "open", name[: TOOL_NAME_CHARS_MAX + 1]
        self._asks[ask_id] = (call, False)
        self._set_files(call, files)

    def _to_ask(self, tool: str, wanted: bytes, parts: frozenset[bytes], id: str | None) -> CallRecord | None:
        """Return the call that a question is about; None if the host has not reported it yet."""
        if id is not None:
            named = self._open_at(("id", _hash(id)))
            # The input of an ask may have more members than the reported one, such as defaults of the tool.
            found = [one for one in named if one.may == wanted or (one.reported and one.reported_parts <= parts)]
            return found[0] if found else None
        found = [one for one in self._open_at(("input", (tool, wanted))) if one.reported == wanted]
        # Of several equal calls, the latest without an answer, else the latest denied one, as agents ask again.
        return next((one for answer in ("", "deny") for one in reversed(found) if one.answer == answer), None)

    # Reports ----------------------------------------------------------------------------------------------------------

    def called(self, name: str, input: Json, id: str | None, files: Collection[str] = ()) -> CallRecord:
        """Note a call that the host reports, and return its record."""
        tool, wanted, parts, hashes = neutral(name), _hash(input), _parts(input), self._hashes(files)
        named = self._at(("id", _hash(id))) if id is not None else []
        again = [one for one in named if one.reported == wanted and not one.ended_at]
        if again:
            return again[0]
        call = self._asked_for(tool, wanted, parts, id, hashes) or self._begin(tool, id)
        call.reported, call.reported_parts, call.reported_at = wanted, parts, self._tick()
        if not call.answer:
            self._set_files(call, hashes)
            self._index(call, *_commands(input), *(("patch", path) for path in call.files))
            # An answer changed the input of a call with this id or this old input.
            others = [one for one in (*self._at(("not input", (tool, wanted))), *named) if one.reported is None]
            call.ignores_change = any(one.answer == "allow" and one.is_changed for one in others)
        self._index(call, ("input", (tool, wanted)), ("tool", tool), *_id_key(id))
        return call

    def _asked_for(
        self, tool: str, wanted: bytes, parts: frozenset[bytes], id: str | None, files: tuple[bytes, ...]
    ) -> CallRecord | None:
        """Return the call that was asked about before the host reported it; None if there is none."""
        key = _hash(id) if id is not None else None
        named = self._open_at(("id", key)) if key is not None else []
        patches = [one for path in files for one in self._open_at(("patch", path)) if {*files} <= {*one.files}]
        for found in (
            [one for one in named if one.may is None or parts <= one.may_parts],
            [one for one in self._open_at(("input", (tool, wanted))) if one.may == wanted],
            [one for one in patches if one.may is None],
        ):
            loose = [one for one in found if one.reported is None]
            # The call may have an id and its ask none, or the reverse.
            best = [one for one in loose if key is None or one.id == key] or [one for one in loose if one.id is None]
            if best:
                return min(best, key=lambda one: _FIRST_DONE.index(one.answer))
        return None

    def ended(self, name: str, id: str | None, *, is_error: bool) -> CallRecord | None:
        """Note a result, and return its call; None if no call fits."""
        tool = neutral(name)
        call = self._of_result(tool, id, is_error=is_error)
        if call is None:
            self.unasked += 1
            self._use(tool)
            if not is_error:
                self._note_tool(tool)
            return None
        if not is_error and not call.done:
            self._do(call)
        call.failed = call.failed or (is_error and id is not None and not call.done)
        if not call.ended_at:
            self._end(call)
        return call

    def _of_result(self, tool: str, id: str | None, *, is_error: bool) -> CallRecord | None:
        named = self._at(("id", _hash(id))) if id is not None else []
        found = [one for one in named if not one.ended_at] or named[-1:]
        found = found or [one for one in self._open_at(("tool", tool)) if id is None or one.id is None]
        order = _FIRST_FAILED if is_error else _FIRST_DONE
        return min(found, key=lambda one: (one.reported is None, order.index(one.answer)), default=None)

    def _do(self, call: CallRecord) -> None:
        """Note that a call was carried out."""
        call.done = True
        if call.answer != "allow":
            self._trade(call)
        if call.answer == "deny":
            self.denied_then_done += 1
            self._breach(call, f"tool {call.tool!r} was used although that call was denied")
        elif call.answer == "open":
            self._breach(call, f"tool {call.tool!r} was used before its question was answered")
        elif not call.answer:
            self._note_tool(call.tool)
            if call.ignores_change:
                self._breach(call, _ignored(call))

    def _trade(self, call: CallRecord) -> None:
        """Swap the answers of two equal calls that are open at once, because asks without ids may mean either."""
        for other in self._at(("input", (call.tool, call.reported or b""))):
            is_twin = other is not call and not (other.by_id or call.by_id or other.done or other.is_changed)
            both_reported = other.reported_at and call.reported_at
            was_open = both_reported and (not other.ended_at or other.ended_at > call.reported_at)
            if is_twin and was_open and other.answer == "allow":
                call.answer, other.answer = other.answer, call.answer
                call.asked_as, other.asked_as = other.asked_as, call.asked_as
                call.may, call.is_changed = call.reported, False
                self.unasked += bool(other.ended_at and not other.answer)
                return

    def ran(self, command: str) -> CallRecord | None:
        """Note a command that the host reports, and return its call; None if no call has it."""
        key = _hash(command)
        found = [one for one in self._at(("command", key)) if not one.ran]
        call = min(found, key=lambda one: _FIRST_DONE.index(one.answer), default=None)
        if call is None:
            self.unasked += 1
            self._use("bash")
            for ignored in self._at(("not command", key)):
                if ignored.answer == "allow" and not ignored.ran:
                    ignored.ran = True
                    self._breach(ignored, _ignored(ignored))
                    break
            return None
        call.ran = True
        if call.answer != "allow" and not call.done:
            self._do(call)
        return call

    def changed(self, files: Collection[str]) -> None:
        """Note the changed files; a denied change that no other call can have made is a breach.

        Args:
            files: relative to the root.
        """
        if not self._denied_files or self.opaque():
            return
        for path in sorted(files):
            key = _hash(path)
            call = self._denied_files.get(key)
            if call is not None and key not in self._allowed_files and not call.done:
                call.done = True
                self.denied_then_done += 1
                self._breach(call, f"{path!r:.200} was changed although that was denied")

    def _breach(self, call: CallRecord, reason: str) -> None:
        if len(self._breaches) < BREACHES_MAX:
            self._breaches.append((call, reason))

    # Findings ---------------------------------------------------------------------------------------------------------

    def to_wire(self) -> dict[str, Json]:
        """Return the numbers for the receipt."""
        names = ("asked", "allowed", "denied", "denied_then_done")
        return {name: getattr(self, name) for name in names}

    def breaches(self) -> list[tuple[CallRecord, str]]:
        """Return the first `BREACHES_MAX` calls that were made against their answer, each with the reason."""
        left = [one for one in self._live.values() if one.ignores_change and not one.answer and not one.done]
        return [*self._breaches, *((one, _ignored(one)) for one in left)][:BREACHES_MAX]

    def has_unasked(self) -> bool:
        """Return True if a call or a command ran without an earlier question."""
        return bool(self.unasked) or any(one.reported is not None and not one.answer for one in self._live.values())

    def opaque(self) -> list[str]:
        """Return the names of used tools whose inputs do not name each place that they read, write or connect to."""
        live = (one.tool for one in self._live.values() if one.answer in ("", "allow") and not _is_whole(one.tool))
        return list(dict.fromkeys([*self._opaque, *live]))[:OPAQUE_MAX]

    def _use(self, tool: str) -> None:
        if not _is_whole(tool) and len(self._opaque) < OPAQUE_MAX:
            self._opaque[tool] = None

    def _note_tool(self, tool: str) -> None:
        if len(self.unasked_tools) < CALLS_MAX:
            self.unasked_tools.add(tool)

    # Keeping ----------------------------------------------------------------------------------------------------------

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def _begin(self, tool: str, id: str | None) -> CallRecord:
        call = CallRecord(tool=tool, id=_hash(id) if id is not None else None, began_at=self._tick())
        if len(self._live) >= CALLS_MAX:
            self.is_full = True
            return call
        self._live[call.began_at] = call
        self._index(call, ("tool", tool), *_id_key(id))
        return call

    def _end(self, call: CallRecord) -> None:
        call.ended_at = self._tick()
        self._live.pop(call.began_at, None)
        if call.answer in ("", "allow") or call.done:
            self._use(call.tool)
        if not call.answer:
            self.unasked += 1
        self._ended.append(call)
        while len(self._ended) > ENDED_MAX:
            old = self._ended.popleft()
            self._files -= len(old.files)
            self._unindex(old, list(old.keys))

    def _hashes(self, files: Collection[str]) -> tuple[bytes, ...]:
        """Return hashes of these paths; if there are too many to keep, return none and set `is_full`."""
        if self._files + len(files) > FILES_MAX:
            self.is_full = True
            return ()
        return tuple(map(_hash, files))

    def _set_files(self, call: CallRecord, files: tuple[bytes, ...]) -> None:
        self._files += len(files) - len(call.files)
        call.files = files

    def _at(self, key: Key) -> list[CallRecord]:
        """Return the kept calls with this key, the oldest first."""
        return self._calls.get(key, [])

    def _open_at(self, key: Key) -> list[CallRecord]:
        return [one for one in self._at(key) if not one.ended_at]

    def _index(self, call: CallRecord, *keys: Key) -> None:
        if self.is_full and call.began_at not in self._live:
            return
        for key in keys:
            if key not in call.keys:
                call.keys.append(key)
                self._calls.setdefault(key, []).append(call)

    def _unindex(self, call: CallRecord, keys: Iterable[Key]) -> None:
        for key in keys:
            call.keys.remove(key)
            self._calls[key].remove(call)
            if not self._calls[key]:
                del self._calls[key]


def neutral(name: str) -> str:
    """Return a tool's neutral name if it has one, else the part of its own name that policies compare."""
    return next((one for one in tool_names(name) if one in TOOLS), name[: TOOL_NAME_CHARS_MAX + 1])


def _is_whole(tool: str) -> bool:
    """Return whether a call of this tool names each place that it reads, writes or connects to."""
    return tool in TOOLS and TOOLS[tool].names_place


def _ignored(call: CallRecord) -> str:
    return f"tool {call.tool!r} was used with another input than the changed one"


def _hash(value: Json) -> bytes:
    return blake2b(canonical.encode(value), digest_size=16).digest()


def _id_key(id: str | None) -> list[Key]:
    return [("id", _hash(id))] if id is not None else []


def _parts(input: Json) -> frozenset[bytes]:
    """Return hashes of an input's members, or of the whole input if it is no object, or has no or too many members."""
    if not isinstance(input, dict) or not 0 < len(input) <= PARTS_MAX:
        return frozenset((_hash(input),))
    return frozenset(_hash([name, value]) for name, value in input.items())


def _commands(input: Json) -> Iterator[Key]:
    """Yield the command in a tool's input, if there is one."""
    command = input.get("command") if isinstance(input, dict) else None
    if isinstance(command, str):
        yield ("command", _hash(command))
