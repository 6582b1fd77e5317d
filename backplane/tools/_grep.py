"""Searches the lines of files; a program of its own, because only a process can be stopped.

Reads what to search for as JSON from stdin and prints `file:line:text`. Imports nothing of the package.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys

FILE_BYTES_MAX = 8 * 1024 * 1024
LINE_CHARS_MAX = 400
"""Most characters of a line that are printed; minified files have lines of megabytes."""
SNIFFED_BYTES = 8192


def content(path: str) -> bytes:
    """Return the bytes of a text file; empty for a file that is no text, no regular file, or too large."""
    # Non-blocking, because opening a pipe waits for a writer. A link may lead out of the workspace.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        seen = os.fstat(file.fileno())
        if not stat.S_ISREG(seen.st_mode) or seen.st_size > FILE_BYTES_MAX:
            return b""
        data = file.read(FILE_BYTES_MAX)
    return b"" if b"\0" in data[:SNIFFED_BYTES] else data


def say(line: str) -> None:
    sys.stdout.buffer.write(line.encode("utf-8", "backslashreplace") + b"\n")


def main() -> None:
    asked = json.load(sys.stdin.buffer)
    try:
        pattern = re.compile(asked["pattern"], re.IGNORECASE if asked["ignore_case"] else 0)
    except (re.error, OverflowError, RecursionError) as error:
        say(f"the pattern cannot be read: {error}")
        sys.exit(2)
    left = asked["matches_max"]
    for name in asked["files"]:
        try:
            text = content(os.path.join(asked["root"], name)).decode("utf-8", "replace")
        except OSError:
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if pattern.search(line):
                if not left:
                    say(f"[more than {asked['matches_max']} lines match; narrow the pattern]")
                    return
                left -= 1
                say(f"{name}:{number}:{line[:LINE_CHARS_MAX]}")


if __name__ == "__main__":
    main()
