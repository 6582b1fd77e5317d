"""`translate`: one vendor's JSON in, another's out; what is lost on the way is said on stderr or in a file.

Requests and responses are read whole; a stream is translated as it comes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from backplane.cli import streams
from backplane.cli.parser import Options
from backplane.cli.result_file import ResultFile
from backplane.cli.start import wrong, wrong_words
from backplane.contract import canonical
from backplane.dialects import StreamTranslation, dialect, framing, unread
from backplane.errors import TranslationError

AUGMENT: Final = "augment"
"""An editor's wire: its requests are only read, its streams only written."""

READ_BYTES: Final = 64 * 1024
"""Taken from a stream at once: what a pipe holds."""


def translate_input(options: Options) -> int:
    if AUGMENT in (options.source, options.target):
        _check_direction(options)
    else:
        dialect(options.source), dialect(options.target)
    if options.asked is not None and options.target != AUGMENT:
        raise wrong_words(f"--asked is for --to {AUGMENT}", "leave it out")
    # Tried before anything is translated: a stream cannot be said again for its losses.
    copy = ResultFile(options.losses) if options.losses is not None else None
    try:
        losses = _stream(options) if options.kind == "stream" else _document(options)
        _report(losses, copy, every=options.all)
    finally:
        if copy is not None:
            copy.close()
    return 1 if options.strict and any(loss.is_material for loss in losses) else 0


def _check_direction(options: Options) -> None:
    if options.source == AUGMENT and options.kind == "request" and options.target != AUGMENT:
        dialect(options.target)
    elif options.target == AUGMENT and options.kind == "stream" and options.source != AUGMENT:
        dialect(options.source)
    else:
        raise wrong(
            f"no {options.kind} goes from {options.source} to {options.target}: {AUGMENT} asks and shows streams",
            f"--from {AUGMENT} --to DIALECT --kind request, or --from DIALECT --to {AUGMENT} --kind stream",
        )


def _document(options: Options) -> Sequence[Any]:
    document = _read_json(options.file)
    if options.source == AUGMENT:
        from backplane.dialects.augment import translate_request

        done = translate_request(document, options.target)
    else:
        from backplane.dialects import translate

        done = translate(document, options.source, options.target, options.kind)
    streams.write_record(done.value)
    return done.losses


def _read_json(file: str) -> Any:
    try:
        return canonical.decode(streams.read_input(file))
    except (ValueError, RecursionError) as fault:
        raise wrong(f"{streams.source(file)} is no JSON: {fault}") from fault


def _stream(options: Options) -> Sequence[Any]:
    reader = framing.Detecting(is_named=True)
    done, written, end = _stream_target(options)
    count = 0

    def put(chunks: list[Any]) -> None:
        for chunk in chunks:
            streams.write_json(written(chunk))

    for data in _pieces(options.file):
        for chunk in reader.feed(data):
            count += 1
            put(done.feed(chunk))
    for chunk in reader.finish():
        count += 1
        put(done.feed(chunk))
    skipped = _skipped(reader.inner.skipped if reader.inner is not None else 0, count, options)
    put(done.finish(done=reader.is_done))
    streams.write_bytes(end)
    return (*done.losses, *skipped)


def _skipped(number: int, count: int, options: Options) -> Sequence[Any]:
    """What the framing could not read: a loss, or an error where it read nothing at all."""
    if not count:
        fact = f"no event of a stream is in {streams.source(options.file)}"
        raise TranslationError("dialect_mapping_failed", fact, hint="check the file, --from and --kind")
    return (unread(number, options.source, options.target),) if number else ()


def _stream_target(options: Options) -> tuple[StreamTranslation, Callable[[Any], bytes], bytes]:
    """Who translates, how a chunk is written, and what follows the last one."""
    if options.target == AUGMENT:
        import msgspec

        from backplane.dialects.augment import ChunkStream, reply_of

        reply = reply_of(_read_json(options.asked) if options.asked is not None else {})
        return ChunkStream(options.source, reply), lambda chunk: msgspec.json.encode(chunk) + b"\n", b""
    target = dialect(options.target)
    translation = StreamTranslation(options.source, options.target)
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
        hint = None if name == "-" else "name a file that is there and that this user can read"
        raise wrong(f"{streams.source(name)} cannot be read: {why}", hint) from fault


def _report(losses: Sequence[Any], copy: ResultFile | None, *, every: bool) -> None:
    lines = b"".join(msgspec.json.encode(loss) + b"\n" for loss in losses)
    if copy is not None:
        copy.write(iter((lines,)))
    elif streams.is_terminal(streams.STDERR):
        for line in _for_people(losses, every=every):
            streams.note(line)
    else:
        streams.complain(lines.decode())


PLACES_SHOWN: Final = 3
"""Places of a group of losses that are named; the rest is counted."""


def _for_people(losses: Sequence[Any], *, every: bool) -> Iterator[str]:
    """Yield the losses as lines, material ones first; losses of one kind are one line unless every one is wanted."""
    groups: dict[tuple[bool, str, str, str], list[str]] = {}
    for place, loss in enumerate(losses):
        own = (str(place),) if every else ()
        key = (not loss.is_material, loss.kind, loss.code, "".join((loss.reason, *("\0" + one for one in own))))
        chunk = "" if loss.chunk is None else f" in chunk {loss.chunk}"
        groups.setdefault(key, []).append(
            (loss.path or "/") + chunk + (f" ({loss.chunk_type})" if loss.chunk_type else "")
        )
    for (is_form, kind, code, reason), paths in sorted(groups.items(), key=lambda group: group[0][0]):
        shown = ", ".join(paths[:PLACES_SHOWN])
        more = f" and {len(paths) - PLACES_SHOWN} more (--all shows them)" if len(paths) > PLACES_SHOWN else ""
        yield f"{'form' if is_form else kind} {shown}{more} ({code}): {reason.partition(chr(0))[0]}"
