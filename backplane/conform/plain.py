"""One plain run, as a control plane without extensions does it, and the rules for its record."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from backplane.conform.link import OVERLONG, HostLine, Program, Wire, linked, order, vendor_of
from backplane.conform.verdict import RuleLevel, printable
from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.capability import CAPABILITIES, read_level
from backplane.contract.receipt import read_receipt, receipt_hash
from backplane.process.child import Exit
from backplane.protocol.messages import MESSAGES, describe_noise, version_compatible
from backplane.schemas.validate import validator_of

RUN_ID: Final = "3b8f7a1c-2d4e-4f60-8a9b-0c1d2e3f4a5b"
PREVIEW_BYTES_MAX: Final = 8192
EXT_MEMBERS: Final = {"reasoning": ("text",), "turn": ("stop_reason",), "output": ("stream", "text")}

DID: Final = "waited for the hello, sent a run, closed stdin"


Found = Iterator[tuple[str, Sequence[HostLine]]]
"""Each fault in words, with the lines that show it."""


class Plain:
    """The record of a plain run, and the rules for it; `PLAIN_RULES` names the methods that are rules.

    Attributes:
        hello: lines up to the hello, or until the time for it was over.
        early: lines between the hello and the run.
        answer: lines after the run, to the end of stdout.
        how: the exit; None if the host had to be stopped.
    """

    def __init__(self, link: Wire, order: dict[str, Any], hello: int, early: int, how: Exit | None) -> None:
        self.link, self.order, self.how = link, order, how
        self.lines = link.lines
        self.hello, self.early, self.answer = self.lines[:hello], self.lines[hello:early], self.lines[early:]
        self.ends = [line for line in self.answer if line.is_end]
        self.stderr = bytes(link.child.stderr_tail)

    @property
    def greeting(self) -> Json:
        """The hello as an object; empty if there was none."""
        return self.hello[-1].value if self.hello and self.hello[-1].t == "hello" else {}

    @property
    def events(self) -> list[tuple[HostLine, dict[str, Any]]]:
        """Lines of events with their event; empty if that is no object."""
        return [(line, _object(line.get("event"))) for line in self.answer if line.t == "event"]

    @property
    def receipt(self) -> Json:
        """The receipt as sent; empty if there was none that is an object."""
        return _object(self.ends[0].get("receipt")) if self.ends else {}

    @property
    def ending(self) -> str:
        """The exit in words, and the last line of stderr."""
        errors = self.stderr.strip().splitlines()
        how = f"the host ended with {self.how.describe()}" if self.how else "the host is still running"
        return f"{how}; stderr: {printable(errors[-1]) if errors else 'empty'}"

    def hello_in_time(self) -> Found:
        if not self.hello or self.hello[-1].t is None:
            noise = [line.raw for line in self.hello if line.raw.strip()]
            wrote = describe_noise(len(noise), noise[0] if noise else b"")
            yield f"no hello came; {self.ending}{wrote}", self.hello
        elif self.hello[-1].t != "hello":
            yield f"the first message is {self.hello[-1].t}", self.hello

    def hello_shape(self) -> Found:
        # Names of capabilities and the version have rules of their own.
        known = {**self.greeting, "contract_version": "abp/v0.1"}
        if isinstance(self.greeting.get("capabilities"), dict):
            known["capabilities"] = {}
        if not isinstance(self.greeting.get("contract_version"), str):
            yield "contract_version is not a string", self.hello
        yield from _wrong("envelope_hello", known, self.hello)

    def hello_version(self) -> Found:
        if not version_compatible(self.greeting["contract_version"]):
            yield f"{self.greeting['contract_version']!r} is not compatible with abp/v0.1", self.hello

    def strict_json(self) -> Found:
        for line in self.lines:
            if line.fault not in (None, OVERLONG):
                yield f"not strict JSON: {line.fault}", (line,)

    def run_ends(self) -> Found:
        if self.link.flooded:
            yield "the host did not stop writing", self.answer[:3]
        elif not self.ends:
            yield f"neither final nor fatal came; {self.ending}", self.answer

    def run_gives_receipt(self) -> Found:
        if self.ends[0].t == "fatal":
            yield f"the run ended with a fatal: {self.ends[0].get('error')!r:.200}", self.ends

    def receipt_shape(self) -> Found:
        if not self.receipt:
            yield "there is no receipt", self.ends
            return
        if (twice := canonical.duplicate_key(self.ends[0].raw, self.ends[0].value)) is not None:
            yield f"the key {twice!r:.60} appears twice in a final (S3)", self.ends
        # Trace, hash and the names of the manifest have rules of their own, one level up.
        emptied: dict[str, Json] = {"trace": [], "capabilities": {}, "receipt_sha256": None}
        bare = {**self.receipt, **{name: empty for name, empty in emptied.items() if name in self.receipt}}
        try:
            read_receipt(bare | {"capabilities": self.receipt.get("capabilities", {})})
        except ValueError as error:
            yield str(error), self.ends
        yield from _wrong("receipt", bare, self.ends)

    def ref_ids(self) -> Found:
        for line in self.answer:
            allowed = (RUN_ID, None) if line.t == "fatal" else (RUN_ID,)
            if line.t in ("event", "final", "ask", "fatal") and line.get("ref_id") not in allowed:
                yield f"ref_id is {line.get('ref_id')!r:.60} instead of the run's id", (line,)

    def no_noise(self) -> Found:
        for line in self.lines:
            if line.t is None and line.fault is None and line.raw.strip():
                yield "this line is not a message", (line,)

    def whole_lines(self) -> Found:
        if any(not line.raw.strip() for line in self.lines):
            yield "a blank line", self.lines
        if self.link.unended:
            yield "the last line has no newline", self.lines[-1:]

    def line_lengths(self) -> Found:
        long = [line for line in self.lines if line.fault == OVERLONG]
        if long:
            yield f"{len(long)} lines over 16 MiB", long

    def own_messages_only(self) -> Found:
        for line in self.lines:
            if line.t in ("ask", "pong"):
                yield f"{line.t} needs an extension that the peer did not announce", (line,)
            elif line.t is not None and MESSAGES.get(line.t, (None, ""))[1] != "host":
                yield f"{line.t!r:.60} is not a message that a host may send", (line,)

    def extension_names(self) -> Found:
        announced = self.greeting.get("extensions", [])
        for name in announced if isinstance(announced, list) else ():
            if not isinstance(name, str) or re.fullmatch(r"[a-z][a-z0-9_]*/[0-9]+", name) is None:
                yield f"{name!r:.60} is not the name of an extension, such as 'cancel/1'", self.hello
            elif announced.count(name) > 1:
                yield f"{name} is announced twice", self.hello

    def one_hello(self) -> Found:
        if self.early:
            yield "the host wrote before it got a run", self.early
        again = [line for line in self.answer if line.t == "hello"]
        if again:
            yield "the host sent a second hello", again

    def capabilities(self) -> Found:
        for name, level in {**self.receipt.get("capabilities", {}), **self.greeting["capabilities"]}.items():
            if name not in CAPABILITIES:
                yield f"{name!r:.60} is not a capability of the contract", self.hello
            elif read_level(level) is None:
                yield f"{name} has the level {level!r:.60}, which the contract does not have", self.hello

    def event_shapes(self) -> Found:
        for line, event in self.events:
            yield from _wrong("envelope_event", line.value, (line,), without=("/ts", "/error_code"))
            preview = event.get("output_preview")
            path = event.get("path") if event.get("type") == "file_changed" else None
            if isinstance(preview, str) and len(preview.encode("utf-8", "surrogatepass")) > PREVIEW_BYTES_MAX:
                yield f"output_preview is over {PREVIEW_BYTES_MAX} bytes", (line,)
            if isinstance(path, str) and (path.startswith("/") or ".." in path.split("/")):
                yield f"path is {path!r:.80}, which is not relative to the root", (line,)

    def event_times(self) -> Found:
        for line, event in self.events:
            if _time(event.get("ts")) is None:
                yield f"ts is {event.get('ts')!r:.60}, which is not a time of the contract", (line,)

    def event_order(self) -> Found:
        latest = ""
        for line, event in self.events:
            if (ts := _time(event.get("ts"))) is not None:
                if ts < latest:
                    yield f"an event with the time {ts}Z comes after an event with {latest}Z", (line,)
                latest = max(latest, ts)

    def error_codes(self) -> Found:
        for line, _ in self.events:
            yield from _wrong("envelope_event", line.value, (line,), "/error_code")
        for line in self.ends:
            if line.t == "fatal":
                yield from _wrong("envelope_fatal", line.value, (line,), "/error_code")

    def ext_members(self) -> Found:
        for line, event in self.events:
            ext = event.get("ext", {})
            if not isinstance(ext, dict):
                yield "ext is not an object", (line,)
                continue
            if ext.get("reasoning") is not None and (event.get("type") != "assistant_delta" or event.get("text") != ""):
                yield 'ext.reasoning is allowed only in an assistant_delta with the text ""', (line,)
            for name in EXT_MEMBERS.keys() & ext.keys():
                texts = [_object(ext[name]).get(key) for key in EXT_MEMBERS[name]]
                if not all(isinstance(text, str) for text in texts):
                    yield f"ext.{name} must have the strings {', '.join(EXT_MEMBERS[name])}", (line,)

    def settled(self) -> Found:
        standing = ""
        for line, event in self.events:
            text = event.get("text")
            if event.get("type") == "assistant_delta" and isinstance(text, str):
                standing += text
            elif event.get("type") == "assistant_message":
                if standing not in ("", text):
                    yield f"a message differs from its deltas {standing!r:.60}, which no retry took back", (line,)
                standing = ""
            elif _object(_object(event.get("ext")).get("retry")).get("taken_back"):
                standing = ""

    def one_end(self) -> Found:
        if len(self.ends) > 1:
            yield f"the run ended {len(self.ends)} times", self.ends
        elif self.answer[-1] is not self.ends[0]:
            yield "the host wrote more after the end", self.answer[self.answer.index(self.ends[0]) :]

    def receipt_names(self) -> Found:
        meta = self.receipt["meta"]
        wanted = {"work_order_id": self.order["id"], "run_id": RUN_ID}
        wanted["contract_version"] = self.greeting["contract_version"]
        for name, value in wanted.items():
            if meta.get(name) != value:
                yield f"{name} is {meta.get(name)!r:.60} instead of {value!r}", self.ends
        start, end = _time(meta.get("started_at")), _time(meta.get("finished_at"))
        if start is None or end is None:
            yield "started_at or finished_at is not a time", self.ends
        elif start > end:
            yield f"finished_at {end}Z is before started_at {start}Z", self.ends

    def receipt_agrees(self) -> Found:
        if "backends" in self.greeting:
            return  # A control plane: its receipts name the backend that did the work.
        receipt, hello = self.receipt, self.greeting
        pairs = {
            "backend.id": (receipt["backend"].get("id"), hello["backend"].get("id")),
            "mode": (receipt.get("mode", "mapped"), hello.get("mode", "mapped")),
            "capabilities": (receipt.get("capabilities") or hello["capabilities"], hello["capabilities"]),
        }
        for name, (theirs, mine) in pairs.items():
            if theirs != mine:
                yield f"{name} is {theirs!r:.120} in the receipt and {mine!r:.120} in the hello", self.ends

    def receipt_trace(self) -> Found:
        trace = self.receipt.get("trace")
        if trace and trace != [line.get("event") for line, _ in self.events]:
            yield f"the {len(trace)} events of trace differ from the {len(self.events)} streamed events", self.ends

    def hash_right(self) -> Found:
        sealed = self.receipt.get("receipt_sha256")
        if sealed is None:
            return
        try:
            computed = receipt_hash(read_receipt(self.receipt))
        except ValueError as error:
            yield f"the hash of the receipt cannot be computed: {error}", self.ends
            return
        if computed != sealed:
            yield f"receipt_sha256 is {sealed!r:.80}, but the hash of the content is {computed}", self.ends

    def exit(self) -> Found:
        if self.how is None or self.how.code != 0:
            yield f"the run has ended and stdin is closed; {self.ending}", self.answer

    def nothing_left(self) -> Found:
        if self.how is not None and self.link.child.swept:
            yield f"the host left {self.link.child.swept} of its processes running", ()


def _wrong(name: str, value: Json, lines: Sequence[HostLine], *only: str, without: tuple[str, ...] = ()) -> Found:
    """Check a value by a schema: members that end with one of `only`, or all but those `without`."""
    for error in validator_of(name).iter_errors(value):
        pointer = "".join(f"/{part}" for part in error.absolute_path)
        if pointer.endswith(only or "") and not (without and pointer.endswith(without)):
            yield f"{pointer or name}: {error.message:.200}", lines


def _time(text: Json) -> str | None:
    """Return a time in the contract's form without its Z, which sorts as times do; None if it is no time."""
    try:
        return canonical.timestamp(text)[:-1]
    except (ValueError, TypeError):
        return None


def _object(value: Json) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


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
        return Plain(link, asked, hello, early, how)


NOISE: Final = "writes only messages to stdout"
"""Name of the check that a banner fails; other failures follow from it."""

PLAIN_RULES: Final[tuple[tuple[str, RuleLevel, str, Callable[[Plain], Found]], ...]] = (
    ("sends its hello first and in time", "speaks", "S8", Plain.hello_in_time),
    ("sends a valid hello", "speaks", "S9", Plain.hello_shape),
    ("uses a compatible version of the contract", "speaks", "S10", Plain.hello_version),
    ("writes strict JSON", "speaks", "S3", Plain.strict_json),
    ("ends a run", "speaks", "S26", Plain.run_ends),
    ("finishes the run after stdin has ended, and sends a receipt", "speaks", "S34", Plain.run_gives_receipt),
    ("sends a valid receipt", "speaks", "S30", Plain.receipt_shape),
    ("repeats the run's id", "speaks", "S14", Plain.ref_ids),
    (NOISE, "behaves", "S2", Plain.no_noise),
    ("writes whole lines, and no blank ones", "behaves", "S7", Plain.whole_lines),
    ("keeps its lines within the size limit", "behaves", "S4", Plain.line_lengths),
    ("sends only messages that a host may send", "behaves", "S50", Plain.own_messages_only),
    ("announces each extension once, as name/number", "behaves", "S50", Plain.extension_names),
    ("sends one hello, and nothing more before the run", "behaves", "S12", Plain.one_hello),
    ("announces only capabilities and levels of the contract", "behaves", "S11", Plain.capabilities),
    ("sends valid events", "behaves", "S21", Plain.event_shapes),
    ("gives every event a time", "behaves", "S22", Plain.event_times),
    ("reports events in the order in which they happened", "behaves", "S25", Plain.event_order),
    ("uses the contract's error codes", "behaves", "S24", Plain.error_codes),
    ("uses the known members of ext correctly", "behaves", "S23", Plain.ext_members),
    ("sends a message equal to its deltas, or takes the deltas back", "behaves", "S23", Plain.settled),
    ("ends once, and sends nothing after the end", "behaves", "S26", Plain.one_end),
    ("names order, run, version and times in the receipt", "behaves", "S31", Plain.receipt_names),
    ("describes itself in the receipt as in the hello", "behaves", "S30", Plain.receipt_agrees),
    ("has a trace that is empty or equals the streamed events", "behaves", "S32", Plain.receipt_trace),
    ("has no receipt hash, or the correct one", "behaves", "S33", Plain.hash_right),
    ("exits with code 0 when stdin has ended", "behaves", "S35", Plain.exit),
    ("leaves no process behind", "behaves", "S38", Plain.nothing_left),
)
