"""Judges what a host claims about its run; `contracts/claims.md` is this file as a table. Pure.

Events go in as they arrive, the host's receipt and what the control plane found at the end; counts by
kind and verdict come out, and each claim that is false. Memory is bounded by the constants below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from typing import Any, Final, Literal

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.events import (
    CARRIED,
    AgentEvent,
    CommandExecuted,
    FileChanged,
    ToolCall,
    ToolResult,
    Warned,
)
from backplane.contract.receipt import CONTRACT_VERSION, Receipt, Usage
from backplane.policy.paths import CHANGE_NOTHING
from backplane.policy.rules import tool_names

Verdict = Literal["true", "false", "unwitnessed"]

FALSE_MAX: Final = 100
"""False claims listed; all are counted."""

SHOWN_CHARS_MAX: Final = 200

WRITES_MAX: Final = 1000
"""Written files whose content is held against the tree."""

IDS_MAX: Final = 20_000
"""Ids of calls remembered, and as many changed files; the claims about further ones are unwitnessed."""

ID_CHARS_MAX: Final = 200
"""Longest id remembered; vendors' ids have 20 to 40 characters."""

PATH_CHARS_MAX: Final = 1000
"""Longest path remembered; claims about longer ones are unwitnessed."""

_PLANES_OWN: Final = ("ask", "answer", "checkpoint")
_TOLD: Final = ("usage", "session", "turn", "task", "retry", "loss", "output", "reasoning")
_TOKENS: Final = frozenset({"input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens"})
_SUPPLIED: Final = frozenset({"hooks_pre_tool_use", "hooks_post_tool_use", "checkpointing"})


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the control plane saw, beside the events."""

    run_id: str
    order_id: str
    backend_id: str
    backend_version: str | None
    capabilities: Mapping[str, Json]
    mode: str
    violations: int
    changed: Set[str] | None
    """Paths that changed; None where the difference was not made, or is too long."""
    hidden: bool = False
    """Files changed that the difference does not show: ignored by git, or left out."""
    git_diff: str | None = None
    git_status: str | None = None
    redacted: bool = False
    far: bool = False
    """It worked on another machine, by another clock."""
    plane: bool = False
    """The host is a control plane, or passes on the events of one."""
    inner_verified: bool | None = None
    usage: Usage | None = None
    """What the model's service counted in all its answers; None where nobody looked at each of them."""
    own_trace: bool | None = None
    """Whether the trace in its receipt is what it streamed; None where it has none."""


class _Write(msgspec.Struct):
    path: str
    sha256: str
    event: int
    """Place of the call in the trace."""
    sure: bool = True
    """No later call wrote the same file."""


class _Change(msgspec.Struct):
    event: int
    sure: bool = True
    """It was claimed once, and no later call wrote the file."""


class Judge:
    """Judges the claims of one run: `take` events as they arrive, `end` the run, then read `to_wire`.

    Args:
        relative: writes a path as the difference would; None for a path outside the workspace.
    """

    def __init__(self, relative: Callable[[str], str | None]) -> None:
        self._relative = relative
        self._counts: dict[str, Counter[str]] = {}
        self._false: list[dict[str, Json]] = []
        self._calls: dict[str, str] = {}
        self._results: set[str] = set()
        self._writes: dict[str, _Write] = {}
        self._writing: dict[str, _Write] = {}
        """By the id of the call, until its result comes."""
        self._changes: dict[str, _Change] = {}
        self._doubted = -1
        """Place of the last event that may have changed any file, or changed it back: a command, most tools."""
        self._reported: dict[str, float] = {}
        self._forged: list[tuple[str, int, str]] = []
        """Events of the host that only the control plane writes: kind, place, text; the first `FALSE_MAX`."""
        self._forged_counts: Counter[str] = Counter()
        self._modified = False
        """A hook or a person changed a tool's input, so the input in the events is not what was done."""
        self._layers: tuple[str, ...] = ("plane",)

    def take(self, number: int, event: AgentEvent, *, ours: bool) -> None:
        """Add one event.

        Args:
            number: its place in the trace.
            ours: the control plane wrote it.
        """
        if ours:
            answer = event.ext.get("answer") if isinstance(event.ext, dict) else None
            self._modified = self._modified or (isinstance(answer, dict) and answer.get("decision") == "modify")
            return
        judge = _EVENTS.get(type(event))
        if judge is not None:
            judge(self, number, event)

    # Events

    def _call(self, number: int, event: ToolCall) -> None:
        self._add("tool_call", "unwitnessed")
        id, parent = event.tool_use_id, event.parent_tool_use_id
        full = len(self._calls) >= IDS_MAX or len(id or "") > ID_CHARS_MAX
        if parent is not None:
            self._hold("tool_call.parent", number, parent, "no such call before", parent in self._calls, full)
        if id is not None:
            self._hold("tool_call.id", number, id, "another call has this id", id not in self._calls, full)
            if not full:
                self._calls.setdefault(id, event.tool_name)
        names = tool_names(event.tool_name)
        if "write_file" in names:
            self._write(number, event)
        elif CHANGE_NOTHING.isdisjoint(names):
            self._doubted = number

    def _write(self, number: int, event: ToolCall) -> None:
        given = event.input if isinstance(event.input, dict) else {}
        path, content = given.get("path"), given.get("content")
        where = self._relative(path) if isinstance(path, str) else None
        if where is None or len(where) > PATH_CHARS_MAX:
            self._doubted = number
            return
        self._doubt_of(where)
        id = event.tool_use_id
        if isinstance(content, str) and id in self._calls and len(self._writing) < WRITES_MAX:
            sha256 = canonical.sha256_hex(content.encode("utf-8", "surrogatepass"))
            self._writing[id] = _Write(where, sha256, number)

    def _result(self, number: int, event: ToolResult) -> None:
        self._add("tool_result", "unwitnessed")
        id = event.tool_use_id
        if id is None:
            return
        full, name = len(self._calls) >= IDS_MAX or len(id) > ID_CHARS_MAX, self._calls.get(id)
        self._hold("tool_result.id", number, id, "no such call before", name is not None, full)
        if name is not None:
            self._hold("tool_result.name", number, event.tool_name, f"the call is of {name}", event.tool_name == name)
            self._hold("tool_result.once", number, id, "its result came before", id not in self._results)
            self._results.add(id)
        write = self._writing.pop(id, None)
        if write is not None and not event.is_error and len(self._writes) < WRITES_MAX:
            self._writes[write.path] = write

    def _file(self, number: int, event: FileChanged) -> None:
        where = self._relative(event.path)
        if where is None or len(where) > PATH_CHARS_MAX:
            self._add("file_changed", "unwitnessed")
        elif where in self._changes or len(self._changes) >= IDS_MAX:
            # Twice: the second may have taken back the first, so that neither shows at the end.
            self._add("file_changed", "unwitnessed")
            if where in self._changes:
                self._changes[where].sure = False
        else:
            self._changes[where] = _Change(number)

    def _command(self, number: int, event: CommandExecuted) -> None:
        self._add("command", "unwitnessed")
        self._doubted = number

    def _warned(self, number: int, event: Warned) -> None:
        ext = event.ext if isinstance(event.ext, dict) else {}
        for name in _PLANES_OWN:
            if name in ext:
                self._forged_counts[name] += 1
                if len(self._forged) < FALSE_MAX:
                    self._forged.append((name, number, _shown(ext[name])))
        for name in _TOLD:
            if name in ext:
                self._add(name, "unwitnessed")
        usage = ext.get("usage")
        for name, value in usage.items() if isinstance(usage, dict) else ():
            if name in Usage.__struct_fields__ and isinstance(value, int | float):
                self._reported[name] = max(value, self._reported.get(name, value))

    def _doubt_of(self, path: str) -> None:
        for write in (self._writes.get(path), *self._writing.values()):
            if write is not None and write.path == path:
                write.sure = False
        if path in self._changes:
            self._changes[path].sure = False

    def _is_sure(self, one: _Write | _Change) -> bool:
        """Whether nothing that came later may have changed the file, or changed it back."""
        return one.sure and one.event > self._doubted

    # The end

    def wanted(self, claim: Receipt | None) -> list[str]:
        """The files whose bytes at the end are asked for, by their paths in the workspace; some are artifacts."""
        made = [self._relative(artifact.path) for artifact in claim.artifacts] if claim is not None else []
        return list(dict.fromkeys([*self._writes, *filter(None, made)]))[:WRITES_MAX]

    def end(self, seen: Seen, found: Mapping[str, str | None], claim: Receipt | None) -> None:
        """Judge what can be judged only once all events are in.

        Args:
            found: path → SHA-256 of its bytes, empty for a folder, None where nothing is there; only what was read.
            claim: the host's own receipt; None when it gave none.
        """
        self._layers = _layers(seen, ended=claim is not None)
        self._forgeries(seen)
        self._files(seen, found)
        if claim is not None:
            self._final(seen, found, claim)

    def _forgeries(self, seen: Seen) -> None:
        if seen.plane or seen.far:
            for name, count in self._forged_counts.items():
                self._add(name, "unwitnessed", count)
            return
        for name, count in self._forged_counts.items():
            self._add(name, "false", count)
        for name, number, body in self._forged:
            self._list(name, number, body, "we wrote no such event")

    def _files(self, seen: Seen, found: Mapping[str, str | None]) -> None:
        for path, change in self._changes.items():
            if seen.changed is None:
                self._add("file_changed", "unwitnessed")
            elif path in seen.changed:
                self._add("file_changed", "true")
            elif (
                not self._is_sure(change)
                or seen.hidden
                or (
                    # It has the content that was written, and had it before.
                    path in self._writes and found.get(path) == self._writes[path].sha256
                )
            ):
                self._add("file_changed", "unwitnessed")
            else:
                self._fail("file_changed", change.event, path, "not in the difference")
        for path, write in self._writes.items():
            sha256 = found.get(path)
            if sha256 == write.sha256:
                self._add("file_content", "true")
            elif path not in found or not self._is_sure(write) or seen.redacted or self._modified:
                self._add("file_content", "unwitnessed")
            else:
                self._fail("file_content", write.event, path, "other bytes" if sha256 else "no such file")

    def _final(self, seen: Seen, found: Mapping[str, str | None], claim: Receipt) -> None:
        if seen.inner_verified is not None and seen.plane:
            self._hold("inner", None, claim.receipt_sha256, "its content hashes otherwise", seen.inner_verified)
        if seen.plane:
            for name in (*_META, "backend.id", "mode", "outcome"):
                self._add(name, "unwitnessed")
            return
        self._meta(seen, claim)
        self._who(seen, claim)
        self._hold("mode", None, claim.mode, seen.mode, claim.mode == seen.mode)
        if claim.outcome == "complete" and seen.violations:
            self._fail("outcome", None, "complete", f"{seen.violations} violations of the policy")
        else:
            self._add("outcome", "unwitnessed")
        self._git(seen, claim)
        if seen.own_trace is not None:
            self._hold("trace", None, "its own", "other events came", seen.own_trace)
        self._usage(seen, claim.usage)
        for artifact in claim.artifacts:
            where = self._relative(artifact.path)
            there = where is not None and found.get(where) is not None
            self._hold("artifact", None, artifact.path, "no such file", there, where not in found)

    def _meta(self, seen: Seen, claim: Receipt) -> None:
        meta = claim.meta
        self._hold("meta.run_id", None, meta.run_id, seen.run_id, meta.run_id == seen.run_id)
        self._hold("meta.work_order_id", None, meta.work_order_id, seen.order_id, meta.work_order_id == seen.order_id)
        version = meta.contract_version
        self._hold("meta.contract_version", None, version, CONTRACT_VERSION, version == CONTRACT_VERSION)

    def _who(self, seen: Seen, claim: Receipt) -> None:
        self._hold("backend.id", None, claim.backend.id, seen.backend_id, claim.backend.id == seen.backend_id)
        mine, theirs = seen.backend_version, claim.backend.backend_version
        if mine is not None and theirs is not None:
            self._hold("backend.version", None, theirs, mine, mine == theirs)
        other = sorted(
            name
            for name, level in claim.capabilities.items()
            if name not in _SUPPLIED and seen.capabilities.get(name, "unsupported") != level
        )
        self._hold("capabilities", None, ", ".join(other), "its hello says otherwise", not other)

    def _git(self, seen: Seen, claim: Receipt) -> None:
        said = claim.verification
        if said.git_diff is not None:
            same = said.git_diff == seen.git_diff
            self._hold("git_diff", None, said.git_diff, "another difference", same, seen.far or seen.git_diff is None)
        if said.git_status is not None:
            same = _status(said.git_status) == _status(seen.git_status or "")
            self._hold("git_status", None, said.git_status, seen.git_status, same, seen.far or seen.git_status is None)

    def _usage(self, known: Seen, usage: Usage) -> None:
        for name in Usage.__struct_fields__:
            value, reported = getattr(usage, name), self._reported.get(name)
            seen = getattr(known.usage, name, None) if name in _TOKENS else None
            if value is not None and reported is not None and value < reported:
                self._fail(f"usage.{name}", None, value, f"{reported:g} was reported on the way")
            elif value is not None:
                # Less than the service counted may be all but what the agent asked beside its work: a title, say.
                unseen = seen is None or value < seen
                self._hold(f"usage.{name}", None, value, f"the service counted {seen}", value == seen, unseen)

    # Verdicts

    def _hold(self, kind: str, event: int | None, claim: Json, seen: Json, holds: bool, unseen: bool = False) -> None:
        if unseen:
            self._add(kind, "unwitnessed")
        elif holds:
            self._add(kind, "true")
        else:
            self._fail(kind, event, claim, seen)

    def _add(self, kind: str, verdict: Verdict, count: int = 1) -> None:
        self._counts.setdefault(kind, Counter())[verdict] += count

    def _fail(self, kind: str, event: int | None, claim: Json, seen: Json) -> None:
        self._add(kind, "false")
        self._list(kind, event, claim, seen)

    def _list(self, kind: str, event: int | None, claim: Json, seen: Json) -> None:
        if len(self._false) < FALSE_MAX:
            self._false.append({"kind": kind, "event": event, "claimed": _shown(claim), "seen": _shown(seen)})

    def to_wire(self) -> dict[str, Json]:
        """Return the verdicts as the receipt has them."""
        counts = {kind: dict(sorted(found.items())) for kind, found in sorted(self._counts.items())}
        return {"counts": counts, "layers": list(self._layers), "false": list(self._false)}


def _layers(seen: Seen, *, ended: bool) -> tuple[str, ...]:
    layers = {
        "plane": True,
        "inner": ended and seen.plane,
        "final": ended and not seen.plane,
        "service": seen.usage is not None,
        "diff": seen.changed is not None,
        "tree": seen.changed is not None and not seen.far,
    }
    return tuple(name for name, in_force in layers.items() if in_force)


_META: Final = ("meta.run_id", "meta.work_order_id", "meta.contract_version")

_EVENTS: Final[dict[type[Any], Any]] = {
    ToolCall: Judge._call,
    ToolResult: Judge._result,
    FileChanged: Judge._file,
    CommandExecuted: Judge._command,
    Warned: Judge._warned,
    **dict.fromkeys((kind for kind in CARRIED.values() if issubclass(kind, Warned)), Judge._warned),
}

CLAIMING: Final[frozenset[type[Any]]] = frozenset(_EVENTS)
"""Types of events that claim something by themselves; any other may claim something in its `ext`."""


def _status(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if line.strip()}


def _shown(value: Json) -> str:
    text = value if isinstance(value, str) else canonical.encode(value).decode()
    return text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 1] + "…"


class FalseClaim(msgspec.Struct, frozen=True):
    """One claim that cannot be true together with what was seen."""

    kind: str
    event: int | None
    """Place in the trace, from 0; None for a member of the host's receipt."""
    claimed: str
    seen: str


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts of one sealed run, as `receipts audit` gives them."""

    run_id: str
    verdict: Literal["no_alarm", "false_claims", "not_judged"]
    why: str | None = None
    """Why it was not judged."""
    layers: tuple[str, ...] = ()
    counts: dict[str, dict[Verdict, int]] = {}
    """Kind → verdict → claims."""
    false: tuple[FalseClaim, ...] = ()
    """The first `FALSE_MAX`."""


class _Claimed(msgspec.Struct, frozen=True):
    counts: dict[str, dict[Verdict, int]] = {}
    layers: tuple[str, ...] = ()
    false: tuple[FalseClaim, ...] = ()
    failed: str | None = None


def audit(receipt: Receipt) -> Audited:
    """Read the verdicts out of a sealed receipt; they are not made anew, as most of what was seen is gone."""
    run_id, own = receipt.meta.run_id, receipt.backplane
    if "replay" in own:
        return Audited(run_id=run_id, verdict="not_judged", why="a replay claims nothing; audit the run it tells of")
    if "claimed" not in own:
        why = "the receipt has no verdicts: refused, cut off, from elsewhere, or older than they are"
        return Audited(run_id=run_id, verdict="not_judged", why=why)
    try:
        found = msgspec.convert(own["claimed"], _Claimed)
    except msgspec.ValidationError as error:
        return Audited(run_id=run_id, verdict="not_judged", why=f"its verdicts cannot be read: {error}")
    if found.failed is not None:
        return Audited(run_id=run_id, verdict="not_judged", why=found.failed)
    alarm = any(one.get("false") for one in found.counts.values())
    return Audited(
        run_id=run_id,
        verdict="false_claims" if alarm else "no_alarm",
        layers=found.layers,
        counts=found.counts,
        false=found.false,
    )
