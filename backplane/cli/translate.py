"""`translate`: one vendor's JSON in, another's out; losses go to stderr.

Requests and responses are read whole; a stream is translated as it comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, wrong, wrong_words
from backplane.contract import canonical
from backplane.dialects import DIALECTS, StreamTranslation, augment, dialect, framing, translate, unread
from backplane.errors import TranslationError

READ_BYTES: Final = 64 * 1024
"""Most bytes read from a stream at once: what a pipe holds."""

_FIRST, _SECOND, *_ = DIALECTS

HELP = """Convert a request, a response or a stream from one vendor's format to another's. What the other
format cannot express goes to stderr: as text on a terminal, else as JSON lines (schema: cli_translate_loss)."""
EXAMPLE = f"backplane translate --from {_FIRST} --to {_SECOND} --kind request request.json"


def options(p: Parser) -> None:
    names = ", ".join(DIALECTS)
    for option, dest, words in (
        ("--from", "source", f"format of FILE: {names}; for requests also augment"),
        ("--to", "target", "format to write: the same choices as for --from, but augment only for streams"),
    ):
        add.value(p, option, metavar="DIALECT", dest=dest, required=True, help=words)
    kinds = ("request", "response", "stream")
    p.add_argument("--kind", choices=kinds, default="request", help="kind of message in FILE (default: request)")
    add.flag(p, "--strict", help="exit with 1 if any content is lost; a change of form only is no loss")
    add.value(p, "file", metavar="FILE", nargs="?", default="-", help="file to convert (default: stdin)")


def run(args: Args) -> int:
    reads, writes = args.source == augment.NAME, args.target == augment.NAME
    if (reads and args.kind != "request") or (writes and args.kind != "stream"):
        fact = f"cannot translate a {args.kind} from {args.source} to {args.target}"
        raise wrong_words(fact, "give --from augment only with --kind request, --to augment only with --kind stream")
    losses = _stream(args) if args.kind == "stream" else _document(args)
    for loss in losses:
        if streams.is_terminal(streams.STDERR):
            kind = loss.kind if loss.is_material else "form"
            streams.note(f"{kind} {loss.path or '/'} ({loss.code}): {loss.reason}")
        else:
            streams.complain(msgspec.json.encode(loss).decode() + "\n")
    return 1 if args.strict and any(loss.is_material for loss in losses) else 0


def _document(args: Args) -> Sequence[Any]:
    try:
        document = canonical.decode(streams.read_input(args.file))
    except (ValueError, RecursionError) as fault:
        hint = "correct the JSON, or set --kind to the kind of this file"
        raise wrong(f"{streams.source(args.file)} is not JSON: {fault}", hint) from fault
    if args.source == augment.NAME:
        done = augment.translate_request(document, args.target)
    else:
        done = translate(document, args.source, args.target, args.kind)
    streams.write_record(done.value)
    return done.losses


def _stream(args: Args) -> Sequence[Any]:
    done: Any
    if args.target == augment.NAME:
        done, target = augment.ChunkStream(args.source), None
    else:
        done, target = StreamTranslation(args.source, args.target), dialect(args.target)

    def write(chunks: list[Any]) -> None:
        for chunk in chunks:
            line = target and framing.sse_bytes(chunk, target.event_name(chunk))
            streams.write_json(line or msgspec.json.encode(chunk) + b"\n")

    reader, count = framing.Detecting(is_named=True), 0
    for chunk in _chunks(reader, args.file):
        count += 1
        write(done.feed(chunk))
    if not count:
        fact = f"{streams.source(args.file)} has no event of a stream"
        raise TranslationError("dialect_mapping_failed", fact, hint="check the file, --from and --kind")
    write(done.finish(done=reader.is_done))
    if target and target.DONE:
        streams.write_bytes(framing.done_bytes())
    skipped = reader.inner.skipped if reader.inner is not None else 0
    return (*done.losses, *([unread(skipped, args.source, args.target)] if skipped else []))


def _chunks(reader: framing.Detecting, name: str) -> Iterator[Any]:
    """Yield the chunks of a file or of stdin as they come."""
    try:
        with open(streams.STDIN if name == "-" else name, "rb", buffering=0, closefd=name != "-") as file:
            while data := file.read(READ_BYTES):
                yield from reader.feed(data)
    except (OSError, ValueError) as fault:
        why = getattr(fault, "strerror", None) or fault
        raise wrong(f"{streams.source(name)} cannot be read: {why}", "name a file that this user can read") from fault
    yield from reader.finish()
