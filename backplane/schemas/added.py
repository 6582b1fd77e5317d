"""The shape of what the control plane adds to a receipt, under `usage_raw.backplane`: by hand, as no struct is it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from backplane.contract.canonical import Json
from backplane.contract.receipt import Usage
from backplane.errors import CODES
from backplane.schemas.facts import TIME_WRITTEN

_COUNTS: Final[Json] = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}}
_SHA256: Final[Json] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_STRINGS: Final[Json] = {"type": "array", "items": {"type": "string"}}
_COUNT: Final[Json] = {"type": "integer", "minimum": 0}
_STRING: Final[Json] = {"type": "string"}
_NULLABLE: Final[Json] = {"type": ["string", "null"]}


def _object(about: str, required: Sequence[str] = (), **members: Json) -> Json:
    return {"description": about, "type": "object", "properties": members, "required": list(required)}


def _open(about: str, **members: Json) -> Json:
    """An object of somebody else's members, beside these."""
    return {**_object(about, **members), "additionalProperties": True}


_JUDGED: Final[Json] = {
    "type": "array",
    "items": _object("One rule that was not kept, and how.", ["rule", "reason"], rule=_STRING, reason=_STRING),
}
_CLAIMS: Final[dict[str, Json]] = {
    "type": "array",
    "items": _object(
        "One claim; `event` is its place in the trace.",
        ["kind", "event", "claimed", "seen"],
        kind={"type": "string"},
        event={"type": ["integer", "null"]},
        claimed={"type": "string"},
        seen={"type": "string"},
    ),
}
_WHOSE: Final[Json] = {"enum": ["seen", "claimed", "reported", "unknown"]}
_TEXT_OR_SIZE: Final[Json] = {"type": ["string", "object"], "properties": {"bytes": _COUNT, "sha256": _SHA256}}


BACKPLANE: Final[Json] = _object(
    "What the control plane adds to a receipt, under `usage_raw.backplane`; open for more members.",
    ["end"],
    end=_object(
        "How the run ended. Reasons so far: complete, partial, failed, cancelled, interrupted, refused, deadline, "
        "idle, budget, max_turns, host_exit, protocol, store.",
        ["reason"],
        reason={"type": "string"},
        code={"enum": list(CODES)},
        exit_code={"type": "integer"},
        signal={"type": "integer"},
    ),
    error=_object(
        "Why the run did not complete: its code, or a host's own; the fact; the next step; last words of the host.",
        ["code"],
        code={"type": "string"},
        message={"type": "string"},
        hint={"type": "string"},
        evidence={"type": "string"},
    ),
    claims=_object(
        "What the host's receipt says of itself and was seen otherwise, member by member; a long text by its size and "
        "hash.",
        run_id=_STRING,
        work_order_id=_STRING,
        contract_version=_STRING,
        started_at={"type": "string", "pattern": TIME_WRITTEN},
        finished_at={"type": "string", "pattern": TIME_WRITTEN},
        duration_ms=_COUNT,
        backend=_object("As it named itself.", id=_STRING, backend_version=_NULLABLE, adapter_version=_NULLABLE),
        receipt_sha256=_STRING,
        outcome={"enum": ["complete", "partial", "failed"]},
        usage={"description": "Counters that the service was seen to say otherwise.", **_COUNTS},
        git_diff=_TEXT_OR_SIZE,
        git_status=_TEXT_OR_SIZE,
        trace=_object("Its own trace, where that is another than it streamed.", count=_COUNT, sha256=_SHA256),
        fields=_open("Members of its receipt that the contract does not have."),
    ),
    reconciliation=_object(
        "Where the events' claims and the files' difference do not meet; empty when they do.",
        claimed_only={"description": "Files that events named, and that are not changed.", **_STRINGS},
        unclaimed={"description": "Files that are changed, and that no event named.", **_STRINGS},
    ),
    enforcement=_object(
        "What held the host and each rule (os, host, vendor, audit, or null for none), what that left open (gap), "
        "what broke a rule all the same (violations: the outcome is not complete), and what a rule forbids and the "
        "agent itself refused before it asked (attempts).",
        isolation={"enum": ["required", "best_effort", "off"]},
        layers={
            "type": "array",
            "items": _object(
                "One means of this machine to hold a host.",
                ["name", "state"],
                name=_STRING,
                state={"enum": ["used", "usable", "missing"]},
                version=_STRING,
                why={"description": "Why it is missing.", **_STRING},
            ),
        },
        kinds={
            "description": "By kind of thing held: files, credentials, sockets, network, processes and so on.",
            "type": "object",
            "additionalProperties": _object(
                "How it was held.",
                ["state"],
                state={"enum": ["enforced", "partial", "advisory", "none"]},
                by={"description": "By what.", **_STRINGS},
                covers={"description": "What of it was held.", **_STRING},
                gap={"description": "What that left open.", **_STRING},
                why={"description": "Why nothing held it.", **_STRING},
                note={"description": "What to know of it.", **_STRING},
                not_there={"description": "Folders to write in that were not there.", **_STRINGS},
            ),
        },
        approvals={
            "description": "Whether what the host started could reach the answers to its own asks.",
            "enum": ["protected", "unprotected"],
        },
        rules={
            "type": "array",
            "items": _object(
                "One rule of the policy, and the strongest layer that held it; null where none did.",
                ["rule", "layer"],
                rule=_STRING,
                pattern=_NULLABLE,
                layer={"enum": ["os", "host", "vendor", "audit", None]},
                gap={"description": "What that layer left open.", **_STRING},
            ),
        },
        shortfall={"type": "string", "description": "What is enforced more weakly than asked, why, and the next step."},
        violations=_JUDGED,
        attempts=_JUDGED,
    ),
    calls=_object(
        "Calls of tools and patches that the host asked about; a question to the user does not count. Absent if it "
        "asked about none.",
        ["asked", "allowed", "denied", "denied_then_done"],
        asked=_COUNT,
        allowed={"description": "Allowed by a policy, a hook or an answer, as they were or modified.", **_COUNT},
        denied={"description": "Denied by a policy, a hook, an answer or a default.", **_COUNT},
        denied_then_done={"description": "Denied, and done all the same: each is a violation.", **_COUNT},
    ),
    errors=_object(
        "Errors that the host reported in events of its own, also in a complete run. Absent if it reported none.",
        ["count", "last"],
        count=_COUNT,
        last={"description": "Message of the last one.", **_STRING},
    ),
    fail_on={
        "description": "Findings for which doors report a complete run as failed, with exit code 3: the order's "
        "`config.vendor.abp.fail_on`; all where its policy has the rules of `ci`. With one of them the lane does not "
        "apply its patch.",
        "type": "array",
        "items": {"enum": ["denied", "false-claims", "violations"]},
    },
    claimed=_object(
        "What the host claims and what was seen of it (docs/guide/claims.md): verdicts by kind, the layers in "
        "force, the false claims and those that were not seen. Absent where nothing was sent, in a replay, and where "
        "recovery sealed the run.",
        counts={"type": "object", "additionalProperties": _COUNTS},
        layers={"type": "array", "items": {"enum": ["plane", "final", "inner", "service", "diff", "tree"]}},
        false=_CLAIMS,
        not_seen={"description": "Claims that were not seen, where something may explain it.", **_CLAIMS},
        unexplained={
            "description": "Changed files that no event named, and that no reported tool or command may have changed.",
            **_STRINGS,
        },
        unnamed={
            "description": "Changed files that no event named, but that a reported tool or command may have changed.",
            **_STRINGS,
        },
        failed={"description": "Why nothing was judged.", "type": "string"},
    ),
    losses={"description": "What a translation could not carry.", "type": "array", "items": True},
    unheard={"description": "JSON pointers of the order's members that had no effect.", **_STRINGS},
    no_history={"description": "Why the copy lacks the git history that its original has.", "type": "string"},
    lenient={"description": "The order was taken although some of its members are unknown, as it says.", "const": True},
    route=_open(
        "Which backend was chosen for an order that named none, and why the others lost; see the schema `cli_route`."
    ),
    retry_after_ms={"description": "The pause that its model's service asked for.", "type": "integer", "minimum": 0},
    cost=_open("What the run cost, and how that is known."),
    cancel_reason={"description": "Why it was cancelled, by whoever did.", **_STRING},
    error_code={
        "description": "A host's own code, which is none of the contract's: the end's is `internal`.",
        **_STRING,
    },
    stderr=_object(
        "The end of what the host wrote on its standard error.",
        ["tail", "dropped_bytes"],
        tail=_STRING,
        dropped_bytes=_COUNT,
    ),
    swept={"description": "Processes that the host left behind, and that were killed.", **_COUNT},
    lane=_object("The result was put into the original.", applied={"type": ["integer", "null"], "minimum": 0}),
    plugin=_object("The wheel that the host came with.", wheel=_STRING, version=_STRING),
    mcp_servers=_object(
        "Servers of the configuration that the host was given, and those that it can be no client of.",
        ["given", "not_given"],
        given=_STRINGS,
        not_given=_STRINGS,
    ),
    network=_object(
        "Connections through our proxy: how many, where to, and why one was refused.",
        allowed=_COUNT,
        denied=_COUNT,
        hosts=_STRINGS,
        refusals=_STRINGS,
    ),
    key_proxy=_object(
        "Requests through the proxy that has its model's key, and how well the key is kept from the host "
        "(as `enforcement.kinds.environment`).",
        ["state", "with_key", "without_key", "unanswered", "paths", "answers"],
        state={"enum": ["enforced", "partial", "none"]},
        gap=_STRING,
        with_key=_COUNT,
        without_key={"description": "Requests that had no place for the key, and were refused.", **_COUNT},
        unanswered={"description": "The service could not be reached, or broke off.", **_COUNT},
        paths={"description": "`METHOD /path` → requests; those beyond the first 32 paths as `other`.", **_COUNTS},
        answers=_object(
            "Answers of models: those whose token counters were read, and those that broke off or said none.",
            ["counted", "uncounted"],
            counted=_COUNT,
            uncounted=_COUNT,
            models={"description": "Model, as the service calls the one that answered → answers.", **_COUNTS},
        ),
    ),
    noise=_object(
        "Output of the host that was no message: its lines and its beginning.",
        lines={"type": "integer", "minimum": 0},
        text={"type": "string"},
    ),
    patch=_object(
        "The patch that lies beside the receipt, and the hash of `patch.json` there, from which it is applied.",
        ["bytes", "sha256"],
        bytes={"type": "integer", "minimum": 0},
        sha256=_SHA256,
        record_sha256=_SHA256,
        files={"type": "integer", "minimum": 0},
        ignored={"description": "Changed files that git ignores: they are in no patch.", **_COUNT},
        left_out={"description": "Changed files that the patch cannot hold.", **_STRINGS},
        redacted={"description": "Secrets in it: the receipt has no text of it.", **_COUNT},
    ),
    replay=_object(
        "The run is a replay of a stored one: its events tell what was done there, and its patch was taken or not.",
        ["run", "with_patch"],
        run={"type": "string"},
        receipt_sha256=_SHA256,
        with_patch={"type": "boolean"},
    ),
    check=_object(
        "The run is the check of what another one made, in a comparison: no run of its own for `cost` and `last`.",
        ["of"],
        of={"type": "string"},
    ),
    compare=_object(
        "The run is part of a comparison, `comparisons/ID.json` of the state folder.",
        ["id", "side", "round"],
        id={"type": "string"},
        side={"type": "string"},
        round={"type": "integer", "minimum": 1},
    ),
    cache=_object(
        "Of an order declared pure: the key of all that its result depends on, and whether it was served from the "
        "store; then `replay` names the original run.",
        ["key", "hit"],
        key=_SHA256,
        hit={"type": "boolean"},
    ),
    parent={
        "description": "The session and run before this one, or the outer plane's run.",
        "type": ["string", "object"],
        "properties": {"session": _STRING, "run": _NULLABLE},
        "additionalProperties": True,
    },
    budget=_object(
        "What a child holds of its parent's budget, in millionths of a dollar and tokens, what was left, and the rule "
        "that held it; null is without a bound.",
        ["parent", "reserved_usd_micros", "left_usd_micros", "reserved_tokens", "left_tokens", "rule"],
        parent={"type": "string"},
        reserved_usd_micros={"type": ["integer", "null"], "minimum": 0},
        left_usd_micros={"type": ["integer", "null"]},
        reserved_tokens={"type": ["integer", "null"], "minimum": 0},
        left_tokens={"type": ["integer", "null"]},
        rule={"type": "string"},
    ),
    queue=_object(
        "The order's place in a queue of many machines: which attempt this run is, and those before it that were lost.",
        ["attempt", "on_lost_worker"],
        attempt={"type": "integer", "minimum": 1},
        lost=_STRINGS,
        on_lost_worker={"enum": ["rerun", "fail"]},
        label={"type": "string"},
    ),
    session=_object("The conversation that the order has kept: its id, for resuming.", ["id"], id={"type": "string"}),
    inner=_object(
        "The receipt of a plane inside: its hash, whether that verified (null: unknown), and what it had added.",
        receipt_sha256=_NULLABLE,
        verified={"type": ["boolean", "null"]},
        backplane={
            "description": "In the shape of this one.",
            "type": ["object", "null"],
            "additionalProperties": True,
        },
    ),
    capabilities=_open("Abilities and levels of the manifest that the contract does not have, as they were sent."),
    counts={"description": "Messages and lines that had no effect, by why; and what was redacted.", **_COUNTS},
    usage=_object(
        "Whose word each counter of the receipt's usage is: the service's, as its answers were seen; claimed in the "
        "host's receipt; or reported under way.",
        (),
        **dict.fromkeys(Usage.__struct_fields__, _WHOSE),
    ),
    endpoints={"description": "Network addresses of the backend itself, which no rule closes.", **_STRINGS},
    start={"description": "cold or warm.", "type": "string"},
    guard={"description": "`lost`: it was killed, so nobody knows whether all of the host is gone.", "type": "string"},
    durability=_object(
        "What was lost of a run that was cut off.",
        journal={"enum": ["not_synced"]},
        cut_bytes={"description": "Of an event that was written in part.", **_COUNT},
        machine_restarted={"type": "boolean"},
    ),
    duration={
        "description": "How the duration of an interrupted run is known: by a clock that anybody can set, or not.",
        "enum": ["wall_clock", "unknown"],
    },
    negotiation=_object(
        "Requirements against the manifest, with the smallest change that would satisfy it.",
        ["satisfied", "findings", "smallest_change"],
        satisfied={"type": "boolean"},
        findings={
            "type": "array",
            "items": _object(
                "One requirement, and what became of it.",
                ["capability", "min_support", "verdict", "satisfied", "reason"],
                capability=_STRING,
                min_support=_STRING,
                verdict={"enum": ["native", "emulated", "restricted", "missing"]},
                satisfied={"type": "boolean"},
                reason=_STRING,
            ),
        },
        smallest_change={
            "type": "array",
            "items": _object(
                "One step: another level, or the requirement dropped.",
                ["capability", "from"],
                capability=_STRING,
                to=_STRING,
                drop={"const": True},
                **{"from": _STRING},
            ),
        },
    ),
    hooks=_object(
        "Which hooks were attached, what each decided how often, and the single decisions up to a number.",
        ["attached", "counts", "decisions"],
        attached={
            "type": "array",
            "items": _object(
                "One hook; of kind above it lay with whoever gave the order.",
                ["name", "event", "kind", "tools"],
                name={"type": "string"},
                event={"enum": ["pre_tool", "post_tool"]},
                kind={"enum": ["command", "function", "above"]},
                tools=_STRINGS,
            ),
        },
        counts={
            "description": "By hook: allow, deny, modify; failed counts beside what then counted.",
            "type": "object",
            "additionalProperties": _COUNTS,
        },
        decisions={
            "type": "array",
            "items": _object(
                "One answer of one hook.",
                ["hook", "ask", "tool", "decision"],
                hook={"type": "string"},
                ask={"type": "string"},
                tool={"type": "string"},
                decision={"enum": ["allow", "deny", "modify"]},
                reason={"type": "string"},
            ),
        },
        missed={"description": "Uses of a tool that no hook was asked about, by event and tool.", **_COUNTS},
    ),
    checkpoints=_object(
        "States of the workspace that were kept, and the ways back to them.",
        ["made"],
        made={
            "type": "array",
            "items": _object(
                "One kept state: `tree` is git's name of all that is covered, `files` differ from the start.",
                ["id", "name", "at", "why", "tree", "files", "record_sha256"],
                id={"type": "string"},
                name={"type": "string"},
                at={"type": "string", "pattern": TIME_WRITTEN},
                why={"enum": ["asked", "tool"]},
                tree={"type": "string", "pattern": "^[0-9a-f]{40}$"},
                files={"type": "integer", "minimum": 0},
                left_out={"type": "integer", "minimum": 0},
                record_sha256=_SHA256,
            ),
        },
        dropped={"description": "Automatic ones that made room.", "type": "integer", "minimum": 0},
        rewound={
            "type": "array",
            "items": _object(
                "One way back.",
                ["at", "name", "files"],
                at=_STRING,
                name=_STRING,
                files=_COUNT,
                id=_STRING,
                tree=_STRING,
            ),
        },
        failed=_COUNT,
        failures={
            "type": "array",
            "items": _object(
                "One that could not be made.", ["at", "ask", "reason"], at=_STRING, ask=_STRING, reason=_STRING
            ),
        },
    ),
)
