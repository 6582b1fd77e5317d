"""Facts that Python types do not express: patterns, bounds, known names. Data alone.

The patterns are those of ECMA-262: they run in every validator, whatever language it is written in.
"""

from __future__ import annotations

from typing import Final

from backplane.contract.canonical import INT_MAX, Json
from backplane.contract.capability import CAPABILITIES
from backplane.contract.envelope import ASK_MEMBERS
from backplane.contract.events import EVENT_TYPES
from backplane.dialects.ir import LOSS_CODES
from backplane.errors import CODES

_UUID: Final = r"^(urn:uuid:)?\{?[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}\}?$"
_UUID_WRITTEN: Final = "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
_TIME: Final = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?\s?(Z|z|UTC|[+-][0-9]{2}:?[0-9]{2})$"
)
TIME_WRITTEN: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.([0-9]{3}){1,3})?Z$"

_SHA256: Final[Json] = {"pattern": "^[0-9a-f]{64}$"}

_LEVEL: Final[Json] = {
    "anyOf": [
        {"enum": ["native", "emulated", "unsupported"]},
        {
            "type": "object",
            "properties": {
                "restricted": {"type": "object", "properties": {"reason": {"type": "string"}}, "required": ["reason"]}
            },
            "required": ["restricted"],
        },
    ]
}
_MANIFEST: Final[Json] = {
    "type": "object",
    "propertyNames": {"enum": list(CAPABILITIES)},
    "additionalProperties": _LEVEL,
}
_COUNTER: Final[Json] = {"maximum": INT_MAX}

FIELDS: Final[dict[tuple[str, str], Json]] = {
    ("WorkOrder", "id"): {"pattern": _UUID},
    ("Requirement", "capability"): {"enum": list(CAPABILITIES)},
    ("RunMetadata", "run_id"): {"pattern": _UUID},
    ("RunMetadata", "work_order_id"): {"pattern": _UUID},
    ("RunMetadata", "started_at"): {"pattern": _TIME},
    ("RunMetadata", "finished_at"): {"pattern": _TIME},
    ("RunMetadata", "duration_ms"): _COUNTER,
    ("Usage", "input_tokens"): _COUNTER,
    ("Usage", "output_tokens"): _COUNTER,
    ("Usage", "cache_read_tokens"): _COUNTER,
    ("Usage", "cache_write_tokens"): _COUNTER,
    ("Usage", "request_units"): _COUNTER,
    ("Receipt", "capabilities"): _MANIFEST,
    ("Receipt", "receipt_sha256"): _SHA256,
    ("Hello", "capabilities"): _MANIFEST,
    ("Hello", "backends"): {
        "items": {
            "type": "object",
            "properties": {"id": {"type": "string"}, "ready": {"type": "boolean"}, "capabilities": _MANIFEST},
            "required": ["id"],
        }
    },
    ("Ask", "options"): {
        "items": {
            "anyOf": [
                {"type": "string"},
                {"type": "object", "properties": {"label": {"type": "string"}}, "required": ["label"]},
            ]
        }
    },
    ("Hello", "contract_version"): {"pattern": r"^abp/v[0-9]+\.[0-9]+$"},
    ("Fatal", "error_code"): {"enum": [*CODES, None]},
    ("Failed", "error_code"): {"enum": [*CODES, None]},
    ("Fatal", "receipt"): {"$ref": "#/$defs/Receipt"},
    ("Final", "receipt"): {"$ref": "#/$defs/Receipt"},
    ("Cancel", "grace_ms"): {"minimum": 0},
    **{(kind.__name__, "ts"): {"pattern": _TIME} for kind in EVENT_TYPES.values()},
    ("Ping", "seq"): {"minimum": 0, **_COUNTER},
    ("Pong", "seq"): {"minimum": 0, **_COUNTER},
}
"""Facts of members that their Python types do not express."""

RULES: Final[dict[str, Json]] = {
    "BackendSettings": {"oneOf": [{"required": ["command"]}, {"required": ["host"]}]},
    "Ask": {
        "allOf": [
            {"if": {"properties": {"kind": {"const": kind}}}, "then": {"required": list(names)}}
            for kind, names in ASK_MEMBERS.items()
        ]
    },
}
"""Rules between the members of one struct."""

PRINTED_FIELDS: Final[dict[tuple[str, str], Json]] = {
    ("cli_backends", "manifest"): {"type": ["object", "null"], "additionalProperties": _LEVEL},
    ("cli_checkpoints", "at"): {"pattern": TIME_WRITTEN},
    ("cli_checkpoints", "tree"): {"pattern": "^([0-9a-f]{40}|[0-9a-f]{64})$"},
    ("cli_receipts_audit", "run_id"): {"pattern": _UUID_WRITTEN},
    ("cli_receipts_checkpoint", "link"): _SHA256,
    ("cli_receipts_checkpoint", "time"): {"pattern": TIME_WRITTEN},
    ("cli_replay", "run_id"): {"pattern": _UUID_WRITTEN},
    ("cli_runs", "run_id"): {"pattern": _UUID_WRITTEN},
    ("cli_why", "run_id"): {"pattern": _UUID_WRITTEN},
    ("cli_translate_loss", "code"): {"enum": list(LOSS_CODES)},
}
"""Facts of types that only commands print, by the schema's name, as several types share a name."""
