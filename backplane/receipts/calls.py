"""The calls of a run, each with the question that was asked about it and its answer. Pure.

Asks, answers and events go in; which calls were done without an answer, or against one, comes out. An answer counts for
one call: the one that its ask names by `tool_use_id`, else one of the same tool with the same input. Of ids, inputs,
commands and paths only hashes are kept.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterator
from hashlib import blake2b
from typing import Any, Final, Literal

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.policy.paths import TOOLS
from backplane.policy.rules import TOOL_NAME_CHARS_MAX, tool_names

CALLS_MAX: Final = 10_000
"""Calls and asks that are open at once, under a kilobyte each; agents have some dozens. Beyond that no call counts
as asked about."""

ENDED_MAX: Final = 1000
"""Calls kept after their result, for a result in pieces and for what the host says of their command afterwards."""

FILES_MAX: Final = 10_000
"""Files kept of all calls together, of denied and of allowed changes; agents change some dozens in a run. Beyond that
no call counts as asked about."""

PARTS_MAX: Final = 16
"""Members of an input that are compared one by one; tools have some five."""

OPAQUE_MAX: Final = 8
"""Names of tools that are listed in a receipt's gap."""

BREACHES_MAX: Final = 100
"""Calls listed that were done against their answer; all are counted."""

PATCH_TOOL: Final = "apply_patch"
"""The tool that stands for an ask about a patch."""

Answered = Literal["", "open", "allow", "deny"]
"""The answer to the question about a call: empty where there was no question, `open` until it is answered."""

Key = tuple[str, ...] | tuple[str, bytes] | tuple[str, str, bytes]

IGNORED: Final = "tool {!r} was used with another input than the changed one"

_FIRST_DONE: Final[tuple[Answered, ...]] = ("allow", "", "open", "deny")
"""Order in which a successful result without an id is given to one of several calls: an allowed one first."""

_FIRST_FAILED: Final[tuple[Answered, ...]] = ("deny", "open", "", "allow")


class CallRecord(msgspec.Struct, eq=False, kw_only=True):
    """One call, or one question about a call that the host has not reported yet."""

    tool: str
    id: bytes | None = None
    reported: bytes | None = None
    """Hash of its input in the event `tool_call`; None before that."""
    asked: bytes | None = None
    """Hash of the input that was asked about."""
    allowed_input: bytes | None = None
    """Hash of the input that it may run with; after `modify` not the same as `asked`."""
    asked_as: str = ""
    """Tool that the ask named."""
    shown_as: str = ""
    """Tool that the answered ask about its result named; empty if there is none."""
    reported_parts: frozenset[bytes] = frozenset()
    """Hashes of the members of its input in the event."""
    allowed_parts: frozenset[bytes] = frozenset()
    """Hashes of the members of the input that it may run with."""
    answer: Answered = ""
    by_id: bool = False
    """The ask named the call by its id."""
    files: tuple[bytes, ...] = ()
    """Hashes of the paths that it would change, relative to the root."""
    began_at: int = 0
    """Number of its first message among all messages about calls. The next four count alike; 0 until they come."""
    reported_at: int = 0
    asked_at: int = 0
    answered_at: int = 0
    ended_at: int = 0
    done: bool = False
    """It was carried out: its result is no error, its command was run or its file changed."""
    failed: bool = False
    """Its result, which named it by its id, was an error."""
    ran: bool = False
    """The host has reported its command."""
    ignores_change: bool = False
    """An answer changed its input, and it came with another one."""
    keys: list[Any] = []

    @property
    def is_changed(self) -> bool:
        return self.allowed_input is not None and self.allowed_input != self.asked

    @property
    def is_allowed(self) -> bool:
        """Return whether an ask named this tool, and was allowed."""
        return self.answer == "allow" and (not self.asked_as or _alike(self.tool, self.asked_as))


class CallBook:
    """All calls of one run."""

    def __init__(self) -> None:
        self.asked = self.allowed = self.denied = self.denied_then_done = self.modified = 0
        self._breaches: list[tuple[CallRecord, str]] = []
        self.unasked_tools: set[str] = set()
        """Tools of which a call was carried out without a question before it."""
        self.is_full = False
        """There were more calls than can be kept."""
        self.unasked = 0
        """Number of ended calls, commands and results without a question before them."""
        self._opaque: dict[str, None] = {}
        self._calls: dict[Key, dict[int, CallRecord]] = {}
        self._live: dict[int, CallRecord] = {}
        self._ended: deque[CallRecord] = deque()
        self._asks: dict[str, tuple[CallRecord, bool]] = {}
        """Ask that is open → its call, and whether it is about the call's result."""
        self._files = 0
        """Number of files of the calls that are kept."""
        self._denied_files: dict[bytes, CallRecord] = {}
        self._allowed_files: set[bytes] = set()
        self._now = 0

    # Asks -------------------------------------------------------------------------------------------------------------

    def ask(self, ask_id: str, name: str, input: Json, *, id: str | None = None, files: Collection[str] = ()) -> None:
        """Note a question about a tool's call."""
        tool, wanted = neutral(name), _hash(input)
        call = self._to_ask(tool, wanted, _parts(input), _id(id)) or self._begin(tool, _id(id))
        self._open(ask_id, call, name, by_id=id is not None)
        call.asked = call.allowed_input = wanted
        call.allowed_parts = _parts(input)
        self._set_files(call, self._hashes(files))
        self._index(call, ("input", tool, wanted), *_commands(input))

    def ask_patch(self, ask_id: str, files: Collection[str], *, id: str | None = None) -> None:
        """Note a question about a patch: it settles a call that changes no other files."""
        hashes = self._hashes(files)
        call = self._named(_id(id)) or self._changing(hashes) or self._begin(PATCH_TOOL, _id(id))
        self._open(ask_id, call, PATCH_TOOL, by_id=id is not None)
        self._set_files(call, hashes)
        self._index(call, *(("patch", path) for path in call.files))

    def ask_result(self, ask_id: str, name: str, input: Json, *, id: str | None = None) -> None:
        """Note a question about a call's result."""
        tool = neutral(name)
        same = self._at(("input", tool, _hash(input)))
        found = self._named(_id(id)) if id is not None else next((one for one in same if not one.shown_as), None)
        call = found or next((one for one in self._at(("tool", tool)) if not one.shown_as and not one.ended_at), None)
        if call is not None:
            self._asks[ask_id] = (call, True)

    def answer(self, ask_id: str, name: str, decision: str, input: Json | msgspec.UnsetType = msgspec.UNSET) -> None:
        """Note an answer.

        Args:
            name: of the ask's tool.
            input: what is to be used instead, with `modify`.
        """
        call, is_about_result = self._asks.pop(ask_id, (None, False))
        if call is None:
            return
        if is_about_result:
            call.shown_as = name if decision != "deny" else ""
            return
        self._now += 1
        call.answered_at = self._now
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
        for path in call.files[: FILES_MAX - len(self._denied_files)]:
            self._denied_files[path] = call
        # An allowed call that was not done loses its answer when the same is asked again.
        for other in self._at(("input", call.tool, call.allowed_input or b"")):
            is_older = other is not call and other.reported is None and not other.by_id
            if is_older and other.answer == "allow" and other.answered_at < call.asked_at:
                other.answer = "deny"

    def _change(self, call: CallRecord, input: Json) -> None:
        """Set another input for the call, and remember its own as one that it must not run with."""
        self.modified += 1
        was = [key for key in call.keys if key[0] == "command" or (key[0] == "input" and call.reported is None)]
        self._unindex(call, was)
        self._index(call, *(("no " + str(key[0]), *key[1:]) for key in was))
        call.allowed_input, call.allowed_parts = _hash(input), _parts(input)
        self._index(call, ("input", call.tool, call.allowed_input), *_commands(input))

    def _open(self, ask_id: str, call: CallRecord, name: str, *, by_id: bool) -> None:
        self.asked += 1
        self._now += 1
        call.asked_at, call.by_id = self._now, by_id
        call.answer, call.asked_as = "open", name[: TOOL_NAME_CHARS_MAX + 1]
        self._asks[ask_id] = (call, False)

    def _to_ask(self, tool: str, wanted: bytes, parts: frozenset[bytes], id: bytes | None) -> CallRecord | None:
        """Return the call that a question is about, if the host has reported it already."""
        if id is not None:
            named = [one for one in self._at(("id", id)) if _is_open(one)]
            # An agent may ask about more than it has reported: about defaults of its tool, say.
            return next(
                (one for one in named if one.allowed_input == wanted or (one.reported and one.reported_parts <= parts)),
                None,
            )
        found = [one for one in self._at(("input", tool, wanted)) if _is_open(one) and one.reported == wanted]
        # The latest of several equal calls without an answer, else the latest denied one: agents ask again.
        return next((one for answer in ("", "deny") for one in reversed(found) if one.answer == answer), None)

    def _changing(self, files: tuple[bytes, ...]) -> CallRecord | None:
        """Return an open call that changes only files among these."""
        known = (one for path in files for one in self._at(("patch", path)))
        return next((one for one in known if _is_open(one) and not one.answer and {*one.files} <= {*files}), None)

    # What is reported -------------------------------------------------------------------------------------------------

    def called(self, name: str, input: Json, id: str | None, files: Collection[str] = ()) -> CallRecord:
        """Note a call that the host reports, and return it with what was asked about it."""
        tool, wanted, parts, known = neutral(name), _hash(input), _parts(input), _id(id)
        again = [one for one in self._at(("id", known or b"")) if _is_open(one) and one.reported == wanted]
        if again:
            return again[0]
        hashes = self._hashes(files)
        call = self._asked_for(tool, wanted, parts, known, hashes) or self._begin(tool, known)
        self._now += 1
        call.reported, call.reported_parts, call.reported_at = wanted, parts, self._now
        if not call.answer:
            self._set_files(call, hashes)
            self._index(call, *_commands(input), *(("patch", path) for path in call.files))
            self._note_ignored(call, wanted, known)
        keys: list[Key] = [("input", tool, wanted), ("tool", tool)]
        self._index(call, *keys, *([("id", known)] if known is not None else []))
        return call

    def _asked_for(
        self, tool: str, wanted: bytes, parts: frozenset[bytes], id: bytes | None, files: tuple[bytes, ...]
    ) -> CallRecord | None:
        """Return the call that was asked about before the host reported it."""
        asked = [one for one in self._at(("id", id or b"")) if one.allowed_input is None or parts <= one.allowed_parts]
        same = [one for one in self._at(("input", tool, wanted)) if one.allowed_input == wanted]
        patches = [one for path in files for one in self._at(("patch", path)) if {*files} <= {*one.files}]
        for found in (asked, same, [one for one in patches if one.allowed_input is None]):
            loose = [one for one in found if one.reported is None and not one.ended_at and id in (one.id, None)]
            # A call may have an id although its ask had none.
            loose += [one for one in found if one.reported is None and not one.ended_at and one.id is None and id]
            if loose:
                return min(loose, key=lambda one: _FIRST_DONE.index(one.answer))
        return None

    def _note_ignored(self, call: CallRecord, wanted: bytes, id: bytes | None) -> None:
        """Note a call whose input is not the one that its question, found by its id, or a `modify` allowed."""
        changed = [one for one in self._at(("no input", call.tool, wanted)) if one.reported is None]
        named = [one for one in self._at(("id", id or b"")) if one.reported is None and one is not call]
        call.ignores_change = any(one.answer == "allow" and one.is_changed for one in (*changed, *named))

    def ended(self, name: str, id: str | None, *, is_error: bool) -> CallRecord | None:
        """Note a result, and return the call that it is of; None where there is none."""
        call = self._of_result(neutral(name), _id(id), is_error=is_error)
        if call is None:
            self._note_unasked(name, is_error=is_error)
            return None
        if not is_error and not call.done:
            self._do(call)
        call.failed = call.failed or (is_error and id is not None and not call.done)
        if not call.ended_at:
            self._end(call)
        return call

    def _note_unasked(self, name: str, *, is_error: bool) -> None:
        self.unasked += 1
        self._use(neutral(name))
        if not is_error:
            self._note_tool(neutral(name))

    def _note_tool(self, tool: str) -> None:
        if len(self.unasked_tools) < CALLS_MAX:
            self.unasked_tools.add(tool)

    def _of_result(self, tool: str, id: bytes | None, *, is_error: bool) -> CallRecord | None:
        if id is not None:
            named = self._at(("id", id))
            found = [one for one in named if not one.ended_at] or named[-1:]
        else:
            found = []
        found = found or [
            one for one in self._at(("tool", tool)) if not one.ended_at and (id is None or one.id is None)
        ]
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
                self._breach(call, IGNORED.format(call.tool))

    def _trade(self, call: CallRecord) -> None:
        """Swap the answers of two equal calls open at once: asks without ids do not say which one they mean."""
        for other in self._at(("input", call.tool, call.reported or b"")):
            is_twin = other is not call and not (other.by_id or call.by_id or other.done or other.is_changed)
            was_open = (
                other.reported_at and call.reported_at and (not other.ended_at or other.ended_at > call.reported_at)
            )
            if is_twin and was_open and other.answer == "allow":
                call.answer, other.answer = other.answer, call.answer
                call.asked_as, other.asked_as = other.asked_as, call.asked_as
                call.allowed_input = call.asked = call.reported
                self.unasked += bool(other.ended_at and not other.answer)
                return

    def ran(self, command: str) -> CallRecord | None:
        """Note a command that the host reports, and return its call; None where no call has it."""
        key = _hash(command)
        found = [one for one in self._at(("command", key)) if not one.ran]
        call = min(found, key=lambda one: _FIRST_DONE.index(one.answer), default=None)
        if call is None:
            self.unasked += 1
            self._use("bash")
            ignored = [one for one in self._at(("no command", key)) if one.answer == "allow" and not one.ran]
            if ignored:
                ignored[0].ran = True
                self._breach(ignored[0], IGNORED.format(ignored[0].tool))
            return None
        call.ran = True
        if call.answer != "allow" and not call.done:
            self._do(call)
        return call

    def changed(self, files: Collection[str]) -> None:
        """Note which files have changed; a change that was denied and that no other call may have made is a breach.

        Args:
            files: relative to the root.
        """
        if self.opaque():
            return
        for path in sorted(files) if self._denied_files else ():
            key = _hash(path)
            call = self._denied_files.get(key)
            if call is not None and key not in self._allowed_files and not call.done:
                call.done = True
                self.denied_then_done += 1
                self._breach(call, f"{path!r:.200} was changed although that was denied")

    def _breach(self, call: CallRecord, reason: str) -> None:
        if len(self._breaches) < BREACHES_MAX:
            self._breaches.append((call, reason))

    # What can be said of it -------------------------------------------------------------------------------------------

    def to_wire(self) -> dict[str, Json]:
        """Return the numbers for the receipt."""
        names = ("asked", "allowed", "denied", "denied_then_done")
        return {name: getattr(self, name) for name in names}

    def breaches(self) -> list[tuple[CallRecord, str]]:
        """Return the calls that were done against their answer, and how, the first `BREACHES_MAX`."""
        left = [one for one in self._live.values() if one.ignores_change and not one.answer and not one.done]
        return [*self._breaches, *((one, IGNORED.format(one.tool)) for one in left)][:BREACHES_MAX]

    def has_unasked(self) -> bool:
        """Return True if a call or a command ran without a question before it."""
        return bool(self.unasked) or any(one.reported is not None and not one.answer for one in self._live.values())

    def opaque(self) -> list[str]:
        """Return names of tools that were used and do not name each place that they read, write or connect to."""
        found = dict(self._opaque)
        for one in self._live.values():
            if one.answer in ("", "allow") and not _is_whole(one.tool) and len(found) < OPAQUE_MAX:
                found[one.tool] = None
        return list(found)

    def _use(self, tool: str) -> None:
        if not _is_whole(tool) and len(self._opaque) < OPAQUE_MAX:
            self._opaque[tool] = None

    # Keeping ----------------------------------------------------------------------------------------------------------

    def _begin(self, tool: str, id: bytes | None) -> CallRecord:
        self._now += 1
        call = CallRecord(tool=tool, id=id, began_at=self._now)
        if len(self._live) >= CALLS_MAX:
            self.is_full = True
            return call
        self._live[self._now] = call
        self._index(call, ("tool", tool), *([("id", id)] if id is not None else []))
        return call

    def _end(self, call: CallRecord) -> None:
        self._now += 1
        call.ended_at = self._now
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
        """Return hashes of these paths; none, and the book is full, if there are more than can be kept."""
        if self._files + len(files) > FILES_MAX:
            self.is_full = True
            return ()
        return tuple(map(_hash, files))

    def _set_files(self, call: CallRecord, files: tuple[bytes, ...]) -> None:
        self._files += len(files) - len(call.files)
        call.files = files

    def _named(self, id: bytes | None) -> CallRecord | None:
        return next((one for one in self._at(("id", id or b"")) if not one.ended_at), None)

    def _at(self, key: Key) -> list[CallRecord]:
        return list(self._calls.get(key, {}).values())

    def _index(self, call: CallRecord, *keys: Key) -> None:
        if self.is_full and call.began_at not in self._live:
            return
        for key in keys:
            if key not in call.keys:
                call.keys.append(key)
                self._calls.setdefault(key, {})[id(call)] = call

    def _unindex(self, call: CallRecord, keys: list[Any]) -> None:
        for key in keys:
            call.keys.remove(key)
            there = self._calls[key]
            del there[id(call)]
            if not there:
                del self._calls[key]


@functools.lru_cache(maxsize=256)
def neutral(name: str) -> str:
    """Return a tool's neutral name if it has one, else the part of its own name that a policy reads."""
    return next((one for one in tool_names(name) if one in TOOLS), name[: TOOL_NAME_CHARS_MAX + 1])


def _alike(tool: str, name: str) -> bool:
    return tool == neutral(name) or (name == PATCH_TOOL and tool in TOOLS and TOOLS[tool].writes)


def _is_whole(tool: str) -> bool:
    """Return whether a call of this tool names each place that it reads, writes or connects to."""
    return tool in TOOLS and TOOLS[tool].names_place


def _is_open(call: CallRecord) -> bool:
    return not call.ended_at


def _id(id: str | None) -> bytes | None:
    return _hash(id) if id is not None else None


def _hash(value: Json) -> bytes:
    return blake2b(canonical.encode(value), digest_size=16).digest()


def _parts(input: Json) -> frozenset[bytes]:
    """Return hashes of an input's members; of the whole input if it is no object, or has no members or too many."""
    if not isinstance(input, dict) or not 0 < len(input) <= PARTS_MAX:
        return frozenset((_hash(input),))
    return frozenset(_hash([name, value]) for name, value in input.items())


def _commands(input: Json) -> Iterator[tuple[str, bytes]]:
    """Yield the command in a tool's input, if there is one."""
    command = input.get("command") if isinstance(input, dict) else None
    if isinstance(command, str):
        yield ("command", _hash(command))
