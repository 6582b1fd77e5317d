"""`translate`: one vendor's JSON in, another's out; what is lost on the way is said on stderr or in a file.

Requests and responses are read whole; a stream is translated as it comes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

from backplane.cli import streams
from backplane.cli.parser import Options, Parser

READ_BYTES: Final = 64 * 1024
"""Taken from a stream at once: what a pipe holds."""


def parser(name: str) -> Parser:
    """The options of `translate`."""
    from backplane.dialects import DIALECTS

    first, second, *_ = DIALECTS
    made = Parser(
        f"backplane {name}",
        "Translate a request, a response or a stream from one vendor's dialect to another's. "
        "Losses go to stderr: lines for people on a terminal, else one JSON object a line.",
        f"backplane {name} --from {first} --to {second} --kind request request.json",
        _translate,
    )
    names = ", ".join(DIALECTS)
    made.add_argument("--from", dest="source", required=True, metavar="DIALECT", help=f"one of {names}")
    made.add_argument("--to", dest="target", required=True, metavar="DIALECT", help="one of the same")
    made.add_argument("--kind", choices=("request", "response", "stream"), default="request")
    made.add_argument("--losses", metavar="FILE", help="write the losses there, one JSON object a line")
    made.add_argument("--strict", action="store_true", help="exit code 1 when anything but the form is lost")
    made.add_argument("file", nargs="?", default="-", metavar="FILE", help="- or nothing for stdin")
    return made


def _translate(options: Options) -> int:
    from backplane.dialects import dialect

    dialect(options.source), dialect(options.target)
    losses = _stream(options) if options.kind == "stream" else _document(options)
    _report(losses, options)
    return 1 if options.strict and any(loss.is_material for loss in losses) else 0


def _document(options: Options) -> Sequence[Any]:
    import msgspec

    from backplane.contract import canonical
    from backplane.dialects import translate
    from backplane.errors import ConfigError

    data = streams.read_input(options.file)
    try:
        document = canonical.decode(data)
    except msgspec.DecodeError as fault:
        raise ConfigError("config_invalid", f"{streams.one_line(options.file)} is no JSON: {fault}") from fault
    done = translate(document, options.source, options.target, options.kind)
    streams.write_bytes(msgspec.json.encode(done.value) + b"\n")
    return done.losses


def _stream(options: Options) -> Sequence[Any]:
    from backplane.dialects import StreamTranslation, dialect, framing

    target = dialect(options.target)
    reader = framing.Detecting(is_named=True)
    done = StreamTranslation(options.source, options.target)

    def put(chunks: list[Any]) -> None:
        for chunk in chunks:
            streams.write_bytes(framing.sse_bytes(chunk, target.event_name(chunk)))

    for data in _pieces(options.file):
        for chunk in reader.feed(data):
            put(done.feed(chunk))
    for chunk in reader.finish():
        put(done.feed(chunk))
    put(done.finish())
    if target.DONE:
        streams.write_bytes(framing.done_bytes())
    return done.losses


def _pieces(name: str) -> Iterator[bytes]:
    """Read a file or stdin as it comes."""
    from backplane.errors import ConfigError

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
        raise ConfigError("config_invalid", f"{streams.one_line(name)} cannot be read: {why}") from fault


def _report(losses: Sequence[Any], options: Options) -> None:
    import msgspec

    from backplane.errors import ConfigError

    lines = b"".join(msgspec.json.encode(loss) + b"\n" for loss in losses)
    if options.losses is not None:
        try:
            with open(options.losses, "wb") as file:
                file.write(lines)
        except OSError as fault:
            name = streams.one_line(options.losses)
            raise ConfigError("config_invalid", f"{name} cannot be written: {fault.strerror}") from fault
    elif streams.is_terminal(streams.STDERR):
        for loss in losses:
            words = f"{loss.kind} {loss.path or '/'} ({loss.code}): {loss.reason}"
            streams.complain(streams.one_line(words) + "\n")
    else:
        streams.complain(lines.decode())
