"""What the control plane saw of a run, and the receipt it makes of it. Pure.

Messages and events go in, an unsealed receipt comes out. The child's word counts for its
outcome and its usage; everything else it says is kept apart as a claim. Sealing and storing
are done elsewhere.
"""

from __future__ import annotations

import posixpath
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec
from msgspec import field

from backplane.contract import canonical
from backplane.contract.approval import Decision
from backplane.contract.canonical import Json
from backplane.contract.capability import Manifest
from backplane.contract.envelope import Ask, Fatal, Hello
from backplane.contract.events import (
    AgentEvent,
    Carried,
    CommandExecuted,
    Failed,
    FileChanged,
    LossReported,
    ToolCall,
    ToolResult,
    TurnEnded,
    UsageReported,
    Warned,
    carried,
    read_event,
)
from backplane.contract.receipt import (
    CONTRACT_VERSION,
    FINDINGS,
    NAMES_MAX,
    Artifact,
    BackendIdentity,
    Outcome,
    Receipt,
    RunMetadata,
    Usage,
    Verification,
    failed_on,
)
from backplane.contract.work import PolicyProfile, WorkOrder, settings_of
from backplane.errors import CODES, BackplaneError, from_code
from backplane.policy.paths import TOOLS, below, touched
from backplane.policy.rules import TOOL_LISTS, Layer, Policy, Rule, enforcement, has_rules_of, tool_names
from backplane.receipts.calls import PATCH_TOOL, CallBook, CallRecord, neutral
from backplane.receipts.claims import CLAIMING, Judge
from backplane.receipts.folded import Folded, fold
from backplane.redact.secrets import NO_SECRETS, Redactor

PATHS_MAX: Final = 100_000
"""Files remembered as named by events; beyond that a reconciliation would help nobody."""

WORDS_CHARS_MAX: Final = 400
"""Of a child's stderr in an error: its last line or two. All that was kept is in the receipt."""

PATH_CHARS_MAX: Final = 4096
"""A longer path names no file that could be there."""

PATHS_CHARS_MAX: Final = 8 * 1024 * 1024
"""Length of all these paths together: a host that invents paths of megabytes is not remembered either."""

OWN_LINES_MAX: Final = 100_000
"""Events of our own told apart in a trace; a run with so many asks is not looked through."""

CLAIM_CHARS_MAX: Final = 64 * 1024
"""Of a text that a child claims beside ours; a patch of megabytes would stand in the receipt twice."""

LOSSES_MAX: Final = 1000
"""Losses of translation listed in a receipt; all are counted."""

NOISE_BYTES_MAX: Final = 64 * 1024
"""Bytes kept of a host's lines that are no messages: the banner that explains a failure is at the beginning."""

LOSSES_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of all these losses: a thousand usual ones take far less, and one that is larger is only counted."""

OBJECTIONS_MAX: Final = 100
"""Objections of the policy listed in a receipt; all are counted."""


CAUSE_CHARS_MAX: Final = 2000
"""Of each text of a cause: what a person reads on one screen."""


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    reason: str
    """complete, partial, failed, cancelled, interrupted, refused, deadline, idle, budget, max_turns,
    host_exit, protocol or store; an open list."""
    code: str | None = None
    exit_code: int | None = None
    signal: int | None = None

    def to_wire(self) -> dict[str, Json]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


def cause(error: BackplaneError) -> dict[str, Json]:
    """Write down why a run did not complete, for `usage_raw.backplane.error`: code, fact, next step, last words.

    Args:
        error: without secrets already.
    """
    texts = {"message": error.message, "hint": error.hint, "evidence": error.evidence}
    return {"code": error.foreign_code or error.code} | {
        name: text[:CAUSE_CHARS_MAX] for name, text in texts.items() if text
    }


def failure_of(receipt: Receipt) -> BackplaneError | None:
    """Return why a run did not complete: its error, else the last one that its agent reported.

    None where it did, and where nobody said why not: a person or a limit ended it, or its host gave no reason.
    """
    told = receipt.backplane.get("error")
    if isinstance(told, dict):
        code, message, hint, evidence = (told.get(name) for name in ("code", "message", "hint", "evidence"))
        return from_code(str(code), str(message or ""), hint=_text(hint), evidence=_text(evidence))
    end = receipt.backplane.get("end")
    if receipt.outcome == "complete" or (isinstance(end, dict) and end.get("reason") in STOPPED):
        return None
    said = None
    for event in receipt.trace:
        if isinstance(event, Failed):
            said = event
    if said is None:
        return None
    code = said.error_code if isinstance(said.error_code, str) else "execution_tool_failed"
    fact = f"the run ended as {receipt.outcome}: {said.message}"
    return from_code(code, fact, hint=f"backplane why {receipt.meta.run_id}")


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


STOPPED: Final = frozenset({"cancelled", "interrupted", "deadline", "idle", "budget", "max_turns"})
"""Ended by a person or a limit: what was done until then counts as part of the work."""

_RANK: Final[dict[str, int]] = {"failed": 0, "partial": 1, "complete": 2}


def outcome_of(end: End, *, claimed: Outcome | None, accepted: int) -> Outcome:
    """The outcome of a run: the child's, lowered but never raised by what was seen.

    Args:
        claimed: the outcome in the child's final; None when there was none.
        accepted: events accepted from the child.
    """
    if end.reason in STOPPED:
        return "partial" if accepted else "failed"
    if claimed is None or end.reason in ("refused", "host_exit", "protocol", "store"):
        return "failed"
    if end.reason in _RANK:
        return min(claimed, cast(Outcome, end.reason), key=_RANK.__getitem__)
    return claimed


def ends_in_final(end: End | None, error: BackplaneError | None) -> bool:
    """Whether the last message of an ended run is `final`: the host's was taken, or a person or a limit ended it."""
    assert end is not None, "the run has not ended"
    if end.reason in STOPPED or error is None:
        return end.reason not in ("refused", "host_exit", "protocol", "store")
    # The host's own word was good; its result breaks the policy, or could not be put into the files.
    return end.reason == "partial" or error.code == "execution_workspace_error"


_PIECE: Final = b'"type":"assistant_delta"}'
_OUTPUT: Final = b'{"ext":{"output":'

_NONE: Final[Mapping[Any, Any]] = MappingProxyType({})
"""Until something is put in its place: a table of its own for each would be a kilobyte of an idle run."""


class _Objection(msgspec.Struct, frozen=True):
    """An act or an attempt that a rule forbids, or that needed a question first."""

    rule: str
    reason: str
    call: CallRecord | None = None
    """None for an event that is no call."""

    @property
    def is_forbidden(self) -> bool:
        return self.rule != "require_approval_for"

    @property
    def is_settled(self) -> bool:
        """Return whether the call was asked about before it ran, and was done only as it was allowed."""
        call = self.call
        if call is None or not call.answer:
            return False
        if call.answer == "allow":
            return call.is_allowed and (not self.is_forbidden or call.is_changed)
        return not call.done


class RunState(msgspec.Struct, kw_only=True, eq=False):
    """What is known of one run so far; filled while it runs, read once at its end."""

    run_id: str
    order: WorkOrder
    started_ns: int
    backend: BackendIdentity
    mode: str = "mapped"
    extensions: tuple[str, ...] = ()
    said_hello: bool = False
    manifest: Manifest = Manifest()
    policy: Policy | None = None
    root: str = ""
    """Where the agent works: the order's root, the staged tree once it stands."""
    accepted: int = 0
    """Events accepted from the child."""
    counts: Counter[str] = field(default_factory=Counter)
    """Messages that had no effect, by why."""
    folded: Folded = Folded()
    own_lines: array[int] = field(default_factory=lambda: array("Q"))
    """Places in the trace of events that are the control plane's own, the first `OWN_LINES_MAX` of them."""
    claims: Judge | None = None
    """Judge of the host's claims; None before the first one."""
    claimed_events: tuple[int, str] | None = None
    """Number and hash of the events in the child's own trace, where there is one beside the streamed one."""
    claimed_keys: array[int] = field(default_factory=lambda: array("q"))
    """`event_key` of each event in the child's own trace."""
    claim: Receipt | None = None
    claim_raw: Mapping[str, Any] = _NONE
    usage_seen: Usage | None = None
    """What the model's service counted, where each of its answers came past us."""
    inner: Mapping[str, Json] = _NONE
    settings: dict[str, Json] = {}
    """The order's own under `config.vendor.abp`."""
    added: dict[str, Json] = {}
    """Members for `usage_raw.backplane`."""
    isolation: str = "off"
    """What was asked for, the configuration's and the order's together."""
    contained: Mapping[str, Json] = _NONE
    """What held the host, as the cage's label has it; empty where nothing was put around it."""
    plane: bool = False
    """The host is a control plane: what it tells of asks and checkpoints may be its own."""
    replayed: bool = False
    """What the events tell was done in another run."""
    held_by_system: Mapping[Rule, str] = _NONE
    """Rules held by the operating system, each with what it leaves open."""
    reported: tuple[int, str] = (0, "")
    """Number of errors that the host reported, and the message of the last one."""
    shortfall: tuple[str, str] = ("", "")
    """Why rules are held more weakly than asked, and the next step; empty texts if they are not."""
    guarded: bool = False
    """The host was a program of its own, under a guard."""
    start: str = "cold"
    """`warm`: the host was started before the order came."""
    claimed_paths: Set[str] = frozenset()
    _claimed_chars: int = 0
    redactor: Redactor = NO_SECRETS
    stderr: bytes = b""
    stderr_dropped: int = 0
    swept: int = 0
    _noise: list[bytes] = []
    _noise_bytes: int = 0
    _book: CallBook | None = None
    """None until the host asks about a call or reports one."""
    _unclaimed: int = 0
    """Changed files that no event names."""
    _turns: int = 0
    _losses: tuple[Json, ...] = ()
    _losses_bytes: int = 0
    limit: tuple[str, str] | None = None
    """The limit of the order that was reached, as a reason for the end and in words."""
    _objections: tuple[_Objection, ...] = ()
    """What the policy objects to."""
    _forbidden: tuple[dict[str, str], ...] = ()
    """Changes that were found and that no rule allows, as the receipt lists them."""

    def __post_init__(self) -> None:
        self.root = self.root or self.order.workspace.root
        self.settings = settings_of(self.order.config.vendor)

    def replays(self, told: dict[str, Json]) -> None:
        """The events tell of another run: nothing of them was done or spent here, so none of them is judged."""
        self.replayed, self.added = True, {**self.added, "replay": told}

    def hello(self, hello: Hello, manifest: Manifest) -> None:
        self.said_hello = True
        self.plane = hello.backends is not msgspec.UNSET
        self.manifest = manifest
        self.mode = hello.mode
        self.extensions = hello.extensions
        self.backend = hello.backend

    def noise(self, line: bytes) -> None:
        """Count a line that is no message, and keep the first `NOISE_BYTES_MAX` of these lines."""
        self.counts["noise_lines"] += 1
        kept = line[: max(NOISE_BYTES_MAX - self._noise_bytes, 0)]
        if kept:
            self._noise.append(kept)
            self._noise_bytes += len(kept) + 1

    @property
    def calls(self) -> CallBook:
        """The calls of the run, and what was asked about them."""
        if self._book is None:
            self._book = CallBook()
        return self._book

    def asked(self, ask: Ask) -> None:
        """Record a question of the host."""
        name, id = ask.name if isinstance(ask.name, str) else "", ask.tool_use_id or None
        if ask.kind == "patch":
            self.calls.ask_patch(ask.id, [_relative(path, self.root) for path in ask.files or ()], id=id)
            return
        input = None if ask.input is msgspec.UNSET else self._comparable(ask.input)
        if ask.kind == "tool":
            self.calls.ask(ask.id, name, input, id=id, files=self._written(name, input))
        elif ask.kind == "result":
            self.calls.ask_result(ask.id, name, input, id=id)

    def answered(self, ask: Ask, decision: Decision) -> None:
        """Record the answer to a question."""
        name = PATCH_TOOL if ask.kind == "patch" else ask.name if isinstance(ask.name, str) else ""
        input = decision.input if decision.input is msgspec.UNSET else self._comparable(decision.input)
        self.calls.answer(ask.id, name, decision.decision, input)

    def _comparable(self, input: Json) -> Json:
        """Return an input as events have it: without secrets, its paths below the root relative to it."""
        return below(self.root, self.redactor.json(input)[0])

    def _written(self, name: str, input: Json) -> list[str]:
        """Return the files that a call would change."""
        shape = TOOLS.get(neutral(name))
        if shape is None or not shape.writes:
            return []
        return [_relative(path, self.root) for path in touched(shape, input).paths if path]

    def _claim_path(self, path: str) -> None:
        if len(path) <= PATH_CHARS_MAX and self._claimed_chars + len(path) <= PATHS_CHARS_MAX:
            if not isinstance(self.claimed_paths, set):
                self.claimed_paths = set()
            self.claimed_paths.add(path)
            self._claimed_chars += len(path)

    def fold_claims(self, events: Sequence[AgentEvent], first: int) -> None:
        """Add what these events of the host claim; most kinds of events claim nothing and are passed over.

        Args:
            first: place of the first of them in the trace.
        """
        if self.replayed:
            return
        for number, event in enumerate(events, first):
            if type(event) in CLAIMING or event.ext is not msgspec.UNSET:
                if self.claims is None:
                    self.claims = Judge(lambda path: workspace_path(path, self.root))
                self.claims.take(number, event)

    def look(self, event: AgentEvent) -> CallRecord | None:
        """Record an event about files, tools, usage or the session; return the call that it belongs to."""
        assert self.policy is not None
        if self.replayed:
            return None
        if isinstance(event, Warned | Carried):
            self.folded = fold(self.folded, event)
            self._spend(event)
            if isinstance(event, LossReported):
                self._lose(event.body)
            return None
        turns_max = self.order.config.max_turns
        if turns_max is not None and self._turns >= turns_max and isinstance(event, ToolCall):
            self.limit = self.limit or ("max_turns", f"the agent goes on after {turns_max} turns (max_turns)")
        if isinstance(event, Failed):
            self.reported = (self.reported[0] + 1, event.message)
            return None
        if isinstance(event, FileChanged) and len(self.claimed_paths) < PATHS_MAX:
            self._claim_path(_relative(event.path, self.root))
        call, is_settled = self._note_call(event), False
        if isinstance(event, CommandExecuted):
            is_settled = (
                call is not None and call.answer == "allow" and "bash" in tool_names(call.asked_as or call.tool)
            )
        decision = self.policy.audit(event, root=self.root)
        if decision is None or decision.rule is None:
            return call
        self.counts["objections"] += 1
        objection = _Objection(decision.rule.name, decision.reason, call if isinstance(event, ToolCall) else None)
        if len(self._objections) < OBJECTIONS_MAX and not (is_settled and not objection.is_forbidden):
            self._objections += (objection,)
        return call

    def _note_call(self, event: AgentEvent) -> CallRecord | None:
        """Record a call, its command or its result, and return the call."""
        if isinstance(event, ToolCall):
            files = self._written(event.tool_name, event.input)
            return self.calls.called(event.tool_name, below(self.root, event.input), event.tool_use_id, files)
        if isinstance(event, ToolResult):
            return self.calls.ended(event.tool_name, event.tool_use_id, is_error=event.is_error)
        return self.calls.ran(event.command) if isinstance(event, CommandExecuted) else None

    def _lose(self, loss: Json) -> None:
        self.counts["losses"] += 1
        if len(self._losses) < LOSSES_MAX:
            size = len(canonical.encode(loss))
            if self._losses_bytes + size <= LOSSES_BYTES_MAX:
                self._losses += (loss,)
                self._losses_bytes += size

    def found(self, paths: Collection[str]) -> None:
        """Judge the files that did change, whoever says so.

        Args:
            paths: in the workspace, relative to it.
        """
        assert self.policy is not None
        # A file named `~` is no home folder here.
        decisions = (self.policy.decide_write(f"./{path}", self.root) for path in sorted(paths))
        rows = [(it.rule.name, it.reason) for it in decisions if it.rule is not None and it.rule.name == "deny_write"]
        self.counts["objections"] += len(rows)
        told = ((rule, self.redactor.text(reason)[0]) for rule, reason in rows[:OBJECTIONS_MAX])
        self._forbidden = tuple({"rule": rule, "reason": reason} for rule, reason in told)
        self._unclaimed = len(set(paths) - self.claimed_paths) if not self.replayed else 0
        if self._book is not None:
            # In place the user may have changed them meanwhile.
            here = paths if self.order.workspace.mode == "staged" else ()
            self._book.changed({*here, *self.claimed_paths})

    def _spend(self, event: Warned | Carried) -> None:
        """Turns and money, as far as the host reports them; what it does not report is not known here."""
        limits = self.order.config
        if isinstance(event, TurnEnded):
            self._turns += 1
            if limits.max_turns is not None and self._turns > limits.max_turns:
                self.limit = self.limit or ("max_turns", f"more than {limits.max_turns} turns (max_turns)")
            reason = event.body.get("stop_reason")  # A host that ends its turn at a limit of the order names it.
            if {"max_turns": limits.max_turns, "budget": limits.max_budget_usd}.get(str(reason)) is not None:
                self.limit = self.limit or (str(reason), event.message)
        if not isinstance(event, UsageReported):
            return
        used, cost = self.folded.usage, event.body.get("estimated_cost_usd")
        self.spent(used.input_tokens, used.output_tokens, cost if isinstance(cost, int | float) else None)

    def spent(self, input_tokens: int | None, output_tokens: int | None, usd: float | None) -> None:
        """Hold what was used so far against the order's budgets; None is unknown."""
        tokens_max, usd_max = self.settings.get("budget_tokens"), self.order.config.max_budget_usd
        known = (input_tokens or 0) + (output_tokens or 0)  # At least so many: enough to be too many.
        if isinstance(tokens_max, int) and known > tokens_max:
            self.limit = self.limit or ("budget", f"{known} tokens used of {tokens_max} (budget_tokens)")
        if usd_max is not None and usd is not None and usd > usd_max:
            self.limit = self.limit or ("budget", f"{usd:g} USD spent of {usd_max:g} (max_budget_usd)")

    def final(self, claim: Receipt, raw: dict[str, Any]) -> None:
        """Take in the host's own receipt; what it says was used counts for the order's budgets."""
        self.claim, self.claim_raw = claim, raw
        if not self.replayed:
            self.spent(claim.usage.input_tokens, claim.usage.output_tokens, claim.usage.estimated_cost_usd)

    def claimed_trace(self, trace: list[Json]) -> None:
        """Record the trace in a host's receipt: its size, its hash, and a hash of each event."""
        digest = canonical.sha256_hex(b",".join(canonical.encode(event) for event in trace))
        self.claimed_events = (len(trace), digest)
        events = (carried(read_event(event, now=lambda: "")) for event in trace)
        self.claimed_keys = array("q", filter(None, (self.event_key(canonical.encode(event)) for event in events)))

    def event_key(self, line: bytes) -> int:
        """Hash an event's canonical line without its time; 0 for a piece of text whose cuts the redactor moves."""
        if self.redactor.forms and (line.endswith(_PIECE) or line.startswith(_OUTPUT)):
            return 0
        start = line.rfind(b'"ts":"')
        return hash(line[:start] + line[line.find(b'"', start + 6) :]) or 1

    def fatal(self, fatal: Fatal) -> None:
        if isinstance(fatal.error_code, str) and fatal.error_code not in CODES:
            self.added["error_code"] = fatal.error_code
        if isinstance(fatal.receipt, dict):
            # In place of this comes the whole chain, when the receipt can be read.
            self.inner = {"receipt_sha256": fatal.receipt.get("receipt_sha256")}

    def ended(self, stderr: bytes, stderr_dropped: int, swept: int) -> None:
        self.stderr = self.clean(stderr) if stderr else b""
        self.stderr_dropped, self.swept = stderr_dropped, swept

    def clean(self, data: bytes) -> bytes:
        """Bytes of the child without the secrets of this run."""
        clean, count = self.redactor.data(data)
        self.counts["redacted"] += count
        return clean

    def clean_json(self, value: Json) -> Json:
        """The same for a JSON value."""
        clean, count = self.redactor.json(value)
        self.counts["redacted"] += count
        return clean

    def last_words(self, stderr: bytes) -> str | None:
        """The end of a child's stderr for an error message; None when it said nothing."""
        text = self.redactor.data(stderr)[0].decode("utf-8", "replace").strip()
        return text[-WORDS_CHARS_MAX:] or None

    @property
    def claimed_outcome(self) -> str:
        return self.claim.outcome if self.claim is not None else "failed"

    def members(self) -> dict[str, Json]:
        """Everything of `usage_raw.backplane` that was learnt while the run went on."""
        members = dict(self.added)
        if self._noise:
            text = b"\n".join(self._noise).decode("utf-8", "replace")
            members["noise"] = {"lines": self.counts["noise_lines"], "text": text}
        if self.stderr:
            tail = self.stderr.decode("utf-8", "replace")
            members["stderr"] = {"tail": tail, "dropped_bytes": self.stderr_dropped}
        if self.swept:
            members["swept"] = self.swept
        if self.inner:
            members["inner"] = self.inner
        if self.manifest.unknown:
            members["capabilities"] = self.manifest.unknown
        session = self.folded.session
        if isinstance(session, dict) and isinstance(session.get("id"), str) and self.settings.get("session"):
            members["session"] = {"id": session["id"]}
        if self.folded.retry_after_ms is not None:
            members["retry_after_ms"] = self.folded.retry_after_ms
        if (parent := self.settings.get("parent")) is not None:
            members["parent"] = parent
        if self._losses:
            members["losses"] = list(self._losses)
        members["counts"] = {name: count for name, count in sorted(self.counts.items()) if count}
        if self._book is not None and self._book.asked:
            members["calls"] = self._book.to_wire()
        if self.reported[0]:
            members["errors"] = {"count": self.reported[0], "last": self.reported[1][:CAUSE_CHARS_MAX]}
        if fail_on := self._fail_on():
            members["fail_on"] = fail_on
        members["enforcement"] = self._enforcement()
        return members

    def failed_on(self, claimed: Json) -> tuple[str, ...]:
        """Return the findings of its `fail_on` that a run without violations has, by the verdicts on its claims."""
        calls = self._book.to_wire() if self._book is not None else None
        return failed_on({"fail_on": self._fail_on(), "calls": calls, "claimed": claimed})

    def _fail_on(self) -> list[Json]:
        """The findings for which doors report the run as failed: the order's; all for the profile `ci`."""
        asked = self.settings.get("fail_on")
        if isinstance(asked, list):
            return list(dict.fromkeys(asked))
        return list(FINDINGS) if self.policy is not None and has_rules_of(self.policy.profile, "ci") else []

    def _enforcement(self) -> Json:
        if self.policy is None:
            return {"rules": []}
        held = self.held({} if self.replayed else self._layers())
        done, attempts = self._judged()
        for name, rows in (("violations", done + self.shortfalls()), ("attempts", attempts)):
            if rows:
                held[name] = rows
        # A rule's pattern and a reason are the caller's and the host's words.
        return self.redactor.json(held)[0]

    def _layers(self) -> dict[str, tuple[Layer, ...]]:
        """Return the layer that held the rules of each list, beside the operating system."""
        return {
            name: ("audit",) if self._why_not_host(name) else ("host",)
            for name in (*PolicyProfile.__struct_fields__, "workspace")
        }

    def _why_not_host(self, name: str) -> str:
        """Return why the host may not have enforced the rules of a list; empty if it has."""
        if "ask/1" not in self.extensions:
            return "the host does not ask before its tools run (ask/1)"
        if self._unclaimed:
            return f"changed files that no event names: {self._unclaimed}"
        if self._book is None:
            return ""
        if self._book.is_full or self._book.has_unasked() or self._book.breaches():
            return "not every call was asked about before it ran and done as it was answered"
        opaque = self._book.opaque() if name not in TOOL_LISTS else []
        return f"tools that do not name each place they touch: {', '.join(opaque)}" if opaque else ""

    def held(self, layers: Mapping[str, tuple[Layer, ...]] = _NONE) -> dict[str, Json]:
        """What holds the host and each rule, beside what it does itself.

        Args:
            layers: list name → layers in force for all its rules; none is known before the host has run.
        """
        assert self.policy is not None
        exact: dict[Rule, tuple[Layer, ...]] = dict.fromkeys(self.held_by_system, ("os",))
        rules: list[Any] = list(enforcement(self.policy, layers, exact))
        for row in rules:
            by_system = self.held_by_system.get(Rule(row["rule"], row["pattern"]))
            gaps = (
                [self._why_not_host(row["rule"]), _UNSEEN.get(row["rule"])] if row["layer"] == "audit" else [by_system]
            )
            if gap := "; ".join(filter(None, gaps)):
                row["gap"] = gap
        label = self.contained or _uncontained(self.isolation, self.guarded)
        told = self._told_shortfall(rules, label) if self.shortfall[0] else ""
        return {"rules": rules, **label, **({"shortfall": told} if told else {})}

    def _told_shortfall(self, rules: Sequence[Mapping[str, Json]], label: Mapping[str, Any]) -> str:
        """Return one line: which rules are not enforced in advance, why, and the next step; empty if all are."""
        count = sum(row["layer"] in (None, "audit") and row["rule"] not in TOOL_LISTS for row in rules)
        proxy = self.added.get("key_proxy")
        what = [f"{count} rule{'s' if count > 1 else ''}"] if count else []
        what += ["the credential stores"] if label["kinds"]["credentials"]["state"] == "none" else []
        what += ["the model's key"] if isinstance(proxy, dict) and proxy.get("state") != "enforced" else []
        listed = " and ".join([part for part in (", ".join(what[:-1]), *what[-1:]) if part])
        why, step = self.shortfall
        return f"{listed} {'is' if what == ['1 rule'] else 'are'} not held: {why}; {step}" if what else ""

    def violations(self) -> list[dict[str, str]]:
        """Return a row for each thing that was done although a rule forbids it."""
        return self._judged()[0]

    def shortfalls(self) -> list[dict[str, str]]:
        """Return a row for each list of the policy that was held more weakly than the order demands."""
        demanded = self.settings.get("enforcement")
        if self.replayed or not isinstance(demanded, dict):
            return []
        rows: list[Any] = self.held(self._layers())["rules"]
        weak = {row["rule"]: row for row in rows if row["layer"] in ("audit", None)}
        names = [name for name, layer in demanded.items() if layer in ("host", "vendor") and name in weak]
        text = "{} was to be held by {!r} and was only audited: {}"
        return [
            {"rule": name, "reason": text.format(name, demanded[name], weak[name].get("gap", "no layer held it"))}
            for name in names
        ]

    def _judged(self) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        """Split the objections into what was done and what failed unasked; a denied call is neither."""
        open_ = [it for it in self._objections if not it.is_settled]
        attempts = [it for it in open_ if self._is_attempt(it)]
        done = [{"rule": it.rule, "reason": it.reason} for it in open_ if it not in attempts]
        named = {id(it.call) for it in open_ if it.call is not None}
        breaches = self._book.breaches() if self._book is not None else []
        done += [{"rule": "ask", "reason": reason} for call, reason in breaches if id(call) not in named]
        done += [row for row in self._forbidden if row not in done]
        return done, [{"rule": it.rule, "reason": it.reason} for it in attempts]

    def _is_attempt(self, it: _Objection) -> bool:
        """Return True if a call failed before its host asked, and no call of its tool ran without a question."""
        call = it.call
        if call is None or call.answer or not call.failed or "ask/1" not in self.extensions:
            return False
        return call.tool not in self.calls.unasked_tools


def _uncontained(isolation: str, guarded: bool) -> dict[str, Json]:
    """The label of a host that nothing was put around."""
    names = ("files", "credentials", "sockets", "network", "syscalls", "limits")
    kinds: dict[str, Json] = {name: {"state": "none"} for name in names}
    kinds["processes"] = kinds["environment"] = {"state": "none"}
    if guarded:
        gap = "if the guard itself is killed, who has left the session stays"
        kinds["processes"] = {"state": "partial", "by": ["guard"], "gap": gap}
        gap = "what /proc shows of this user's other processes, ours too"
        kinds["environment"] = {"state": "partial", "by": ["allow list"], "gap": gap}
    return {"isolation": isolation, "layers": [], "kinds": kinds, "approvals": "unprotected"}


_UNSEEN: Final = {
    "deny_read": "what commands read is not seen",
    "deny_write": "what commands change among files that git ignores, and in .git, is not seen",
    "workspace": "what commands write outside is not seen",
    "allow_network": "where commands connect to is not seen",
    "deny_network": "where commands connect to is not seen",
}
"""What an audit of events, and of the patch, leaves open."""

_TYPED_FIELDS: Final = frozenset(Receipt.__struct_fields__)


def build(
    facts: RunState,
    end: End,
    *,
    trace: Sequence[AgentEvent],
    finished_ns: int,
    duration_ms: int,
    git_diff: str | None = None,
    git_status: str | None = None,
    artifacts: tuple[Artifact, ...] = (),
    harness_ok: bool,
    added: dict[str, Json],
    inner_verified: bool | None = False,
) -> Receipt:
    """Put together the unsealed receipt of a run.

    Args:
        finished_ns: since 1970; a clock that went back is not believed.
        added: members for `usage_raw.backplane` that were worked out after the run.
        inner_verified: the hash in the child's receipt holds for that receipt with the events that were seen; None
            when that cannot be told.
    """
    claim = facts.claim
    meta = RunMetadata(
        run_id=facts.run_id,
        work_order_id=facts.order.id,
        contract_version=CONTRACT_VERSION,
        started_at=canonical.timestamp_at(facts.started_ns),
        finished_at=canonical.timestamp_at(max(finished_ns, facts.started_ns)),
        duration_ms=duration_ms,
    )
    outcome = outcome_of(end, claimed=claim.outcome if claim else None, accepted=facts.accepted)
    usage, sources = _usage(facts)
    own = {**facts.members(), **added, "end": end.to_wire(), "usage": sources, "start": facts.start}
    claims = {**own.get("claims", {}), **_claims(facts, meta, outcome, git_diff)}
    if claims:
        own["claims"] = claims
    raw = {} if claim is None else claim.usage_raw
    usage_raw = dict(raw) if isinstance(raw, dict) else {"value": raw}
    if claim is not None and "backplane" in usage_raw:
        inner = {"backplane": usage_raw.pop("backplane"), "receipt_sha256": claim.receipt_sha256}
        own["inner"] = {**inner, "verified": inner_verified}
    return Receipt(
        meta=meta,
        backend=facts.backend,
        capabilities=facts.manifest.to_wire(),
        usage_raw={**usage_raw, "backplane": own},
        usage=usage,
        trace=trace,
        artifacts=(*(claim.artifacts if claim else ()), *artifacts),
        verification=Verification(harness_ok=harness_ok, git_diff=git_diff, git_status=git_status),
        outcome=outcome,
        mode="passthrough" if facts.mode == "passthrough" else "mapped",
    )


def _usage(facts: RunState) -> tuple[Usage, dict[str, str]]:
    """Return what was used, and the source of each number: the service, the host's final, or its reports on the way.

    Tokens in the final below those reported before cannot be, so the reported ones count. A lower cost or number of
    requests can: the earlier one may have been an estimate.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    claimed = facts.claim.usage if facts.claim else None
    words = {"seen": facts.usage_seen, "claimed": claimed, "reported": facts.folded.usage}
    for name in Usage.__struct_fields__:
        found = {whose: getattr(said, name, None) for whose, said in words.items()}
        if name.endswith("_tokens") and (found["reported"] or 0) > (found["claimed"] or 0):
            del found["claimed"]
        sources[name] = next((whose for whose, value in found.items() if value is not None), "unknown")
        values[name] = found.get(sources[name])
    return Usage(**values), sources


def _claims(facts: RunState, meta: RunMetadata, outcome: Outcome, git_diff: str | None) -> dict[str, Json]:
    """What the child's receipt says otherwise than was seen, and members the contract does not have."""
    claim = facts.claim
    if claim is None:
        return {}
    claims: dict[str, Json] = {
        name: getattr(claim.meta, name)
        for name in RunMetadata.__struct_fields__
        if getattr(claim.meta, name) != getattr(meta, name)
    }
    if claim.backend != facts.backend:
        claims["backend"] = msgspec.to_builtins(claim.backend)
    if claim.receipt_sha256 is not None:
        claims["receipt_sha256"] = claim.receipt_sha256
    if claim.outcome != outcome:
        claims["outcome"] = claim.outcome
    counters = (
        (name, getattr(claim.usage, name), getattr(facts.usage_seen, name, None)) for name in Usage.__struct_fields__
    )
    if other := {name: told for name, told, seen in counters if None not in (told, seen) and told != seen}:
        claims["usage"] = other
    if claim.verification.git_diff not in (None, git_diff):
        claims["git_diff"] = _brief(claim.verification.git_diff)
    if claim.verification.git_status is not None and claim.verification.git_diff != git_diff:
        claims["git_status"] = _brief(claim.verification.git_status)
    fields = {name: value for name, value in facts.claim_raw.items() if name not in _TYPED_FIELDS}
    if fields:
        claims["fields"] = fields
    return claims


def _brief(text: str) -> Json:
    """A claimed text, or its size and hash where nobody would read it."""
    if len(text) <= CLAIM_CHARS_MAX:
        return text
    return {"bytes": len(text.encode()), "sha256": canonical.sha256_hex(text.encode())}


def reconcile(claimed: Set[str], changed: set[str]) -> dict[str, Json]:
    """Compare the files the events named with the files the patch changes; empty when they agree."""
    lists = {"claimed_only": sorted(claimed - changed), "unclaimed": sorted(changed - claimed)}
    return {
        name: paths[:NAMES_MAX] if len(paths) <= NAMES_MAX else [*paths[:NAMES_MAX], f"… {len(paths) - NAMES_MAX} more"]
        for name, paths in lists.items()
        if paths
    }


def _relative(path: str, root: str) -> str:
    """A path as the patch would write it, as far as its text tells."""
    return posixpath.relpath(path, root) if path.startswith("/") else posixpath.normpath(path)


def workspace_path(path: str, root: str) -> str | None:
    """A path as the patch would write it; None outside of the workspace, and in git's own folder."""
    found = _relative(path, root)
    return None if found.split("/", 1)[0] in ("..", "", ".git") or "\0" in found else found
