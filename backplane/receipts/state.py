"""Records the state of a live run from messages and events; `build` makes the receipt from it. Pure.

Outcome and usage are taken from the host's receipt; everything else in it is recorded as a claim.
"""

from __future__ import annotations

import posixpath
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

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
from backplane.contract.receipt import FINDINGS, BackendIdentity, Receipt, Usage, failed_on
from backplane.contract.work import WorkOrder, settings_of
from backplane.errors import CODES
from backplane.policy.paths import TOOLS, below, touched
from backplane.policy.rules import Policy, Rule, has_rules_of, tool_names
from backplane.receipts.calls import PATCH_TOOL, CallBook, CallRecord, neutral
from backplane.receipts.claims import CLAIMING, Judge
from backplane.receipts.folded import Folded, fold
from backplane.redact.secrets import NO_SECRETS, Redactor

WORDS_CHARS_MAX: Final = 400
"""Maximum length of the end of a child's stderr in an error, some two lines; the receipt has all that was kept."""

PATHS_CHARS_MAX: Final = 8 << 20
"""Maximum characters of all remembered paths that events name, enough for some 100,000; further paths are ignored."""

OWN_LINES_MAX: Final = 100_000
"""Maximum length of `own_lines`; with more, the trace is not compared with the one in the host's receipt."""

LOSSES_MAX: Final = 1000
"""Maximum number of translation losses in a receipt's list; all are counted."""

LOSSES_BYTES_MAX: Final = 4 << 20
"""Maximum size in bytes of all listed losses; a thousand usual ones take far less. Further losses are only counted."""

NOISE_BYTES_MAX: Final = 64 << 10
"""Number of bytes kept of a host's lines that are no messages; the text that explains a failure comes first."""

OBJECTIONS_MAX: Final = 100
"""Maximum number of the policy's objections in a receipt's list; all are counted."""

_PIECE: Final = b'"type":"assistant_delta"}'
_OUTPUT: Final = b'{"ext":{"output":'

_NONE: Final[Mapping[Any, Any]] = MappingProxyType({})


class Objection(msgspec.Struct, frozen=True):
    """An act or an attempt that a rule forbids, or that needed a question first."""

    rule: str
    reason: str
    call: CallRecord | None = None
    """The call; None if the event is no call."""

    @property
    def is_forbidden(self) -> bool:
        return self.rule != "require_approval_for"

    @property
    def is_settled(self) -> bool:
        """Return True if the call was asked about, and then ran only as allowed, or did not run."""
        call = self.call
        if call is None or not call.answer:
            return False
        if call.answer == "allow":
            return call.is_allowed and (not self.is_forbidden or call.is_changed)
        return not call.done


class RunState(msgspec.Struct, kw_only=True, eq=False):
    """The state of one run, which is read once at the run's end."""

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
    """Folder in which the agent works: the order's root, or the staged tree once it exists."""
    accepted: int = 0
    """Number of events accepted from the host."""
    counts: Counter[str] = field(default_factory=Counter)
    """Reason → number of messages without effect; also counts losses, objections and redactions."""
    folded: Folded = Folded()
    own_lines: array[int] = field(default_factory=lambda: array("Q"))
    """Places in the trace of the control plane's own events, the first `OWN_LINES_MAX`."""
    claims: Judge | None = None
    """Judge of the host's claims; None before the first claim."""
    claimed_events: tuple[int, str] | None = None
    """Number and hash of the events in the trace of the host's receipt; None without such a trace."""
    claimed_keys: array[int] = field(default_factory=lambda: array("q"))
    """`event_key` of each event in that trace."""
    claim: Receipt | None = None
    claim_raw: Mapping[str, Any] = _NONE
    usage_seen: Usage | None = None
    """Usage by the model's service; None unless the proxy has seen all of its answers."""
    inner: Mapping[str, Json] = _NONE
    settings: dict[str, Json] = {}
    """The order's settings under `config.vendor.abp`."""
    added: dict[str, Json] = {}
    """Members for `usage_raw.backplane`."""
    isolation: str = "off"
    """Isolation mode that the configuration and the order set."""
    contained: Mapping[str, Json] = _NONE
    """Description of the host's sandbox for the receipt; empty without a sandbox."""
    plane: bool = False
    """True if the host is a control plane, which has its own asks and checkpoints."""
    replayed: bool = False
    """True if the events are those of another run."""
    held_by_system: Mapping[Rule, str] = _NONE
    """Rules that the operating system enforces, each with its gap."""
    reported: tuple[int, str] = (0, "")
    """Number of errors that the host reported, and the message of the last one."""
    shortfall: tuple[str, str] = ("", "")
    """Why rules are enforced more weakly than the order asks, and the next step; two empty texts if they are not."""
    guarded: bool = False
    """True if the host was a process under a guard."""
    start: str = "cold"
    """`warm` if the host was started before the order came."""
    claimed_paths: set[str] = field(default_factory=set)
    """Files that have changed according to the host's events."""
    _claimed_chars: int = 0
    redactor: Redactor = NO_SECRETS
    stderr: bytes = b""
    stderr_dropped: int = 0
    swept: int = 0
    noise: bytes = b""
    """The host's lines that are no messages, the first `NOISE_BYTES_MAX` bytes of them."""
    book: CallBook | None = None
    """Records the calls; None until the host asks about a call or reports one."""
    unclaimed: int = 0
    """Number of changed files that no event names."""
    _turns: int = 0
    losses: tuple[Json, ...] = ()
    _losses_bytes: int = 0
    limit: tuple[str, str] | None = None
    """Reason and message of the order's limit that was reached first; None if no limit was reached."""
    objections: tuple[Objection, ...] = ()
    """Acts to which the policy objects."""
    forbidden: tuple[dict[str, str], ...] = ()
    """Found changes that a rule forbids, as the receipt lists them."""

    def __post_init__(self) -> None:
        self.root = self.root or self.order.workspace.root
        self.settings = settings_of(self.order.config.vendor)

    def replays(self, told: dict[str, Json]) -> None:
        """Mark the events as those of another run; they are not judged, because this run did and spent nothing."""
        self.replayed, self.added = True, {**self.added, "replay": told}

    def hello(self, hello: Hello, manifest: Manifest) -> None:
        self.said_hello = True
        self.plane = hello.backends is not msgspec.UNSET
        self.manifest = manifest
        self.mode = hello.mode
        self.extensions = hello.extensions
        self.backend = hello.backend

    def add_noise(self, line: bytes) -> None:
        """Count a line that is no message, and keep it up to `NOISE_BYTES_MAX`."""
        self.counts["noise_lines"] += 1
        if len(self.noise) < NOISE_BYTES_MAX:
            self.noise = (self.noise + line + b"\n")[:NOISE_BYTES_MAX]

    @property
    def calls(self) -> CallBook:
        """The record of the run's calls and of the questions about them."""
        if self.book is None:
            self.book = CallBook()
        return self.book

    def asked(self, ask: Ask) -> None:
        """Record a question of the host."""
        name, id = ask.name if isinstance(ask.name, str) else "", ask.tool_use_id or None
        if ask.kind == "patch":
            self.calls.ask_patch(ask.id, [relative_path(path, self.root) for path in ask.files or ()], id=id)
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
        """Return an input in the form that it has in events: without secrets, paths below the root relative to it."""
        return below(self.root, self.redactor.json(input)[0])

    def _written(self, name: str, input: Json) -> list[str]:
        """Return the files that a call would change."""
        shape = TOOLS.get(neutral(name))
        if shape is None or not shape.writes:
            return []
        return [relative_path(path, self.root) for path in touched(shape, input).paths if path]

    def fold_claims(self, events: Sequence[AgentEvent], first: int) -> None:
        """Add the claims in these events of the host; most kinds of events claim nothing.

        Args:
            first: place of the first event in the trace.
        """
        if self.replayed:
            return
        for number, event in enumerate(events, first):
            if type(event) in CLAIMING or event.ext is not msgspec.UNSET:
                self.judge().take(number, event)

    def judge(self) -> Judge:
        """Return the judge of the host's claims."""
        if self.claims is None:
            has_plane = self.plane or self.root == "/"
            self.claims = Judge(lambda path: workspace_path(path, self.root), has_plane=has_plane)
        return self.claims

    def look(self, event: AgentEvent) -> CallRecord | None:
        """Record an event about files, tools, usage or the session; return its call, or None if it has none."""
        assert self.policy is not None
        if self.replayed:
            return None
        call = None
        match event:
            case Warned() | Carried():
                self.folded = fold(self.folded, event)
                self._spend(event)
                if isinstance(event, LossReported):
                    self._lose(event.body)
                return None
            case Failed():
                self.reported = (self.reported[0] + 1, event.message)
                return None
            case ToolCall():
                turns_max = self.order.config.max_turns
                if turns_max is not None and self._turns >= turns_max:
                    self._reach("max_turns", f"the agent goes on after {turns_max} turns (max_turns)")
                files = self._written(event.tool_name, event.input)
                call = self.calls.called(event.tool_name, below(self.root, event.input), event.tool_use_id, files)
            case ToolResult():
                call = self.calls.ended(event.tool_name, event.tool_use_id, is_error=event.is_error)
            case CommandExecuted():
                call = self.calls.ran(event.command)
            case FileChanged():
                path = relative_path(event.path, self.root)
                if self._claimed_chars + len(path) <= PATHS_CHARS_MAX:
                    self._claimed_chars += len(path)
                    self.claimed_paths.add(path)
        self._object(event, call)
        return call

    def _object(self, event: AgentEvent, call: CallRecord | None) -> None:
        """Note the objection that the policy has to an event, if any."""
        assert self.policy is not None
        decision = self.policy.audit(event, root=self.root)
        if decision is None or decision.rule is None:
            return
        self.counts["objections"] += 1
        objection = Objection(decision.rule.name, decision.reason, call if isinstance(event, ToolCall) else None)
        was_allowed = isinstance(event, CommandExecuted) and call is not None and call.answer == "allow"
        # If the call of a shell was allowed, so is its command.
        is_settled = was_allowed and call is not None and "bash" in tool_names(call.asked_as or call.tool)
        if len(self.objections) < OBJECTIONS_MAX and (objection.is_forbidden or not is_settled):
            self.objections += (objection,)

    def _lose(self, loss: Json) -> None:
        self.counts["losses"] += 1
        if len(self.losses) < LOSSES_MAX:
            size = len(canonical.encode(loss))
            if self._losses_bytes + size <= LOSSES_BYTES_MAX:
                self.losses += (loss,)
                self._losses_bytes += size

    def found(self, paths: Collection[str]) -> None:
        """Judge the files that have changed.

        Args:
            paths: paths of our own difference, relative to the workspace.
        """
        assert self.policy is not None
        # `./` is added because a relative path may begin with a file named `~`, which is no home folder.
        decisions = (self.policy.decide_write(f"./{path}", self.root) for path in sorted(paths))
        rows = [(it.rule.name, it.reason) for it in decisions if it.rule is not None and it.rule.name == "deny_write"]
        self.counts["objections"] += len(rows)
        told = ((rule, self.redactor.text(reason)[0]) for rule, reason in rows[:OBJECTIONS_MAX])
        self.forbidden = tuple({"rule": rule, "reason": reason} for rule, reason in told)
        self.unclaimed = len(set(paths) - self.claimed_paths) if not self.replayed else 0
        if self.book is not None:
            # In a workspace that is not staged, the user may have changed files meanwhile.
            here = paths if self.order.workspace.mode == "staged" else ()
            self.book.changed({*here, *self.claimed_paths})

    def _reach(self, reason: str, fact: str) -> None:
        """Note that a limit of the order is reached; the first one counts."""
        self.limit = self.limit or (reason, fact)

    def _spend(self, event: Warned | Carried) -> None:
        """Count the turns and the money that the host reports."""
        limits = self.order.config
        if isinstance(event, TurnEnded):
            self._turns += 1
            if limits.max_turns is not None and self._turns > limits.max_turns:
                self._reach("max_turns", f"more than {limits.max_turns} turns (max_turns)")
            reason = str(event.body.get("stop_reason"))  # A host that stops at a limit of the order names it.
            if {"max_turns": limits.max_turns, "budget": limits.max_budget_usd}.get(reason) is not None:
                self._reach(reason, event.message)
        elif isinstance(event, UsageReported):
            used, cost = self.folded.usage, event.body.get("estimated_cost_usd")
            self.spent(used.input_tokens, used.output_tokens, cost if isinstance(cost, int | float) else None)

    def spent(
        self, input_tokens: int | None, output_tokens: int | None, usd: float | None, unknown: Sequence[str] = ()
    ) -> None:
        """Compare the usage so far with the order's budgets, and set `limit` if one is exceeded; None is unknown.

        Args:
            unknown: budgets whose usage may be higher than reported; the run ends if the order sets one of them.
        """
        tokens_max, usd_max = self.settings.get("budget_tokens"), self.order.config.max_budget_usd
        known = (input_tokens or 0) + (output_tokens or 0)  # The least that was used, as unknown counters count as 0.
        if isinstance(tokens_max, int) and known > tokens_max:
            self._reach("budget", f"{known} tokens used of {tokens_max} (budget_tokens)")
        if usd_max is not None and usd is not None and usd > usd_max:
            self._reach("budget", f"{usd:g} USD spent of {usd_max:g} (max_budget_usd)")
        limits = {"budget_tokens": tokens_max, "max_budget_usd": usd_max}
        if lost := [name for name in unknown if limits[name] is not None]:
            fact = f"what is left of {lost[0]} is unknown: an answer broke off whose request does not limit it"
            self._reach("budget", fact)

    def final(self, claim: Receipt, raw: dict[str, Any]) -> None:
        """Record the host's own receipt, and compare its usage with the order's budgets."""
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
        """Hash an event's canonical line without its time; return 0 for a piece of text if there are secrets, because
        redaction may move text between pieces.
        """
        if self.redactor.forms and (line.endswith(_PIECE) or line.startswith(_OUTPUT)):
            return 0
        start = line.rfind(b'"ts":"')
        return hash(line[:start] + line[line.find(b'"', start + 6) :]) or 1

    def fatal(self, fatal: Fatal) -> None:
        if isinstance(fatal.error_code, str) and fatal.error_code not in CODES:
            self.added["error_code"] = fatal.error_code
        if isinstance(fatal.receipt, dict):
            # The whole inner receipt replaces this if it can be read.
            self.inner = {"receipt_sha256": fatal.receipt.get("receipt_sha256")}

    def ended(self, stderr: bytes, stderr_dropped: int, swept: int) -> None:
        self.stderr, count = self.redactor.data(stderr)
        self.counts["redacted"] += count
        self.stderr_dropped, self.swept = stderr_dropped, swept

    def clean_json(self, value: Json) -> Json:
        """Return a JSON value without the secrets of this run."""
        clean, count = self.redactor.json(value)
        self.counts["redacted"] += count
        return clean

    def last_words(self, stderr: bytes) -> str | None:
        """Return the end of a child's stderr for an error message; None if it is empty."""
        text = self.redactor.data(stderr)[0].decode("utf-8", "replace").strip()
        return text[-WORDS_CHARS_MAX:] or None

    @property
    def claimed_outcome(self) -> str:
        return self.claim.outcome if self.claim is not None else "failed"

    @property
    def fail_on(self) -> list[Json]:
        """Return the findings for which the run is reported as failed: the order's, or all for the profile `ci`."""
        asked = self.settings.get("fail_on")
        if isinstance(asked, list):
            return list(dict.fromkeys(asked))
        return list(FINDINGS) if self.policy is not None and has_rules_of(self.policy.profile, "ci") else []

    def failed_on(self, claimed: Json) -> tuple[str, ...]:
        """Return the findings in `fail_on` that a run without violations has.

        Args:
            claimed: the verdicts on the claims, as the receipt has them.
        """
        calls = self.book.to_wire() if self.book is not None else None
        return failed_on({"fail_on": self.fail_on, "calls": calls, "claimed": claimed})


def relative_path(path: str, root: str) -> str:
    """Return a path in the form that it has in the patch, without a look at the disk."""
    return posixpath.relpath(path, root) if path.startswith("/") else posixpath.normpath(path)


def workspace_path(path: str, root: str) -> str | None:
    """Return a path in the form that it has in the patch; None if it is outside of the workspace or in `.git`."""
    found = relative_path(path, root)
    return None if found.split("/", 1)[0] in ("..", "", ".git") or "\0" in found else found
