"""A closed reader of receipts, written from the contract's text and not from our code.

It takes the contract's names and nothing else, prints the receipt anew by the written rules, and
hashes what it printed: what it accepts, a strict peer accepts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTRACTS = Path(__file__).parent.parent / "contracts"
CAPABILITIES = set(
    re.findall(r"`([a-z_]+)`", (CONTRACTS / "sidecar.md").read_text().split("## 9. Capabilities")[1].split("\n\n")[1])
)
CODES = set(re.findall(r"^\| `([a-z_]+)` \|", (CONTRACTS / "errors.md").read_text(), re.MULTILINE))
assert (len(CAPABILITIES), len(CODES)) == (41, 44)

UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.(\d{3}|\d{6}|\d{9}))?Z")
HASH = re.compile(r"[0-9a-f]{64}")


class Refused(AssertionError):
    """A closed peer would not read this receipt."""


class Number(str):
    """A number as it is written."""


Check = Callable[[Any, str], None]


def _is(kind: type) -> Check:
    def check(value: Any, at: str) -> None:
        # A number is text here, so that its digits stay.
        if not isinstance(value, kind) or (kind is str and isinstance(value, Number)):
            raise Refused(f"{at}: {value!r} is no {kind.__name__}")

    return check


text, boolean = _is(str), _is(bool)


def anything(value: Any, at: str) -> None:
    """Free-form JSON."""


def optional(check: Check) -> Check:
    return lambda value, at: None if value is None else check(value, at)


def one_of(*words: str) -> Check:
    def check(value: Any, at: str) -> None:
        if value not in words or isinstance(value, Number):
            raise Refused(f"{at}: {value!r} is none of {words}")

    return check


def matching(pattern: re.Pattern[str]) -> Check:
    def check(value: Any, at: str) -> None:
        text(value, at)
        if not pattern.fullmatch(value):
            raise Refused(f"{at}: {value!r} has not the print form")

    return check


def integer(low: int, high: int) -> Check:
    def check(value: Any, at: str) -> None:
        if not isinstance(value, Number) or not re.fullmatch(r"-?\d+", value) or not low <= int(value) <= high:
            raise Refused(f"{at}: {value!r} is no integer from {low} to {high}")

    return check


def floating(value: Any, at: str) -> None:
    if not isinstance(value, Number) or not re.search(r"[.e]", value):
        raise Refused(f"{at}: {value!r} is no float")


def many(check: Check) -> Check:
    def look(value: Any, at: str) -> None:
        if not isinstance(value, list):
            raise Refused(f"{at}: no array")
        for place, item in enumerate(value):
            check(item, f"{at}/{place}")

    return look


def struct(required: dict[str, Check], skipped: dict[str, Check] | None = None) -> Check:
    """An object with exactly these members; the skipped ones may be absent."""

    def check(value: Any, at: str) -> None:
        if not isinstance(value, dict):
            raise Refused(f"{at}: no object")
        known = {**required, **(skipped or {})}
        for name in value:
            if name not in known:
                raise Refused(f"{at}: unknown member {name!r}")
        for name in required:
            if name not in value:
                raise Refused(f"{at}: {name!r} is absent, not null")
        for name, item in value.items():
            known[name](item, f"{at}/{name}")

    return check


def manifest(value: Any, at: str) -> None:
    if not isinstance(value, dict):
        raise Refused(f"{at}: no object")
    for name, level in value.items():
        one_of(*CAPABILITIES)(name, at)
        if isinstance(level, dict):
            struct({"restricted": struct({"reason": text})})(level, f"{at}/{name}")
        else:
            one_of("native", "emulated", "unsupported")(level, f"{at}/{name}")


U64, TS = integer(0, 2**64 - 1), matching(TIME)
EVENTS: dict[str, dict[str, Check]] = {
    "run_started": {"message": text},
    "run_completed": {"message": text},
    "warning": {"message": text},
    "assistant_delta": {"text": text},
    "assistant_message": {"text": text},
    "tool_call": {
        "tool_name": text,
        "input": anything,
        "tool_use_id": optional(text),
        "parent_tool_use_id": optional(text),
    },
    "tool_result": {"tool_name": text, "output": anything, "is_error": boolean, "tool_use_id": optional(text)},
    "file_changed": {"path": text, "summary": text},
    "command_executed": {
        "command": text,
        "exit_code": optional(integer(-(2**31), 2**31 - 1)),
        "output_preview": optional(text),
    },
    "error": {"message": text},
}


def event(value: Any, at: str) -> None:
    if not isinstance(value, dict) or value.get("type") not in EVENTS:
        raise Refused(f"{at}: no event of the contract: {value!r}")
    kind = value["type"]
    skipped: dict[str, Check] = {"ext": _is(dict)}
    if kind == "error":
        skipped["error_code"] = one_of(*CODES)
    struct({"ts": TS, "type": text, **EVENTS[kind]}, skipped)(value, at)


RECEIPT = struct(
    {
        "meta": struct(
            {
                "run_id": matching(UUID),
                "work_order_id": matching(UUID),
                "contract_version": one_of("abp/v0.1"),
                "started_at": TS,
                "finished_at": TS,
                "duration_ms": U64,
            }
        ),
        "backend": struct({"id": text, "backend_version": optional(text), "adapter_version": optional(text)}),
        "capabilities": manifest,
        "mode": one_of("mapped", "passthrough"),
        "usage_raw": anything,
        "usage": struct(
            {
                **dict.fromkeys(
                    ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "request_units"),
                    optional(U64),
                ),
                "estimated_cost_usd": optional(floating),
            }
        ),
        "trace": many(event),
        "artifacts": many(struct({"kind": text, "path": text})),
        "verification": struct({"harness_ok": boolean, "git_diff": optional(text), "git_status": optional(text)}),
        "outcome": one_of("complete", "partial", "failed"),
        "receipt_sha256": matching(HASH),
    }
)


def _number(literal: str) -> str:
    if re.fullmatch(r"-?\d+", literal) and literal != "-0" and -(2**63) <= int(literal) < 2**64:
        return str(int(literal))
    value = float(literal)
    if value == 0:
        return "-0.0" if literal.startswith("-") else "0.0"
    mantissa, exponent = f"{abs(value):e}".split("e")
    for digits in range(17):
        mantissa, exponent = f"{abs(value):.{digits}e}".split("e")
        if float(f"{mantissa}e{exponent}") == abs(value):
            break
    figures, power = mantissa.replace(".", ""), int(exponent)
    sign = "-" if value < 0 else ""
    if -5 <= power <= 15:
        if power < 0:
            return f"{sign}0.{'0' * (-power - 1)}{figures}"
        whole = figures.ljust(power + 1, "0")
        return f"{sign}{whole[: power + 1]}.{whole[power + 1 :] or '0'}"
    rest = "." + figures[1:] if len(figures) > 1 else ""
    return f"{sign}{figures[0]}{rest}e{power:+d}"


_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _string(value: str) -> str:
    return '"' + "".join(_SHORT.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in value) + '"'


def printed(value: Any) -> str:
    """Print plain JSON by the contract's rules S62 and S63."""
    if isinstance(value, Number):
        return _number(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, dict):
        members = sorted(value.items(), key=lambda pair: pair[0].encode())
        return "{" + ",".join(f"{_string(name)}:{printed(item)}" for name, item in members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(printed, value)) + "]"
    return {None: "null", True: "true", False: "false"}[value]


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise Refused(f"a key stands twice among {[name for name, _ in pairs]}")
    return dict(pairs)


def read(data: bytes) -> dict[str, Any]:
    """Read a receipt's canonical bytes; its numbers come back as `Number`.

    Raises:
        Refused: a closed peer would not take it, or would hash it differently.
    """

    def no_constant(word: str) -> Any:
        raise Refused(f"{word} is no JSON")

    value: dict[str, Any] = json.loads(
        data.decode(), parse_int=Number, parse_float=Number, parse_constant=no_constant, object_pairs_hook=_no_twice
    )
    RECEIPT(value, "")
    if printed(value).encode() != data:
        raise Refused("the bytes are not canonical")
    if hashlib.sha256(printed({**value, "receipt_sha256": None}).encode()).hexdigest() != value["receipt_sha256"]:
        raise Refused("the hash does not hold")
    return value
