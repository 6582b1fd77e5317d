"""Judges a host's claims about its run; `docs/guide/claims.md` lists the kinds in a table. Pure.

Events go in as they arrive; the host's receipt and the findings of the control plane go in at the end. Counts by kind
and verdict come out, with a list of the claims that are false or were not seen.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Final, Literal, NamedTuple

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
from backplane.contract.receipt import CONTRACT_VERSION, NAMES_MAX, Artifact, Receipt, Usage
from backplane.policy.paths import CHANGE_NOTHING, touched
from backplane.policy.rules import tool_names, tool_shape
from backplane.receipts.claimed_texts import Likeness, changed_lines, plain_name, unchanged_file, written
from backplane.redact.secrets import MARK

Verdict = Literal["true", "false", "not_seen", "unwitnessed"]

LISTED_MAX: Final = 100
"""Maximum number of listed claims with each of the verdicts `false` and `not_seen`; all are counted."""

SHOWN_CHARS_MAX: Final = 200

KEPT_MAX: Final = 60_000
"""Maximum number of ids, tools and paths remembered for one run; claims about further ones are unwitnessed."""

KEPT_CHARS_MAX: Final = 1000
"""Maximum length of a remembered id, tool's name or path; vendors' ids have 20 to 40 characters."""

_PLANES_OWN: Final = {"ask": "kind", "answer": "decision", "checkpoint": "what"}
"""Member of `ext` that only the control plane writes → a member that its value has in that case."""
_HOST_ONLY: Final = ("usage", "session", "turn", "task", "retry", "loss", "output", "reasoning")
_INPUT_TOKENS: Final = ("input_tokens", "cache_read_tokens", "cache_write_tokens")
_TOKENS: Final = frozenset({*_INPUT_TOKENS, "output_tokens"})
_SUPPLIED: Final = frozenset({"hooks_pre_tool_use", "hooks_post_tool_use", "checkpointing"})
"""Capabilities that the control plane adds to a host's own."""
_RANKS: Final = {"unsupported": 0, "restricted": 1, "emulated": 2, "native": 3}


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the control plane itself observed, in addition to the events."""

    run_id: str
    order_id: str
    backend_id: str
    backend_version: str | None
    capabilities: Mapping[str, Json]
    mode: str
    violations: int
    """Number of acts that broke a rule of the policy; calls that no rule could judge are not counted."""
    changed: Set[str] | None
    """Paths that changed; None if the difference was not made, or is too long."""
    hidden: bool = False
    """True if files changed that the difference does not show, because git ignores them."""
    git_diff: str | None = None
    far: bool = False
    """True if the host worked on another machine."""
    plane: bool = False
    """True if the host is a control plane, or passes on the events of one."""
    inner_verified: bool | None = None
    usage: Usage | None = None
    """Usage by all answers of the model's service; None if some answers were not seen."""
    own_trace: Literal["same", "part", "other"] | None = None
    """Comparison of the receipt's trace with the streamed events; None if the receipt has no trace."""
    asked_passthrough: bool = False
    """True if the order asks for the vendor's own messages."""
    denied: int = 0
    """Number of calls that were denied, and therefore have no result."""
    modified: bool = False
    """True if a hook or a person changed a call's input, so that the events may show an input that was not used."""
    resumed: bool = False
    """True if the conversation began in an earlier run, whose calls and usage the host may include."""


class Files(msgspec.Struct, frozen=True):
    """Files of the workspace at the end of the run."""

    sha256: Mapping[str, str | None] = {}
    """Path → SHA-256 of its bytes, empty for a folder, None if it does not exist; only paths that could be read."""
    likeness: Mapping[int, Likeness] = {}
    """Place of a call that wrote a file → how the file compares with the text that it wrote."""
    real: Mapping[str, str] = {}
    """Path → the path with links resolved, if the two differ."""


class FalseClaim(msgspec.Struct, frozen=True):
    """A claim with the verdict `false` or `not_seen`."""

    kind: str
    event: int | None
    """Place in the trace, from 0; None for a member of the host's receipt."""
    claimed: str
    seen: str


class Judgement(NamedTuple):
    """The verdict on one claim, with the claimed and the seen value for the list."""

    verdict: Verdict
    claimed: Json = None
    seen: Json = None


_UNWITNESSED: Final = Judgement("unwitnessed")


class _Reported(msgspec.Struct):
    tool: str
    parent: str | None
    sha256: str
    """Hash of its input; empty if the input is empty."""
    number: int
    """Place in the trace."""
    open: bool = True


class _Write(msgspec.Struct, frozen=True):
    """A call that wrote a whole file."""

    path: str
    sha256: str
    number: int
    """Place in the trace."""
    redacted: bool


class _Late(msgspec.Struct, frozen=True):
    """A claim about another call, which is judged at the end of the run."""

    kind: str
    number: int
    id: str
    tool: str


class Judge:
    """Judges the claims of one run: `take` events as they arrive, `end` the run, then read `to_wire`.

    Args:
        relative: converts a path to its form in the difference; returns None for a path outside the workspace.
        has_plane: True if the host is a control plane or works on another machine, so that it may pass on asks and
            answers.
    """

    def __init__(self, relative: Callable[[str], str | None], *, has_plane: bool = False) -> None:
        self._relative, self._has_plane = relative, has_plane
        self._counts: dict[str, Counter[str]] = {}
        self._listed: dict[str, list[FalseClaim]] = {"false": [], "not_seen": []}
        self._unnamed_files: list[str] = []
        """Changed files that no event names."""
        self._layers: tuple[str, ...] = ("plane",)
        self._kept = 0
        """Number of remembered ids, tools and paths; at most `KEPT_MAX`."""
        self._calls: dict[str, list[_Reported]] = {}
        """Id → calls with this id: agents inside an agent may use the same ids, each below another parent."""
        self._unnamed: Counter[str] = Counter()
        """Tool → number of its open calls without an id."""
        self._late: list[_Late] = []
        self._answered = False
        """True if a result has named its call by the id."""
        self._paused = -1
        """Place of the last result or end of a turn; -1 if there is none."""
        self._all_kept = True
        """True while all calls are remembered."""
        self._writing: dict[str, _Write] = {}
        """Id of a call without a result, or its tool if it has no id → the file that it writes."""
        self._writes: dict[str, _Write] = {}
        """Path → the last successful write."""
        self._changes: dict[str, list[int]] = {}
        """Path → places of the events that name it as changed."""
        self._touched: dict[str, int] = {}
        """Path → place of the last call that may have changed it."""
        self._last_opaque = -1
        """Place of the last event that may have changed any file or undone a change, such as a command; -1 if none."""
        self._reported: dict[str, float] = {}

    def take(self, number: int, event: AgentEvent) -> None:
        """Add one event of the host.

        Args:
            number: the event's place in the trace.
        """
        judge = _EVENTS.get(type(event))
        if judge is not None:
            judge(self, number, event)
        if not isinstance(event.ext, dict):
            return
        for name, member in _PLANES_OWN.items():
            if name in event.ext:
                body = event.ext[name]
                # If `member` is missing, a host uses the name for something else.
                is_own = isinstance(body, dict) and member in body and not self._has_plane
                self._rule(
                    name, Judgement("false" if is_own else "unwitnessed", body, "we wrote no such event"), number
                )

    def _has_room(self, *texts: str) -> bool:
        """Return True if these texts can be remembered, and count them."""
        has_room = self._kept < KEPT_MAX and all(len(text) <= KEPT_CHARS_MAX for text in texts)
        self._kept += has_room
        return has_room

    # Calls and results

    def _call(self, number: int, event: ToolCall) -> None:
        self._count("tool_call", "unwitnessed")
        id, parent, tool = event.tool_use_id, event.parent_tool_use_id, event.tool_name
        if parent is not None:
            self._refer("tool_call.parent", number, parent, tool)
        if not self._has_room(id or "", parent or "", tool):
            self._all_kept = False
            if id is not None:
                self._count("tool_call.id", "unwitnessed")
        elif id is None:
            self._unnamed[tool] += 1
        else:
            empty = event.input in (None, {}, "", [])
            sha256 = "" if empty else canonical.sha256_hex(canonical.encode(event.input))
            self._open(id, _Reported(tool, parent, sha256, number))
        self._note_files(number, event)

    def _open(self, id: str, call: _Reported) -> None:
        calls = self._calls.setdefault(id, [])
        before = next((one for one in calls if one.parent == call.parent), None)
        if before is None:
            self._count("tool_call.id", "true")
        elif before.open and before.number > self._paused and _is_other(before, call):
            self._late.append(_Late("tool_call.id", call.number, id, call.tool))
        else:
            # The same call is reported again with its whole input, or each answer of the model counts ids anew.
            self._count("tool_call.id", "unwitnessed")
        if before is not None:
            calls.remove(before)
        calls.append(call)

    def _refer(self, kind: str, number: int, id: str, tool: str) -> None:
        """Note a claim about another call, which may be reported later."""
        if id in self._calls:
            self._count(kind, "true")
        elif self._has_room(id, tool):
            self._late.append(_Late(kind, number, id, tool))
        else:
            self._count(kind, "unwitnessed")

    def _result(self, number: int, event: ToolResult) -> None:
        self._count("tool_result", "unwitnessed")
        self._paused = number
        id, tool = event.tool_use_id, event.tool_name
        if id is None:
            self._unnamed[tool] -= tool in self._unnamed
        else:
            self._answered = True
            self._refer("tool_result.id", number, id, tool)
            self._close(number, tool, self._calls.get(id, []))
        write = self._writing.pop(id or tool, None)
        if write is not None and not event.is_error:
            self._writes[write.path] = write

    def _close(self, number: int, tool: str, calls: list[_Reported]) -> None:
        if not calls:
            return
        for call in calls:
            call.open = False
        alike = {_compare_names(tool, call.tool) for call in calls}
        verdict: Verdict = "true" if True in alike else "unwitnessed" if None in alike else "false"
        self._rule("tool_result.name", Judgement(verdict, tool, f"the call is of {calls[0].tool}"), number)

    def _turned(self, number: int, event: TurnEnded) -> None:
        self._paused = number
        self._note_reports(number, event)

    # Files

    def _note_files(self, number: int, event: ToolCall) -> None:
        """Note what a call may do to files."""
        names = tool_names(event.tool_name)
        write = written(event.tool_name, event.input)
        where = None if write is None else self._relative(_path(write.path))
        if write is not None and where is not None:
            self._touch(number, where)
            key = event.tool_use_id or event.tool_name
            if write.content is not None and self._has_room(key, where):
                sha256 = canonical.sha256_hex(write.content.encode("utf-8", "surrogatepass"))
                self._writing[key] = _Write(where, sha256, number, MARK in write.content)
        elif CHANGE_NOTHING.isdisjoint(names):
            shape = tool_shape(names)
            paths = touched(shape, event.input).paths if shape.writes else ()
            places = [self._relative(_path(path)) for path in paths]
            if not places or None in places:
                self._last_opaque = number
            for place in filter(None, places):
                self._touch(number, place)

    def _touch(self, number: int, where: str) -> None:
        if where in self._touched or self._has_room(where):
            self._touched[where] = number

    def _file(self, number: int, event: FileChanged) -> None:
        where = self._relative(_path(event.path))
        if where is not None and self._has_room(where):
            self._changes.setdefault(where, []).append(number)
        else:
            self._count("file_changed", "unwitnessed")

    def _command(self, number: int, event: CommandExecuted) -> None:
        self._count("command", "unwitnessed")
        self._last_opaque = number

    def _note_reports(self, number: int, event: Warned | Carried) -> None:
        ext = event.ext if isinstance(event.ext, dict) else {}
        for name in ext.keys() & _HOST_ONLY:
            self._count(name, "unwitnessed")
        usage = ext.get("usage")
        for name, value in usage.items() if isinstance(usage, dict) else ():
            if name in Usage.__struct_fields__ and isinstance(value, int | float):
                self._reported[name] = max(value, self._reported.get(name, value))

    # The end

    def wanted(self, claim: Receipt | None) -> list[str]:
        """Return the paths in the workspace whose final content is compared: written files and artifacts."""
        made = [self._relative(artifact.path) for artifact in claim.artifacts] if claim is not None else []
        return list(dict.fromkeys([*self._writes, *filter(None, made)]))[:NAMES_MAX]

    def differing(self, sha256: Mapping[str, str | None]) -> dict[int, str]:
        """Return the calls that wrote another content than the file has now: place of the call in the trace → path.

        Args:
            sha256: path → hash of the present file; files whose hash is None or empty are skipped.
        """
        return {
            write.number: path
            for path, write in self._writes.items()
            if sha256.get(path) not in (None, "", write.sha256)
        }

    def unseen(self, changed: Set[str] | None) -> list[str]:
        """Return the paths of claimed changes that are not in the difference; some may be links to paths that are."""
        return [path for path in self._changes if changed is not None and path not in changed][:NAMES_MAX]

    def end(self, seen: Seen, files: Files, claim: Receipt | None) -> None:
        """Judge the claims that need all events, the files or the host's receipt.

        Args:
            claim: the host's own receipt; None if it sent none.
        """
        layers = {
            "plane": True,
            "inner": claim is not None and seen.plane,
            "final": claim is not None and not seen.plane,
            "service": seen.usage is not None,
            "diff": seen.changed is not None,
            "tree": seen.changed is not None and not seen.far,
        }
        self._layers = tuple(name for name, is_active in layers.items() if is_active)
        for one in self._late:
            self._rule(one.kind, self._reference(seen, one), one.number)
        self._files_changed(seen, files)
        for path, write in self._writes.items():
            self._rule("file_content", self._content(seen, files, path, write), write.number)
        if claim is not None:
            self._final(seen, files, claim)

    def _reference(self, seen: Seen, one: _Late) -> Judgement:
        if one.kind == "tool_call.id":
            # A host that reports no results may count ids anew for each answer of the model.
            return Judgement("false" if self._answered else "not_seen", one.id, "another open call has this id")
        if one.id in self._calls:
            return Judgement("true")  # The other call was reported later.
        if seen.resumed or not self._all_kept or self._unnamed[one.tool] > 0:
            return _UNWITNESSED
        return Judgement("false" if self._calls else "not_seen", one.id, "no such call")

    def _files_changed(self, seen: Seen, files: Files) -> None:
        changed = seen.changed
        if changed is None:
            for places in self._changes.values():
                self._count("file_changed", "unwitnessed", len(places))
            return
        named = _with_folders(unicodedata.normalize("NFC", path) for path in changed)
        near = {path.rpartition("/")[2] for path in (*changed, *self._touched)}
        folders = _with_folders(self._touched)
        for path, places in self._changes.items():
            verdict: Verdict = "true"
            if named.isdisjoint((path, files.real.get(path, path), unicodedata.normalize("NFC", path))):
                # Another event may explain why the file is not in the difference.
                is_near = path.rpartition("/")[2] in near or path in folders
                may_be_undone = self._last_opaque >= 0 or len(places) > 1 or seen.hidden or is_near
                verdict = "not_seen" if may_be_undone else "false"
            self._rule("file_changed", Judgement(verdict, path, "not in the difference"), places[0], len(places))
        if self._changes or self._calls or self._unnamed:
            known = {*self._changes, *self._touched, *files.real.values()}
            unnamed = sorted(path for path in changed if known.isdisjoint(_with_folders([path])))
            self._unnamed_files = unnamed[:NAMES_MAX]

    def _content(self, seen: Seen, files: Files, path: str, write: _Write) -> Judgement:
        sha256, like = files.sha256.get(path), files.likeness.get(write.number)
        if sha256 == write.sha256 or like == "same":
            return Judgement("true")
        if path not in files.sha256 or write.redacted or seen.modified:
            return _UNWITNESSED
        is_last = self._touched.get(path) == write.number and write.number > self._last_opaque
        verdict: Verdict = "false" if is_last and like != "alike" else "not_seen"
        return Judgement(verdict, path, "other bytes" if sha256 else "no such file")

    def _final(self, seen: Seen, files: Files, claim: Receipt) -> None:
        for kind, judge in _RECEIPT.items():
            ruling = judge(seen, claim)
            if ruling is not None:
                # A host that is a control plane has its own ids, mode and outcome.
                self._rule(kind, _UNWITNESSED if seen.plane and kind != "inner" else ruling)
        if seen.plane:
            self._count("outcome", "unwitnessed")
            return
        self._rule("outcome", self._outcome(seen, claim))
        for name in Usage.__struct_fields__:
            if getattr(claim.usage, name) is not None:
                self._rule(f"usage.{name}", self._usage(seen, claim.usage, name))
        for artifact in claim.artifacts:
            self._rule("artifact", self._artifact(files, artifact))

    def _outcome(self, seen: Seen, claim: Receipt) -> Judgement:
        if claim.outcome != "complete":
            return _UNWITNESSED
        if seen.violations:
            return Judgement("false", "complete", f"{seen.violations} violations of the policy")
        named = [call.tool for calls in self._calls.values() for call in calls if call.open]
        unnamed = [tool for tool, count in self._unnamed.items() for _ in range(min(count, NAMES_MAX))]
        if left := [*named, *unnamed][seen.denied :]:
            return Judgement("not_seen", "complete", f"{len(left)} calls have no result: {', '.join(left[:5])}")
        return _UNWITNESSED

    def _usage(self, seen: Seen, usage: Usage, name: str) -> Judgement:
        value, reported = getattr(usage, name), self._reported.get(name)
        # Hosts count cached tokens as input tokens, or separately.
        parts = _INPUT_TOKENS if name == "input_tokens" else (name,)
        if reported is not None and value < reported:
            # Earlier costs may be estimates, and a continued conversation may include earlier runs.
            sure = name in _TOKENS and not seen.resumed and _sum(usage, parts) < reported
            return Judgement("false" if sure else "not_seen", value, f"{reported:g} was reported on the way")
        exact = getattr(seen.usage, name, None)
        if name not in _TOKENS or exact is None:
            return _UNWITNESSED
        counted = _sum(seen.usage, parts)
        # Fewer tokens than the service counted prove nothing: an agent may leave out side requests, for a title, say.
        verdict: Verdict = "true" if value == exact else "unwitnessed" if value <= counted else "false"
        return Judgement(verdict, value, f"the service counted {counted:g}")

    def _artifact(self, files: Files, artifact: Artifact) -> Judgement:
        where = self._relative(_path(artifact.path))
        if where is None or where not in files.sha256 or "://" in artifact.path:
            return _UNWITNESSED
        if files.sha256[where] is not None:
            return Judgement("true")
        # A relative path may start at a folder that only the host knows.
        return Judgement("false" if artifact.path.startswith("/") else "not_seen", artifact.path, "no such file")

    # Verdicts

    def _count(self, kind: str, verdict: Verdict, count: int = 1) -> None:
        self._counts.setdefault(kind, Counter())[verdict] += count

    def _rule(self, kind: str, ruling: Judgement, event: int | None = None, count: int = 1) -> None:
        """Count a verdict, and list the claim if it is false or was not seen."""
        self._count(kind, ruling.verdict, count)
        rows = self._listed.get(ruling.verdict)
        if rows is not None and len(rows) < LISTED_MAX:
            rows.append(FalseClaim(kind, event, _shown(ruling.claimed), _shown(ruling.seen)))

    def to_wire(self) -> dict[str, Json]:
        """Return the verdicts as the receipt has them."""
        counts = {kind: dict(sorted(found.items())) for kind, found in sorted(self._counts.items())}
        wire: dict[str, Json] = {"counts": counts, "layers": list(self._layers), **msgspec.to_builtins(self._listed)}
        if self._unnamed_files:
            wire["unexplained" if self._last_opaque < 0 else "unnamed"] = self._unnamed_files
        return wire


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
"""Types of events that are claims; events of other types may contain claims in `ext`."""


# Members of the host's receipt ----------------------------------------------------------------------------------------


def _same(claimed: str, seen: str) -> Judgement:
    return Judgement("true" if claimed == seen else "false", claimed, seen)


def _version(seen: Seen, claim: Receipt) -> Judgement | None:
    mine, theirs = seen.backend_version, claim.backend.backend_version
    if mine is None or theirs is None:
        return None
    short, long = sorted((mine.removeprefix("v"), theirs.removeprefix("v")), key=len)
    # `1.2`, `1.2.0` and `1.2 (build 7)` may be one version.
    is_longer = short != long and long.startswith(short) and not long[len(short)].isalnum()
    return _UNWITNESSED if is_longer else Judgement("true" if short == long else "false", theirs, mine)


def _capabilities(seen: Seen, claim: Receipt) -> Judgement:
    levels = {name: level for name, level in claim.capabilities.items() if name not in _SUPPLIED}
    if more := sorted(name for name, level in levels.items() if _is_more(name, level, seen.capabilities.get(name))):
        return Judgement("false", ", ".join(more), "its hello says less")
    is_same = all(seen.capabilities.get(name) == level for name, level in levels.items())
    return Judgement("true" if is_same else "unwitnessed")


def _is_more(name: str, level: Json, announced: Json) -> bool:
    """Return True if a level is higher than the one in the hello; names and levels outside the contract are ignored."""
    mine, theirs = read_level(level), read_level(announced if announced is not None else "unsupported")
    if name not in CAPABILITIES or mine is None or theirs is None:
        return False
    return _RANKS[mine.name] > _RANKS[theirs.name]


def _mode(seen: Seen, claim: Receipt) -> Judgement:
    if claim.mode == seen.mode:
        return Judgement("true")
    if claim.mode == "mapped":  # This is also the mode of a receipt that names none.
        return _UNWITNESSED
    return Judgement("not_seen" if seen.asked_passthrough else "false", claim.mode, "no message of the vendor's came")


def _git_diff(seen: Seen, claim: Receipt) -> Judgement | None:
    diff = claim.verification.git_diff
    if diff is None:
        return None
    if seen.changed is None or seen.far or seen.git_diff is None:
        return _UNWITNESSED
    mine, theirs = changed_lines(seen.git_diff), changed_lines(diff)
    # The host's diff may include files that were changed before the run, so more lines are not proof of a false claim.
    more = next((line for line in theirs - mine if line[1:].strip()), None)
    if more is None and not theirs:
        more = unchanged_file(diff, seen.changed)
    if more is not None:
        return Judgement("not_seen", diff, f"not in the difference: {more}")
    return Judgement("true" if mine == theirs else "unwitnessed")


def _git_status(seen: Seen, claim: Receipt) -> Judgement | None:
    status = claim.verification.git_status
    if status is None:
        return None
    more = None if seen.changed is None or seen.far else unchanged_file(status, seen.changed)
    return _UNWITNESSED if more is None else Judgement("not_seen", status, f"not in the difference: {more}")


def _trace(seen: Seen, claim: Receipt) -> Judgement | None:
    verdicts: dict[str, Verdict] = {"same": "true", "part": "unwitnessed", "other": "false"}
    return None if seen.own_trace is None else Judgement(verdicts[seen.own_trace], "its own", "other events came")


def _inner(seen: Seen, claim: Receipt) -> Judgement | None:
    if seen.inner_verified is None or not seen.plane:
        return None
    return Judgement("true" if seen.inner_verified else "false", claim.receipt_sha256, "its content hashes otherwise")


_RECEIPT: Final[Mapping[str, Callable[[Seen, Receipt], Judgement | None]]] = {
    "meta.run_id": lambda seen, claim: _same(claim.meta.run_id, seen.run_id),
    "meta.work_order_id": lambda seen, claim: _same(claim.meta.work_order_id, seen.order_id),
    "meta.contract_version": lambda seen, claim: _same(claim.meta.contract_version, CONTRACT_VERSION),
    "backend.id": lambda seen, claim: _same(claim.backend.id, seen.backend_id),
    "backend.version": _version,
    "capabilities": _capabilities,
    "mode": _mode,
    "git_diff": _git_diff,
    "git_status": _git_status,
    "trace": _trace,
    "inner": _inner,
}
"""Kind of a claim in the receipt → function that judges it; returns None if there is no such claim."""


def _path(path: str) -> str:
    return path.removeprefix("file://")


def _is_other(before: _Reported, after: _Reported) -> bool:
    """Return True if two reports with one id are two calls: their tools or their non-empty inputs differ."""
    if _compare_names(before.tool, after.tool) is False:
        return True
    return bool(before.sha256 and after.sha256) and before.sha256 != after.sha256


def _compare_names(one: str, other: str) -> bool | None:
    """Return True if two names mean the same tool; None if one contains the other or is `unknown`, else False."""
    mine, theirs = plain_name(one), plain_name(other)
    if mine == theirs or not set(tool_names(one)).isdisjoint(tool_names(other)):
        return True
    return None if mine in theirs or theirs in mine or "unknown" in (mine, theirs) else False


def _sum(usage: Usage | None, names: Iterable[str]) -> float:
    return sum(getattr(usage, name, None) or 0 for name in names)


def _with_folders(paths: Iterable[str]) -> set[str]:
    """Return these paths and all folders above them."""
    found: set[str] = set()
    for path in paths:
        while path and path not in found:
            found.add(path)
            path = path.rpartition("/")[0]
    return found


def _shown(value: Json) -> str:
    text = value if isinstance(value, str) else canonical.encode(value).decode()
    return text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 1] + "…"


# The verdicts in a sealed receipt -------------------------------------------------------------------------------------


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts of one sealed run, as `receipts audit` gives them."""

    run_id: str
    verdict: Literal["no_alarm", "false_claims", "not_judged"]
    why: str | None = None
    """Why the run was not judged; None if it was."""
    layers: tuple[str, ...] = ()
    counts: dict[str, dict[Verdict, int]] = {}
    """Kind → verdict → number of claims."""
    false: tuple[FalseClaim, ...] = ()
    """The first `LISTED_MAX` false claims."""
    not_seen: tuple[FalseClaim, ...] = ()
    """The first `LISTED_MAX` claims that were not seen, though something may explain that."""
    unexplained: tuple[str, ...] = ()
    """Changed files that no event named and no reported tool or command may have changed."""
    unnamed: tuple[str, ...] = ()
    """Changed files that no event named, but that a reported tool or command may have changed."""


def audit(receipt: Receipt) -> Audited:
    """Read the verdicts in a sealed receipt; the claims are not judged again, because the files are gone."""
    claimed = receipt.backplane.get("claimed")
    if "replay" in receipt.backplane:
        why = "a replay claims nothing; audit the run that it repeats"
    elif not isinstance(claimed, dict):
        why = "the receipt has no verdicts: refused, cut off, from elsewhere, or older than they are"
    elif "failed" in claimed:
        why = str(claimed["failed"])
    else:
        try:
            found = msgspec.convert({**claimed, "run_id": receipt.meta.run_id, "verdict": "no_alarm"}, Audited)
        except msgspec.ValidationError as error:
            why = f"its verdicts cannot be read: {error}"
        else:
            has_alarm = any(one.get("false") for one in found.counts.values())
            return msgspec.structs.replace(found, why=None, verdict="false_claims" if has_alarm else "no_alarm")
    return Audited(run_id=receipt.meta.run_id, verdict="not_judged", why=why)
