"""Standard input, output and error: every command writes to them by this module alone.

Text goes out as UTF-8 in any locale, foreign text with its control characters escaped.
"""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from backplane.view.text import UNPRINTABLE, counted
from backplane.view.text import one_line as one_line
from backplane.view.text import printable as printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from types import FrameType

    from backplane.errors import BackplaneError, ConfigError

STDIN, STDOUT, STDERR = 0, 1, 2
count: Final = counted

INPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Largest input file in bytes: four times the longest line of the protocol, so that any receipt on one line fits."""

TERMINAL: Final = "/dev/tty"
WRITE_BYTES: Final = 4096
"""Bytes written at once to a pipe that has room: PIPE_BUF, for which poll promises that the write does not wait."""

EVIDENCE_LINES_MAX: Final = 10
"""Most lines of an error's evidence that are shown, the last ones: the reason stands at its end."""


class ReaderGone(Exception):
    """The reader of stdout has closed it."""


def repair() -> None:
    """Open the null device for a closed standard descriptor, and make ends of children visible again.

    A file opened later would else take the number of a closed one; a parent may have left SIGCHLD ignored.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while (null := os.open(os.devnull, os.O_RDWR)) <= STDERR:  # It gets the lowest free number.
        os.set_inheritable(null, True)
    os.close(null)


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Make SIGTERM and SIGHUP interrupt the block as Ctrl-C does, so that temporary folders are removed."""
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        by_hand = signal.getsignal(signal.SIGINT)  # Python's, or the event loop's; none in a job in the background.
        (by_hand if callable(by_hand) else signal.default_int_handler)(signal.SIGINT, frame)

    # nohup leaves a signal ignored, and means it.
    ours = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield came
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def postponed() -> Iterator[None]:
    """Deliver signals that would interrupt the block at its end: inside a C extension's import they crash Python."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def write_to(fd: int, data: bytes) -> None:
    """Write all of it to a descriptor, however slow its reader is. Raises OSError."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])


def write_bytes(data: bytes) -> None:
    """Write all of it to stdout. Raises ReaderGone, or BackendError: `stream_closed`, as on a full disk."""
    try:
        write_to(STDOUT, data)
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.ECONNRESET):
            raise ReaderGone from error
        from backplane.errors import BackendError

        name = errno.errorcode.get(error.errno or 0, "EIO")
        raise BackendError("stream_closed", f"cannot write to stdout: {name} ({error.strerror})") from error


def write(text: str) -> None:
    """Write printable text to stdout."""
    write_bytes(text.encode("utf-8", "backslashreplace"))


def write_lines(lines: Iterable[str], none: str) -> None:
    """Write each line to stdout, or the text `none` to stderr for an empty list."""
    empty = True
    for line in lines:
        write(line + "\n")
        empty = False
    if empty:
        complain(none + "\n")


def write_rows(rows: Iterable[Any], line: Callable[[Any], str], none: str, *, as_json: bool) -> None:
    """Write each row to stdout, as JSON or as its line; for an empty list people read the text `none` on stderr."""
    if as_json:
        for row in rows:
            write_record(row)
    else:
        write_lines(map(line, rows), none)


def write_record(value: object) -> None:
    """Write a value to stdout as one line of JSON."""
    import msgspec

    write_json(msgspec.json.encode(value) + b"\n")


def write_json(data: bytes) -> None:
    """Write JSON to stdout; on a terminal with escapes for the characters that a terminal acts on."""
    if os.isatty(STDOUT):
        import json

        data = re.sub(UNPRINTABLE, lambda found: json.dumps(found[0])[1:-1], data.decode()).encode()
    write_bytes(data)


def complain(text: str) -> None:
    """Write to stderr; a failure there has no reader."""
    with suppress(OSError):
        write_to(STDERR, text.encode("utf-8", "backslashreplace"))


def note(text: object) -> None:
    """Write a foreign text to stderr as one line."""
    complain(one_line(text) + "\n")


def error(fault: BackplaneError) -> None:
    """Write an error to stderr: code and fact, evidence line by line, next step."""
    red, plain = ("\x1b[31m", "\x1b[0m") if is_coloured(STDERR) else ("", "")
    theirs = f" (its own code: {one_line(fault.foreign_code)})" if fault.foreign_code else ""
    evidence = (fault.evidence or "").strip().splitlines()[-EVIDENCE_LINES_MAX:]
    lines = [f"{red}{fault.code}{plain}{theirs}: {one_line(fault.message)}"]
    lines += ["  " + one_line(line, keep="end") for line in evidence]
    lines += ["  " + one_line(fault.hint)] if fault.hint else []
    complain("\n".join(lines) + "\n")


def wrong(fact: str, hint: str, code: str = "config_invalid") -> ConfigError:
    """Return the error for a value, file or setting that cannot be used."""
    from backplane.errors import ConfigError  # It loads msgspec, which `--help` and `version` do without.

    return ConfigError(code, fact, hint=hint)


def read_input(name: str, bytes_max: int = INPUT_BYTES_MAX) -> bytes:
    """Read a file, or stdin for `-`. Raises ConfigError: `config_invalid`, it cannot be read or is too long."""
    try:
        with open(STDIN if name == "-" else name, "rb", closefd=name != "-") as file:
            is_over = os.fstat(file.fileno()).st_size > bytes_max
            data = b"" if is_over else file.read(bytes_max + 1)
    except (OSError, ValueError) as fault:
        why = getattr(fault, "strerror", None) or fault
        raise wrong(f"{source(name)} cannot be read: {why}", "name a file that this user can read") from fault
    if is_over or len(data) > bytes_max:
        raise wrong(f"{source(name)} is over {bytes_max} bytes", "give a smaller file")
    return data


def read_text(name: str, bytes_max: int = INPUT_BYTES_MAX) -> str:
    """Read a file of UTF-8 text, or stdin for `-`; raises as `read_input`."""
    try:
        return read_input(name, bytes_max).decode()
    except UnicodeDecodeError as fault:
        raise wrong(f"{source(name)} is not UTF-8 text", "convert the text to UTF-8") from fault


def source(name: str) -> str:
    """Return the name of an input in words."""
    return "stdin" if name == "-" else one_line(name) or "''"


def folder() -> Path:
    """Return the folder that the command was started in. Raises ConfigError: `config_invalid`, it was removed."""
    from pathlib import Path

    try:
        return Path.cwd()
    except OSError as fault:
        raise wrong(f"the current folder cannot be used: {fault.strerror}", "cd to a folder that exists") from fault


is_terminal: Final = os.isatty


def is_interactive() -> bool:
    """Return True if a person can read a question and answer it."""
    return os.isatty(STDIN) and (os.isatty(STDOUT) or os.isatty(STDERR))


def is_painted(fd: int) -> bool:
    """Return True for a terminal whose lines may be painted over: not for CI logs, nor for a screen reader."""
    return _takes_escapes(fd) and not (os.environ.get("CI") or os.environ.get("ACCESSIBLE"))


def is_coloured(fd: int) -> bool:
    """Return True if colours are wanted, by NO_COLOR and FORCE_COLOR, else on a terminal that is not dumb."""
    if os.environ.get("NO_COLOR"):
        return False
    return os.environ.get("FORCE_COLOR", "0") != "0" or _takes_escapes(fd)


def _takes_escapes(fd: int) -> bool:
    return os.isatty(fd) and os.environ.get("TERM", "dumb") != "dumb"


def size() -> tuple[int, int]:
    """Return columns and rows of the terminal on stdout (default: 80 and 24)."""
    with suppress(OSError):
        columns, rows = os.get_terminal_size(STDOUT)
        return columns or 80, rows or 24
    return 80, 24


def protocol_output() -> int:
    """Return a descriptor of stdout for a protocol's messages, and send all other output to stderr from now on.

    A stray print of a library would be a broken message.
    """
    stdout = os.dup(1)
    os.dup2(2, 1)
    mode = os.fstat(stdout).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):  # A terminal's description is shared with the shell.
        os.set_blocking(stdout, False)
    return stdout
