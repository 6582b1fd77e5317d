"""One plain run, as a control plane without extensions does it, and what its record shows.

The host is started once; all checks of this file look at the same record.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from backplane.conform.link import OVERLONG, HostLine, Program, linked, order, vendor_of
from backplane.conform.verdict import RuleLevel, Unfit, printable
from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.capability import CAPABILITIES, read_level
from backplane.contract.receipt import CONTRACT_VERSION, read_receipt, receipt_hash
from backplane.errors import CODES
from backplane.process.child import Exit
from backplane.protocol import MESSAGES, describe_noise, too_much_in_hello, version_compatible
from backplane.schemas.validate import validator_of

RUN_ID: Final = "3b8f7a1c-2d4e-4f60-8a9b-0c1d2e3f4a5b"

PREVIEW_BYTES_MAX: Final = 8192


class Plain(msgspec.Struct, frozen=True):
    """The record: hello, a pause, `run`, stdin closed at once, everything until the exit."""

    order: dict[str, Any]
    hello: tuple[HostLine, ...]
    """Lines up to the hello, or until the time for it was over."""
    early: tuple[HostLine, ...]
    """Lines between the hello and the run."""
    answer: tuple[HostLine, ...]
    """Lines after the run, to the end of stdout."""
    how: Exit | None
    """How it ended by itself after all that; None when it had to be stopped."""
    swept: int
    stderr: bytes
    """Its end."""
    flooded: bool
    unended: bool
    """The last line came without its newline."""

    @property
    def last_words(self) -> str:
        """The last line of its stderr."""
        said = self.stderr.strip().splitlines()
        return printable(said[-1]) if said else "empty"

    @property
    def is_plane(self) -> bool:
        """It is itself a control plane: the receipt names the one behind it that did the work."""
        return "backends" in self.greeting

    @property
    def greeting(self) -> Json:
        """The hello as an object; empty when there was none."""
        return self.hello[-1].value if self.hello and self.hello[-1].t == "hello" else {}

    @property
    def lines(self) -> tuple[HostLine, ...]:
        return (*self.hello, *self.early, *self.answer)

    @property
    def events(self) -> tuple[HostLine, ...]:
        return tuple(line for line in self.answer if line.t == "event")

    @property
    def ends(self) -> tuple[HostLine, ...]:
        return tuple(line for line in self.answer if line.is_end)

    @property
    def receipt(self) -> Json:
        """The receipt as sent; empty when there was none that is an object."""
        receipt = self.ends[0].get("receipt") if self.ends else None
        return receipt if isinstance(receipt, dict) else {}


async def record(program: Program, root: str, task: str) -> Plain:
    """Do the plain run.

    Raises:
        BackendError: `sidecar_spawn_failed`.
    """
    bounds = program.bounds
    async with linked(program) as link:
        greeting = await link.until(lambda line: line.t is not None, bounds.hello_s)
        hello = tuple(link.lines[: link.handed])
        asked = order(root, task, vendor_of(greeting.value if greeting is not None else None))
        if greeting is not None:
            await link.next(bounds.quiet_s)
            early = link.lines[len(hello) :]
            await link.send({"t": "run", "id": RUN_ID, "work_order": asked})
            link.child.close_stdin()
            await link.until(lambda line: line.is_end, bounds.run_s)
            end_s = time.monotonic()
            await link.rest(bounds.exit_s + bounds.slack_s)
        else:
            early, end_s = [], time.monotonic()
        how = await link.child.wait(max(0.0, end_s + bounds.exit_s + bounds.slack_s - time.monotonic()))
        # Who has not ended by itself is stopped at once: its processes are no leftovers of an orderly exit.
        await link.child.stop(grace_s=0)
        return Plain(
            asked, hello, tuple(early), tuple(link.lines[len(hello) + len(early) :]), how,
            link.child.swept if how is not None else 0, bytes(link.child.stderr_tail), link.flooded,
            link.unended,
        )  # fmt: skip


Found = Iterator[tuple[str, tuple[HostLine, ...]]]
"""Each thing wrong, in words, with the lines that show it."""


def _hello_in_time(plain: Plain) -> Found:
    if not plain.hello or plain.hello[-1].t is None:
        ending = f"; it ended with {plain.how.describe()}" if plain.how else ""
        noise = [line.raw for line in plain.hello if line.raw.strip()]
        wrote = describe_noise(len(noise), noise[0] if noise else b"")
        yield f"no hello came{ending}{wrote}; stderr: {plain.last_words}", plain.hello
    elif plain.hello[-1].t != "hello":
        yield f"the first message is {plain.hello[-1].t}", plain.hello


def _hello_shape(plain: Plain) -> Found:
    known = {**plain.greeting, "capabilities": {}, "contract_version": "abp/v0.1"} if plain.greeting else {}
    if not isinstance(plain.greeting.get("contract_version"), str):
        yield "contract_version is not a string", plain.hello
    if not isinstance(plain.greeting.get("capabilities"), dict):
        yield "capabilities is not an object", plain.hello
    for pointer, words in _wrong("envelope_hello", known):
        yield f"{pointer or 'the hello'}: {words}", plain.hello
    if plain.greeting and (fault := too_much_in_hello(plain.greeting, len(plain.hello[-1].raw))) is not None:
        yield f"it has {fault}", plain.hello


def _hello_version(plain: Plain) -> Found:
    version = plain.greeting.get("contract_version")
    if not isinstance(version, str) or not version_compatible(version):
        yield f"{version!r} is not compatible with {CONTRACT_VERSION}", plain.hello


def _run_ends(plain: Plain) -> Found:
    if plain.flooded:
        yield "it wrote without end", plain.answer[:3]
    elif not plain.ends:
        ending = plain.how.describe() if plain.how else "still running"
        yield f"neither final nor fatal came ({ending}); stderr: {plain.last_words}", plain.answer


def _run_gives_receipt(plain: Plain) -> Found:
    if plain.ends and plain.ends[0].t == "fatal":
        yield f"it ended with fatal: {plain.ends[0].get('error')!r:.200}", plain.ends


def _receipt_shape(plain: Plain) -> Found:
    if not plain.receipt:
        yield "there is no receipt", plain.ends
        return
    if (twice := canonical.duplicate_key(plain.ends[0].raw, plain.ends[0].value)) is not None:
        yield f"the key {twice!r:.60} stands twice in a final (S3)", plain.ends
    try:
        read_receipt(
            plain.receipt if not isinstance(plain.receipt.get("trace"), list) else {**plain.receipt, "trace": []}
        )
    except ValueError as error:
        yield str(error), plain.ends
    # Trace, hash and the manifest's names have checks of their own, one level up.
    emptied: dict[str, Json] = {"trace": [], "capabilities": {}, "receipt_sha256": None}
    bare = {**plain.receipt, **{name: empty for name, empty in emptied.items() if name in plain.receipt}}
    for pointer, words in _wrong("receipt", bare):
        yield f"{pointer or 'the receipt'}: {words}", plain.ends


def _ref_ids(plain: Plain) -> Found:
    for line in plain.answer:
        if line.t in ("event", "final", "ask") and line.get("ref_id") != RUN_ID:
            yield f"ref_id is {line.get('ref_id')!r:.60} in place of the run's id", (line,)
        elif line.t == "fatal" and line.get("ref_id") not in (RUN_ID, None):
            yield f"ref_id is {line.get('ref_id')!r:.60}, neither the run's id nor null", (line,)


def _no_noise(plain: Plain) -> Found:
    for line in plain.lines:
        if line.t is None and line.fault is None and line.raw.strip():
            yield "a line that is no message", (line,)


def _strict_json(plain: Plain) -> Found:
    for line in plain.lines:
        if line.fault not in (None, OVERLONG):
            yield f"not strict JSON: {line.fault}", (line,)


def _no_blank_lines(plain: Plain) -> Found:
    if any(not line.raw.strip() for line in plain.lines):
        yield "a blank line", plain.lines


def _own_messages_only(plain: Plain) -> Found:
    for line in plain.lines:
        if line.t is not None and MESSAGES.get(line.t, (None, "host"))[1] != "host":
            yield f"{line.t} is a control plane's to say", (line,)
        elif line.t in ("ask", "pong"):
            yield f"{line.t} without the extension having been announced by us, or without a question", (line,)
        elif line.t is not None and line.t not in MESSAGES:
            yield f"{line.t!r:.60} is no message of the contract", (line,)


def _one_hello(plain: Plain) -> Found:
    again = tuple(line for line in (*plain.early, *plain.answer) if line.t == "hello")
    if again:
        yield "it said hello again", again


def _capabilities(plain: Plain) -> Found:
    for name, level in {**plain.receipt.get("capabilities", {}), **plain.greeting["capabilities"]}.items():
        if name not in CAPABILITIES:
            yield f"{name!r:.60} is not a capability of the contract", plain.hello
        elif read_level(level) is None:
            yield f"{name} has the level {level!r:.60}, which the contract does not have", plain.hello


def _quiet_before_run(plain: Plain) -> Found:
    if plain.early:
        yield "it spoke before it was asked", plain.early


def _event_shapes(plain: Plain) -> Found:
    for line in plain.events:
        for pointer, words in _wrong("envelope_event", line.value):
            if not pointer.endswith(("/ts", "/error_code")):
                yield f"{pointer or 'the event'}: {words}", (line,)


def _event_times(plain: Plain) -> Found:
    for line in plain.events:
        event = line.get("event")
        if isinstance(event, dict) and not _is_time(event.get("ts")):
            yield f"ts is {event.get('ts')!r:.60}", (line,)


def _error_codes(plain: Plain) -> Found:
    for line in (*plain.events, *plain.ends):
        holder = line.get("event") if line.t == "event" else line.value
        code = holder.get("error_code") if isinstance(holder, dict) else None
        if code is not None and code not in CODES:
            yield f"error_code is {code!r:.60}", (line,)


def _one_end(plain: Plain) -> Found:
    if len(plain.ends) > 1:
        yield f"{len(plain.ends)} ends for one run", plain.ends
    elif plain.ends and plain.answer[-1] is not plain.ends[0]:
        yield "it went on after the end", plain.answer[plain.answer.index(plain.ends[0]) :]


def _receipt_ids(plain: Plain) -> Found:
    meta = plain.receipt.get("meta", {})
    if meta.get("work_order_id") != plain.order["id"]:
        yield f"work_order_id is {meta.get('work_order_id')!r:.60}, the order's is {plain.order['id']!r}", plain.ends
    if meta.get("run_id") != RUN_ID:
        yield f"run_id is {meta.get('run_id')!r:.60}, the run's id is {RUN_ID!r}", plain.ends


def _receipt_version(plain: Plain) -> Found:
    version = plain.receipt.get("meta", {}).get("contract_version")
    if version != plain.greeting.get("contract_version"):
        yield f"contract_version is {version!r:.60}, the hello says otherwise", plain.ends


def _receipt_times(plain: Plain) -> Found:
    meta = plain.receipt.get("meta", {})
    times = [meta.get("started_at"), meta.get("finished_at")]
    if not all(map(_is_time, times)):
        yield f"not two times: {times!r:.120}", plain.ends
    elif canonical.timestamp(times[0])[:-1] > canonical.timestamp(times[1])[:-1]:
        yield f"it ends at {times[1]}, before its start at {times[0]}", plain.ends


def _receipt_backend(plain: Plain) -> Found:
    theirs, mine = plain.receipt.get("backend", {}).get("id"), plain.greeting.get("backend", {}).get("id")
    if theirs != mine and not plain.is_plane:
        yield f"backend.id is {theirs!r:.60} in the receipt and {mine!r:.60} in the hello", plain.ends


def _receipt_trace(plain: Plain) -> Found:
    trace = plain.receipt.get("trace")
    if trace and trace != [line.get("event") for line in plain.events]:
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


def _receipt_manifest(plain: Plain) -> Found:
    theirs, mine = plain.receipt.get("capabilities"), plain.greeting["capabilities"]
    if theirs and theirs != mine and not plain.is_plane:
        differing = sorted(name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name))
        yield f"capabilities of the receipt are not the hello's: {', '.join(differing)[:120]}", plain.ends


def _receipt_mode(plain: Plain) -> Found:
    theirs, mine = plain.receipt.get("mode", "mapped"), plain.greeting.get("mode", "mapped")
    if theirs != mine and not plain.is_plane:
        yield f"mode is {theirs!r:.40} in the receipt and {mine!r:.40} in the hello", plain.ends


def _whole_lines(plain: Plain) -> Found:
    if plain.unended:
        yield "the last line has no newline", plain.lines[-1:]


def _line_lengths(plain: Plain) -> Found:
    long = tuple(line for line in plain.lines if line.fault == OVERLONG)
    if long:
        yield f"{len(long)} lines over 16 MiB", long


def _extension_names(plain: Plain) -> Found:
    announced = plain.greeting.get("extensions", [])
    for name in announced if isinstance(announced, list) else ():
        if not isinstance(name, str) or re.fullmatch(r"[a-z][a-z0-9_]*/[0-9]+", name) is None:
            yield f"{name!r:.60} is no extension: a name, a slash, a number", plain.hello
        elif announced.count(name) > 1:
            yield f"{name} is announced twice", plain.hello


def _event_order(plain: Plain) -> Found:
    latest = ""
    for line in plain.events:
        event = line.get("event")
        if isinstance(event, dict) and _is_time(event.get("ts")):
            ts = canonical.timestamp(event["ts"])[:-1]
            if ts < latest:
                yield f"an event of {ts}Z comes after one of {latest}Z", (line,)
            latest = max(latest, ts)


def _ext_members(plain: Plain) -> Found:
    for line, event in _bodies(plain):
        ext = event.get("ext", {})
        if not isinstance(ext, dict):
            yield "ext is no object", (line,)
            continue
        reasoning = ext.get("reasoning")
        if reasoning is not None and (event.get("type") != "assistant_delta" or event.get("text") != ""):
            yield 'reasoning stands on an assistant_delta with text ""', (line,)
        for name, needed in _EXT_MEMBERS.items():
            body = ext.get(name)
            if name in ext and not (isinstance(body, dict) and all(isinstance(body.get(key), str) for key in needed)):
                yield f"ext.{name} has not the texts {', '.join(needed)}", (line,)


def _settled(plain: Plain) -> Found:
    standing = ""
    for line, event in _bodies(plain):
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


_EXT_MEMBERS: Final = {"reasoning": ("text",), "turn": ("stop_reason",), "output": ("stream", "text")}


def _previews(plain: Plain) -> Found:
    for line, event in _bodies(plain):
        preview = event.get("output_preview")
        if isinstance(preview, str) and len(preview.encode("utf-8", "surrogatepass")) > PREVIEW_BYTES_MAX:
            yield f"output_preview is over {PREVIEW_BYTES_MAX} bytes", (line,)


def _changed_paths(plain: Plain) -> Found:
    for line, event in _bodies(plain):
        path = event.get("path") if event.get("type") == "file_changed" else None
        if isinstance(path, str) and (path.startswith("/") or ".." in path.split("/")):
            yield f"path is {path!r:.80}, not relative to the root", (line,)


def _bodies(plain: Plain) -> Iterator[tuple[HostLine, dict[str, Any]]]:
    for line in plain.events:
        event = line.get("event")
        if isinstance(event, dict):
            yield line, event


def _exit(plain: Plain) -> Found:
    if plain.how is None:
        yield "it did not exit although stdin is closed and the run is over", plain.answer
    elif plain.how.code != 0:
        yield f"it ended with {plain.how.describe()}; stderr: {plain.last_words}", plain.answer


def _nothing_left(plain: Plain) -> Found:
    if plain.swept:
        yield f"{plain.swept} of its processes were left running", ()


def _is_time(text: Json) -> bool:
    try:
        canonical.timestamp(text)
    except (ValueError, TypeError):
        return False
    return True


def _wrong(name: str, value: Json) -> Iterator[tuple[str, str]]:
    for error in validator_of(name).iter_errors(value):
        yield "".join(f"/{part}" for part in error.absolute_path), str(error.message)[:200]


DID: Final = "said nothing until the hello, sent a run, closed stdin"

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
    ("writes no blank line", "behaves", "S7", _no_blank_lines),
    ("says only what is a host's to say", "behaves", "S50", _own_messages_only),
    ("says hello once", "behaves", "S8", _one_hello),
    ("names capabilities and levels of the contract", "behaves", "S11", _capabilities),
    ("is silent until the run", "behaves", "S12", _quiet_before_run),
    ("sends events of the right shape", "behaves", "S21", _event_shapes),
    ("gives every event a time", "behaves", "S22", _event_times),
    ("uses the contract's error codes", "behaves", "S24", _error_codes),
    ("ends once and then is silent", "behaves", "S26", _one_end),
    ("names order and run in the receipt", "behaves", "S31", _receipt_ids),
    ("names the version in the receipt", "behaves", "S31", _receipt_version),
    ("ends its last line", "behaves", "S1", _whole_lines),
    ("keeps its lines within the limit", "behaves", "S4", _line_lengths),
    ("announces extensions by name and number, once", "behaves", "S50", _extension_names),
    ("tells things in the order in which they happened", "behaves", "S25", _event_order),
    ("uses the known members of ext as they are meant", "behaves", "S23", _ext_members),
    ("repeats in a message its pieces, or takes them back", "behaves", "S23", _settled),
    ("keeps previews short", "behaves", "S21", _previews),
    ("names changed files relative to the root", "behaves", "S21", _changed_paths),
    ("has one manifest in hello and receipt", "behaves", "S30", _receipt_manifest),
    ("has one mode in hello and receipt", "behaves", "S30", _receipt_mode),
    ("starts before it finishes", "behaves", "S31", _receipt_times),
    ("is the same backend in hello and receipt", "behaves", "S30", _receipt_backend),
    ("has an empty trace, or the one it streamed", "behaves", "S32", _receipt_trace),
    ("has no hash, or the right one", "behaves", "S33", _receipt_hash),
    ("exits with code 0 when stdin has ended", "behaves", "S35", _exit),
    ("leaves no process behind", "behaves", "S38", _nothing_left),
)  # fmt: skip


def look(check: Callable[[Plain], Found], plain: Plain) -> str:
    """Hold one rule against the record.

    Raises:
        Unfit: with everything that is wrong.
    """
    found = list(check(plain))
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        unfit = Unfit(found[0][0] + more, found[0][1])
        has_failed = not plain.ends or plain.how is None or plain.how.code != 0
        unfit.stderr = plain.stderr if has_failed else b""
        raise unfit
    return f"{len(plain.lines)} lines, {len(plain.events)} of them events"
