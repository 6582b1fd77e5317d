"""Judges what a host claims about its run; `docs/guide/claims.md` is this file as a table. Pure.

Events go in as they arrive, the host's receipt and what the control plane found at the end; counts by
kind and verdict come out, and a list of what is false or was not seen. Memory is bounded by the constants below.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Final, Literal

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.capability import CAPABILITIES, read_level
from backplane.contract.events import (
    CARRIED,
    AgentEvent,
    Carried,
    CommandExecuted,
    FileChanged,
    ToolCall,
    ToolResult,
    TurnEnded,
    Warned,
)
from backplane.contract.receipt import CONTRACT_VERSION, NAMES_MAX, Artifact, Receipt, Usage, Verification
from backplane.policy.paths import CHANGE_NOTHING, touched
from backplane.policy.rules import tool_names, tool_shape
from backplane.receipts.claimed_texts import Likeness, changed_lines, plain_name, unchanged_file, written
from backplane.redact.secrets import MARK

Verdict = Literal["true", "false", "not_seen", "unwitnessed"]

FALSE_MAX: Final = 100
"""False claims listed, and as many that were not seen; all are counted."""

SHOWN_CHARS_MAX: Final = 200

WRITES_MAX: Final = 1000
"""Files whose content at the end is compared with what the host says about them."""

IDS_MAX: Final = 20_000
"""Ids of calls remembered, and as many changed files; the claims about further ones are unwitnessed."""

ID_CHARS_MAX: Final = 200
"""Longest id remembered, and as much of a tool's name; vendors' ids have 20 to 40 characters."""

PATH_CHARS_MAX: Final = 1000
"""Longest path remembered; claims about longer ones are unwitnessed."""

_PLANES_OWN: Final = {"ask": "kind", "answer": "decision", "checkpoint": "what"}
"""Members of `ext` that the control plane alone writes, each with a member that its body has."""
_HOST_ONLY: Final = ("usage", "session", "turn", "task", "retry", "loss", "output", "reasoning")
_INPUT_TOKENS: Final = ("input_tokens", "cache_read_tokens", "cache_write_tokens")
_TOKENS: Final = frozenset({*_INPUT_TOKENS, "output_tokens"})
_SUPPLIED: Final = frozenset({"hooks_pre_tool_use", "hooks_post_tool_use", "checkpointing"})


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the control plane saw itself, beside the events."""

    run_id: str
    order_id: str
    backend_id: str
    backend_version: str | None
    capabilities: Mapping[str, Json]
    mode: str
    violations: int
    """Number of acts that broke a rule of the policy, without calls that no rule could judge."""
    changed: Set[str] | None
    """Paths that changed; None if the difference was not made, or is too long."""
    hidden: bool = False
    """Files changed that the difference does not show, as git ignores them."""
    git_diff: str | None = None
    far: bool = False
    """The host worked on another machine."""
    plane: bool = False
    """The host is a control plane, or passes on the events of one."""
    inner_verified: bool | None = None
    usage: Usage | None = None
    """Sums of the model's service over all its answers; None if some answers were not seen."""
    own_trace: Literal["same", "part", "other"] | None = None
    """Comparison of the receipt's trace with the streamed events; None if the receipt has no trace."""
    asked_passthrough: bool = False
    """The order asks for the vendor's own messages."""
    denied: int = 0
    """Number of calls that were denied, and so have no result."""
    modified: bool = False
    """A hook or a person changed a call's input, so that the input in the events is not what was done."""
    resumed: bool = False
    """The conversation began in an earlier run, so that calls and sums may count from there."""


class Files(msgspec.Struct, frozen=True):
    """Files of the workspace at the end of the run."""

    sha256: Mapping[str, str | None] = {}
    """Path → SHA-256 of its bytes, empty for a folder, None if nothing is there; only paths that could be read."""
    likeness: Mapping[int, Likeness] = {}
    """Place of a call that wrote a file → how the file compares with the text that it wrote."""
    real: Mapping[str, str] = {}
    """Path → the path without links, where that is another one."""


class _Reported(msgspec.Struct):
    name: str
    sha256: str
    """Hash of its input; empty if the input is empty."""
    number: int
    open: bool = True


class _Write(msgspec.Struct):
    path: str
    sha256: str
    event: int
    """Place of the call in the trace."""
    redacted: bool
    sure: bool = True
    """No later call wrote the same file."""


class _Change(msgspec.Struct):
    event: int
    count: int = 1


class _Late(msgspec.Struct, frozen=True):
    """A claim about a call that was not reported before it."""

    number: int
    id: str
    tool: str


class Judge:
    """Judges the claims of one run: `take` events as they arrive, `end` the run, then read `to_wire`.

    Args:
        relative: writes a path as the difference would; None for a path outside the workspace.
        has_plane: the host is a control plane or works on another machine, so that it may pass on asks and answers.
    """

    def __init__(self, relative: Callable[[str], str | None], *, has_plane: bool = False) -> None:
        self._relative, self._has_plane = relative, has_plane
        self._counts: dict[str, Counter[str]] = {}
        self._listed: dict[str, list[dict[str, Json]]] = {"false": [], "not_seen": []}
        self._unnamed_files: list[str] = []
        """Changed files that no event names."""
        self._layers: tuple[str, ...] = ("plane",)
        self._calls: dict[str, dict[str | None, _Reported]] = {}
        """Calls by id, then by the parent's id: agents inside may use the same ids."""
        self._unnamed: Counter[str] = Counter()
        """Open calls without an id, by tool."""
        self._orphans: dict[str, list[_Late]] = {"tool_result.id": [], "tool_call.parent": []}
        """Results and calls within calls that were not reported before them."""
        self._clashes: list[_Late] = []
        """Calls with the id of another one, made before any result came in between."""
        self._answered = False
        """A result named its call by the id."""
        self._paused = -1
        """Place of the last result or end of a turn."""
        self._all_ids_kept = True
        """All ids so far are remembered."""
        self._writes: dict[str, _Write] = {}
        self._writing: dict[str, _Write] = {}
        """Id of a call without a result → the file that it writes."""
        self._changes: dict[str, _Change] = {}
        self._touched: set[str] = set()
        """Files named by tools that may change them."""
        self._last_opaque = -1
        """Place of the last event that may have changed any file, or changed it back: a command, most tools."""
        self._reported: dict[str, float] = {}

    def take(self, number: int, event: AgentEvent) -> None:
        """Add one event of the host.

        Args:
            number: its place in the trace.
        """
        judge = _EVENTS.get(type(event))
        if judge is not None:
            judge(self, number, event)
        if isinstance(event.ext, dict):
            self._look_for_forgery(number, event.ext)

    def _look_for_forgery(self, number: int, ext: dict[str, Any]) -> None:
        for name, member in _PLANES_OWN.items():
            if name not in ext:
                continue
            body = ext[name]
            # A member of the same name may have another meaning.
            is_own = isinstance(body, dict) and member in body and not self._has_plane
            self._judge(name, "false" if is_own else "unwitnessed", number, body, "we wrote no such event")

    # Calls and results

    def _call(self, number: int, event: ToolCall) -> None:
        self._add("tool_call", "unwitnessed")
        id, parent, tool = event.tool_use_id, event.parent_tool_use_id, _cut(event.tool_name)
        if parent is not None:
            self._refer("tool_call.parent", number, parent, tool)
        if id is None:
            self._count_unnamed(tool, 1)
        elif len(id) > ID_CHARS_MAX or (id not in self._calls and len(self._calls) >= IDS_MAX):
            self._all_ids_kept = False
            self._add("tool_call.id", "unwitnessed")
        else:
            self._open(number, event, id)
        self._note_files(number, event)

    def _count_unnamed(self, tool: str, count: int) -> None:
        if tool in self._unnamed or len(self._unnamed) < IDS_MAX:
            self._unnamed[tool] += count
        else:
            self._all_ids_kept = False

    def _open(self, number: int, event: ToolCall, id: str) -> None:
        empty = event.input in (None, {}, "", [])
        sha256 = "" if empty else canonical.sha256_hex(canonical.encode(event.input))
        call = _Reported(_cut(event.tool_name), sha256, number)
        parent = event.parent_tool_use_id and _cut(event.parent_tool_use_id)
        same_id = self._calls.setdefault(id, {})
        before = same_id.get(parent)
        if before is None:
            self._add("tool_call.id", "true")
        elif before.open and _is_other(before, call) and before.number > self._paused and len(self._clashes) < IDS_MAX:
            self._clashes.append(_Late(number, id, call.name))
        else:
            # The same call once more, with all its input, or an id that begins anew with each answer of the model.
            self._add("tool_call.id", "unwitnessed")
        if len(same_id) < NAMES_MAX:
            same_id[parent] = call

    def _refer(self, kind: str, number: int, id: str, tool: str) -> None:
        """Note a claim about another call: it may be reported later."""
        if id in self._calls:
            self._add(kind, "true")
        elif len(id) <= ID_CHARS_MAX and len(self._orphans[kind]) < NAMES_MAX:
            self._orphans[kind].append(_Late(number, id, tool))
        else:
            self._add(kind, "unwitnessed")

    def _result(self, number: int, event: ToolResult) -> None:
        self._add("tool_result", "unwitnessed")
        self._paused = number
        id, tool = event.tool_use_id, _cut(event.tool_name)
        if id is None:
            self._count_unnamed(tool, -1)
        else:
            self._answered = True
            self._refer("tool_result.id", number, id, tool)
            self._close(number, event, id)
        write = self._writing.pop(_cut(id or f"\0{tool}"), None)
        if write is not None and not event.is_error and len(self._writes) < WRITES_MAX:
            self._writes[write.path] = write

    def _close(self, number: int, event: ToolResult, id: str) -> None:
        calls = self._calls.get(id)
        if not calls:
            return
        for call in calls.values():
            call.open = False
        names = [call.name for call in calls.values()]
        alike = [_compare_names(_cut(event.tool_name), name) for name in names]
        if True in alike:
            self._add("tool_result.name", "true")
        elif None in alike:
            self._add("tool_result.name", "unwitnessed")
        else:
            self._fail("tool_result.name", number, event.tool_name, f"the call is of {names[0]}")

    def _turned(self, number: int, event: TurnEnded) -> None:
        self._paused = number
        self._note_reports(number, event)

    # Files

    def _note_files(self, number: int, event: ToolCall) -> None:
        """Note what a call may do to files."""
        names = tool_names(event.tool_name)
        write = written(event.tool_name, event.input)
        where = None if write is None else self._place(write.path)
        if write is not None and where is not None:
            self._write(number, event, where, write.content)
        elif CHANGE_NOTHING.isdisjoint(names):
            shape = tool_shape(names)
            found = touched(shape, event.input) if shape.writes else None
            places = [self._place(path) for path in found.paths] if found is not None else []
            if not places or None in places:
                self._last_opaque = number
            for place in filter(None, places):
                self._touch(place)

    def _place(self, path: str) -> str | None:
        where = self._relative(path.removeprefix("file://"))
        return where if where is not None and len(where) <= PATH_CHARS_MAX else None

    def _touch(self, where: str) -> None:
        if len(self._touched) < IDS_MAX:
            self._touched.add(where)
        for write in (self._writes.get(where), *self._writing.values()):
            if write is not None and write.path == where:
                write.sure = False

    def _write(self, number: int, event: ToolCall, where: str, content: str | None) -> None:
        self._touch(where)
        if content is not None and len(self._writing) < WRITES_MAX:
            sha256 = canonical.sha256_hex(content.encode("utf-8", "surrogatepass"))
            write = _Write(where, sha256, number, MARK in content)
            self._writing[_cut(event.tool_use_id or f"\0{_cut(event.tool_name)}")] = write

    def _file(self, number: int, event: FileChanged) -> None:
        where = self._place(event.path)
        if where is None or (where not in self._changes and len(self._changes) >= IDS_MAX):
            self._add("file_changed", "unwitnessed")
        elif where in self._changes:
            self._changes[where].count += 1
        else:
            self._changes[where] = _Change(number)

    def _command(self, number: int, event: CommandExecuted) -> None:
        self._add("command", "unwitnessed")
        self._last_opaque = number

    def _note_reports(self, number: int, event: Warned | Carried) -> None:
        ext = event.ext if isinstance(event.ext, dict) else {}
        for name in _HOST_ONLY:
            if name in ext:
                self._add(name, "unwitnessed")
        usage = ext.get("usage")
        for name, value in usage.items() if isinstance(usage, dict) else ():
            if name in Usage.__struct_fields__ and isinstance(value, int | float):
                self._reported[name] = max(value, self._reported.get(name, value))

    # The end

    def wanted(self, claim: Receipt | None) -> list[str]:
        """Return the paths in the workspace whose bytes at the end are compared: files written, and artifacts."""
        made = [self._relative(artifact.path) for artifact in claim.artifacts] if claim is not None else []
        return list(dict.fromkeys([*self._writes, *filter(None, made)]))[: 2 * WRITES_MAX]

    def differing(self, sha256: Mapping[str, str | None]) -> dict[int, str]:
        """Return the calls whose text has to be compared with the file: place in the trace → path."""
        return {
            write.event: path
            for path, write in self._writes.items()
            if sha256.get(path) not in (None, "", write.sha256)
        }

    def unseen(self, changed: Set[str] | None) -> list[str]:
        """Return the files said to have changed that are not in the difference; some may be links into it."""
        return [path for path in self._changes if changed is not None and path not in changed][:WRITES_MAX]

    def end(self, seen: Seen, files: Files, claim: Receipt | None) -> None:
        """Judge what can be judged only once all events are in.

        Args:
            claim: the host's own receipt; None when it gave none.
        """
        self._layers = _layers(seen, ended=claim is not None)
        self._references(seen)
        self._files_changed(seen, files)
        self._contents(seen, files)
        if claim is not None:
            self._final(seen, files, claim)

    def _references(self, seen: Seen) -> None:
        for kind, orphans in self._orphans.items():
            for one in orphans:
                if one.id in self._calls:
                    self._add(kind, "true")  # It was reported later.
                elif seen.resumed or not self._all_ids_kept or self._unnamed[one.tool] > 0:
                    self._add(kind, "unwitnessed")
                else:
                    self._judge(kind, "false" if self._calls else "not_seen", one.number, one.id, "no such call")
        for one in self._clashes:
            # A host that reports no results may begin to count anew with each answer of the model.
            self._judge(
                "tool_call.id",
                "false" if self._answered else "not_seen",
                one.number,
                one.id,
                "another open call has this id",
            )

    def _files_changed(self, seen: Seen, files: Files) -> None:
        changed = seen.changed
        named = _with_folders(unicodedata.normalize("NFC", path) for path in changed or ())
        near = {path.rpartition("/")[2] for path in (*(changed or ()), *self._touched)}
        touched = _with_folders(self._touched)
        for path, change in self._changes.items():
            verdict: Verdict = "true"
            if changed is None:
                verdict = "unwitnessed"
            elif named.isdisjoint((path, files.real.get(path, path), unicodedata.normalize("NFC", path))):
                # A reported event may explain that the file is not in the difference.
                is_near = path.rpartition("/")[2] in near or path in touched
                may_be_undone = self._last_opaque >= 0 or change.count > 1 or seen.hidden or is_near
                verdict = "not_seen" if may_be_undone else "false"
            self._judge("file_changed", verdict, change.event, path, "not in the difference", change.count)
        if changed is not None and (self._changes or self._calls or self._unnamed):
            reported = {*self._changes, *self._touched, *files.real.values()}
            self._unnamed_files = sorted(path for path in changed if reported.isdisjoint(_with_folders([path])))[
                :NAMES_MAX
            ]

    def _contents(self, seen: Seen, files: Files) -> None:
        for path, write in self._writes.items():
            sha256, like = files.sha256.get(path), files.likeness.get(write.event)
            if sha256 == write.sha256 or like == "same":
                self._add("file_content", "true")
            elif path not in files.sha256 or write.redacted or seen.modified:
                self._add("file_content", "unwitnessed")
            else:
                sure = write.sure and write.event > self._last_opaque and like != "alike"
                text = "other bytes" if sha256 else "no such file"
                self._judge("file_content", "false" if sure else "not_seen", write.event, path, text)

    def _final(self, seen: Seen, files: Files, claim: Receipt) -> None:
        if seen.inner_verified is not None and seen.plane:
            self._compare("inner", claim.receipt_sha256, "its content hashes otherwise", seen.inner_verified)
        if seen.plane:
            for name in (*_META, "backend.id", "mode", "outcome"):
                self._add(name, "unwitnessed")
            return
        self._who(seen, claim)
        self._mode(seen, claim)
        self._outcome(seen, claim)
        if seen.changed is None or seen.far:
            texts = {"git_diff": claim.verification.git_diff, "git_status": claim.verification.git_status}
            for kind in (kind for kind, text in texts.items() if text is not None):
                self._add(kind, "unwitnessed")
        else:
            self._git(seen.changed, seen.git_diff, claim.verification)
        if seen.own_trace is not None:
            verdict: dict[str, Verdict] = {"same": "true", "part": "unwitnessed", "other": "false"}
            self._judge("trace", verdict[seen.own_trace], None, "its own", "other events came")
        self._usage(seen, claim.usage)
        for artifact in claim.artifacts:
            self._artifact(files, artifact)

    def _who(self, seen: Seen, claim: Receipt) -> None:
        claimed = {
            "meta.run_id": (claim.meta.run_id, seen.run_id),
            "meta.work_order_id": (claim.meta.work_order_id, seen.order_id),
            "meta.contract_version": (claim.meta.contract_version, CONTRACT_VERSION),
            "backend.id": (claim.backend.id, seen.backend_id),
        }
        for kind, (theirs, mine) in claimed.items():
            self._compare(kind, theirs, mine, theirs == mine)
        self._version(seen.backend_version, claim.backend.backend_version)
        levels = {name: level for name, level in claim.capabilities.items() if name not in _SUPPLIED}
        more = sorted(name for name, level in levels.items() if _is_more(name, level, seen.capabilities.get(name)))
        other = any(seen.capabilities.get(name) != level for name, level in levels.items())
        self._compare("capabilities", ", ".join(more), "its hello says less", not more, unseen=other and not more)

    def _version(self, mine: str | None, theirs: str | None) -> None:
        if mine is not None and theirs is not None:
            short, long = sorted((mine.removeprefix("v"), theirs.removeprefix("v")), key=len)
            # `1.2`, `1.2.0` and `1.2 (build 7)` may be one version.
            part = short != long and long.startswith(short) and not long[len(short)].isalnum()
            self._compare("backend.version", theirs, mine, short == long, unseen=part)

    def _mode(self, seen: Seen, claim: Receipt) -> None:
        if claim.mode == seen.mode:
            self._add("mode", "true")
        elif claim.mode == "mapped":  # Also the value of a receipt that does not say.
            self._add("mode", "unwitnessed")
        else:
            verdict: Verdict = "not_seen" if seen.asked_passthrough else "false"
            self._judge("mode", verdict, None, claim.mode, "no message of the vendor's came")

    def _outcome(self, seen: Seen, claim: Receipt) -> None:
        left = self._open_calls()[seen.denied :] if claim.outcome == "complete" else []
        if claim.outcome == "complete" and seen.violations:
            self._fail("outcome", None, "complete", f"{seen.violations} violations of the policy")
        elif left:
            text = f"{len(left)} calls have no result: {', '.join(left[:5])}"
            self._judge("outcome", "not_seen", None, "complete", text)
        else:
            self._add("outcome", "unwitnessed")

    def _open_calls(self) -> list[str]:
        """Return the tools of calls without a result."""
        named = [call.name for calls in self._calls.values() for call in calls.values() if call.open]
        return named + [tool for tool, count in self._unnamed.items() for _ in range(min(count, NAMES_MAX))]

    def _git(self, changed: Set[str], patch: str | None, verification: Verification) -> None:
        diff, status = verification.git_diff, verification.git_status
        if diff is not None and patch is not None:
            mine, theirs = changed_lines(patch), changed_lines(diff)
            # A file that was changed before the run may stand in it, too, so that nothing more is certain.
            more = next((line for line in theirs - mine if line[1:].strip()), None)
            if more is None and not theirs:
                more = unchanged_file(diff, changed)
            verdict: Verdict = "not_seen" if more is not None else "true" if mine == theirs else "unwitnessed"
            self._judge("git_diff", verdict, None, diff, f"not in the difference: {more}")
        elif diff is not None:
            self._add("git_diff", "unwitnessed")
        if status is not None:
            more = unchanged_file(status, changed)
            verdict = "unwitnessed" if more is None else "not_seen"
            self._judge("git_status", verdict, None, status, f"not in the difference: {more}")

    def _usage(self, seen: Seen, usage: Usage) -> None:
        for name in Usage.__struct_fields__:
            value = getattr(usage, name)
            if value is not None:
                self._counter(seen, usage, name, value)

    def _counter(self, seen: Seen, usage: Usage, name: str, value: float) -> None:
        kind, reported, counted = f"usage.{name}", self._reported.get(name), getattr(seen.usage, name, None)
        # Cached tokens stand among the input tokens, or beside them.
        parts = _INPUT_TOKENS if name == "input_tokens" else (name,)
        whole = _sum(msgspec.structs.asdict(usage), parts)
        if seen.usage is not None and counted is not None:
            counted = _sum(msgspec.structs.asdict(seen.usage), parts)
        if reported is not None and value < reported:
            # Prices on the way are estimates, and a conversation that goes on may count from its beginning.
            sure = name in _TOKENS and not seen.resumed and whole < reported
            self._judge(kind, "false" if sure else "not_seen", None, value, f"{reported:g} was reported on the way")
        elif name not in _TOKENS or counted is None:
            self._add(kind, "unwitnessed")
        else:
            # Less than the service counted may be all but what the agent asked beside its work: a title, say.
            exact = value == getattr(seen.usage, name)
            self._compare(kind, value, f"the service counted {counted:g}", exact, unseen=not exact and value <= counted)

    def _artifact(self, files: Files, artifact: Artifact) -> None:
        where = self._relative(artifact.path.removeprefix("file://"))
        if where is None or where not in files.sha256 or "://" in artifact.path:
            self._add("artifact", "unwitnessed")
        elif files.sha256[where] is not None:
            self._add("artifact", "true")
        else:
            # A relative path may count from a folder of the host's own.
            verdict: Verdict = "false" if artifact.path.startswith("/") else "not_seen"
            self._judge("artifact", verdict, None, artifact.path, "no such file in the workspace")

    # Verdicts

    def _compare(self, kind: str, claim: Json, seen: Json, holds: bool, *, unseen: bool = False) -> None:
        self._judge(kind, "unwitnessed" if unseen else "true" if holds else "false", None, claim, seen)

    def _judge(self, kind: str, verdict: Verdict, event: int | None, claim: Json, seen: Json, count: int = 1) -> None:
        self._add(kind, verdict, count)
        if verdict in self._listed:
            self._list(verdict, kind, event, claim, seen)

    def _add(self, kind: str, verdict: Verdict, count: int = 1) -> None:
        self._counts.setdefault(kind, Counter())[verdict] += count

    def _fail(self, kind: str, event: int | None, claim: Json, seen: Json) -> None:
        self._judge(kind, "false", event, claim, seen)

    def _list(self, verdict: str, kind: str, event: int | None, claim: Json, seen: Json) -> None:
        rows = self._listed[verdict]
        if len(rows) < FALSE_MAX:
            rows.append({"kind": kind, "event": event, "claimed": _shown(claim), "seen": _shown(seen)})

    def to_wire(self) -> dict[str, Json]:
        """Return the verdicts as the receipt has them."""
        counts = {kind: dict(sorted(found.items())) for kind, found in sorted(self._counts.items())}
        name = "unexplained" if self._last_opaque < 0 else "unnamed"
        more: dict[str, Json] = {name: self._unnamed_files} if self._unnamed_files else {}
        return {"counts": counts, "layers": list(self._layers), **self._listed, **more}


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
    **dict.fromkeys((kind for kind in CARRIED.values() if issubclass(kind, Carried)), Judge._note_reports),
    ToolCall: Judge._call,
    ToolResult: Judge._result,
    FileChanged: Judge._file,
    CommandExecuted: Judge._command,
    Warned: Judge._note_reports,
    TurnEnded: Judge._turned,
}

CLAIMING: Final[frozenset[type[Any]]] = frozenset(_EVENTS)
"""Types of events that claim something by themselves; any other may claim something in its `ext`."""


def _is_other(before: _Reported, after: _Reported) -> bool:
    """Return True if two reports with one id are two calls: the tools differ, or two inputs that are not empty."""
    if _compare_names(before.name, after.name) is False:
        return True
    return bool(before.sha256 and after.sha256) and before.sha256 != after.sha256


def _compare_names(one: str, other: str) -> bool | None:
    """Compare two names of a tool; None if one of them is no name, or a longer form of the other."""
    mine, theirs = plain_name(one), plain_name(other)
    if mine == theirs or not set(tool_names(one)).isdisjoint(tool_names(other)):
        return True
    return None if mine in theirs or theirs in mine or "unknown" in (mine, theirs) else False


def _sum(counters: Mapping[str, float | None], names: Iterable[str]) -> float:
    return sum(counters.get(name) or 0 for name in names)


_RANKS: Final = {"unsupported": 0, "restricted": 1, "emulated": 2, "native": 3}


def _is_more(name: str, level: Json, announced: Json) -> bool:
    """Return True if a level is higher than the one in the hello; names and levels outside the contract are ignored."""
    mine, theirs = read_level(level), read_level(announced if announced is not None else "unsupported")
    known = name in CAPABILITIES and mine is not None and theirs is not None
    return known and _RANKS[mine.name] > _RANKS[theirs.name]  # type: ignore[union-attr]


def _with_folders(paths: Iterable[str]) -> set[str]:
    """Return these paths and all folders above them."""
    found: set[str] = set()
    for path in paths:
        while path and path not in found:
            found.add(path)
            path = path.rpartition("/")[0]
    return found


def _cut(text: str) -> str:
    """Return as much of an id or a tool's name as is remembered."""
    return text[:ID_CHARS_MAX]


def _shown(value: Json) -> str:
    text = value if isinstance(value, str) else canonical.encode(value).decode()
    return text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 1] + "…"


class FalseClaim(msgspec.Struct, frozen=True):
    """A claim that contradicts what the control plane saw, or that it saw nothing of."""

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
    not_seen: tuple[FalseClaim, ...] = ()
    """The first `FALSE_MAX` claims that were not seen, where something may explain it."""
    unexplained: tuple[str, ...] = ()
    """Changed files that no event named and no reported tool or command may have changed."""
    unnamed: tuple[str, ...] = ()
    """Changed files that no event named, where a reported tool or command may have changed them."""


def audit(receipt: Receipt) -> Audited:
    """Read the verdicts out of a sealed receipt; they are not made again, as the files are gone."""

    def not_judged(why: str) -> Audited:
        return Audited(run_id=receipt.meta.run_id, verdict="not_judged", why=why)

    claimed = receipt.backplane.get("claimed")
    if "replay" in receipt.backplane:
        return not_judged("a replay claims nothing; audit the run it tells of")
    if not isinstance(claimed, dict):
        return not_judged("the receipt has no verdicts: refused, cut off, from elsewhere, or older than they are")
    if "failed" in claimed:
        return not_judged(str(claimed["failed"]))
    try:
        found = msgspec.convert({**claimed, "run_id": receipt.meta.run_id, "verdict": "no_alarm", "why": None}, Audited)
    except msgspec.ValidationError as error:
        return not_judged(f"its verdicts cannot be read: {error}")
    alarm = any(one.get("false") for one in found.counts.values())
    return msgspec.structs.replace(found, verdict="false_claims") if alarm else found
