"""`translate`: one vendor's JSON in, another's out; what is lost on the way is said on stderr or in a file.

Requests and responses are read whole; a stream is translated as it comes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, wrong, wrong_words
from backplane.contract import canonical
from backplane.dialects import DIALECTS, StreamTranslation, dialect, framing, unread
from backplane.errors import TranslationError

AUGMENT: Final = "augment"
"""An editor's wire: its requests are only read, its streams only written."""

READ_BYTES: Final = 64 * 1024
"""Taken from a stream at once: what a pipe holds."""


_FIRST, _SECOND, *_ = DIALECTS

HELP = """Convert a request, a response or a stream from one vendor's format to another's. Losses go to stderr:
as lines on a terminal, else as one JSON object per line (schema: cli_translate_loss)."""
EXAMPLE = f"backplane translate --from {_FIRST} --to {_SECOND} --kind request request.json"


def options(p: Parser) -> None:
    names = ", ".join(DIALECTS)
    add.value(
        p, "--from", metavar="DIALECT", dest="source", required=True, help=f"one of {names}; or augment (requests)"
    )
    add.value(p, "--to", metavar="DIALECT", dest="target", required=True, help="one of the same; or augment (streams)")
    p.add_argument(
        "--kind", choices=("request", "response", "stream"), default="request", help="what FILE is (default: request)"
    )
    add.value(p, "--asked", metavar="FILE", help="the augment request that the stream answers")
    add.flag(p, "--strict", help="exit with 1 if anything other than the form is lost")
    add.value(p, "file", metavar="FILE", nargs="?", default="-", help="file to convert (default: stdin)")


def run(args: Args) -> int:
    if AUGMENT in (args.source, args.target):
        _check_direction(args)
    else:
        dialect(args.source), dialect(args.target)
    if args.asked is not None and args.target != AUGMENT:
        raise wrong_words(f"--asked has no effect without --to {AUGMENT}", "leave it out")
    losses = _stream(args) if args.kind == "stream" else _document(args)
    _report(losses)
    return 1 if args.strict and any(loss.is_material for loss in losses) else 0


def _check_direction(args: Args) -> None:
    if args.source == AUGMENT and args.kind == "request" and args.target != AUGMENT:
        dialect(args.target)
    elif args.target == AUGMENT and args.kind == "stream" and args.source != AUGMENT:
        dialect(args.source)
    else:
        raise wrong(
            f"cannot translate a {args.kind} from {args.source} to {args.target}: only requests come from {AUGMENT}, "
            "and only streams go to it",
            f"give --from {AUGMENT} --to DIALECT --kind request, or --from DIALECT --to {AUGMENT} --kind stream",
        )


def _document(args: Args) -> Sequence[Any]:
    document = _read_json(args.file)
    if args.source == AUGMENT:
        from backplane.dialects.augment import translate_request

        done = translate_request(document, args.target)
    else:
        from backplane.dialects import translate

        done = translate(document, args.source, args.target, args.kind)
    streams.write_record(done.value)
    return done.losses


def _read_json(file: str) -> Any:
    try:
        return canonical.decode(streams.read_input(file))
    except (ValueError, RecursionError) as fault:
        raise wrong(f"{streams.source(file)} is not JSON: {fault}", "correct the file, or name its --kind") from fault


def _stream(args: Args) -> Sequence[Any]:
    reader = framing.Detecting(is_named=True)
    done, written, end = _stream_target(args)
    count = 0

    def put(chunks: list[Any]) -> None:
        for chunk in chunks:
            streams.write_json(written(chunk))

    for data in _pieces(args.file):
        for chunk in reader.feed(data):
            count += 1
            put(done.feed(chunk))
    for chunk in reader.finish():
        count += 1
        put(done.feed(chunk))
    skipped = _skipped(reader.inner.skipped if reader.inner is not None else 0, count, args)
    put(done.finish(done=reader.is_done))
    streams.write_bytes(end)
    return (*done.losses, *skipped)


def _skipped(number: int, count: int, args: Args) -> Sequence[Any]:
    """Return a loss for chunks that the framing could not read. Raises TranslationError if it read none at all."""
    if not count:
        fact = f"{streams.source(args.file)} has no event of a stream"
        raise TranslationError("dialect_mapping_failed", fact, hint="check the file, --from and --kind")
    return (unread(number, args.source, args.target),) if number else ()


def _stream_target(args: Args) -> tuple[StreamTranslation, Callable[[Any], bytes], bytes]:
    """Return the translation, the writer of a chunk, and the bytes after the last one."""
    if args.target == AUGMENT:
        import msgspec

        from backplane.dialects.augment import ChunkStream, reply_of

        reply = reply_of(_read_json(args.asked) if args.asked is not None else {})
        return ChunkStream(args.source, reply), lambda chunk: msgspec.json.encode(chunk) + b"\n", b""
    target = dialect(args.target)
    translation = StreamTranslation(args.source, args.target)
    end = framing.done_bytes() if target.DONE else b""
    return translation, lambda chunk: framing.sse_bytes(chunk, target.event_name(chunk)), end


def _pieces(name: str) -> Iterator[bytes]:
    """Read a file or stdin as it comes."""
    try:
        fd = streams.STDIN if name == "-" else os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while data := os.read(fd, READ_BYTES):
                yield data
        finally:
            if name != "-":
                os.close(fd)
    except (OSError, ValueError) as fault:
        why = getattr(fault, "strerror", None) or fault
        hint = "give the text on stdin" if name == "-" else "name an existing file that this user can read"
        raise wrong(f"{streams.source(name)} cannot be read: {why}", hint) from fault


def _report(losses: Sequence[Any]) -> None:
    if streams.is_terminal(streams.STDERR):
        for line in _for_people(losses):
            streams.note(line)
    else:
        streams.complain(b"".join(msgspec.json.encode(loss) + b"\n" for loss in losses).decode())


PLACES_SHOWN: Final = 3
"""Places of a group of losses that are named; the rest is counted."""


def _for_people(losses: Sequence[Any]) -> Iterator[str]:
    """Yield a line per kind of loss, material ones first."""
    groups: dict[tuple[bool, str, str, str], list[str]] = {}
    for loss in losses:
        chunk = "" if loss.chunk is None else f" in chunk {loss.chunk}"
        place = (loss.path or "/") + chunk + (f" ({loss.chunk_type})" if loss.chunk_type else "")
        groups.setdefault((not loss.is_material, loss.kind, loss.code, loss.reason), []).append(place)
    for (is_form, kind, code, reason), paths in sorted(groups.items(), key=lambda group: group[0][0]):
        shown = ", ".join(paths[:PLACES_SHOWN])
        more = f" and {len(paths) - PLACES_SHOWN} more" if len(paths) > PLACES_SHOWN else ""
        yield f"{'form' if is_form else kind} {shown}{more} ({code}): {reason}"
