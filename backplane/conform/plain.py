"""One plain run, as a control plane without extensions does it, and the rules that its record has to keep."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from backplane.conform.link import OVERLONG, HostLine, Program, linked, order, vendor_of
from backplane.conform.verdict import RuleLevel, Unfit, printable
from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.capability import CAPABILITIES, read_level
from backplane.contract.receipt import read_receipt, receipt_hash
from backplane.process.child import Exit
from backplane.protocol import MESSAGES, describe_noise, too_much_in_hello, version_compatible
from backplane.schemas.validate import validator_of

RUN_ID: Final = "3b8f7a1c-2d4e-4f60-8a9b-0c1d2e3f4a5b"
PREVIEW_BYTES_MAX: Final = 8192
EXT_MEMBERS: Final = {"reasoning": ("text",), "turn": ("stop_reason",), "output": ("stream", "text")}

DID: Final = "said nothing until the hello, sent a run, closed stdin"


class Plain(msgspec.Struct, frozen=True, kw_only=True):
    """The record: hello, a pause, `run`, stdin closed at once, everything until the exit."""

    order: dict[str, Any]
    lines: tuple[HostLine, ...]
    hello: tuple[HostLine, ...]
    """Lines up to the hello, or until the time for it was over."""
    early: tuple[HostLine, ...]
    """Lines between the hello and the run."""
    answer: tuple[HostLine, ...]
    """Lines after the run, to the end of stdout."""
    how: Exit | None
    """The exit; None if the host had to be stopped."""
    swept: int
    stderr: bytes
    """The last part of stderr."""
    flooded: bool
    unended: bool
    """True if the last line has no newline."""

    @property
    def greeting(self) -> Json:
        """The hello as an object; empty if there was none."""
        return self.hello[-1].value if self.hello and self.hello[-1].t == "hello" else {}

    @property
    def events(self) -> tuple[tuple[HostLine, dict[str, Any]], ...]:
        """Lines of events with their event; empty if that is no object."""
        lines = (line for line in self.answer if line.t == "event")
        return tuple((line, body if isinstance(body := line.get("event"), dict) else {}) for line in lines)

    @property
    def ends(self) -> tuple[HostLine, ...]:
        return tuple(line for line in self.answer if line.is_end)

    @property
    def receipt(self) -> Json:
        """The receipt as sent; empty if there was none that is an object."""
        receipt = self.ends[0].get("receipt") if self.ends else None
        return receipt if isinstance(receipt, dict) else {}

    @property
    def ending(self) -> str:
        """The exit in words, and the last line of stderr."""
        errors = self.stderr.strip().splitlines()
        how = f"it ended with {self.how.describe()}" if self.how else "it is still running"
        return f"{how}; stderr: {printable(errors[-1]) if errors else 'empty'}"


async def record(program: Program, root: str, task: str) -> Plain:
    """Do the plain run.

    Raises:
        BackendError: `sidecar_spawn_failed`.
    """
    bounds = program.bounds
    async with linked(program) as link:
        greeting = await link.until(lambda line: line.t is not None, bounds.hello_s)
        hello = link.handed
        asked = order(root, task, vendor_of(greeting.value if greeting is not None else None))
        early = hello
        if greeting is None:
            how = await link.child.wait(bounds.exit_s + bounds.slack_s)
        else:
            await link.next(bounds.quiet_s)
            early = len(link.lines)
            await link.send({"t": "run", "id": RUN_ID, "work_order": asked})
            link.child.close_stdin()
            await link.until(lambda line: line.is_end, bounds.run_s)
            how = await link.exit(bounds.exit_s)
        # A host that has not ended by itself is stopped at once: its processes are no leftovers of an orderly exit.
        await link.child.stop(grace_s=0)
        return Plain(
            order=asked,
            lines=tuple(link.lines),
            hello=tuple(link.lines[:hello]),
            early=tuple(link.lines[hello:early]),
            answer=tuple(link.lines[early:]),
            how=how,
            swept=link.child.swept if how is not None else 0,
            stderr=bytes(link.child.stderr_tail),
            flooded=link.flooded,
            unended=link.unended,
        )


Found = Iterator[tuple[str, Sequence[HostLine]]]
"""Each thing wrong, in words, with the lines that show it."""


def _wrong(name: str, value: Json, lines: Sequence[HostLine], *only: str, without: tuple[str, ...] = ()) -> Found:
    """Check a value by a schema: members that end with one of `only`, or all but those `without`."""
    for error in validator_of(name).iter_errors(value):
        pointer = "".join(f"/{part}" for part in error.absolute_path)
        if pointer.endswith(only or "") and not (without and pointer.endswith(without)):
            yield f"{pointer or name}: {error.message:.200}", lines


def _hello_in_time(plain: Plain) -> Found:
    if not plain.hello or plain.hello[-1].t is None:
        noise = [line.raw for line in plain.hello if line.raw.strip()]
        wrote = describe_noise(len(noise), noise[0] if noise else b"")
        yield f"no hello came; {plain.ending}{wrote}", plain.hello
    elif plain.hello[-1].t != "hello":
        yield f"the first message is {plain.hello[-1].t}", plain.hello


def _hello_shape(plain: Plain) -> Found:
    # Names of capabilities and the version have rules of their own.
    known = {**plain.greeting, "contract_version": "abp/v0.1"}
    if isinstance(plain.greeting.get("capabilities"), dict):
        known["capabilities"] = {}
    if not isinstance(plain.greeting.get("contract_version"), str):
        yield "contract_version is not a string", plain.hello
    yield from _wrong("envelope_hello", known, plain.hello)
    if (fault := too_much_in_hello(plain.greeting, len(plain.hello[-1].raw))) is not None:
        yield f"it has {fault}", plain.hello


def _hello_version(plain: Plain) -> Found:
    if not version_compatible(plain.greeting["contract_version"]):
        yield f"{plain.greeting['contract_version']!r} is not compatible with abp/v0.1", plain.hello


def _strict_json(plain: Plain) -> Found:
    for line in plain.lines:
        if line.fault not in (None, OVERLONG):
            yield f"not strict JSON: {line.fault}", (line,)


def _run_ends(plain: Plain) -> Found:
    if plain.flooded:
        yield "it wrote without end", plain.answer[:3]
    elif not plain.ends:
        yield f"neither final nor fatal came; {plain.ending}", plain.answer


def _run_gives_receipt(plain: Plain) -> Found:
    if plain.ends[0].t == "fatal":
        yield f"it ended with fatal: {plain.ends[0].get('error')!r:.200}", plain.ends


def _receipt_shape(plain: Plain) -> Found:
    if not plain.receipt:
        yield "there is no receipt", plain.ends
        return
    if (twice := canonical.duplicate_key(plain.ends[0].raw, plain.ends[0].value)) is not None:
        yield f"the key {twice!r:.60} stands twice in a final (S3)", plain.ends
    # Trace, hash and the names of the manifest have rules of their own, one level up.
    emptied: dict[str, Json] = {"trace": [], "capabilities": {}, "receipt_sha256": None}
    bare = {**plain.receipt, **{name: empty for name, empty in emptied.items() if name in plain.receipt}}
    try:
        read_receipt(bare | {"capabilities": plain.receipt.get("capabilities", {})})
    except ValueError as error:
        yield str(error), plain.ends
    yield from _wrong("receipt", bare, plain.ends)


def _ref_ids(plain: Plain) -> Found:
    for line in plain.answer:
        allowed = (RUN_ID, None) if line.t == "fatal" else (RUN_ID,)
        if line.t in ("event", "final", "ask", "fatal") and line.get("ref_id") not in allowed:
            yield f"ref_id is {line.get('ref_id')!r:.60} in place of the run's id", (line,)


def _no_noise(plain: Plain) -> Found:
    for line in plain.lines:
        if line.t is None and line.fault is None and line.raw.strip():
            yield "a line that is no message", (line,)


def _lines(plain: Plain) -> Found:
    if any(not line.raw.strip() for line in plain.lines):
        yield "a blank line", plain.lines
    if plain.unended:
        yield "the last line has no newline", plain.lines[-1:]


def _line_lengths(plain: Plain) -> Found:
    long = [line for line in plain.lines if line.fault == OVERLONG]
    if long:
        yield f"{len(long)} lines over 16 MiB", long


def _own_messages_only(plain: Plain) -> Found:
    for line in plain.lines:
        if line.t in ("ask", "pong"):
            yield f"{line.t}, whose extension the peer did not announce", (line,)
        elif line.t is not None and MESSAGES.get(line.t, (None, ""))[1] != "host":
            yield f"{line.t!r:.60} is no message of a host", (line,)


def _extension_names(plain: Plain) -> Found:
    announced = plain.greeting.get("extensions", [])
    for name in announced if isinstance(announced, list) else ():
        if not isinstance(name, str) or re.fullmatch(r"[a-z][a-z0-9_]*/[0-9]+", name) is None:
            yield f"{name!r:.60} is no extension: a name, a slash, a number", plain.hello
        elif announced.count(name) > 1:
            yield f"{name} is announced twice", plain.hello


def _one_hello(plain: Plain) -> Found:
    if plain.early:
        yield "it spoke before it was asked", plain.early
    again = [line for line in plain.answer if line.t == "hello"]
    if again:
        yield "it said hello again", again


def _capabilities(plain: Plain) -> Found:
    for name, level in {**plain.receipt.get("capabilities", {}), **plain.greeting["capabilities"]}.items():
        if name not in CAPABILITIES:
            yield f"{name!r:.60} is not a capability of the contract", plain.hello
        elif read_level(level) is None:
            yield f"{name} has the level {level!r:.60}, which the contract does not have", plain.hello


def _event_shapes(plain: Plain) -> Found:
    for line, event in plain.events:
        yield from _wrong("envelope_event", line.value, (line,), without=("/ts", "/error_code"))
        preview, path = event.get("output_preview"), event.get("path") if event.get("type") == "file_changed" else None
        if isinstance(preview, str) and len(preview.encode("utf-8", "surrogatepass")) > PREVIEW_BYTES_MAX:
            yield f"output_preview is over {PREVIEW_BYTES_MAX} bytes", (line,)
        if isinstance(path, str) and (path.startswith("/") or ".." in path.split("/")):
            yield f"path is {path!r:.80}, not relative to the root", (line,)


def _event_times(plain: Plain) -> Found:
    for line, event in plain.events:
        if not _is_time(event.get("ts")):
            yield f"ts is {event.get('ts')!r:.60}", (line,)


def _event_order(plain: Plain) -> Found:
    latest = ""
    for line, event in plain.events:
        if _is_time(event.get("ts")):
            ts = canonical.timestamp(event["ts"])[:-1]
            if ts < latest:
                yield f"an event of {ts}Z comes after one of {latest}Z", (line,)
            latest = max(latest, ts)


def _error_codes(plain: Plain) -> Found:
    for line, _ in plain.events:
        yield from _wrong("envelope_event", line.value, (line,), "/error_code")
    for line in plain.ends:
        if line.t == "fatal":
            yield from _wrong("envelope_fatal", line.value, (line,), "/error_code")


def _ext_members(plain: Plain) -> Found:
    for line, event in plain.events:
        ext = event.get("ext", {})
        if not isinstance(ext, dict):
            yield "ext is no object", (line,)
            continue
        if ext.get("reasoning") is not None and (event.get("type") != "assistant_delta" or event.get("text") != ""):
            yield 'reasoning stands on an assistant_delta with text ""', (line,)
        for name, needed in EXT_MEMBERS.items():
            body = ext.get(name)
            if name in ext and not (isinstance(body, dict) and all(isinstance(body.get(key), str) for key in needed)):
                yield f"ext.{name} has not the texts {', '.join(needed)}", (line,)


def _settled(plain: Plain) -> Found:
    standing = ""
    for line, event in plain.events:
        text, ext = event.get("text"), event.get("ext")
        retry = ext.get("retry") if isinstance(ext, dict) else None
        if event.get("type") == "assistant_delta" and isinstance(text, str):
            standing += text
        elif event.get("type") == "assistant_message":
            if standing not in ("", text):
                yield f"a message has other words than its pieces {standing!r:.60}, which nothing took back", (line,)
            standing = ""
        elif isinstance(retry, dict) and retry.get("taken_back"):
            standing = ""


def _one_end(plain: Plain) -> Found:
    if len(plain.ends) > 1:
        yield f"{len(plain.ends)} ends for one run", plain.ends
    elif plain.answer[-1] is not plain.ends[0]:
        yield "it wrote more after the end", plain.answer[plain.answer.index(plain.ends[0]) :]


def _receipt_names(plain: Plain) -> Found:
    meta = plain.receipt["meta"]
    wanted = {
        "work_order_id": plain.order["id"],
        "run_id": RUN_ID,
        "contract_version": plain.greeting["contract_version"],
    }
    for name, value in wanted.items():
        if meta.get(name) != value:
            yield f"{name} is {meta.get(name)!r:.60} in place of {value!r}", plain.ends
    times = [meta.get("started_at"), meta.get("finished_at")]
    if not all(map(_is_time, times)):
        yield f"not two times: {times!r:.120}", plain.ends
    elif canonical.timestamp(times[0])[:-1] > canonical.timestamp(times[1])[:-1]:
        yield f"it ends at {times[1]}, before its start at {times[0]}", plain.ends


def _receipt_agrees(plain: Plain) -> Found:
    if "backends" in plain.greeting:
        return  # A control plane: its receipts name the backend that did the work.
    receipt, hello = plain.receipt, plain.greeting
    pairs = {
        "backend.id": (receipt["backend"].get("id"), hello["backend"].get("id")),
        "mode": (receipt.get("mode", "mapped"), hello.get("mode", "mapped")),
        "capabilities": (receipt.get("capabilities") or hello["capabilities"], hello["capabilities"]),
    }
    for name, (theirs, mine) in pairs.items():
        if theirs != mine:
            yield f"{name} is {theirs!r:.120} in the receipt and {mine!r:.120} in the hello", plain.ends


def _receipt_trace(plain: Plain) -> Found:
    trace = plain.receipt.get("trace")
    if trace and trace != [line.get("event") for line, _ in plain.events]:
        yield f"trace has {len(trace)} events that are not the {len(plain.events)} streamed ones", plain.ends


def _receipt_hash(plain: Plain) -> Found:
    sealed = plain.receipt.get("receipt_sha256")
    if sealed is None:
        return
    try:
        computed = receipt_hash(read_receipt(plain.receipt))
    except ValueError as error:
        yield f"cannot be computed: {error}", plain.ends
        return
    if computed != sealed:
        yield f"receipt_sha256 is {sealed!r:.80}, the content hashes to {computed}", plain.ends


def _exit(plain: Plain) -> Found:
    if plain.how is None or plain.how.code != 0:
        yield f"stdin is closed and the run is over; {plain.ending}", plain.answer


def _nothing_left(plain: Plain) -> Found:
    if plain.swept:
        yield f"{plain.swept} of its processes were left running", ()


def _is_time(text: Json) -> bool:
    try:
        canonical.timestamp(text)
    except (ValueError, TypeError):
        return False
    return True


NOISE: Final = "writes nothing but messages"
"""Name of the check that a banner fails; other failures follow from it."""

PLAIN_RULES: Final[tuple[tuple[str, RuleLevel, str, Callable[[Plain], Found]], ...]] = (
    ("says hello first and in time", "speaks", "S8", _hello_in_time),
    ("has a hello of the right shape", "speaks", "S9", _hello_shape),
    ("speaks a compatible version", "speaks", "S10", _hello_version),
    ("writes strict JSON", "speaks", "S3", _strict_json),
    ("ends a run", "speaks", "S26", _run_ends),
    ("goes on after stdin ended and gives a receipt", "speaks", "S34", _run_gives_receipt),
    ("has a receipt of the right shape", "speaks", "S30", _receipt_shape),
    ("repeats the run's id", "speaks", "S14", _ref_ids),
    (NOISE, "behaves", "S2", _no_noise),
    ("writes whole lines, and no blank ones", "behaves", "S7", _lines),
    ("keeps its lines within the limit", "behaves", "S4", _line_lengths),
    ("says only what is a host's to say", "behaves", "S50", _own_messages_only),
    ("announces extensions by name and number, once", "behaves", "S50", _extension_names),
    ("says hello once, and is silent until the run", "behaves", "S12", _one_hello),
    ("names capabilities and levels of the contract", "behaves", "S11", _capabilities),
    ("sends events of the right shape", "behaves", "S21", _event_shapes),
    ("gives every event a time", "behaves", "S22", _event_times),
    ("reports events in the order in which they happened", "behaves", "S25", _event_order),
    ("uses the contract's error codes", "behaves", "S24", _error_codes),
    ("uses the known members of ext as they are meant", "behaves", "S23", _ext_members),
    ("repeats in a message its pieces, or takes them back", "behaves", "S23", _settled),
    ("ends once and then is silent", "behaves", "S26", _one_end),
    ("names order, run, version and times in the receipt", "behaves", "S31", _receipt_names),
    ("says the same of itself in hello and receipt", "behaves", "S30", _receipt_agrees),
    ("has an empty trace, or the one it streamed", "behaves", "S32", _receipt_trace),
    ("has no hash, or the right one", "behaves", "S33", _receipt_hash),
    ("exits with code 0 when stdin has ended", "behaves", "S35", _exit),
    ("leaves no process behind", "behaves", "S38", _nothing_left),
)


def look(check: Callable[[Plain], Found], plain: Plain) -> str:
    """Check one rule by the record and return what was seen.

    Raises:
        Unfit: with everything that is wrong.
    """
    found = list(check(plain))
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        unfit = Unfit(found[0][0] + more, found[0][1])
        unfit.stderr = plain.stderr
        raise unfit
    return f"{len(plain.lines)} lines, {len(plain.events)} of them events"
