"""Standard input, output and error as bytes: the only place that writes to them.

Text goes out as UTF-8 whatever the locale says, foreign text with its control characters
escaped. A reader who went away is an exception of its own and never a message.
"""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import stat
from typing import TYPE_CHECKING, Any, Final, TypeVar

from backplane.view.text import SHOWN_CHARS_MAX, UNPRINTABLE
from backplane.view.text import one_line as one_line
from backplane.view.text import printable as printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from backplane.errors import BackplaneError

T = TypeVar("T")

STDIN, STDOUT, STDERR = 0, 1, 2

INPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Largest input file: four times the longest line of the protocol, so that any receipt on one line fits."""

WRITE_BYTES: Final = 4096
"""Written at once to a pipe that said it has room: the size for which poll promises that the write does not wait."""

CODE_CHARS_MAX: Final = 60
"""Longest code of a host's own in an error's line: twice the longest of the contract's."""

DESCRIPTORS_MIN: Final = 32
"""Open files that one run may need at a time: 24 were seen, and importing takes one more now and then."""


class ReaderGone(Exception):
    """Nobody reads stdout any more."""


def repair() -> None:
    """Put right how we were started.

    A closed standard descriptor gets the null device, so that no file opened later takes its number. Ends of children
    are wanted, as where they are ignored nobody can wait for one.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDONLY if fd == STDIN else os.O_WRONLY)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)


class Interrupts:
    """While the block runs, SIGTERM and SIGHUP are what Ctrl-C is: everything under way is put right, then it ends.

    Without it they would end us at once, and folders for temporary files would stay. What waits for signals itself
    (a run, a server) takes them over meanwhile.
    """

    def __init__(self) -> None:
        self.number: int = signal.SIGINT
        """Of the signal that counts."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGTERM, signal.SIGHUP):
            # Whoever started us with a signal ignored (nohup) wants it so.
            if signal.getsignal(number) is signal.SIG_DFL:
                try:
                    self._before[number] = signal.signal(number, self._interrupt)
                except ValueError:  # Not in the main thread: then they are not ours.
                    break
        return self

    def _interrupt(self, number: int, frame: object) -> None:
        for other in self._before:  # The end that is under way is not to be cut off.
            signal.signal(other, signal.SIG_IGN)
        self.number = number
        by_hand = signal.getsignal(signal.SIGINT)
        if not callable(by_hand):  # Ignored, as for a shell's job in the background.
            raise KeyboardInterrupt
        by_hand(signal.SIGINT, frame)  # type: ignore[arg-type]  # a frame, or None as here

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)


def write(text: str) -> None:
    """Write text of ours (or already made printable) to stdout.

    Raises:
        ReaderGone: stdout's reader went away.
    """
    write_bytes(text.encode("utf-8", "backslashreplace"))


def write_lines(lines: Iterable[str], none: str) -> None:
    """Write each line to stdout; where there are none, say `none` on stderr."""
    empty = True
    for line in lines:
        write(line + "\n")
        empty = False
    if empty:
        complain(none + "\n")


def write_rows(rows: Iterable[T], line: Callable[[T], str], none: str, *, as_json: bool) -> None:
    """Write each row to stdout as JSON or as its line; where there are none, people read `none` on stderr."""
    if not as_json:
        write_lines(map(line, rows), none)
        return
    for row in rows:
        write_record(row)


def write_bytes(data: bytes) -> None:
    """Write all of it to stdout, waiting where the reader is slow."""
    try:
        write_to(STDOUT, data)
    except OSError as error:
        raise gone(error) from error


def write_to(fd: int, data: bytes) -> None:
    """Write all of it to a descriptor, waiting where the reader is slow. Raises OSError."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])


def write_record(value: object) -> None:
    """Write a value to stdout as one line of JSON."""
    import msgspec

    write_json(msgspec.json.encode(value) + b"\n")


def write_json(data: bytes) -> None:
    """Write JSON to stdout; on a terminal with what that would act on as escapes of JSON, which say the same."""
    if os.isatty(STDOUT):
        data = re.sub(UNPRINTABLE, _escaped_in_json, data.decode()).encode()
    write_bytes(data)


def _escaped_in_json(match: re.Match[str]) -> str:
    return "".join(f"\\u{unit:04x}" for unit in memoryview(match[0].encode("utf-16", "surrogatepass")[2:]).cast("H"))


def gone(error: OSError) -> Exception:
    """What a failed write to stdout means."""
    if error.errno in (errno.EPIPE, errno.ECONNRESET):
        return ReaderGone()
    from backplane.errors import BackendError

    name = errno.errorcode.get(error.errno or 0, "EIO")
    return BackendError("stream_closed", f"stdout cannot be written: {name} ({error.strerror})")


def complain(text: str) -> None:
    """Write to stderr; when that fails there is nobody left to tell."""
    view = memoryview(text.encode("utf-8", "backslashreplace"))
    try:
        while view:
            view = view[os.write(STDERR, view) :]
    except OSError:
        return


def note(text: object) -> None:
    """Write a foreign text to stderr as one line."""
    complain(one_line(text) + "\n")


def error(fault: BackplaneError) -> None:
    """Say an error on stderr: code and fact, evidence line by line, next step."""
    red, plain = ("\x1b[31m", "\x1b[0m") if is_coloured(STDERR) else ("", "")
    theirs = f" (its own code: {one_line(fault.foreign_code, CODE_CHARS_MAX)})" if fault.foreign_code else ""
    lines = [f"{red}{fault.code}{plain}{theirs}: {one_line(fault.message)}"]
    if fault.evidence and fault.evidence.strip():
        lines += ["  " + one_line(line) for line in _end_of(fault.evidence.strip()).splitlines()]
    if fault.hint:
        lines.append("  " + one_line(fault.hint))
    complain("\n".join(lines) + "\n")


def _end_of(text: str) -> str:
    """The end of a long text of evidence, from the beginning of a line or of what follows a semicolon."""
    if len(text) <= SHOWN_CHARS_MAX:
        return text
    end = text[-SHOWN_CHARS_MAX:]
    begins = re.search(r"; |\n", end)
    return "… " + (end[begins.end() :] if begins is not None else end)


def read_input(name: str, bytes_max: int = INPUT_BYTES_MAX) -> bytes:
    """Read a file, or stdin for `-`.

    Raises:
        ConfigError: `config_invalid`, it cannot be read or is over `bytes_max`.
    """
    from backplane.errors import ConfigError

    shown = source(name)
    try:
        with open(STDIN if name == "-" else name, "rb", closefd=name != "-") as file:
            facts = os.fstat(file.fileno())
            if stat.S_ISCHR(facts.st_mode):  # Some have no end.
                bytes_max = min(bytes_max, INPUT_BYTES_MAX)
            too_long = stat.S_ISREG(facts.st_mode) and facts.st_size > bytes_max
            data = b"" if too_long else file.read(bytes_max + 1)
    except (OSError, ValueError) as fault:
        why = getattr(fault, "strerror", None) or fault
        hint = None if name == "-" else "name a file that is there and that this user can read"
        raise ConfigError("config_invalid", f"{shown} cannot be read: {why}", hint=hint) from fault
    if too_long or len(data) > bytes_max:
        raise ConfigError("config_invalid", f"{shown} is over {bytes_max} bytes")
    return data


def source(name: str) -> str:
    """What to call an input in words."""
    return "stdin" if name == "-" else one_line(name) or "''"


def count(number: int, noun: str) -> str:
    """A number with its noun, as `1 file` and `2 files`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def folder() -> Path:
    """The folder we were started in.

    Raises:
        ConfigError: `config_invalid`, it was removed.
    """
    from pathlib import Path

    from backplane.errors import ConfigError

    try:
        return Path.cwd()
    except OSError as fault:
        fact = f"the folder this was started in cannot be used: {fault.strerror}"
        raise ConfigError("config_invalid", fact, hint="cd to a folder that is there") from fault


def require_descriptors() -> None:
    """Have enough of them for a run, by raising our own limit as far as it goes.

    Raises:
        BackendError: `backend_unavailable`, the hard limit is too low.
    """
    import resource

    from backplane.errors import BackendError

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= DESCRIPTORS_MIN or soft == resource.RLIM_INFINITY:
        return
    if hard < DESCRIPTORS_MIN and hard != resource.RLIM_INFINITY:
        fact = f"a run needs {DESCRIPTORS_MIN} open files, {hard} are allowed"
        raise BackendError("backend_unavailable", fact, hint="raise the limit (ulimit -n)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS_MIN, hard))


def is_terminal(fd: int) -> bool:
    """Whether a person may sit there."""
    return os.isatty(fd)


def is_painted(fd: int) -> bool:
    """Whether a terminal is there whose lines may be painted over: not in CI logs, and not for a screen reader."""
    watched = not (os.environ.get("CI") or os.environ.get("ACCESSIBLE"))
    return watched and os.isatty(fd) and os.environ.get("TERM", "dumb") != "dumb"


def is_coloured(fd: int) -> bool:
    """Whether colours are wanted there, by NO_COLOR, FORCE_COLOR, else by what is there."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") != "0":
        return True
    return os.isatty(fd) and os.environ.get("TERM", "dumb") != "dumb"


def is_interactive() -> bool:
    """Whether a person sits there who can be asked and can answer."""
    return os.isatty(STDIN) and (os.isatty(STDOUT) or os.isatty(STDERR))


def rows() -> int:
    """Height of the terminal on stdout; 24 where there is none."""
    try:
        return os.get_terminal_size(STDOUT).lines or 24
    except OSError:
        return 24


def columns() -> int:
    """Width of the terminal on stdout; 80 where there is none."""
    try:
        return os.get_terminal_size(STDOUT).columns or 80
    except OSError:
        return 80
