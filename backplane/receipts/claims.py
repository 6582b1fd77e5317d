"""What a host claims of its run, held against what was seen: `contracts/claims.md` is this file as a table. Pure.

Events and the host's receipt go in, with what the control plane found at the end; counts by kind and
verdict come out, and each claim that is false. Nothing is true because it sounds right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, CommandExecuted, FileChanged, ToolCall, ToolResult, Warned
from backplane.contract.receipt import CONTRACT_VERSION, Receipt, Usage
from backplane.policy.paths import CHANGE_NOTHING
from backplane.policy.rules import tool_names

Verdict = Literal["true", "false", "unwitnessed"]

SLACK_S: Final = 2
"""Between two readings of one machine's clock, and for what a loaded machine does in between."""

FALSE_MAX: Final = 100
"""False claims listed; all are counted."""

SHOWN_CHARS_MAX: Final = 200

WRITES_MAX: Final = 1000
"""Written files whose content is held against the tree."""

IDS_MAX: Final = 100_000
"""Ids of calls remembered; a run with more is judged by the first of them, and the rest is unwitnessed."""

_PLANES_OWN: Final = ("ask", "answer", "checkpoint")
_TOLD: Final = ("usage", "session", "turn", "task", "retry", "loss", "output", "reasoning")
_TOKENS: Final = frozenset({"input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens"})
_SUPPLIED: Final = frozenset({"hooks_pre_tool_use", "hooks_post_tool_use", "checkpointing"})


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the control plane saw, beside the events."""

    run_id: str
    order_id: str
    started_s: int
    """Whole seconds since 1970; `finished_s` likewise."""
    finished_s: int
    duration_ms: int
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
    sure: bool = True
    """Nothing later may have changed the file."""


class _Change(msgspec.Struct):
    event: int
    sure: bool = True


class Judge:
    """Judges the claims of one run: `take` its events, then `final`, then read `to_wire`.

    Args:
        relative: a path as the difference would write it; None for one outside of the workspace.
    """

    def __init__(self, seen: Seen, relative: Callable[[str], str | None]) -> None:
        self._seen = seen
        self._relative = relative
        self._counts: dict[str, Counter[str]] = {}
        self._false: list[dict[str, Json]] = []
        self._calls: dict[str, str] = {}
        self._results: set[str] = set()
        self._writes: dict[str, _Write] = {}
        self._writing: dict[str, _Write] = {}
        """By the id of the call, until its result comes."""
        self._changes: dict[str, _Change] = {}
        self._reported: dict[str, float] = {}
        self._found: Mapping[str, str | None] = {}
        self._ended = False
        """The host gave a receipt."""
        self._modified = False
        """Somebody changed a tool's input, so what was told is not what was done."""
        self._first, self._last = seen.started_s - SLACK_S, seen.finished_s + SLACK_S

    def take(self, number: int, event: AgentEvent, *, ours: bool) -> None:
        """Judge one event.

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

    def is_in_time(self, second: int | None) -> bool:
        """Whether an event may have happened then, by a clock that is ours, too."""
        return not self._seen.far and second is not None and self._first <= second <= self._last

    def take_times(self, count: int) -> None:
        """Take in so many events that happened in time."""
        if count:
            self._counts.setdefault("event.ts", Counter())["true"] += count

    def take_time(self, number: int, second: int | None) -> None:
        """Judge when an event says that it happened, in whole seconds since 1970; None where nobody can read it."""
        if self._seen.far or second is None:
            self._add("event.ts", "unwitnessed")
        elif self.is_in_time(second):
            self._add("event.ts", "true")
        else:
            claimed, first, last = map(_time_of, (second, self._seen.started_s, self._seen.finished_s))
            self._fail("event.ts", number, claimed, f"the run: {first} to {last}")

    # Events

    def _call(self, number: int, event: ToolCall) -> None:
        self._add("tool_call", "unwitnessed")
        id, parent = event.tool_use_id, event.parent_tool_use_id
        full = len(self._calls) >= IDS_MAX
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
            self._doubt()

    def _write(self, number: int, event: ToolCall) -> None:
        given = event.input if isinstance(event.input, dict) else {}
        path, content = given.get("path"), given.get("content")
        where = self._relative(path) if isinstance(path, str) else None
        if where is None:
            self._doubt()
            return
        self._doubt_of(where)
        if isinstance(content, str) and event.tool_use_id is not None and len(self._writing) < WRITES_MAX:
            sha256 = canonical.sha256_hex(content.encode("utf-8", "surrogatepass"))
            self._writing[event.tool_use_id] = _Write(where, sha256, number)

    def _result(self, number: int, event: ToolResult) -> None:
        self._add("tool_result", "unwitnessed")
        id = event.tool_use_id
        if id is None:
            return
        full, name = len(self._calls) >= IDS_MAX, self._calls.get(id)
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
        if where is None:
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
        self._doubt()

    def _warned(self, number: int, event: Warned) -> None:
        ext = event.ext if isinstance(event.ext, dict) else {}
        for name in _PLANES_OWN:
            if name in ext:
                if self._seen.plane or self._seen.far:
                    self._add(name, "unwitnessed")
                else:
                    self._fail(name, number, ext[name], "we wrote no such event")
        for name in _TOLD:
            if name in ext:
                self._add(name, "unwitnessed")
        usage = ext.get("usage")
        for name, value in usage.items() if isinstance(usage, dict) else ():
            if name in Usage.__struct_fields__ and isinstance(value, int | float):
                self._reported[name] = max(value, self._reported.get(name, value))

    def _doubt(self) -> None:
        """From here on any file may have been changed, or changed back."""
        doubted: tuple[_Write | _Change, ...] = (
            *self._writes.values(), *self._writing.values(), *self._changes.values(),
        )  # fmt: skip
        for one in doubted:
            one.sure = False

    def _doubt_of(self, path: str) -> None:
        for write in (self._writes.get(path), *self._writing.values()):
            if write is not None and write.path == path:
                write.sure = False
        if path in self._changes:
            self._changes[path].sure = False

    # The end

    def wanted(self, claim: Receipt | None) -> list[str]:
        """The files whose bytes at the end are asked for, by their paths in the workspace; some are artifacts."""
        made = [self._relative(artifact.path) for artifact in claim.artifacts] if claim is not None else []
        return list(dict.fromkeys([*self._writes, *filter(None, made)]))[:WRITES_MAX]

    def files(self, found: Mapping[str, str | None]) -> None:
        """Judge what was claimed of files, once all events are in.

        Args:
            found: path → SHA-256 of its bytes, empty for a folder, None where nothing is there; only what was read.
        """
        self._found = found
        seen = self._seen
        for path, change in self._changes.items():
            if seen.changed is None:
                self._add("file_changed", "unwitnessed")
            elif path in seen.changed:
                self._add("file_changed", "true")
            elif (
                not change.sure
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
            elif path not in found or not write.sure or seen.redacted or self._modified:
                self._add("file_content", "unwitnessed")
            else:
                self._fail("file_content", write.event, path, "other bytes" if sha256 else "no such file")

    def final(self, claim: Receipt) -> None:
        """Judge the host's own receipt."""
        seen, self._ended = self._seen, True
        if seen.inner_verified is not None and seen.plane:
            self._hold("inner", None, claim.receipt_sha256, "its content hashes otherwise", seen.inner_verified)
        if seen.plane:
            for name in (*_META, "backend.id", "mode", "outcome"):
                self._add(name, "unwitnessed")
            return
        self._meta(claim)
        self._who(claim)
        self._hold("mode", None, claim.mode, seen.mode, claim.mode == seen.mode)
        if claim.outcome == "complete" and seen.violations:
            self._fail("outcome", None, "complete", f"{seen.violations} violations of the policy")
        else:
            self._add("outcome", "unwitnessed")
        self._git(claim)
        if seen.own_trace is not None:
            self._hold("trace", None, "its own", "other events came", seen.own_trace)
        self._usage(claim.usage)
        for artifact in claim.artifacts:
            where = self._relative(artifact.path)
            there = where is not None and self._found.get(where) is not None
            self._hold("artifact", None, artifact.path, "no such file", there, where not in self._found)

    def _meta(self, claim: Receipt) -> None:
        seen, meta = self._seen, claim.meta
        self._hold("meta.run_id", None, meta.run_id, seen.run_id, meta.run_id == seen.run_id)
        self._hold("meta.work_order_id", None, meta.work_order_id, seen.order_id, meta.work_order_id == seen.order_id)
        version = meta.contract_version
        self._hold("meta.contract_version", None, version, CONTRACT_VERSION, version == CONTRACT_VERSION)
        for name in ("started_at", "finished_at"):
            second = second_of(getattr(meta, name))
            inside = second is not None and self._first <= second <= self._last
            self._hold(f"meta.{name}", None, getattr(meta, name), "not within the run", inside, seen.far)
        slack_ms = SLACK_S * 1000
        short = meta.duration_ms < seen.duration_ms - slack_ms
        fits = meta.duration_ms <= seen.duration_ms + slack_ms
        self._hold("meta.duration_ms", None, meta.duration_ms, seen.duration_ms, fits, seen.far or short)

    def _who(self, claim: Receipt) -> None:
        seen = self._seen
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

    def _git(self, claim: Receipt) -> None:
        seen, said = self._seen, claim.verification
        if said.git_diff is not None:
            same = said.git_diff == seen.git_diff
            self._hold("git_diff", None, said.git_diff, "another difference", same, seen.far or seen.git_diff is None)
        if said.git_status is not None:
            same = _status(said.git_status) == _status(seen.git_status or "")
            self._hold("git_status", None, said.git_status, seen.git_status, same, seen.far or seen.git_status is None)

    def _usage(self, usage: Usage) -> None:
        for name in Usage.__struct_fields__:
            value, reported = getattr(usage, name), self._reported.get(name)
            seen = getattr(self._seen.usage, name, None) if name in _TOKENS else None
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

    def _add(self, kind: str, verdict: Verdict) -> None:
        self._counts.setdefault(kind, Counter())[verdict] += 1

    def _fail(self, kind: str, event: int | None, claim: Json, seen: Json) -> None:
        self._add(kind, "false")
        if len(self._false) < FALSE_MAX:
            self._false.append({"kind": kind, "event": event, "claimed": _shown(claim), "seen": _shown(seen)})

    def to_wire(self) -> dict[str, Json]:
        """The verdicts as the receipt has them."""
        seen = self._seen
        layers = ["plane"]
        layers += [] if not self._ended else ["inner"] if seen.plane else ["final"]
        layers += ["service"] if seen.usage is not None else []
        layers += ["diff"] if seen.changed is not None else []
        layers += ["tree"] if seen.changed is not None and not seen.far else []
        counts = {kind: dict(sorted(found.items())) for kind, found in sorted(self._counts.items())}
        return {"counts": counts, "layers": layers, "false": list(self._false)}


_META: Final = (
    "meta.run_id",
    "meta.work_order_id",
    "meta.contract_version",
    "meta.started_at",
    "meta.finished_at",
    "meta.duration_ms",
)

_EVENTS: Final[dict[type[Any], Any]] = {
    ToolCall: Judge._call,
    ToolResult: Judge._result,
    FileChanged: Judge._file,
    CommandExecuted: Judge._command,
    Warned: Judge._warned,
}


def second_of(text: str) -> int | None:
    """The whole second, since 1970, of a time in the contract's print form; None where it is none."""
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        return None


def _status(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if line.strip()}


def _time_of(second: int) -> str:
    return canonical.timestamp_at(second * 1_000_000_000)


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
